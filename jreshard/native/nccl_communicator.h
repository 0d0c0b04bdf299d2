// This process's part of one NCCL communicator: a handle for each of its ranks, made with a deadline and warmed up.
//
// The handles are of the kind that never blocks the host: whatever NCCL is asked for is under way when its function
// returns, and is polled for until it has been done, the deadline has passed or somebody aborts.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "nccl_library.h"

namespace jreshard {

class NcclCommunicator {
 public:
  using Clock = std::chrono::steady_clock;

  // Joins `ranks` ranks, of which `ordinals` has the local ones: rank to device ordinal. All processes join at the same
  // time. Throws std::runtime_error, by the deadline at the latest.
  NcclCommunicator(const nccl::Library& library, const cuda::Driver& driver, int ranks, std::map<int, int> ordinals,
                   const nccl::UniqueId& id, Clock::time_point deadline);
  // Aborts; see abort().
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Has the pairs (sender, receiver) exchange a byte, all in one group: NCCL connects a pair when it is first used, and
  // that takes both sides. Every process calls it with the same pairs. Throws std::runtime_error, by the deadline at
  // the latest.
  void warm_up(const std::vector<std::pair<int, int>>& pairs, Clock::time_point deadline);

  struct Message {
    int peer;
    void* data;  // what is sent is only read
    int64_t bytes;
  };
  // Enqueues a group of messages of a local rank on `stream`; it is on the stream when this returns. Throws
  // std::runtime_error, by the deadline at the latest.
  void exchange(int rank, const std::vector<Message>& sends, const std::vector<Message>& receives, cuda::Stream stream,
                Clock::time_point deadline);

  // Gives up: kernels that wait for peers end, before this returns; it returns within seconds even where NCCL does not.
  // From any thread.
  void abort(const std::string& reason);
  // Why the communicator is of no use any more, errors that NCCL found after a launch included; else empty.
  std::string broken();
  bool is_local(int rank) const { return ordinals_.count(rank); }

 private:
  struct Aborts;
  class Use;

  void join(int ranks, const nccl::UniqueId& id, Clock::time_point deadline);
  // Runs `add` between the start and the end of a group, then waits until the communicators of `ranks` have done it.
  void group(const std::vector<int>& ranks, Clock::time_point deadline, const char* what,
             const std::function<void()>& add);
  nccl::Comm comm_of(int rank);
  void settle(int rank, Clock::time_point deadline, const char* what);
  void start_aborts();

  const nccl::Library& library_;
  const cuda::Driver& driver_;
  const std::map<int, int> ordinals_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::map<int, nccl::Comm> comms_;  // by local rank; empty once aborted
  int uses_ = 0;                     // threads that are in NCCL with one of `comms_`
  std::shared_ptr<Aborts> aborts_;   // once aborted
  std::string broken_;
};

}  // namespace jreshard
