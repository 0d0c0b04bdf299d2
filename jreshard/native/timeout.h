// Timeouts as callers give them: in seconds.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>

namespace jreshard {

inline std::chrono::steady_clock::time_point deadline_in(double timeout_s) {
  // Longer than any process lives, and few enough nanoseconds for the clock to add.
  constexpr double kMaxTimeoutS = 1e9;
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> timeout(std::min(timeout_s, kMaxTimeoutS));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
}

// For messages, such as "0.05 s".
inline std::string seconds(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

}  // namespace jreshard
