// Executes the local ranks' part of a plan: who has published, who waits, what to copy, and how a call ends.
//
// A call has three steps on every device, each one FFI call a chunk of leaves (release: one for all):
//   publish  on source devices: the arrays are there, and may be read. Never waits.
//   receive  on destination devices: pulls every box once its sources are published. Waits for publishes only.
//   release  on source devices: completes when nobody reads the arrays any more. Waits for receives only.
// Waits follow this order and never form a circle, whatever devices the two sides share.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy_plan.h"
#include "exchange.h"
#include "watchdog.h"

namespace jreshard {

class HostExchange : public Exchange, public std::enable_shared_from_this<HostExchange> {
 public:
  // Called once, from any thread, never under a lock of the exchange: null for success, else what went wrong.
  using Done = std::function<void(const std::string* error)>;

  // `rank_names` is how errors name each rank.
  HostExchange(CopyPlan plan, std::vector<std::string> rank_names);

  bool begin(CallId id, double timeout_s) override;

  // `arrays` holds one pointer a leaf of `chunk`. Returns an error or an empty string.
  std::string publish(CallId id, int rank, int chunk, const std::vector<const void*>& arrays);
  void receive(CallId id, int rank, int chunk, std::vector<void*> arrays, Done done);
  void release(CallId id, int rank, Done done);
  // Ends the release step of all ranks if every reader is done already. Then no release is to follow.
  bool release_now(CallId id) override;

  // Fails the call now. Running copies end first; nobody is told before nobody touches its memory.
  void abort(CallId id, const std::string& reason) override;
  void abort_all(const std::string& reason) override;
  int open_calls() const override;
  const CopyPlan& plan() const { return plan_; }

 private:
  // The part of a call that one destination rank receives in one chunk.
  struct Job {
    bool started = false;
    bool copying = false;
    int sources_missing = 0;
    std::vector<void*> arrays;
    Done done;
    std::atomic<int> tasks_left{0};
  };
  struct Call {
    std::vector<std::vector<const void*>> sources;  // [rank][leaf]
    std::vector<std::vector<bool>> published;       // [rank][chunk]
    std::vector<std::unique_ptr<Job>> jobs;         // [chunk * ranks + rank]
    std::vector<int> readers_left;                  // [rank]
    std::vector<Done> releases;                     // [rank], while waiting
    int events_left = 0;                            // receives and releases that have not ended
    int copying = 0;                                // jobs whose copies run
    double timeout_s = 0;
    Watchdog::Ticket deadline;
    std::atomic<bool> failed{false};
    std::string error;
  };
  using CallPtr = std::shared_ptr<Call>;
  // What to do once the lock is let go.
  using Deferred = std::vector<std::function<void()>>;

  CallPtr find(CallId id) const;
  // What is wrong with a handler's arguments: out of range for the plan. Empty where nothing is.
  std::string misuse(bool takes_part, int chunk, size_t arrays) const;
  std::string why_closed(CallId id) const;
  Job& job(Call& call, int chunk, int rank) const { return *call.jobs[chunk * plan_.num_ranks() + rank]; }

  void start(CallId id, const CallPtr& call, int chunk, int rank, Deferred& after);
  void run(CallId id, const CallPtr& call, int chunk, int rank);
  void finish(CallId id, const CallPtr& call, int chunk, int rank);
  void end_events(CallId id, const CallPtr& call, int count);
  void fail(CallId id, CallPtr call, std::string reason, Deferred& after);
  void close_failed(CallId id, const CallPtr& call, Deferred& after);
  void close(CallId id, const CallPtr& call);
  std::string late(const Call& call) const;

  const CopyPlan plan_;
  const std::vector<std::string> rank_names_;
  mutable std::mutex mutex_;
  std::map<CallId, CallPtr> calls_;
  std::deque<std::pair<CallId, std::string>> failures_;  // the last few, to explain late arrivals
};

}  // namespace jreshard
