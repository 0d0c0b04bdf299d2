#include "peers.h"

#include <sys/prctl.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <utility>

namespace jreshard {
namespace {

// Messages that come before their call is opened here: a few calls ahead at most, unless something has gone wrong.
constexpr size_t kMaxEarlyCalls = 256;
constexpr size_t kMaxEarlyAddresses = 4 << 20;
constexpr size_t kOverKept = 256;
constexpr size_t kMaxFlagPages = 1024;
constexpr size_t kMaxLent = 4096;

// Whether the kernel lets a process be read only by those that it names (Yama's "restricted" mode).
bool readers_must_be_named() {
  static const bool restricted = [] {
    int scope = 0;
    std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
    return scope == 1;
  }();
  return restricted;
}

Message abort_of(const Message& message, int origin, std::string reason) {
  return {Message::kAbort, message.call, message.key, origin, 0, 0, {}, std::move(reason)};
}

}  // namespace

Peers::~Peers() {
  for (const auto& [process, peer] : peers_) peer.link->close("was disconnected");
}

void Peers::connect(int process, Descriptor socket, std::string name) {
  if (process == self_) throw std::invalid_argument("a process needs no link to itself");
  std::lock_guard<std::mutex> lock(mutex_);
  if (peers_.count(process)) throw std::invalid_argument(name + " is linked already");
  names_[process] = std::move(name);
  const uint64_t serial = ++links_made_;
  const std::weak_ptr<Peers> weak = weak_from_this();
  PeerSocket::Events events;
  events.greeted = [weak, process, serial](pid_t pid) {
    if (auto peers = weak.lock()) peers->greeted(process, serial, pid);
  };
  events.message = [weak, process, serial](const char* bytes, size_t size, Descriptor attached) {
    if (auto peers = weak.lock()) peers->take(process, serial, decode(bytes, size), std::move(attached));
  };
  events.lost = [weak, process, serial](const std::string& why) {
    if (auto peers = weak.lock()) peers->remove(process, serial, why);
  };
  auto link =
      PeerSocket::start(std::move(socket), self_, process, std::move(events));  // or throws, and nothing is linked
  Peer& peer = peers_[process];
  peer.serial = serial;
  peer.link = std::move(link);
}

void Peers::disconnect(int process) {
  uint64_t serial;
  std::shared_ptr<PeerSocket> link;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = peers_.find(process);
    if (found == peers_.end()) return;
    serial = found->second.serial;
    link = found->second.link;
  }
  const std::string why = "was disconnected";
  link->close(why);
  remove(process, serial, why);
}

bool Peers::connected(int process) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return peers_.count(process);
}

std::string Peers::name(int process) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = names_.find(process);
  return found == names_.end() ? "process " + std::to_string(process) : found->second;
}

pid_t Peers::pid(int process) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = peers_.find(process);
  return found == peers_.end() ? 0 : found->second.pid;
}

void Peers::send(int process, const Message& message, Descriptor attached) {
  std::shared_ptr<PeerSocket> link;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = peers_.find(process);
    if (found == peers_.end()) return;
    link = found->second.link;
  }
  link->send(encode(message), std::move(attached));
}

uint64_t Peers::link_serial(int process) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = peers_.find(process);
  return found == peers_.end() ? 0 : found->second.serial;
}

std::vector<Peers::Lent> Peers::take_lent(int process, uint64_t serial) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = peers_.find(process);
  if (found == peers_.end() || found->second.serial != serial) return {};
  return std::exchange(found->second.lent, {});
}

std::shared_ptr<Peers::Belongings> Peers::belongings(int process, const MakeBelongings& make) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = peers_.find(process);
  if (found == peers_.end()) return nullptr;
  if (!found->second.belongings) found->second.belongings = make(found->second.serial);
  return found->second.belongings;
}

std::shared_ptr<const Descriptor> Peers::flags(int process, uint64_t serial, int64_t key) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = peers_.find(process);
  if (found == peers_.end() || found->second.serial != serial) return nullptr;
  auto page = found->second.flags.find(key);
  return page == found->second.flags.end() ? nullptr : page->second;
}

void Peers::keep_lent(Peer& peer, Message message, Descriptor attached) {
  if (message.kind == Message::kFlags) {
    if (!attached) throw std::invalid_argument("a page of flags came without its descriptor");
    if (peer.flags.size() >= kMaxFlagPages) peer.flags.erase(peer.flags.begin());
    peer.flags[message.key] = std::make_shared<const Descriptor>(std::move(attached));
    return;
  }
  const std::vector<uint64_t>& arena = message.addresses;  // id, base and bytes
  if (arena.size() != 3 || !arena[2] || arena[1] + arena[2] < arena[1] || (!attached && message.reason.empty())) {
    throw std::invalid_argument("what it lends is not described");
  }
  if (peer.lent.size() >= kMaxLent) throw std::invalid_argument("it lends more than can be used");
  peer.lent.push_back({std::move(message), std::move(attached)});
}

std::vector<Peers::Heard> Peers::open(int64_t key, uint32_t call, std::weak_ptr<Listener> listener) {
  std::lock_guard<std::mutex> lock(mutex_);
  const CallKey id{key, call};
  open_[id] = std::move(listener);
  auto found = early_.find(id);
  if (found == early_.end()) return {};
  std::vector<Heard> heard = std::move(found->second);
  for (const Heard& each : heard) early_addresses_ -= each.message.addresses.size();
  early_.erase(found);
  early_order_.erase(std::find(early_order_.begin(), early_order_.end(), id));
  return heard;
}

void Peers::close(int64_t key, uint32_t call, const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  open_.erase({key, call});
  over_.emplace_back(CallKey{key, call}, error);
  if (over_.size() > kOverKept) over_.pop_front();
}

// Before anything is sent to the process, which may read as soon as it has been told where.
void Peers::greeted(int process, uint64_t serial, pid_t pid) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = peers_.find(process);
  if (found == peers_.end() || found->second.serial != serial) return;
  found->second.pid = pid;
  allow_reading();
}

// With the lock held. The kernel takes one process, or any (of this user).
void Peers::allow_reading() const {
  if (!readers_must_be_named()) return;
  std::vector<pid_t> pids;
  for (const auto& [process, peer] : peers_) {
    if (peer.pid) pids.push_back(peer.pid);
  }
  const unsigned long readers = pids.empty() ? 0 : pids.size() == 1 ? pids[0] : PR_SET_PTRACER_ANY;
  // Where the kernel refuses, the reader is told by its own call, and says what to do.
  prctl(PR_SET_PTRACER, readers, 0, 0, 0);
}

void Peers::take(int process, uint64_t serial, Message message, Descriptor attached) {
  std::shared_ptr<Listener> listener;
  Message answer;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto peer = peers_.find(process);
    if (peer == peers_.end() || peer->second.serial != serial) return;
    if (message.kind == Message::kLend || message.kind == Message::kFlags) {
      keep_lent(peer->second, std::move(message), std::move(attached));
      return;
    }
    auto found = open_.find({message.key, message.call});
    if (found == open_.end()) {
      keep(process, std::move(message), answer);
    } else {
      listener = found->second.lock();
    }
  }
  if (listener) listener->heard(process, message);
  if (!answer.reason.empty()) send(process, answer);
}

void Peers::keep(int process, Message message, Message& answer) {
  const CallKey id{message.key, message.call};
  for (const auto& [ended, error] : over_) {
    if (ended != id) continue;
    if (message.kind != Message::kAbort) answer = abort_of(message, self_, error);
    return;
  }
  if (message.kind == Message::kDone || message.kind == Message::kConfirm) return;
  if (early_addresses_ + message.addresses.size() > kMaxEarlyAddresses) {
    answer = abort_of(message, self_, "too much was published before the transfer was begun here");
    return;
  }
  if (!early_.count(id)) early_order_.push_back(id);
  early_addresses_ += message.addresses.size();
  early_[id].push_back({process, std::move(message)});
  if (early_order_.size() <= kMaxEarlyCalls) return;
  for (const Heard& each : early_[early_order_.front()]) early_addresses_ -= each.message.addresses.size();
  early_.erase(early_order_.front());
  early_order_.pop_front();
}

void Peers::remove(int process, uint64_t serial, const std::string& why) {
  std::vector<std::pair<uint32_t, std::shared_ptr<Listener>>> listeners;
  std::shared_ptr<Belongings> belongings;  // dropped without the lock
  std::string error = "jreshard: ";
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = peers_.find(process);
    if (found == peers_.end() || found->second.serial != serial) return;
    belongings = std::move(found->second.belongings);
    peers_.erase(found);
    allow_reading();
    error += names_[process] + " " + why;
    for (const auto& [id, listener] : open_) {
      if (auto alive = listener.lock()) listeners.emplace_back(id.second, std::move(alive));
    }
    // What a process has said before it went says nothing about the one that takes its place.
    for (auto& [id, heard] : early_) {
      for (auto it = heard.begin(); it != heard.end();) {
        if (it->process != process) {
          ++it;
          continue;
        }
        early_addresses_ -= it->message.addresses.size();
        it = heard.erase(it);
      }
    }
  }
  for (auto& [call, listener] : listeners) listener->lost(call, process, error);
}

}  // namespace jreshard
