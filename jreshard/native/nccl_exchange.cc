#include "nccl_exchange.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#include "copy_engine.h"
#include "timeout.h"

namespace jreshard {
namespace {

// How long a failed call waits for its devices to let go of the arrays.
constexpr std::chrono::seconds kDrainPatience(5);
// How long after the deadline wait() may take to fail a call, with the names of the devices that are late.
constexpr std::chrono::seconds kWaitPatience(1);
constexpr std::chrono::microseconds kPoll(20);

std::vector<bool> local_ranks(int ranks, const std::map<int, int>& ordinals) {
  std::vector<bool> local(ranks);
  for (const auto& [rank, ordinal] : ordinals) local.at(rank) = true;
  return local;
}

// Messages with the addresses that they have in a call; `base(message)` is that of the array or slot.
template <typename Base>
std::vector<NcclCommunicator::Message> addressed(const std::vector<NcclSchedule::Message>& messages, Base base) {
  std::vector<NcclCommunicator::Message> out;
  out.reserve(messages.size());
  for (const NcclSchedule::Message& m : messages) {
    char* const start = static_cast<char*>(const_cast<void*>(base(m)));
    out.push_back({m.peer, start + m.offset, m.bytes});
  }
  return out;
}

}  // namespace

NcclExchange::NcclExchange(CopyPlan plan, std::vector<std::string> rank_names, std::map<int, int> ordinals,
                           const cuda::Driver& driver, std::shared_ptr<NcclCommunicator> communicator,
                           int64_t slot_bytes)
    : plan_(std::move(plan)),
      rank_names_(std::move(rank_names)),
      driver_(driver),
      communicator_(std::move(communicator)),
      ordinals_(std::move(ordinals)),
      schedule_(plan_, local_ranks(plan_.num_ranks(), ordinals_), slot_bytes) {
  try {
    for (const auto& [rank, ordinal] : ordinals_) {
      Device& device = devices_[rank];
      device.ring = StagingRing::of(driver_, ordinal, schedule_.staged_bytes());
      const cuda::DeviceContext context(driver_, ordinal);
      const cuda::CurrentContext current(driver_, context.get());
      for (cuda::Event* event : {&device.inputs, &device.copied, &device.joined, &device.done}) {
        cuda::check(driver_, driver_.EventCreate(event, cuda::kEventDisableTiming), "cuEventCreate");
      }
      if (plan_.sends(rank)) device.sources.resize(plan_.num_leaves());
    }
  } catch (const std::runtime_error&) {
    destroy_events();
    throw;
  }
}

NcclExchange::~NcclExchange() {
  forwarder_->close();
  destroy_events();
}

void NcclExchange::destroy_events() {
  for (auto& [rank, device] : devices_) {
    for (cuda::Event event : {device.inputs, device.copied, device.joined, device.done}) {
      if (event) driver_.EventDestroy(event);
    }
  }
}

bool NcclExchange::begin(CallId id, double timeout_s) {
  const std::string broken = communicator_->broken();
  std::lock_guard<std::mutex> lock(mutex_);
  if (broken_.empty()) broken_ = broken;
  if (!broken_.empty() || call_) return false;
  const Clock::time_point deadline = deadline_in(timeout_s);
  call_ = std::make_unique<Call>(Call{id, deadline, timeout_s, expire_at(deadline, id), "", false, 0});
  for (auto& [rank, device] : devices_) {
    device.published.assign(plan_.num_chunks(), !plan_.sends(rank));
    device.received = device.released = 0;
    device.launches_left = (plan_.sends(rank) ? 1 : 0) + (plan_.receives(rank) ? plan_.num_chunks() : 0);
  }
  return true;
}

int NcclExchange::open_calls() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return call_ && call_->error.empty() ? 1 : 0;
}

// One that has ended, well or not, has nothing more to learn.
int NcclExchange::steps_run(CallId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return call_ && call_->id == id && call_->error.empty() ? call_->steps_run : std::numeric_limits<int>::max();
}

bool NcclExchange::broken() const {
  const bool communicator_broken = !communicator_->broken().empty();
  std::lock_guard<std::mutex> lock(mutex_);
  return communicator_broken || !broken_.empty();
}

void NcclExchange::abort(CallId id, const std::string& reason) { fail(id, reason); }

void NcclExchange::abort_all(const std::string& reason) { fail(std::nullopt, reason); }

bool NcclExchange::fail(std::optional<CallId> id, const std::string& reason) {
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!call_ || (id && call_->id != *id)) return false;
    first = call_->error.empty();
    if (first) {
      broken_ = call_->error = reason;
      Watchdog::shared().cancel(call_->ticket);
    }
  }
  communicator_->abort(reason);  // or wait until another's abort is over
  return first;
}

Watchdog::Ticket NcclExchange::expire_at(Clock::time_point deadline, CallId id) const {
  return Watchdog::shared().at(deadline, [forwarder = forwarder_, id] { forwarder->expired(id); });
}

// On the watchdog's thread. Threads that enqueue may be held up by a device whose queue is full, so that nobody has
// come to wait(). When all is enqueued, wait() looks after the deadline; but it may be held up too when it asks the
// devices.
void NcclExchange::expired(CallId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!call_ || call_->id != id || !call_->error.empty()) return;
  const std::vector<int> ranks = unlaunched();
  if (ranks.empty() && !std::exchange(call_->left_to_wait, true)) {
    call_->ticket = expire_at(Clock::now() + kWaitPatience, id);
    return;
  }
  const std::string reason =
      late(ranks.empty() ? "devices of this process, which do not answer" : names_of(ranks, " (not launched)"));
  broken_ = call_->error = reason;
  // An abort takes its time, which others have not that the watchdog is to serve.
  std::thread([communicator = communicator_, reason] { communicator->abort(reason); }).detach();
}

// With the lock held: the ranks that have not been launched, for which others may wait.
std::vector<int> NcclExchange::unlaunched() const {
  std::vector<int> ranks;
  for (const auto& [rank, device] : devices_) {
    if (device.launches_left > 0) ranks.push_back(rank);
  }
  return ranks;
}

// Without the lock, when all is launched: the ranks whose devices have not come to the end of the call. Throws
// std::runtime_error where a device has failed.
std::vector<int> NcclExchange::unfinished() const {
  std::vector<int> ranks;
  for (const auto& [rank, device] : devices_) {
    if (!plan_.sends(rank) && !plan_.receives(rank)) continue;
    const cuda::Result state = driver_.EventQuery(device.done);
    if (state == cuda::kNotReady) {
      ranks.push_back(rank);
    } else {
      cuda::check(driver_, state, "a transfer over NCCL");
    }
  }
  return ranks;
}

std::string NcclExchange::names_of(const std::vector<int>& ranks, const char* more) const {
  std::string names;
  for (int rank : ranks) names += (names.empty() ? "" : ", ") + rank_names_[rank] + more;
  return names;
}

// With the lock held.
std::string NcclExchange::late(const std::string& devices) const {
  return "jreshard: transfer timed out after " + seconds(call_->timeout_s) +
         "; still sending, receiving or busy with earlier work: " + devices;
}

void NcclExchange::wait(CallId id) {
  try {
    while (!ended(id)) std::this_thread::sleep_for(kPoll);
  } catch (const std::runtime_error& error) {
    fail(id, error.what());
    drain(id);
    throw;
  }
}

// Whether the call has ended well, which forgets it. Throws std::runtime_error with why it has failed or has to.
bool NcclExchange::ended(CallId id) {
  const std::string broken = communicator_->broken();
  bool in_time;
  std::vector<int> not_launched;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    check_running(id);
    if (!broken.empty()) throw std::runtime_error(broken);
    in_time = Clock::now() <= call_->deadline;
    not_launched = unlaunched();
  }
  // When all is launched, nothing is added to what is asked for.
  const std::vector<int> not_done = not_launched.empty() ? unfinished() : not_launched;
  std::lock_guard<std::mutex> lock(mutex_);
  check_running(id);
  if (not_done.empty()) {
    Watchdog::shared().cancel(call_->ticket);
    call_.reset();
    return true;
  }
  if (in_time) return false;
  throw std::runtime_error(late(names_of(not_done, not_launched.empty() ? "" : " (not launched)")));
}

// With the lock held.
void NcclExchange::check_running(CallId id) const {
  if (!call_ || call_->id != id) throw std::runtime_error("jreshard: this transfer is not under way");
  if (!call_->error.empty()) throw std::runtime_error(call_->error);
}

// Waits, not for ever, until nothing uses the arrays of the failed call, and forgets it.
void NcclExchange::drain(CallId id) {
  const auto patience = Clock::now() + kDrainPatience;
  while (busy() && Clock::now() < patience) std::this_thread::sleep_for(kPoll);
  std::lock_guard<std::mutex> lock(mutex_);
  if (call_ && call_->id == id) call_.reset();
}

bool NcclExchange::busy() const {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (launching_ > 0) return true;
  }
  return std::any_of(devices_.begin(), devices_.end(),
                     [&](const auto& entry) { return driver_.EventQuery(entry.second.done) == cuda::kNotReady; });
}

void NcclExchange::check_fits(int chunk, size_t arrays) const {
  if (chunk < 0 || chunk >= plan_.num_chunks() ||
      arrays != static_cast<size_t>(plan_.chunk_end(chunk) - plan_.chunk_begin(chunk))) {
    throw unfit();
  }
}

// With the lock held.
void NcclExchange::check_open() const {
  if (call_ && call_->error.empty()) return;
  throw std::runtime_error(broken_.empty() ? "jreshard: this transfer is not under way" : broken_);
}

template <typename Action, typename Enqueued>
void NcclExchange::launch(int rank, Chunks chunks, cuda::Stream stream, Action action, Enqueued enqueued) {
  Clock::time_point deadline;
  CallId id;
  bool published;
  Device& device = devices_.at(rank);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    deadline = call_->deadline;
    id = call_->id;
    const auto first = device.published.begin();
    published = std::all_of(first + chunks.begin, first + chunks.end, [](bool known) { return known; });
    ++launching_;
  }
  try {
    if (!published) throw std::runtime_error("jreshard: a program ran before the one that publishes its arrays");
    const cuda::CurrentContext context(driver_, stream);
    action(device, deadline);
    record(device.done, stream);
  } catch (const std::exception& error) {
    const std::string text = std::string(error.what()) + ", on " + rank_names_[rank];
    const bool first = fail(id, text);
    join_after_failure(device, stream);
    std::lock_guard<std::mutex> lock(mutex_);
    --launching_;
    if (first) throw std::runtime_error(text);
    throw;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  --launching_;
  enqueued(device);
}

void NcclExchange::publish(int rank, int chunk, const std::vector<const void*>& arrays, cuda::Stream) {
  check_fits(chunk, arrays.size());
  std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  Device& device = devices_.at(rank);
  std::copy(arrays.begin(), arrays.end(), device.sources.begin() + plan_.chunk_begin(chunk));
  device.published[chunk] = true;
  ++call_->steps_run;
}

void NcclExchange::receive(int rank, int chunk, const std::vector<void*>& results, cuda::Stream stream) {
  // The last result is the token for which the next chunk's call waits.
  const Targets arrays(results.begin(), results.empty() ? results.end() : results.end() - 1);
  check_fits(chunk, arrays.size());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    if (chunk != devices_.at(rank).received) throw unfit();
  }
  launch(
      rank, {chunk, chunk + 1}, stream,
      [&](Device& device, Clock::time_point deadline) { run_waves(device, rank, chunk, arrays, stream, deadline); },
      [&](Device& device) {
        ++device.received;
        --device.launches_left;
        if (call_) ++call_->steps_run;
      });
}

void NcclExchange::release(int rank, int end, cuda::Stream stream) {
  int begin;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    begin = devices_.at(rank).released;  // its releases come one after the other
    if (end <= begin || end > plan_.num_chunks()) throw unfit();
  }
  launch(
      rank, {begin, end}, stream,
      [&](Device& device, Clock::time_point deadline) {
        if (plan_.receives(rank)) return;  // it has sent in its receive step
        for (int chunk = begin; chunk < end; ++chunk) run_waves(device, rank, chunk, {}, stream, deadline);
      },
      [&](Device& device) {
        device.released = end;
        if (end == plan_.num_chunks()) --device.launches_left;
      });
}

void NcclExchange::run_waves(Device& device, int rank, int chunk, const Targets& results, cuda::Stream stream,
                             Clock::time_point deadline) {
  const StagingRing& ring = *device.ring;
  const Arrays arrays{device.sources, results, plan_.chunk_begin(chunk)};
  record(device.inputs, stream);
  for (cuda::Stream side : {ring.pack_stream(), ring.unpack_stream(), ring.local_stream()}) {
    order_after(side, device.inputs);
  }
  copy_locally(rank, chunk, arrays, ring.local_stream());
  record(device.copied, ring.local_stream());
  for (const NcclSchedule::Wave& wave : schedule_.waves(chunk, rank)) {
    run_wave(device, rank, wave, arrays, stream, deadline);
  }
  join_side_streams(device, stream);
}

void NcclExchange::join_side_streams(Device& device, cuda::Stream stream) {
  for (cuda::Stream side : {device.ring->pack_stream(), device.ring->unpack_stream(), device.ring->local_stream()}) {
    record(device.joined, side);
    order_after(stream, device.joined);
  }
}

void NcclExchange::join_after_failure(Device& device, cuda::Stream stream) {
  try {
    const cuda::CurrentContext context(driver_, stream);
    join_side_streams(device, stream);
    record(device.done, stream);
  } catch (const std::runtime_error&) {
    // What failed first is what the call fails with.
  }
}

// The next wave packs, and the last one unpacks, while this one is on its way.
void NcclExchange::run_wave(Device& device, int rank, const NcclSchedule::Wave& wave, const Arrays& arrays,
                            cuda::Stream stream, Clock::time_point deadline) {
  const StagingRing::Turn turn = device.ring->next();
  if (wave.passes_on) await_arrivals(device, turn, wave, stream);
  if (!wave.pack.empty()) pack(device, turn.out, wave, arrays, stream);
  if (!wave.unpack.empty() && turn.in.used) order_after(stream, turn.in.emptied);
  const auto slot = [](const StagingRing::Slot& s) { return reinterpret_cast<void*>(s.memory); };
  communicator_->exchange(
      rank,
      addressed(wave.sends,
                [&](const auto& m) { return m.leaf < 0 ? slot(turn.out) : arrays.read(m.leaf, m.passed_on); }),
      addressed(wave.receives, [&](const auto& m) { return m.leaf < 0 ? slot(turn.in) : arrays.write(m.leaf); }),
      stream, deadline);
  if (!wave.pack.empty()) {
    record(turn.out.emptied, stream);
    turn.out.used = true;
  }
  if (!wave.unpack.empty() || wave.awaited) unpack(device, turn.in, wave, arrays, stream);
}

// Has what a wave packs or sends wait until the device has got it.
void NcclExchange::await_arrivals(Device& device, const StagingRing::Turn& turn, const NcclSchedule::Wave& wave,
                                  cuda::Stream stream) {
  std::vector<cuda::Event> arrivals{device.copied};
  if (wave.lag > 0) arrivals.push_back(wave.lag == 1 ? turn.in_before.emptied : turn.in.emptied);
  for (cuda::Event arrival : arrivals) {
    order_after(stream, arrival);
    if (!wave.pack.empty()) order_after(device.ring->pack_stream(), arrival);
  }
}

void NcclExchange::pack(Device& device, StagingRing::Slot& slot, const NcclSchedule::Wave& wave, const Arrays& arrays,
                        cuda::Stream stream) {
  const cuda::Stream side = device.ring->pack_stream();
  if (slot.used) order_after(side, slot.emptied);
  CopyBatch batch(driver_);
  for (const NcclSchedule::Staged& s : wave.pack) {
    batch.add(s.copy, arrays.read(s.leaf, s.copy.phase > 0), reinterpret_cast<void*>(slot.memory));
  }
  batch.enqueue(side);
  record(slot.filled, side);
  order_after(stream, slot.filled);
}

// Also where there is nothing to unpack: the event then stands for what went straight into the arrays.
void NcclExchange::unpack(Device& device, StagingRing::Slot& slot, const NcclSchedule::Wave& wave, const Arrays& arrays,
                          cuda::Stream stream) {
  const cuda::Stream side = device.ring->unpack_stream();
  record(slot.filled, stream);
  order_after(side, slot.filled);
  CopyBatch batch(driver_);
  for (const NcclSchedule::Staged& s : wave.unpack) {
    batch.add(s.copy, reinterpret_cast<const void*>(slot.memory), arrays.write(s.leaf));
  }
  batch.enqueue(side);
  record(slot.emptied, side);
  slot.used = true;
}

void NcclExchange::copy_locally(int rank, int chunk, const Arrays& arrays, cuda::Stream stream) {
  if (!plan_.sends(rank) || !plan_.receives(rank)) return;
  CopyBatch batch(driver_);
  for (int leaf = plan_.chunk_begin(chunk); leaf < plan_.chunk_end(chunk); ++leaf) {
    for (const Copy& copy : plan_.copies(leaf, rank, 0)) {
      if (copy.src_rank == rank) batch.add(copy, arrays.read(leaf, false), arrays.write(leaf));
    }
  }
  batch.enqueue(stream);
}

void NcclExchange::order_after(cuda::Stream stream, cuda::Event event) {
  cuda::check(driver_, driver_.StreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
}

void NcclExchange::record(cuda::Event event, cuda::Stream stream) {
  cuda::check(driver_, driver_.EventRecord(event, stream), "cuEventRecord");
}

}  // namespace jreshard
