// The messages that carry out a plan over NCCL: what each rank sends and receives in which group.
//
// Pure arithmetic on the plan, the same in every process. Each chunk of leaves is carried out in waves, and a wave is
// one group of sends and receives on each rank that has any. All ranks go through the waves in one order, and both ends
// of every message are in the same wave, so that no groups can wait for each other in a circle.
//
// What a rank passes on, in phases after the first, it sends in a later wave than that in which the last of it, leaf by
// leaf, has arrived. So the phases of different leaves are on their way at the same time. Where a slot is in between,
// the waves are two apart: in the one between them the box is unpacked, or packed, beside other messages.
//
// A wave stages at most one slot on each side of each rank, of which each phase has its share, and the staged boxes
// between two ranks travel as one message.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_plan.h"

namespace jreshard {

class NcclSchedule {
 public:
  // A copy between an array and the staging slot: pack has the slot as destination, unpack as source. A box that is
  // packed in a phase after the first lies in the array that the rank receives.
  struct Staged {
    int leaf;
    Copy copy;
  };
  struct Message {
    int peer;
    int leaf;        // -1: of the staging slot
    int64_t offset;  // in the shard or in the slot
    int64_t bytes;
    bool passed_on;  // sent from the array that the rank receives
  };
  struct Wave {
    std::vector<Staged> pack;
    std::vector<Message> sends;
    std::vector<Message> receives;
    std::vector<Staged> unpack;
    // Whether it passes something on, which may also have been copied within the device.
    bool passes_on = false;
    // How many of the rank's waves ago all that it passes on had arrived, unpacked where need be: 1, or 2 for any time
    // before the last wave. 0 where the order of the groups sees to it.
    int lag = 0;
    // Whether a later wave waits, by its lag, until all of this one has arrived.
    bool awaited = false;
  };

  // Schedules the part of the ranks that are `local`. A slot has at least a byte for each phase. Throws
  // std::invalid_argument where a rank passes something on to itself.
  NcclSchedule(const CopyPlan& plan, const std::vector<bool>& local, int64_t slot_bytes);

  const std::vector<Wave>& waves(int chunk, int rank) const { return waves_[chunk * num_ranks_ + rank]; }
  // The most bytes that a wave stages on one side of one local rank.
  int64_t staged_bytes() const { return staged_bytes_; }

 private:
  int num_ranks_;
  std::vector<std::vector<Wave>> waves_;  // [chunk * ranks + rank]
  int64_t staged_bytes_ = 0;
};

}  // namespace jreshard
