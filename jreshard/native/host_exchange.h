// Executes the local ranks' part of a plan: who has published, who waits, what to copy, and how a call ends.
//
// A call has three steps on every device, each one FFI call a chunk of leaves (release: one for all):
//   publish  on source devices: the arrays are there, and may be read. Never waits.
//   receive  on destination devices: pulls every box once its sources are published, then, phase by phase, what other
//            destinations have received; completes when nobody reads the new arrays any more.
//   release  on source devices: completes when nobody reads the arrays any more. Waits for receives only.
// Waits follow this order, and the phases', and never form a circle, whatever devices the two sides share.
//
// Ranks may live in other processes of this machine, whose memory is read directly. What the processes tell each other
// is in peer_messages.h; nothing read from another process counts before that process has confirmed it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "copy_plan.h"
#include "copy_tasks.h"
#include "exchange.h"
#include "process_group.h"
#include "watchdog.h"

namespace jreshard {

class HostExchange : public Exchange, public Peers::Listener, public std::enable_shared_from_this<HostExchange> {
 public:
  // Called once, from any thread, never under a lock of the exchange: null for success, else what went wrong.
  using Done = std::function<void(const std::string* error)>;

  // `rank_names` is how errors name each rank. The steps are for local ranks only.
  HostExchange(CopyPlan plan, std::vector<std::string> rank_names, ProcessMap map = {});

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

  void heard(int process, const Message& message) override;
  void lost(CallId id, int process, const std::string& error) override;

 private:
  // The part of a call that one local destination rank receives in one chunk.
  struct Job {
    bool started = false;
    bool copying = false;
    int phase = 0;              // the one that runs, or comes next
    std::vector<int> missing;   // [phase]: sources that have not published
    std::set<int> unconfirmed;  // processes that have to confirm what was read in this phase
    int readers_left = 0;       // of the new arrays
    std::vector<void*> arrays;
    Done done;
    std::atomic<int> tasks_left{0};
  };
  using Arrays = std::vector<std::vector<const void*>>;  // [rank][leaf]; of remote ranks too
  struct Call {
    std::vector<Arrays> arrays;              // [phase]: what it reads
    std::vector<bool> published;             // [slot]: the rank's arrays may be read in that phase
    std::vector<bool> read;                  // [slot]: the remote rank is done with reading in that phase
    std::vector<std::unique_ptr<Job>> jobs;  // [chunk * ranks + rank]
    std::vector<int> readers_left;           // [rank], of the arrays that local ranks publish
    std::vector<Done> releases;              // [rank], while waiting
    int events_left = 0;                     // receives and releases that have not ended
    int copying = 0;                         // jobs whose copies run
    double timeout_s = 0;
    Watchdog::Ticket deadline;
    std::atomic<bool> failed{false};
    std::string error;
  };
  using CallPtr = std::shared_ptr<Call>;
  // What to do once the lock is let go.
  using Deferred = std::vector<std::function<void()>>;

  bool local(int rank) const { return group_.local(rank); }
  bool sends(int rank) const { return rank >= 0 && local(rank) && plan_.sends(rank); }
  bool receives(int rank) const { return rank >= 0 && local(rank) && plan_.receives(rank); }
  size_t slot(int chunk, int phase, int rank) const { return plan_.slot(chunk, phase, rank); }
  Job& job(const Call& call, int chunk, int rank) const { return *call.jobs[chunk * plan_.num_ranks() + rank]; }
  CallPtr find(CallId id) const;
  CallPtr make_call(double timeout_s) const;
  // What is wrong with a handler's arguments: out of range for the plan. Empty where nothing is.
  std::string misuse(bool takes_part, int chunk, size_t arrays) const;
  std::string why_closed(CallId id) const;

  // How a call goes on; all with the lock held, but for run() and finish().
  void make_readable(CallId id, const CallPtr& call, int chunk, int phase, int rank, Deferred& after);
  void wake_readers(CallId id, const CallPtr& call, int chunk, int phase, int rank, Deferred& after);
  void advance(CallId id, const CallPtr& call, int chunk, int rank, Deferred& after);
  void start(CallId id, const CallPtr& call, int chunk, int rank, Deferred& after);
  void run(CallId id, const CallPtr& call, int chunk, int rank);
  std::vector<CopyTask> tasks(const Call& call, int chunk, int rank) const;
  void finish(CallId id, const CallPtr& call, int chunk, int rank);
  void end_phase(CallId id, const CallPtr& call, int chunk, int rank, Deferred& after);
  void reader_done(CallId id, const CallPtr& call, int chunk, int phase, int source, Deferred& after);
  void complete_if_unread(CallId id, const CallPtr& call, int chunk, int rank, Deferred& after);

  // How it ends (host_exchange_end.cc); with the lock held.
  void fail(CallId id, const CallPtr& call, const ProcessGroup::Failure& failure, Deferred& after);
  void end_events(CallId id, const CallPtr& call, int count);
  void close_failed(CallId id, const CallPtr& call, Deferred& after);
  void close(CallId id, const CallPtr& call);
  std::string late(const CallPtr& call) const;

  // What other processes have to do with it (host_exchange_peers.cc); with the lock held.
  // What is wrong with a message, or empty text.
  std::string fault(int process, const Call& call, const Message& message) const;
  void act_on(int process, const CallPtr& call, const Message& message, Deferred& after);
  // Which ranks of other processes this one waits for: to publish, and to have read.
  std::set<int> unpublished(const Call& call) const;
  std::set<int> unread(const Call& call) const;
  std::set<int> unconfirmed(const Call& call) const;  // processes
  bool needs(const Call& call, int process) const;

  const CopyPlan plan_;
  const std::vector<std::string> rank_names_;
  const ProcessGroup group_;
  mutable std::mutex mutex_;
  std::map<CallId, CallPtr> calls_;
  std::deque<std::pair<CallId, std::string>> failures_;  // the last few, to explain late arrivals
};

}  // namespace jreshard
