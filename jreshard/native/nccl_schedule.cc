#include "nccl_schedule.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace jreshard {
namespace {

// A message costs some 5 µs, two copies within a device some 2 µs: smaller boxes are cheaper by way of the slots.
constexpr int64_t kSmallBytes = 256 << 10;
// Messages of one side of one rank in a group: 400 of 20 MiB took 25.5 ms in groups of 8, 26.0 in groups of 64 and 28.4
// in one (two H200); tens of thousands were seen to hang.
constexpr int kMostMessages = 64;
// Boxes that share a message, few enough that the next are packed meanwhile.
constexpr int kMostPieces = 256;

// Part of a box that travels in one piece.
struct Piece {
  Copy copy;
  int index;  // among the pieces of its box
  bool src_staged;
  bool dst_staged;

  // Whether it may share a message with its neighbours: it passes through slots on both sides.
  bool merges() const { return src_staged && dst_staged; }
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
  bool fits(int wave, const Piece& piece, int64_t staged, int64_t slot_bytes) const {
    if (wave > wave_) return true;
    return staged_ + staged <= slot_bytes && (piece.merges() ? pieces_ < kMostPieces : messages_ < kMostMessages);
  }
  void add(int wave, const Piece& piece, int64_t staged) {
    if (wave > wave_) {
      staged_ = 0;
      messages_ = pieces_ = 0;
    }
    wave_ = wave;
    staged_ += staged;
    ++(piece.merges() ? pieces_ : messages_);
  }

 private:
  int wave_ = 0;
  int64_t staged_ = 0;
  int messages_ = 0;
  int pieces_ = 0;
};

// The end of a piece at which a rank stands.
enum class End { kSender, kReceiver };

// A piece with its leaf, as one end of it is noted.
struct Placed {
  int leaf;
  const Piece* piece;

  bool staged(End end) const { return end == End::kSender ? piece->src_staged : piece->dst_staged; }
  int peer(End end) const { return end == End::kSender ? piece->copy.dst_rank : piece->copy.src_rank; }
  int64_t offset(End end) const { return end == End::kSender ? piece->copy.src_offset : piece->copy.dst_offset; }
};

using PlacedByWave = std::map<int, std::vector<Placed>>;

// Places the pieces of one chunk in waves, and notes what the local ranks have to do with them.
class Placement {
 public:
  Placement(const std::vector<bool>& local, int64_t slot_bytes)
      : local_(local),
        slot_bytes_(slot_bytes),
        sends_(local.size()),
        receives_(local.size()),
        sent_(local.size()),
        received_(local.size()) {}

  // Into the first wave with room on both sides, but none before the latest of either: pieces keep their order.
  void add(int leaf, const Piece& piece) {
    const int src = piece.copy.src_rank, dst = piece.copy.dst_rank;
    const int64_t out = piece.src_staged ? piece.copy.bytes() : 0, in = piece.dst_staged ? piece.copy.bytes() : 0;
    int wave = std::max(sends_[src].wave(), receives_[dst].wave());
    while (!sends_[src].fits(wave, piece, out, slot_bytes_) || !receives_[dst].fits(wave, piece, in, slot_bytes_))
      ++wave;
    sends_[src].add(wave, piece, out);
    receives_[dst].add(wave, piece, in);
    if (local_[src]) sent_[src][wave].push_back({leaf, &piece});
    if (local_[dst]) received_[dst][wave].push_back({leaf, &piece});
  }
  PlacedByWave& at(int rank, End end) { return end == End::kSender ? sent_[rank] : received_[rank]; }

 private:
  const std::vector<bool>& local_;
  const int64_t slot_bytes_;
  std::vector<Side> sends_, receives_;
  std::vector<PlacedByWave> sent_, received_;  // [rank]
};

// Lets a piece join the message before, or gives it one of its own.
void add_message(std::vector<NcclSchedule::Message>& out, const Placed& placed, End end, int64_t slot_offset,
                 bool join) {
  const int64_t bytes = placed.piece->copy.bytes();
  const int peer = placed.peer(end);
  if (join && !out.empty() && out.back().peer == peer) {
    out.back().bytes += bytes;
  } else if (placed.staged(end)) {
    out.push_back({peer, -1, slot_offset, bytes});
  } else {
    out.push_back({peer, placed.leaf, placed.offset(end), bytes});
  }
}

// The copy of a staged piece between its array and the slot.
Copy slot_copy(Copy copy, End end, int64_t slot_offset) {
  (end == End::kSender ? copy.dst_offset : copy.src_offset) = slot_offset;
  make_dense(copy, end == End::kSender ? &Dim::dst_stride : &Dim::src_stride);
  return copy;
}

// The sending or the receiving half of a wave on one rank, peer by peer.
void add_half(std::vector<Placed>& placed, End end, std::vector<NcclSchedule::Message>& messages,
              std::vector<NcclSchedule::Staged>& copies) {
  std::stable_sort(placed.begin(), placed.end(),
                   [end](const Placed& a, const Placed& b) { return a.peer(end) < b.peer(end); });
  int64_t slot = 0;
  bool merged_before = false;
  for (const Placed& p : placed) {
    add_message(messages, p, end, slot, p.piece->merges() && merged_before);
    merged_before = p.piece->merges();
    if (!p.staged(end)) continue;
    copies.push_back({p.leaf, slot_copy(p.piece->copy, end, slot)});
    slot += p.piece->copy.bytes();
  }
}

// The waves in which a rank has a part.
std::vector<NcclSchedule::Wave> waves_of(int rank, Placement& placement) {
  std::map<int, NcclSchedule::Wave> by_number;
  for (auto& [number, placed] : placement.at(rank, End::kSender)) {
    NcclSchedule::Wave& wave = by_number[number];
    add_half(placed, End::kSender, wave.sends, wave.pack);
  }
  for (auto& [number, placed] : placement.at(rank, End::kReceiver)) {
    NcclSchedule::Wave& wave = by_number[number];
    add_half(placed, End::kReceiver, wave.receives, wave.unpack);
  }
  std::vector<NcclSchedule::Wave> waves;
  for (auto& [number, wave] : by_number) waves.push_back(std::move(wave));
  return waves;
}

int64_t bytes_of(const std::vector<NcclSchedule::Staged>& copies) {
  int64_t bytes = 0;
  for (const NcclSchedule::Staged& s : copies) bytes += s.copy.bytes();
  return bytes;
}

}  // namespace

NcclSchedule::NcclSchedule(const CopyPlan& plan, const std::vector<bool>& local, int64_t slot_bytes)
    : num_ranks_(plan.num_ranks()), waves_(static_cast<size_t>(plan.num_chunks()) * plan.num_ranks()) {
  if (plan.num_phases() > 1) throw std::invalid_argument("copies in several phases cannot be carried out over NCCL");
  std::vector<std::vector<Piece>> by_template(plan.num_templates());
  for (int chunk = 0; chunk < plan.num_chunks(); ++chunk) {
    Placement placement(local, slot_bytes);
    for (int leaf = plan.chunk_begin(chunk); leaf < plan.chunk_end(chunk); ++leaf) {
      std::vector<Piece>& pieces = by_template[plan.template_of(leaf)];
      if (pieces.empty()) pieces = pieces_of(plan, leaf, slot_bytes);
      for (const Piece& piece : pieces) placement.add(leaf, piece);
    }
    for (int rank = 0; rank < num_ranks_; ++rank) waves_[chunk * num_ranks_ + rank] = waves_of(rank, placement);
  }
  for (const std::vector<Wave>& waves : waves_) {
    for (const Wave& wave : waves)
      staged_bytes_ = std::max({staged_bytes_, bytes_of(wave.pack), bytes_of(wave.unpack)});
  }
}

}  // namespace jreshard
