// Tests of what connects two processes: the link, its messages, and reading the other's memory. Both ends are in this
// process, which may read itself.
#include "peer_socket.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "copy_table.h"
#include "peer_memory.h"
#include "peer_messages.h"
#include "sockets.h"
#include "strided_copy.h"

using jreshard::Copy;
using jreshard::Descriptor;
using jreshard::Dim;
using jreshard::Message;
using jreshard::PeerReader;
using jreshard::PeerSocket;

namespace {

// One end of a link, and what it has heard.
class End {
 public:
  End(Descriptor socket, int self, int peer) {
    PeerSocket::Events events;
    events.greeted = [this](pid_t pid) {
      std::lock_guard<std::mutex> lock(mutex_);
      pid_ = pid;
      changed_.notify_all();
    };
    events.message = [this](const char* bytes, size_t size, Descriptor attached) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (std::string(bytes, size) == "poison") throw std::invalid_argument("bad taste");
      messages_.emplace_back(bytes, size);
      if (attached) attached_.push_back(std::move(attached));
      changed_.notify_all();
    };
    events.lost = [this](const std::string& why) {
      std::lock_guard<std::mutex> lock(mutex_);
      lost_.push_back(why);
      changed_.notify_all();
    };
    link = PeerSocket::start(std::move(socket), self, peer, std::move(events));
  }
  // The events above must not outlive this.
  ~End() {
    link->close("over");
    lost();
  }

  void send(const std::string& text, Descriptor attached = Descriptor()) {
    link->send({text.begin(), text.end()}, std::move(attached));
  }
  std::vector<std::string> messages(size_t count) {
    const auto lock = wait([&] { return messages_.size() >= count; });
    return messages_;
  }
  std::string lost() {
    const auto lock = wait([&] { return !lost_.empty(); });
    return lost_.size() == 1 ? lost_[0] : std::to_string(lost_.size()) + " ends";
  }
  pid_t pid() {
    const auto lock = wait([&] { return pid_ != 0; });
    return pid_;
  }
  std::vector<Descriptor>& attached() { return attached_; }

  std::shared_ptr<PeerSocket> link;

 private:
  template <typename Ready>
  std::unique_lock<std::mutex> wait(Ready ready) {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::seconds(60), ready));
    return lock;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  pid_t pid_ = 0;
  std::vector<std::string> messages_;
  std::vector<Descriptor> attached_;
  std::vector<std::string> lost_;
};

struct Pair {
  std::pair<Descriptor, Descriptor> sockets = socket_pair();
  End zero{std::move(sockets.first), 0, 1}, one{std::move(sockets.second), 1, 0};
};

void test_messages_come_in_order() {
  Pair pair;
  CHECK(pair.zero.pid() == getpid() && pair.one.pid() == getpid());
  std::vector<std::string> sent;
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) sent.emplace_back(random() % 5 ? random() % 100 : random() % 200'000, 'a' + i % 26);
  sent.emplace_back("");
  sent.emplace_back(PeerSocket::kMaxMessageBytes, 'z');
  for (const std::string& text : sent) pair.zero.send(text), pair.one.send(text);
  CHECK(pair.one.messages(sent.size()) == sent);
  CHECK(pair.zero.messages(sent.size()) == sent);
  bool refused = false;
  try {
    pair.zero.send(std::string(PeerSocket::kMaxMessageBytes + 1, 'z'));
  } catch (const std::length_error&) {
    refused = true;
  }
  CHECK(refused);
}

void test_descriptors_come_with_their_messages() {
  Pair pair;
  for (int i = 0; i < 20; ++i) {
    Descriptor file(memfd_create("test", MFD_CLOEXEC));
    const std::string text = std::to_string(i);
    CHECK(write(file.get(), text.data(), text.size()) == ssize_t(text.size()));
    if (i % 3 == 0) pair.zero.send("plain");
    pair.zero.send(text + std::string(i * 10'000, '.'), std::move(file));
  }
  const std::vector<std::string> messages = pair.one.messages(27);
  size_t next = 0;
  for (const std::string& message : messages) {
    if (message == "plain") continue;
    char text[8] = {};
    const int fd = pair.one.attached().at(next).get();
    CHECK(pread(fd, text, sizeof text, 0) > 0 && message.substr(0, message.find('.')) == text);
    CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    CHECK_TEXT(text, std::to_string(next++));
  }
  CHECK(next == 20);
}

void test_the_end_of_a_link_is_told_once() {
  Pair pair;
  pair.zero.send("last words");
  pair.one.messages(1);
  pair.zero.link->close("was closed by the test");
  CHECK_TEXT(pair.zero.lost(), "was closed by the test");
  CHECK_TEXT(pair.one.lost(), "is gone: its connection is closed");
  pair.zero.send("to nobody");
  pair.one.send("to nobody");
  pair.one.link->close("again");
  CHECK_TEXT(pair.one.lost(), "is gone: its connection is closed");
}

void test_a_peer_that_does_not_read() {
  auto [mine, theirs] = socket_pair();
  End end(std::move(mine), 0, 1);
  greet(theirs.get(), 1);
  end.pid();
  const auto start = std::chrono::steady_clock::now();
  const std::string text(PeerSocket::kMaxMessageBytes, 'x');
  for (int i = 0; i < 80; ++i) end.send(text);
  CHECK_TEXT(end.lost(), "does not read what it is sent");
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
}

void test_strangers() {
  const struct {
    std::string bytes, why;
  } cases[] = {
      {"", "is gone: its connection is closed"},
      {frame("hello"), "did not introduce itself as jreshard does"},
      {std::string(8, '\xff'), "sent what is not a message"},
      {hello_frame(0x6472616873657268), "did not introduce itself as jreshard does"},
      {hello_frame(kHelloMagic, 2), "has another version of jreshard: its messages have version 2, not 1"},
      {hello_frame(kHelloMagic, 1, 7), "introduced itself as process 7"},
      {hello_frame(kHelloMagic, 1, 1) + frame("poison"), "sent what is not a message: bad taste"},
      {hello_frame(kHelloMagic, 1, 1) + frame("", 1), "sent a message without its descriptor"},
      {hello_frame(kHelloMagic, 1, 1) + frame("", 2), "sent what is not a message"},
  };
  for (const auto& c : cases) {
    auto [mine, theirs] = socket_pair();
    End end(std::move(mine), 0, 1);
    CHECK(write(theirs.get(), c.bytes.data(), c.bytes.size()) == ssize_t(c.bytes.size()));
    if (c.bytes.empty()) theirs = Descriptor();
    CHECK_TEXT(end.lost(), c.why);
  }
  int pipes[2];
  CHECK(pipe2(pipes, O_CLOEXEC) == 0);
  Descriptor read_end(pipes[0]), write_end(pipes[1]);
  std::string error;
  try {
    PeerSocket::start(std::move(read_end), 0, 1, {});
  } catch (const std::invalid_argument& refused) {
    error = refused.what();
  }
  CHECK_TEXT(error, "what connects two processes has to be a Unix socket");
}

void test_links_leave_nothing_behind() {
  auto open_descriptors = [] {
    int count = 0;
    for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0;
    return count;
  };
  const int before = open_descriptors();
  for (int i = 0; i < 100; ++i) {
    Pair pair;
    pair.zero.send("x", Descriptor(memfd_create("test", MFD_CLOEXEC)));
    pair.one.messages(i % 2);
  }
  // The links' threads may still be on their way out; so may those of earlier tests when counting began.
  for (int i = 0; i < 1000 && open_descriptors() > before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(open_descriptors() <= before);
}

bool same(const Message& a, const Message& b) {
  return a.kind == b.kind && a.call == b.call && a.key == b.key && a.rank == b.rank && a.chunk == b.chunk &&
         a.phase == b.phase && a.addresses == b.addresses && a.reason == b.reason;
}

std::string decode_error(const std::vector<char>& bytes) {
  try {
    jreshard::decode(bytes.data(), bytes.size());
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

void test_messages_are_read_as_written() {
  const Message publish{Message::kPublish, 4'000'000'000u, INT64_MIN, 3, 5, 1, {1, UINT64_MAX}, ""};
  const Message done{Message::kDone, 1, 2, 3, 4, 5};
  const Message abort{Message::kAbort, 1, 2, 3, 0, 0, {}, "it is late"};
  for (const Message& message : {publish, done, abort}) {
    const std::vector<char> bytes = encode(message);
    CHECK(same(jreshard::decode(bytes.data(), bytes.size()), message));
    for (size_t size = 0; size < bytes.size(); ++size) {
      CHECK(!decode_error({bytes.begin(), bytes.begin() + size}).empty());
    }
    std::vector<char> longer = bytes;
    longer.push_back(0);
    CHECK_TEXT(decode_error(longer), "its length is not what it says");
  }
  std::vector<char> unknown = encode(done);
  unknown[0] = 9;
  CHECK_TEXT(decode_error(unknown), "its kind is 9");
  Message talkative = abort;
  talkative.reason.assign(1 << 20, '!');
  CHECK(encode(talkative).size() < 5000);
  // A message of one kind, labelled as another.
  std::vector<char> labelled = encode(publish);
  labelled[0] = Message::kDone;
  CHECK_TEXT(decode_error(labelled), "it ends in bytes that do not belong there");
}

void test_boxes_are_read_from_memory() {
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 400; ++repeat) {
    // Some rows lie close to each other, some far apart; some are longer than a page.
    const int64_t run = repeat % 4 ? 1 + random() % 100 : 1 + random() % 20'000;
    StridedBox box = random_box(random, run);
    if (repeat % 3 == 0 && !box.copy.dims.empty()) {
      box.copy.dims[0].src_stride += 3000;
      box.src_bytes += 3000 * box.copy.dims[0].extent;
    }
    Bytes src(box.src_bytes), expected(box.dst_bytes, kPoison), dst = expected;
    for (uint8_t& byte : src) byte = random();
    copy_naively(box.copy, src, expected);
    PeerReader reader(getpid());
    const int64_t rows = box.copy.rows(), row = random() % (rows + 1), cut = random() % run;
    const auto address = reinterpret_cast<uint64_t>(src.data());
    auto* const to = reinterpret_cast<char*>(dst.data());
    reader.add(box.copy, address, to, 0, row, 0, run);
    if (cut) reader.add(box.copy, address, to, row, rows, 0, cut);
    reader.add(box.copy, address, to, row, rows, cut, run);
    CHECK_TEXT(reader.finish(), "");
    CHECK(dst == expected);
  }
}

// More parts than the kernel takes in one call, near each other and not.
void test_many_parts() {
  for (const int64_t stride : {2, 64, 2100, 5000}) {
    constexpr int64_t kRows = 3000;
    const Copy copy{0, 0, 0, 0, 1, {{kRows, stride, 3}}};
    Bytes src(kRows * stride), expected(kRows * 3, kPoison), dst = expected;
    for (size_t i = 0; i < src.size(); ++i) src[i] = byte_at(1, 1, i);
    copy_naively(copy, src, expected);
    PeerReader reader(getpid());
    reader.add(copy, reinterpret_cast<uint64_t>(src.data()), reinterpret_cast<char*>(dst.data()), 0, kRows, 0, 1);
    CHECK_TEXT(reader.finish(), "");
    CHECK(dst == expected);
  }
}

void test_memory_that_is_not_there() {
  const size_t page = sysconf(_SC_PAGESIZE);
  char* const pages =
      static_cast<char*>(mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(munmap(pages + page, page) == 0);
  Bytes dst(2 * page);
  auto read = [&](pid_t pid, int64_t bytes) {
    const Copy copy{0, 0, 0, 0, bytes, {}};
    PeerReader reader(pid);
    reader.add(copy, reinterpret_cast<uint64_t>(pages), reinterpret_cast<char*>(dst.data()), 0, 1, 0, bytes);
    return reader.finish();
  };
  CHECK_TEXT(read(getpid(), page), "");
  CHECK_TEXT(read(getpid(), page + 1), "cannot be read (process_vm_readv: Bad address)");
  munmap(pages, page);
  CHECK_TEXT(read(getpid(), page), "cannot be read (process_vm_readv: Bad address)");
  CHECK_TEXT(read(0, page), "cannot be read: it is gone, or lives in a PID namespace that this process does not see");
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  CHECK_TEXT(read(child, page), "cannot be read (process_vm_readv: No such process); it has ended");
}

}  // namespace

int main() {
  return run_tests({
      {"messages_come_in_order", test_messages_come_in_order},
      {"descriptors_come_with_their_messages", test_descriptors_come_with_their_messages},
      {"the_end_of_a_link_is_told_once", test_the_end_of_a_link_is_told_once},
      {"a_peer_that_does_not_read", test_a_peer_that_does_not_read},
      {"strangers", test_strangers},
      {"links_leave_nothing_behind", test_links_leave_nothing_behind},
      {"messages_are_read_as_written", test_messages_are_read_as_written},
      {"boxes_are_read_from_memory", test_boxes_are_read_from_memory},
      {"many_parts", test_many_parts},
      {"memory_that_is_not_there", test_memory_that_is_not_there},
  });
}
