#include "workers.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace jreshard {
namespace {

// More threads than this no longer raise the memory bandwidth of one socket.
constexpr int kMaxThreads = 16;

int usable_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

Workers& Workers::shared() {
  static Workers* const workers = new Workers(std::clamp(usable_processors(), 1, kMaxThreads));
  return *workers;
}

Workers::Workers(int threads) : threads_(threads) {
  for (int i = 0; i < threads; ++i) std::thread([this] { loop(); }).detach();
}

void Workers::submit(std::vector<Task> tasks) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Task& task : tasks) tasks_.push_back(std::move(task));
  }
  if (tasks.size() == 1) {
    wake_.notify_one();
  } else {
    wake_.notify_all();
  }
}

void Workers::loop() {
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace jreshard
