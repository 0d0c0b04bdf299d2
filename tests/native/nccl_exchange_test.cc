// Tests of the exchange over NCCL without a GPU: random plans, in one process and in several, in any order of work that
// the streams allow.
#include "nccl_exchange.h"

#include <chrono>

#include "nccl_plans.h"
#include "nccl_world.h"

using jreshard::NcclExchange;

namespace {

int draw(std::mt19937& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

// Ranks dealt out to processes, each of which has one at least.
std::vector<int> random_processes(std::mt19937& random, int ranks) {
  std::vector<int> out(ranks);
  const int processes = draw(random, 1, std::min(ranks, 3));
  for (int rank = 0; rank < ranks; ++rank) out[rank] = rank < processes ? rank : random() % processes;
  std::shuffle(out.begin(), out.end(), random);
  return out;
}

Plan random_plan_of(std::mt19937& random, int ranks, int max_leaves) {
  for (;;) {
    Plan plan = random_relays(random, max_leaves, draw(random, 1, 3), ranks);
    if (int(plan.table.roles.size()) == ranks) return plan;
  }
}

int64_t random_slot(std::mt19937& random) { return draw(random, 0, 2) ? draw(random, 20, 400) : 1 << 20; }

// Everything from one thread, in a random order, while the devices get on by fits and starts.
void call_from_one_thread(NcclWorld& world, Transfers& t, uint32_t id, std::mt19937& random) {
  for (int process = 0; process < world.num_processes(); ++process) CHECK(t.exchange(process).begin(id, kLong));
  std::vector<int> steps;                         // ranks, each as often as it launches
  const int parts = id % 2 ? 1 : t.num_chunks();  // in which each rank releases
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    if (t.receives(rank)) steps.insert(steps.end(), t.num_chunks(), rank);
    if (t.sends(rank)) steps.insert(steps.end(), parts, rank);
  }
  std::shuffle(steps.begin(), steps.end(), random);
  std::vector<int> chunks(world.num_ranks()), released(world.num_ranks()), published(world.num_ranks());
  const auto publish = [&](int rank, int end) {
    while (t.sends(rank) && published[rank] < end) t.publish_chunk(id, rank, published[rank]++);
  };
  const int work = id % 3 ? 1 << random() % 9 : 0;
  for (int rank : steps) {
    const bool received = !t.receives(rank) || chunks[rank] == t.num_chunks();
    if (t.sends(rank) && released[rank] < t.num_chunks() && (received || random() % 2)) {
      released[rank] += t.num_chunks() / parts;
      publish(rank, released[rank]);
      t.release_chunks(rank, released[rank]);
    } else {
      publish(rank, chunks[rank] + 1);
      t.receive_chunk(id, rank, chunks[rank]++);
    }
    if (work) world.driver.run(random() % work);
  }
  world.driver.run_all();
  for (int process = 0; process < world.num_processes(); ++process) {
    t.exchange(process).wait(id);
    t.check_and_reuse(id, process);
  }
}

void test_random_plans() {
  for (uint32_t seed = 1; seed <= 24; seed += kSeedStride) {
    std::mt19937 random(seed);
    const int ranks = draw(random, 1, 4);
    NcclWorld world(random_processes(random, ranks), seed);
    world.connect();
    {
      // They share communicators and slots.
      Transfers first(world, random_plan_of(random, ranks, 20), random_slot(random));
      Transfers second(world, random_plan_of(random, ranks, 20), random_slot(random));
      for (uint32_t id = 1; id <= 6; ++id) call_from_one_thread(world, random() % 3 ? first : second, id, random);
      world.driver.run_all();
      for (Transfers* t : {&first, &second}) {
        for (int rank = 0; rank < ranks; ++rank) t->overwrite_on_stream(rank);
        world.driver.run_all();
        t->check_overwritten();
      }
    }
  }
}

void test_processes_with_threads() {
  size_t messages = 0;
  for (uint32_t seed = 1; seed <= 8; seed += kSeedStride) {
    std::mt19937 random(seed);
    const int ranks = draw(random, 2, 4);
    NcclWorld world(random_processes(random, ranks), seed);
    world.connect();
    Transfers first(world, random_plan_of(random, ranks, 8), random_slot(random));
    Transfers second(world, random_plan_of(random, ranks, 8), random_slot(random));
    {
      const RunningDevices running(world.driver, 1 << seed % 9);
      std::vector<std::function<void()>> processes;
      for (int process = 0; process < world.num_processes(); ++process) {
        processes.push_back([&, process] {
          for (uint32_t id = 1; id <= 8; ++id) CHECK_TEXT((id % 3 ? first : second).run(id, process), "");
        });
      }
      at_once(std::move(processes));
    }
    world.driver.run_all();
    for (Transfers* t : {&first, &second}) t->check_overwritten();
    messages += world.nccl.messages();
  }
  CHECK(messages > 300);
}

// Replicas that complete each other, in boxes of every kind, with slots that are used many times over.
void test_replicas() {
  for (uint32_t seed = 1; seed <= 16; seed += kSeedStride) {
    std::mt19937 random(seed);
    const bool large = seed > 8;
    const int ranks = draw(random, 2, 5);
    NcclWorld world(random_processes(random, ranks), seed);
    world.connect();
    const auto slot = [&] { return large ? draw(random, 50'000, 600'000) : random_slot(random); };
    Transfers first(world, replicas_plan(random, large ? 4 : 20, ranks, large ? 400'000 : 40), slot());
    Transfers second(world, replicas_plan(random, 8, ranks, 40), slot());
    for (uint32_t id = 1; id <= 4; ++id) call_from_one_thread(world, id % 3 ? first : second, id, random);
    {
      const RunningDevices running(world.driver, 1 << seed % 9);
      for (uint32_t id = 5; id <= 8; ++id) {
        Transfers& t = id % 3 ? first : second;
        t.in_parts = id % 2;
        for (const std::string& error : t.run_everywhere(id)) CHECK_TEXT(error, "");
      }
    }
    world.driver.run_all();
    for (Transfers* t : {&first, &second}) {
      for (int rank = 0; rank < ranks; ++rank) t->overwrite_on_stream(rank);
      world.driver.run_all();
      t->check_overwritten();
    }
  }
}

// Boxes that go straight from or to the arrays on both sides, on one or on none, with small ones between.
void test_large_boxes() {
  constexpr int64_t kRun = 64 << 10, kRows = 4;
  for (const std::vector<int>& processes : {std::vector<int>{0, 0}, {0, 1}}) {
    Plan plan(2, {kSends | kReceives, kSends | kReceives});
    plan.add_template();
    for (const int64_t out : {0, 3}) {
      for (const int64_t in : {0, 5}) {
        const std::vector<jreshard::Dim> dims{{kRows, kRun + out, kRun + in}};
        for (int src : {0, 1}) {
          plan.add(src, 1 - src, {{0, 0, 1, 2, kRun, dims}, kRows * (kRun + out) + 1, kRows * (kRun + in) + 2});
          plan.add(src, 1 - src, {{0, 0, 1, 2, 7, {}}, 8, 9});
        }
      }
    }
    plan.table.leaf_template = {0};
    NcclWorld world(processes, 1);
    world.connect();
    Transfers t(world, plan, 100'000);
    {
      const RunningDevices running(world.driver);
      for (uint32_t id = 1; id <= 2; ++id) {
        t.in_parts = id % 2;
        for (const std::string& error : t.run_everywhere(id)) CHECK_TEXT(error, "");
      }
    }
    world.driver.run_all();
    for (int rank : {0, 1}) t.overwrite_on_stream(rank);
    world.driver.run_all();
    t.check_overwritten();
  }
}

// A device that has so much work ahead that those who enqueue more wait until it gets on.
void test_full_queues() {
  for (const std::vector<int>& processes : {std::vector<int>{0, 0, 0}, {0, 1, 0}, {0, 1, 2}}) {
    std::mt19937 random(1);
    Plan plan(3, {kSends, kReceives, kSends | kReceives});
    plan.add_template();
    for (int src : {0, 2}) {
      for (int dst : {1, 2}) plan.add(src, dst, random_box(random, 3));
    }
    plan.forward(1, 1, 2, {{0, 0, 0, 0, 3, {}}, 3, 3}, plan.dst_bytes[0][1]);
    plan.forward(2, 2, 1, {{0, 0, 0, 0, 3, {}}, 3, 3}, plan.dst_bytes[0][2]);
    plan.table.leaf_template.assign(20, 0);
    NcclWorld world(processes, 1);
    world.connect();
    Transfers t(world, plan, 100);
    world.driver.queue_limit = 6;
    {
      const RunningDevices running(world.driver);
      for (uint32_t id = 1; id <= 4; ++id) {
        t.in_parts = id % 2;
        for (const std::string& error : t.run_everywhere(id)) CHECK_TEXT(error, "");
      }
    }
    world.driver.run_all();
    t.check_overwritten();
  }
}

// From one thread, the receiver's launch waits for its device, and that for the sender, which is to be launched later.
void test_one_thread_with_full_queues_times_out() {
  Plan plan(1, {kSends, kReceives});
  plan.add_template();
  plan.add(0, 1, {{0, 0, 0, 0, 3, {}}, 3, 3});
  plan.table.leaf_template.assign(20, 0);
  NcclWorld world({0, 0}, 1);
  world.connect();
  Transfers t(world, plan, 100);
  world.driver.queue_limit = 6;
  const RunningDevices running(world.driver);
  CHECK(t.exchange(0).begin(kFailing, kShort));
  t.publish(kFailing, 0);
  const std::string text = error_of([&] { t.receive(kFailing, 1); });
  CHECK(contains(text, "jreshard: transfer timed out after 0.05"));
  CHECK(contains(text, "device 0 (not launched), device 1 (not launched)"));
  CHECK_TEXT(error_of([&] { t.release(kFailing, 0); }), text);
  CHECK_TEXT(error_of([&] { t.exchange(0).wait(kFailing); }), text);
}

void test_nothing_is_left_behind() {
  std::mt19937 random(7);
  NcclWorld world({0, 1, 0}, 7);
  world.connect();
  CHECK(world.driver.left_behind().empty());
  for (int repeat = 0; repeat < 3; ++repeat) {
    Transfers t(world, random_plan_of(random, 3, 9), 50);
    for (uint32_t id = 1; id <= 20; ++id) {
      call_from_one_thread(world, t, id, random);
      if (id != 1) continue;
      CHECK(world.driver.left_behind().at("streams") == 3 * 3);
    }
    const auto during = world.driver.left_behind();
    CHECK(during.at("events") == 3 * (4 + 8) && during.at("memory") == 3 * 4);
    world.driver.run_all();
  }
  CHECK(world.driver.left_behind().empty());
}

}  // namespace

int main() {
  return run_tests({
      {"random_plans", test_random_plans},
      {"processes_with_threads", test_processes_with_threads},
      {"replicas", test_replicas},
      {"large_boxes", test_large_boxes},
      {"full_queues", test_full_queues},
      {"one_thread_with_full_queues_times_out", test_one_thread_with_full_queues_times_out},
      {"nothing_is_left_behind", test_nothing_is_left_behind},
  });
}
