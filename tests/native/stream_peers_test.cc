// Tests of GPUs that read each other's memory across processes: plans, memory that is lent, and what processes say.
#include "stream_peers.h"

#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "played_source.h"
#include "stream_world.h"

namespace {

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

void test_a_played_source() {
  PlayedSource source;
  source.announce();
  CHECK_TEXT(source.receive([&] { source.be_ready(); }), "");
  CHECK((*source.page)[PlayedSource::kRead] == 2);
}

// What is read from a source that gives up does not count, even if nothing is heard of it in time.
void test_a_source_that_gives_up() {
  PlayedSource source;
  source.announce();
  CHECK_TEXT(source.receive([&] {
    (*source.page)[PlayedSource::kMark] = 1;
    source.page->fill(uint64_t{1} << 62);
    source.be_ready();
  }),
             "jreshard: process 1 has given up while it was read from");
}

void test_bad_messages() {
  const Message good{Message::kPublish, 1, kKey, 0, 0, 0, {0}};
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
    source.theirs->send(0, source.publish(source.array));
    CHECK_TEXT(source.receive(), "jreshard: process 1 has not sent its page of flags");
  }
  {
    PlayedSource source;
    source.send_flags();
    source.theirs->send(0, source.publish(source.array));
    CHECK_TEXT(source.receive(), "jreshard: a process published an array in memory that it has not lent");
  }
  {
    PlayedSource source;
    jreshard::Descriptor small(memfd_create("small", MFD_CLOEXEC));
    source.theirs->send(0, {Message::kFlags, 0, kKey}, std::move(small));
    source.lend();
    source.theirs->send(0, source.publish(source.array));
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
      {"a_source_that_gives_up", test_a_source_that_gives_up},
      {"bad_messages", test_bad_messages},
      {"sources_that_leave_something_out", test_sources_that_leave_something_out},
  });
}
