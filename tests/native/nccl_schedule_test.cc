// Tests of what is sent and received over NCCL: the schedules of random plans are carried out in plain memory, rank by
// rank and wave by wave.
#include "nccl_schedule.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>

#include "check.h"
#include "copy_table.h"
#include "nccl_plans.h"

using jreshard::Copy;
using jreshard::CopyPlan;
using jreshard::NcclSchedule;

namespace {

constexpr int64_t kLarge = 256 << 10;  // boxes from this size on travel without a slot where they can
constexpr int64_t kSmallest = 3;       // slot: a byte for each phase
constexpr int64_t kHuge = int64_t{1} << 60;
constexpr size_t kMostMessages = 64, kMostPieces = 256;  // of one side in a group; pieces may share messages

using Wave = NcclSchedule::Wave;
using Locals = std::vector<bool>;

int draw(std::mt19937& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

CopyPlan parsed(const Plan& plan) {
  const Words words = plan.table.words();
  return CopyPlan(words.data(), words.size());
}

Locals all(int ranks) { return Locals(ranks, true); }

// A box of some large size, contiguous on both sides, on one, or on none.
StridedBox large_box(std::mt19937& random) {
  const int64_t run = kLarge / 8 * draw(random, 1, 4) + draw(random, 0, 3), rows = draw(random, 7, 9);
  const int kind = draw(random, 0, 4);
  if (kind == 0) return {{0, 0, 0, 0, run * rows, {}}, run * rows, run * rows};
  const int64_t src = run + (kind & 1 ? 0 : 5), dst = run + (kind & 2 ? 0 : 3);
  return {{0, 0, 0, 0, run, {{rows, src, dst}}}, src * rows, dst * rows};
}

// Boxes of every kind: tiny ones in many dims, and large ones.
Plan mixed_plan(std::mt19937& random) {
  Plan plan = random_relays(random, 6, draw(random, 1, 3));
  const auto& roles = plan.table.roles;
  const int templates = plan.table.templates.size();
  for (int t = 0; t < 2; ++t) {
    plan.add_template();
    for (int boxes = draw(random, 1, 6); boxes > 0; --boxes) {
      const int src = random() % roles.size(), dst = random() % roles.size();
      if (!(roles[src] & kSends) || !(roles[dst] & kReceives)) continue;
      const bool large = draw(random, 0, 2);
      plan.add(src, dst, large ? large_box(random) : random_box(random, draw(random, 1, 40)), draw(random, 0, 1));
    }
  }
  for (int& leaf : plan.table.leaf_template) leaf = draw(random, 0, 1) ? leaf : templates + draw(random, 0, 1);
  return plan;
}

bool equal(const Copy& a, const Copy& b) {
  const auto same_dim = [](const jreshard::Dim& x, const jreshard::Dim& y) {
    return std::tie(x.extent, x.src_stride, x.dst_stride) == std::tie(y.extent, y.src_stride, y.dst_stride);
  };
  return std::tie(a.src_rank, a.dst_rank, a.phase, a.src_offset, a.dst_offset, a.run) ==
             std::tie(b.src_rank, b.dst_rank, b.phase, b.src_offset, b.dst_offset, b.run) &&
         std::equal(a.dims.begin(), a.dims.end(), b.dims.begin(), b.dims.end(), same_dim);
}

bool equal(const Wave& a, const Wave& b) {
  const auto same_copy = [](const NcclSchedule::Staged& x, const NcclSchedule::Staged& y) {
    return x.leaf == y.leaf && equal(x.copy, y.copy);
  };
  const auto same_message = [](const NcclSchedule::Message& x, const NcclSchedule::Message& y) {
    return std::tie(x.peer, x.leaf, x.offset, x.bytes, x.passed_on) ==
           std::tie(y.peer, y.leaf, y.offset, y.bytes, y.passed_on);
  };
  const auto same = [](const auto& x, const auto& y, auto by) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), by);
  };
  const auto order = [](const Wave& w) { return std::tie(w.passes_on, w.lag, w.awaited); };
  return order(a) == order(b) && same(a.pack, b.pack, same_copy) && same(a.unpack, b.unpack, same_copy) &&
         same(a.sends, b.sends, same_message) && same(a.receives, b.receives, same_message);
}

// The slot is filled from its beginning, box after box, and its messages are made of whole boxes.
void check_slot(const std::vector<NcclSchedule::Staged>& copies, const std::vector<NcclSchedule::Message>& messages,
                bool packs, int64_t slot_bytes, int64_t staged_bytes) {
  int64_t at = 0;
  std::set<int64_t> boundaries{0};
  bool dense = true;
  for (const NcclSchedule::Staged& s : copies) {
    dense &= (packs ? s.copy.dst_offset : s.copy.src_offset) == at;
    for_each_run(s.copy, [&](int64_t src_at, int64_t dst_at) {
      dense &= (packs ? dst_at : src_at) == at;
      at += s.copy.run;
    });
    boundaries.insert(at);
  }
  CHECK(dense);
  CHECK(at <= slot_bytes && at <= staged_bytes);
  int64_t sent = 0;
  for (const NcclSchedule::Message& m : messages) {
    if (m.leaf >= 0) continue;
    CHECK(m.offset == sent && boundaries.count(sent + m.bytes));
    sent += m.bytes;
  }
  CHECK(sent == at);
}

void check_wave(const Wave& wave, int64_t slot_bytes, int64_t staged_bytes) {
  CHECK(!wave.sends.empty() || !wave.receives.empty());
  for (const auto* messages : {&wave.sends, &wave.receives}) CHECK(messages->size() <= kMostMessages + kMostPieces);
  for (const auto* copies : {&wave.pack, &wave.unpack}) CHECK(copies->size() <= kMostMessages + kMostPieces);
  check_slot(wave.pack, wave.sends, true, slot_bytes, staged_bytes);
  check_slot(wave.unpack, wave.receives, false, slot_bytes, staged_bytes);
}

// All ranks of a plan, of which each goes on to its next wave when all messages of its present one have met their other
// ends, as streams do. A wave is packed as early, and unpacked as late, as two slots and the waves' lags permit.
class Ranks {
 public:
  // Each process schedules its own part.
  Ranks(const Plan& plan, const std::vector<Locals>& processes, int64_t slot_bytes, uint32_t seed)
      : plan_(plan), parsed_(parsed(plan)), random_(seed), ranks_(parsed_.num_ranks()) {
    for (const Locals& locals : processes) {
      schedules_.emplace_back(parsed_, locals, slot_bytes);
      for (int rank = 0; rank < parsed_.num_ranks(); ++rank) {
        if (locals[rank]) ranks_[rank].schedule = schedules_.size() - 1;
      }
    }
    for (int rank = 0; rank < parsed_.num_ranks(); ++rank) {
      for (int leaf = 0; leaf < parsed_.num_leaves(); ++leaf) {
        const int kind = plan_.table.leaf_template[leaf];
        ranks_[rank].src.push_back(source_bytes(1, leaf, rank, plan_.src_bytes[kind][rank]));
        ranks_[rank].dst.emplace_back(plan_.dst_bytes[kind][rank], kPoison);
        copy_locally(rank, leaf);
      }
    }
    for (Rank& rank : ranks_) {
      const Bytes slot(schedules_[rank.schedule].staged_bytes(), kPoison);
      for (Slots& slots : rank.slots) slots = {slot, slot};
      for (int chunk = 0; chunk < parsed_.num_chunks(); ++chunk) {
        const NcclSchedule& schedule = schedules_[rank.schedule];
        for (const Wave& wave : schedule.waves(chunk, &rank - ranks_.data())) {
          check_wave(wave, slot_bytes, schedule.staged_bytes());
        }
      }
    }
  }

  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      std::vector<int> order(ranks_.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random_);
      for (int rank : order) moved |= step(rank);
    }
    for (const Rank& rank : ranks_) CHECK(rank.chunk == parsed_.num_chunks());  // else they wait in a circle
    for (const auto& [ends, channel] : channels_) CHECK(channel.sends.empty() && channel.receives.empty());
    check_arrays();
    CHECK(carried_ == bytes_to_carry());
  }

 private:
  struct Slots {
    Bytes out, in;
  };
  struct Rank {
    int schedule = -1;
    std::vector<Bytes> src, dst;  // [leaf]
    Slots slots[2];               // of waves in turn
    int chunk = 0;
    size_t wave = 0;
    size_t packed = 0, unpacked = 0;  // waves of the chunk
    bool entered = false;
    size_t left = 0;  // messages of the wave that have not met their other ends
  };
  struct End {
    int rank;
    uint8_t* data;
    int64_t bytes;
    std::pair<int, size_t> wave;
  };
  struct Channel {
    std::deque<End> sends, receives;
    std::map<std::pair<int, size_t>, std::pair<int, size_t>> wave_of;  // the receiver's by the sender's
  };

  const std::vector<Wave>& waves(int rank) const {
    return schedules_[ranks_[rank].schedule].waves(ranks_[rank].chunk, rank);
  }
  bool step(int number) {
    Rank& rank = ranks_[number];
    if (rank.chunk == parsed_.num_chunks()) return false;
    if (rank.wave == waves(number).size()) {
      unpack(number, rank.wave);
      ++rank.chunk;
      rank.wave = rank.packed = rank.unpacked = 0;
      return true;
    }
    if (!rank.entered) {
      enter(number);
      return true;
    }
    if (rank.left) return false;
    rank.entered = false;
    ++rank.wave;
    return true;
  }
  void enter(int number) {
    Rank& rank = ranks_[number];
    const Wave& wave = waves(number)[rank.wave];
    rank.entered = true;
    rank.left = wave.sends.size() + wave.receives.size();
    if (rank.wave >= 1) unpack(number, rank.wave - 1);  // the slot is used again
    if (wave.lag) await(number, rank.wave);
    pack(number, rank.wave);
    if (rank.wave + 1 < waves(number).size()) pack_ahead(number, rank.wave + 1);
    const std::pair<int, size_t> at(rank.chunk, rank.wave);
    Slots& slots = rank.slots[rank.wave % 2];
    for (const NcclSchedule::Message& m : wave.sends) {
      CHECK(!m.passed_on || wave.passes_on);
      Channel& channel = channels_[{number, m.peer}];
      Bytes& array = m.leaf < 0 ? slots.out : m.passed_on ? rank.dst[m.leaf] : rank.src[m.leaf];
      channel.sends.push_back({number, start(m, array), m.bytes, at});
      meet(channel);
    }
    for (const NcclSchedule::Message& m : wave.receives) {
      CHECK(!m.passed_on);
      Channel& channel = channels_[{m.peer, number}];
      channel.receives.push_back({number, start(m, m.leaf < 0 ? slots.in : rank.dst[m.leaf]), m.bytes, at});
      meet(channel);
    }
  }
  // What a wave's lag has it wait for: all waves up to that one are unpacked.
  void await(int number, size_t wave) {
    const size_t lag = waves(number)[wave].lag;
    if (CHECK(lag <= 2 && lag <= wave && waves(number)[wave - lag].awaited)) unpack(number, wave - lag + 1);
  }
  void pack_ahead(int number, size_t wave) {
    const int lag = waves(number)[wave].lag;
    if (lag == 1) return;
    if (lag == 2) await(number, wave);
    pack(number, wave);
  }
  void pack(int number, size_t wave) {
    Rank& rank = ranks_[number];
    for (; rank.packed <= wave; ++rank.packed) {
      const Wave& w = waves(number)[rank.packed];
      for (const NcclSchedule::Staged& s : w.pack) {
        CHECK(s.copy.phase == 0 || w.passes_on);
        copy_naively(s.copy, s.copy.phase ? rank.dst[s.leaf] : rank.src[s.leaf], rank.slots[rank.packed % 2].out);
      }
    }
  }
  void unpack(int number, size_t end) {
    Rank& rank = ranks_[number];
    for (; rank.unpacked < end; ++rank.unpacked) {
      const Bytes& slot = rank.slots[rank.unpacked % 2].in;
      for (const NcclSchedule::Staged& s : waves(number)[rank.unpacked].unpack)
        copy_naively(s.copy, slot, rank.dst[s.leaf]);
    }
  }
  static uint8_t* start(const NcclSchedule::Message& m, Bytes& array) {
    CHECK(m.bytes > 0 && m.offset >= 0 && m.offset + m.bytes <= int64_t(array.size()));
    return array.data() + m.offset;
  }
  void meet(Channel& channel) {
    if (channel.sends.empty() || channel.receives.empty()) return;
    const End from = channel.sends.front(), to = channel.receives.front();
    channel.sends.pop_front();
    channel.receives.pop_front();
    if (CHECK(from.bytes == to.bytes)) std::copy(from.data, from.data + from.bytes, to.data);
    CHECK(from.wave.first == to.wave.first);
    CHECK(channel.wave_of.emplace(from.wave, to.wave).first->second == to.wave);
    carried_ += from.bytes;
    --ranks_[from.rank].left;
    --ranks_[to.rank].left;
  }
  void copy_locally(int rank, int leaf) {
    for (const Copy& copy : parsed_.copies(leaf, rank, 0)) {
      if (copy.src_rank == rank) copy_naively(copy, ranks_[rank].src[leaf], ranks_[rank].dst[leaf]);
    }
  }
  void check_arrays() const {
    bool equal = true;
    for (int leaf = 0; leaf < parsed_.num_leaves(); ++leaf) {
      const std::vector<Bytes> expected = expected_arrays(plan_, parsed_, 1, leaf);
      for (int rank = 0; rank < parsed_.num_ranks(); ++rank) equal &= ranks_[rank].dst[leaf] == expected[rank];
    }
    CHECK(equal);
  }
  // Nothing twice: that much, and the arrays as they should be.
  int64_t bytes_to_carry() const {
    int64_t bytes = 0;
    for (int leaf = 0; leaf < parsed_.num_leaves(); ++leaf) {
      for (int rank = 0; rank < parsed_.num_ranks(); ++rank) {
        for (const Copy& copy : parsed_.copies(leaf, rank)) bytes += copy.src_rank == rank ? 0 : copy.bytes();
      }
    }
    return bytes;
  }

  const Plan& plan_;
  const CopyPlan parsed_;
  std::mt19937 random_;
  std::vector<NcclSchedule> schedules_;
  std::vector<Rank> ranks_;
  std::map<std::pair<int, int>, Channel> channels_;
  int64_t carried_ = 0;
};

// The ranks dealt out to some processes, of which some may have none.
std::vector<Locals> random_processes(std::mt19937& random, int ranks) {
  std::vector<Locals> processes(draw(random, 1, 4), Locals(ranks));
  for (int rank = 0; rank < ranks; ++rank) processes[random() % processes.size()][rank] = true;
  return processes;
}

void test_random_plans() {
  for (uint32_t seed = 1; seed <= 24; ++seed) {
    std::mt19937 random(seed);
    const Plan plan = random_relays(random, seed % 4 ? 8 : 1, draw(random, 1, 3), seed % 4 ? 4 : 16);
    for (const int64_t slot : {kSmallest, int64_t(draw(random, 4, 100)), int64_t{1000}, kHuge}) {
      Ranks(plan, random_processes(random, plan.table.roles.size()), slot, seed).run();
    }
  }
}

void test_large_and_small_boxes() {
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    std::mt19937 random(seed);
    const Plan plan = mixed_plan(random);
    for (const int64_t slot : {int64_t(draw(random, 5'000, 200'000)), kLarge * draw(random, 1, 8), kHuge}) {
      Ranks(plan, random_processes(random, plan.table.roles.size()), slot, seed).run();
    }
  }
}

void test_each_process_schedules_its_part_alike() {
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    std::mt19937 random(seed);
    const Plan plan = seed % 2 ? random_relays(random, 20, draw(random, 1, 3), 8) : mixed_plan(random);
    const CopyPlan copies = parsed(plan);
    const int64_t slot = 100 + random() % 50'000;
    const NcclSchedule whole(copies, all(copies.num_ranks()), slot);
    bool same = true;
    int64_t staged = 0;
    for (const Locals& locals : random_processes(random, copies.num_ranks())) {
      const NcclSchedule part(copies, locals, slot);
      staged = std::max(staged, part.staged_bytes());
      for (int chunk = 0; chunk < copies.num_chunks(); ++chunk) {
        for (int rank = 0; rank < copies.num_ranks(); ++rank) {
          const auto &found = part.waves(chunk, rank), &expected = whole.waves(chunk, rank);
          const auto equal_waves = [](const Wave& a, const Wave& b) { return equal(a, b); };
          same &= locals[rank] ? std::equal(found.begin(), found.end(), expected.begin(), expected.end(), equal_waves)
                               : found.empty();
        }
      }
    }
    CHECK(same && staged == whole.staged_bytes());
  }
}

// The only wave of a rank, of a plan with one leaf and one box from rank 0 to rank 1.
Wave only_wave(const StridedBox& box, int rank) {
  Plan plan(1, {kSends, kReceives});
  plan.add_template();
  plan.add(0, 1, box);
  plan.table.leaf_template = {0};
  const CopyPlan copies = parsed(plan);
  const NcclSchedule schedule(copies, all(2), kHuge);
  if (!CHECK(schedule.waves(0, rank).size() == 1)) return {};
  return schedule.waves(0, rank)[0];
}

void test_large_contiguous_boxes_are_not_staged() {
  const struct {
    StridedBox box;
    bool staged_out, staged_in;
  } cases[] = {
      {{{0, 1, 7, 9, kLarge, {}}, 0, 0}, false, false},
      {{{0, 1, 7, 9, kLarge - 1, {}}, 0, 0}, true, true},
      {{{0, 1, 7, 9, kLarge / 4, {{4, kLarge / 4, kLarge / 4}}}, 0, 0}, false, false},
      {{{0, 1, 7, 9, kLarge / 4, {{4, kLarge / 4, kLarge}}}, 0, 0}, false, true},
      {{{0, 1, 7, 9, kLarge / 4, {{4, kLarge, kLarge / 4}}}, 0, 0}, true, false},
      {{{0, 1, 7, 9, kLarge / 4, {{4, kLarge, kLarge}}}, 0, 0}, true, true},
      {{{0, 1, 7, 9, 1, {{4, kLarge / 4, kLarge / 4}, {kLarge / 4, 1, 1}}}, 0, 0}, false, false},
      {{{0, 1, 7, 9, kHuge / 4, {}}, 0, 0}, false, false},
  };
  for (const auto& c : cases) {
    const Wave sender = only_wave(c.box, 0), receiver = only_wave(c.box, 1);
    CHECK(sender.pack.size() == c.staged_out && receiver.unpack.size() == c.staged_in);
    if (!CHECK(sender.sends.size() == 1 && receiver.receives.size() == 1)) continue;
    const NcclSchedule::Message &out = sender.sends[0], &in = receiver.receives[0];
    CHECK(out.peer == 1 && out.bytes == c.box.copy.bytes() && in.peer == 0 && in.bytes == out.bytes);
    CHECK(out.leaf == (c.staged_out ? -1 : 0) && out.offset == (c.staged_out ? 0 : 7));
    CHECK(in.leaf == (c.staged_in ? -1 : 0) && in.offset == (c.staged_in ? 0 : 9));
  }
}

void test_small_boxes_share_messages() {
  // From rank 0 to each of two others: two small boxes, one large, two small ones.
  Plan plan(8, {kSends, kReceives, kReceives});
  plan.add_template();
  for (int dst : {1, 2}) plan.add(0, dst, {{0, 0, 0, 0, 10, {}}, 10, 10});
  plan.add_template();
  for (int dst : {1, 2}) plan.add(0, dst, {{0, 0, 0, 0, kLarge, {}}, kLarge, kLarge});
  plan.table.leaf_template = {0, 0, 1, 0, 0};
  const CopyPlan copies = parsed(plan);
  const NcclSchedule schedule(copies, all(3), kHuge);
  const Wave& sender = schedule.waves(0, 0)[0];
  using Parts = std::vector<std::tuple<int, int, int64_t, int64_t>>;
  const auto parts = [](const std::vector<NcclSchedule::Message>& messages) {
    Parts out;
    for (const NcclSchedule::Message& m : messages) out.emplace_back(m.peer, m.leaf, m.offset, m.bytes);
    return out;
  };
  CHECK((parts(sender.sends) == Parts{{1, -1, 0, 20},
                                      {1, 2, 0, kLarge},
                                      {1, -1, 20, 20},
                                      {2, -1, 40, 20},
                                      {2, 2, kLarge, kLarge},
                                      {2, -1, 60, 20}}));
  for (int rank : {1, 2}) {
    CHECK((parts(schedule.waves(0, rank)[0].receives) == Parts{{0, -1, 0, 20}, {0, 2, 0, kLarge}, {0, -1, 20, 20}}));
  }
  CHECK(schedule.staged_bytes() == 80);
}

// More leaves than a group may carry, from one rank to two.
void test_groups_are_bounded() {
  constexpr size_t kPieces = 6'000;
  for (const bool small : {false, true}) {
    const int64_t bytes = small ? 3 : kLarge;
    Plan plan(10'000, {kSends, kReceives, kReceives});
    plan.add_template();
    for (int dst : {1, 2}) plan.add(0, dst, {{0, 0, 0, 0, bytes, {}}, bytes, bytes});
    plan.table.leaf_template.assign(kPieces / 2, 0);
    const CopyPlan copies = parsed(plan);
    const NcclSchedule schedule(copies, all(3), kHuge);
    const std::vector<Wave>& waves = schedule.waves(0, 0);
    const size_t most = small ? kMostPieces : kMostMessages;
    CHECK(waves.size() == (kPieces + most - 1) / most);
    size_t carried = 0;
    for (const Wave& wave : waves) {
      CHECK(small ? wave.sends.size() == 2 : wave.pack.empty());
      const size_t pieces = small ? wave.pack.size() : wave.sends.size();
      CHECK(pieces <= most);
      carried += pieces;
    }
    CHECK(carried == kPieces);
  }
}

// Replicas that complete each other, and every byte at its place.
void test_replicas() {
  for (uint32_t seed = 1; seed <= 30; ++seed) {
    std::mt19937 random(seed);
    const bool large = seed > 24;
    const Plan plan = replicas_plan(random, large ? 4 : 12, draw(random, 2, 6), large ? 3 * kLarge : 40);
    const std::vector<int64_t> slots = large ? std::vector<int64_t>{kLarge / 2, 2 * kLarge, kHuge}
                                             : std::vector<int64_t>{kSmallest, draw(random, 4, 100), 1000, kHuge};
    for (const int64_t slot : slots) Ranks(plan, random_processes(random, plan.table.roles.size()), slot, seed).run();
  }
}

// Leaves that go from rank 0 to ranks 1 and 2 half each, which then complete each other.
Plan halves(int leaves, int64_t half) {
  Plan plan(leaves, {kSends, kReceives, kReceives});
  plan.add_template();
  for (int32_t dst : {1, 2}) {
    const int64_t own = (dst - 1) * half, other = half - own;
    plan.table.templates.back().push_back({0, dst, own, own, half, {}, 0});
    plan.table.templates.back().push_back({3 - dst, dst, other, other, half, {}, 1});
  }
  plan.table.leaf_template.assign(leaves, 0);
  return plan;
}

bool has(const std::vector<NcclSchedule::Message>& messages, int peer) {
  return std::any_of(messages.begin(), messages.end(), [peer](const auto& m) { return m.peer == peer; });
}

// The phases of different leaves share waves: those of the sender's, and those by which the last leaf is later.
void test_phases_run_beside_each_other() {
  constexpr int64_t kHalf = 40 << 20;
  const struct {
    Plan plan;
    size_t sent, later;
  } cases[] = {{halves(8, kHalf), 4, 1}, {halves(40, kHalf), 20, 1}, {halves(600, 1000), 8, 2}};
  for (const auto& c : cases) {
    const CopyPlan copies = parsed(c.plan);
    const NcclSchedule schedule(copies, all(3), kHuge);
    CHECK(schedule.waves(0, 0).size() == c.sent);
    for (int rank : {1, 2}) {
      const std::vector<Wave>& waves = schedule.waves(0, rank);
      if (!CHECK(waves.size() == c.sent + c.later)) continue;
      for (size_t i = 0; i < waves.size(); ++i) {
        CHECK(has(waves[i].receives, 0) == (i < c.sent));
        CHECK(has(waves[i].sends, 3 - rank) == (i >= c.later) && waves[i].passes_on == (i >= c.later));
        CHECK(waves[i].lag == (c.later == 2 && i >= 2 ? 2 : 0));
      }
    }
  }
}

// Each of ranks 4 to 7 gets a quarter of each leaf, from a source of its own, and passes it on to the three others.
Plan quarters(int leaves, int64_t rows, int64_t row_bytes, bool by_rows) {
  Plan plan(leaves, {kSends, kSends, kSends, kSends, kReceives, kReceives, kReceives, kReceives});
  plan.add_template();
  const std::vector<Part> parts = cut({0, rows, 0, row_bytes}, 4, by_rows);
  for (int source = 0; source < 4; ++source) {
    for (int dst = 4; dst < 8; ++dst) {
      Copy copy = copy_of(parts[source], row_bytes);
      copy.phase = dst != source + 4;
      copy.src_rank = copy.phase ? source + 4 : source;
      copy.dst_rank = dst;
      plan.table.templates.back().push_back(copy);
    }
  }
  plan.table.leaf_template.assign(leaves, 0);
  return plan;
}

// Also where more is passed on than comes in, the last wave comes soon after the sources' last.
void test_later_phases_keep_pace() {
  constexpr int64_t kSlot = 128 << 20, kMiB = 1 << 20;
  for (const Plan& plan : {quarters(400, 20, kMiB, true), quarters(10, 800, kMiB, true), quarters(2000, 16, 1000, true),
                           quarters(400, 20, kMiB, false), quarters(20, 400, kMiB, false)}) {
    const NcclSchedule schedule(parsed(plan), all(8), kSlot);
    const size_t sent = schedule.waves(0, 0).size();
    CHECK(sent >= 10);
    for (int rank : {4, 5, 6, 7}) CHECK(schedule.waves(0, rank).size() <= sent + sent / 10 + 2);
  }
}

// Pieces that have waves for themselves: each half is passed on while the next one comes in.
void test_phases_run_beside_each_other_in_huge_leaves() {
  constexpr int kLeaves = 3;
  const NcclSchedule schedule(parsed(halves(kLeaves, int64_t{1} << 30)), all(3), kHuge);
  CHECK(schedule.waves(0, 0).size() == 2 * kLeaves);
  CHECK(schedule.waves(0, 1).size() == 2 * kLeaves + 1 && schedule.waves(0, 2).size() == 2 * kLeaves);
}

// One leaf goes from rank 0 by way of rank 1 to rank 2.
void test_what_is_passed_on_waits_for_the_slots_only() {
  const struct {
    int64_t rows, row, pitch;
    int lag;
  } cases[] = {{1, kLarge, kLarge, 0}, {1, kLarge - 1, kLarge, 1}, {2, kLarge, 2 * kLarge, 1}};
  for (const auto& c : cases) {
    Plan plan(1, {kSends, kReceives, kReceives});
    plan.add_template();
    std::vector<jreshard::Dim> dims;
    if (c.rows > 1) dims = {{c.rows, c.pitch, c.pitch}};
    plan.table.templates.back() = {{0, 1, 0, 0, c.row, dims, 0}, {1, 2, 0, 0, c.row, dims, 1}};
    plan.table.leaf_template = {0};
    const CopyPlan copies = parsed(plan);
    const std::vector<Wave> waves = NcclSchedule(copies, all(3), kHuge).waves(0, 1);
    if (!CHECK(waves.size() == 2)) continue;
    CHECK(!waves[0].passes_on && waves[0].lag == 0 && waves[0].awaited == (c.lag == 1));
    CHECK(waves[1].passes_on && waves[1].lag == c.lag && !waves[1].awaited);
  }
}

void test_who_passes_on_to_itself_is_refused() {
  Plan plan(1, {kSends, kReceives});
  plan.add_template();
  plan.table.templates.back() = {{0, 1, 0, 0, 4, {}, 0}, {1, 1, 0, 4, 4, {}, 1}};
  plan.table.leaf_template = {0};
  std::string text;
  try {
    NcclSchedule(parsed(plan), all(2), kHuge);
  } catch (const std::invalid_argument& error) {
    text = error.what();
  }
  CHECK_TEXT(text, "rank 1 passes on to itself in phase 1");
}

}  // namespace

int main() {
  return run_tests({
      {"random_plans", test_random_plans},
      {"large_and_small_boxes", test_large_and_small_boxes},
      {"each_process_schedules_its_part_alike", test_each_process_schedules_its_part_alike},
      {"large_contiguous_boxes_are_not_staged", test_large_contiguous_boxes_are_not_staged},
      {"small_boxes_share_messages", test_small_boxes_share_messages},
      {"groups_are_bounded", test_groups_are_bounded},
      {"replicas", test_replicas},
      {"phases_run_beside_each_other", test_phases_run_beside_each_other},
      {"later_phases_keep_pace", test_later_phases_keep_pace},
      {"phases_run_beside_each_other_in_huge_leaves", test_phases_run_beside_each_other_in_huge_leaves},
      {"what_is_passed_on_waits_for_the_slots_only", test_what_is_passed_on_waits_for_the_slots_only},
      {"who_passes_on_to_itself_is_refused", test_who_passes_on_to_itself_is_refused},
  });
}
