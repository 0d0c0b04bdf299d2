// Tests of the native core without XLA: the table of copies, the copies themselves, and the life of a call.
// Meant to run under AddressSanitizer and ThreadSanitizer; memory is overwritten as soon as a callback says that it may
// be, so that a core which still used it would be caught.
#include "host_exchange.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "copy_plan.h"
#include "copy_table.h"
#include "strided_copy.h"

using jreshard::Copy;
using jreshard::CopyPlan;
using jreshard::Dim;
using jreshard::HostExchange;

namespace {

// Two senders with one array of 8 bytes each, of which two receivers take four bytes from either.
Table two_to_two() {
  return {1,
          {kSends, kSends, kReceives, kReceives},
          {0},
          {{{0, 2, 0, 0, 4, {}}, {1, 2, 0, 4, 4, {}}, {0, 3, 4, 0, 4, {}}, {1, 3, 4, 4, 4, {}}}}};
}

std::string parse_error(const Words& words) {
  try {
    CopyPlan plan(words.data(), words.size());
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

void test_table_is_read() {
  const Words words = two_to_two().words();
  const CopyPlan plan(words.data(), words.size());
  CHECK(plan.num_ranks() == 4 && plan.num_leaves() == 1 && plan.num_chunks() == 1);
  CHECK(plan.sends(1) && !plan.receives(1) && plan.receives(2) && !plan.sends(2));
  CHECK((plan.sources(0, 3) == std::vector<int>{0, 1}) && plan.sources(0, 0).empty());
  CHECK(plan.num_readers(0) == 2 && plan.num_readers(2) == 0);
  const auto copies = plan.copies(0, 3);
  CHECK(copies.end() - copies.begin() == 2 && copies.begin()->src_rank == 0 && copies.begin()->src_offset == 4);
}

void test_bad_tables_are_refused() {
  const Words good = two_to_two().words();
  CHECK_TEXT(parse_error(good), "");
  for (size_t length = 0; length < good.size(); ++length) {
    CHECK(!parse_error(Words(good.begin(), good.begin() + length)).empty());
  }
  Words longer = good;
  longer.push_back(0);
  CHECK_TEXT(parse_error(longer), "the table of copies has words left over");
  // Negative and absurd words never parse, whatever they stand for, and never ask for memory that is not there.
  for (size_t at = 0; at < good.size(); ++at) {
    for (int64_t value : {int64_t{-1}, INT64_MIN, INT64_MAX}) {
      Words bad = good;
      bad[at] = value;
      CHECK(!parse_error(bad).empty());
    }
  }
  const size_t first_copy = 4 + 4 + 1 + 1 + 1;
  const struct {
    size_t at;
    int64_t value;
    std::string what;
  } faults[] = {{0, 0, "number of ranks: 0"},
                {3, 0, "number of chunks: 0"},
                {3, 2, "number of chunks: 2"},
                {4, 4, "role: 4"},
                {8, 0, "end of a chunk: 0"},
                {8, 2, "end of a chunk: 2"},
                {9, 1, "template: 1"},
                {first_copy, 4, "source rank: 4"},
                {first_copy + 1, 4, "destination rank: 4"},
                {first_copy + 2, 16, "phase: 16"},
                {first_copy + 5, 0, "run length: 0"},
                {first_copy + 6, 64, "number of dims: 64"}};
  for (const auto& fault : faults) {
    Words bad = good;
    bad[fault.at] = fault.value;
    CHECK_TEXT(parse_error(bad), "the table of copies has a bad " + fault.what);
  }
}

void test_strided_copies() {
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 10; ++repeat) {
    for (int64_t run = 1; run <= 100; ++run) {
      const StridedBox box = random_box(random, run);
      Bytes src(box.src_bytes), expected(box.dst_bytes, kPoison), dst = expected;
      for (uint8_t& byte : src) byte = random();
      copy_naively(box.copy, src, expected);

      // In up to four pieces: rows cut at any place, each part's rows at any byte.
      auto cut = [&](int64_t size) { return std::uniform_int_distribution<int64_t>(0, size)(random); };
      const int64_t rows = box.copy.rows(), row = cut(rows);
      const int64_t parts[2][2] = {{0, row}, {row, rows}};
      for (const auto& [begin, end] : parts) {
        const int64_t byte = cut(run);
        auto copy = [&, begin = begin, end = end](int64_t from, int64_t to) {
          const auto* from_shard = reinterpret_cast<const char*>(src.data());
          copy_rows(box.copy, from_shard, reinterpret_cast<char*>(dst.data()), begin, end, from, to);
        };
        if (byte > 0) copy(0, byte);
        if (byte < run) copy(byte, run);
      }
      CHECK(dst == expected);
    }
  }
}

// The arrays of one leaf and rank in a two_to_two() call, and the outcomes of its steps.
struct TwoToTwo {
  Bytes src[2] = {{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}};
  Bytes dst[2] = {Bytes(8, kPoison), Bytes(8, kPoison)};
  Outcome received[2], released[2];
  std::shared_ptr<HostExchange> exchange = two_to_two().exchange<HostExchange>();

  std::string publish(int i, uint32_t call = 1) { return exchange->publish(call, i, 0, {src[i].data()}); }
  void receive(int i, uint32_t call = 1) { exchange->receive(call, 2 + i, 0, {dst[i].data()}, received[i].callback()); }
  void release(int i, uint32_t call = 1) { exchange->release(call, i, released[i].callback()); }
  bool arrived() const {
    return dst[0] == Bytes{0, 1, 2, 3, 8, 9, 10, 11} && dst[1] == Bytes{4, 5, 6, 7, 12, 13, 14, 15};
  }
};

void test_every_order_of_the_steps() {
  // Steps 0 and 1 publish, 2 and 3 receive, 4 and 5 release.
  std::vector<int> order(6);
  std::iota(order.begin(), order.end(), 0);
  do {
    TwoToTwo t;
    CHECK(t.exchange->begin(1, kLong));
    bool done[6] = {};
    for (int step : order) {
      if (step < 2) CHECK(t.publish(step).empty());
      if (step >= 2 && step < 4) t.receive(step - 2);
      if (step >= 4) t.release(step - 4);
      done[step] = true;
      const bool published = done[0] && done[1];
      for (int i : {0, 1}) {
        CHECK(t.received[i].open() == !(published && done[2 + i]));
        CHECK(t.released[i].open() == !(published && done[2] && done[3] && done[4 + i]));
      }
    }
    CHECK(t.arrived());
    for (int i : {0, 1}) {
      CHECK_TEXT(t.received[i].wait(), "");
      CHECK_TEXT(t.released[i].wait(), "");
      CHECK(t.received[i].calls() == 1 && t.released[i].calls() == 1);
    }
    CHECK(t.exchange->open_calls() == 0);
  } while (std::next_permutation(order.begin(), order.end()));
}

void test_leaves_without_copies() {
  // Zero-sized arrays: nobody reads anything, and nobody waits.
  const Table table{2, {kSends, kReceives}, {0, 0, 0}, {{}}};
  auto exchange = table.exchange<HostExchange>();
  CHECK(exchange->begin(1, kLong));
  Outcome received[2], released;
  exchange->release(1, 0, released.callback());
  exchange->receive(1, 1, 0, {nullptr, nullptr}, received[0].callback());
  exchange->receive(1, 1, 1, {nullptr}, received[1].callback());
  for (Outcome* outcome : {&received[0], &received[1], &released}) CHECK_TEXT(outcome->wait(), "");
  CHECK(exchange->open_calls() == 0);
}

void test_call_ids() {
  TwoToTwo t;
  const std::string unknown = "jreshard: this transfer is not under way (call 1)";
  CHECK_TEXT(t.publish(0), unknown);
  CHECK(t.exchange->begin(1, kLong));
  CHECK(!t.exchange->begin(1, kLong));
  CHECK(t.exchange->begin(2, kLong));
  CHECK(t.exchange->open_calls() == 2);
  for (int i : {0, 1}) t.publish(i), t.receive(i), t.release(i);
  CHECK(t.arrived() && t.exchange->open_calls() == 1);
  CHECK_TEXT(t.publish(0), unknown);
  t.exchange->abort(1, "nobody is there to hear this");
  t.exchange->abort(2, "enough");
  CHECK(t.exchange->begin(1, kLong));  // an id is free again once its call has ended
  t.exchange->abort(1, "enough");
  CHECK(t.exchange->open_calls() == 0);
}

void test_release_of_all_at_once() {
  TwoToTwo t;
  CHECK(!t.exchange->release_now(1));
  CHECK(t.exchange->begin(1, kLong));
  for (int i : {0, 1}) {
    CHECK(!t.exchange->release_now(1));
    t.publish(i);
    t.receive(i);
  }
  CHECK(t.arrived());
  CHECK(t.exchange->release_now(1));
  CHECK(t.exchange->open_calls() == 0);

  CHECK(t.exchange->begin(2, kLong));
  t.exchange->abort(2, "enough");
  CHECK(!t.exchange->release_now(2));
}

void test_steps_that_do_not_fit_the_plan() {
  TwoToTwo t;
  CHECK(t.exchange->begin(1, kLong));
  const std::string no_part = "jreshard: a program ran on a device that its plan does not use";
  const std::string no_fit = "jreshard: a program does not fit its plan";
  Outcome outcomes[3];
  CHECK_TEXT(t.exchange->publish(1, 2, 0, {nullptr}), no_part);
  CHECK_TEXT(t.exchange->publish(1, 0, 1, {nullptr}), no_fit);
  CHECK_TEXT(t.exchange->publish(1, 0, -1, {nullptr}), no_fit);
  CHECK_TEXT(t.exchange->publish(1, 0, 0, {nullptr, nullptr}), no_fit);
  t.exchange->receive(1, 0, 0, {nullptr}, outcomes[0].callback());
  t.exchange->receive(1, 2, 0, {}, outcomes[1].callback());
  t.exchange->release(1, 2, outcomes[2].callback());
  CHECK_TEXT(outcomes[0].wait(), no_part);
  CHECK_TEXT(outcomes[1].wait(), no_fit);
  CHECK_TEXT(outcomes[2].wait(), no_part);
  CHECK_TEXT(t.publish(0), "");
  CHECK_TEXT(t.publish(0), "jreshard: a source was published twice");

  t.publish(1);
  for (int i : {0, 1}) t.receive(i);
  CHECK(t.arrived());  // the call itself is none the worse
  CHECK(t.exchange->release_now(1));
}

void test_timeouts_name_the_missing() {
  TwoToTwo t;
  CHECK(t.exchange->begin(1, kShort));
  CHECK(t.publish(0).empty());
  t.receive(1);
  t.release(0);
  const std::string expected =
      "jreshard: transfer timed out after 0.05 s; source not published by device 1; destination not started on device "
      "2";
  CHECK_TEXT(t.received[1].wait(), expected);
  CHECK_TEXT(t.released[0].wait(), expected);
  // Whoever comes late hears the same, and nothing is written any more.
  CHECK_TEXT(t.publish(1), expected);
  t.receive(0);
  t.release(1);
  CHECK_TEXT(t.received[0].wait(), expected);
  CHECK_TEXT(t.released[1].wait(), expected);
  CHECK(t.dst[0] == Bytes(8, kPoison) && t.dst[1] == Bytes(8, kPoison));
  CHECK(t.exchange->open_calls() == 0);

  CHECK(t.exchange->begin(2, kLong));  // the exchange is as good as new
  Outcome again[2];
  for (int i : {0, 1}) {
    CHECK(t.publish(i, 2).empty());
    t.exchange->receive(2, 2 + i, 0, {t.dst[i].data()}, again[i].callback());
  }
  for (Outcome& outcome : again) CHECK_TEXT(outcome.wait(), "");
  CHECK(t.arrived());
  t.exchange->abort(2, "over");
}

void test_deadlines_fire_in_order_and_only_once() {
  TwoToTwo t;
  for (uint32_t call : {1u, 2u, 3u}) CHECK(t.exchange->begin(call, call == 2 ? kShort : kLong));
  t.receive(0, 2);
  CHECK(t.received[0].wait().find("timed out after 0.05 s") != std::string::npos);
  CHECK(t.exchange->open_calls() == 2);
  for (uint32_t call : {1u, 3u}) t.exchange->abort(call, "over");
}

void test_absurdly_long_timeouts() {
  TwoToTwo t;
  CHECK(t.exchange->begin(1, 1e300));
  t.receive(0);
  std::this_thread::sleep_for(std::chrono::duration<double>(kShort));
  CHECK(t.received[0].open());
  t.exchange->abort(1, "over");
}

// One byte copied many times over to each byte of the destination, a task each: much time, little memory. A second
// receiver waits for a source that never comes.
constexpr int64_t kSlowBytes = 1024;

Table slow_copy() {
  const std::vector<Dim> dims{{kSlowBytes, 0, 1}, {4 << 20, 0, 0}};
  return {1, {kSends, kSends, kReceives, kReceives}, {0}, {{{0, 2, 0, 0, 1, dims}, {1, 3, 0, 0, 1, {}}}}};
}

void check_failure_while_copying(double timeout_s, const std::string& expected) {
  auto exchange = slow_copy().exchange<HostExchange>();
  CHECK(exchange->begin(1, timeout_s));
  // Plain bytes: what a callback allows to be overwritten is overwritten in it, for ThreadSanitizer to see.
  uint8_t src = 1;
  Bytes dst(kSlowBytes);
  const Bytes poisoned(kSlowBytes, kPoison);
  Outcome copied, waiting, released, late;
  CHECK(exchange->publish(1, 0, 0, {&src}).empty());
  exchange->receive(1, 3, 0, {nullptr}, waiting.callback());
  exchange->release(1, 0, [&](const std::string* error) {
    src = kPoison;
    released.callback()(error);
  });
  exchange->receive(1, 2, 0, {dst.data()}, [&](const std::string* error) {
    std::copy(poisoned.begin(), poisoned.end(), dst.begin());
    copied.callback()(error);
  });
  if (timeout_s == kLong) exchange->abort(1, expected);
  CHECK(waiting.wait() == copied.wait() && copied.wait() == released.wait());
  CHECK(copied.wait().find(expected) != std::string::npos);
  exchange->release(1, 1, late.callback());
  CHECK_TEXT(late.wait(), copied.wait());
  std::this_thread::sleep_for(std::chrono::duration<double>(kShort));
  CHECK(dst == poisoned);  // as it would not stay under a copy that had gone on
  CHECK(exchange->open_calls() == 0);
}

void test_abort_while_copying() { check_failure_while_copying(kLong, "the source failed"); }

void test_timeout_while_copying() { check_failure_while_copying(kShort, "source not published by device 1"); }

// Calls among ranks some of which send and receive: square leaves of given sizes, whose rows are cut over the senders
// and whose columns over the receivers; every part of the destination has two replicas.
class Reshard {
 public:
  static constexpr int kSenders = 4, kReceivers = 3, kReplicas = 2, kFirstReceiver = 2;
  static constexpr int kRanks = kFirstReceiver + kReceivers * kReplicas;
  static constexpr int kChunk = 2;

  explicit Reshard(std::vector<int64_t> sizes) : sizes_(std::move(sizes)) {
    for (int64_t size : sizes_) table_.templates.push_back(copies(size));
    for (size_t leaf = 0; leaf < sizes_.size(); ++leaf) table_.leaf_template.push_back(leaf);
    for (int rank = 0; rank < kRanks; ++rank) {
      table_.roles.push_back((rank < kSenders ? kSends : 0) | (rank >= kFirstReceiver ? kReceives : 0));
    }
    table_.chunk = kChunk;
    exchange_ = table_.exchange<HostExchange>();
  }

  int chunks() const { return exchange_->plan().num_chunks(); }
  int leaves() const { return sizes_.size(); }
  HostExchange& exchange() { return *exchange_; }

  // The arrays of one call. Sources are overwritten as soon as they are released.
  struct Call {
    uint32_t id = 0;
    std::vector<Bytes> src[kRanks], dst[kRanks];  // [rank][leaf]
    std::atomic<int> left{0};
    std::mutex mutex;
    std::condition_variable ended;

    HostExchange::Done then(std::function<void()> action = {}) {
      return [this, action = std::move(action)](const std::string* error) {
        if (error) check(false, *error, __FILE__, __LINE__);
        if (action) action();
        std::lock_guard<std::mutex> lock(mutex);
        if (--left == 0) ended.notify_all();
      };
    }
    void wait() {
      std::unique_lock<std::mutex> lock(mutex);
      CHECK(ended.wait_for(lock, std::chrono::seconds(60), [this] { return left == 0; }));
    }
  };

  void begin(Call& call, uint32_t id) {
    call.id = id;
    call.left = kSenders + kReceivers * kReplicas * chunks();
    for (int rank = 0; rank < kRanks; ++rank) {
      call.src[rank].resize(leaves());
      call.dst[rank].resize(leaves());
      for (int leaf = 0; leaf < leaves(); ++leaf) {
        const int64_t size = sizes_[leaf];
        if (rank < kSenders) fill_source(call.src[rank][leaf], id, leaf, rank);
        if (rank >= kFirstReceiver) call.dst[rank][leaf].assign(size * size / kReceivers, kPoison);
      }
    }
    CHECK(exchange_->begin(id, kLong));
  }

  // All that one device's programs would do, in the order in which they are dispatched, on the calling thread.
  void run_sender(Call& call, int rank) {
    for (int chunk = 0; chunk < chunks(); ++chunk) {
      std::vector<const void*> arrays;
      for (int leaf = first(chunk); leaf < last(chunk); ++leaf) arrays.push_back(call.src[rank][leaf].data());
      CHECK_TEXT(exchange_->publish(call.id, rank, chunk, arrays), "");
    }
    auto overwrite = [&call, rank] {
      for (Bytes& array : call.src[rank]) std::fill(array.begin(), array.end(), kPoison);
    };
    exchange_->release(call.id, rank, call.then(overwrite));
  }
  void run_receiver(Call& call, int rank) {
    for (int chunk = 0; chunk < chunks(); ++chunk) {
      std::vector<void*> arrays;
      for (int leaf = first(chunk); leaf < last(chunk); ++leaf) arrays.push_back(call.dst[rank][leaf].data());
      exchange_->receive(call.id, rank, chunk, arrays, call.then());
    }
  }

  void check_arrived(const Call& call) const {
    for (int rank = kFirstReceiver; rank < kRanks; ++rank) {
      const int64_t part = (rank - kFirstReceiver) % kReceivers;
      for (int leaf = 0; leaf < leaves(); ++leaf) {
        const int64_t size = sizes_[leaf], columns = size / kReceivers;
        bool equal = true;
        for (int64_t i = 0; i < size * columns; ++i) {
          const int64_t row = i / columns, column = part * columns + i % columns;
          equal &= call.dst[rank][leaf][i] == byte_at(call.id, leaf, row * size + column);
        }
        CHECK(equal);
      }
    }
  }

 private:
  // Sources hold rows, destinations columns of a `size` x `size` array of bytes.
  static std::vector<Copy> copies(int64_t size) {
    std::vector<Copy> out;
    const int64_t rows = size / kSenders, columns = size / kReceivers;
    for (int src = 0; size && src < kSenders; ++src) {
      for (int dst = 0; dst < kReceivers * kReplicas; ++dst) {
        const int64_t part = dst % kReceivers;
        const Dim dim{rows, size, columns};
        out.push_back({src, kFirstReceiver + dst, part * columns, src * rows * columns, columns, {dim}});
      }
    }
    return out;
  }
  void fill_source(Bytes& array, uint32_t call, int leaf, int rank) const {
    const int64_t count = sizes_[leaf] * sizes_[leaf] / kSenders;
    array.resize(count);
    for (int64_t i = 0; i < count; ++i) array[i] = byte_at(call, leaf, rank * count + i);
  }
  int first(int chunk) const { return exchange_->plan().chunk_begin(chunk); }
  int last(int chunk) const { return exchange_->plan().chunk_end(chunk); }

  std::vector<int64_t> sizes_;
  Table table_;
  std::shared_ptr<HostExchange> exchange_;
};

// Two calls are in flight at any time; every device has a thread of its own for each of its roles.
void run_calls(uint32_t count, const std::vector<int64_t>& sizes) {
  Reshard reshard(sizes);
  Reshard::Call calls[2];
  std::mutex mutex;
  std::condition_variable begun;
  uint32_t last_begun = 0;

  auto device = [&](void (Reshard::*run)(Reshard::Call&, int), int rank) {
    for (uint32_t id = 1; id <= count; ++id) {
      {
        std::unique_lock<std::mutex> lock(mutex);
        begun.wait(lock, [&] { return last_begun >= id; });
      }
      (reshard.*run)(calls[id % 2], rank);
    }
  };
  std::vector<std::thread> devices;
  for (int rank = 0; rank < Reshard::kRanks; ++rank) {
    if (rank < Reshard::kSenders) devices.emplace_back(device, &Reshard::run_sender, rank);
    if (rank >= Reshard::kFirstReceiver) devices.emplace_back(device, &Reshard::run_receiver, rank);
  }
  for (uint32_t id = 1; id <= count + 2; ++id) {
    Reshard::Call& call = calls[id % 2];
    if (id > 2) {
      call.wait();
      reshard.check_arrived(call);
    }
    if (id > count) continue;
    reshard.begin(call, id);
    std::lock_guard<std::mutex> lock(mutex);
    last_begun = id;
    begun.notify_all();
  }
  for (std::thread& thread : devices) thread.join();
  CHECK(reshard.exchange().open_calls() == 0);
}

void test_many_calls_from_many_threads() { run_calls(1000, {12, 0, 48, 12, 24, 36}); }

void test_calls_big_enough_for_the_workers() { run_calls(4, {3600, 12, 2400}); }

// Calls that are aborted at any moment while their devices come and go: everyone hears of it, once.
void test_aborts_at_any_moment() {
  constexpr uint32_t kCalls = 200;
  std::mt19937 random(2);
  for (uint32_t id = 1; id <= kCalls; ++id) {
    TwoToTwo t;
    CHECK(t.exchange->begin(id, kLong));
    std::vector<std::thread> devices;
    for (int i : {0, 1}) {
      devices.emplace_back([&t, i, id] {
        t.publish(i, id);
        t.release(i, id);
      });
      devices.emplace_back([&t, i, id] { t.receive(i, id); });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    t.exchange->abort(id, "enough");
    for (std::thread& thread : devices) thread.join();
    for (Outcome* outcome : {&t.received[0], &t.received[1], &t.released[0], &t.released[1]}) {
      const std::string text = outcome->wait();
      CHECK(text.empty() || text == "enough");
      CHECK(outcome->calls() == 1);
    }
    CHECK(t.exchange->open_calls() == 0);
  }
}

}  // namespace

int main() {
  return run_tests({
      {"table_is_read", test_table_is_read},
      {"bad_tables_are_refused", test_bad_tables_are_refused},
      {"strided_copies", test_strided_copies},
      {"every_order_of_the_steps", test_every_order_of_the_steps},
      {"leaves_without_copies", test_leaves_without_copies},
      {"call_ids", test_call_ids},
      {"release_of_all_at_once", test_release_of_all_at_once},
      {"steps_that_do_not_fit_the_plan", test_steps_that_do_not_fit_the_plan},
      {"timeouts_name_the_missing", test_timeouts_name_the_missing},
      {"deadlines_fire_in_order_and_only_once", test_deadlines_fire_in_order_and_only_once},
      {"absurdly_long_timeouts", test_absurdly_long_timeouts},
      {"abort_while_copying", test_abort_while_copying},
      {"timeout_while_copying", test_timeout_while_copying},
      {"many_calls_from_many_threads", test_many_calls_from_many_threads},
      {"calls_big_enough_for_the_workers", test_calls_big_enough_for_the_workers},
      {"aborts_at_any_moment", test_aborts_at_any_moment},
  });
}
