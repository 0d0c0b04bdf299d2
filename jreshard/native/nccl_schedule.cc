#include "nccl_schedule.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace jreshard {
namespace {

// A message costs some 5 µs, two copies within a device some 2 µs: smaller boxes are cheaper by way of the slots.
constexpr int64_t kSmallBytes = 256 << 10;
// Operations of one rank in a group. Tens of thousands were seen to hang.
constexpr int kMostOperations = 1024;

// Part of a box that travels in one piece.
struct Piece {
  Copy copy;
  int index;  // among the pieces of its box
  bool src_staged;
  bool dst_staged;
};

bool is_dense(const Copy& copy, int64_t Dim::* stride) {
  int64_t expected = copy.run;
  for (size_t d = copy.dims.size(); d-- > 0;) {
    if (copy.dims[d].*stride != expected) return false;
    expected *= copy.dims[d].extent;
  }
  return true;
}

// Gives the strides of one side to a row-major packing of the box.
void make_dense(Copy& copy, int64_t Dim::* stride) {
  int64_t expected = copy.run;
  for (size_t d = copy.dims.size(); d-- > 0;) {
    copy.dims[d].*stride = expected;
    expected *= copy.dims[d].extent;
  }
}

Copy shifted(Copy copy, int64_t src, int64_t dst) {
  copy.src_offset += src;
  copy.dst_offset += dst;
  return copy;
}

// Appends boxes of at most `most` bytes that make up `copy`, cut along the outermost dim where that will do.
void split(const Copy& copy, int64_t most, std::vector<Copy>& out) {
  if (copy.bytes() <= most) {
    out.push_back(copy);
    return;
  }
  if (copy.dims.empty()) {
    for (int64_t at = 0; at < copy.run; at += most) {
      Copy part = shifted(copy, at, at);
      part.run = std::min(most, copy.run - at);
      out.push_back(part);
    }
    return;
  }
  const Dim outer = copy.dims.front();
  const int64_t slices = std::max<int64_t>(1, most / (copy.bytes() / outer.extent));
  for (int64_t at = 0; at < outer.extent; at += slices) {
    Copy part = shifted(copy, at * outer.src_stride, at * outer.dst_stride);
    part.dims.front().extent = std::min(slices, outer.extent - at);
    if (part.dims.front().extent > 1) {
      out.push_back(part);
      continue;
    }
    part.dims.erase(part.dims.begin());
    split(part, most, out);
  }
}

// The pieces of all boxes of one leaf that go from one rank to another, in an order that spreads the ranks: first the
// first pieces of all boxes to the next rank, then those to the next but one.
std::vector<Piece> pieces_of(const CopyPlan& plan, int leaf, int64_t slot_bytes) {
  const int ranks = plan.num_ranks();
  std::vector<Piece> pieces;
  for (int dst = 0; dst < ranks; ++dst) {
    for (const Copy& copy : plan.copies(leaf, dst)) {
      if (copy.src_rank == dst) continue;
      const bool small = copy.bytes() < kSmallBytes;
      const bool src_staged = small || !is_dense(copy, &Dim::src_stride);
      const bool dst_staged = small || !is_dense(copy, &Dim::dst_stride);
      std::vector<Copy> parts;
      if (src_staged || dst_staged) {
        split(copy, slot_bytes, parts);
      } else {
        parts.push_back(copy);
      }
      int index = 0;
      for (Copy& part : parts) pieces.push_back({std::move(part), index++, src_staged, dst_staged});
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(), [&](const Piece& a, const Piece& b) {
    const auto key = [&](const Piece& p) {
      return std::tuple(p.index, (p.copy.dst_rank - p.copy.src_rank + ranks) % ranks, p.copy.src_rank);
    };
    return key(a) < key(b);
  });
  return pieces;
}

// How full the latest wave of one side of one rank is.
class Side {
 public:
  int wave() const { return wave_; }
  bool fits(int wave, int64_t staged, int64_t slot_bytes) const {
    return wave > wave_ || (staged_ + staged <= slot_bytes && operations_ < kMostOperations);
  }
  void add(int wave, int64_t staged) {
    if (wave > wave_) staged_ = operations_ = 0;
    wave_ = wave;
    staged_ += staged;
    ++operations_;
  }

 private:
  int wave_ = 0;
  int64_t staged_ = 0;
  int64_t operations_ = 0;
};

// A piece with its leaf, as one end of it is noted.
struct Placed {
  int leaf;
  const Piece* piece;
};

// Whether the piece may share a message with its neighbours: it passes through slots on both sides.
bool merges(const Piece& piece) { return piece.src_staged && piece.dst_staged; }

// Appends the message of a piece, which `staged` says is in the slot at `at` on this side.
void add_message(std::vector<NcclSchedule::Message>& out, int peer, const Placed& placed, bool staged, int64_t offset,
                 bool merge) {
  const int64_t bytes = placed.piece->copy.bytes();
  if (merge && !out.empty() && out.back().peer == peer) {
    out.back().bytes += bytes;
  } else {
    out.push_back({peer, staged ? -1 : placed.leaf, offset, bytes});
  }
}

// The sending or the receiving half of a wave on one rank. `placed` is sorted by peer.
int64_t finish(const std::vector<Placed>& placed, bool sending, std::vector<NcclSchedule::Message>& messages,
               std::vector<NcclSchedule::Staged>& copies) {
  int64_t slot = 0;
  bool merged_before = false;
  for (const Placed& p : placed) {
    const Copy& copy = p.piece->copy;
    const bool staged = sending ? p.piece->src_staged : p.piece->dst_staged;
    const bool merge = merges(*p.piece);
    const int peer = sending ? copy.dst_rank : copy.src_rank;
    const int64_t offset = staged ? slot : sending ? copy.src_offset : copy.dst_offset;
    add_message(messages, peer, p, staged, offset, merge && merged_before);
    merged_before = merge;
    if (!staged) continue;
    Copy to_slot = copy;
    (sending ? to_slot.dst_offset : to_slot.src_offset) = slot;
    make_dense(to_slot, sending ? &Dim::dst_stride : &Dim::src_stride);
    copies.push_back({p.leaf, std::move(to_slot)});
    slot += copy.bytes();
  }
  return slot;
}

}  // namespace

NcclSchedule::NcclSchedule(const CopyPlan& plan, const std::vector<bool>& local, int64_t slot_bytes)
    : num_ranks_(plan.num_ranks()), waves_(static_cast<size_t>(plan.num_chunks()) * plan.num_ranks()) {
  std::vector<std::vector<Piece>> templates(plan.num_templates());
  for (int chunk = 0; chunk < plan.num_chunks(); ++chunk) {
    std::vector<Side> sends(num_ranks_), receives(num_ranks_);
    // [rank], by wave: what the rank sends and receives.
    std::vector<std::map<int, std::vector<Placed>>> sent(num_ranks_), received(num_ranks_);
    for (int leaf = plan.chunk_begin(chunk); leaf < plan.chunk_end(chunk); ++leaf) {
      std::vector<Piece>& pieces = templates[plan.template_of(leaf)];
      if (pieces.empty()) pieces = pieces_of(plan, leaf, slot_bytes);
      for (const Piece& piece : pieces) {
        const int src = piece.copy.src_rank, dst = piece.copy.dst_rank;
        const int64_t out = piece.src_staged ? piece.copy.bytes() : 0, in = piece.dst_staged ? piece.copy.bytes() : 0;
        int wave = std::max(sends[src].wave(), receives[dst].wave());
        while (!sends[src].fits(wave, out, slot_bytes) || !receives[dst].fits(wave, in, slot_bytes)) ++wave;
        sends[src].add(wave, out);
        receives[dst].add(wave, in);
        if (local[src]) sent[src][wave].push_back({leaf, &piece});
        if (local[dst]) received[dst][wave].push_back({leaf, &piece});
      }
    }
    for (int rank = 0; rank < num_ranks_; ++rank) {
      std::map<int, Wave> waves;
      for (auto& [wave, placed] : sent[rank]) {
        std::stable_sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
          return a.piece->copy.dst_rank < b.piece->copy.dst_rank;
        });
        staged_bytes_ = std::max(staged_bytes_, finish(placed, true, waves[wave].sends, waves[wave].pack));
      }
      for (auto& [wave, placed] : received[rank]) {
        std::stable_sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
          return a.piece->copy.src_rank < b.piece->copy.src_rank;
        });
        staged_bytes_ = std::max(staged_bytes_, finish(placed, false, waves[wave].receives, waves[wave].unpack));
      }
      for (auto& [wave, done] : waves) waves_[chunk * num_ranks_ + rank].push_back(std::move(done));
    }
  }
}

}  // namespace jreshard
