// The boxes of a leaf, cut into the pieces in which they travel over NCCL.
//
// A large box that is contiguous in an array goes straight from there, or straight to there, in one piece. Others pass
// through a staging slot on that side, in pieces that fit into it.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_plan.h"
#include "nccl_limits.h"

namespace jreshard {

// Part of a box that travels in one go.
struct Piece {
  Copy copy;
  int index;  // among the pieces of its box
  bool src_staged;
  bool dst_staged;

  // Whether it may share a message with its neighbours: it passes through slots on both sides.
  bool merges() const { return src_staged && dst_staged; }
};

// The pieces of all boxes of a leaf that go from one rank to another, phase by phase, in an order that spreads the
// ranks: first the first pieces of all boxes to the next rank, then those to the next but one. Throws
// std::invalid_argument where a rank passes something on to itself.
std::vector<Piece> pieces_of(const CopyPlan& plan, int leaf, const std::vector<Limits>& limits);

// Gives the strides of one side to a row-major packing of the box.
void make_dense(Copy& copy, int64_t Dim::* stride);

}  // namespace jreshard
