// Tests of the exchange for GPUs without one: a stand-in for the driver runs the streams' work in any order that their
// events allow. Arrays are written, read and overwritten by work on those streams, as programs of XLA would.
#include "stream_exchange.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "copy_engine.h"
#include "copy_table.h"
#include "fake_driver.h"

using jreshard::Copy;
using jreshard::CopyPlan;
using jreshard::StreamExchange;

namespace {

// Two senders, two receivers, three leaves in two chunks, and copies of each kind between any two.
Plan every_kind_of_copy() {
  Plan plan(2, {kSends, kSends, kReceives, kReceives});
  plan.add_template();
  for (int src : {0, 1}) {
    for (int dst : {2, 3}) {
      plan.add(src, dst, {{0, 0, 0, 0, 4, {}}, 4, 4});
      plan.add(src, dst, {{0, 0, 1, 2, 4, {}}, 5, 6});
      plan.add(src, dst, {{0, 0, 0, 0, 3, {{2, 4, 5}}}, 8, 10});
      plan.add(src, dst, {{0, 0, 0, 0, 3, {{2, 12, 10}, {2, 4, 5}}}, 24, 20});
    }
  }
  plan.table.leaf_template = {0, 0, 0};
  return plan;
}

// An exchange with one set of arrays, which all of its calls use.
class Transfers {
 public:
  FakeDriver driver;
  std::shared_ptr<StreamExchange> exchange;

  explicit Transfers(Plan plan, uint32_t seed = 1, bool has_batch = true)
      : driver(seed, has_batch),
        exchange(plan.table.exchange_from(StreamExchange::open, driver.table(), jreshard::ProcessMap{},
                                          std::map<int, int>{})),
        random_(seed),
        plan_(std::move(plan)),
        words_(plan_.table.words()),
        parsed_(words_.data(), words_.size()) {
    for (int rank = 0; rank < parsed_.num_ranks(); ++rank) {
      streams_.push_back(driver.add_device());
      for (int leaf : plan_.table.leaf_template) {
        src_[rank].emplace_back(plan_.src_bytes[leaf][rank]);
        dst_[rank].emplace_back(plan_.dst_bytes[leaf][rank]);
      }
    }
  }

  // A rank's program for each step of a call. XLA may reorder the chunks, on all devices alike. Ranks without a part in
  // it do nothing.
  void publish(uint32_t id, int rank) { publish_chunks(id, rank, chunks(2 * id)); }
  void publish_chunks(uint32_t id, int rank, const std::vector<int>& some) {
    if (!parsed_.sends(rank)) return;
    for (int chunk : some) {
      driver.enqueue(streams_[rank], [=] {
        each_leaf(chunk, [&](int leaf) {
          const Bytes bytes = made(id, leaf, rank);
          std::copy(bytes.begin(), bytes.end(), src_[rank][leaf].begin());
        });
      });
      std::vector<const void*> arrays;
      each_leaf(chunk, [&](int leaf) { arrays.push_back(src_[rank][leaf].data()); });
      exchange->publish(rank, chunk, arrays, streams_[rank]);
    }
  }
  void receive(uint32_t id, int rank) { receive_chunks(id, rank, chunks(2 * id + 1)); }
  void receive_chunks(uint32_t id, int rank, const std::vector<int>& some) {
    if (!parsed_.receives(rank)) return;
    for (int chunk : some) {
      driver.enqueue(streams_[rank], [=] { overwrite(dst_[rank], chunk); });
      std::vector<void*> arrays;
      each_leaf(chunk, [&](int leaf) { arrays.push_back(dst_[rank][leaf].data()); });
      exchange->receive(rank, chunk, arrays, streams_[rank]);
      ++chunks_to_check_;
      driver.enqueue(streams_[rank], [=] {
        check_arrived(id, rank, chunk);
        overwrite(dst_[rank], chunk);
      });
    }
  }
  void release(uint32_t, int rank) {
    if (!parsed_.sends(rank)) return;
    exchange->release(rank, parsed_.num_chunks(), streams_[rank]);
    driver.enqueue(streams_[rank], [=] {
      for (int chunk = 0; chunk < parsed_.num_chunks(); ++chunk) overwrite(src_[rank], chunk);
    });
  }

  // A whole call from one thread. In between the devices get on with about so many pieces of work at a time.
  void call(uint32_t id, int work) {
    CHECK(exchange->begin(id, kLong));
    int steps = 0;
    CHECK(exchange->steps_run(id) == steps);
    each_rank(work, [&](int rank) { publish(id, rank), steps += parsed_.sends(rank) ? parsed_.num_chunks() : 0; });
    CHECK(exchange->steps_run(id) == steps);
    each_rank(work, [&](int rank) { receive(id, rank), steps += parsed_.receives(rank) ? parsed_.num_chunks() : 0; });
    CHECK(exchange->steps_run(id) >= steps);
    each_rank(work, [&](int rank) { release(id, rank); });
    CHECK(exchange->steps_run(id) > steps);  // it has ended
  }
  // The same where each chunk is launched by itself.
  void call_in_parts(uint32_t id, int work) {
    CHECK(exchange->begin(id, kLong));
    for (int chunk = 0; chunk < parsed_.num_chunks(); ++chunk) {
      each_rank(work, [&](int rank) { publish_chunks(id, rank, {chunk}); });
      each_rank(work, [&](int rank) { receive_chunks(id, rank, {chunk}); });
    }
    each_rank(work, [&](int rank) { release(id, rank); });
  }
  void move(uint32_t id, int rank) { move_whole_or_in_parts(*this, id, rank, parsed_.num_chunks()); }

  void finish() {
    driver.run_all();
    CHECK(chunks_to_check_ == 0);
    CHECK(exchange->open_calls() == 0 && driver.contexts() == 0);
    for (const auto& arrays : dst_) {  // nothing came after it was looked for
      for (const Bytes& array : arrays) CHECK(array == Bytes(array.size(), kPoison));
    }
  }
  int ranks() const { return parsed_.num_ranks(); }

 private:
  template <typename Step>
  void each_rank(int work, Step step) {
    for (int rank : shuffled(ranks(), random_)) {
      step(rank);
      if (work) driver.run(random_() % work);
    }
  }
  static std::vector<int> shuffled(int count, std::mt19937& random) {
    std::vector<int> out(count);
    std::iota(out.begin(), out.end(), 0);
    std::shuffle(out.begin(), out.end(), random);
    return out;
  }
  std::vector<int> chunks(uint32_t seed) const {
    std::mt19937 random(seed);
    return shuffled(parsed_.num_chunks(), random);
  }
  template <typename Action>
  void each_leaf(int chunk, Action action) const {
    for (int leaf = parsed_.chunk_begin(chunk); leaf < parsed_.chunk_end(chunk); ++leaf) action(leaf);
  }
  Bytes made(uint32_t id, int leaf, int rank) const { return source_bytes(id, leaf, rank, src_[rank][leaf].size()); }
  void overwrite(std::vector<Bytes>& arrays, int chunk) const {
    each_leaf(chunk, [&](int leaf) { std::fill(arrays[leaf].begin(), arrays[leaf].end(), kPoison); });
  }
  void check_arrived(uint32_t id, int rank, int chunk) {
    bool equal = true;
    each_leaf(chunk, [&](int leaf) { equal &= dst_[rank][leaf] == expected_arrays(plan_, parsed_, id, leaf)[rank]; });
    CHECK(equal);
    --chunks_to_check_;
  }

  std::mt19937 random_;
  Plan plan_;
  Words words_;
  CopyPlan parsed_;
  std::vector<FakeDriver::Stream> streams_;
  std::vector<Bytes> src_[4], dst_[4];  // [rank][leaf]
  std::atomic<int> chunks_to_check_{0};
};

void test_random_plans() {
  for (uint32_t seed = 1; seed <= 60; seed += kSeedStride) {
    std::mt19937 random(seed);
    Transfers t(random_plan(random, 150), seed, seed % 2);
    // Launched while the devices stand still, or while they are more or less busy.
    for (uint32_t id = 1; id <= 4; ++id) {
      const int work = seed % 3 == 0 ? 0 : 1 << random() % 10;
      random() % 2 ? t.call(id, work) : t.call_in_parts(id, work);
    }
    t.finish();
  }
}

void test_events_and_streams_are_used_again() {
  Transfers t(every_kind_of_copy());
  t.call(1, 10);
  const int events = t.driver.calls("cuEventCreate"), streams = t.driver.calls("cuStreamCreate");
  CHECK(streams == 4);  // one for each pair
  for (uint32_t id = 2; id <= 1000; ++id) t.call(id, 40);
  CHECK(t.driver.calls("cuEventCreate") == events && t.driver.calls("cuStreamCreate") == streams);
  t.finish();
}

// Many copies from one source go by several streams, each to be waited for.
void test_lanes() {
  for (const auto& [leaves, streams] : {std::pair(7, 0), std::pair(15, 0), std::pair(16, 2), std::pair(100, 4)}) {
    for (uint32_t seed = 1; seed <= 6; ++seed) {
      Plan plan(leaves, {kSends, kReceives});
      plan.add_template();
      plan.add(0, 1, {{0, 0, 0, 0, 100, {}}, 100, 100});
      plan.add_template();
      plan.add(0, 1, {{0, 0, 0, 0, 3, {{2, 12, 10}, {2, 4, 5}}}, 24, 20});
      for (int leaf = 0; leaf < leaves; ++leaf) plan.table.leaf_template.push_back(leaf % 2);
      Transfers t(std::move(plan), seed, seed % 2);
      for (uint32_t id = 1; id <= 4; ++id) t.call(id, 30);
      t.finish();
      CHECK(t.driver.calls("cuStreamCreate") == streams);
    }
  }
}

void run_threads(int phases, uint32_t seeds, uint32_t calls) {
  for (uint32_t seed = 1; seed <= seeds; seed += kSeedStride) {
    std::mt19937 random(seed);
    Transfers t(random_plan(random, 12, phases), seed);
    for (uint32_t id = 1; id <= calls; ++id) CHECK(t.exchange->begin(id, kLong));
    std::vector<std::thread> devices;
    for (int rank = 0; rank < t.ranks(); ++rank) {
      devices.emplace_back([&t, rank, calls] {
        for (uint32_t id = 1; id <= calls; ++id) {
          t.move(id, rank);
          t.driver.run(id % 16);
          t.release(id, rank);
        }
        CHECK(t.driver.contexts() == 0);
      });
    }
    for (std::thread& device : devices) device.join();
    t.finish();
  }
}

void test_each_device_has_a_thread() { run_threads(1, 8, 30); }
void test_phases() {
  run_threads(2, 30, 8);
  run_threads(4, 15, 8);
}

// Three receivers of which each passes on a part of what it got.
Plan ring() {
  Plan plan(2, {kSends, kReceives, kReceives, kReceives});
  plan.add_template();
  for (int dst : {1, 2, 3}) plan.add(0, dst, {{0, 0, 0, 0, 4, {}}, 4, 4});
  for (int dst : {1, 2, 3}) plan.forward(1, dst % 3 + 1, dst, {{0, 0, 0, 0, 4, {}}, 4, 4}, 4);
  plan.table.leaf_template = {0, 0, 0};
  return plan;
}

// Every call to the driver fails once: all devices hear of it, wherever they are, and none waits for ever.
void test_failures_in_phases() {
  int failures = 0;
  for (const std::string function : {"cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync"}) {
    bool reached = true;
    for (int n = 0; reached; ++n) {
      Transfers t(ring(), n + 1, false);
      t.driver.fail(function, n);
      CHECK(t.exchange->begin(1, kLong));
      std::string errors[4];
      std::vector<std::thread> devices;
      for (int rank = 0; rank < 4; ++rank) {
        devices.emplace_back([&, rank] {
          errors[rank] = error_of([&] {
            t.publish(1, rank);
            t.receive(1, rank);
            t.release(1, rank);
          });
        });
      }
      for (std::thread& device : devices) device.join();
      reached = std::any_of(errors, errors + 4, [](const std::string& error) { return !error.empty(); });
      failures += reached;
      for (const std::string& error : errors) {
        CHECK(error.empty() || error == "jreshard: " + function + " failed: as told (700)");
      }
      CHECK(t.exchange->open_calls() == 0);
      t.driver.run_all();
    }
  }
  CHECK(failures > 20);
}

void test_timeouts_in_phases_name_the_missing() {
  for (const int absent : {2, 3}) {
    Transfers t(ring());
    CHECK(t.exchange->begin(1, 0.5));
    t.publish(1, 0);
    std::thread other;
    if (absent == 3) other = std::thread([&] { error_of([&] { t.receive(1, 2); }); });
    const std::string text = error_of([&] { t.receive(1, 1); });  // reads from 2, is read by 3
    if (other.joinable()) other.join();
    CHECK(contains(text, "jreshard: transfer timed out after 0.5"));
    CHECK(
        contains(text, absent == 2 ? "waiting for device 2, device 3 to receive" : "waiting for device 3 to receive"));
    t.driver.run_all();
  }
}

// Whatever the driver refuses, in any of the steps: the call fails with it on all ranks, and so do further ones.
void test_failures_of_the_driver() {
  int failures = 0;
  for (const std::string function :
       {"cuStreamGetCtx", "cuCtxPushCurrent", "cuStreamCreate", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent",
        "cuMemcpyAsync", "cuMemcpy2DAsync", "cuMemcpy3DAsync", "cuMemcpyBatchAsync"}) {
    bool reached = true;
    for (int n = 0; reached; ++n) {
      Transfers t(every_kind_of_copy(), n + 1, function != "cuMemcpyAsync");
      t.driver.fail(function, n);
      CHECK(t.exchange->begin(1, kLong));
      std::string text;
      for (auto step : {&Transfers::publish, &Transfers::receive, &Transfers::release}) {
        for (int rank = 0; rank < t.ranks(); ++rank) {
          const bool takes_part = (step == &Transfers::receive) == (rank >= 2);
          const std::string error = error_of([&] { (t.*step)(1, rank); });
          if (text.empty()) text = error;
          if (takes_part) CHECK_TEXT(error, text);
        }
      }
      reached = !text.empty();
      failures += reached;
      if (reached) CHECK_TEXT(text, "jreshard: " + function + " failed: as told (700)");
      CHECK(t.exchange->begin(2, kLong) != reached);
      if (!reached) t.exchange->abort(2, "over");
      CHECK(t.exchange->open_calls() == 0 && t.driver.contexts() == 0);
      t.driver.run_all();  // nobody is left waiting in a circle
    }
  }
  CHECK(failures > 100);
}

void test_timeouts_name_the_missing() {
  const auto start = std::chrono::steady_clock::now();
  for (const bool published : {false, true}) {
    Transfers t(every_kind_of_copy());
    CHECK(t.exchange->begin(1, kShort));
    t.publish(1, 0);
    if (published) t.publish(1, 1), t.receive(1, 2);
    const std::string text = error_of([&] { published ? t.release(1, 0) : t.receive(1, 2); });
    CHECK(contains(text, "jreshard: transfer timed out after 0.05"));
    CHECK(contains(text, published ? "waiting for device 3 to receive" : "waiting for device 1 to publish"));
    CHECK_TEXT(error_of([&] { t.receive(1, 3); }), text);
    CHECK_TEXT(error_of([&] { t.release(1, 1); }), text);
    CHECK(!t.exchange->begin(2, kLong) && t.exchange->open_calls() == 0);
    t.driver.run_all();
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
}

// Nobody waits on the host: the call ends at its deadline all the same, and so do launches that a device holds up.
void test_calls_that_nobody_waits_for() {
  Transfers t(every_kind_of_copy());
  t.driver.full_queues_hold_up = true;
  t.driver.queue_limit = 2;
  CHECK(t.exchange->begin(1, 1));
  std::string text;
  std::thread launching([&] { text = error_of([&] { t.publish(1, 0), t.publish(1, 1), t.receive(1, 2); }); });
  for (int ms = 0; ms < 60'000 && t.exchange->open_calls() > 0; ++ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(t.exchange->open_calls() == 0 && t.driver.held_up() == 1);
  t.driver.queue_limit = size_t(-1);
  t.driver.run(1 << 30);  // makes room: the launch goes on
  launching.join();
  CHECK_TEXT(text, "jreshard: transfer timed out after 1 s, waiting for device 0, device 1 to publish");
  t.driver.run_all();
}

void test_aborts_reach_those_who_wait() {
  for (const bool all : {false, true}) {
    Transfers t(every_kind_of_copy());
    CHECK_TEXT(error_of([&] { t.publish(1, 0); }), "jreshard: this transfer is not under way");
    CHECK(t.exchange->begin(1, kLong) && t.exchange->begin(2, kLong));
    CHECK(t.exchange->open_calls() == 2);
    std::thread device([&] { CHECK_TEXT(error_of([&] { t.receive(1, 2); }), "enough"); });
    std::this_thread::sleep_for(std::chrono::duration<double>(kShort));
    all ? t.exchange->abort_all("enough") : t.exchange->abort(1, "enough");
    device.join();
    CHECK(t.exchange->open_calls() == (all ? 0 : 1) && !t.exchange->begin(3, kLong));
    t.exchange->abort(2, "over");
  }
}

// Copies between arrays too large for a test: what is enqueued is noted down only.
void test_what_the_copy_engine_is_asked() {
  constexpr int64_t kMax = 0x7FFFFFFF, kHuge = int64_t{1} << 40;
  const struct {
    std::vector<jreshard::Dim> dims;
    std::string function;
    int calls;
  } cases[] = {{{}, "cuMemcpyAsync", 1},
               {{{3, 8, 9}}, "cuMemcpy2DAsync", 1},
               {{{3, kMax, 8}}, "cuMemcpy2DAsync", 1},
               {{{3, 8, kMax + 1}}, "cuMemcpyAsync", 3},
               {{{3, kMax + 1, 8}}, "cuMemcpyAsync", 3},
               {{{3, 24, 32}, {2, 8, 16}}, "cuMemcpy3DAsync", 1},
               {{{3, kHuge, 3 * kHuge}, {2, 8, 16}}, "cuMemcpy3DAsync", 1},
               {{{3, 25, 32}, {2, 8, 16}}, "cuMemcpy2DAsync", 3},
               {{{3, 24, 33}, {2, 8, 16}}, "cuMemcpy2DAsync", 3},
               {{{3, 3 * kHuge, 32}, {2, kHuge, 16}}, "cuMemcpyAsync", 6},
               {{{2, 2 * kHuge, 999}, {2, kHuge, 99}, {2, 24, 32}, {2, 8, 16}}, "cuMemcpy3DAsync", 4}};
  for (const auto& c : cases) {
    FakeDriver driver(1);
    driver.only_note = true;
    const auto stream = driver.add_device();
    const jreshard::cuda::CurrentContext context(driver.table(), stream);
    jreshard::CopyBatch batch(driver.table());
    const Copy copy{0, 1, 100, 200, 7, c.dims};
    batch.add(copy, nullptr, nullptr);
    batch.enqueue(stream);
    batch.enqueue(stream);  // of what was enqueued nothing is left
    std::vector<FakeDriver::Row> rows;
    for_each_run(copy, [&](uint64_t src, uint64_t dst) { rows.push_back({dst, src, 7}); });
    CHECK(driver.noted_rows == rows);
    CHECK((driver.noted_calls == std::map<std::string, int>{{c.function, c.calls}}));
  }
  for (const bool has_batch : {false, true}) {
    FakeDriver driver(1, has_batch);
    driver.only_note = true;
    const auto stream = driver.add_device();
    const jreshard::cuda::CurrentContext context(driver.table(), stream);
    jreshard::CopyBatch batch(driver.table());
    for (int64_t i : {0, 1, 2}) batch.add({0, 1, 10 * i, 20 * i, 5, {}}, nullptr, nullptr);
    batch.enqueue(stream);
    CHECK((driver.noted_rows == std::vector<FakeDriver::Row>{{0, 0, 5}, {20, 10, 5}, {40, 20, 5}}));
    CHECK(driver.calls("cuMemcpyBatchAsync") == (has_batch ? 1 : 0));
  }
}

}  // namespace

int main() {
  return run_tests({
      {"random_plans", test_random_plans},
      {"events_and_streams_are_used_again", test_events_and_streams_are_used_again},
      {"lanes", test_lanes},
      {"each_device_has_a_thread", test_each_device_has_a_thread},
      {"phases", test_phases},
      {"failures_in_phases", test_failures_in_phases},
      {"timeouts_in_phases_name_the_missing", test_timeouts_in_phases_name_the_missing},
      {"failures_of_the_driver", test_failures_of_the_driver},
      {"timeouts_name_the_missing", test_timeouts_name_the_missing},
      {"calls_that_nobody_waits_for", test_calls_that_nobody_waits_for},
      {"aborts_reach_those_who_wait", test_aborts_reach_those_who_wait},
      {"what_the_copy_engine_is_asked", test_what_the_copy_engine_is_asked},
  });
}
