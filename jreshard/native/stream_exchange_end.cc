// How calls of StreamExchange end: well, with an error, or at their deadline.
#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "stream_exchange.h"
#include "timeout.h"

namespace jreshard {
namespace {

constexpr std::chrono::microseconds kPoll(20);
// How long the reason may take that another process gives for giving up.
constexpr std::chrono::milliseconds kNewsPatience(500);
// How long a failed call waits for its streams to come to their ends.
constexpr std::chrono::seconds kDrainPatience(2);

// Lets a lock go while it lives.
class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::unique_lock<std::mutex>& lock_;
};

void pause(std::unique_lock<std::mutex>& lock) {
  const Unlocked unlocked(lock);
  std::this_thread::sleep_for(kPoll);
}

// Exchanges that went while streams might still use what is theirs.
struct Retired {
  std::mutex mutex;
  std::vector<std::unique_ptr<StreamExchange>> exchanges;

  static Retired& all() {
    static auto* const retired = new Retired;
    return *retired;
  }
};

}  // namespace

void StreamExchange::expired(CallId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const CallPtr call = find(id);
  if (!call || !call->error.empty()) return;
  // Where all is launched and nobody else is waited for, nothing is held up, and wait() sees whether the devices are
  // done.
  if (call->launches_left > 0 || !missing(*call).empty()) fail_late(*call);
}

void StreamExchange::fail_late(Call& call) {
  const std::string whom = missing(call);
  fail(call, "jreshard: transfer timed out after " + seconds(call.timeout_s) + ", waiting for " +
                 (whom.empty() ? "the devices of this process" : whom));
}

void StreamExchange::fail(Call& call, const ProcessGroup::Failure& failure) {
  if (!call.error.empty()) return;
  broken_ = call.error = failure.error;
  call.patience = Clock::now() + kDrainPatience;
  changed_.notify_all();
  if (!peers_) return close(call);
  group_.tell_failure(call.id, failure);
  peers_->let_go();  // the call ends in wait(), or with the exchange
}

// Of those who wait for each other in turn the first: what they do not do holds up the rest.
std::string StreamExchange::missing(const Call& call) const {
  StreamPeers::Awaited awaited;
  if (peers_) awaited = peers_->awaited(call.id);
  auto& [publishing, receiving, reading] = awaited;
  std::set<int> releasing;
  plan_.for_each_read(
      [&, &publishing = publishing, &receiving = receiving](int chunk, int phase, int source, int reader) {
        if (!local(reader) || local(source) || published(call, chunk, phase, source)) return;
        (phase == 0 ? publishing : receiving).insert(source);
      });
  for (int rank = 0; rank < plan_.num_ranks(); ++rank) {
    if (!local(rank) || call.launching[rank] > 0) continue;  // one that is at work waits for others
    const auto absent = [&](Step step) { return launched(call, step, rank) < static_cast<int>(launches(step)); };
    if (plan_.sends(rank) && absent(kPublish)) publishing.insert(rank);
    if (plan_.receives(rank) && absent(kReceive)) receiving.insert(rank);
    if (plan_.sends(rank) && absent(kRelease)) releasing.insert(rank);
  }
  const std::pair<const std::set<int>&, const char*> groups[] = {
      {publishing, " to publish"}, {receiving, " to receive"}, {reading, " to read"}, {releasing, " to release"}};
  for (const auto& [ranks, what] : groups) {
    if (ranks.empty()) continue;
    std::string names;
    for (int rank : ranks) names += (names.empty() ? "" : ", ") + rank_names_[rank];
    return names + what;
  }
  return "";
}

void StreamExchange::close(Call& call) {
  Watchdog::shared().cancel(call.ticket);
  recycle(call);
  for (auto it = calls_.begin(); it != calls_.end(); ++it) {
    if (it->second.get() != &call) continue;
    calls_.erase(it);
    return;
  }
}

// Handlers of a failed call may still be at work with its events.
void StreamExchange::recycle(Call& call) {
  for (auto [rank, event] : std::exchange(call.events, {})) {
    Device& device = devices_[rank];
    (call.error.empty() ? device.free_events : device.spent_events).push_back(event);
  }
}

void StreamExchange::wait(CallId id) {
  if (!peers_) return;
  const cuda::CurrentContext context(driver_, peers_->context());
  Lock lock(mutex_);
  const CallPtr call = find(id);
  if (!call) throw std::runtime_error(broken_.empty() ? "jreshard: this transfer is not under way" : broken_);
  try {
    while (call->error.empty() && (call->launches_left > 0 || !arrived(lock, *call))) {
      if (Clock::now() > call->deadline) fail_late(*call);
      pause(lock);
    }
    if (const std::string fault = peers_->fault(id); call->error.empty() && !fault.empty()) {
      // Who has given up has said why before.
      const auto patience = Clock::now() + kNewsPatience;
      while (call->error.empty() && Clock::now() < patience) pause(lock);
      fail(*call, fault);
    }
  } catch (const std::runtime_error& error) {
    fail(*call, error.what());
  }
  const bool ended = call->error.empty() || drain(lock, call);
  if (ended) close(*call);
  lock.unlock();
  if (ended) leave(*call);
  if (!call->error.empty()) throw std::runtime_error(call->error);
}

// When all launches have come, nothing is added to what it asks for.
bool StreamExchange::arrived(Lock& lock, Call& call) const {
  const Unlocked unlocked(lock);
  while (!call.ends.empty()) {
    const cuda::Result state = driver_.EventQuery(call.ends.back());
    if (state == cuda::kNotReady) return false;
    cuda::check(driver_, state, "a transfer between processes");
    call.ends.pop_back();
  }
  return true;
}

void StreamExchange::leave(const Call& call) {
  peers_->leave();
  group_.leave(call.id, call.error);
}

bool StreamExchange::drain(Lock& lock, const CallPtr& call) {
  while (!drained(lock, *call)) {
    if (Clock::now() > call->patience) return false;
    pause(lock);
  }
  peers_->let_go();  // once more: what was still enqueued has written its flags
  return true;
}

// When no handler is at work on a failed call, nothing is added to what it asks for.
bool StreamExchange::drained(Lock& lock, const Call& call) const {
  if (std::any_of(call.launching.begin(), call.launching.end(), [](int handlers) { return handlers > 0; }))
    return false;
  const Unlocked unlocked(lock);
  return std::all_of(call.events.begin(), call.events.end(),
                     [&](const auto& event) { return driver_.EventQuery(event.second) != cuda::kNotReady; });
}

bool StreamExchange::end_calls() {
  if (!peers_ || calls_.empty()) return true;
  const bool current = driver_.CtxPushCurrent(peers_->context()) == cuda::kSuccess;
  Lock lock(mutex_);
  while (!calls_.empty()) {
    const CallPtr call = calls_.begin()->second;
    fail(*call, "jreshard: the plan was closed");
    if (!drain(lock, call)) break;
    close(*call);
    leave(*call);
  }
  const bool ended = calls_.empty();
  lock.unlock();
  cuda::Context popped = nullptr;
  if (current) driver_.CtxPopCurrent(&popped);
  return ended;
}

void StreamExchange::retire(std::unique_ptr<StreamExchange> exchange) {
  exchange->forwarder_->close();
  if (exchange->end_calls()) return;
  Retired& retired = Retired::all();
  std::lock_guard<std::mutex> lock(retired.mutex);
  retired.exchanges.push_back(std::move(exchange));
}

void StreamExchange::let_go_retired() {
  Retired& retired = Retired::all();
  std::vector<std::unique_ptr<StreamExchange>> exchanges, kept;
  {
    std::lock_guard<std::mutex> lock(retired.mutex);
    exchanges.swap(retired.exchanges);
  }
  for (auto& exchange : exchanges) {
    if (!exchange->end_calls()) kept.push_back(std::move(exchange));
  }
  std::lock_guard<std::mutex> lock(retired.mutex);
  for (auto& exchange : kept) retired.exchanges.push_back(std::move(exchange));
}

}  // namespace jreshard
