#include "stream_peers.h"

#include <mutex>
#include <stdexcept>
#include <utility>

namespace jreshard {

struct StreamPeers::Neighbour {
  explicit Neighbour(const cuda::Driver& driver) : imports(driver) {}

  uint64_t serial = 0;  // of the link that all this came by
  ArenaImports imports;
  std::mutex mutex;
  std::set<uint64_t> lent;  // ids of this process's arenas that it has got
};

namespace {

ArenaExports& exports(const cuda::Driver& driver) {
  static auto* const all = new ArenaExports(driver);
  return *all;
}

Arena described(const Message& message) {
  return {message.addresses[0], message.addresses[1], message.addresses[2],
          std::vector<char>(message.reason.begin(), message.reason.end())};
}

}  // namespace

StreamPeers::StreamPeers(const CopyPlan& plan, Placement placement, std::map<int, int> ordinals,
                         const cuda::Driver& driver)
    : plan_(plan),
      placement_(std::move(placement)),
      ordinals_(std::move(ordinals)),
      driver_(driver),
      page_(2 * static_cast<size_t>(plan.num_chunks()) * plan.num_phases() * plan.num_ranks()) {
  for (int rank = 0; rank < plan_.num_ranks(); ++rank) {
    for (int chunk = 0; chunk < plan_.num_chunks(); ++chunk) {
      for (int phase = 0; phase < plan_.num_phases(); ++phase) {
        for (int source : plan_.sources(chunk, rank, phase)) {
          if (local(source) == local(rank)) continue;
          partners_.insert(placement_.process_of[local(source) ? rank : source]);
        }
      }
    }
  }
}

// One for each process, made anew with each link: a process that has come again has other memory.
StreamPeers::Neighbour& StreamPeers::neighbour(int process) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const all = new std::map<int, std::unique_ptr<Neighbour>>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<Neighbour>& found = (*all)[process];
  const uint64_t serial = placement_.peers->link_serial(process);
  if (!found || found->serial != serial) {
    found = std::make_unique<Neighbour>(driver_);
    found->serial = serial;
  }
  return *found;
}

void StreamPeers::greet() {
  for (int process : partners_) {
    const uint64_t serial = placement_.peers->link_serial(process);
    if (greeted_[process] == serial) continue;
    placement_.peers->send(process, {Message::kFlags, 0, placement_.key}, page_.descriptor().duplicate());
    greeted_[process] = serial;
  }
}

FlagPage& StreamPeers::own_page() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!page_.attached()) page_.attach(driver_);
  return page_;
}

FlagPage& StreamPeers::page_of(int process) {
  const std::shared_ptr<const Peers::SentPage> sent = placement_.peers->flags(process, placement_.key);
  const uint64_t serial = placement_.peers->link_serial(process);
  if (!sent) throw std::runtime_error("jreshard: " + name(process) + " has not sent its page of flags");
  std::lock_guard<std::mutex> lock(mutex_);
  Page& page = pages_[process];
  if (!page.flags || page.serial != serial || page.count != sent->count) {
    page.flags = std::make_unique<FlagPage>(sent->page.duplicate(), 2 * slots());
    page.flags->attach(driver_);
    page.serial = serial;
    page.count = sent->count;
  }
  return *page.flags;
}

std::set<int> StreamPeers::processes_of(const std::vector<int>& ranks) const {
  std::set<int> processes;
  for (int rank : ranks) {
    if (!local(rank)) processes.insert(placement_.process_of[rank]);
  }
  return processes;
}

void StreamPeers::lend(int process, const std::vector<const void*>& arrays) {
  Neighbour& to = neighbour(process);
  std::lock_guard<std::mutex> lock(to.mutex);
  for (const void* array : arrays) {
    if (!array) continue;
    const Arena arena = exports(driver_).find(reinterpret_cast<uint64_t>(array));
    if (!to.lent.insert(arena.id).second) continue;
    Message message{Message::kLend, 0, placement_.key};
    message.addresses = {arena.id, arena.base, arena.bytes};
    message.reason.assign(arena.ipc.begin(), arena.ipc.end());
    placement_.peers->send(process, message, exports(driver_).lend(arena));
  }
}

void StreamPeers::publish(CallId id, int rank, int chunk, int phase, const std::vector<const void*>& arrays,
                          cuda::Stream stream) {
  const std::set<int> readers = processes_of(plan_.readers(chunk, rank, phase));
  if (readers.empty()) return;
  write(stream, own_page().address(ready_flag(chunk, phase, rank)), id);
  Message message{Message::kPublish, id, placement_.key, rank, chunk, phase};
  for (const void* array : arrays) message.addresses.push_back(reinterpret_cast<uint64_t>(array));
  for (int process : readers) {
    lend(process, arrays);
    placement_.peers->send(process, message);
  }
}

void StreamPeers::await_ready(CallId id, int source, int chunk, int phase, cuda::Stream stream) {
  wait(stream, page_of(placement_.process_of[source]).address(ready_flag(chunk, phase, source)), id);
}

const void* StreamPeers::translate(int source, const void* address, int reader) {
  const int process = placement_.process_of[source];
  Neighbour& from = neighbour(process);
  for (Peers::Lent& lent : placement_.peers->take_lent(process)) {
    from.imports.add(described(lent.message), std::move(lent.attached));
  }
  return from.imports.translate(reinterpret_cast<uint64_t>(address), ordinals_.at(reader));
}

void StreamPeers::tell_read(CallId id, int reader, int chunk, int phase, cuda::Stream stream) {
  for (int process : processes_of(plan_.sources(chunk, reader, phase))) {
    write(stream, page_of(process).address(read_flag(chunk, phase, reader)), id);
  }
}

void StreamPeers::await_readers(CallId id, int source, int chunk, int phase, cuda::Stream stream) {
  for (int reader : plan_.readers(chunk, source, phase)) {
    if (!local(reader)) wait(stream, own_page().address(read_flag(chunk, phase, reader)), id);
  }
}

void StreamPeers::check_read(CallId id) {
  for (const auto& [rank, ordinal] : ordinals_) {
    for (int chunk = 0; chunk < plan_.num_chunks(); ++chunk) {
      for (int phase = 0; phase < plan_.num_phases(); ++phase) {
        for (int source : plan_.sources(chunk, rank, phase)) {
          if (local(source)) continue;
          const int process = placement_.process_of[source];
          if (page_of(process)[ready_flag(chunk, phase, source)].load(std::memory_order_acquire) != id) {
            throw std::runtime_error("jreshard: " + name(process) + " has given up while it was read from");
          }
        }
      }
    }
  }
}

void StreamPeers::give_up(CallId id, int origin, const std::string& reason) {
  std::set<int> others;
  for (int process : placement_.process_of) {
    if (process != placement_.peers->self() && process != origin) others.insert(process);
  }
  for (int process : others) {
    placement_.peers->send(process, {Message::kAbort, id, placement_.key, origin, 0, 0, {}, reason});
  }
  let_go();
}

void StreamPeers::let_go() {
  std::lock_guard<std::mutex> lock(mutex_);
  page_.fill(kGivenUp);
  for (auto& [process, page] : pages_) {
    if (page.flags) page.flags->fill(kGivenUp);
  }
}

void StreamPeers::trim() {
  for (int process : partners_) neighbour(process).imports.trim();
}

void StreamPeers::write(cuda::Stream stream, cuda::DevicePtr flag, uint64_t value) {
  cuda::check(driver_, driver_.StreamWriteValue64(stream, flag, value, 0), "cuStreamWriteValue64");
}

void StreamPeers::wait(cuda::Stream stream, cuda::DevicePtr flag, uint64_t value) {
  cuda::check(driver_, driver_.StreamWaitValue64(stream, flag, value, cuda::kStreamWaitValueGeq),
              "cuStreamWaitValue64");
}

}  // namespace jreshard
