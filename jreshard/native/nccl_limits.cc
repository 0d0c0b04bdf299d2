#include "nccl_limits.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace jreshard {
namespace {

// Messages of one side of one rank in a group: 400 of 20 MiB took 25.5 ms in groups of 8, 26.0 in groups of 64 and 28.4
// in one (two H200); tens of thousands were seen to hang.
constexpr int kMostMessages = 64;
// Boxes that share messages, few enough that the next are packed meanwhile.
constexpr int kMostPieces = 256;
// Bytes that come in with a wave, in a plan with relays: they are passed on from the next one on. Groups of 160 MiB
// were as fast as larger ones.
constexpr int64_t kMostRelayedBytes = 160 << 20;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
// In which a wave is divided up.
constexpr int64_t kShares = 64;

int64_t part(int64_t whole, int64_t share) { return whole / kShares * share + whole % kShares * share / kShares; }

// For each phase, the most bytes that a rank sends to others or receives from them.
std::vector<int64_t> busiest(const CopyPlan& plan) {
  std::vector<int64_t> uses(plan.num_templates());
  for (int leaf = 0; leaf < plan.num_leaves(); ++leaf) ++uses[plan.template_of(leaf)];
  const size_t ranks = plan.num_ranks();
  std::vector<int64_t> sent(plan.num_phases() * ranks), received(sent.size());
  for (int leaf = 0; leaf < plan.num_leaves(); ++leaf) {
    const int64_t times = std::exchange(uses[plan.template_of(leaf)], 0);  // all leaves that are alike, with the first
    if (times == 0) continue;
    for (size_t dst = 0; dst < ranks; ++dst) {
      for (const Copy& copy : plan.copies(leaf, dst)) {
        if (copy.src_rank == copy.dst_rank) continue;
        sent[copy.phase * ranks + copy.src_rank] += times * copy.bytes();
        received[copy.phase * ranks + dst] += times * copy.bytes();
      }
    }
  }
  std::vector<int64_t> out;
  for (size_t begin = 0; begin < sent.size(); begin += ranks) {
    const auto most = [&](const auto& bytes) { return *std::max_element(&bytes[begin], &bytes[begin] + ranks); };
    out.push_back(std::max(most(sent), most(received)));
  }
  return out;
}

}  // namespace

std::vector<Limits> limits_of(const CopyPlan& plan, int64_t slot_bytes) {
  const int64_t phases = plan.num_phases();
  if (phases == 1) return {{slot_bytes, kUnlimited, kMostMessages, kMostPieces}};
  const std::vector<int64_t> moved = busiest(plan);
  const int64_t all = std::max<int64_t>(1, std::accumulate(moved.begin(), moved.end(), int64_t{0}));
  std::vector<Limits> out;
  for (int phase = 0; phase < phases; ++phase) {
    // Rounded up where bytes are passed on, so that all that a wave brought in can go on with one.
    const int64_t wanted = moved[phase] * (kShares - phases) + (phase > 0 ? all - 1 : 0);
    const int64_t share = std::max<int64_t>(1, wanted / all);
    out.push_back({1 + part(slot_bytes - phases, share), phase > 0 ? kUnlimited : kMostRelayedBytes,
                   static_cast<int>(part(kMostMessages, share)), static_cast<int>(part(kMostPieces, share))});
  }
  return out;
}

}  // namespace jreshard
