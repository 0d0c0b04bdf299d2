// What Python calls through ctypes. Errors come back as text in `error` (truncated to fit); no exception passes.
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <sstream>

#include "registry.h"

#define JRESHARD_EXPORT extern "C" __attribute__((visibility("default")))

namespace jreshard {
namespace {

struct Entry {
  std::shared_ptr<Exchange> exchange;
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

void write_error(const char* what, char* error, size_t capacity) {
  std::strncpy(error, what, capacity - 1);
  error[capacity - 1] = '\0';
}

}  // namespace

std::shared_ptr<Exchange> find_exchange(int64_t key) {
  std::lock_guard<std::mutex> lock(registry_mutex());
  auto found = registry().find(key);
  return found == registry().end() ? nullptr : found->second.exchange;
}

}  // namespace jreshard

using jreshard::Exchange;

// Opens the exchange `key`, or counts one more user of it. Returns false and writes `error` where the table is bad.
JRESHARD_EXPORT bool jreshard_open(int64_t key, const int64_t* table, size_t words, const char* rank_names, char* error,
                                   size_t capacity) {
  try {
    std::lock_guard<std::mutex> lock(jreshard::registry_mutex());
    auto& entry = jreshard::registry()[key];
    if (!entry.exchange) {
      entry.exchange =
          std::make_shared<Exchange>(jreshard::CopyPlan(table, words), jreshard::split_lines(rank_names));
    }
    ++entry.users;
    return true;
  } catch (const std::exception& e) {
    jreshard::write_error(e.what(), error, capacity);
    return false;
  }
}

JRESHARD_EXPORT void jreshard_close(int64_t key) {
  std::lock_guard<std::mutex> lock(jreshard::registry_mutex());
  auto found = jreshard::registry().find(key);
  if (found != jreshard::registry().end() && --found->second.users == 0) jreshard::registry().erase(found);
}

JRESHARD_EXPORT bool jreshard_begin(int64_t key, uint32_t call, double timeout_s) {
  auto exchange = jreshard::find_exchange(key);
  return exchange && exchange->begin(call, timeout_s);
}

JRESHARD_EXPORT void jreshard_abort(int64_t key, uint32_t call, const char* reason) {
  if (auto exchange = jreshard::find_exchange(key)) exchange->abort(call, reason);
}

// The calls of `key` that have not ended.
JRESHARD_EXPORT int jreshard_open_calls(int64_t key) {
  auto exchange = jreshard::find_exchange(key);
  return exchange ? exchange->open_calls() : 0;
}
