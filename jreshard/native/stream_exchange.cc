#include "stream_exchange.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "copy_engine.h"

namespace jreshard {

StreamExchange::StreamExchange(CopyPlan plan, std::vector<std::string> rank_names, const cuda::Driver& driver)
    : plan_(std::move(plan)), rank_names_(std::move(rank_names)), driver_(driver), devices_(plan_.num_ranks()) {
  for (auto& launched : launched_) launched.assign(plan_.num_ranks(), 0);
}

bool StreamExchange::begin(CallId id, double timeout_s) {
  const int ranks = plan_.num_ranks();
  auto call = std::make_shared<Call>();
  call->id = id;
  call->timeout_s = timeout_s;
  call->deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  call->sources.resize(ranks);
  call->received.resize(ranks);
  call->ready.resize(static_cast<size_t>(plan_.num_chunks()) * plan_.num_phases() * ranks);
  call->read.resize(static_cast<size_t>(plan_.num_chunks()) * ranks);
  call->readers_left.resize(ranks);
  call->copied.resize(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    call->readers_left[rank] = plan_.num_readers(rank);
    if (plan_.sends(rank)) {
      call->sources[rank].resize(plan_.num_leaves());
      ++call->launches_left;
    }
    if (!plan_.receives(rank)) continue;
    call->received[rank].resize(plan_.num_leaves());
    call->launches_left += plan_.num_chunks();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_.empty()) return false;
  calls_.emplace(begun_++, std::move(call));
  return true;
}

int StreamExchange::open_calls() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(calls_.size());
}

void StreamExchange::abort(CallId id, const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = calls_.begin(); it != calls_.end(); ++it) {
    if (it->second->id != id) continue;
    fail(*it->second, reason);
    return;
  }
}

void StreamExchange::abort_all(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!calls_.empty()) fail(*calls_.begin()->second, reason);
}

// With the lock held.
void StreamExchange::fail(Call& call, const std::string& reason) {
  broken_ = call.error = reason;
  for (auto it = calls_.begin(); it != calls_.end(); ++it) {
    if (it->second.get() != &call) continue;
    calls_.erase(it);
    break;
  }
  changed_.notify_all();
}

StreamExchange::CallPtr StreamExchange::current(Step step, int rank) {
  auto found = calls_.find(launched_[step][rank] / launches(step));
  if (found == calls_.end()) {
    throw std::runtime_error(broken_.empty() ? "jreshard: this transfer is not under way" : broken_);
  }
  ++launched_[step][rank];
  return found->second;
}

template <typename Ready, typename Missing>
void StreamExchange::wait(std::unique_lock<std::mutex>& lock, const CallPtr& call, Ready ready, Missing missing) {
  const bool in_time = changed_.wait_until(lock, call->deadline, [&] { return !call->error.empty() || ready(); });
  if (!in_time) {
    fail(*call,
         "jreshard: transfer timed out after " + std::to_string(call->timeout_s) + " s, waiting for " + missing());
  }
  if (!call->error.empty()) throw std::runtime_error(call->error);
}

// With the lock held. The last launch of a call ends it: all the rest is in the streams' order.
void StreamExchange::end_launch(const CallPtr& call) {
  if (--call->launches_left > 0) return;
  for (auto [rank, event] : call->events) devices_[rank].free_events.push_back(event);
  for (auto it = calls_.begin(); it != calls_.end(); ++it) {
    if (it->second != call) continue;
    calls_.erase(it);
    return;
  }
}

template <typename Action>
void StreamExchange::enqueue(const CallPtr& call, cuda::Stream stream, Action action) {
  try {
    const cuda::CurrentContext context(driver_, stream);
    action();
  } catch (const std::runtime_error& error) {
    abort(call->id, error.what());
    throw;
  }
}

cuda::Event StreamExchange::record(const CallPtr& call, int rank, cuda::Stream stream) {
  cuda::Event event = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<cuda::Event>& unused = devices_[rank].free_events;
    if (!unused.empty()) {
      event = unused.back();
      unused.pop_back();
    } else {
      cuda::check(driver_, driver_.EventCreate(&event, cuda::kEventDisableTiming), "cuEventCreate");
    }
    call->events.emplace_back(rank, event);
  }
  cuda::check(driver_, driver_.EventRecord(event, stream), "cuEventRecord");
  return event;
}

cuda::Stream StreamExchange::stream_from(int rank, int source) {
  std::lock_guard<std::mutex> lock(mutex_);
  cuda::Stream& stream = devices_[rank].from[source];
  if (!stream) cuda::check(driver_, driver_.StreamCreate(&stream, cuda::kStreamNonBlocking), "cuStreamCreate");
  return stream;
}

void StreamExchange::order_after(cuda::Stream stream, cuda::Event event) {
  cuda::check(driver_, driver_.StreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
}

void StreamExchange::publish(int rank, int chunk, const std::vector<const void*>& arrays, cuda::Stream stream) {
  CallPtr call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    call = current(kPublish, rank);
  }
  cuda::Event ready = nullptr;
  enqueue(call, stream, [&] { ready = record(call, rank, stream); });
  std::lock_guard<std::mutex> lock(mutex_);
  std::copy(arrays.begin(), arrays.end(), call->sources[rank].begin() + plan_.chunk_begin(chunk));
  call->ready[slot(chunk, 0, rank)] = ready;
  changed_.notify_all();
}

void StreamExchange::receive(int rank, int chunk, const std::vector<void*>& arrays, cuda::Stream stream) {
  CallPtr call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    call = current(kReceive, rank);
    std::copy(arrays.begin(), arrays.end(), call->received[rank].begin() + plan_.chunk_begin(chunk));
  }
  for (int phase = 0; phase < plan_.num_phases(); ++phase) run_phase(call, rank, chunk, phase, stream);
  if (plan_.num_phases() > 1) await_readers(call, rank, chunk, stream);
  std::lock_guard<std::mutex> lock(mutex_);
  end_launch(call);
}

void StreamExchange::run_phase(const CallPtr& call, int rank, int chunk, int phase, cuda::Stream stream) {
  const std::vector<int>& sources = plan_.sources(chunk, rank, phase);
  const int next = phase + 1;
  const bool read_next = next < plan_.num_phases() && !plan_.readers(chunk, rank, next).empty();
  if (sources.empty() && !read_next) return;
  auto ready = [&](int source) { return call->ready[slot(chunk, phase, source)]; };
  auto missing = [&] {
    std::string names;
    for (int source : sources) {
      if (!ready(source)) names += (names.empty() ? "" : ", ") + rank_names_[source];
    }
    return names + (phase == 0 ? " to publish" : " to receive");
  };
  {
    std::unique_lock<std::mutex> lock(mutex_);
    wait(lock, call, [&] { return std::all_of(sources.begin(), sources.end(), ready); }, missing);
  }
  cuda::Event copied = nullptr;
  enqueue(call, stream, [&] {
    pull(call, rank, chunk, phase, stream);
    copied = record(call, rank, stream);
  });
  std::lock_guard<std::mutex> lock(mutex_);
  if (read_next) call->ready[slot(chunk, next, rank)] = copied;
  for (int source : sources) {
    if (phase > 0) {
      call->read[chunk * plan_.num_ranks() + source].push_back(copied);
    } else {
      call->copied[source][rank] = copied;
      --call->readers_left[source];
    }
  }
  changed_.notify_all();
}

void StreamExchange::await_readers(const CallPtr& call, int rank, int chunk, cuda::Stream stream) {
  size_t readers = 0;
  for (int phase = 1; phase < plan_.num_phases(); ++phase) readers += plan_.readers(chunk, rank, phase).size();
  if (readers == 0) return;
  std::vector<cuda::Event>& read = call->read[chunk * plan_.num_ranks() + rank];
  {
    std::unique_lock<std::mutex> lock(mutex_);
    wait(
        lock, call, [&] { return read.size() == readers; },
        [&] { return "those who read what " + rank_names_[rank] + " has received"; });
  }
  enqueue(call, stream, [&] {
    for (cuda::Event event : read) order_after(stream, event);
  });
}

void StreamExchange::pull(const CallPtr& call, int rank, int chunk, int phase, cuda::Stream stream) {
  const auto& arrays = phase == 0 ? call->sources : call->received;
  std::map<int, CopyBatch> batches;
  for (int leaf = plan_.chunk_begin(chunk); leaf < plan_.chunk_end(chunk); ++leaf) {
    void* const dst = const_cast<void*>(call->received[rank][leaf]);
    for (const Copy& copy : plan_.copies(leaf, rank, phase)) {
      batches.try_emplace(copy.src_rank, driver_).first->second.add(copy, arrays[copy.src_rank][leaf], dst);
    }
  }
  auto ready = [&](int source) { return call->ready[slot(chunk, phase, source)]; };
  if (batches.size() == 1) {
    auto& [source, batch] = *batches.begin();
    order_after(stream, ready(source));
    batch.enqueue(stream);
    return;
  }
  // Several sources feed this device: each gets a stream of its own, so that their links work at the same time.
  const cuda::Event free = batches.empty() ? nullptr : record(call, rank, stream);
  for (auto& [source, batch] : batches) {
    const cuda::Stream side = stream_from(rank, source);
    order_after(side, free);
    order_after(side, ready(source));
    batch.enqueue(side);
    order_after(stream, record(call, rank, side));
  }
}

void StreamExchange::release(int rank, cuda::Stream stream) {
  CallPtr call;
  std::map<int, cuda::Event> copied;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    call = current(kRelease, rank);
    wait(
        lock, call, [&] { return call->readers_left[rank] == 0; },
        [&] { return "the readers of " + rank_names_[rank]; });
    copied = call->copied[rank];
  }
  enqueue(call, stream, [&] {
    for (auto [reader, event] : copied) order_after(stream, event);
  });
  std::lock_guard<std::mutex> lock(mutex_);
  end_launch(call);
}

}  // namespace jreshard
