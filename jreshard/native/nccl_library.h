// The few functions of NCCL that are used, found with dlopen in the copy that the process has.
// Types and values are those of nccl.h, whose ABI the library keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda_driver.h"

namespace jreshard::nccl {

using Comm = struct ncclComm*;
using Result = int;

constexpr Result kSuccess = 0;
constexpr Result kInProgress = 7;
constexpr int kUint8 = 1;  // ncclUint8

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as of NCCL 2.17, which is what a newer library takes by its size and version.
struct Config {
  static constexpr int kUndefined = INT32_MIN;

  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21700;
  int blocking = 0;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};

struct Library {
  Result (*GetUniqueId)(UniqueId*);
  Result (*CommInitRankConfig)(Comm*, int ranks, UniqueId, int rank, Config*);
  Result (*CommGetAsyncError)(Comm, Result*);
  Result (*CommAbort)(Comm);
  Result (*GroupStart)();
  Result (*GroupEnd)();
  Result (*Send)(const void*, size_t, int type, int peer, Comm, cuda::Stream);
  Result (*Recv)(void*, size_t, int type, int peer, Comm, cuda::Stream);
  const char* (*GetErrorString)(Result);
  const char* (*GetLastError)(Comm);
};

// The library at `path`. Throws std::runtime_error where it cannot be loaded or lacks a function.
const Library& library(const std::string& path);

// Throws std::runtime_error unless `result` is success or, of a communicator that does not block, in progress.
void check(const Library& library, Result result, const char* what);

}  // namespace jreshard::nccl
