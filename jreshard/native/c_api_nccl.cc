// What Python calls through ctypes to make NCCL communicators. Errors come back as in c_api.cc.
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

#include "export.h"
#include "guarded.h"
#include "local_ordinals.h"
#include "nccl_communicators.h"
#include "timeout.h"

namespace jreshard {
namespace {

std::mutex& communicators_mutex() {
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
}

std::map<int64_t, std::shared_ptr<NcclCommunicator>>& communicators() {
  static auto* const all = new std::map<int64_t, std::shared_ptr<NcclCommunicator>>;
  return *all;
}

}  // namespace

std::shared_ptr<NcclCommunicator> find_communicator(int64_t handle) {
  std::lock_guard<std::mutex> lock(communicators_mutex());
  auto found = communicators().find(handle);
  if (found == communicators().end()) throw std::runtime_error("the NCCL communicator is closed");
  return found->second;
}

}  // namespace jreshard

// Writes the 128 bytes that all who are to join one communicator need.
JRESHARD_EXPORT bool jreshard_nccl_unique_id(const char* library, char* id, char* error, size_t capacity) {
  return jreshard::guarded(error, capacity, [&] {
    const auto& nccl = jreshard::nccl::library(library);
    jreshard::nccl::UniqueId made;
    jreshard::nccl::check(nccl, nccl.GetUniqueId(&made), "ncclGetUniqueId");
    std::memcpy(id, made.bytes, sizeof(made.bytes));
  });
}

// Joins a communicator with the local ranks, those whose ordinal is not -1, and writes its handle.
JRESHARD_EXPORT bool jreshard_nccl_join(const char* library, const char* id, int ranks, const int32_t* ordinals,
                                        double timeout_s, int64_t* handle, char* error, size_t capacity) {
  return jreshard::guarded(error, capacity, [&] {
    jreshard::nccl::UniqueId unique;
    std::memcpy(unique.bytes, id, sizeof(unique.bytes));
    auto joined = std::make_shared<jreshard::NcclCommunicator>(
        jreshard::nccl::library(library), jreshard::cuda::driver(), ranks, jreshard::local_ordinals(ordinals, ranks),
        unique, jreshard::deadline_in(timeout_s));
    static int64_t next = 1;
    std::lock_guard<std::mutex> lock(jreshard::communicators_mutex());
    *handle = next++;
    jreshard::communicators()[*handle] = std::move(joined);
  });
}

// Has pairs of (sender, receiver) exchange a byte. Every process of the communicator calls it, with the same pairs.
JRESHARD_EXPORT bool jreshard_nccl_warm_up(int64_t handle, const int32_t* pairs, size_t count, double timeout_s,
                                           char* error, size_t capacity) {
  return jreshard::guarded(error, capacity, [&] {
    std::vector<std::pair<int, int>> all;
    for (size_t i = 0; i < count; ++i) all.emplace_back(pairs[2 * i], pairs[2 * i + 1]);
    jreshard::find_communicator(handle)->warm_up(all, jreshard::deadline_in(timeout_s));
  });
}

// Whether the communicator can be used no more.
JRESHARD_EXPORT bool jreshard_nccl_broken(int64_t handle) {
  try {
    return !jreshard::find_communicator(handle)->broken().empty();
  } catch (const std::runtime_error&) {
    return true;  // closed
  }
}

// Leaves the communicator. Operations under way are aborted.
JRESHARD_EXPORT void jreshard_nccl_close(int64_t handle) {
  std::shared_ptr<jreshard::NcclCommunicator> closing;
  {
    std::lock_guard<std::mutex> lock(jreshard::communicators_mutex());
    auto found = jreshard::communicators().find(handle);
    if (found == jreshard::communicators().end()) return;
    closing = std::move(found->second);
    jreshard::communicators().erase(found);
  }
  closing->abort("jreshard: the communicator is closed");
}
