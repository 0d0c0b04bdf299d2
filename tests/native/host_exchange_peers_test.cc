// Tests of transfers between processes. Mostly the "processes" are several exchanges in this one, linked by sockets, so
// that their steps can be put in any order; the last tests start a second process in truth.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "copy_table.h"
#include "host_exchange.h"
#include "peers.h"
#include "sockets.h"

using jreshard::Copy;
using jreshard::CopyPlan;
using jreshard::Descriptor;
using jreshard::HostExchange;
using jreshard::Message;
using jreshard::Peers;
using jreshard::ProcessMap;

namespace {

constexpr int64_t kKey = 77;

std::string process_name(int process) { return "process " + std::to_string(process); }

void link(Peers& a, Peers& b) {
  auto [to_b, to_a] = socket_pair();
  a.connect(b.self(), std::move(to_b), process_name(b.self()));
  b.connect(a.self(), std::move(to_a), process_name(a.self()));
}

template <typename Ready>
bool eventually(Ready ready) {
  for (int i = 0; i < 60'000 && !ready(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return ready();
}

void settle() { std::this_thread::sleep_for(std::chrono::duration<double>(kShort)); }

// Several processes with an exchange each for the same table.
struct Cluster {
  std::vector<int> process_of;
  std::vector<std::shared_ptr<Peers>> peers;
  std::vector<std::shared_ptr<HostExchange>> exchanges;

  Cluster(const Table& table, std::vector<int> processes) : process_of(std::move(processes)) {
    const int count = 1 + *std::max_element(process_of.begin(), process_of.end());
    for (int process = 0; process < count; ++process) {
      peers.push_back(std::make_shared<Peers>(process));
      for (int other = 0; other < process; ++other) link(*peers[process], *peers[other]);
      exchanges.push_back(table.exchange<HostExchange>(ProcessMap{kKey, process_of, peers.back()}));
    }
  }
  ~Cluster() {
    for (int process = 0; process < int(peers.size()); ++process) leave(process);
  }
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  HostExchange& of(int rank) { return *exchanges[process_of[rank]]; }
  void begin(uint32_t call, double timeout_s = kLong) {
    for (auto& exchange : exchanges) CHECK(exchange->begin(call, timeout_s));
  }
  // The process is no longer linked to anybody, as if it had ended.
  void leave(int process) {
    for (int other = 0; other < int(peers.size()); ++other) peers[process]->disconnect(other);
  }
  bool idle() {
    return eventually([&] {
      return std::all_of(exchanges.begin(), exchanges.end(), [](auto& exchange) { return !exchange->open_calls(); });
    });
  }
};

// Two senders with one array of 8 bytes each, of which two receivers take four bytes from either. Ranks 0 and 2 live in
// process 0, ranks 1 and 3 in process 1, unless told otherwise.
struct TwoToTwo {
  static Table table() {
    return {1,
            {kSends, kSends, kReceives, kReceives},
            {0},
            {{{0, 2, 0, 0, 4, {}}, {1, 2, 0, 4, 4, {}}, {0, 3, 4, 0, 4, {}}, {1, 3, 4, 4, 4, {}}}}};
  }

  Bytes src[2] = {{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}};
  Bytes dst[2] = {Bytes(8, kPoison), Bytes(8, kPoison)};
  Outcome received[2], released[2];
  Cluster cluster;

  explicit TwoToTwo(std::vector<int> processes = {0, 1, 0, 1}) : cluster(table(), std::move(processes)) {}

  std::string publish(int i, uint32_t call = 1) { return cluster.of(i).publish(call, i, 0, {src[i].data()}); }
  void receive(int i, uint32_t call = 1) {
    cluster.of(2 + i).receive(call, 2 + i, 0, {dst[i].data()}, received[i].callback());
  }
  void release(int i, uint32_t call = 1) { cluster.of(i).release(call, i, released[i].callback()); }
  bool arrived() const {
    return dst[0] == Bytes{0, 1, 2, 3, 8, 9, 10, 11} && dst[1] == Bytes{4, 5, 6, 7, 12, 13, 14, 15};
  }
};

void test_every_order_of_the_steps() {
  for (const std::vector<int>& processes : std::vector<std::vector<int>>{{0, 1, 0, 1}, {0, 0, 1, 1}, {0, 1, 2, 3}}) {
    std::vector<int> order(6);
    std::iota(order.begin(), order.end(), 0);
    int count = 0;
    do {
      if (count++ % 11) continue;
      TwoToTwo t(processes);
      t.cluster.begin(1);
      bool done[6] = {};
      for (int step : order) {
        if (step < 2) CHECK(t.publish(step).empty());
        if (step >= 2 && step < 4) t.receive(step - 2);
        if (step >= 4) t.release(step - 4);
        done[step] = true;
        const bool published = done[0] && done[1];
        for (int i : {0, 1}) {
          if (!published || !done[2 + i]) CHECK(t.received[i].open());
          if (!published || !done[2] || !done[3] || !done[4 + i]) CHECK(t.released[i].open());
        }
      }
      for (int i : {0, 1}) {
        CHECK_TEXT(t.received[i].wait(), "");
        CHECK_TEXT(t.released[i].wait(), "");
        CHECK(t.received[i].calls() == 1 && t.released[i].calls() == 1);
      }
      CHECK(t.arrived());
      CHECK(t.cluster.idle());
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

// What a process hears of a call before it has begun it is kept for it.
void test_early_messages() {
  TwoToTwo t({0, 0, 1, 1});
  CHECK(t.cluster.exchanges[0]->begin(1, kLong));
  for (int i : {0, 1}) CHECK(t.publish(i).empty()), t.release(i);
  settle();
  CHECK(t.cluster.exchanges[1]->begin(1, kLong));
  for (int i : {0, 1}) t.receive(i);
  for (int i : {0, 1}) CHECK(t.received[i].wait().empty() && t.released[i].wait().empty());
  CHECK(t.arrived());

  CHECK(t.cluster.exchanges[0]->begin(2, kLong));
  CHECK(t.publish(0, 2).empty());
  t.cluster.exchanges[0]->abort(2, "jreshard: no more");
  settle();
  CHECK(t.cluster.exchanges[1]->begin(2, kLong));
  Outcome late;
  t.cluster.exchanges[1]->receive(2, 2, 0, {t.dst[0].data()}, late.callback());
  CHECK_TEXT(late.wait(), "jreshard: process 0: no more");
  CHECK(t.cluster.idle());
}

void test_release_of_all_at_once() {
  TwoToTwo t({0, 0, 1, 1});
  t.cluster.begin(1);
  CHECK(!t.cluster.exchanges[0]->release_now(1));
  for (int i : {0, 1}) t.publish(i), t.receive(i);
  for (int i : {0, 1}) CHECK_TEXT(t.received[i].wait(), "");
  CHECK(t.cluster.exchanges[0]->release_now(1));
  CHECK(t.cluster.idle());
}

// Calls of random plans, each rank in a process drawn at random, with devices of which each has a thread.
void run_random_plans(int phases, uint32_t seeds, uint32_t calls) {
  for (uint32_t seed = 1; seed <= seeds; seed += kSeedStride) {
    std::mt19937 random(seed);
    const Plan plan = random_plan(random, 40, phases, 6);
    const Words words = plan.table.words();
    const CopyPlan parsed(words.data(), words.size());
    std::vector<int> process_of(parsed.num_ranks());
    for (int& process : process_of) process = random() % (1 + seed % 3);
    Cluster cluster(plan.table, process_of);
    std::vector<std::thread> devices;
    std::atomic<int> begun{0};
    for (int rank = 0; rank < parsed.num_ranks(); ++rank) {
      devices.emplace_back([&, rank] {
        for (uint32_t call = 1; call <= calls; ++call) {
          // The processes begin a call at their own times.
          static std::mutex mutex;
          const int process = process_of[rank];
          {
            std::lock_guard<std::mutex> lock(mutex);
            if (begun < int(call)) begun = call, cluster.begin(call);
          }
          std::vector<Bytes> src, dst, expected;
          for (int leaf = 0; leaf < parsed.num_leaves(); ++leaf) {
            const int kind = plan.table.leaf_template[leaf];
            src.push_back(source_bytes(call, leaf, rank, plan.src_bytes[kind][rank]));
            dst.emplace_back(plan.dst_bytes[kind][rank], kPoison);
            expected.push_back(expected_arrays(plan, parsed, call, leaf)[rank]);
          }
          Outcome released;
          std::deque<Outcome> received(parsed.num_chunks());
          HostExchange& exchange = *cluster.exchanges[process];
          for (int chunk = 0; chunk < parsed.num_chunks(); ++chunk) {
            std::vector<const void*> from;
            std::vector<void*> to;
            for (int leaf = parsed.chunk_begin(chunk); leaf < parsed.chunk_end(chunk); ++leaf) {
              from.push_back(src[leaf].data());
              to.push_back(dst[leaf].data());
            }
            if (parsed.sends(rank)) CHECK_TEXT(exchange.publish(call, rank, chunk, from), "");
            if (parsed.receives(rank)) exchange.receive(call, rank, chunk, to, received[chunk].callback());
          }
          if (parsed.sends(rank)) exchange.release(call, rank, released.callback());
          for (Outcome& outcome : received) {
            if (parsed.receives(rank)) CHECK_TEXT(outcome.wait(), "");
          }
          if (parsed.receives(rank)) CHECK(dst == expected);
          if (parsed.sends(rank)) CHECK_TEXT(released.wait(), "");
          for (Bytes& array : src) std::fill(array.begin(), array.end(), 0);
          for (Bytes& array : dst) std::fill(array.begin(), array.end(), 0);
        }
      });
    }
    for (std::thread& device : devices) device.join();
    CHECK(cluster.idle());
  }
}

void test_random_plans() { run_random_plans(1, 15, 5); }
void test_random_plans_in_phases() {
  run_random_plans(2, 15, 4);
  run_random_plans(4, 8, 3);
}

// A ring of destinations that pass on, phase by phase, what the first has received.
void test_new_arrays_stay_while_they_are_read() {
  const Table table{1, {kSends, kReceives, kReceives}, {0}, {{{0, 1, 0, 0, 4, {}}, {1, 2, 0, 0, 4, {}, 1}}}};
  for (const std::vector<int>& processes : std::vector<std::vector<int>>{{0, 0, 0}, {0, 1, 2}, {0, 1, 1}}) {
    Cluster cluster(table, processes);
    cluster.begin(1);
    Bytes src{1, 2, 3, 4}, first(4, kPoison), second(4, kPoison);
    Outcome received[2], released;
    CHECK(cluster.of(0).publish(1, 0, 0, {src.data()}).empty());
    cluster.of(0).release(1, 0, released.callback());
    cluster.of(1).receive(1, 1, 0, {first.data()}, received[0].callback());
    CHECK_TEXT(released.wait(), "");
    settle();
    CHECK(received[0].open());  // all is there, but somebody is going to read it
    cluster.of(2).receive(1, 2, 0, {second.data()}, received[1].callback());
    for (Outcome& outcome : received) CHECK_TEXT(outcome.wait(), "");
    CHECK(first == src && second == src);
    CHECK(cluster.idle());
  }
}

void test_aborts_reach_all_processes() {
  for (const int failing : {0, 1, 2}) {
    TwoToTwo t({0, 1, 2, 2});
    t.cluster.begin(1);
    CHECK(t.publish(0).empty());
    for (int i : {0, 1}) t.receive(i), t.release(i);
    t.cluster.exchanges[failing]->abort(1, "jreshard: enough");
    for (int i : {0, 1}) {
      const auto text = [&](int process) {
        return process == failing ? "jreshard: enough" : "jreshard: " + process_name(failing) + ": enough";
      };
      CHECK_TEXT(t.received[i].wait(), text(2));
      CHECK_TEXT(t.released[i].wait(), text(i));
    }
    CHECK_TEXT(t.publish(1), failing == 1 ? "jreshard: enough" : "jreshard: " + process_name(failing) + ": enough");
    CHECK(t.cluster.idle());

    t.cluster.begin(2);
    Outcome again[2];
    for (int i : {0, 1}) {
      CHECK(t.publish(i, 2).empty());
      t.cluster.of(2 + i).receive(2, 2 + i, 0, {t.dst[i].data()}, again[i].callback());
    }
    for (Outcome& outcome : again) CHECK_TEXT(outcome.wait(), "");
    CHECK(t.arrived());
    for (int process : {0, 1}) eventually([&] { return t.cluster.exchanges[process]->release_now(2); });
    CHECK(t.cluster.idle());
  }
}

// A process that is not linked to the one that failed hears of it from the others.
void test_aborts_are_passed_on() {
  TwoToTwo t({0, 1, 2, 2});
  t.cluster.peers[0]->disconnect(1);
  t.cluster.begin(1);
  t.release(1);
  t.cluster.exchanges[0]->abort(1, "jreshard: enough");
  CHECK_TEXT(t.released[1].wait(), "jreshard: process 0: enough");
  CHECK(t.cluster.idle());
}

void test_timeouts_name_the_missing() {
  {
    TwoToTwo t({0, 0, 1, 1});
    CHECK(t.cluster.exchanges[1]->begin(1, kShort));
    t.receive(0);
    CHECK_TEXT(t.received[0].wait(),
               "jreshard: transfer timed out after 0.05 s; source not published by device 0, device 1; destination not "
               "started on device 3");
  }
  {
    TwoToTwo t({0, 0, 1, 1});
    CHECK(t.cluster.exchanges[0]->begin(1, kShort));
    for (int i : {0, 1}) t.publish(i), t.release(i);
    const std::string text = "transfer timed out after 0.05 s; not read yet by device 2, device 3";
    CHECK_TEXT(t.released[0].wait(), "jreshard: " + text);
    settle();
    CHECK(t.cluster.exchanges[1]->begin(1, kLong));
    t.receive(0);
    CHECK_TEXT(t.received[0].wait(), "jreshard: process 0: " + text);
    CHECK(t.cluster.idle());
  }
}

void test_a_process_that_goes_fails_the_calls_that_need_it() {
  for (const bool reader : {false, true}) {
    TwoToTwo t({0, 0, 1, 1});
    t.cluster.begin(1);
    t.publish(0);
    t.receive(0);
    for (int i : {0, 1}) t.release(i);
    t.cluster.leave(reader ? 1 : 0);
    const std::string gone = " is gone: its connection is closed", left = " was disconnected";
    CHECK_TEXT(t.received[0].wait(), "jreshard: process 0" + (reader ? left : gone));
    for (int i : {0, 1}) CHECK_TEXT(t.released[i].wait(), "jreshard: process 1" + (reader ? gone : left));
    CHECK(t.cluster.idle());

    t.cluster.begin(2);
    Outcome later;
    t.cluster.exchanges[1]->receive(2, 2, 0, {t.dst[0].data()}, later.callback());
    CHECK_TEXT(later.wait(), "jreshard: process 0 is not linked to this process");
    CHECK(t.cluster.idle());

    // Another process may take its place.
    link(*t.cluster.peers[0], *t.cluster.peers[1]);
    t.cluster.begin(3);
    Outcome again[2];
    for (int i : {0, 1}) {
      CHECK(t.publish(i, 3).empty());
      t.cluster.exchanges[1]->receive(3, 2 + i, 0, {t.dst[i].data()}, again[i].callback());
    }
    for (Outcome& outcome : again) CHECK_TEXT(outcome.wait(), "");
    CHECK(t.arrived());
  }
}

void test_a_process_that_has_done_its_part_may_go() {
  TwoToTwo t({0, 1, 2, 2});
  t.cluster.begin(1);
  t.publish(0);
  CHECK(t.cluster.exchanges[0]->open_calls() == 1);
  t.receive(0);
  t.receive(1);
  // Process 1 is needed by both, process 0 no more once they have read; but they read all at once.
  t.publish(1);
  for (int i : {0, 1}) CHECK_TEXT(t.received[i].wait(), "");
  t.release(0);
  CHECK_TEXT(t.released[0].wait(), "");
  t.cluster.leave(0);
  t.cluster.leave(2);
  settle();
  t.release(1);
  CHECK_TEXT(t.released[1].wait(), "");
  CHECK(t.cluster.idle());
}

// Process 1, played by the test message by message: it sends from rank 0 to rank 2 of process 0, and receives from its
// rank 1.
struct Played {
  std::shared_ptr<Peers> peers = std::make_shared<Peers>(0);
  std::shared_ptr<HostExchange> exchange;
  Descriptor socket;
  Bytes theirs = Bytes{1, 2, 3, 4}, mine = Bytes{5, 6, 7, 8}, got = Bytes(4, kPoison);
  Outcome received, released;
  bool begun = false;

  Played() {
    const Table table{1, {kSends, kSends, kReceives, kReceives}, {0}, {{{0, 2, 0, 0, 4, {}}, {1, 3, 0, 0, 4, {}}}}};
    exchange = table.exchange<HostExchange>(ProcessMap{kKey, {1, 0, 0, 1}, peers});
    auto [to_played, played] = socket_pair();
    socket = std::move(played);
    timeval patience{60, 0};
    setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    peers->connect(1, std::move(to_played), "process 1");
    greet(socket.get(), 1);
    take_bytes(8 + 16);  // its greeting
  }
  ~Played() {
    peers->disconnect(1);
    if (begun) received.wait(), released.wait();
  }

  void begin(double timeout_s = kLong) {
    CHECK(exchange->begin(1, timeout_s));
    CHECK(exchange->publish(1, 1, 0, {mine.data()}).empty());
    exchange->release(1, 1, released.callback());
    exchange->receive(1, 2, 0, {got.data()}, received.callback());
    begun = true;
    const Message published = take();
    CHECK(published.kind == Message::kPublish && published.rank == 1 && published.key == kKey && published.call == 1);
    CHECK(published.addresses == std::vector<uint64_t>{reinterpret_cast<uint64_t>(mine.data())});
  }
  Message publishing() const {
    return {Message::kPublish, 1, kKey, 0, 0, 0, {reinterpret_cast<uint64_t>(theirs.data())}};
  }
  void say(const Message& message) {
    const std::vector<char> bytes = encode(message);
    const std::string framed = frame({bytes.begin(), bytes.end()});
    CHECK(write(socket.get(), framed.data(), framed.size()) == ssize_t(framed.size()));
  }
  Message take() {
    uint32_t header[2];
    std::memcpy(header, take_bytes(sizeof header).data(), sizeof header);
    const std::string body = take_bytes(header[0]);
    return jreshard::decode(body.data(), body.size());
  }
  std::string take_bytes(size_t size) {
    std::string out(size, '\0');
    CHECK(recv(socket.get(), out.data(), size, MSG_WAITALL) == ssize_t(size));
    return out;
  }
};

void test_what_is_read_counts_once_it_is_confirmed() {
  for (const bool confirmed : {true, false}) {
    Played played;
    played.begin();
    played.say(played.publishing());
    const Message done = played.take();
    CHECK(done.kind == Message::kDone && done.rank == 2 && done.chunk == 0 && done.phase == 0);
    CHECK(played.got == played.theirs);
    settle();
    CHECK(played.received.open());
    CHECK(played.released.open());
    if (confirmed) {
      played.say({Message::kConfirm, 1, kKey, 2, 0, 0});
      CHECK_TEXT(played.received.wait(), "");
      played.say({Message::kDone, 1, kKey, 3, 0, 0});
      CHECK_TEXT(played.released.wait(), "");
      CHECK(played.take().kind == Message::kConfirm);
    } else {
      played.say({Message::kAbort, 1, kKey, 1, 0, 0, {}, "given up"});
      CHECK_TEXT(played.received.wait(), "jreshard: process 1: given up");
      CHECK_TEXT(played.released.wait(), "jreshard: process 1: given up");
    }
    CHECK(eventually([&] { return played.exchange->open_calls() == 0; }));
  }
}

// Who is told that it may use what it has read, must have read it before its source gave up.
void test_no_confirmation_after_a_failure() {
  Played played;
  played.begin();
  played.exchange->abort(1, "jreshard: given up");
  CHECK_TEXT(played.released.wait(), "jreshard: given up");
  played.say({Message::kDone, 1, kKey, 3, 0, 0});
  for (int i : {0, 1}) {
    const Message answer = played.take();
    CHECK(answer.kind == Message::kAbort && answer.rank == 0);
    CHECK_TEXT(answer.reason, i == 0 ? "given up" : "jreshard: given up");
  }
}

void test_a_confirmation_that_does_not_come() {
  Played played;
  played.begin(0.3);
  played.say(played.publishing());
  CHECK_TEXT(played.received.wait(),
             "jreshard: transfer timed out after 0.3 s; not read yet by device 3; no answer from process 1");
}

void test_bad_messages() {
  const auto with = [](Message message, auto change) {
    change(message);
    return message;
  };
  const Message good = Played().publishing();
  const struct {
    Message message;
    std::string fault;
  } cases[] = {
      {with(good, [](Message& m) { m.chunk = 1; }), "chunk 1"},
      {with(good, [](Message& m) { m.chunk = -1; }), "chunk -1"},
      {with(good, [](Message& m) { m.phase = 1; }), "phase 1"},
      {with(good, [](Message& m) { m.rank = 4; }), "rank 4"},
      {with(good, [](Message& m) { m.rank = -1; }), "rank -1"},
      {with(good, [](Message& m) { m.rank = 1; }), "a message in the name of device 1"},
      {with(good, [](Message& m) { m.rank = 3; }), "device 3 has nothing to publish"},
      {with(good, [](Message& m) { m.addresses.clear(); }), "0 addresses"},
      {with(good, [](Message& m) { m.addresses.resize(2); }), "2 addresses"},
      {{Message::kDone, 1, kKey, 2, 0, 0}, "a message in the name of device 2"},
      {{Message::kDone, 1, kKey, 0, 0, 0}, "device 0 has nothing to read here"},
      {{Message::kConfirm, 1, kKey, 2, 0, 0}, "a confirmation that nobody asked for"},
      {{Message::kConfirm, 1, kKey, 3, 0, 0}, "a confirmation for device 3"},
  };
  for (const auto& c : cases) {
    Played played;
    played.begin();
    played.say(c.message);
    CHECK_TEXT(played.received.wait(), "jreshard: process 1 sent what does not fit the transfer: " + c.fault);
    CHECK(played.take().kind == Message::kAbort);
    CHECK(played.got == Bytes(4, kPoison));
  }
  {
    Played played;
    CHECK(played.exchange->begin(1, kLong));
    played.exchange->receive(1, 2, 0, {played.got.data()}, played.received.callback());
    played.say({Message::kDone, 1, kKey, 3, 0, 0});
    CHECK_TEXT(played.received.wait(),
               "jreshard: process 1 sent what does not fit the transfer: device 3 has read too early");
  }
  for (const auto& [twice, fault] :
       {std::pair(good, "device 0 has published before"),
        std::pair(Message{Message::kDone, 1, kKey, 3, 0, 0}, "device 3 has read before")}) {
    Played played;
    played.begin();
    // An address that cannot be read would fail the call in another way.
    Message message = twice;
    if (message.kind == Message::kPublish) message.addresses = played.publishing().addresses;
    played.say(message);
    played.say(message);
    CHECK_TEXT(played.received.wait(),
               std::string("jreshard: process 1 sent what does not fit the transfer: ") + fault);
  }
  {
    Played played;
    played.begin();
    const std::string framed = frame("nonsense");
    CHECK(write(played.socket.get(), framed.data(), framed.size()) > 0);
    CHECK_TEXT(played.received.wait(), "jreshard: process 1 sent what is not a message: it is too short");
  }
  {
    Played played;
    played.begin();
    Message message = good;
    message.addresses = {16};
    played.say(message);
    CHECK_TEXT(played.received.wait(), "jreshard: process 1 cannot be read (process_vm_readv: Bad address)");
  }
}

void test_too_much_that_comes_early() {
  Played played;
  Message message = played.publishing();
  message.addresses.assign(100'000, 16);
  const Message large = message;
  for (int i = 0; i < 50; ++i) played.say(message);
  const Message answer = played.take();
  CHECK(answer.kind == Message::kAbort && answer.call == 1);
  CHECK_TEXT(answer.reason, "too much was published before the transfer was begun here");
  // Calls that are never begun do not add up either.
  for (uint32_t call = 1000; call < 2000; ++call) {
    message = played.publishing();
    message.call = call;
    played.say(message);
  }
  message = large;
  message.call = 5000;
  for (int i = 0; i < 50; ++i) played.say(message);
  while (played.take().call != 5000) continue;  // and with that, all before it has been heard
  CHECK(played.peers->open(kKey, 1000, {}).empty());
  CHECK(played.peers->open(kKey, 1999, {}).size() == 1);
}

void test_a_process_is_linked_once() {
  Played played;
  const auto error_of = [&](int process) {
    try {
      played.peers->connect(process, socket_pair().first, process_name(process));
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK_TEXT(error_of(1), "process 1 is linked already");
  CHECK_TEXT(error_of(0), "a process needs no link to itself");
}

// Calls that one side aborts at any moment: whoever is told of success has the right bytes.
void test_aborts_at_any_moment() {
  std::mt19937 random(3);
  TwoToTwo t({0, 0, 1, 1});
  int failures = 0;
  for (uint32_t call = 1; call <= 150; ++call) {
    t.cluster.begin(call);
    for (Bytes& array : t.dst) array.assign(8, kPoison);
    Bytes src[2] = {t.src[0], t.src[1]};
    Outcome received[2], released[2];
    std::thread aborting([&, process = random() % 2, us = random() % 300] {
      std::this_thread::sleep_for(std::chrono::microseconds(us));
      t.cluster.exchanges[process]->abort(call, "jreshard: enough");
    });
    for (int i : {0, 1}) {
      t.cluster.exchanges[1]->receive(call, 2 + i, 0, {t.dst[i].data()}, received[i].callback());
      t.cluster.exchanges[0]->publish(call, i, 0, {src[i].data()});
      t.cluster.exchanges[0]->release(call, i, [&, i](const std::string* error) {
        src[i].assign(8, 0);
        released[i].callback()(error);
      });
    }
    for (int i : {0, 1}) {
      released[i].wait();
      const bool ok = received[i].wait().empty();
      failures += !ok;
      if (ok)
        CHECK((t.dst[i] == Bytes{uint8_t(4 * i), uint8_t(4 * i + 1), uint8_t(4 * i + 2), uint8_t(4 * i + 3),
                                 uint8_t(4 * i + 8), uint8_t(4 * i + 9), uint8_t(4 * i + 10), uint8_t(4 * i + 11)}));
    }
    aborting.join();
    CHECK(t.cluster.idle());
  }
  CHECK(failures > 10);
}

// --- two processes in truth -----------------------------------------------------------------------------------------

constexpr int64_t kSide = 1200;  // of a square array of bytes, rows over two ranks before, columns after

Table rows_to_columns() {
  Table table{1, {3, 3}, {0, 0, 0}, {{}}};
  for (int src : {0, 1}) {
    for (int dst : {0, 1}) {
      const int64_t half = kSide / 2;
      table.templates[0].push_back({src, dst, dst * half, src * half * half, half, {{half, kSide, half}}});
    }
  }
  return table;
}

// One process's part of a call: it sends the rows and receives the columns of one rank. Returns what went wrong.
std::string take_part(HostExchange& exchange, int rank, uint32_t call) {
  const int64_t half = kSide / 2;
  std::vector<Bytes> src(3), dst(3, Bytes(kSide * half, kPoison));
  Outcome received[3], released;
  for (int leaf = 0; leaf < 3; ++leaf) {
    for (int64_t i = 0; i < half * kSide; ++i) src[leaf].push_back(byte_at(call, leaf, rank * half * kSide + i));
    if (auto error = exchange.publish(call, rank, leaf, {src[leaf].data()}); !error.empty()) return error;
    exchange.receive(call, rank, leaf, {dst[leaf].data()}, received[leaf].callback());
  }
  exchange.release(call, rank, [&](const std::string* error) {
    for (Bytes& array : src) std::fill(array.begin(), array.end(), 0);
    released.callback()(error);
  });
  std::string error = released.wait();
  for (int leaf = 0; leaf < 3; ++leaf) {
    if (error.empty()) error = received[leaf].wait();
    received[leaf].wait();
    for (int64_t i = 0; error.empty() && i < kSide * half; ++i) {
      const int64_t at = i / half * kSide + rank * half + i % half;
      if (dst[leaf][i] != byte_at(call, leaf, at)) error = "wrong byte at " + std::to_string(i);
    }
  }
  return error;
}

struct Half {
  std::shared_ptr<Peers> peers;
  std::shared_ptr<HostExchange> exchange;

  Half(int process, Descriptor socket) : peers(std::make_shared<Peers>(process)) {
    exchange = rows_to_columns().exchange<HostExchange>(ProcessMap{kKey, {0, 1}, peers});
    peers->connect(1 - process, std::move(socket), process_name(1 - process));
  }
};

// The program that the other process runs: so many calls, and then it is killed, or ends.
int run_child(int socket, uint32_t calls, bool dies) {
  Half half(1, Descriptor(socket));
  for (uint32_t call = 1; call <= calls; ++call) {
    half.exchange->begin(call, 60);
    const std::string error = take_part(*half.exchange, 1, call);
    if (!error.empty()) {
      std::fprintf(stderr, "child: %s\n", error.c_str());
      return 1;
    }
  }
  if (dies) {
    half.exchange->begin(calls + 1, 60);
    static Bytes rows(kSide * kSide / 2);
    half.exchange->publish(calls + 1, 1, 0, {rows.data()});
    raise(SIGKILL);
  }
  return 0;
}

void run_two_processes(bool dies) {
  constexpr uint32_t kCalls = 20;
  auto [mine, theirs] = socket_pair();
  const int inherited = dup(theirs.get());  // without close-on-exec
  const std::string number = std::to_string(inherited), calls = std::to_string(kCalls);
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "child", number.c_str(), calls.c_str(), dies ? "dies" : "ends", nullptr);
    _exit(127);
  }
  close(inherited);
  theirs = Descriptor();
  Half half(0, std::move(mine));
  for (uint32_t call = 1; call <= kCalls; ++call) {
    CHECK(half.exchange->begin(call, 60));
    CHECK_TEXT(take_part(*half.exchange, 0, call), "");
  }
  if (dies) {
    CHECK(half.exchange->begin(kCalls + 1, 60));
    // Either its end is seen first, or that its memory is no longer there.
    CHECK_TEXT(take_part(*half.exchange, 0, kCalls + 1).substr(0, 20), "jreshard: process 1 ");
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(dies ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(eventually([&] { return half.exchange->open_calls() == 0; }));
}

void test_two_processes() { run_two_processes(false); }
void test_a_process_that_is_killed() { run_two_processes(true); }

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4) return run_child(std::stoi(argv[1]), std::stoi(argv[2]), argv[3] == std::string("dies"));
  return run_tests({
      {"every_order_of_the_steps", test_every_order_of_the_steps},
      {"early_messages", test_early_messages},
      {"release_of_all_at_once", test_release_of_all_at_once},
      {"random_plans", test_random_plans},
      {"random_plans_in_phases", test_random_plans_in_phases},
      {"new_arrays_stay_while_they_are_read", test_new_arrays_stay_while_they_are_read},
      {"aborts_reach_all_processes", test_aborts_reach_all_processes},
      {"aborts_are_passed_on", test_aborts_are_passed_on},
      {"timeouts_name_the_missing", test_timeouts_name_the_missing},
      {"a_process_that_goes_fails_the_calls_that_need_it", test_a_process_that_goes_fails_the_calls_that_need_it},
      {"a_process_that_has_done_its_part_may_go", test_a_process_that_has_done_its_part_may_go},
      {"what_is_read_counts_once_it_is_confirmed", test_what_is_read_counts_once_it_is_confirmed},
      {"no_confirmation_after_a_failure", test_no_confirmation_after_a_failure},
      {"a_confirmation_that_does_not_come", test_a_confirmation_that_does_not_come},
      {"bad_messages", test_bad_messages},
      {"too_much_that_comes_early", test_too_much_that_comes_early},
      {"a_process_is_linked_once", test_a_process_is_linked_once},
      {"aborts_at_any_moment", test_aborts_at_any_moment},
      {"two_processes", test_two_processes},
      {"a_process_that_is_killed", test_a_process_that_is_killed},
  });
}
