// What HostExchange has to do with other processes. A bad message fails its call; it cannot have anything read or
// written in this process but in the bookkeeping of that call.
#include <algorithm>
#include <tuple>
#include <utility>

#include "host_exchange.h"
#include "workers.h"

namespace jreshard {

void HostExchange::heard(int process, const Message& message) {
  Deferred after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(message.call);
    if (found == calls_.end() || found->second->failed) return;
    const CallPtr call = found->second;
    const std::string wrong = fault(process, *call, message);
    if (wrong.empty()) {
      act_on(process, call, message, after);
    } else {
      fail(message.call, call, group_.misfit(process, wrong), after);
    }
  }
  // Not here: this is the thread of the link, which has to go on listening.
  if (!after.empty()) Workers::shared().submit(std::move(after));
}

std::string HostExchange::fault(int process, const Call& call, const Message& message) const {
  if (message.kind == Message::kAbort) return "";
  if (std::string wrong = group_.fault(process, message); !wrong.empty()) return wrong;
  const auto [rank, chunk, phase] = std::tuple(message.rank, message.chunk, message.phase);
  if (message.kind == Message::kConfirm) {
    if (!receives(rank)) return "a confirmation for " + rank_names_[rank];
    const Job& mine = job(call, chunk, rank);
    const bool expected = mine.phase == phase && mine.unconfirmed.count(process);
    return expected ? "" : "a confirmation that nobody asked for";
  }
  if (message.kind == Message::kPublish) {
    return call.published[slot(chunk, phase, rank)] ? rank_names_[rank] + " has published before" : "";
  }
  const std::vector<int>& sources = plan_.sources(chunk, rank, phase);
  if (std::none_of(sources.begin(), sources.end(), [&](int source) { return local(source); })) {
    return rank_names_[rank] + " has nothing to read here";
  }
  for (int source : sources) {
    if (local(source) && !call.published[slot(chunk, phase, source)]) return rank_names_[rank] + " has read too early";
  }
  return call.read[slot(chunk, phase, rank)] ? rank_names_[rank] + " has read before" : "";
}

void HostExchange::act_on(int process, const CallPtr& call, const Message& message, Deferred& after) {
  const CallId id = message.call;
  const auto [rank, chunk, phase] = std::tuple(message.rank, message.chunk, message.phase);
  switch (message.kind) {
    case Message::kPublish: {
      std::vector<const void*>& arrays = call->arrays[phase][rank];
      for (size_t i = 0; i < message.addresses.size(); ++i) {
        arrays[plan_.chunk_begin(chunk) + i] = reinterpret_cast<const void*>(message.addresses[i]);
      }
      return wake_readers(id, call, chunk, phase, rank, after);
    }
    case Message::kDone:
      call->read[slot(chunk, phase, rank)] = true;
      // The call has not failed: what was read until now was still there.
      group_.tell(process, Message::kConfirm, id, chunk, phase, rank);
      for (int source : plan_.sources(chunk, rank, phase)) {
        if (local(source)) reader_done(id, call, chunk, phase, source, after);
      }
      return;
    case Message::kConfirm: {
      Job& mine = job(*call, chunk, rank);
      mine.unconfirmed.erase(process);
      if (mine.unconfirmed.empty()) end_phase(id, call, chunk, rank, after);
      return;
    }
    case Message::kAbort:
      return fail(id, call, group_.told(message), after);
    case Message::kLend:
    case Message::kFlags:
      break;  // what Peers keeps for exchanges of GPUs
  }
}

void HostExchange::lost(CallId id, int process, const std::string& error) {
  Deferred after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(id);
    if (found == calls_.end() || !needs(*found->second, process)) return;
    fail(id, CallPtr(found->second), group_.found(error), after);
  }
  if (!after.empty()) Workers::shared().submit(std::move(after));
}

std::set<int> HostExchange::unpublished(const Call& call) const {
  std::set<int> ranks;
  plan_.for_each_read([&](int chunk, int phase, int source, int reader) {
    if (local(reader) && !local(source) && !call.published[slot(chunk, phase, source)]) ranks.insert(source);
  });
  return ranks;
}

std::set<int> HostExchange::unread(const Call& call) const {
  std::set<int> ranks;
  plan_.for_each_read([&](int chunk, int phase, int source, int reader) {
    if (local(source) && !local(reader) && !call.read[slot(chunk, phase, reader)]) ranks.insert(reader);
  });
  return ranks;
}

std::set<int> HostExchange::unconfirmed(const Call& call) const {
  std::set<int> processes;
  for (const auto& mine : call.jobs) {
    if (mine) processes.insert(mine->unconfirmed.begin(), mine->unconfirmed.end());
  }
  return processes;
}

// Whether the call cannot end well without the process. One that has done its part may go.
bool HostExchange::needs(const Call& call, int process) const {
  std::set<int> ranks = unpublished(call);
  ranks.merge(unread(call));
  if (unconfirmed(call).count(process)) return true;
  // A job in the midst of reading does not show in any of these.
  for (int rank = 0; rank < plan_.num_ranks(); ++rank) {
    for (int chunk = 0; receives(rank) && chunk < plan_.num_chunks(); ++chunk) {
      const Job& mine = job(call, chunk, rank);
      for (int phase = mine.phase; phase < plan_.num_phases(); ++phase) {
        ranks.insert(plan_.sources(chunk, rank, phase).begin(), plan_.sources(chunk, rank, phase).end());
      }
    }
  }
  return std::any_of(ranks.begin(), ranks.end(), [&](int rank) { return group_.process_of(rank) == process; });
}

}  // namespace jreshard
