// What Python calls through ctypes. Errors come back as text in `error` (truncated to fit); no exception passes.
#include <fcntl.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "export.h"
#include "guarded.h"
#include "local_ordinals.h"
#include "nccl_communicators.h"
#include "nccl_exchange.h"
#include "registry.h"
#include "stream_exchange.h"

namespace jreshard {
namespace {

struct Entry {
  std::shared_ptr<const Opened> opened;
  int users = 0;
};

std::mutex& registry_mutex() {
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
}

std::map<int64_t, Entry>& registry() {
  static auto* const entries = new std::map<int64_t, Entry>;
  return *entries;
}

std::vector<std::string> split_lines(const char* text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// A copy of the entries. Exchanges are asked, and let go, without the registry's lock: that may take its time, and
// running programs look up theirs meanwhile.
std::map<int64_t, Entry> entries() {
  std::lock_guard<std::mutex> lock(registry_mutex());
  return registry();
}

// Forgets what nobody uses, once its calls have ended: programs that still run look it up.
void sweep() {
  for (const auto& [key, entry] : entries()) {
    if (entry.users > 0 || entry.opened->calls().open_calls() > 0) continue;
    std::lock_guard<std::mutex> lock(registry_mutex());
    auto found = registry().find(key);
    const bool same = found != registry().end() && found->second.opened == entry.opened;
    if (same && found->second.users == 0) registry().erase(found);  // the copy holds the exchange
  }
}

// The links to other processes: one set for all exchanges. `self` is this process's number, always the same.
std::shared_ptr<Peers> peers(int self) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const made = new std::shared_ptr<Peers>;
  std::lock_guard<std::mutex> lock(*mutex);
  if (!*made) *made = std::make_shared<Peers>(self);
  if ((*made)->self() != self) {
    throw std::invalid_argument("this is process " + std::to_string((*made)->self()) + ", not process " +
                                std::to_string(self));
  }
  return *made;
}

// Links are needed only where a rank lives elsewhere.
ProcessMap map_processes(int64_t key, const int32_t* processes, int ranks, int self) {
  ProcessMap map{key, {processes, processes + ranks}, nullptr};
  for (int process : map.process_of) {
    if (process != self) map.peers = peers(self);
  }
  return map;
}

// `ordinals` has the device of each local rank.
std::shared_ptr<Opened> open(bool gpu, CopyPlan plan, std::vector<std::string> rank_names, ProcessMap map,
                             std::map<int, int> ordinals) {
  auto opened = std::make_shared<Opened>(ordinals);
  if (!gpu) {
    opened->host = std::make_shared<HostExchange>(std::move(plan), std::move(rank_names), std::move(map));
    return opened;
  }
  opened->gpu =
      StreamExchange::open(std::move(plan), std::move(rank_names), cuda::driver(), std::move(map), std::move(ordinals));
  return opened;
}

// Counts one more user of what is open under `key`. False where that is nothing, or takes no more calls.
bool add_user(int64_t key) {
  const auto opened = find_opened(key);
  if (!opened || opened->calls().broken()) return false;
  std::lock_guard<std::mutex> lock(registry_mutex());
  auto found = registry().find(key);
  if (found == registry().end() || found->second.opened != opened) return false;  // swept just now
  ++found->second.users;
  return true;
}

// Opens what `make` makes under `key`, or counts one more user of what is open. It is made without the registry's lock:
// that may have to wait for devices, and running programs look up theirs meanwhile.
void open_once(int64_t key, const std::function<std::shared_ptr<const Opened>()>& make) {
  static std::mutex* const opening = new std::mutex;  // so that nothing is made twice
  sweep();
  std::shared_ptr<const Opened> made;
  std::lock_guard<std::mutex> one_at_a_time(*opening);
  if (add_user(key)) return;
  made = make();
  std::lock_guard<std::mutex> lock(registry_mutex());
  Entry& entry = registry()[key];
  std::swap(entry.opened, made);  // one that had failed goes without the locks; the new one is for its users too
  ++entry.users;
}

std::vector<std::shared_ptr<const Opened>> busy() {
  std::vector<std::shared_ptr<const Opened>> found;
  for (const auto& [key, entry] : entries()) {
    if (entry.opened->calls().open_calls()) found.push_back(entry.opened);
  }
  return found;
}

}  // namespace

std::shared_ptr<const Opened> find_opened(int64_t key) {
  std::lock_guard<std::mutex> lock(registry_mutex());
  auto found = registry().find(key);
  return found == registry().end() ? nullptr : found->second.opened;
}

}  // namespace jreshard

// Opens the exchange `key`, or counts one more user of it. `processes` has the process of each rank, of which `self` is
// this one; `ordinals` the device ordinal in this process of each rank that lives here, else -1. `gpu` tells on which
// kind of devices. Returns false and writes `error` where that cannot be.
JRESHARD_EXPORT bool jreshard_open(int64_t key, bool gpu, const int64_t* table, size_t words, const int32_t* ordinals,
                                   const int32_t* processes, int32_t self, const char* rank_names, char* error,
                                   size_t capacity) {
  return jreshard::guarded(error, capacity, [&] {
    jreshard::open_once(key, [&] {
      jreshard::CopyPlan plan(table, words);
      auto locals = jreshard::local_ordinals(ordinals, plan.num_ranks());
      auto map = jreshard::map_processes(key, processes, plan.num_ranks(), self);
      return jreshard::open(gpu, std::move(plan), jreshard::split_lines(rank_names), std::move(map), std::move(locals));
    });
  });
}

// Opens an exchange over an NCCL communicator, likewise.
JRESHARD_EXPORT bool jreshard_open_nccl(int64_t key, const int64_t* table, size_t words, const int32_t* ordinals,
                                        const char* rank_names, int64_t communicator, int64_t slot_bytes, char* error,
                                        size_t capacity) {
  return jreshard::guarded(error, capacity, [&] {
    jreshard::open_once(key, [&] {
      jreshard::CopyPlan plan(table, words);
      auto locals = jreshard::local_ordinals(ordinals, plan.num_ranks());
      auto opened = std::make_shared<jreshard::Opened>(locals);
      opened->gpu = std::make_shared<jreshard::NcclExchange>(std::move(plan), jreshard::split_lines(rank_names),
                                                             std::move(locals), jreshard::cuda::driver(),
                                                             jreshard::find_communicator(communicator), slot_bytes);
      return opened;
    });
  });
}

JRESHARD_EXPORT void jreshard_close(int64_t key) {
  {
    std::lock_guard<std::mutex> lock(jreshard::registry_mutex());
    auto found = jreshard::registry().find(key);
    if (found != jreshard::registry().end()) --found->second.users;
  }
  jreshard::sweep();
}

JRESHARD_EXPORT bool jreshard_begin(int64_t key, uint32_t call, double timeout_s, char* error, size_t capacity) {
  return jreshard::guarded(error, capacity, [&] {
    auto opened = jreshard::find_opened(key);
    if (!opened || !opened->calls().begin(call, timeout_s)) throw std::runtime_error("the call could not be opened");
  });
}

// Whether a call has failed in a way after which no other can be opened.
JRESHARD_EXPORT bool jreshard_broken(int64_t key) {
  auto opened = jreshard::find_opened(key);
  return !opened || opened->calls().broken();
}

// Whether every reader of the call is done, and no release is to follow.
JRESHARD_EXPORT bool jreshard_release_now(int64_t key, uint32_t call) {
  auto opened = jreshard::find_opened(key);
  return opened && opened->calls().release_now(call);
}

// How many publish and receive steps of the call have run on devices of this process (see Exchange).
JRESHARD_EXPORT int jreshard_steps_run(int64_t key, uint32_t call) {
  auto opened = jreshard::find_opened(key);
  return opened ? opened->calls().steps_run(call) : 0;
}

// Waits until the call has ended, by its deadline at the latest. Returns false, and writes why, where it failed.
JRESHARD_EXPORT bool jreshard_wait(int64_t key, uint32_t call, char* error, size_t capacity) {
  return jreshard::guarded(error, capacity, [&] {
    if (auto opened = jreshard::find_opened(key)) opened->calls().wait(call);
  });
}

JRESHARD_EXPORT void jreshard_abort(int64_t key, uint32_t call, const char* reason) {
  if (auto opened = jreshard::find_opened(key)) opened->calls().abort(call, reason);
}

// Links this process, number `self`, with another one on this machine, by a connected Unix stream socket. The
// descriptor is duplicated. `name` is how errors call the other. Returns false and writes `error` where that cannot be.
JRESHARD_EXPORT bool jreshard_connect(int32_t self, int32_t process, int fd, const char* name, char* error,
                                      size_t capacity) {
  return jreshard::guarded(error, capacity, [&] {
    jreshard::Descriptor socket(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!socket) throw std::runtime_error(std::string("the socket cannot be used: ") + std::strerror(errno));
    jreshard::peers(self)->connect(process, std::move(socket), name);
  });
}

JRESHARD_EXPORT bool jreshard_connected(int32_t self, int32_t process) {
  char error[1];
  bool connected = false;
  jreshard::guarded(error, sizeof(error), [&] { connected = jreshard::peers(self)->connected(process); });
  return connected;
}

// Transfers under way that need the other process fail. Does nothing where it is not linked.
JRESHARD_EXPORT bool jreshard_disconnect(int32_t self, int32_t process, char* error, size_t capacity) {
  return jreshard::guarded(error, capacity, [&] { jreshard::peers(self)->disconnect(process); });
}

// Waits for every call to end, at most `timeout_s`, and fails those that have not.
JRESHARD_EXPORT void jreshard_drain(double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  auto left = jreshard::busy();
  while (!left.empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    left = jreshard::busy();
  }
  for (auto& opened : left) opened->calls().abort_all("jreshard: the process ends");
}
