#include "process_group.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace jreshard {

ProcessGroup::ProcessGroup(const CopyPlan& plan, const std::vector<std::string>& rank_names, ProcessMap map)
    : plan_(plan), rank_names_(rank_names), map_(std::move(map)) {
  if (static_cast<int>(rank_names_.size()) != plan_.num_ranks()) {
    throw std::invalid_argument("the number of rank names is not the number of ranks");
  }
  if (alone()) return;
  if (map_.process_of.size() != rank_names_.size()) {
    throw std::invalid_argument("the number of processes is not the number of ranks");
  }
  others_.insert(map_.process_of.begin(), map_.process_of.end());
  others_.erase(self());
  plan_.for_each_read([&](int, int, int source, int reader) {
    if (local(source) != local(reader)) partners_.insert(map_.process_of[local(source) ? reader : source]);
  });
}

std::set<int> ProcessGroup::processes_of(const std::vector<int>& ranks) const {
  std::set<int> processes;
  for (int rank : ranks) {
    if (!local(rank)) processes.insert(map_.process_of[rank]);
  }
  return processes;
}

void ProcessGroup::enter(CallId id, const std::shared_ptr<Peers::Listener>& listener) const {
  for (const auto& [process, message] : map_.peers->open(map_.key, id, listener)) listener->heard(process, message);
  for (int process : partners_) {
    if (map_.peers->connected(process)) continue;
    listener->lost(id, process, "jreshard: " + name(process) + " is not linked to this process");
  }
}

void ProcessGroup::leave(CallId id, const std::string& error) const { map_.peers->close(map_.key, id, error); }

void ProcessGroup::tell(int process, Message::Kind kind, CallId id, int chunk, int phase, int rank) const {
  map_.peers->send(process, {kind, id, map_.key, rank, chunk, phase});
}

void ProcessGroup::publish(CallId id, int rank, int chunk, int phase, const void* const* arrays) const {
  const std::set<int> readers = processes_of(plan_.readers(chunk, rank, phase));
  if (readers.empty()) return;
  Message message{Message::kPublish, id, map_.key, rank, chunk, phase};
  for (int leaf = plan_.chunk_begin(chunk); leaf < plan_.chunk_end(chunk); ++leaf) {
    message.addresses.push_back(reinterpret_cast<uint64_t>(*arrays++));
  }
  for (int process : readers) map_.peers->send(process, message);
}

void ProcessGroup::tell_failure(CallId id, const Failure& failure) const {
  const Message abort{Message::kAbort, id, map_.key, failure.origin, 0, 0, {}, failure.reason};
  for (int process : others_) {
    if (process != failure.origin) map_.peers->send(process, abort);
  }
}

ProcessGroup::Failure ProcessGroup::found(const std::string& error) const {
  const std::string prefix = "jreshard: ";
  const bool prefixed = error.compare(0, prefix.size(), prefix) == 0;
  return {error, alone() ? 0 : self(), prefixed ? error.substr(prefix.size()) : error};
}

ProcessGroup::Failure ProcessGroup::told(const Message& abort) const {
  return {"jreshard: " + name(abort.rank) + ": " + abort.reason, abort.rank, abort.reason};
}

ProcessGroup::Failure ProcessGroup::misfit(int process, const std::string& fault) const {
  return found("jreshard: " + name(process) + " sent what does not fit the transfer: " + fault);
}

std::string ProcessGroup::fault(int process, const Message& message) const {
  const int rank = message.rank, chunk = message.chunk, phase = message.phase;
  if (chunk < 0 || chunk >= plan_.num_chunks()) return "chunk " + std::to_string(chunk);
  if (phase < 0 || phase >= plan_.num_phases()) return "phase " + std::to_string(phase);
  if (rank < 0 || rank >= plan_.num_ranks()) return "rank " + std::to_string(rank);
  if (message.kind == Message::kConfirm) return "";  // in the name of one of the readers here
  if (map_.process_of[rank] != process) return "a message in the name of " + rank_names_[rank];
  if (message.kind != Message::kPublish) return "";
  if (phase == 0 ? !plan_.sends(rank) : !plan_.receives(rank)) return rank_names_[rank] + " has nothing to publish";
  const size_t leaves = plan_.chunk_end(chunk) - plan_.chunk_begin(chunk);
  return message.addresses.size() == leaves ? "" : std::to_string(message.addresses.size()) + " addresses";
}

}  // namespace jreshard
