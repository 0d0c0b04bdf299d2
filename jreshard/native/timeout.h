// Timeouts as callers give them: in seconds.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

namespace jreshard {

inline std::chrono::steady_clock::time_point deadline_in(double timeout_s) {
  // Longer than any process lives, and few enough nanoseconds for the clock to add.
  constexpr double kMaxTimeoutS = 1e9;
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> timeout(std::min(timeout_s, kMaxTimeoutS));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
}

// For messages, such as "0.05 s": what was left of a timeout when it was handed on is the timeout, as good as.
inline std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), value < 100 ? "%.3g s" : "%.0f s", value);
  return text;
}

}  // namespace jreshard
