// The NCCL communicators of this process, by the handles that Python holds.
#pragma once

#include <cstdint>
#include <memory>

#include "nccl_communicator.h"

namespace jreshard {

// Throws std::runtime_error where there is none.
std::shared_ptr<NcclCommunicator> find_communicator(int64_t handle);

}  // namespace jreshard
