// A process that the test plays, whose GPU another one reads: so it can say what is wrong, keep silent, and die.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "stream_world.h"

using jreshard::FlagPage;
using jreshard::Message;

// A source that the test plays: rank 0, in process 1, of one_source() with one leaf.
class PlayedSource {
 public:
  // Its flags: ready and read by rank, and the mark.
  enum { kReady = 0, kRead = 3, kMark = 4, kFlags };
  static constexpr size_t kBytes = 124;

  FakeDriver driver{1};
  std::shared_ptr<Peers> mine = std::make_shared<Peers>(0), theirs;
  std::shared_ptr<StreamExchange> exchange;
  std::optional<FlagPage> page;
  FakeDriver::DevicePtr array = 0;
  uint32_t call = 0;

  PlayedSource() {
    source_ = driver.add_device(1);
    reader_ = driver.add_device(0);
    come();
    open();
  }
  ~PlayedSource() {
    driver.run_all();
    exchange.reset();
    mine.reset();
    die();
    CHECK(wait_until([&] { return driver.left_behind().empty() && driver.contexts_of_all() == 0; }));
  }

  // A process that takes the place of one that has died.
  void come() {
    theirs = std::make_shared<Peers>(1);
    page.emplace(kFlags);
    array = driver.make_arena(1, kBytes, ArenaKind::kExportable);
    auto [one, other] = socket_pair();
    mine->connect(1, std::move(one), "process 1");
    theirs->connect(0, std::move(other), "process 0");
  }
  // All that is its own goes, and nobody is told.
  void die() {
    theirs.reset();
    page.reset();
    if (array) driver.free_arena(std::exchange(array, 0));
  }
  // The reader's exchange, or another one in its place, for another call.
  void open() {
    ++call;
    exchange = one_source(1, 1).table.exchange_from(
        StreamExchange::open, driver.table(), jreshard::ProcessMap{kKey, {1, 0}, mine}, std::map<int, int>{{1, 1}});
  }
  int mappings() { return driver.left_behind()["reserved"]; }
  FakeDriver::Stream reader() { return reader_; }

  void send_flags() { theirs->send(0, {Message::kFlags, 0, kKey}, page->descriptor().duplicate()); }
  void lend() {
    const jreshard::cuda::CurrentContext context(driver.table(), source_);
    jreshard::ArenaExports exports(driver.table());
    const jreshard::Arena arena = exports.find(array);
    theirs->send(0, {Message::kLend, 0, kKey, 0, 0, 0, {arena.id, arena.base, arena.bytes}}, exports.lend(arena));
  }
  Message publish(uint64_t address) const { return {Message::kPublish, call, kKey, 0, 0, 0, {address}}; }
  // Its device has got there.
  void be_ready() { (*page)[kReady] = call + 1; }
  // What a source does before its device gets there.
  void announce() {
    send_flags();
    lend();
    theirs->send(0, publish(array));
  }
  // The reader's part of the call. `between` happens when all is enqueued.
  std::string receive(const std::function<void()>& between = [] {}) {
    CHECK(exchange->begin(call, kCall));
    const std::string error = error_of([&] { exchange->receive(1, 0, {into_.data()}, reader_); });
    between();
    const RunningDevices running(driver);
    const std::string late = error_of([&] { exchange->wait(call); });
    CHECK(error.empty() || error == late);
    CHECK(exchange->open_calls() == 0);
    return late;
  }

 private:
  FakeDriver::Stream source_, reader_;
  Bytes into_ = Bytes(kBytes);
};
