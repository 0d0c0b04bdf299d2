#include "watchdog.h"

#include <thread>

namespace jreshard {

Watchdog& Watchdog::shared() {
  static Watchdog* const watchdog = new Watchdog();
  return *watchdog;
}

Watchdog::Watchdog() {
  std::thread([this] { loop(); }).detach();
}

Watchdog::Ticket Watchdog::at(Clock::time_point deadline, std::function<void()> action) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Ticket ticket{deadline, next_++};
  actions_.emplace(ticket, std::move(action));
  if (deadline < looks_at_) wake_.notify_one();
  return ticket;
}

void Watchdog::cancel(const Ticket& ticket) {
  std::function<void()> dropped;  // destroyed outside the lock: it may hold the last reference to its exchange
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = actions_.find(ticket);
  if (found == actions_.end()) return;
  dropped = std::move(found->second);
  actions_.erase(found);
}

// What was cancelled is slept through: a call that ends in time does not wake the thread.
void Watchdog::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (actions_.empty()) {
      looks_at_ = Clock::time_point::max();
      wake_.wait(lock);
      continue;
    }
    auto first = actions_.begin();
    const Clock::time_point deadline = first->first.first;  // a copy: the entry may be gone while waiting
    if (Clock::now() < deadline) {
      looks_at_ = deadline;
      wake_.wait_until(lock, deadline);
      continue;
    }
    looks_at_ = Clock::time_point::min();
    std::function<void()> action = std::move(first->second);
    actions_.erase(first);
    lock.unlock();
    action();
    action = nullptr;
    lock.lock();
  }
}

}  // namespace jreshard
