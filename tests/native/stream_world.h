// GPUs that read each other's memory across processes, without either: each "process" is an exchange with links of its
// own, on a stand-in for the driver that maps what one lends to another address for the other.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "copy_table.h"
#include "fake_driver.h"
#include "sockets.h"
#include "stream_exchange.h"

using jreshard::CopyPlan;
using jreshard::Peers;
using jreshard::StreamExchange;

constexpr int64_t kKey = 77;
constexpr double kCall = 30;
constexpr auto kPatience = std::chrono::seconds(60);

inline void check_one_of(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    if (contains(text, part)) return;
  }
  CHECK_TEXT(text, *parts.begin());
}

inline bool wait_until(const std::function<bool()>& ready) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!ready()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

// Source, and readers after it.
inline Plan one_source(int readers = 1, int leaves = 3, int64_t chunk = 2) {
  std::vector<int> roles(1 + readers, kReceives);
  roles[0] = kSends;
  Plan plan(chunk, roles);
  plan.add_template();
  for (int dst = 1; dst <= readers; ++dst) {
    plan.add(0, dst, {{0, 0, 0, 0, 100, {}}, 100, 100});
    plan.add(0, dst, {{0, 0, 0, 0, 3, {{2, 12, 10}, {2, 4, 5}}}, 24, 20});
  }
  plan.table.leaf_template.assign(leaves, 0);
  return plan;
}

// Two sides that send to each other, and then each passes on to the other what it got from itself.
inline Plan both_ways() {
  Plan plan(2, {3, 3});
  plan.add_template();
  for (int src : {0, 1}) {
    for (int dst : {0, 1}) plan.add(src, dst, {{0, 0, 0, 0, 64, {}}, 64, 64});
  }
  plan.forward(1, 0, 1, {{0, 0, 0, 0, 64, {}}, 64, 64}, 64);
  plan.forward(1, 1, 0, {{0, 0, 0, 0, 64, {}}, 64, 64}, 64);
  plan.table.leaf_template = {0, 0, 0};
  return plan;
}

// The processes of a plan, linked with each other, and the arrays of its ranks. Every rank has a device and, for each
// call, a thread that launches its steps.
class World {
 public:
  FakeDriver driver;

  World(Plan plan, std::vector<int> process_of, uint32_t seed = 1, ArenaKind kind = ArenaKind::kExportable)
      : driver(seed, seed % 2),
        random_(seed),
        kind_(kind),
        plan_(std::move(plan)),
        words_(plan_.table.words()),
        parsed_(words_.data(), words_.size()),
        process_of_(std::move(process_of)) {
    driver.queries_need_context = true;
    processes_.resize(1 + *std::max_element(process_of_.begin(), process_of_.end()));
    for (int rank = 0; rank < parsed_.num_ranks(); ++rank) {
      streams_.push_back(driver.add_device(process_of_[rank]));
      processes_[process_of_[rank]].ranks.push_back(rank);
    }
    for (int process = 0; process < count(); ++process) {
      processes_[process].peers = std::make_shared<Peers>(process);
      for (int other = 0; other < process; ++other) link(process, other);
    }
    for (int process = 0; process < count(); ++process) open(process);
    allocate();
  }
  ~World() { leave_nothing(); }

  int count() const { return processes_.size(); }
  int ranks() const { return parsed_.num_ranks(); }
  FakeDriver::Stream stream(int rank) { return streams_[rank]; }
  Peers& peers(int process) { return *processes_[process].peers; }
  StreamExchange& exchange(int process) { return *processes_[process].exchange; }

  void link(int a, int b) {
    auto [one, other] = socket_pair();
    peers(a).connect(b, std::move(one), "process " + std::to_string(b));
    peers(b).connect(a, std::move(other), "process " + std::to_string(a));
  }
  // Another exchange of the process in the place of its old one.
  void open(int process) {
    Process& mine = processes_[process];
    std::map<int, int> ordinals;
    for (int rank : mine.ranks) ordinals[rank] = rank;
    mine.exchange = plan_.table.exchange_from(StreamExchange::open, driver.table(),
                                              jreshard::ProcessMap{kKey, process_of_, mine.peers}, std::move(ordinals));
  }
  // Puts all arrays into new memory: many in an arena, or each into one of its own.
  void allocate(bool apart = false) {
    for (auto base : arenas_) driver.free_arena(base);
    arenas_.clear();
    for (int rank = 0; rank < ranks(); ++rank) {
      src_[rank].clear();
      dst_[rank].clear();
      Arena arena;
      for (int kind : plan_.table.leaf_template) {
        src_[rank].push_back(place(arena, rank, plan_.src_bytes[kind][rank], apart));
        dst_[rank].push_back(place(arena, rank, plan_.dst_bytes[kind][rank], apart));
      }
    }
  }
  // Frees the arenas and takes others, at the same addresses.
  void replace_arenas() {
    for (auto& base : arenas_) {
      driver.free_arena(base);
      CHECK(driver.make_arena(process_of_[owner_of_[base]], 1, kind_, base) == base);
    }
  }

  // The steps of one rank in a call.
  void publish(uint32_t id, int rank) { publish_chunks(id, rank, chunks(2 * id)); }
  void publish_chunks(uint32_t id, int rank, const std::vector<int>& some) {
    if (!parsed_.sends(rank)) return;
    for (int chunk : some) {
      std::vector<const void*> arrays;
      each_leaf(chunk, [&](int leaf) {
        const Array& array = src_[rank][leaf];
        arrays.push_back(array.data);
        driver.enqueue(streams_[rank], [=] {
          const Bytes bytes = source_bytes(id, leaf, rank, array.size);
          std::copy(bytes.begin(), bytes.end(), array.data);
        });
      });
      exchange(process_of_[rank]).publish(rank, chunk, arrays, streams_[rank]);
    }
  }
  void receive(uint32_t id, int rank) { receive_chunks(id, rank, chunks(2 * id + 1)); }
  void receive_chunks(uint32_t id, int rank, const std::vector<int>& some) {
    if (!parsed_.receives(rank)) return;
    for (int chunk : some) {
      std::vector<void*> arrays;
      each_leaf(chunk, [&](int leaf) { arrays.push_back(dst_[rank][leaf].data); });
      driver.enqueue(streams_[rank], [=] { overwrite(dst_[rank], chunk); });
      exchange(process_of_[rank]).receive(rank, chunk, arrays, streams_[rank]);
      driver.enqueue(streams_[rank], [=] {
        check_arrived(id, rank, chunk);
        overwrite(dst_[rank], chunk);
      });
    }
  }
  void move(uint32_t id, int rank) { move_whole_or_in_parts(*this, id, rank, parsed_.num_chunks()); }
  // Whether it goes well or not, the arrays are somebody else's afterwards.
  void release(uint32_t, int rank) {
    if (!parsed_.sends(rank)) return;
    const std::string error =
        error_of([&] { exchange(process_of_[rank]).release(rank, parsed_.num_chunks(), streams_[rank]); });
    driver.enqueue(streams_[rank], [=] {
      for (int chunk = 0; chunk < parsed_.num_chunks(); ++chunk) overwrite(src_[rank], chunk);
    });
    if (!error.empty()) throw std::runtime_error(error);
  }

  // Launches one process's part of a call; returns why it failed, if it did.
  std::string call(int process, uint32_t id, double timeout_s = kCall) {
    if (!exchange(process).begin(id, timeout_s)) return "not begun";
    launch(process, id);
    return wait(process, id);
  }
  void launch(int process, uint32_t id) {
    std::vector<std::thread> devices;
    for (int rank : processes_[process].ranks) {
      devices.emplace_back([this, id, rank] {
        const std::string error = error_of([&] { move(id, rank); });
        const std::string late = error_of([&] { release(id, rank); });
        CHECK(error.empty() || late.empty() == !parsed_.sends(rank));
        CHECK(driver.contexts() == 0);
      });
    }
    for (std::thread& device : devices) device.join();
  }
  std::string wait(int process, uint32_t id) {
    const std::string error = error_of([&] { exchange(process).wait(id); });
    CHECK(exchange(process).open_calls() == 0 && driver.contexts() == 0);
    if (error.empty()) {
      std::lock_guard<std::mutex> lock(mutex_);
      succeeded_.insert({process, id});
    }
    return error;
  }
  // The same call in all processes at once; what each of them says.
  std::vector<std::string> call_all(uint32_t id, double timeout_s = kCall) {
    std::vector<std::string> errors(count());
    std::vector<std::thread> threads;
    for (int process = 0; process < count(); ++process) {
      threads.emplace_back([&, process] { errors[process] = call(process, id, timeout_s); });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }
  void call_well(uint32_t id) {
    for (const std::string& error : call_all(id)) CHECK_TEXT(error, "");
  }

  // Runs what is left on the streams, and looks whether calls that went well had the right bytes.
  void finish() {
    CHECK(wait_until([&] {
      driver.run(1 << 30);
      return std::all_of(streams_.begin(), streams_.end(), [&](auto stream) { return idle(stream); });
    }));
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [process, id] : succeeded_) CHECK(!spoilt_.count({process, id}));
  }
  bool succeeded(int process, uint32_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return succeeded_.count({process, id});
  }
  int mappings() { return driver.left_behind()["reserved"] + driver.left_behind()["opened"]; }

 private:
  struct Process {
    std::vector<int> ranks;
    std::shared_ptr<Peers> peers;
    std::shared_ptr<StreamExchange> exchange;
  };
  struct Array {
    uint8_t* data = nullptr;
    size_t size = 0;
  };
  struct Arena {
    FakeDriver::DevicePtr base = 0;
    size_t used = 0;
  };

  Array place(Arena& arena, int rank, size_t bytes, bool apart) {
    constexpr size_t kArena = FakeArenas::kGranularity;
    if (!bytes) return {};
    CHECK(bytes < kArena);
    const size_t gap = random_() % 64 * 16;
    if (apart || !arena.base || arena.used + gap + bytes > kArena) {
      arena = {driver.make_arena(process_of_[rank], kArena, kind_), 0};
      arenas_.push_back(arena.base);
      owner_of_[arena.base] = rank;
    } else {
      arena.used += gap;
    }
    uint8_t* const data = reinterpret_cast<uint8_t*>(arena.base) + arena.used;
    arena.used += bytes;
    return {data, bytes};
  }
  std::vector<int> chunks(uint32_t seed) const {
    std::mt19937 random(seed);
    std::vector<int> out(parsed_.num_chunks());
    std::iota(out.begin(), out.end(), 0);
    std::shuffle(out.begin(), out.end(), random);
    return out;
  }
  template <typename Action>
  void each_leaf(int chunk, Action action) const {
    for (int leaf = parsed_.chunk_begin(chunk); leaf < parsed_.chunk_end(chunk); ++leaf) action(leaf);
  }
  void overwrite(const std::vector<Array>& arrays, int chunk) const {
    each_leaf(chunk, [&](int leaf) { std::fill_n(arrays[leaf].data, arrays[leaf].size, kPoison); });
  }
  void check_arrived(uint32_t id, int rank, int chunk) {
    bool equal = true;
    each_leaf(chunk, [&](int leaf) {
      const Array& array = dst_[rank][leaf];
      equal &= Bytes(array.data, array.data + array.size) == expected_arrays(plan_, parsed_, id, leaf)[rank];
    });
    std::lock_guard<std::mutex> lock(mutex_);
    if (!equal) spoilt_.insert({process_of_[rank], id});
  }
  bool idle(FakeDriver::Stream stream) {
    std::lock_guard<std::mutex> lock(driver.mutex());
    return stream->queue.empty();
  }
  void leave_nothing() {
    finish();
    for (Process& process : processes_) process.exchange.reset();
    for (Process& process : processes_) process.peers.reset();
    const bool clean = wait_until(
        [&] { return driver.left_behind().empty() && driver.contexts_of_all() == 0; });  // threads of links let go late
    if (!CHECK(clean)) {
      for (const auto& [what, left] : driver.left_behind()) CHECK_TEXT(what + " " + std::to_string(left), "none");
    }
    for (auto base : arenas_) driver.free_arena(base);
  }

  std::mt19937 random_;
  const ArenaKind kind_;
  Plan plan_;
  Words words_;
  CopyPlan parsed_;
  const std::vector<int> process_of_;
  std::vector<FakeDriver::Stream> streams_;  // [rank]
  std::vector<Process> processes_;
  std::vector<FakeDriver::DevicePtr> arenas_;
  std::map<FakeDriver::DevicePtr, int> owner_of_;
  std::vector<Array> src_[4], dst_[4];  // [rank][leaf]
  std::mutex mutex_;
  std::set<std::pair<int, uint32_t>> succeeded_, spoilt_;  // (process, call)
};

// Ranks at random in up to three processes.
inline std::vector<int> random_processes(std::mt19937& random, int ranks) {
  const int count = std::min<int>(ranks, 2 + random() % 2);
  std::vector<int> process_of(ranks);
  for (int rank = 0; rank < ranks; ++rank) process_of[rank] = rank < count ? rank : random() % count;
  std::shuffle(process_of.begin(), process_of.end(), random);
  return process_of;
}

// Afterwards both sides open anew, and all is as before.
inline void go_on(World& world, uint32_t id) {
  for (int process = 0; process < world.count(); ++process) {
    if (world.exchange(process).broken()) world.open(process);
  }
  world.call_well(id);
}
