// What StreamExchange has to do with GPUs of other processes on the same host.
//
// A source's arrays are read where they lie: their process lends the arenas, and tells the addresses when they are
// published. The rest is done by the devices' streams, in pages of flags that the processes share. For each step of a
// call that has to be waited for there is one flag, which becomes the call's number:
//   ready  in the page of the source's process: the arrays may be read in this phase
//   read   in the page of each source's process: this reader has read all that it wants in this chunk and phase
// A process that gives up sets all flags that anyone may wait for to kGivenUp, which lets every stream go. Before that
// it marks the pages: what was read behind a flag of a marked page does not count, and the page serves no other call.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "arena.h"
#include "copy_plan.h"
#include "cuda_driver.h"
#include "flag_page.h"
#include "peers.h"
#include "process_group.h"

namespace jreshard {

class StreamPeers {
 public:
  using CallId = uint32_t;

  // `ordinals` has the device of each local rank. `plan` and `group` are to outlive this.
  StreamPeers(const CopyPlan& plan, const ProcessGroup& group, std::map<int, int> ordinals, const cuda::Driver& driver);
  // When nothing on the streams needs the pages any more.
  ~StreamPeers();

  // Before each call: makes ready what it needs, and lets the partners have this process's page.
  void enter(CallId id);
  // After each, when the streams have come to their ends. Unmaps memory that was not used for long.
  void leave();
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

  // When the streams have come to their ends: who has given up meanwhile, so that they may have had what they waited
  // for too early; or empty text.
  std::string fault(CallId id);
  // The ranks of other processes whose flags the streams of this one still wait for.
  struct Awaited {
    std::set<int> publishing;
    std::set<int> receiving;  // what they pass on in phases after the first
    std::set<int> reading;
  };
  Awaited awaited(CallId id);
  // Whether the call cannot end well without a process: it has still to be read from, or to read.
  bool needs(CallId id, int process);
  // Gives the calls under way up: sets all flags that anyone may wait for. Calls no driver.
  void let_go();
  // A context of this process, for what needs any.
  cuda::Context context() const { return device_->get(); }

 private:
  // Past every call's number, also in the cyclic order in which streams compare.
  static constexpr uint64_t kGivenUp = uint64_t{1} << 62;
  // What belongs to the link with one process, for all exchanges.
  struct Neighbour;
  struct Page {
    std::shared_ptr<const Descriptor> sent;
    std::shared_ptr<FlagPage> flags;
    CallId call = 0;  // the last that has used it
  };

  bool local(int rank) const { return group_.local(rank); }
  size_t ready_flag(int chunk, int phase, int rank) const { return plan_.slot(chunk, phase, rank); }
  size_t read_flag(int chunk, int phase, int rank) const { return plan_.num_slots() + plan_.slot(chunk, phase, rank); }
  // The mark of a page that was given up, which only hosts write and read.
  size_t mark() const { return 2 * plan_.num_slots(); }
  size_t page_size() const { return 2 * plan_.num_slots() + 1; }
  std::shared_ptr<Neighbour> neighbour(int process);
  // The one that the calls under way use.
  std::shared_ptr<Neighbour> held(int process);
  // After something of the link was asked for, which is missing where there is another link by now.
  void check_linked(int process, uint64_t serial) const;
  // Before a call: makes another page where the one that there is cannot serve.
  void renew_page(CallId id);
  void give_up(FlagPage& page) const;
  // The page of another process, which has sent it before it published in this call.
  std::shared_ptr<FlagPage> page_of(int process, CallId id);
  void lend(int process, const std::vector<const void*>& arrays);
  void write(cuda::Stream stream, cuda::DevicePtr flag, CallId id);
  void wait(cuda::Stream stream, cuda::DevicePtr flag, CallId id);
  // What a flag becomes in a call: never 0, which it is before.
  static uint64_t number(CallId id) { return uint64_t{id} + 1; }

  const CopyPlan& plan_;
  const ProcessGroup& group_;
  const std::map<int, int> ordinals_;
  const cuda::Driver& driver_;
  ArenaExports exports_;
  std::optional<cuda::DeviceContext> device_;  // none where no rank is local
  std::mutex mutex_;
  int calls_ = 0;
  CallId last_call_ = 0;
  bool gone_ = false;                                     // has let go: no other page may be taken up
  std::unique_ptr<FlagPage> page_;                        // changes between calls only
  std::map<int, Page> pages_;                             // of other processes
  std::map<int, uint64_t> greeted_;                       // by process: the link over which it has got the own page
  std::map<int, std::shared_ptr<Neighbour>> neighbours_;  // while there are calls
};

}  // namespace jreshard
