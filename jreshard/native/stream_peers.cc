#include "stream_peers.h"

#include <mutex>
#include <stdexcept>
#include <utility>

namespace jreshard {

struct StreamPeers::Neighbour : Peers::Belongings {
  Neighbour(const cuda::Driver& driver, uint64_t link) : serial(link), imports(driver) {}

  const uint64_t serial;  // of the link that all this came by
  ArenaImports imports;
  std::mutex mutex;
  int calls = 0;            // that may read what is mapped
  std::set<uint64_t> lent;  // ids of this process's arenas that it has got
};

namespace {

Arena described(const Message& message) {
  return {message.addresses[0], message.addresses[1], message.addresses[2],
          std::vector<char>(message.reason.begin(), message.reason.end())};
}

}  // namespace

StreamPeers::StreamPeers(const CopyPlan& plan, const ProcessGroup& group, std::map<int, int> ordinals,
                         const cuda::Driver& driver)
    : plan_(plan), group_(group), ordinals_(std::move(ordinals)), driver_(driver), exports_(driver) {
  if (!ordinals_.empty()) device_.emplace(driver_, ordinals_.begin()->second);
}

StreamPeers::~StreamPeers() {
  while (calls_ > 0) leave();
  const bool current = device_ && driver_.CtxPushCurrent(context()) == cuda::kSuccess;
  pages_.clear();
  page_.reset();
  cuda::Context popped = nullptr;
  if (current) driver_.CtxPopCurrent(&popped);
}

void StreamPeers::enter(CallId id) {
  if (!device_) throw std::invalid_argument("jreshard: no device of the transfer is in this process");
  renew_page(id);
  std::lock_guard<std::mutex> lock(mutex_);
  last_call_ = id;
  for (int process : group_.partners()) {
    const auto found = neighbour(process);
    if (!found) continue;  // not linked, which fails the call
    if (greeted_[process] != found->serial) {
      group_.peers().send(process, {Message::kFlags, 0, group_.key()}, page_->descriptor().duplicate());
      greeted_[process] = found->serial;
    }
    if (neighbours_.count(process)) continue;
    neighbours_[process] = found;
    std::lock_guard<std::mutex> counting(found->mutex);
    ++found->calls;
  }
  ++calls_;
}

void StreamPeers::renew_page(CallId id) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // Streams wait for a flag to become the call's number or a higher one: there must be none of before.
    if (page_ && !(*page_)[mark()].load() && id > last_call_) return;
    if (calls_ > 0) throw std::runtime_error("jreshard: a transfer has to wait for the end of the one before");
  }
  // Not with the lock held: it is needed to let streams go, for which the driver may wait.
  const cuda::CurrentContext current(driver_, context());
  auto page = std::make_unique<FlagPage>(page_size());
  page->attach(driver_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (gone_) give_up(*page);  // the call has failed meanwhile
  page_.swap(page);           // the old one goes when the lock has been let go
  greeted_.clear();
}

void StreamPeers::leave() {
  std::map<int, std::shared_ptr<Neighbour>> left;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--calls_ == 0) left = std::exchange(neighbours_, {});
  }
  for (auto& [process, neighbour] : left) {
    std::lock_guard<std::mutex> counting(neighbour->mutex);
    if (--neighbour->calls == 0) neighbour->imports.trim();
  }
}

// One for each link: a process that has come again has other memory.
std::shared_ptr<StreamPeers::Neighbour> StreamPeers::neighbour(int process) {
  return std::static_pointer_cast<Neighbour>(group_.peers().belongings(
      process, [this](uint64_t serial) { return std::make_shared<Neighbour>(driver_, serial); }));
}

std::shared_ptr<StreamPeers::Neighbour> StreamPeers::held(int process) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = neighbours_.find(process);
  if (found == neighbours_.end()) throw std::runtime_error("jreshard: " + group_.name(process) + " is not linked");
  return found->second;
}

void StreamPeers::check_linked(int process, uint64_t serial) const {
  if (group_.peers().link_serial(process) == serial) return;
  throw std::runtime_error("jreshard: " + group_.name(process) + " is not linked to this process any more");
}

std::shared_ptr<FlagPage> StreamPeers::page_of(int process, CallId id) {
  std::shared_ptr<FlagPage> found, replaced;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // A page that comes now may belong to a later call, which has not failed.
    if (gone_) throw std::runtime_error("jreshard: the transfer was given up");
    auto neighbour = neighbours_.find(process);
    const uint64_t serial = neighbour == neighbours_.end() ? 0 : neighbour->second->serial;
    auto sent = group_.peers().flags(process, serial, group_.key());
    check_linked(process, serial);
    if (!sent) throw std::runtime_error("jreshard: " + group_.name(process) + " has not sent its page of flags");
    const auto known = pages_.find(process);
    if (known == pages_.end() || known->second.sent != sent) {
      auto flags = std::make_shared<FlagPage>(sent->duplicate(), page_size());
      replaced = std::exchange(pages_[process].flags, std::move(flags));
      pages_[process].sent = std::move(sent);
    }
    Page& page = pages_[process];
    page.call = id;
    found = page.flags;
  }
  // Not with the lock held: it is needed to let streams go, for which the driver may wait.
  replaced.reset();
  found->attach(driver_);
  return found;
}

void StreamPeers::lend(int process, const std::vector<const void*>& arrays) {
  const auto to = held(process);
  std::lock_guard<std::mutex> lock(to->mutex);
  for (const void* array : arrays) {
    if (!array) continue;
    const Arena arena = exports_.find(reinterpret_cast<uint64_t>(array));
    if (to->lent.count(arena.id)) continue;
    Message message{Message::kLend, 0, group_.key()};
    message.addresses = {arena.id, arena.base, arena.bytes};
    message.reason.assign(arena.ipc.begin(), arena.ipc.end());
    group_.peers().send(process, message, exports_.lend(arena));
    to->lent.insert(arena.id);
  }
}

void StreamPeers::publish(CallId id, int rank, int chunk, int phase, const std::vector<const void*>& arrays,
                          cuda::Stream stream) {
  const std::set<int> readers = group_.processes_of(plan_.readers(chunk, rank, phase));
  if (readers.empty()) return;
  write(stream, page_->address(ready_flag(chunk, phase, rank)), id);
  for (int process : readers) lend(process, arrays);
  group_.publish(id, rank, chunk, phase, arrays.data());
}

void StreamPeers::await_ready(CallId id, int source, int chunk, int phase, cuda::Stream stream) {
  wait(stream, page_of(group_.process_of(source), id)->address(ready_flag(chunk, phase, source)), id);
}

const void* StreamPeers::translate(int source, const void* address, int reader) {
  const int process = group_.process_of(source);
  const auto from = held(process);
  std::lock_guard<std::mutex> lock(from->mutex);  // what was lent is taken in in its order
  for (Peers::Lent& lent : group_.peers().take_lent(process, from->serial)) {
    from->imports.add(described(lent.message), std::move(lent.attached));
  }
  check_linked(process, from->serial);
  return from->imports.translate(reinterpret_cast<uint64_t>(address), ordinals_.at(reader));
}

void StreamPeers::tell_read(CallId id, int reader, int chunk, int phase, cuda::Stream stream) {
  for (int process : group_.processes_of(plan_.sources(chunk, reader, phase))) {
    write(stream, page_of(process, id)->address(read_flag(chunk, phase, reader)), id);
  }
}

void StreamPeers::await_readers(CallId id, int source, int chunk, int phase, cuda::Stream stream) {
  for (int reader : plan_.readers(chunk, source, phase)) {
    if (!local(reader)) wait(stream, page_->address(read_flag(chunk, phase, reader)), id);
  }
}

std::string StreamPeers::fault(CallId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if ((*page_)[mark()].load()) return "jreshard: a process has given up while it read";
  for (auto& [process, page] : pages_) {
    if (page.call != id || !(*page.flags)[mark()].load()) continue;
    return "jreshard: " + group_.name(process) + " has given up while it was read from";
  }
  return "";
}

StreamPeers::Awaited StreamPeers::awaited(CallId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  Awaited awaited;
  plan_.for_each_read([&](int chunk, int phase, int source, int reader) {
    if (local(source) == local(reader)) return;
    if (local(source)) {
      if (page_ && (*page_)[read_flag(chunk, phase, reader)].load() < number(id)) awaited.reading.insert(reader);
      return;
    }
    const auto theirs = pages_.find(group_.process_of(source));
    if (theirs == pages_.end() || theirs->second.call != id) return;  // nothing waits there yet
    if ((*theirs->second.flags)[ready_flag(chunk, phase, source)].load() >= number(id)) return;
    (phase == 0 ? awaited.publishing : awaited.receiving).insert(source);
  });
  return awaited;
}

bool StreamPeers::needs(CallId id, int process) {
  std::lock_guard<std::mutex> lock(mutex_);
  if ((*page_)[mark()].load()) return true;
  auto theirs = pages_.find(process);
  // In a page of earlier calls flags mean nothing, nor do they in one that was given up.
  const bool told = theirs != pages_.end() && theirs->second.call == id && !(*theirs->second.flags)[mark()].load();
  bool needed = false;
  plan_.for_each_read([&](int chunk, int phase, int source, int reader) {
    const size_t flag = read_flag(chunk, phase, reader);
    if (local(reader) && group_.process_of(source) == process) {
      needed |= !told || (*theirs->second.flags)[flag].load() < number(id);
    } else if (local(source) && group_.process_of(reader) == process) {
      needed |= (*page_)[flag].load() < number(id);
    }
  });
  return needed;
}

void StreamPeers::give_up(FlagPage& page) const {
  page[mark()].store(1);
  page.fill(kGivenUp);
}

void StreamPeers::let_go() {
  std::lock_guard<std::mutex> lock(mutex_);
  gone_ = true;
  if (page_) give_up(*page_);
  for (auto& [process, page] : pages_) give_up(*page.flags);
}

void StreamPeers::write(cuda::Stream stream, cuda::DevicePtr flag, CallId id) {
  cuda::check(driver_, driver_.StreamWriteValue64(stream, flag, number(id), 0), "cuStreamWriteValue64");
}

void StreamPeers::wait(cuda::Stream stream, cuda::DevicePtr flag, CallId id) {
  cuda::check(driver_, driver_.StreamWaitValue64(stream, flag, number(id), cuda::kStreamWaitValueGeq),
              "cuStreamWaitValue64");
}

}  // namespace jreshard
