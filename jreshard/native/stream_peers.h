// What StreamExchange has to do with GPUs of other processes on the same host.
//
// A source's arrays are read where they lie: their process lends the arenas, and tells the addresses when they are
// published. The rest is done by the devices' streams, in pages of flags that the processes share. For each step of a
// call that has to be waited for there is one flag, which becomes the call's number:
//   ready  in the page of the source's process: the arrays may be read in this phase
//   read   in the page of each source's process: this reader has read all that it wants in this chunk and phase
// A process that gives up sets all flags that anyone may wait for to kGivenUp, which lets every stream go; what was
// read behind such a flag does not count.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "arena.h"
#include "copy_plan.h"
#include "cuda_driver.h"
#include "flag_page.h"
#include "peers.h"
#include "placement.h"

namespace jreshard {

class StreamPeers {
 public:
  using CallId = uint32_t;

  // `ordinals` has the device of each local rank.
  StreamPeers(const CopyPlan& plan, Placement placement, std::map<int, int> ordinals, const cuda::Driver& driver);

  bool local(int rank) const { return placement_.process_of[rank] == placement_.peers->self(); }
  const Placement& placement() const { return placement_; }
  // The other processes that local ranks read from or are read by.
  const std::set<int>& partners() const { return partners_; }
  std::string name(int process) const { return placement_.peers->name(process); }

  // Lets the partners have this process's page. Before each call.
  void greet();
  // Enqueued behind what makes the arrays readable: tells the readers in other processes, if there are any.
  void publish(CallId id, int rank, int chunk, int phase, const std::vector<const void*>& arrays, cuda::Stream stream);
  // Has the stream of a local reader wait until what `source` published may be read.
  void await_ready(CallId id, int source, int chunk, int phase, cuda::Stream stream);
  // Where a local reader finds what `source` published.
  const void* translate(int source, const void* address, int reader);
  // Enqueued behind the copies of a local reader: tells the processes that it has read from.
  void tell_read(CallId id, int reader, int chunk, int phase, cuda::Stream stream);
  // Has the stream of a local source wait for its readers in other processes.
  void await_readers(CallId id, int source, int chunk, int phase, cuda::Stream stream);

  // When the streams have come to their ends: whether all that local ranks have read was there. Throws
  // std::runtime_error where a process has given up meanwhile.
  void check_read(CallId id);
  // Tells the others that the call has failed, `origin` being the process where it did, and lets all streams go.
  void give_up(CallId id, int origin, const std::string& reason);
  // Sets all flags that anyone may wait for.
  void let_go();
  // Unmaps memory that was not used for long.
  void trim();

 private:
  // Past every call's number, also in the cyclic order in which streams compare.
  static constexpr uint64_t kGivenUp = uint64_t{1} << 62;
  // What belongs to the link with one process, for all exchanges.
  struct Neighbour;
  struct Page {
    uint64_t serial = 0;
    uint64_t count = 0;
    std::unique_ptr<FlagPage> flags;
  };

  size_t slots() const { return static_cast<size_t>(plan_.num_chunks()) * plan_.num_phases() * plan_.num_ranks(); }
  size_t ready_flag(int chunk, int phase, int rank) const {
    return (static_cast<size_t>(chunk) * plan_.num_phases() + phase) * plan_.num_ranks() + rank;
  }
  size_t read_flag(int chunk, int phase, int rank) const { return slots() + ready_flag(chunk, phase, rank); }
  std::set<int> processes_of(const std::vector<int>& ranks) const;
  Neighbour& neighbour(int process);
  // The page of another process, which has sent it before it published.
  FlagPage& page_of(int process);
  FlagPage& own_page();
  void lend(int process, const std::vector<const void*>& arrays);
  void write(cuda::Stream stream, cuda::DevicePtr flag, uint64_t value);
  void wait(cuda::Stream stream, cuda::DevicePtr flag, uint64_t value);

  const CopyPlan& plan_;
  const Placement placement_;
  const std::map<int, int> ordinals_;
  const cuda::Driver& driver_;
  std::set<int> partners_;
  FlagPage page_;
  std::mutex mutex_;
  std::map<int, Page> pages_;        // of other processes
  std::map<int, uint64_t> greeted_;  // by process: the link over which it has got this process's page
};

}  // namespace jreshard
