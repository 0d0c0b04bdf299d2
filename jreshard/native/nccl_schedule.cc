#include "nccl_schedule.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "nccl_limits.h"
#include "nccl_pieces.h"

namespace jreshard {
namespace {

// How full the latest wave of one side of one rank is with pieces of one phase.
class Side {
 public:
  int wave() const { return wave_; }
  bool fits(int wave, const Piece& piece, int64_t staged, const Limits& limits) const {
    if (wave > wave_ || bytes_ == 0) return true;
    if (staged_ + staged > limits.slot_bytes || piece.copy.bytes() > limits.wave_bytes - bytes_) return false;
    return piece.merges() ? pieces_ < limits.pieces : messages_ < limits.messages;
  }
  void add(int wave, const Piece& piece, int64_t staged) {
    if (wave > wave_) {
      staged_ = bytes_ = 0;
      messages_ = pieces_ = 0;
    }
    wave_ = wave;
    staged_ += staged;
    bytes_ += piece.copy.bytes();
    ++(piece.merges() ? pieces_ : messages_);
  }

 private:
  int wave_ = 0;
  int64_t staged_ = 0;
  int64_t bytes_ = 0;
  int messages_ = 0;
  int pieces_ = 0;
};

// The end of a piece at which a rank stands.
enum class End { kSender, kReceiver };

constexpr int kNever = -2;  // no wave, and none for which another would have to wait

// The last waves in which a rank got something of a leaf: straight into the array, and by way of a slot.
struct Arrival {
  int direct = kNever;
  int unpacked = kNever;

  // The first wave in which the rank may send a piece of it.
  int free_from(const Piece& piece) const { return std::max(unpacked + 2, piece.src_staged ? direct + 2 : direct + 1); }
  // The wave after which it can be sent or packed, where the order of the groups does not see to that.
  int awaited(const Piece& piece) const { return piece.src_staged ? std::max(direct, unpacked) : unpacked; }
};

// A piece with its leaf, as one end of it is noted.
struct Placed {
  int leaf;
  const Piece* piece;
  int awaited;  // the wave of the sender before whose end it cannot be packed or sent, or kNever

  bool staged(End end) const { return end == End::kSender ? piece->src_staged : piece->dst_staged; }
  int peer(End end) const { return end == End::kSender ? piece->copy.dst_rank : piece->copy.src_rank; }
  int64_t offset(End end) const { return end == End::kSender ? piece->copy.src_offset : piece->copy.dst_offset; }
  bool passed_on(End end) const { return end == End::kSender && piece->copy.phase > 0; }
};

using PlacedByWave = std::map<int, std::vector<Placed>>;

// Places the pieces of one chunk in waves, and notes what the local ranks have to do with them.
class WavePlacer {
 public:
  WavePlacer(const std::vector<bool>& local, const std::vector<Limits>& limits)
      : local_(local),
        limits_(limits),
        sends_(limits.size(), std::vector<Side>(local.size())),
        receives_(sends_),
        arriving_(local.size()),
        arrived_(local.size()),
        sent_(local.size()),
        received_(local.size()) {}

  // The pieces of a leaf in the order of their phases.
  void add(int leaf, const std::vector<Piece>& pieces) {
    for (auto first = pieces.begin(); first != pieces.end();) {
      const int phase = first->copy.phase;
      const auto last = std::find_if(first, pieces.end(), [phase](const Piece& p) { return p.copy.phase != phase; });
      std::for_each(first, last, [&](const Piece& piece) { place(leaf, piece); });
      for (; first != last; ++first) arrived_[first->copy.dst_rank] = arriving_[first->copy.dst_rank];
    }
    for (const Piece& piece : pieces) arriving_[piece.copy.dst_rank] = arrived_[piece.copy.dst_rank] = {};
  }
  PlacedByWave& at(int rank, End end) { return end == End::kSender ? sent_[rank] : received_[rank]; }

 private:
  // Into the first wave with room on both sides, but none before the latest of either: the pieces of a phase keep their
  // order. And none before what it reads has arrived.
  void place(int leaf, const Piece& piece) {
    const int src = piece.copy.src_rank, dst = piece.copy.dst_rank, phase = piece.copy.phase;
    const int64_t out = piece.src_staged ? piece.copy.bytes() : 0, in = piece.dst_staged ? piece.copy.bytes() : 0;
    const Arrival read = phase > 0 ? arrived_[src] : Arrival{};
    Side &sender = sends_[phase][src], &receiver = receives_[phase][dst];
    int wave = std::max({sender.wave(), receiver.wave(), read.free_from(piece)});
    const Limits& limits = limits_[phase];
    while (!sender.fits(wave, piece, out, limits) || !receiver.fits(wave, piece, in, limits)) ++wave;
    sender.add(wave, piece, out);
    receiver.add(wave, piece, in);
    int& arrives = piece.dst_staged ? arriving_[dst].unpacked : arriving_[dst].direct;
    arrives = std::max(arrives, wave);
    if (local_[src]) sent_[src][wave].push_back({leaf, &piece, read.awaited(piece)});
    if (local_[dst]) received_[dst][wave].push_back({leaf, &piece, kNever});
  }

  const std::vector<bool>& local_;
  const std::vector<Limits>& limits_;                // [phase]
  std::vector<std::vector<Side>> sends_, receives_;  // [phase][rank]
  std::vector<Arrival> arriving_;                    // [rank], of the leaf that is being placed
  std::vector<Arrival> arrived_;                     // the same without the present phase
  std::vector<PlacedByWave> sent_, received_;        // [rank]
};

// Lets a piece join the message before, or gives it one of its own.
void add_message(std::vector<NcclSchedule::Message>& out, const Placed& placed, End end, int64_t slot_offset,
                 bool join) {
  const int64_t bytes = placed.piece->copy.bytes();
  const int peer = placed.peer(end);
  if (join && !out.empty() && out.back().peer == peer) {
    out.back().bytes += bytes;
  } else if (placed.staged(end)) {
    out.push_back({peer, -1, slot_offset, bytes, false});
  } else {
    out.push_back({peer, placed.leaf, placed.offset(end), bytes, placed.passed_on(end)});
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

// What a wave of a rank has to wait for before it passes something on. `before` is the rank's wave before that.
void set_lag(NcclSchedule::Wave& wave, const std::vector<Placed>& sent, int before) {
  int awaited = kNever;
  for (const Placed& p : sent) {
    wave.passes_on |= p.passed_on(End::kSender);
    awaited = std::max(awaited, p.awaited);
  }
  if (awaited != kNever) wave.lag = awaited == before ? 1 : 2;
}

// The waves in which a rank has a part.
std::vector<NcclSchedule::Wave> waves_of(int rank, WavePlacer& placer) {
  std::map<int, NcclSchedule::Wave> by_number;
  for (auto& [number, placed] : placer.at(rank, End::kReceiver)) {
    NcclSchedule::Wave& wave = by_number[number];
    add_half(placed, End::kReceiver, wave.receives, wave.unpack);
  }
  for (auto& [number, placed] : placer.at(rank, End::kSender)) {
    NcclSchedule::Wave& wave = by_number[number];
    add_half(placed, End::kSender, wave.sends, wave.pack);
    const auto at = by_number.find(number);
    set_lag(wave, placed, at == by_number.begin() ? kNever : std::prev(at)->first);
  }
  std::vector<NcclSchedule::Wave> waves;
  for (auto& [number, wave] : by_number) {
    waves.push_back(std::move(wave));
    if (const int lag = waves.back().lag) waves[waves.size() - 1 - lag].awaited = true;
  }
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
  const std::vector<Limits> limits = limits_of(plan, slot_bytes);
  std::vector<std::vector<Piece>> by_template(plan.num_templates());
  for (int chunk = 0; chunk < plan.num_chunks(); ++chunk) {
    WavePlacer placer(local, limits);
    for (int leaf = plan.chunk_begin(chunk); leaf < plan.chunk_end(chunk); ++leaf) {
      std::vector<Piece>& pieces = by_template[plan.template_of(leaf)];
      if (pieces.empty()) pieces = pieces_of(plan, leaf, limits);
      placer.add(leaf, pieces);
    }
    for (int rank = 0; rank < num_ranks_; ++rank) waves_[chunk * num_ranks_ + rank] = waves_of(rank, placer);
  }
  for (const std::vector<Wave>& waves : waves_) {
    for (const Wave& wave : waves)
      staged_bytes_ = std::max({staged_bytes_, bytes_of(wave.pack), bytes_of(wave.unpack)});
  }
}

}  // namespace jreshard
