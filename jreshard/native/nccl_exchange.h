// The exchange over NCCL: the ranks of one process, whose peers may be in other processes and on other hosts.
//
// Publish notes the arrays. A device that receives, receives in its receive step; a device that sends and does not
// receive, sends in its release step. A device that does both, because it has sources or because it passes on what it
// received, also sends in its receive step, in the same groups: its peers wait for both at the same time, so it must
// not finish one before it begins the other. All devices carry out the chunks of leaves in one order, which the
// programs keep by chaining their calls.
//
// What is passed on is read where it was received: the groups of a device are on one stream, and where copies on its
// side streams come in between, events order them.
//
// A device takes only so much work ahead, and who enqueues more waits until the device gets on, for which it may need
// its peers: receive and release have to be launched from threads of their own.
//
// A kernel of NCCL waits on the device for its peer, and no error can be raised there: who calls has to wait() before
// the result is used. One call is over before the next begins. A failed call aborts the communicator; what it enqueued
// is over before whatever the devices' streams do next.
//
// The driver may hold up whoever calls it for a device whose queue is full, until the peers get on or the call fails.
// So the watchdog, which fails a call at its deadline, calls no driver, and nobody does with the lock held.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "copy_plan.h"
#include "forwarder.h"
#include "gpu_exchange.h"
#include "nccl_communicator.h"
#include "nccl_schedule.h"
#include "staging_ring.h"
#include "watchdog.h"

namespace jreshard {

class NcclExchange : public GpuExchange, public Forwarder::Target {
 public:
  // `ordinals` has the device ordinal of each local rank. A wave stages at most `slot_bytes` on each side of a rank.
  NcclExchange(CopyPlan plan, std::vector<std::string> rank_names, std::map<int, int> ordinals,
               const cuda::Driver& driver, std::shared_ptr<NcclCommunicator> communicator, int64_t slot_bytes);
  ~NcclExchange() override;

  bool begin(CallId id, double timeout_s) override;
  // Never: those who only send do so in their release step.
  bool release_now(CallId) override { return false; }
  int steps_run(CallId id) const override;
  void abort(CallId id, const std::string& reason) override;
  void abort_all(const std::string& reason) override;
  int open_calls() const override;
  bool broken() const override;
  void wait(CallId id) override;
  void expired(CallId id) override;

  void publish(int rank, int chunk, const std::vector<const void*>& arrays, cuda::Stream stream) override;
  void receive(int rank, int chunk, const std::vector<void*>& results, cuda::Stream stream) override;
  void release(int rank, int end, cuda::Stream stream) override;

 private:
  using Clock = std::chrono::steady_clock;

  // A local rank's device, and what the open call has to do on it.
  struct Device {
    std::shared_ptr<StagingRing> ring;
    cuda::Event inputs = nullptr;      // the program has come to its chunk
    cuda::Event copied = nullptr;      // what stays on the device is in place
    cuda::Event joined = nullptr;      // a side stream has come to the end of the launch
    cuda::Event done = nullptr;        // after the last launch so far
    std::vector<const void*> sources;  // [leaf], where the rank sends
    std::vector<bool> published;       // [chunk]: whether what the rank sends of it is known
    int received = 0, released = 0;    // chunks
    int launches_left = 0;             // launches that enqueue something, and have not yet
  };
  struct Call {
    CallId id;
    Clock::time_point deadline;
    double timeout_s;
    Watchdog::Ticket ticket;
    std::string error;
    bool left_to_wait = false;  // the deadline has passed, and wait() is to fail the call
    int steps_run = 0;          // publishes and receives
  };
  using Targets = std::vector<void*>;
  // The arrays of one chunk on a device.
  struct Arrays {
    const std::vector<const void*>& sources;  // [leaf]
    const Targets& results;                   // [leaf of the chunk]
    int first;                                // leaf of the chunk

    const void* read(int leaf, bool passed_on) const { return passed_on ? write(leaf) : sources[leaf]; }
    void* write(int leaf) const { return results[leaf - first]; }
  };

  void destroy_events();
  // Fails the open call, if it has that id; returns, after the abort, whether it had not failed before.
  bool fail(std::optional<CallId> id, const std::string& reason);
  Watchdog::Ticket expire_at(Clock::time_point deadline, CallId id) const;
  bool ended(CallId id);
  void check_running(CallId id) const;
  std::vector<int> unlaunched() const;
  std::vector<int> unfinished() const;
  std::string late(const std::string& devices) const;
  std::string names_of(const std::vector<int>& ranks, const char* more) const;
  void drain(CallId id);
  bool busy() const;
  void check_open() const;
  void check_fits(int chunk, size_t arrays) const;
  // The chunks from `begin` to before `end`.
  struct Chunks {
    int begin, end;
  };
  // Runs `action(device, deadline)` in the device's context, as one launch of the open call for these chunks, and
  // `enqueued(device)` with the lock held. If it throws, the call fails, and the stream goes on only when what was
  // enqueued until then is over.
  template <typename Action, typename Enqueued>
  void launch(int rank, Chunks chunks, cuda::Stream stream, Action action, Enqueued enqueued);
  void run_waves(Device& device, int rank, int chunk, const Targets& results, cuda::Stream stream,
                 Clock::time_point deadline);
  void run_wave(Device& device, int rank, const NcclSchedule::Wave& wave, const Arrays& arrays, cuda::Stream stream,
                Clock::time_point deadline);
  void await_arrivals(Device& device, const StagingRing::Turn& turn, const NcclSchedule::Wave& wave,
                      cuda::Stream stream);
  void pack(Device& device, StagingRing::Slot& slot, const NcclSchedule::Wave& wave, const Arrays& arrays,
            cuda::Stream stream);
  void unpack(Device& device, StagingRing::Slot& slot, const NcclSchedule::Wave& wave, const Arrays& arrays,
              cuda::Stream stream);
  void copy_locally(int rank, int chunk, const Arrays& arrays, cuda::Stream stream);
  void join_side_streams(Device& device, cuda::Stream stream);
  void join_after_failure(Device& device, cuda::Stream stream);
  void order_after(cuda::Stream stream, cuda::Event event);
  void record(cuda::Event event, cuda::Stream stream);

  const CopyPlan plan_;
  const std::vector<std::string> rank_names_;
  const cuda::Driver& driver_;
  const std::shared_ptr<NcclCommunicator> communicator_;
  const std::map<int, int> ordinals_;
  const NcclSchedule schedule_;
  std::map<int, Device> devices_;  // by local rank
  mutable std::mutex mutex_;
  std::unique_ptr<Call> call_;
  int launching_ = 0;   // threads that enqueue
  std::string broken_;  // why no further call can be opened
  const std::shared_ptr<Forwarder> forwarder_ = std::make_shared<Forwarder>(*this);
};

}  // namespace jreshard
