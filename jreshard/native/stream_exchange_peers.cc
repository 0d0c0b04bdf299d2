// How a call of StreamExchange hears from other processes, and how it ends where they take part.
#include <algorithm>
#include <stdexcept>
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
constexpr std::chrono::seconds kDrainPatience(5);

void pause(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  std::this_thread::sleep_for(kPoll);
  lock.lock();
}

}  // namespace

// With the lock held.
bool StreamExchange::published(const Call& call, int chunk, int phase, int source) const {
  const size_t at = slot(chunk, phase, source);
  return local(source) ? call.ready[at] != nullptr : call.told[at];
}

std::string StreamExchange::misfit(int process, const Call& call, const Message& message) const {
  const int rank = message.rank, chunk = message.chunk, phase = message.phase;
  if (message.kind != Message::kPublish) return "a message of another kind";
  if (chunk < 0 || chunk >= plan_.num_chunks()) return "chunk " + std::to_string(chunk);
  if (phase < 0 || phase >= plan_.num_phases()) return "phase " + std::to_string(phase);
  if (rank < 0 || rank >= plan_.num_ranks()) return "rank " + std::to_string(rank);
  if (peers_->placement().process_of[rank] != process) return "a message in the name of " + rank_names_[rank];
  if (phase == 0 ? !plan_.sends(rank) : !plan_.receives(rank)) return rank_names_[rank] + " has nothing to publish";
  if (call.told[slot(chunk, phase, rank)]) return rank_names_[rank] + " has published before";
  const size_t leaves = plan_.chunk_end(chunk) - plan_.chunk_begin(chunk);
  return message.addresses.size() == leaves ? "" : std::to_string(message.addresses.size()) + " addresses";
}

void StreamExchange::heard(int process, const Message& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  const CallPtr call = find(message.call);
  if (!call || !call->error.empty()) return;
  if (message.kind == Message::kAbort) {
    return fail(*call, "jreshard: " + peers_->name(message.rank) + ": " + message.reason, message.rank, message.reason);
  }
  if (const std::string fault = misfit(process, *call, message); !fault.empty()) {
    return fail(*call, "jreshard: " + peers_->name(process) + " sent what does not fit the transfer: " + fault);
  }
  auto& arrays = message.phase == 0 ? call->sources : call->received;
  for (size_t i = 0; i < message.addresses.size(); ++i) {
    const void*& known = arrays[message.rank][plan_.chunk_begin(message.chunk) + i];
    const void* const address = reinterpret_cast<const void*>(message.addresses[i]);
    // Phases after the second tell again what those before have told, and what may be read at this moment.
    if (known == address) continue;
    if (known) {
      return fail(*call, "jreshard: " + peers_->name(process) + " sent other addresses than before");
    }
    known = address;
  }
  call->told[slot(message.chunk, message.phase, message.rank)] = true;
  changed_.notify_all();
}

void StreamExchange::lost(CallId id, int process, const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  const CallPtr call = find(id);
  if (call && peers_->needs(id, process)) fail(*call, error);
}

void StreamExchange::record_end(const CallPtr& call, int rank, cuda::Stream stream) {
  cuda::Event end = nullptr;
  if (peers_) enqueue(call, rank, stream, [&] { end = record(call, rank, stream); });
  std::lock_guard<std::mutex> lock(mutex_);
  if (end) call->ends.push_back(end);
  end_launch(call);
}

// With the lock held.
bool StreamExchange::arrived(Call& call) const {
  while (!call.ends.empty()) {
    const cuda::Result state = driver_.EventQuery(call.ends.back());
    if (state == cuda::kNotReady) return false;
    cuda::check(driver_, state, "a transfer between processes");
    call.ends.pop_back();
  }
  return true;
}

void StreamExchange::wait(CallId id) {
  if (!peers_) return;
  const cuda::CurrentContext context(driver_, peers_->context());
  std::unique_lock<std::mutex> lock(mutex_);
  const CallPtr call = find(id);
  if (!call) throw std::runtime_error(broken_.empty() ? "jreshard: this transfer is not under way" : broken_);
  try {
    while (call->error.empty() && (call->launches_left > 0 || !arrived(*call))) {
      if (Clock::now() > call->deadline) {
        fail(*call, "jreshard: transfer timed out after " + seconds(call->timeout_s) +
                        ", waiting for the devices or for " + partners());
      }
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
  if (!call->error.empty()) drain(lock, call);
  close(*call);
  lock.unlock();
  leave(*call);
  if (!call->error.empty()) throw std::runtime_error(call->error);
}

void StreamExchange::end_calls() {
  if (calls_.empty()) return;
  const bool current = driver_.CtxPushCurrent(peers_->context()) == cuda::kSuccess;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!calls_.empty()) {
    const CallPtr call = calls_.begin()->second;
    fail(*call, "jreshard: the plan was closed");
    drain(lock, call);
    close(*call);
    leave(*call);
  }
  cuda::Context popped = nullptr;
  if (current) driver_.CtxPopCurrent(&popped);
}

void StreamExchange::leave(const Call& call) {
  peers_->leave();
  peers_->placement().peers->close(peers_->placement().key, call.id, call.error);
}

void StreamExchange::drain(std::unique_lock<std::mutex>& lock, const CallPtr& call) {
  const auto patience = Clock::now() + kDrainPatience;
  while (!drained(*call) && Clock::now() < patience) pause(lock);
  peers_->let_go();  // once more: what was still enqueued has written its flags
}

// With the lock held: nothing of a failed call is on the streams any more.
bool StreamExchange::drained(const Call& call) const {
  if (call.launching > 0) return false;
  return std::all_of(call.events.begin(), call.events.end(),
                     [&](const auto& event) { return driver_.EventQuery(event.second) != cuda::kNotReady; });
}

std::string StreamExchange::partners() const {
  std::string names;
  for (int process : peers_->partners()) names += (names.empty() ? "" : ", ") + peers_->name(process);
  return names;
}

}  // namespace jreshard
