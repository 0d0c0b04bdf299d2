// Runs actions at deadlines, so that nothing waits for ever.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace jreshard {

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;
  using Ticket = std::pair<Clock::time_point, uint64_t>;

  // One thread for the process, never destroyed.
  static Watchdog& shared();

  // Runs `action` on the watchdog's thread at `deadline`, unless cancelled before. Actions must not take long, as
  // others wait behind them, and call nothing that may wait for a device.
  Ticket at(Clock::time_point deadline, std::function<void()> action);
  void cancel(const Ticket& ticket);

 private:
  Watchdog();
  void loop();

  std::mutex mutex_;
  std::condition_variable wake_;
  uint64_t next_ = 0;
  // When the thread looks again, at the latest: only an earlier deadline has to wake it.
  Clock::time_point looks_at_ = Clock::time_point::min();
  std::map<Ticket, std::function<void()>> actions_;
};

}  // namespace jreshard
