#include "host_exchange.h"

#include <algorithm>
#include <utility>

#include "timeout.h"
#include "workers.h"

namespace jreshard {

HostExchange::HostExchange(CopyPlan plan, std::vector<std::string> rank_names, ProcessMap map)
    : plan_(std::move(plan)), rank_names_(std::move(rank_names)), group_(plan_, rank_names_, std::move(map)) {}

HostExchange::CallPtr HostExchange::make_call(double timeout_s) const {
  const int ranks = plan_.num_ranks();
  const int chunks = plan_.num_chunks();
  const int phases = plan_.num_phases();
  auto call = std::make_shared<Call>();
  call->arrays.assign(phases, Arrays(ranks));
  call->published.resize(plan_.num_slots());
  call->read.resize(call->published.size());
  call->readers_left.resize(ranks);
  call->releases.resize(ranks);
  call->jobs.resize(static_cast<size_t>(chunks) * ranks);
  call->timeout_s = timeout_s;
  for (int rank = 0; rank < ranks; ++rank) {
    for (int phase = 0; phase < phases; ++phase) {
      if (phase == 0 ? plan_.sends(rank) : plan_.receives(rank)) call->arrays[phase][rank].resize(plan_.num_leaves());
    }
    if (!local(rank)) continue;
    if (plan_.sends(rank)) {
      call->readers_left[rank] = plan_.num_readers(rank);
      ++call->events_left;
    }
    if (!plan_.receives(rank)) continue;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      auto& job = call->jobs[chunk * ranks + rank];
      job = std::make_unique<Job>();
      for (int phase = 0; phase < phases; ++phase) {
        job->missing.push_back(static_cast<int>(plan_.sources(chunk, rank, phase).size()));
        if (phase > 0) job->readers_left += static_cast<int>(plan_.readers(chunk, rank, phase).size());
      }
      ++call->events_left;
    }
  }
  return call;
}

bool HostExchange::begin(CallId id, double timeout_s) {
  const CallPtr call = make_call(timeout_s);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (calls_.count(id)) return false;
    if (call->events_left == 0) return true;  // no part of it is here
    calls_.emplace(id, call);
    call->deadline = Watchdog::shared().at(deadline_in(timeout_s), [self = shared_from_this(), id] {
      CallPtr call = self->find(id);
      if (call) self->abort(id, self->late(call));
    });
  }
  if (!group_.alone()) group_.enter(id, shared_from_this());
  return true;
}

HostExchange::CallPtr HostExchange::find(CallId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = calls_.find(id);
  return found == calls_.end() ? nullptr : found->second;
}

int HostExchange::open_calls() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(calls_.size());
}

std::string HostExchange::misuse(bool takes_part, int chunk, size_t arrays) const {
  if (!takes_part) return "jreshard: a program ran on a device that its plan does not use";
  if (chunk < 0 || chunk >= plan_.num_chunks() ||
      static_cast<size_t>(plan_.chunk_end(chunk) - plan_.chunk_begin(chunk)) != arrays) {
    return "jreshard: a program does not fit its plan";
  }
  return "";
}

std::string HostExchange::publish(CallId id, int rank, int chunk, const std::vector<const void*>& arrays) {
  if (std::string error = misuse(sends(rank), chunk, arrays.size()); !error.empty()) return error;
  Deferred after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(id);
    if (found == calls_.end()) return why_closed(id);
    const CallPtr call = found->second;
    if (call->failed) return call->error;
    if (call->published[slot(chunk, 0, rank)]) return "jreshard: a source was published twice";
    std::copy(arrays.begin(), arrays.end(), call->arrays[0][rank].begin() + plan_.chunk_begin(chunk));
    make_readable(id, call, chunk, 0, rank, after);
  }
  for (auto& action : after) action();
  return "";
}

void HostExchange::receive(CallId id, int rank, int chunk, std::vector<void*> arrays, Done done) {
  const std::string error = misuse(receives(rank), chunk, arrays.size());
  if (!error.empty()) return done(&error);
  Deferred after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(id);
    if (found == calls_.end() || found->second->failed) {
      std::string error = found == calls_.end() ? why_closed(id) : found->second->error;
      after.push_back([done = std::move(done), error = std::move(error)] { done(&error); });
    } else {
      const CallPtr call = found->second;
      Job& mine = job(*call, chunk, rank);
      mine.started = true;
      for (int phase = 1; phase < plan_.num_phases(); ++phase) {
        std::copy(arrays.begin(), arrays.end(), call->arrays[phase][rank].begin() + plan_.chunk_begin(chunk));
      }
      mine.arrays = std::move(arrays);
      mine.done = std::move(done);
      advance(id, call, chunk, rank, after);
    }
  }
  for (auto& action : after) action();
}

bool HostExchange::release_now(CallId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = calls_.find(id);
  if (found == calls_.end() || found->second->failed) return false;
  const CallPtr call = found->second;
  if (std::any_of(call->readers_left.begin(), call->readers_left.end(), [](int left) { return left > 0; }))
    return false;
  int releases = 0;
  for (int rank = 0; rank < plan_.num_ranks(); ++rank) releases += sends(rank);
  end_events(id, call, releases);
  return true;
}

void HostExchange::release(CallId id, int rank, Done done) {
  std::string error = sends(rank) ? "" : misuse(false, 0, 0);
  if (!error.empty()) return done(&error);
  bool ready = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(id);
    if (found == calls_.end()) {
      error = why_closed(id);
    } else if (found->second->readers_left[rank] == 0 && !found->second->failed) {
      const CallPtr call = found->second;
      end_events(id, call, 1);
      ready = true;
    } else {
      found->second->releases[rank] = std::move(done);
      return;
    }
  }
  done(ready ? nullptr : &error);
}

// The arrays of a local rank may be read in a phase, by whoever reads them then.
void HostExchange::make_readable(CallId id, const CallPtr& call, int chunk, int phase, int rank, Deferred& after) {
  if (!group_.alone()) {
    group_.publish(id, rank, chunk, phase, call->arrays[phase][rank].data() + plan_.chunk_begin(chunk));
  }
  wake_readers(id, call, chunk, phase, rank, after);
}

void HostExchange::wake_readers(CallId id, const CallPtr& call, int chunk, int phase, int rank, Deferred& after) {
  call->published[slot(chunk, phase, rank)] = true;
  for (int reader : plan_.readers(chunk, rank, phase)) {
    if (!local(reader)) continue;
    --job(*call, chunk, reader).missing[phase];
    advance(id, call, chunk, reader, after);
  }
}

// Starts the phase that comes next, if all is there that it reads. Phases without copies are passed over.
void HostExchange::advance(CallId id, const CallPtr& call, int chunk, int rank, Deferred& after) {
  Job& mine = job(*call, chunk, rank);
  if (!mine.started || mine.copying || !mine.unconfirmed.empty()) return;
  if (mine.phase == plan_.num_phases() || mine.missing[mine.phase] > 0) return;
  if (plan_.sources(chunk, rank, mine.phase).empty()) {
    end_phase(id, call, chunk, rank, after);
  } else {
    start(id, call, chunk, rank, after);
  }
}

void HostExchange::start(CallId id, const CallPtr& call, int chunk, int rank, Deferred& after) {
  job(*call, chunk, rank).copying = true;
  ++call->copying;
  after.push_back([this, self = shared_from_this(), id, call, chunk, rank] { run(id, call, chunk, rank); });
}

void HostExchange::run(CallId id, const CallPtr& call, int chunk, int rank) {
  std::vector<CopyTask> pieces = tasks(*call, chunk, rank);
  job(*call, chunk, rank).tasks_left = static_cast<int>(pieces.size());
  std::vector<Workers::Task> work;
  for (CopyTask& task : pieces) {
    work.push_back([this, self = shared_from_this(), id, call, chunk, rank, task = std::move(task)] {
      if (!call->failed) {
        const CopyFault fault = copy_pieces(task);
        if (!fault.what.empty()) abort(id, "jreshard: " + group_.name(fault.process) + " " + fault.what);
      }
      if (--job(*call, chunk, rank).tasks_left == 0) finish(id, call, chunk, rank);
    });
  }
  // The thread that found the job ready copies too.
  const Workers::Task mine_first = std::move(work.back());
  work.pop_back();
  if (!work.empty()) Workers::shared().submit(std::move(work));
  mine_first();
}

std::vector<CopyTask> HostExchange::tasks(const Call& call, int chunk, int rank) const {
  const Job& mine = job(call, chunk, rank);
  const Arrays& arrays = call.arrays[mine.phase];
  std::vector<Origin> origins(plan_.num_ranks());
  for (int source : plan_.sources(chunk, rank, mine.phase)) {
    if (local(source)) continue;
    const int process = group_.process_of(source);
    origins[source] = {0, process, group_.peers().pid(process)};
  }
  int64_t bytes = 0;
  for (int leaf = plan_.chunk_begin(chunk); leaf < plan_.chunk_end(chunk); ++leaf) {
    for (const Copy& copy : plan_.copies(leaf, rank, mine.phase)) bytes += copy.bytes();
  }
  TaskBuilder builder(bytes, Workers::shared().threads());
  for (int leaf = plan_.chunk_begin(chunk); leaf < plan_.chunk_end(chunk); ++leaf) {
    char* const dst = static_cast<char*>(mine.arrays[leaf - plan_.chunk_begin(chunk)]);
    for (const Copy& copy : plan_.copies(leaf, rank, mine.phase)) {
      Origin& origin = origins[copy.src_rank];
      origin.address = reinterpret_cast<uint64_t>(arrays[copy.src_rank][leaf]);
      builder.add(copy, origin, dst);
    }
  }
  return builder.take();
}

// The copies of a phase have ended, or were left out because the call has failed.
void HostExchange::finish(CallId id, const CallPtr& call, int chunk, int rank) {
  Deferred after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Job& mine = job(*call, chunk, rank);
    mine.copying = false;
    --call->copying;
    if (call->failed) {
      after.push_back([done = std::move(mine.done), error = call->error] { done(&error); });
      mine.done = nullptr;
      if (call->copying == 0) close_failed(id, call, after);
    } else {
      const std::vector<int>& sources = plan_.sources(chunk, rank, mine.phase);
      mine.unconfirmed = group_.processes_of(sources);
      for (int process : mine.unconfirmed) group_.tell(process, Message::kDone, id, chunk, mine.phase, rank);
      for (int source : sources) {
        if (local(source)) reader_done(id, call, chunk, mine.phase, source, after);
      }
      if (mine.unconfirmed.empty()) end_phase(id, call, chunk, rank, after);
    }
  }
  for (auto& action : after) action();
}

// What the phase has read counts.
void HostExchange::end_phase(CallId id, const CallPtr& call, int chunk, int rank, Deferred& after) {
  const int phase = ++job(*call, chunk, rank).phase;
  if (phase == plan_.num_phases()) return complete_if_unread(id, call, chunk, rank, after);
  make_readable(id, call, chunk, phase, rank, after);
  advance(id, call, chunk, rank, after);
}

// One more reader of a local rank's arrays needs them no longer.
void HostExchange::reader_done(CallId id, const CallPtr& call, int chunk, int phase, int source, Deferred& after) {
  if (phase > 0) {
    --job(*call, chunk, source).readers_left;
    return complete_if_unread(id, call, chunk, source, after);
  }
  if (--call->readers_left[source] > 0 || !call->releases[source]) return;
  after.push_back([done = std::move(call->releases[source])] { done(nullptr); });
  call->releases[source] = nullptr;
  end_events(id, call, 1);
}

void HostExchange::complete_if_unread(CallId id, const CallPtr& call, int chunk, int rank, Deferred& after) {
  Job& mine = job(*call, chunk, rank);
  if (mine.phase < plan_.num_phases() || mine.readers_left > 0) return;
  after.push_back([done = std::move(mine.done)] { done(nullptr); });
  mine.done = nullptr;
  end_events(id, call, 1);
}

}  // namespace jreshard
