// Which devices of this process the ranks of a plan have.
#pragma once

#include <cstdint>
#include <map>

namespace jreshard {

// The device ordinal of each local rank, out of an array over all ranks, in which those of other processes have -1.
inline std::map<int, int> local_ordinals(const int32_t* ordinals, int ranks) {
  std::map<int, int> local;
  for (int rank = 0; rank < ranks; ++rank) {
    if (ordinals[rank] >= 0) local[rank] = ordinals[rank];
  }
  return local;
}

}  // namespace jreshard
