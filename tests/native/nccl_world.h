// Ranks on stand-ins for NCCL and the driver, dealt out to some processes, and transfers between them, launched as the
// programs of XLA would be: arrays are written, read and overwritten by work on the devices' streams.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copy_table.h"
#include "fake_driver.h"
#include "fake_nccl.h"
#include "nccl_communicator.h"
#include "nccl_exchange.h"

inline jreshard::NcclCommunicator::Clock::time_point in_seconds(double seconds) {
  using Clock = jreshard::NcclCommunicator::Clock;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// Runs the actions at the same time.
inline void at_once(std::vector<std::function<void()>> actions) {
  std::vector<std::thread> threads;
  for (auto& action : actions) threads.emplace_back(std::move(action));
  for (std::thread& thread : threads) thread.join();
}

// The number of a call that is to fail: see Transfers::reads_on_streams.
constexpr uint32_t kFailing = 100;

// One device a rank, and one communicator, which all pairs have used already. Rank r is in process `process_of[r]`.
class NcclWorld {
 public:
  FakeDriver driver;
  FakeNccl nccl;
  const std::vector<int> process_of;

  NcclWorld(std::vector<int> processes, uint32_t seed)
      : driver(seed), nccl(driver, seed), process_of(std::move(processes)) {
    for (size_t rank = 0; rank < process_of.size(); ++rank) streams_.push_back(driver.add_device());
  }
  void connect() {
    const RunningDevices running(driver);
    const FakeNccl::UniqueId id = nccl.unique_id();
    communicators_.resize(num_processes());
    std::vector<std::function<void()>> joins;
    for (int process = 0; process < num_processes(); ++process) {
      joins.push_back([this, process, id] {
        const auto deadline = in_seconds(kLong);
        communicators_[process] = join(process, id, deadline);
        communicators_[process]->warm_up(pairs(), deadline);
      });
    }
    at_once(std::move(joins));
  }
  std::shared_ptr<jreshard::NcclCommunicator> join(int process, const FakeNccl::UniqueId& id,
                                                   jreshard::NcclCommunicator::Clock::time_point deadline) {
    return std::make_shared<jreshard::NcclCommunicator>(nccl.table(), driver.table(), num_ranks(), ordinals(process),
                                                        id, deadline);
  }

  int num_ranks() const { return process_of.size(); }
  int num_processes() const { return 1 + *std::max_element(process_of.begin(), process_of.end()); }
  FakeDriver::Stream stream(int rank) const { return streams_[rank]; }
  const std::shared_ptr<jreshard::NcclCommunicator>& communicator(int process) const { return communicators_[process]; }
  std::map<int, int> ordinals(int process) const {
    std::map<int, int> out;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      if (process_of[rank] == process) out[rank] = rank;
    }
    return out;
  }
  // All pairs.
  std::vector<std::pair<int, int>> pairs() const {
    std::vector<std::pair<int, int>> out;
    for (int from = 0; from < num_ranks(); ++from) {
      for (int to = 0; to < num_ranks(); ++to) {
        if (from != to) out.emplace_back(from, to);
      }
    }
    return out;
  }

 private:
  std::vector<FakeDriver::Stream> streams_;
  std::vector<std::shared_ptr<jreshard::NcclCommunicator>> communicators_;
};

// A plan with the exchange of each process and one set of arrays, which all calls use.
class Transfers {
 public:
  Transfers(NcclWorld& world, Plan plan, int64_t slot_bytes)
      : world_(world), plan_(std::move(plan)), words_(plan_.table.words()), parsed_(words_.data(), words_.size()) {
    for (int process = 0; process < world.num_processes(); ++process) {
      exchanges_.push_back(plan_.table.exchange<jreshard::NcclExchange>(world.ordinals(process), world.driver.table(),
                                                                        world.communicator(process), slot_bytes));
    }
    src_.resize(num_ranks());
    dst_.resize(num_ranks());
    for (int rank = 0; rank < num_ranks(); ++rank) {
      for (int kind : plan_.table.leaf_template) {
        src_[rank].emplace_back(plan_.src_bytes[kind][rank]);
        dst_[rank].emplace_back(plan_.dst_bytes[kind][rank]);
      }
    }
  }

  bool in_parts = false;  // whether run() launches each chunk by itself

  int num_ranks() const { return parsed_.num_ranks(); }
  int num_chunks() const { return parsed_.num_chunks(); }
  bool sends(int rank) const { return parsed_.sends(rank); }
  bool receives(int rank) const { return parsed_.receives(rank); }
  jreshard::NcclExchange& exchange(int process) const { return *exchanges_[process]; }
  jreshard::NcclExchange& exchange_of(int rank) const { return *exchanges_[world_.process_of[rank]]; }
  std::vector<int> ranks_of(int process) const {
    std::vector<int> out;
    for (const auto& [rank, ordinal] : world_.ordinals(process)) out.push_back(rank);
    return out;
  }

  // A rank's program for each step of a call. Ranks without a part in it do nothing.
  void publish(uint32_t id, int rank) {
    if (!sends(rank)) return;
    for (int chunk = 0; chunk < num_chunks(); ++chunk) publish_chunk(id, rank, chunk);
  }
  void publish_chunk(uint32_t id, int rank, int chunk) {
    world_.driver.enqueue(world_.stream(rank), [this, id, rank, chunk] {
      for_each_leaf(chunk, [&](int leaf) {
        const Bytes bytes = source_bytes(id, leaf, rank, src_[rank][leaf].size());
        std::copy(bytes.begin(), bytes.end(), src_[rank][leaf].begin());
      });
    });
    std::vector<const void*> arrays;
    for_each_leaf(chunk, [&](int leaf) { arrays.push_back(src_[rank][leaf].data()); });
    exchange_of(rank).publish(rank, chunk, arrays, world_.stream(rank));
  }
  void receive(uint32_t id, int rank) {
    if (!receives(rank)) return;
    for (int chunk = 0; chunk < num_chunks(); ++chunk) receive_chunk(id, rank, chunk);
  }
  void receive_chunk(uint32_t id, int rank, int chunk) {
    world_.driver.enqueue(world_.stream(rank),
                          [this, rank, chunk] { for_each_leaf(chunk, [&](int leaf) { fill(dst_[rank][leaf]); }); });
    std::vector<void*> results;
    for_each_leaf(chunk, [&](int leaf) { results.push_back(dst_[rank][leaf].data()); });
    results.push_back(nullptr);  // the token
    exchange_of(rank).receive(rank, chunk, results, world_.stream(rank));
    if (!reads_on_streams(id)) return;
    world_.driver.enqueue(world_.stream(rank), [this, id, rank, chunk] { check_chunk(id, rank, chunk); });
  }
  void release(uint32_t, int rank) {
    if (sends(rank)) release_chunks(rank, num_chunks());
  }
  void release_chunks(int rank, int end) { exchange_of(rank).release(rank, end, world_.stream(rank)); }

  // What comes right after wait() in a process: results are read, and all arrays overwritten, by the host or by the
  // streams' next work.
  void check_and_reuse(uint32_t id, int process) {
    for (int rank : ranks_of(process)) {
      if (reads_on_streams(id)) {
        overwrite_on_stream(rank);
        continue;
      }
      for (int chunk = 0; chunk < num_chunks() && receives(rank); ++chunk) check_chunk(id, rank, chunk);
      overwrite(rank);
    }
  }
  void overwrite_on_stream(int rank) {
    world_.driver.enqueue(world_.stream(rank), [this, rank] { overwrite(rank); });
  }

  // A whole call in one process, its devices launched by threads of their own, receives beside releases. Returns the
  // first error, of which all other processes are told as well; after one in a launch nobody waits.
  std::string run(uint32_t id, int process, double timeout_s = kLong) {
    std::mutex mutex;
    std::string first;
    const auto attempt = [&](const std::function<void()>& step) {
      const std::string error = error_of(step);
      if (error.empty()) return;
      tell(id, error);
      std::lock_guard<std::mutex> lock(mutex);
      if (first.empty()) first = error;
    };
    attempt([&] {
      if (!exchange(process).begin(id, timeout_s)) throw std::runtime_error("jreshard: the call could not be opened");
    });
    if (!first.empty()) return first;
    hear(id, process);
    if (in_parts) {
      launch_in_parts(id, process, attempt);
    } else {
      launch(id, process, attempt);
    }
    if (first.empty()) attempt([&] { exchange(process).wait(id); });
    if (first.empty()) check_and_reuse(id, process);
    return first;
  }
  template <typename Attempt>
  void launch(uint32_t id, int process, Attempt attempt) {
    for (int rank : ranks_of(process)) attempt([&] { publish(id, rank); });
    std::vector<std::function<void()>> launches;
    for (int rank : ranks_of(process)) {
      launches.push_back([=] { attempt([&] { receive(id, rank); }); });
      launches.push_back([=] { attempt([&] { release(id, rank); }); });
    }
    at_once(std::move(launches));
  }
  // The same where each chunk is launched by itself, and one thread launches all releases, one after the other.
  template <typename Attempt>
  void launch_in_parts(uint32_t id, int process, Attempt attempt) {
    std::mutex mutex;
    std::condition_variable changed;
    int published = 0;
    std::thread releasing([&] {
      for (int chunk = 0; chunk < num_chunks(); ++chunk) {
        {
          std::unique_lock<std::mutex> lock(mutex);
          changed.wait(lock, [&] { return published > chunk; });
        }
        on_each(process, [&](int rank) {
          if (sends(rank)) attempt([&] { release_chunks(rank, chunk + 1); });
        });
      }
    });
    for (int chunk = 0; chunk < num_chunks(); ++chunk) {
      for (int rank : ranks_of(process)) {
        if (sends(rank)) attempt([&] { publish_chunk(id, rank, chunk); });
      }
      {
        std::lock_guard<std::mutex> lock(mutex);
        ++published;
      }
      changed.notify_all();
      on_each(process, [&](int rank) {
        if (receives(rank)) attempt([&] { receive_chunk(id, rank, chunk); });
      });
    }
    releasing.join();
  }
  void on_each(int process, const std::function<void(int rank)>& action) {
    std::vector<std::function<void()>> actions;
    for (int rank : ranks_of(process)) actions.push_back([&action, rank] { action(rank); });
    at_once(std::move(actions));
  }
  // Calls in all processes, which need not keep pace with each other. Returns the first errors.
  std::vector<std::string> run_everywhere(uint32_t id, double timeout_s = kLong) {
    std::vector<std::string> errors(exchanges_.size());
    std::vector<std::function<void()>> processes;
    for (size_t process = 0; process < exchanges_.size(); ++process) {
      processes.push_back([&, process] { errors[process] = run(id, process, timeout_s); });
    }
    at_once(std::move(processes));
    return errors;
  }

  // When all is over, and the arrays have been overwritten: nothing came after that.
  void check_overwritten() const {
    bool overwritten = true;
    for (const auto* side : {&src_, &dst_}) {
      for (const auto& arrays : *side) {
        for (const Bytes& array : arrays) overwritten &= array == Bytes(array.size(), kPoison);
      }
    }
    CHECK(overwritten);
    for (const auto& exchange : exchanges_) CHECK(exchange->open_calls() == 0);
    CHECK(FakeDriver::contexts() == 0);
  }

 private:
  // Tells all processes that a call has failed, those that have not opened it yet when they do.
  void tell(uint32_t id, const std::string& error) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      failed_.emplace(id, error);
    }
    for (const auto& exchange : exchanges_) exchange->abort(id, error);
  }
  void hear(uint32_t id, int process) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = failed_.find(id);
    if (found != failed_.end()) exchange(process).abort(id, found->second);
  }
  // Not where the call is to fail: then there is nothing to read.
  static bool reads_on_streams(uint32_t id) { return id % 2; }
  static void fill(Bytes& array) { std::fill(array.begin(), array.end(), kPoison); }
  void overwrite(int rank) {
    for (auto* side : {&src_, &dst_}) {
      for (Bytes& array : (*side)[rank]) fill(array);
    }
  }
  template <typename Action>
  void for_each_leaf(int chunk, Action action) const {
    for (int leaf = parsed_.chunk_begin(chunk); leaf < parsed_.chunk_end(chunk); ++leaf) action(leaf);
  }
  void check_chunk(uint32_t id, int rank, int chunk) const {
    bool equal = true;
    for_each_leaf(chunk,
                  [&](int leaf) { equal &= dst_[rank][leaf] == expected_arrays(plan_, parsed_, id, leaf)[rank]; });
    CHECK(equal);
  }

  NcclWorld& world_;
  const Plan plan_;
  const Words words_;
  const jreshard::CopyPlan parsed_;
  std::vector<std::vector<Bytes>> src_, dst_;                       // [rank][leaf]
  std::vector<std::shared_ptr<jreshard::NcclExchange>> exchanges_;  // [process]
  std::mutex mutex_;
  std::map<uint32_t, std::string> failed_;
};
