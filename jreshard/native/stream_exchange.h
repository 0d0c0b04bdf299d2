// The exchange for GPUs of one host: the same three steps as HostExchange, enqueued on the devices' streams.
//
// Handlers run when a program is launched, not when the device gets there, so nothing is copied by the host and nobody
// waits on the device for the host: sources record an event, readers' streams wait for it, copy, record another, and
// the sources' streams wait for that. Phases after the first are like that among the destinations: each records an
// event when it has enqueued what others read next, and its stream waits for those who read its arrays. The handlers of
// a step run on a thread for each device, so they may wait on the host for each other to enqueue; in one order of the
// chunks on all devices, which is that of the programs that they run. Launches come in the same order on every device,
// so that they belong to calls by their number: as many publishes and receives on a rank as there are chunks, and one
// release. The caller sees to it by launching all of a call under one lock.
//
// Between processes flags in shared memory take the place of events (stream_peers.h). A process may fail when all is
// enqueued already, and no error can be raised on a stream: who calls has to wait() before the result is used.
//
// A launch may be held up in the driver, by a device whose queue is full of work that waits for another process. The
// driver may then hold up others who call it for that device. So whatever fails a call, such as the watchdog at its
// deadline, calls no driver, and nobody calls the driver with the lock held: a failed call lets the streams go, and
// they the launches.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "copy_plan.h"
#include "forwarder.h"
#include "gpu_exchange.h"
#include "peers.h"
#include "process_group.h"
#include "stream_peers.h"
#include "watchdog.h"

namespace jreshard {

class StreamExchange : public GpuExchange, public Forwarder::Target {
 public:
  // Where ranks live in other processes, `ordinals` has the devices of the local ones. When the last owner lets it go,
  // it waits a while for the streams to come to the ends of failed calls; if they do not, it stays, with all that they
  // may still use, until one of the next exchanges finds that they have.
  static std::shared_ptr<StreamExchange> open(CopyPlan plan, std::vector<std::string> rank_names,
                                              const cuda::Driver& driver, ProcessMap map = {},
                                              std::map<int, int> ordinals = {});
  ~StreamExchange() override;

  bool begin(CallId id, double timeout_s) override;
  void abort(CallId id, const std::string& reason) override;
  void abort_all(const std::string& reason) override;
  int open_calls() const override;
  bool broken() const override;
  // Returns at once where all ranks are local.
  void wait(CallId id) override;
  void heard(int process, const Message& message) override;
  void lost(CallId id, int process, const std::string& error) override;
  void expired(CallId id) override;
  // Never: whether readers are done is known to the streams only.
  bool release_now(CallId) override { return false; }
  int steps_run(CallId id) const override;

  void publish(int rank, int chunk, const std::vector<const void*>& arrays, cuda::Stream stream) override;
  void receive(int rank, int chunk, const std::vector<void*>& arrays, cuda::Stream stream) override;
  // Of all chunks in one launch.
  void release(int rank, int end, cuda::Stream stream) override;

 private:
  using Clock = std::chrono::steady_clock;
  enum Step { kPublish, kReceive, kRelease, kSteps };

  struct Call {
    CallId id;
    uint64_t order = 0;  // of begin()
    Clock::time_point deadline;
    double timeout_s;
    Watchdog::Ticket ticket;
    std::vector<std::vector<const void*>> sources;    // [rank][leaf]
    std::vector<std::vector<const void*>> received;   // [rank][leaf]: what phases after the first read
    std::vector<cuda::Event> ready;                   // [slot]: after it, the rank's arrays may be read in that phase
    std::vector<int> readers_left;                    // [rank], (chunk, reader) pairs that are not enqueued yet
    std::vector<std::map<int, cuda::Event>> copied;   // [rank][reader]: after the reader's last chunk so far
    std::vector<std::vector<cuda::Event>> read;       // [chunk * ranks + rank]: after the reads of later phases
    int launches_left = 0;                            // receives and releases that are not enqueued yet
    int steps_run = 0;                                // publishes and receives that are enqueued
    std::vector<bool> told;                           // [slot]: a rank of another process has published
    std::vector<cuda::Event> ends;                    // after each receive and release, where others take part
    std::vector<std::pair<int, cuda::Event>> events;  // (rank, event) of all that was enqueued; used again afterwards
    std::vector<int> launching;                       // [rank]: handlers that are at work on it
    std::string error;
    Clock::time_point patience;  // until when a failed call waits for its streams to come to their ends
  };
  using CallPtr = std::shared_ptr<Call>;
  // A handler at work on the call that its launch belongs to.
  struct Launch {
    Launch(StreamExchange& exchange, Step step, int rank);
    ~Launch();
    Launch(const Launch&) = delete;
    Launch& operator=(const Launch&) = delete;

    CallPtr call;

   private:
    StreamExchange& exchange_;
    const int rank_;
  };
  using Lock = std::unique_lock<std::mutex>;

  // What belongs to one rank's device, kept for all calls.
  struct Device {
    cuda::Context context = nullptr;
    std::map<std::pair<int, int>, cuda::Stream> sides;  // by source and lane
    std::vector<cuda::Event> free_events;
    std::vector<cuda::Event> spent_events;  // of failed calls, not to be used again
  };

  StreamExchange(CopyPlan plan, std::vector<std::string> rank_names, const cuda::Driver& driver, ProcessMap map,
                 std::map<int, int> ordinals);
  // Makes ready what a call that has just been begun needs of other processes, or forgets it and throws.
  void join(const CallPtr& call);
  size_t slot(int chunk, int phase, int rank) const { return plan_.slot(chunk, phase, rank); }
  int count_local(const std::vector<int>& ranks) const;
  bool local(int rank) const { return group_.local(rank); }
  // With the lock held: the call of that id, or null. One that has failed stays where other processes take part.
  CallPtr find(CallId id) const;
  // With the lock held: the call that this launch belongs to.
  CallPtr current(Step step, int rank);
  // Launches of a step on one rank that make up a call: XLA may reorder the chunks of a program, so they are counted.
  uint64_t launches(Step step) const { return step == kRelease ? 1 : plan_.num_chunks(); }
  // Launches of a step on one rank that belong to the call and have come.
  int launched(const Call& call, Step step, int rank) const;
  // Waits until `ready()` or throws: the call failed.
  template <typename Ready>
  void wait(Lock& lock, const CallPtr& call, Ready ready);
  void end_launch(const CallPtr& call);
  // One receive or release on `rank` has been enqueued.
  void record_end(const CallPtr& call, int rank, cuda::Stream stream);
  bool published(const Call& call, int chunk, int phase, int source) const;
  // What is wrong with a message, or empty text.
  std::string fault(int process, const Call& call, const Message& message) const;

  // How a call ends (stream_exchange_end.cc); with the lock held, which is let go where the driver is asked.
  void fail(Call& call, const std::string& reason) { fail(call, group_.found(reason)); }
  void fail(Call& call, const ProcessGroup::Failure& failure);
  void fail_late(Call& call);
  // Whom the call waits for, or empty text.
  std::string missing(const Call& call) const;
  void close(Call& call);
  void recycle(Call& call);
  // Parts from the other processes, after close().
  void leave(const Call& call);
  // Whether the streams have come to the end of the call.
  bool arrived(Lock& lock, Call& call) const;
  // Waits, while there is patience, until nothing of a failed call is on the streams any more, and lets go what was let
  // go before its time. Whether that is so.
  bool drain(Lock& lock, const CallPtr& call);
  bool drained(Lock& lock, const Call& call) const;
  // Before the exchange goes. Whether nothing of its calls is on the streams any more.
  bool end_calls();
  static void retire(std::unique_ptr<StreamExchange> exchange);
  static void let_go_retired();

  // Runs `action` in the context of `stream`. Where the driver refuses something, the call fails.
  template <typename Action>
  void enqueue(const CallPtr& call, int rank, cuda::Stream stream, Action action);
  // An event of the rank's device that is not in use, or a new one.
  cuda::Event unused_event(int rank, cuda::Stream stream);
  // Records an event of the call on `stream`, of the rank's device.
  cuda::Event record(const CallPtr& call, int rank, cuda::Stream stream);
  // Where something has gone wrong half-way: has `stream` go on only behind all that was enqueued for the rank, which
  // may write its arrays.
  void join_sides(const CallPtr& call, int rank, cuda::Stream stream);
  // The stream on which `rank` reads a lane of `source`, made when it is first wanted.
  cuda::Stream side_stream(int rank, int source, int lane);
  // Enqueues one phase of a receive, behind what it reads.
  void run_phase(const CallPtr& call, int rank, int chunk, int phase, cuda::Stream stream);
  void pull(const CallPtr& call, int rank, int chunk, int phase, cuda::Stream stream);
  // Has `stream` wait for what `source` published.
  void await_source(const CallPtr& call, int source, int chunk, int phase, cuda::Stream stream);
  // Has `stream` wait for those who read what `rank` has received.
  void await_readers(const CallPtr& call, int rank, int chunk, cuda::Stream stream);
  void order_after(cuda::Stream stream, cuda::Event event);

  const CopyPlan plan_;
  const std::vector<std::string> rank_names_;
  const cuda::Driver& driver_;
  const ProcessGroup group_;
  std::unique_ptr<StreamPeers> peers_;  // null where all ranks are local
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, CallPtr> calls_;  // by the order of begin()
  uint64_t begun_ = 0;
  std::string broken_;                      // why no further call can be opened
  std::vector<uint64_t> launched_[kSteps];  // [rank]: launches so far
  std::vector<Device> devices_;             // [rank]
  const std::shared_ptr<Forwarder> forwarder_ = std::make_shared<Forwarder>(*this);
};

template <typename Action>
void StreamExchange::enqueue(const CallPtr& call, int rank, cuda::Stream stream, Action action) {
  try {
    const cuda::CurrentContext context(driver_, stream);
    try {
      action();
    } catch (...) {
      join_sides(call, rank, stream);
      throw;
    }
  } catch (const std::exception& error) {
    abort(call->id, error.what());
    throw;
  }
}

}  // namespace jreshard
