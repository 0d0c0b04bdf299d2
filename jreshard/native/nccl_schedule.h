// The messages that carry out a plan over NCCL: what each rank sends and receives in which group.
//
// Pure arithmetic on the plan, the same in every process. Each chunk of leaves is carried out in waves, and a wave is
// one group of sends and receives on each rank that has any. All ranks go through the waves in one order, and both ends
// of every message are in the same wave, so that no groups can wait for each other in a circle.
//
// A large box that is contiguous in an array goes straight from there, or straight to there. Others pass through a
// staging slot: packed into the sender's, unpacked from the receiver's. A wave stages at most one slot on each side of
// each rank, and the staged boxes between two ranks travel as one message.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_plan.h"

namespace jreshard {

class NcclSchedule {
 public:
  // A copy between an array and the staging slot: pack has the slot as destination, unpack as source.
  struct Staged {
    int leaf;
    Copy copy;
  };
  struct Message {
    int peer;
    int leaf;        // -1: of the staging slot
    int64_t offset;  // in the shard or in the slot
    int64_t bytes;
  };
  struct Wave {
    std::vector<Staged> pack;
    std::vector<Message> sends;
    std::vector<Message> receives;
    std::vector<Staged> unpack;
  };

  // Schedules the part of the ranks that are `local`. At least one byte fits into a slot.
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
