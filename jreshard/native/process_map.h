// Which process each rank of a plan lives in.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "peers.h"

namespace jreshard {

// Without `peers` all ranks live in this process.
struct ProcessMap {
  int64_t key = 0;              // of the plan, the same in all processes
  std::vector<int> process_of;  // [rank]
  std::shared_ptr<Peers> peers;
};

}  // namespace jreshard
