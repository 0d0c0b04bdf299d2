// Tests of what fails between GPUs of several processes: who hears of it, by when, and what goes on afterwards.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "played_source.h"
#include "stream_world.h"

namespace {

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
    const std::string text =
        std::string("transfer timed out after 0.3 s, waiting for device ") + (late == 0 ? "0 to publish" : "1 to read");
    CHECK_TEXT(errors[1 - late], "jreshard: " + text);
    CHECK_TEXT(errors[late], "jreshard: process " + std::to_string(1 - late) + ": " + text);
    go_on(world, 2);
  }
}

// A device's queue is full of work that waits for a process that does not come, which holds up the thread that
// launches, and whoever else calls the driver for that device. The deadline lets all of them go.
void test_launches_that_are_held_up() {
  for (const int late : {0, 1}) {
    World world(one_source(1, 24, 1), {0, 1});
    const RunningDevices running(world.driver);
    world.driver.full_queues_hold_up = true;
    if (late == 1) world.driver.queue_limit = 16;
    std::atomic<bool> open{false}, launched{false};
    world.driver.hold(world.stream(late), [&] { return open.load(); });
    std::string errors[2];
    std::thread patient([&] {
      CHECK(world.exchange(late).begin(1, kCall));
      world.launch(late, 1);
      launched = true;
      errors[late] = world.wait(late, 1);
    });
    if (late == 0) CHECK(wait_until([&] { return launched.load(); }));
    world.driver.queue_limit = 16;
    std::thread hasty([&] { errors[1 - late] = world.call(1 - late, 1, 2); });
    CHECK(wait_until([&] { return world.driver.held_up() == 1 + late; }));  // a reader that stands still is held up too
    hasty.join();
    open = true;
    patient.join();
    const std::string text =
        std::string("transfer timed out after 2 s, waiting for device ") + (late == 0 ? "0 to publish" : "1 to read");
    CHECK_TEXT(errors[1 - late], "jreshard: " + text);
    CHECK_TEXT(errors[late], "jreshard: process " + std::to_string(1 - late) + ": " + text);
    go_on(world, 2);
  }
}

// The driver holds begin() up, by work of others on the device: the call fails at its deadline all the same.
void test_calls_whose_begin_is_held_up() {
  World world(one_source(), {0, 1});
  const RunningDevices running(world.driver);
  std::atomic<bool> open{false};
  world.driver.full_queues_hold_up = true;
  world.driver.hold(world.stream(1), [&] { return open.load(); });
  world.driver.queue_limit = 1;
  std::thread others([&] { world.driver.enqueue(world.stream(1), [] {}); });
  CHECK(wait_until([&] { return world.driver.held_up() == 1; }));
  std::thread beginning([&] { CHECK(world.exchange(1).begin(1, 0.3)); });
  CHECK(wait_until([&] { return world.exchange(1).broken(); }));
  CHECK(world.driver.held_up() == 1 && world.exchange(1).open_calls() == 0);
  world.driver.queue_limit = size_t(-1);
  open = true;
  beginning.join();
  others.join();
  const std::string text = "transfer timed out after 0.3 s, waiting for device 0 to publish";
  CHECK_TEXT(world.wait(1, 1), "jreshard: " + text);
  CHECK_TEXT(world.call(0, 1), "jreshard: process 1: " + text);
  go_on(world, 2);
}

// A call that is begun and no more ends at its deadline, and the others hear of it.
void test_calls_that_nobody_launches() {
  World world(both_ways(), {0, 1});
  const RunningDevices running(world.driver);
  CHECK(world.exchange(0).begin(1, 0.1) && world.exchange(1).begin(1, kCall));
  CHECK(wait_until([&] { return world.exchange(0).open_calls() + world.exchange(1).open_calls() == 0; }));
  const std::string text = "transfer timed out after 0.1 s, waiting for device 0, device 1 to publish";
  CHECK_TEXT(world.wait(0, 1), "jreshard: " + text);
  CHECK_TEXT(world.wait(1, 1), "jreshard: process 0: " + text);
  go_on(world, 2);
}

// What is mapped of a process that dies stays until the copies from there have ended.
void test_a_source_that_dies_while_it_is_read() {
  PlayedSource source;
  for (const bool in_time : {true, false}) {
    source.announce();
    std::atomic<bool> open{false};
    source.driver.hold(source.reader(), [&] { return open.load(); });
    std::thread letting_go;
    const std::string error = source.receive([&] {
      source.be_ready();
      source.die();
      CHECK(wait_until([&] { return source.exchange->broken(); }));
      if (in_time) {
        letting_go = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          CHECK(source.mappings() == 1);
          open = true;
        });
      }
    });
    CHECK_TEXT(error, "jreshard: process 1 is gone: its connection is closed");
    CHECK(source.mappings() == (in_time ? 0 : 1));
    if (in_time) letting_go.join();
    source.open();  // the old one waits no longer than it has, and does not take the memory with it
    CHECK(source.mappings() == (in_time ? 0 : 1));
    open = true;
    source.driver.run_all();
    source.come();
    source.open();
    CHECK(source.mappings() == 0);
    source.announce();
    CHECK_TEXT(source.receive([&] { source.be_ready(); }), "");
    source.die();
    CHECK(wait_until([&] { return source.mappings() == 0; }));
    if (in_time) {
      source.come();
      source.open();
    }
  }
}

// How many descriptors the process has, and how many mappings of pages that are shared.
std::pair<int, int> held_of_the_system() {
  const auto files = std::filesystem::directory_iterator("/proc/self/fd");
  std::ifstream maps("/proc/self/maps");
  int pages = 0;
  for (std::string line; std::getline(maps, line);) pages += contains(line, "memfd:");
  return {std::distance(begin(files), end(files)), pages};
}

// Processes that come and go, between calls or in the midst of them, leave nothing behind.
void test_connections_that_come_and_go() {
  World world(both_ways(), {0, 1});
  const RunningDevices running(world.driver);
  std::pair<int, int> held;
  std::map<std::string, int> left;
  for (uint32_t id = 1; id <= 200; id += 2) {
    world.call_well(id);
    if (id == 21) held = held_of_the_system(), left = world.driver.left_behind();
    std::thread trouble([&] {
      if (id % 4 == 1) std::this_thread::sleep_for(std::chrono::microseconds(id * 10));
      world.peers(id / 2 % 2).disconnect(1 - id / 2 % 2);
    });
    if (id % 4 == 1) world.call_all(id + 1);
    trouble.join();
    CHECK(wait_until([&] { return !world.peers(0).connected(1) && !world.peers(1).connected(0); }));
    for (int process : {0, 1}) {
      if (world.exchange(process).broken()) world.open(process);
    }
    CHECK(wait_until([&] { return world.mappings() == 0; }));
    world.link(0, 1);
  }
  world.call_well(201);
  left.erase("events");  // those of failed calls are not used again
  auto same = [&] {
    auto now = world.driver.left_behind();
    now.erase("events");
    return held_of_the_system() == held && now == left;
  };
  CHECK(wait_until(same));  // links close on their own threads
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

}  // namespace

int main() {
  return run_tests({
      {"aborts", test_aborts},
      {"lost_processes", test_lost_processes},
      {"lost_between_calls", test_lost_between_calls},
      {"not_linked", test_not_linked},
      {"deadlines", test_deadlines},
      {"launches_that_are_held_up", test_launches_that_are_held_up},
      {"calls_whose_begin_is_held_up", test_calls_whose_begin_is_held_up},
      {"calls_that_nobody_launches", test_calls_that_nobody_launches},
      {"a_source_that_dies_while_it_is_read", test_a_source_that_dies_while_it_is_read},
      {"connections_that_come_and_go", test_connections_that_come_and_go},
      {"failing_after_the_other_has_ended", test_failing_after_the_other_has_ended},
      {"exchanges_that_go", test_exchanges_that_go},
      {"random_failures", test_random_failures},
      {"failures_of_the_driver", test_failures_of_the_driver},
  });
}
