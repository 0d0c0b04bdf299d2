// The least that a test needs: checks that are counted and named, and callbacks that can be waited for.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <string>

// From one random plan to the next. Under ThreadSanitizer some have to do: all of them take minutes. Some tests vary
// with the seed's parity and with its remainder by three: with this stride all of these still come up.
#ifdef __SANITIZE_THREAD__
constexpr uint32_t kSeedStride = 5;
#else
constexpr uint32_t kSeedStride = 1;
#endif

inline std::mutex check_mutex;
inline int checks_failed = 0;

inline bool check(bool ok, const std::string& what, const char* file, int line) {
  if (ok) return true;
  std::lock_guard<std::mutex> lock(check_mutex);
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
  ++checks_failed;
  return false;
}

inline bool check_text(const std::string& found, const std::string& expected, const char* file, int line) {
  return check(found == expected, "found \"" + found + "\", expected \"" + expected + "\"", file, line);
}

// What an action throws, or empty text.
inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

#define CHECK(condition) check((condition), #condition, __FILE__, __LINE__)

#define CHECK_TEXT(found, expected) check_text((found), (expected), __FILE__, __LINE__)

// Where a `Done` callback leaves its outcome: no text while it has not been called, empty text for success.
class Outcome {
 public:
  auto callback() {
    return [this](const std::string* error) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (calls_++ == 0) text_ = error ? *error : "";
      called_.notify_all();
    };
  }
  std::optional<std::string> now() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return text_;
  }
  bool open() const { return !now(); }
  std::string wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!called_.wait_for(lock, std::chrono::seconds(60), [this] { return calls_ > 0; })) return "never called";
    return *text_;
  }
  int calls() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable called_;
  int calls_ = 0;
  std::optional<std::string> text_;
};

struct Test {
  const char* name;
  void (*run)();
};

// What `main` does: runs all, and returns the exit status.
inline int run_tests(std::initializer_list<Test> tests) {
  int failed = 0;
  for (const Test& test : tests) {
    const int before = checks_failed;
    test.run();
    const bool ok = checks_failed == before;
    failed += !ok;
    std::printf("%s %s\n", ok ? "ok    " : "FAILED", test.name);
    std::fflush(stdout);
  }
  std::printf("%d of %zu native tests failed\n", failed, tests.size());
  return failed != 0;
}
