// The threads that copy on the host.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace jreshard {

class Workers {
 public:
  using Task = std::function<void()>;

  // One pool for the process, as wide as the processors it may use. Never destroyed: tasks may outlive static
  // destruction order.
  static Workers& shared();

  int threads() const { return threads_; }
  void submit(std::vector<Task> tasks);

 private:
  explicit Workers(int threads);
  void loop();

  const int threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> tasks_;
};

}  // namespace jreshard
