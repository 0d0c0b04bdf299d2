// What one wave of messages over NCCL may carry, and how the phases of a plan share that.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_plan.h"

namespace jreshard {

// What one phase may take up on one side of one rank in a wave.
struct Limits {
  int64_t slot_bytes;
  int64_t wave_bytes;  // a larger piece has a wave for itself
  int messages;
  int pieces;  // boxes that share messages
};

// The limits of each phase. Phases do not take each other's room, and have it in proportion to what they move: so they
// keep pace with each other, and the last begins soon after the first. A slot has at least a byte for each phase.
std::vector<Limits> limits_of(const CopyPlan& plan, int64_t slot_bytes);

}  // namespace jreshard
