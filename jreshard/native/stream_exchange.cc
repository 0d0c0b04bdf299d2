#include "stream_exchange.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "copy_engine.h"
#include "timeout.h"

namespace jreshard {
namespace {

// Streams on which a device reads, unless it has more sources, and copies that are worth one: engines pause between two
// copies, less so in turn (benchmarks/lanes.py).
constexpr size_t kLanes = 4, kCopiesOfALane = 8;

// What each stream of a device copies, by source and lane. Each source gets streams of its own, so that their links
// work at the same time; and several where it has many copies, so that one engine copies while another sets up its
// next.
std::map<std::pair<int, int>, CopyBatch> lanes_of(std::map<int, CopyBatch> batches, int rank) {
  std::map<std::pair<int, int>, CopyBatch> lanes;
  for (auto& [source, batch] : batches) {
    const size_t most = source == rank ? 1 : std::max<size_t>(1, kLanes / batches.size());
    const size_t count = std::clamp<size_t>(batch.size() / kCopiesOfALane, 1, most);
    if (count == 1) {
      lanes.emplace(std::pair(source, 0), std::move(batch));
      continue;
    }
    int lane = 0;
    for (CopyBatch& part : batch.split(count)) lanes.emplace(std::pair(source, lane++), std::move(part));
  }
  return lanes;
}

}  // namespace

StreamExchange::StreamExchange(CopyPlan plan, std::vector<std::string> rank_names, const cuda::Driver& driver,
                               ProcessMap map, std::map<int, int> ordinals)
    : plan_(std::move(plan)),
      rank_names_(std::move(rank_names)),
      driver_(driver),
      group_(plan_, rank_names_, std::move(map)),
      devices_(plan_.num_ranks()) {
  for (auto& launched : launched_) launched.assign(plan_.num_ranks(), 0);
  if (!group_.alone()) peers_ = std::make_unique<StreamPeers>(plan_, group_, std::move(ordinals), driver_);
}

std::shared_ptr<StreamExchange> StreamExchange::open(CopyPlan plan, std::vector<std::string> rank_names,
                                                     const cuda::Driver& driver, ProcessMap map,
                                                     std::map<int, int> ordinals) {
  let_go_retired();
  return {new StreamExchange(std::move(plan), std::move(rank_names), driver, std::move(map), std::move(ordinals)),
          [](StreamExchange* exchange) { retire(std::unique_ptr<StreamExchange>(exchange)); }};
}

StreamExchange::~StreamExchange() {
  for (Device& device : devices_) {
    if (!device.context || driver_.CtxPushCurrent(device.context) != cuda::kSuccess) continue;
    for (const auto* events : {&device.free_events, &device.spent_events}) {
      for (cuda::Event event : *events) driver_.EventDestroy(event);
    }
    for (const auto& [lane, stream] : device.sides) driver_.StreamDestroy(stream);
    cuda::Context popped = nullptr;
    driver_.CtxPopCurrent(&popped);
  }
}

bool StreamExchange::begin(CallId id, double timeout_s) {
  const int ranks = plan_.num_ranks();
  auto call = std::make_shared<Call>();
  call->id = id;
  call->timeout_s = timeout_s;
  call->deadline = deadline_in(timeout_s);
  call->sources.resize(ranks);
  call->received.resize(ranks);
  call->ready.resize(plan_.num_slots());
  call->read.resize(static_cast<size_t>(plan_.num_chunks()) * ranks);
  call->readers_left.resize(ranks);
  call->launching.resize(ranks);
  call->copied.resize(ranks);
  call->told.resize(call->ready.size());
  for (int rank = 0; rank < ranks; ++rank) {
    if (plan_.sends(rank)) call->sources[rank].resize(plan_.num_leaves());
    if (plan_.receives(rank)) call->received[rank].resize(plan_.num_leaves());
    if (!local(rank)) continue;
    for (int chunk = 0; chunk < plan_.num_chunks(); ++chunk) {
      call->readers_left[rank] += count_local(plan_.readers(chunk, rank));
    }
    call->launches_left += (plan_.sends(rank) ? 1 : 0) + (plan_.receives(rank) ? plan_.num_chunks() : 0);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.empty()) return false;
    call->order = begun_++;
    call->ticket = Watchdog::shared().at(call->deadline, [forwarder = forwarder_, id] { forwarder->expired(id); });
    calls_.emplace(call->order, call);
  }
  if (peers_) join(call);
  return true;
}

// The deadline is watched already: the driver may hold this up.
void StreamExchange::join(const CallPtr& call) {
  try {
    peers_->enter(call->id);
  } catch (const std::exception&) {
    std::lock_guard<std::mutex> lock(mutex_);
    close(*call);
    --begun_;  // no launch belongs to it, and no other call has been begun meanwhile
    throw;
  }
  group_.enter(call->id, forwarder_);
}

int StreamExchange::count_local(const std::vector<int>& ranks) const {
  return static_cast<int>(std::count_if(ranks.begin(), ranks.end(), [&](int rank) { return local(rank); }));
}

bool StreamExchange::broken() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !broken_.empty();
}

int StreamExchange::open_calls() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(
      std::count_if(calls_.begin(), calls_.end(), [](const auto& entry) { return entry.second->error.empty(); }));
}

// One that has ended, well or not, has nothing more to learn.
int StreamExchange::steps_run(CallId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const CallPtr call = find(id);
  return call && call->error.empty() ? call->steps_run : std::numeric_limits<int>::max();
}

StreamExchange::CallPtr StreamExchange::find(CallId id) const {
  for (const auto& [order, call] : calls_) {
    if (call->id == id) return call;
  }
  return nullptr;
}

void StreamExchange::abort(CallId id, const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const CallPtr call = find(id)) fail(*call, reason);
}

void StreamExchange::abort_all(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto calls = calls_;
  for (const auto& [order, call] : calls) fail(*call, reason);
}

StreamExchange::Launch::Launch(StreamExchange& exchange, Step step, int rank) : exchange_(exchange), rank_(rank) {
  std::lock_guard<std::mutex> lock(exchange_.mutex_);
  call = exchange_.current(step, rank);
  ++call->launching[rank];
}

StreamExchange::Launch::~Launch() {
  std::lock_guard<std::mutex> lock(exchange_.mutex_);
  --call->launching[rank_];
  if (!call->error.empty() && !exchange_.peers_) exchange_.recycle(*call);
}

StreamExchange::CallPtr StreamExchange::current(Step step, int rank) {
  auto found = calls_.find(launched_[step][rank] / launches(step));
  if (found == calls_.end() || !found->second->error.empty()) {
    throw std::runtime_error(broken_.empty() ? "jreshard: this transfer is not under way" : broken_);
  }
  ++launched_[step][rank];
  return found->second;
}

int StreamExchange::launched(const Call& call, Step step, int rank) const {
  const uint64_t before = call.order * launches(step);
  return static_cast<int>(std::min(launches(step), std::max(launched_[step][rank], before) - before));
}

template <typename Ready>
void StreamExchange::wait(Lock& lock, const CallPtr& call, Ready ready) {
  if (!changed_.wait_until(lock, call->deadline, [&] { return !call->error.empty() || ready(); })) fail_late(*call);
  if (!call->error.empty()) throw std::runtime_error(call->error);
}

// With the lock held. The last launch of a call ends it where all ranks are local: the rest is in the streams' order.
void StreamExchange::end_launch(const CallPtr& call) {
  if (--call->launches_left == 0 && !peers_) close(*call);
}

cuda::Event StreamExchange::record(const CallPtr& call, int rank, cuda::Stream stream) {
  const cuda::Event event = unused_event(rank, stream);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    call->events.emplace_back(rank, event);
  }
  cuda::check(driver_, driver_.EventRecord(event, stream), "cuEventRecord");
  return event;
}

cuda::Event StreamExchange::unused_event(int rank, cuda::Stream stream) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<cuda::Event>& unused = devices_[rank].free_events;
    if (!unused.empty()) {
      const cuda::Event event = unused.back();
      unused.pop_back();
      return event;
    }
  }
  cuda::Context context = nullptr;
  cuda::Event event = nullptr;
  cuda::check(driver_, driver_.StreamGetCtx(stream, &context), "cuStreamGetCtx");
  cuda::check(driver_, driver_.EventCreate(&event, cuda::kEventDisableTiming), "cuEventCreate");
  std::lock_guard<std::mutex> lock(mutex_);
  devices_[rank].context = context;
  return event;
}

void StreamExchange::join_sides(const CallPtr& call, int rank, cuda::Stream stream) {
  try {
    std::vector<cuda::Stream> sides;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [lane, side] : devices_[rank].sides) sides.push_back(side);
    }
    for (cuda::Stream side : sides) order_after(stream, record(call, rank, side));
    record(call, rank, stream);
  } catch (const std::runtime_error&) {
    // A device that takes no event runs nothing either; what went wrong first is what is told.
  }
}

// The launches on a rank come one after the other, so that nobody else makes the same stream.
cuda::Stream StreamExchange::side_stream(int rank, int source, int lane) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = devices_[rank].sides.find({source, lane});
    if (found != devices_[rank].sides.end()) return found->second;
  }
  cuda::Stream stream = nullptr;
  cuda::check(driver_, driver_.StreamCreate(&stream, cuda::kStreamNonBlocking), "cuStreamCreate");
  std::lock_guard<std::mutex> lock(mutex_);
  return devices_[rank].sides[{source, lane}] = stream;
}

void StreamExchange::order_after(cuda::Stream stream, cuda::Event event) {
  cuda::check(driver_, driver_.StreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
}

void StreamExchange::publish(int rank, int chunk, const std::vector<const void*>& arrays, cuda::Stream stream) {
  const Launch launch(*this, kPublish, rank);
  const CallPtr& call = launch.call;
  cuda::Event ready = nullptr;
  enqueue(call, rank, stream, [&] {
    if (peers_) peers_->publish(call->id, rank, chunk, 0, arrays, stream);
    ready = record(call, rank, stream);  // behind the flag: nothing of the call may be left out
  });
  std::lock_guard<std::mutex> lock(mutex_);
  std::copy(arrays.begin(), arrays.end(), call->sources[rank].begin() + plan_.chunk_begin(chunk));
  call->ready[slot(chunk, 0, rank)] = ready;
  ++call->steps_run;
  changed_.notify_all();
}

void StreamExchange::receive(int rank, int chunk, const std::vector<void*>& arrays, cuda::Stream stream) {
  const Launch launch(*this, kReceive, rank);
  const CallPtr& call = launch.call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::copy(arrays.begin(), arrays.end(), call->received[rank].begin() + plan_.chunk_begin(chunk));
  }
  for (int phase = 0; phase < plan_.num_phases(); ++phase) run_phase(call, rank, chunk, phase, stream);
  if (plan_.num_phases() > 1) await_readers(call, rank, chunk, stream);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++call->steps_run;
  }
  record_end(call, rank, stream);
}

void StreamExchange::run_phase(const CallPtr& call, int rank, int chunk, int phase, cuda::Stream stream) {
  const std::vector<int>& sources = plan_.sources(chunk, rank, phase);
  const int next = phase + 1;
  const bool read_next = next < plan_.num_phases() && !plan_.readers(chunk, rank, next).empty();
  if (sources.empty() && !read_next) return;
  auto ready = [&](int source) { return published(*call, chunk, phase, source); };
  {
    Lock lock(mutex_);
    wait(lock, call, [&] { return std::all_of(sources.begin(), sources.end(), ready); });
  }
  cuda::Event copied = nullptr;
  enqueue(call, rank, stream, [&] {
    pull(call, rank, chunk, phase, stream);
    copied = record(call, rank, stream);
    if (!peers_) return;
    peers_->tell_read(call->id, rank, chunk, phase, stream);
    if (!read_next) return;
    const auto first = call->received[rank].begin();
    peers_->publish(call->id, rank, chunk, next, {first + plan_.chunk_begin(chunk), first + plan_.chunk_end(chunk)},
                    stream);
  });
  std::lock_guard<std::mutex> lock(mutex_);
  if (read_next) call->ready[slot(chunk, next, rank)] = copied;
  for (int source : sources) {
    if (!local(source)) continue;
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
  for (int phase = 1; phase < plan_.num_phases(); ++phase) readers += count_local(plan_.readers(chunk, rank, phase));
  std::vector<cuda::Event>& read = call->read[chunk * plan_.num_ranks() + rank];
  {
    Lock lock(mutex_);
    wait(lock, call, [&] { return read.size() == readers; });
  }
  enqueue(call, rank, stream, [&] {
    for (cuda::Event event : read) order_after(stream, event);
    if (!peers_) return;
    for (int phase = 1; phase < plan_.num_phases(); ++phase) {
      peers_->await_readers(call->id, rank, chunk, phase, stream);
    }
  });
}

void StreamExchange::pull(const CallPtr& call, int rank, int chunk, int phase, cuda::Stream stream) {
  const auto& arrays = phase == 0 ? call->sources : call->received;
  std::map<int, CopyBatch> batches;
  for (int leaf = plan_.chunk_begin(chunk); leaf < plan_.chunk_end(chunk); ++leaf) {
    void* const dst = const_cast<void*>(call->received[rank][leaf]);
    for (const Copy& copy : plan_.copies(leaf, rank, phase)) {
      const void* src = arrays[copy.src_rank][leaf];
      if (!local(copy.src_rank)) src = peers_->translate(copy.src_rank, src, rank);
      batches.try_emplace(copy.src_rank, driver_).first->second.add(copy, src, dst);
    }
  }
  auto lanes = lanes_of(std::move(batches), rank);
  if (lanes.size() == 1) {
    auto& [lane, batch] = *lanes.begin();
    await_source(call, lane.first, chunk, phase, stream);
    batch.enqueue(stream);
    return;
  }
  const cuda::Event free = lanes.empty() ? nullptr : record(call, rank, stream);
  for (auto& [lane, batch] : lanes) {
    const cuda::Stream side = side_stream(rank, lane.first, lane.second);
    order_after(side, free);
    await_source(call, lane.first, chunk, phase, side);
    batch.enqueue(side);
    order_after(stream, record(call, rank, side));
  }
}

void StreamExchange::await_source(const CallPtr& call, int source, int chunk, int phase, cuda::Stream stream) {
  if (local(source)) {
    order_after(stream, call->ready[slot(chunk, phase, source)]);
  } else {
    peers_->await_ready(call->id, source, chunk, phase, stream);
  }
}

void StreamExchange::release(int rank, int end, cuda::Stream stream) {
  if (end != plan_.num_chunks()) throw unfit();
  const Launch launch(*this, kRelease, rank);
  const CallPtr& call = launch.call;
  std::map<int, cuda::Event> copied;
  {
    Lock lock(mutex_);
    wait(lock, call, [&] { return call->readers_left[rank] == 0; });
    copied = call->copied[rank];
  }
  enqueue(call, rank, stream, [&] {
    for (auto [reader, event] : copied) order_after(stream, event);
    if (!peers_) return;
    for (int chunk = 0; chunk < plan_.num_chunks(); ++chunk) {
      peers_->await_readers(call->id, rank, chunk, 0, stream);
    }
  });
  record_end(call, rank, stream);
}

}  // namespace jreshard
