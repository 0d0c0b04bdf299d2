// Tests of GPUs that read each other's memory across processes, without either: each "process" is an exchange with
// links of its own, on a stand-in for the driver that maps what one lends to another address for the other.
#include "stream_peers.h"

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
using jreshard::FlagPage;
using jreshard::Message;
using jreshard::Peers;
using jreshard::StreamExchange;

namespace {

constexpr int64_t kKey = 77;
constexpr double kCall = 30;
constexpr auto kPatience = std::chrono::seconds(60);

std::string error_of(const std::function<void()>& action) {
  try {
    action();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void check_one_of(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    if (contains(text, part)) return;
  }
  CHECK_TEXT(text, *parts.begin());
}

bool wait_until(const std::function<bool()>& ready) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!ready()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

// Source, and readers after it.
Plan one_source(int readers = 1, int leaves = 3, int64_t chunk = 2) {
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
Plan both_ways() {
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
    mine.exchange = plan_.table.exchange<StreamExchange>(
        driver.table(), jreshard::Placement{kKey, process_of_, mine.peers}, std::move(ordinals));
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
  void publish(uint32_t id, int rank) {
    if (!parsed_.sends(rank)) return;
    for (int chunk : chunks(2 * id)) {
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
  void receive(uint32_t id, int rank) {
    if (!parsed_.receives(rank)) return;
    for (int chunk : chunks(2 * id + 1)) {
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
  // Whether it goes well or not, the arrays are somebody else's afterwards.
  void release(uint32_t, int rank) {
    if (!parsed_.sends(rank)) return;
    const std::string error = error_of([&] { exchange(process_of_[rank]).release(rank, streams_[rank]); });
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
        const std::string error = error_of([&] {
          publish(id, rank);
          receive(id, rank);
        });
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
std::vector<int> random_processes(std::mt19937& random, int ranks) {
  const int count = std::min<int>(ranks, 2 + random() % 2);
  std::vector<int> process_of(ranks);
  for (int rank = 0; rank < ranks; ++rank) process_of[rank] = rank < count ? rank : random() % count;
  std::shuffle(process_of.begin(), process_of.end(), random);
  return process_of;
}

void run_random(uint32_t first, uint32_t last, int phases, ArenaKind kind) {
  for (uint32_t seed = first; seed <= last; ++seed) {
    std::mt19937 random(seed);
    Plan plan = random_plan(random, 12, phases);
    const int ranks = plan.table.roles.size();
    World world(std::move(plan), random_processes(random, ranks), seed, kind);
    const RunningDevices running(world.driver, 1 << random() % 8);
    // Processes may be a call ahead of each other.
    std::vector<std::thread> threads;
    for (int process = 0; process < world.count(); ++process) {
      threads.emplace_back([&, process] {
        for (uint32_t id = 1; id <= 5; ++id) CHECK_TEXT(world.call(process, id), "");
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

void test_random_plans() { run_random(1, 30, 1, ArenaKind::kExportable); }
void test_phases() {
  run_random(31, 50, 2, ArenaKind::kExportable);
  run_random(51, 60, 4, ArenaKind::kExportable);
}
void test_older_kind_of_memory() { run_random(61, 75, 2, ArenaKind::kIpc); }

void test_memory_is_mapped_once() {
  World world(both_ways(), {0, 1});
  const RunningDevices running(world.driver);
  world.call_well(1);
  const int mappings = world.mappings(), events = world.driver.calls("cuEventCreate");
  CHECK(mappings == 2);
  for (uint32_t id = 2; id <= 200; ++id) world.call_well(id);
  CHECK(world.mappings() == mappings && world.driver.calls("cuMemMap") == mappings);
  CHECK(world.driver.calls("cuMemHostRegister") == 4);  // each page in both processes
  CHECK(world.driver.calls("cuEventCreate") == events);
}

// A smaller number than before, as when the process that had counted furthest is gone: no flag of before may count.
void test_numbers_of_calls_may_start_again() {
  World world(both_ways(), {0, 1});
  const RunningDevices running(world.driver);
  for (uint32_t id : {100u, 7u, 8u, 0xFFFFFFFFu, 0u, 1u}) world.call_well(id);
}

void test_arenas_in_the_place_of_others() {
  for (const ArenaKind kind : {ArenaKind::kExportable, ArenaKind::kIpc}) {
    World world(both_ways(), {0, 1}, 1, kind);
    const RunningDevices running(world.driver);
    for (uint32_t id = 1; id <= 5; ++id) {
      world.call_well(id);
      world.replace_arenas();
    }
    CHECK(world.mappings() == 2);
  }
}

void test_more_arenas_than_are_kept() {
  World world(one_source(1, 100, 8), {0, 1});
  world.allocate(true);
  const RunningDevices running(world.driver);
  for (uint32_t id = 1; id <= 3; ++id) {
    world.call_well(id);
    CHECK(world.mappings() == int(jreshard::ArenaImports::kMostMapped));
  }
}

void test_memory_that_cannot_be_lent() {
  World world(one_source(), {0, 1}, 1, ArenaKind::kPrivate);
  const RunningDevices running(world.driver);
  for (const std::string& error : world.call_all(1)) {
    CHECK(contains(error, "lending the memory of arrays") && contains(error, "cuIpcGetMemHandle failed"));
  }
}

// Afterwards both sides open anew, and all is as before.
void go_on(World& world, uint32_t id) {
  for (int process = 0; process < world.count(); ++process) {
    if (world.exchange(process).broken()) world.open(process);
  }
  world.call_well(id);
}

void test_aborts() {
  for (const int aborting : {0, 1, 2}) {
    for (const bool launched : {false, true}) {
      World world(one_source(2), {0, 1, 2});
      const RunningDevices running(world.driver);
      std::atomic<bool> open{false};
      world.driver.hold(world.stream(0), [&] { return open.load(); });  // nothing can go well
      std::vector<std::thread> threads;
      std::vector<std::string> errors(3);
      std::atomic<int> begun{0};
      for (int process = 0; process < 3; ++process) {
        threads.emplace_back([&, process] {
          CHECK(world.exchange(process).begin(1, kCall));
          ++begun;
          if (process != aborting || launched) world.launch(process, 1);
          if (process == aborting) {
            CHECK(wait_until([&] { return begun == 3; }));
            world.exchange(process).abort(1, "jreshard: enough");
            open = true;
          }
          errors[process] = world.wait(process, 1);
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (int process = 0; process < 3; ++process) {
        const std::string whom = "process " + std::to_string(aborting) + ": ";
        CHECK_TEXT(errors[process], "jreshard: " + (process == aborting ? "" : whom) + "enough");
      }
      CHECK(world.exchange(0).broken() && !world.exchange(0).begin(2, kCall));
      go_on(world, 2);
    }
  }
}

// A process is gone: before it has published, after that, or when streams wait for it.
void test_lost_processes() {
  for (const int lost : {0, 1}) {
    for (const bool launched : {false, true}) {
      World world(one_source(2), {0, 1, 2});
      const RunningDevices running(world.driver);
      std::atomic<bool> open{false};
      world.driver.hold(world.stream(lost), [&] { return open.load(); });
      std::vector<std::string> errors(3);
      std::vector<std::thread> threads;
      for (int process = 0; process < 3; ++process) {
        threads.emplace_back([&, process] {
          CHECK(world.exchange(process).begin(1, kCall));
          if (process != lost || launched) world.launch(process, 1);
          if (process != lost) {
            errors[process] = world.wait(process, 1);
            return;
          }
          for (int other = 0; other < 3; ++other) {
            if (other != lost) world.peers(lost).disconnect(other);
          }
          open = true;
          errors[process] = world.wait(process, 1);
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (int process = 0; process < 3; ++process) {
        if (lost == 1 && process == 2 && errors[process].empty()) continue;  // had read all before
        // Some are told by others, among them the one that sees its own links end.
        check_one_of(errors[process],
                     {"is gone: its connection is closed", "was disconnected", "is not linked", "given up"});
      }
      CHECK(wait_until([&] { return world.mappings() <= 1; }));  // of the lost one's memory nothing is held
      CHECK(wait_until([&] { return !world.peers((lost + 1) % 3).connected(lost); }));
      CHECK(wait_until([&] { return !world.peers((lost + 2) % 3).connected(lost); }));
      for (int other = 0; other < 3; ++other) {
        if (other != lost) world.link(lost, other);
      }
      go_on(world, 2);
    }
  }
}

// Between calls nobody misses it, but its memory is let go.
void test_lost_between_calls() {
  World world(both_ways(), {0, 1});
  const RunningDevices running(world.driver);
  for (uint32_t id = 1; id <= 20; ++id) {
    world.call_well(id);
    CHECK(world.mappings() == 2);
    world.peers(id % 2).disconnect(1 - id % 2);
    CHECK(wait_until([&] { return !world.peers(1 - id % 2).connected(id % 2) && world.mappings() == 0; }));
    CHECK(!world.exchange(0).broken() && !world.exchange(1).broken());
    if (id % 3 == 0) world.open(id % 2);
    world.link(0, 1);
  }
}

void test_not_linked() {
  World world(one_source(), {0, 1});
  world.peers(0).disconnect(1);
  CHECK(wait_until([&] { return !world.peers(1).connected(0); }));
  for (int process : {0, 1}) {
    const std::string error = world.call(process, 1);
    CHECK_TEXT(error, "jreshard: process " + std::to_string(1 - process) + " is not linked to this process");
  }
}

// The source does not come, on the host or on its device; or it is never read.
void test_deadlines() {
  {
    World world(one_source(), {0, 1});
    const RunningDevices running(world.driver);
    const std::string error = world.call(1, 1, 0.2);
    CHECK(contains(error, "jreshard: transfer timed out after 0.2") && contains(error, "device 0 to publish"));
    CHECK(contains(world.call(0, 1), "process 1: transfer timed out"));  // it is told when it comes
    go_on(world, 2);
  }
  for (const int late : {0, 1}) {
    World world(one_source(), {0, 1});
    const RunningDevices running(world.driver);
    std::atomic<bool> open{false};
    world.driver.hold(world.stream(late), [&] { return open.load(); });
    std::string errors[2];
    std::thread patient([&] { errors[late] = world.call(late, 1); });
    errors[1 - late] = world.call(1 - late, 1, 0.3);  // its own device is let go
    open = true;
    patient.join();
    const std::string whom = "process " + std::to_string(late);
    CHECK(contains(errors[1 - late], "timed out after 0.3") && contains(errors[1 - late], "or for " + whom));
    CHECK(contains(errors[late], "process " + std::to_string(1 - late) + ": transfer timed out after 0.3"));
    go_on(world, 2);
  }
}

// One side has ended the call well when the other fails it: the page that it has given up is not used again.
void test_failing_after_the_other_has_ended() {
  World world(both_ways(), {0, 1});
  const RunningDevices running(world.driver);
  for (uint32_t id = 1; id <= 10; id += 2) {
    std::thread other([&] { CHECK_TEXT(world.call(0, id), ""); });
    CHECK(world.exchange(1).begin(id, kCall));
    world.launch(1, id);
    other.join();
    world.exchange(1).abort(id, "jreshard: interrupted");
    CHECK_TEXT(world.wait(1, id), "jreshard: interrupted");
    CHECK(!world.exchange(0).broken());
    world.open(1);
    world.call_well(id + 1);
  }
}

// Calls that nobody waits for end with the exchange.
void test_exchanges_that_go() {
  World world(both_ways(), {0, 1});
  const RunningDevices running(world.driver);
  CHECK(world.exchange(0).begin(1, kCall) && world.exchange(1).begin(1, kCall));
  std::thread other([&] { world.launch(1, 1); });
  world.launch(0, 1);
  other.join();
  world.exchange(0).abort(1, "over");
  CHECK(world.exchange(0).open_calls() == 0);
  world.open(0);
  CHECK(contains(world.wait(1, 1), "process 0: over"));
  go_on(world, 2);
}

// Whatever fails when, no call counts as done that has not got the right bytes, and all ends in time.
void test_random_failures() {
  int failed = 0, done = 0;
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    std::mt19937 random(seed);
    Plan plan = random_plan(random, 12, 1 + seed % 2);
    const int ranks = plan.table.roles.size();
    if (ranks < 2) continue;
    World world(std::move(plan), random_processes(random, ranks), seed);
    const RunningDevices running(world.driver, 1 << random() % 6);
    for (uint32_t id = 1; id <= 6; ++id) {
      const int victim = random() % world.count(), delay_us = random() % 4000;
      const bool lose = id % 3 == 0;
      std::thread trouble([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        if (!lose) return world.exchange(victim).abort(id, "jreshard: trouble");
        for (int other = 0; other < world.count(); ++other) world.peers(victim).disconnect(other);
      });
      const std::vector<std::string> errors = world.call_all(id, 20);
      trouble.join();
      for (const std::string& error : errors) {
        ++(error.empty() ? done : failed);
        if (error.empty()) continue;
        check_one_of(error, {"trouble", "disconnected", "is gone", "given up", "not linked"});
      }
      for (int other = 0; lose && other < world.count(); ++other) {
        if (other == victim) continue;
        CHECK(wait_until([&] { return !world.peers(other).connected(victim); }));
        world.link(victim, other);
      }
      for (int process = 0; process < world.count(); ++process) {
        if (world.exchange(process).broken()) world.open(process);
      }
    }
  }
  CHECK(failed > 20 && done > 20);
}

// Every call to the driver fails once.
void test_failures_of_the_driver() {
  int failures = 0;
  for (const std::string function :
       {"cuMemHostRegister", "cuMemHostGetDevicePointer", "cuStreamWriteValue64", "cuStreamWaitValue64",
        "cuMemGetAddressRange", "cuPointerGetAttribute", "cuMemRetainAllocationHandle", "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuEventRecord",
        "cuEventCreate", "cuMemcpyAsync"}) {
    bool reached = true;
    for (int n = 0; reached; ++n) {
      World world(both_ways(), {0, 1}, 2);
      const RunningDevices running(world.driver);
      world.driver.fail(function, n);
      std::vector<std::string> errors(2);
      std::vector<std::thread> threads;
      for (int process : {0, 1}) {
        threads.emplace_back([&, process] {
          const std::string error = error_of([&] { errors[process] = world.call(process, 1, 20); });
          if (error.empty()) return;
          errors[process] = error;  // it could not begin, and tells so by other ways
          world.peers(process).disconnect(1 - process);
        });
      }
      for (std::thread& thread : threads) thread.join();
      reached = !errors[0].empty() || !errors[1].empty();
      failures += reached;
      CHECK(!contains(errors[0] + errors[1], "timed out"));
      if (reached)
        check_one_of(errors[0] + errors[1],
                     {(function + " failed").c_str(), "mapping the memory", "cuIpcGetMemHandle failed"});
    }
  }
  CHECK(failures > 30);
}

// A source that the test plays: rank 0, in process 1, of one_source() with one leaf.
class PlayedSource {
 public:
  // Its flags: ready and read by rank, and the mark.
  enum { kReady = 0, kRead = 3, kMark = 4, kFlags };
  static constexpr size_t kBytes = 124;

  FakeDriver driver{1};
  std::shared_ptr<Peers> mine = std::make_shared<Peers>(0), theirs = std::make_shared<Peers>(1);
  std::shared_ptr<StreamExchange> exchange;
  std::optional<FlagPage> page{kFlags};
  FakeDriver::DevicePtr array = 0;

  PlayedSource() {
    source_ = driver.add_device(1);
    reader_ = driver.add_device(0);
    array = driver.make_arena(1, kBytes, ArenaKind::kExportable);
    auto [one, other] = socket_pair();
    mine->connect(1, std::move(one), "process 1");
    theirs->connect(0, std::move(other), "process 0");
    exchange = one_source(1, 1).table.exchange<StreamExchange>(driver.table(), jreshard::Placement{kKey, {1, 0}, mine},
                                                               std::map<int, int>{{1, 1}});
  }
  ~PlayedSource() {
    driver.run_all();
    exchange.reset();
    mine.reset();
    theirs.reset();
    CHECK(wait_until([&] { return driver.left_behind().empty() && driver.contexts_of_all() == 0; }));
    driver.free_arena(array);
  }

  void send_flags() { theirs->send(0, {Message::kFlags, 0, kKey}, page->descriptor().duplicate()); }
  void lend() {
    const jreshard::cuda::CurrentContext context(driver.table(), source_);
    jreshard::ArenaExports exports(driver.table());
    const jreshard::Arena arena = exports.find(array);
    theirs->send(0, {Message::kLend, 0, kKey, 0, 0, 0, {arena.id, arena.base, arena.bytes}}, exports.lend(arena));
  }
  static Message publish(uint64_t address) { return {Message::kPublish, 1, kKey, 0, 0, 0, {address}}; }
  // The reader's part of the call. `between` happens when all is enqueued.
  std::string receive(const std::function<void()>& between = [] {}, double timeout_s = kCall) {
    CHECK(exchange->begin(1, timeout_s));
    Bytes into(kBytes);
    const std::string error = error_of([&] { exchange->receive(1, 0, {into.data()}, reader_); });
    between();
    const RunningDevices running(driver);
    const std::string late = error_of([&] { exchange->wait(1); });
    CHECK(error.empty() || error == late);
    CHECK(exchange->open_calls() == 0);
    return late;
  }

 private:
  FakeDriver::Stream source_, reader_;
};

void test_a_played_source() {
  PlayedSource source;
  source.send_flags();
  source.lend();
  source.theirs->send(0, PlayedSource::publish(source.array));
  CHECK_TEXT(source.receive([&] { (*source.page)[PlayedSource::kReady] = 2; }), "");  // the call's number and one
  CHECK((*source.page)[PlayedSource::kRead] == 2);
}

// What is read from a source that gives up does not count, even if nothing is heard of it in time.
void test_a_source_that_gives_up() {
  PlayedSource source;
  source.send_flags();
  source.lend();
  source.theirs->send(0, PlayedSource::publish(source.array));
  CHECK_TEXT(source.receive([&] {
    (*source.page)[PlayedSource::kMark] = 1;
    source.page->fill(uint64_t{1} << 62);
    (*source.page)[PlayedSource::kReady] = 2;
  }),
             "jreshard: process 1 has given up while it was read from");
}

void test_bad_messages() {
  const auto good = PlayedSource::publish(0);
  auto changed = [&](auto change) {
    Message message = good;
    change(message);
    return message;
  };
  const struct {
    Message message;
    std::string error;
  } cases[] = {{changed([](Message& m) { m.chunk = 1; }), "chunk 1"},
               {changed([](Message& m) { m.chunk = -1; }), "chunk -1"},
               {changed([](Message& m) { m.phase = 1; }), "phase 1"},
               {changed([](Message& m) { m.rank = 2; }), "rank 2"},
               {changed([](Message& m) { m.rank = 1; }), "a message in the name of device 1"},
               {changed([](Message& m) { m.addresses.push_back(1); }), "2 addresses"},
               {{Message::kDone, 1, kKey, 0, 0, 0}, "a message of another kind"}};
  for (const auto& c : cases) {
    PlayedSource source;
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      source.theirs->send(0, c.message);
    });
    CHECK_TEXT(source.receive(), "jreshard: process 1 sent what does not fit the transfer: " + c.error);
    later.join();
  }
}

void test_sources_that_leave_something_out() {
  {
    PlayedSource source;
    source.lend();
    source.theirs->send(0, PlayedSource::publish(source.array));
    CHECK_TEXT(source.receive(), "jreshard: process 1 has not sent its page of flags");
  }
  {
    PlayedSource source;
    source.send_flags();
    source.theirs->send(0, PlayedSource::publish(source.array));
    CHECK_TEXT(source.receive(), "jreshard: a process published an array in memory that it has not lent");
  }
  {
    PlayedSource source;
    jreshard::Descriptor small(memfd_create("small", MFD_CLOEXEC));
    source.theirs->send(0, {Message::kFlags, 0, kKey}, std::move(small));
    source.lend();
    source.theirs->send(0, PlayedSource::publish(source.array));
    CHECK_TEXT(source.receive(), "a process sent a page with too few flags");
  }
  {
    PlayedSource source;  // what describes no arena ends the link
    source.theirs->send(0, {Message::kLend, 0, kKey, 0, 0, 0, {1, ~uint64_t{0}, 4096}, "handle"});
    CHECK(wait_until([&] { return !source.mine->connected(1); }));
    CHECK_TEXT(source.receive(), "jreshard: process 1 is not linked to this process");
  }
}

}  // namespace

int main() {
  return run_tests({
      {"a_played_source", test_a_played_source},
      {"random_plans", test_random_plans},
      {"phases", test_phases},
      {"older_kind_of_memory", test_older_kind_of_memory},
      {"memory_is_mapped_once", test_memory_is_mapped_once},
      {"numbers_of_calls_may_start_again", test_numbers_of_calls_may_start_again},
      {"arenas_in_the_place_of_others", test_arenas_in_the_place_of_others},
      {"more_arenas_than_are_kept", test_more_arenas_than_are_kept},
      {"memory_that_cannot_be_lent", test_memory_that_cannot_be_lent},
      {"aborts", test_aborts},
      {"lost_processes", test_lost_processes},
      {"lost_between_calls", test_lost_between_calls},
      {"not_linked", test_not_linked},
      {"deadlines", test_deadlines},
      {"failing_after_the_other_has_ended", test_failing_after_the_other_has_ended},
      {"exchanges_that_go", test_exchanges_that_go},
      {"random_failures", test_random_failures},
      {"failures_of_the_driver", test_failures_of_the_driver},
      {"a_source_that_gives_up", test_a_source_that_gives_up},
      {"bad_messages", test_bad_messages},
      {"sources_that_leave_something_out", test_sources_that_leave_something_out},
  });
}
