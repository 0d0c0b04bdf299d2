// Tests of what fails in and around the exchange over NCCL: whatever NCCL, the driver, the peers or the clock do, every
// process gets an error in time, no device is left waiting, and nothing comes after the arrays were given back.
#include <atomic>
#include <chrono>

#include "nccl_world.h"
#include "staging_ring.h"
#include "watchdog.h"

using jreshard::NcclCommunicator;
using jreshard::NcclExchange;

namespace {

constexpr int64_t kSlot = 60;

// A sender, a receiver and two that do both; boxes of each kind, in several chunks, waves and phases.
Plan every_kind_of_box() {
  Plan plan(2, {kSends, kReceives, kSends | kReceives, kSends | kReceives});
  plan.add_template();
  for (int src : {0, 2, 3}) {
    for (int dst : {1, 2, 3}) {
      plan.add(src, dst, {{0, 0, 0, 0, 9, {}}, 9, 9});
      plan.add(src, dst, {{0, 0, 1, 2, 9, {}}, 10, 11});
      plan.add(src, dst, {{0, 0, 0, 0, 3, {{2, 4, 5}}}, 8, 10});
      plan.add(src, dst, {{0, 0, 0, 0, 3, {{2, 12, 10}, {2, 4, 5}}}, 24, 20});
    }
  }
  const std::vector<int64_t> received = plan.dst_bytes[0];
  plan.forward(1, 1, 2, {{0, 0, 4, 1, 9, {}}, 13, 10}, received[1]);
  plan.forward(1, 3, 1, {{0, 0, 0, 0, 3, {{2, 4, 5}}}, 8, 10}, received[3]);
  plan.forward(2, 2, 3, {{0, 0, received[2], 0, 10, {}}, received[2] + 10, 10}, plan.dst_bytes[0][2]);
  plan.table.leaf_template = {0, 0, 0};
  return plan;
}

// From rank 0 to rank 1, which passes it on to rank 2, which passes it on to rank 3.
Plan chain() {
  Plan plan(1, {kSends, kReceives, kReceives, kReceives});
  plan.add_template();
  plan.add(0, 1, {{0, 0, 0, 0, 9, {}}, 9, 9});
  plan.forward(1, 1, 2, {{0, 0, 0, 0, 9, {}}, 9, 9}, 9);
  plan.forward(2, 2, 3, {{0, 0, 0, 0, 9, {}}, 9, 9}, 9);
  plan.table.leaf_template = {0};
  return plan;
}

Plan one_box(int64_t bytes) {
  Plan plan(1, {kSends, kReceives});
  plan.add_template();
  plan.add(0, 1, {{0, 0, 0, 0, bytes, {}}, bytes, bytes});
  plan.table.leaf_template = {0};
  return plan;
}

// After a failed call: the streams come to their end, and what XLA does with the arrays then is the last that is done.
void check_over(NcclWorld& world, Transfers& t) {
  for (int rank = 0; rank < t.num_ranks(); ++rank) t.overwrite_on_stream(rank);
  world.driver.run_all();
  t.check_overwritten();
}
void check_no_further_call(Transfers& t, int process) { CHECK(!t.exchange(process).begin(kFailing + 1, kLong)); }

// The errors of a call in two processes, in which a function fails once.
std::vector<std::string> errors_where_fails(const std::string& function, int n) {
  NcclWorld world({0, 0, 1, 0}, n + 1);
  world.connect();
  Transfers t(world, every_kind_of_box(), kSlot);
  t.in_parts = n % 2;
  function[0] == 'n' ? world.nccl.fail(function, n) : world.driver.fail(function, n);
  std::vector<std::string> errors;
  {
    const RunningDevices running(world.driver);
    errors = t.run_everywhere(kFailing);
  }
  check_over(world, t);
  for (int process : {0, 1}) {
    if (!errors[process].empty()) check_no_further_call(t, process);
  }
  return errors;
}

// Whatever is refused, in any of the launches: the calls fail with that.
void test_failures_in_launches() {
  int failures = 0;
  const std::map<std::string, std::string> named{{"cuStreamGetCtx", "cuStreamGetCtx"},
                                                 {"cuCtxPushCurrent", "cuCtxPushCurrent"},
                                                 {"cuEventRecord", "cuEventRecord"},
                                                 {"cuStreamWaitEvent", "cuStreamWaitEvent"},
                                                 {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync"},
                                                 {"cuMemcpy2DAsync", "cuMemcpy2DAsync"},
                                                 {"cuMemcpy3DAsync", "cuMemcpy3DAsync"},
                                                 {"ncclGroupStart", "ncclGroupStart"},
                                                 {"ncclGroupEnd", "launching a group of NCCL"},
                                                 {"ncclSend", "ncclSend"},
                                                 {"ncclRecv", "ncclRecv"}};
  for (const auto& [function, name] : named) {
    const bool often = function == "cuEventRecord" || function == "cuStreamWaitEvent";
    for (int n = 0;; n += often ? 5 : 1) {
      const std::vector<std::string> errors = errors_where_fails(function, n);
      if (errors[0].empty() && errors[1].empty()) break;
      ++failures;
      // The last work of one process may fail when the other has all that it wants.
      const std::string& text = errors[0].empty() ? errors[1] : errors[0];
      CHECK(contains(text, "jreshard: " + name + " failed: as told") && contains(text, ", on device "));
      CHECK(errors[0].empty() || errors[1].empty() || errors[0] == errors[1]);
    }
  }
  CHECK(failures > 100);
}

// What is asked again and again, by whoever waits: some of the calls fail.
void test_failures_in_polls() {
  int failures = 0;
  for (int n = 0; n < 12; ++n) {
    for (const std::string& error : errors_where_fails("cuEventQuery", n)) {
      failures += !error.empty();
      if (!error.empty()) CHECK_TEXT(error, "jreshard: a transfer over NCCL failed: as told (700)");
    }
    for (const std::string& error : errors_where_fails("ncclCommGetAsyncError", 3 * n)) {
      failures += !error.empty();
      CHECK(error.empty() || contains(error, "as told") || contains(error, "could not be opened"));
    }
  }
  CHECK(failures >= 24);
}

// Joining, the first exchange, and opening a plan.
std::string error_of_making(NcclWorld& world) {
  return error_of([&] {
    const auto communicator = world.join(0, world.nccl.unique_id(), in_seconds(kLong));
    communicator->warm_up({{0, 1}, {1, 0}}, in_seconds(kLong));
    one_box(9).table.exchange<NcclExchange>(world.ordinals(0), world.driver.table(), communicator, kSlot);
  });
}

void test_failures_in_making() {
  const std::map<std::string, std::string> named{{"cuDeviceGet", "cuDeviceGet failed"},
                                                 {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain failed"},
                                                 {"cuCtxPushCurrent", "cuCtxPushCurrent failed"},
                                                 {"cuStreamCreate", "cuStreamCreate failed"},
                                                 {"cuEventCreate", "cuEventCreate failed"},
                                                 {"cuMemAlloc", ""},  // tested below
                                                 {"ncclCommInitRankConfig", "ncclCommInitRankConfig failed"},
                                                 {"ncclGroupStart", "ncclGroupStart failed"},
                                                 {"ncclGroupEnd", "the NCCL communicator failed"},
                                                 {"ncclSend", "ncclSend failed"},
                                                 {"ncclRecv", "ncclRecv failed"},
                                                 {"ncclCommGetAsyncError", "as told"}};
  int failures = 0;
  for (const auto& [function, text] : named) {
    bool reached = true;
    for (int n = 0; reached && n < 30; ++n) {
      NcclWorld world({0, 0}, n + 1);
      const RunningDevices running(world.driver);
      function[0] == 'n' ? world.nccl.fail(function, n) : world.driver.fail(function, n);
      const std::string error = error_of_making(world);
      reached = !error.empty();
      failures += reached;
      if (reached) CHECK(contains(error, text));
      // Whoever cannot enter a device's context cannot clear up there.
      const bool clears_up = reached || function != "cuCtxPushCurrent";
      if (clears_up) CHECK(world.driver.left_behind().empty() && FakeDriver::contexts() == 0);
    }
  }
  CHECK(failures > 60);
}

void test_who_does_not_join() {
  NcclWorld world({0, 1}, 1);
  const auto start = std::chrono::steady_clock::now();
  CHECK_TEXT(error_of([&] { world.join(0, world.nccl.unique_id(), in_seconds(kShort)); }),
             "jreshard: timed out while joining the NCCL communicator");
  world.connect();
  // Connected pairs get as far as their devices, others do not.
  const RunningDevices running(world.driver);
  CHECK_TEXT(error_of([&] { world.communicator(0)->warm_up({{0, 1}}, in_seconds(kShort)); }),
             "jreshard: the first exchange over NCCL timed out");
  CHECK_TEXT(world.communicator(0)->broken(), "jreshard: the first exchange over NCCL timed out");
  CHECK_TEXT(error_of([&] { world.communicator(0)->warm_up({{0, 1}}, in_seconds(kLong)); }),
             "jreshard: the first exchange over NCCL timed out");
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  CHECK(world.driver.left_behind().empty());
}

void test_pairs_that_only_one_side_connects() {
  NcclWorld world({0, 1}, 1);
  const FakeNccl::UniqueId id = world.nccl.unique_id();
  std::shared_ptr<NcclCommunicator> ends[2];
  at_once({[&] { ends[0] = world.join(0, id, in_seconds(kLong)); },
           [&] { ends[1] = world.join(1, id, in_seconds(kLong)); }});
  CHECK_TEXT(error_of([&] { ends[0]->warm_up({{0, 1}}, in_seconds(kShort)); }),
             "jreshard: timed out while connecting the pairs of the NCCL communicator");
  CHECK_TEXT(ends[1]->broken(), "");
  CHECK(world.driver.left_behind().empty());
}

void test_timeouts_name_the_late() {
  // Rank 1 is in another process, which does not come.
  const struct {
    std::vector<int> launched;
    std::string late;
  } cases[] = {{{0, 2, 3}, "device 0, device 2, device 3"},
               {{0, 3}, "device 2 (not launched)"},
               {{}, "device 0 (not launched), device 2 (not launched), device 3 (not launched)"}};
  for (const auto& c : cases) {
    NcclWorld world({0, 1, 0, 0}, 1);
    world.connect();
    Transfers t(world, every_kind_of_box(), kSlot);
    {
      const RunningDevices running(world.driver);
      CHECK(t.exchange(0).begin(kFailing, 1));
      for (int rank : {0, 2, 3}) t.publish(kFailing, rank);
      for (int rank : c.launched) {
        t.receive(kFailing, rank);
        t.release(kFailing, rank);
      }
      const std::string text = error_of([&] { t.exchange(0).wait(kFailing); });
      CHECK_TEXT(text,
                 "jreshard: transfer timed out after 1 s; still sending, receiving or busy with earlier "
                 "work: " +
                     c.late);
      CHECK_TEXT(error_of([&] { t.exchange(0).wait(kFailing); }), "jreshard: this transfer is not under way");
      CHECK_TEXT(error_of([&] { t.release(kFailing, 0); }), text);
    }
    check_no_further_call(t, 0);
    world.communicator(1)->abort("over");
    check_over(world, t);
    CHECK(contains(world.communicator(0)->broken(), "timed out after"));
  }
}

// Less patient than the stand-in for the driver, which lets go in the end what it holds up.
bool wait_until(const std::function<bool()>& ready) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!ready()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

// A device's queue is full of work that waits for a process that does not come, which holds up the thread that
// launches, or wait() where others have filled the queue since. The call fails at its deadline, and no other deadline
// is missed.
void test_calls_that_are_held_up() {
  for (const bool launched : {false, true}) {
    NcclWorld world({0, 1}, 1);
    world.connect();
    Transfers t(world, one_box(9), kSlot);
    NcclExchange& receiver = t.exchange(1);
    std::string error;
    {
      const RunningDevices running(world.driver);
      world.driver.full_queues_hold_up = true;
      world.driver.queue_limit = launched ? size_t(-1) : 3;
      CHECK(receiver.begin(kFailing, 1));
      std::thread launches([&] {
        t.receive(kFailing, 1);
        world.driver.queue_limit = 3;
        if (launched) world.driver.enqueue(world.stream(1), [] {});
      });
      CHECK(wait_until([&] { return world.driver.held_up() == 1; }));
      const auto others_are_served = std::make_shared<std::atomic<bool>>(false);
      jreshard::Watchdog::shared().at(in_seconds(1), [others_are_served] { *others_are_served = true; });
      std::thread waits([&] { error = error_of([&] { receiver.wait(kFailing); }); });
      CHECK(wait_until([&] { return others_are_served->load(); }));
      waits.join();
      launches.join();
    }
    CHECK_TEXT(
        error,
        std::string("jreshard: transfer timed out after 1 s; still sending, receiving or busy with earlier work: ") +
            (launched ? "devices of this process, which do not answer" : "device 1 (not launched)"));
    check_no_further_call(t, 1);
    world.communicator(0)->abort("over");
    world.driver.queue_limit = size_t(-1);
    check_over(world, t);
  }
}

// A rank that fails, or whose process does not come, when others wait for what it is to pass on.
void test_who_does_not_pass_on() {
  for (const int late : {1, 2}) {
    for (const bool comes : {false, true}) {
      std::vector<int> processes(4);
      processes[late] = 1;
      NcclWorld world(processes, 1);
      world.connect();
      Transfers t(world, chain(), kSlot);
      {
        const RunningDevices running(world.driver);
        CHECK(t.exchange(0).begin(kFailing, 0.5) && t.exchange(1).begin(kFailing, kLong));
        t.publish(kFailing, 0);
        t.release(kFailing, 0);
        for (int rank : {1, 2, 3}) {
          if (rank != late) t.receive(kFailing, rank);
        }
        if (comes) {
          world.nccl.fail("ncclSend", 0);  // when it has received
          CHECK_TEXT(error_of([&] { t.receive(kFailing, late); }),
                     "jreshard: ncclSend failed: as told, on device " + std::to_string(late));
        }
        const std::string text = error_of([&] { t.exchange(0).wait(kFailing); });
        CHECK(contains(text, "timed out after 0.5 s") && contains(text, "device 3"));
        CHECK(!contains(text, "device " + std::to_string(late)));
      }
      t.exchange(1).abort(kFailing, "over");
      check_over(world, t);
    }
  }
}

void test_aborts_reach_those_who_wait() {
  for (const bool all : {false, true}) {
    NcclWorld world({0, 1}, 1);
    world.connect();
    Transfers t(world, one_box(9), kSlot);
    NcclExchange& receiver = t.exchange(1);
    CHECK_TEXT(error_of([&] { t.receive(kFailing, 1); }), "jreshard: this transfer is not under way");
    CHECK(receiver.begin(kFailing, kLong) && receiver.open_calls() == 1 && !receiver.begin(2, kLong));
    {
      const RunningDevices running(world.driver);
      t.receive(kFailing, 1);
      std::thread waits([&] { CHECK_TEXT(error_of([&] { receiver.wait(kFailing); }), "enough"); });
      receiver.abort(kFailing + 1, "of another call");
      std::this_thread::sleep_for(std::chrono::duration<double>(kShort));
      all ? receiver.abort_all("enough") : receiver.abort(kFailing, "enough");
      waits.join();
    }
    check_no_further_call(t, 1);
    world.communicator(0)->abort("enough");
    check_over(world, t);
  }
}

// Errors that NCCL finds only after the launch.
void test_lost_peers() {
  NcclWorld world({0, 1}, 1);
  world.connect();
  Transfers t(world, one_box(9), kSlot);
  {
    const RunningDevices running(world.driver);
    CHECK(t.exchange(1).begin(kFailing, kLong));
    t.receive(kFailing, 1);
    world.nccl.lose_peer_of(1);
    CHECK_TEXT(error_of([&] { t.exchange(1).wait(kFailing); }), "jreshard: NCCL failed: misuse or a lost peer");
  }
  CHECK_TEXT(world.communicator(0)->broken(), "");
  check_no_further_call(t, 1);
  check_over(world, t);
}

void test_a_call_of_another_plan_finds_the_communicator_broken() {
  NcclWorld world({0, 0}, 1);
  world.connect();
  Transfers failed(world, one_box(9), kSlot), other(world, one_box(5), kSlot);
  CHECK(failed.exchange(0).begin(kFailing, kLong));
  failed.exchange(0).abort(kFailing, "enough");
  CHECK(failed.exchange(0).open_calls() == 0);
  CHECK(!other.exchange(0).begin(1, kLong));
  CHECK_TEXT(error_of([&] { other.publish(1, 0); }), "enough");
  world.driver.run_all();
}

void test_programs_that_do_not_fit() {
  NcclWorld world({0, 0}, 1);
  world.connect();
  Transfers t(world, one_box(9), kSlot);
  NcclExchange& exchange = t.exchange(0);
  CHECK(exchange.begin(kFailing, kLong));
  std::vector<void*> results(3);
  const std::string unfit = "jreshard: a program does not fit its plan";
  CHECK_TEXT(error_of([&] { exchange.receive(1, 0, results, world.stream(1)); }), unfit);
  CHECK_TEXT(error_of([&] { exchange.receive(1, 1, results, world.stream(1)); }), unfit);
  CHECK_TEXT(error_of([&] { exchange.publish(0, 0, {}, world.stream(0)); }), unfit);
  CHECK_TEXT(error_of([&] { t.release(kFailing, 0); }),
             "jreshard: a program ran before the one that publishes its arrays, on device 0");
  check_over(world, t);
}

// Steps are counted, and chunks received and released in their order only.
void test_steps_in_their_order() {
  NcclWorld world({0, 0}, 1);
  world.connect();
  Plan plan = one_box(9);
  plan.table.leaf_template.assign(3, 0);
  Transfers t(world, plan, kSlot);
  NcclExchange& exchange = t.exchange(0);
  const std::string unfit = "jreshard: a program does not fit its plan";
  CHECK(exchange.begin(1, kLong));
  CHECK(exchange.steps_run(1) == 0);
  t.publish_chunk(1, 0, 0);
  CHECK_TEXT(error_of([&] { t.receive_chunk(1, 1, 1); }), unfit);
  t.receive_chunk(1, 1, 0);
  t.release_chunks(0, 1);
  CHECK(exchange.steps_run(1) == 2);
  for (int chunk : {1, 2}) t.publish_chunk(1, 0, chunk);
  for (int end : {1, 4}) CHECK_TEXT(error_of([&] { t.release_chunks(0, end); }), unfit);
  t.release_chunks(0, 3);
  CHECK_TEXT(error_of([&] { t.release_chunks(0, 3); }), unfit);
  for (int chunk : {1, 2}) t.receive_chunk(1, 1, chunk);
  CHECK(exchange.steps_run(1) == 6);
  world.driver.run_all();
  exchange.wait(1);
  CHECK(exchange.steps_run(1) > 6);
  t.check_and_reuse(1, 0);
  CHECK(exchange.begin(kFailing, kLong));
  exchange.abort(kFailing, "enough");
  CHECK(exchange.steps_run(kFailing) > 6);
  check_over(world, t);
}

void test_staging_memory() {
  NcclWorld world({0, 0}, 1);
  world.connect();
  world.driver.memory = 2 * 4 * 100;
  Transfers small(world, one_box(100), 1000);
  const auto use = [&](uint32_t id) {
    const RunningDevices running(world.driver);
    CHECK_TEXT(small.run(id, 0), "");
  };
  use(1);
  for (const size_t left : {0, 150, 1100}) {
    world.driver.memory = left;
    CHECK_TEXT(error_of([&] { Transfers(world, one_box(1000), 1000); }),
               "GPU 0 has no memory for four staging slots of 1000 bytes outside of JAX's pool; lower "
               "JRESHARD_STAGING_MIB or XLA_PYTHON_CLIENT_MEM_FRACTION");
    use(2);  // goes on with the slots it has
  }
  world.driver.memory = 100'000;
  Transfers large(world, one_box(1000), 1000);
  const size_t taken = world.driver.left_behind().at("memory");
  CHECK(taken == 8);
  {
    const RunningDevices running(world.driver);
    CHECK_TEXT(large.run(1, 0), "");
  }
  use(3);
  world.driver.run_all();
}

// Aborts that never return cost seconds, and memory that a kernel may still write to is not freed.
void test_aborts_that_hang() {
  NcclWorld world({0, 1}, 1);
  world.connect();
  Transfers t(world, one_box(9), kSlot);
  world.nccl.hang_aborts();
  {
    const RunningDevices running(world.driver);
    CHECK(t.exchange(1).begin(kFailing, kShort));
    t.receive(kFailing, 1);
    const auto start = std::chrono::steady_clock::now();
    at_once(
        {[&] { CHECK(contains(error_of([&] { t.exchange(1).wait(kFailing); }), "busy with earlier work: device 1")); },
         [&] {
           CHECK_TEXT(error_of([&] { world.communicator(0)->warm_up({{1, 0}}, in_seconds(kShort)); }),
                      "jreshard: the first exchange over NCCL timed out");
         }});
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
    CHECK(world.driver.left_behind().at("memory") == 2 * 4 + 1);  // the slots, and what was to be warmed up
    world.nccl.let_aborts_return();
  }
  check_over(world, t);
}

}  // namespace

int main() {
  return run_tests({
      {"failures_in_launches", test_failures_in_launches},
      {"failures_in_polls", test_failures_in_polls},
      {"failures_in_making", test_failures_in_making},
      {"who_does_not_join", test_who_does_not_join},
      {"pairs_that_only_one_side_connects", test_pairs_that_only_one_side_connects},
      {"timeouts_name_the_late", test_timeouts_name_the_late},
      {"calls_that_are_held_up", test_calls_that_are_held_up},
      {"who_does_not_pass_on", test_who_does_not_pass_on},
      {"aborts_reach_those_who_wait", test_aborts_reach_those_who_wait},
      {"lost_peers", test_lost_peers},
      {"a_call_of_another_plan_finds_the_communicator_broken",
       test_a_call_of_another_plan_finds_the_communicator_broken},
      {"programs_that_do_not_fit", test_programs_that_do_not_fit},
      {"steps_in_their_order", test_steps_in_their_order},
      {"staging_memory", test_staging_memory},
      {"aborts_that_hang", test_aborts_that_hang},
  });
}
