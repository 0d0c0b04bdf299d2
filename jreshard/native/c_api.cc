// What Python calls through ctypes. Errors come back as text in `error` (truncated to fit); no exception passes.
#include <chrono>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "registry.h"

#define JRESHARD_EXPORT extern "C" __attribute__((visibility("default")))

namespace jreshard {
namespace {

struct Entry {
  Opened opened;
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

// Forgets the exchanges that nobody holds, once their calls have ended: programs that still run look them up.
void sweep() {
  for (auto it = registry().begin(); it != registry().end();) {
    const bool idle = it->second.users == 0 && it->second.opened.calls()->open_calls() == 0;
    it = idle ? registry().erase(it) : std::next(it);
  }
}

Opened open(bool gpu, CopyPlan plan, std::vector<std::string> rank_names) {
  if (!gpu) return {std::make_shared<Exchange>(std::move(plan), std::move(rank_names)), nullptr, {}};
  std::string error;
  const cuda::Driver* const driver = cuda::driver(&error);
  if (!driver) throw std::runtime_error(error);
  return {nullptr, std::make_shared<StreamExchange>(std::move(plan), std::move(rank_names), *driver), {}};
}

void write_error(const char* what, char* error, size_t capacity) {
  std::strncpy(error, what, capacity - 1);
  error[capacity - 1] = '\0';
}

}  // namespace

Opened find_exchange(int64_t key) {
  std::lock_guard<std::mutex> lock(registry_mutex());
  auto found = registry().find(key);
  return found == registry().end() ? Opened{} : found->second.opened;
}

}  // namespace jreshard

// Opens the exchange `key`, or counts one more user of it. `ordinals` has each rank's device ordinal in this process;
// `gpu` tells on which kind of devices. Returns false and writes `error` where that cannot be.
JRESHARD_EXPORT bool jreshard_open(int64_t key, bool gpu, const int64_t* table, size_t words, const int32_t* ordinals,
                                   const char* rank_names, char* error, size_t capacity) {
  try {
    std::lock_guard<std::mutex> lock(jreshard::registry_mutex());
    jreshard::sweep();
    auto found = jreshard::registry().find(key);
    if (found == jreshard::registry().end()) {
      jreshard::CopyPlan plan(table, words);
      std::map<int32_t, int> rank_of;
      for (int rank = 0; rank < plan.num_ranks(); ++rank) rank_of[ordinals[rank]] = rank;
      jreshard::Opened opened = jreshard::open(gpu, std::move(plan), jreshard::split_lines(rank_names));
      opened.rank_of = std::move(rank_of);
      found = jreshard::registry().emplace(key, jreshard::Entry{std::move(opened), 0}).first;
    }
    ++found->second.users;
    return true;
  } catch (const std::exception& e) {
    jreshard::write_error(e.what(), error, capacity);
    return false;
  }
}

JRESHARD_EXPORT void jreshard_close(int64_t key) {
  std::lock_guard<std::mutex> lock(jreshard::registry_mutex());
  auto found = jreshard::registry().find(key);
  if (found != jreshard::registry().end()) --found->second.users;
  jreshard::sweep();
}

JRESHARD_EXPORT bool jreshard_begin(int64_t key, uint32_t call, double timeout_s) {
  auto calls = jreshard::find_exchange(key).calls();
  return calls && calls->begin(call, timeout_s);
}

JRESHARD_EXPORT void jreshard_abort(int64_t key, uint32_t call, const char* reason) {
  if (auto calls = jreshard::find_exchange(key).calls()) calls->abort(call, reason);
}

// The calls of `key` that have not ended.
JRESHARD_EXPORT int jreshard_open_calls(int64_t key) {
  auto calls = jreshard::find_exchange(key).calls();
  return calls ? calls->open_calls() : 0;
}

// Waits for every call to end, at most `timeout_s`, and fails those that have not.
JRESHARD_EXPORT void jreshard_drain(double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  for (;;) {
    std::vector<std::shared_ptr<jreshard::OpenCalls>> busy;
    {
      std::lock_guard<std::mutex> lock(jreshard::registry_mutex());
      for (auto& [key, entry] : jreshard::registry()) {
        if (auto calls = entry.opened.calls(); calls->open_calls()) busy.push_back(calls);
      }
    }
    if (busy.empty()) return;
    if (std::chrono::steady_clock::now() >= deadline) {
      for (auto& calls : busy) calls->abort_all("jreshard: the process ends");
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}
