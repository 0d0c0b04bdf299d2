// How calls of HostExchange end: well, with an error, or at their deadline.
#include <algorithm>
#include <utility>

#include "host_exchange.h"
#include "timeout.h"

namespace jreshard {
namespace {

constexpr size_t kFailuresKept = 64;

template <typename Name>
void add_names(std::string& text, const char* what, const std::set<int>& numbers, Name name) {
  const char* separator = what;
  for (int number : numbers) {
    text += separator + name(number);
    separator = ", ";
  }
}

}  // namespace

std::string HostExchange::why_closed(CallId id) const {
  for (const auto& [failed, reason] : failures_) {
    if (failed == id) return reason;
  }
  return "jreshard: this transfer is not under way (call " + std::to_string(id) + ")";
}

void HostExchange::abort(CallId id, const std::string& reason) {
  Deferred after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(id);
    if (found == calls_.end()) return;
    fail(id, CallPtr(found->second), group_.found(reason), after);
  }
  for (auto& action : after) action();
}

void HostExchange::abort_all(const std::string& reason) {
  std::vector<CallId> open;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : calls_) open.push_back(entry.first);
  }
  for (CallId id : open) abort(id, reason);
}

// Jobs whose copies run are told by finish(), when their memory is no longer written. Other processes are told first:
// what they read from now on is not what they want.
void HostExchange::fail(CallId id, const CallPtr& call, const ProcessGroup::Failure& failure, Deferred& after) {
  if (call->failed) return;
  if (!group_.alone()) group_.tell_failure(id, failure);
  call->error = failure.error;
  call->failed = true;
  for (auto& waiting : call->jobs) {
    if (!waiting || waiting->copying || !waiting->done) continue;
    after.push_back([done = std::move(waiting->done), error = call->error] { done(&error); });
    waiting->done = nullptr;
  }
  if (call->copying == 0) close_failed(id, call, after);
}

// The call stays open until here, so that a release that comes late still waits for the copies.
void HostExchange::close_failed(CallId id, const CallPtr& call, Deferred& after) {
  for (Done& waiting : call->releases) {
    if (!waiting) continue;
    after.push_back([done = std::move(waiting), error = call->error] { done(&error); });
    waiting = nullptr;
  }
  failures_.emplace_back(id, call->error);
  if (failures_.size() > kFailuresKept) failures_.pop_front();
  close(id, call);
}

void HostExchange::end_events(CallId id, const CallPtr& call, int count) {
  call->events_left -= count;
  if (call->events_left == 0) close(id, call);
}

void HostExchange::close(CallId id, const CallPtr& call) {
  Watchdog::shared().cancel(call->deadline);
  calls_.erase(id);
  if (!group_.alone()) group_.leave(id, call->error);
}

// Names whom the call waits for.
std::string HostExchange::late(const CallPtr& call) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::set<int> silent_sources = unpublished(*call), absent_readers;
  for (int rank = 0; rank < plan_.num_ranks(); ++rank) {
    bool silent = false, absent = false;
    for (int chunk = 0; chunk < plan_.num_chunks(); ++chunk) {
      silent |= sends(rank) && !call->published[slot(chunk, 0, rank)];
      absent |= receives(rank) && !job(*call, chunk, rank).started;
    }
    if (silent) silent_sources.insert(rank);
    if (absent) absent_readers.insert(rank);
  }
  auto name = [&](int rank) { return rank_names_[rank]; };
  std::string whom;
  add_names(whom, "; source not published by ", silent_sources, name);
  add_names(whom, "; destination not started on ", absent_readers, name);
  if (!group_.alone()) {
    add_names(whom, "; not read yet by ", unread(*call), name);
    add_names(whom, "; no answer from ", unconfirmed(*call), [&](int p) { return group_.name(p); });
  }
  return "jreshard: transfer timed out after " + seconds(call->timeout_s) + (whom.empty() ? " while copying" : whom);
}

}  // namespace jreshard
