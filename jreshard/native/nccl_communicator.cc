#include "nccl_communicator.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <thread>

namespace jreshard {
namespace {

// How long an abort waits for threads to leave NCCL, and then for NCCL.
constexpr std::chrono::seconds kAbortPatience(5);
// Most launches are done within this time, for which it is not worth sleeping.
constexpr std::chrono::microseconds kSpin(200);
constexpr std::chrono::microseconds kNap(20);

void pause_since(NcclCommunicator::Clock::time_point begin) {
  if (NcclCommunicator::Clock::now() - begin < kSpin) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(kNap);
  }
}

// A byte of device memory for each rank to send and receive, and a stream to do so.
struct WarmUp {
  WarmUp(const WarmUp&) = delete;
  WarmUp& operator=(const WarmUp&) = delete;
  WarmUp(const cuda::Driver& driver, int ordinal) : driver(driver), context(driver, ordinal) {}
  void allocate(size_t bytes) {
    const cuda::CurrentContext current(driver, context.get());
    cuda::check(driver, driver.StreamCreate(&stream, cuda::kStreamNonBlocking), "cuStreamCreate");
    cuda::check(driver, driver.MemAlloc(&memory, bytes), "cuMemAlloc");
  }
  ~WarmUp() {
    if (driver.CtxPushCurrent(context.get()) != cuda::kSuccess) return;
    // Freeing waits for the device: a kernel that not even an abort ends would hold it up for ever.
    const auto patience = NcclCommunicator::Clock::now() + kAbortPatience;
    while (memory && driver.StreamQuery(stream) == cuda::kNotReady && NcclCommunicator::Clock::now() < patience) {
      std::this_thread::sleep_for(kNap);
    }
    if (memory && driver.StreamQuery(stream) != cuda::kNotReady) driver.MemFree(memory);
    if (stream) driver.StreamDestroy(stream);
    cuda::Context popped = nullptr;
    driver.CtxPopCurrent(&popped);
  }
  bool done() {
    const cuda::CurrentContext current(driver, context.get());
    const cuda::Result result = driver.StreamQuery(stream);
    if (result == cuda::kNotReady) return false;
    cuda::check(driver, result, "the first exchange over NCCL");
    return true;
  }
  void* byte(int peer, bool receives) { return reinterpret_cast<void*>(memory + 2 * peer + receives); }

  const cuda::Driver& driver;
  const cuda::DeviceContext context;
  cuda::Stream stream = nullptr;
  cuda::DevicePtr memory = 0;
};

}  // namespace

// Communicators that are being aborted, which may outlast their owner.
struct NcclCommunicator::Aborts {
  std::mutex mutex;
  std::condition_variable changed;
  size_t left = 0;
};

// Keeps abort() from freeing the communicators while a thread is in NCCL.
class NcclCommunicator::Use {
 public:
  explicit Use(NcclCommunicator& owner) : owner_(owner) {
    std::lock_guard<std::mutex> lock(owner.mutex_);
    if (!owner.broken_.empty()) throw std::runtime_error(owner.broken_);
    ++owner.uses_;
  }
  ~Use() {
    std::lock_guard<std::mutex> lock(owner_.mutex_);
    if (--owner_.uses_ == 0) owner_.idle_.notify_all();
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  NcclCommunicator& owner_;
};

NcclCommunicator::NcclCommunicator(const nccl::Library& library, const cuda::Driver& driver, int ranks,
                                   std::map<int, int> ordinals, const nccl::UniqueId& id, Clock::time_point deadline)
    : library_(library), driver_(driver), ordinals_(std::move(ordinals)) {
  try {
    join(ranks, id, deadline);
  } catch (const std::exception& error) {
    abort(error.what());
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() { abort("jreshard: the communicator is closed"); }

void NcclCommunicator::join(int ranks, const nccl::UniqueId& id, Clock::time_point deadline) {
  std::vector<int> local;
  for (const auto& [rank, ordinal] : ordinals_) local.push_back(rank);
  group(local, deadline, "joining the NCCL communicator", [&] {
    for (const auto& [rank, ordinal] : ordinals_) {
      const cuda::DeviceContext device(driver_, ordinal);
      const cuda::CurrentContext current(driver_, device.get());
      nccl::Config config;
      nccl::Comm comm = nullptr;
      nccl::check(library_, library_.CommInitRankConfig(&comm, ranks, id, rank, &config), "ncclCommInitRankConfig");
      std::lock_guard<std::mutex> lock(mutex_);
      comms_[rank] = comm;
    }
  });
}

void NcclCommunicator::group(const std::vector<int>& ranks, Clock::time_point deadline, const char* what,
                             const std::function<void()>& add) {
  const Use use(*this);
  nccl::check(library_, library_.GroupStart(), "ncclGroupStart");
  std::exception_ptr error;
  try {
    add();
  } catch (...) {
    error = std::current_exception();
  }
  const nccl::Result ended = library_.GroupEnd();  // also then: the thread would stay within the group
  if (error) std::rethrow_exception(error);
  nccl::check(library_, ended, what);
  for (int rank : ranks) settle(rank, deadline, what);
}

nccl::Comm NcclCommunicator::comm_of(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_.empty()) throw std::runtime_error(broken_);
  return comms_.at(rank);
}

void NcclCommunicator::settle(int rank, Clock::time_point deadline, const char* what) {
  const auto begin = Clock::now();
  for (;;) {
    nccl::Result state = nccl::kSuccess;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!broken_.empty()) throw std::runtime_error(broken_);
      nccl::check(library_, library_.CommGetAsyncError(comms_.at(rank), &state), "ncclCommGetAsyncError");
    }
    nccl::check(library_, state, what);
    if (state == nccl::kSuccess) return;
    if (Clock::now() > deadline) throw std::runtime_error(std::string("jreshard: timed out while ") + what);
    pause_since(begin);
  }
}

void NcclCommunicator::warm_up(const std::vector<std::pair<int, int>>& pairs, Clock::time_point deadline) {
  int peers = 0;
  for (const auto& [from, to] : pairs) peers = std::max({peers, from + 1, to + 1});
  std::map<int, std::unique_ptr<WarmUp>> locals;
  std::vector<int> ranks;
  for (const auto& [from, to] : pairs) {
    for (int rank : {from, to}) {
      if (!is_local(rank) || locals.count(rank)) continue;
      locals[rank] = std::make_unique<WarmUp>(driver_, ordinals_.at(rank));
      locals[rank]->allocate(2 * peers);
      ranks.push_back(rank);
    }
  }
  try {
    group(ranks, deadline, "connecting the pairs of the NCCL communicator", [&] {
      for (const auto& [from, to] : pairs) {
        for (int rank : {from, to}) {
          if (!is_local(rank)) continue;
          WarmUp& local = *locals.at(rank);
          const cuda::CurrentContext current(driver_, local.context.get());
          const bool sends = rank == from;
          void* const byte = local.byte(sends ? to : from, !sends);
          const nccl::Comm comm = comm_of(rank);
          nccl::check(library_,
                      sends ? library_.Send(byte, 1, nccl::kUint8, to, comm, local.stream)
                            : library_.Recv(byte, 1, nccl::kUint8, from, comm, local.stream),
                      sends ? "ncclSend" : "ncclRecv");
        }
      }
    });
    for (auto& [rank, local] : locals) {
      for (const auto begin = Clock::now(); !local->done(); pause_since(begin)) {
        if (const std::string reason = broken(); !reason.empty()) throw std::runtime_error(reason);
        if (Clock::now() > deadline) throw std::runtime_error("jreshard: the first exchange over NCCL timed out");
      }
    }
  } catch (const std::exception& error) {
    abort(error.what());  // else the memory would be freed under kernels that wait
    throw;
  }
}

void NcclCommunicator::exchange(int rank, const std::vector<Message>& sends, const std::vector<Message>& receives,
                                cuda::Stream stream, Clock::time_point deadline) {
  group({rank}, deadline, "launching a group of NCCL", [&] {
    const nccl::Comm comm = comm_of(rank);
    for (const Message& m : sends) {
      nccl::check(library_, library_.Send(m.data, m.bytes, nccl::kUint8, m.peer, comm, stream), "ncclSend");
    }
    for (const Message& m : receives) {
      nccl::check(library_, library_.Recv(m.data, m.bytes, nccl::kUint8, m.peer, comm, stream), "ncclRecv");
    }
  });
}

void NcclCommunicator::abort(const std::string& reason) {
  std::shared_ptr<Aborts> aborts;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (broken_.empty()) broken_ = reason;
    idle_.wait_for(lock, kAbortPatience, [&] { return uses_ == 0; });
    if (!aborts_) start_aborts();
    aborts = aborts_;
  }
  std::unique_lock<std::mutex> lock(aborts->mutex);
  aborts->changed.wait_for(lock, kAbortPatience, [&] { return aborts->left == 0; });
}

// With the lock held.
void NcclCommunicator::start_aborts() {
  aborts_ = std::make_shared<Aborts>();
  aborts_->left = comms_.size();
  for (const auto& [rank, comm] : comms_) {
    // Abort may never return when a peer is gone; then its thread stays behind.
    std::thread([&library = library_, comm = comm, aborts = aborts_] {
      library.CommAbort(comm);
      std::lock_guard<std::mutex> lock(aborts->mutex);
      if (--aborts->left == 0) aborts->changed.notify_all();
    }).detach();
  }
  comms_.clear();
}

std::string NcclCommunicator::broken() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [rank, comm] : comms_) {
    nccl::Result state = nccl::kSuccess;
    const nccl::Result asked = library_.CommGetAsyncError(comm, &state);
    if (asked != nccl::kSuccess) state = asked;
    if (broken_.empty() && state != nccl::kSuccess && state != nccl::kInProgress) {
      broken_ = std::string("jreshard: NCCL failed: ") + library_.GetErrorString(state);
    }
  }
  return broken_;
}

}  // namespace jreshard
