// Tests of the thread that runs actions at deadlines.
#include "watchdog.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "check.h"

using jreshard::Watchdog;
using std::chrono::milliseconds;

namespace {

// Which actions have run, in their order.
class Log {
 public:
  std::function<void()> noting(int number) {
    return [this, number] {
      std::lock_guard<std::mutex> lock(mutex_);
      numbers_.push_back(number);
      changed_.notify_all();
    };
  }
  std::vector<int> wait_for(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::seconds(60), [&] { return numbers_.size() >= count; }));
    return numbers_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> numbers_;
};

void test_actions_run_in_the_order_of_their_deadlines() {
  Log log;
  const auto now = Watchdog::Clock::now();
  Watchdog::shared().at(now + milliseconds(60), log.noting(3));
  Watchdog::shared().at(now + milliseconds(20), log.noting(1));
  Watchdog::shared().at(now + milliseconds(40), log.noting(2));
  Watchdog::shared().at(now - milliseconds(1), log.noting(0));
  CHECK((log.wait_for(4) == std::vector<int>{0, 1, 2, 3}));
  CHECK(Watchdog::Clock::now() >= now + milliseconds(60));
}

// The thread sleeps until a deadline that was cancelled: neither an earlier nor a later one may get lost.
void test_deadlines_after_cancelled_ones() {
  Log log;
  for (int round = 0; round < 3; ++round) {
    const auto now = Watchdog::Clock::now();
    const auto cancelled = Watchdog::shared().at(now + milliseconds(20), log.noting(-1));
    const auto far = Watchdog::shared().at(now + std::chrono::hours(1), log.noting(-1));
    Watchdog::shared().cancel(cancelled);
    Watchdog::shared().cancel(cancelled);  // there is nothing to cancel any more
    Watchdog::shared().at(now + milliseconds(round == 0 ? 40 : 5), log.noting(round));
    CHECK(log.wait_for(round + 1).back() == round);
    Watchdog::shared().cancel(far);
  }
  CHECK((log.wait_for(3) == std::vector<int>{0, 1, 2}));
}

void test_actions_may_set_others() {
  Log log;
  Watchdog::shared().at(Watchdog::Clock::now(), [&] {
    const auto ticket = Watchdog::shared().at(Watchdog::Clock::now(), log.noting(-1));
    Watchdog::shared().at(Watchdog::Clock::now() + milliseconds(5), log.noting(1));
    Watchdog::shared().cancel(ticket);
  });
  CHECK((log.wait_for(1) == std::vector<int>{1}));
}

}  // namespace

int main() {
  return run_tests({
      {"actions_run_in_the_order_of_their_deadlines", test_actions_run_in_the_order_of_their_deadlines},
      {"deadlines_after_cancelled_ones", test_deadlines_after_cancelled_ones},
      {"actions_may_set_others", test_actions_may_set_others},
  });
}
