#include "peer_socket.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace jreshard {
namespace {

constexpr size_t kMaxQueuedBytes = 64 << 20;
constexpr size_t kMaxDescriptorsKept = 64;
// A peer that has not said who it is, or has not taken a byte that waits for it, in this time is given up.
constexpr int64_t kPatienceMs = 60'000;
constexpr uint64_t kMagic = 0x6472'6168'7365'726A;  // "jreshard"
constexpr uint32_t kVersion = 1;

struct FrameHeader {
  uint32_t bytes;     // of the body that follows
  uint32_t attached;  // descriptors that come with it, 0 or 1
};

struct Hello {
  uint64_t magic;
  uint32_t version;
  int32_t process;
};

int64_t now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

std::string system_error(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

template <typename Body>
std::vector<char> frame_of(const Body* body, size_t bytes, bool attached) {
  const FrameHeader header{static_cast<uint32_t>(bytes), attached};
  std::vector<char> frame(sizeof header + bytes);
  std::memcpy(frame.data(), &header, sizeof header);
  if (bytes) std::memcpy(frame.data() + sizeof header, body, bytes);
  return frame;
}

// Sends without waiting, with one control message of the type that is given, if any.
ssize_t send_some(int socket, const char* bytes, size_t size, int control_type = 0, const void* control = nullptr,
                  size_t control_bytes = 0) {
  iovec part{const_cast<char*>(bytes), size};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char buffer[CMSG_SPACE(sizeof(ucred))] = {};
  if (control) {
    message.msg_control = buffer;
    message.msg_controllen = CMSG_SPACE(control_bytes);
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = control_type;
    head->cmsg_len = CMSG_LEN(control_bytes);
    std::memcpy(CMSG_DATA(head), control, control_bytes);
  }
  ssize_t sent;
  do sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  return sent;
}

}  // namespace

std::shared_ptr<PeerSocket> PeerSocket::start(Descriptor socket, int self, int peer, Events events) {
  std::shared_ptr<PeerSocket> link(new PeerSocket(std::move(socket), self, peer, std::move(events)));
  link->send_hello();
  std::thread([link] { link->loop(); }).detach();
  return link;
}

PeerSocket::PeerSocket(Descriptor socket, int self, int peer, Events events)
    : socket_(std::move(socket)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      self_(self),
      peer_(peer),
      events_(std::move(events)),
      last_progress_ms_(now_ms()) {
  int domain = 0;
  socklen_t size = sizeof domain;
  if (getsockopt(socket_.get(), SOL_SOCKET, SO_DOMAIN, &domain, &size) || domain != AF_UNIX) {
    throw std::invalid_argument("what connects two processes has to be a Unix socket");
  }
  const int on = 1;
  if (!wake_ || setsockopt(socket_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on)) {
    throw std::runtime_error(system_error("a connection could not be set up"));
  }
}

// The kernel vouches for the ids, and gives them as the receiver's namespaces see them.
void PeerSocket::send_hello() {
  const Hello hello{kMagic, kVersion, self_};
  const std::vector<char> frame = frame_of(&hello, sizeof hello, false);
  const ucred mine{getpid(), geteuid(), getegid()};
  const ssize_t sent = send_some(socket_.get(), frame.data(), frame.size(), SCM_CREDENTIALS, &mine, sizeof mine);
  if (sent == static_cast<ssize_t>(frame.size())) return;
  end(sent < 0 ? system_error("could not be greeted") : "could not be greeted");
}

void PeerSocket::send(std::vector<char> bytes, Descriptor attached) {
  if (bytes.size() > kMaxMessageBytes) throw std::length_error("a message to another process is too long");
  std::lock_guard<std::mutex> lock(mutex_);
  if (!ended_.empty()) return;
  Outgoing out;
  out.frame = frame_of(bytes.data(), bytes.size(), static_cast<bool>(attached));
  out.attached = std::move(attached);
  if (outgoing_.empty()) last_progress_ms_ = now_ms();
  queued_bytes_ += out.frame.size();
  outgoing_.push_back(std::move(out));
  if (greeted_) flush();
  if (queued_bytes_ > kMaxQueuedBytes) ended_ = "does not read what it is sent";
  if (!outgoing_.empty() || !ended_.empty()) wake();
}

// With the lock held. Sends what the socket takes.
void PeerSocket::flush() {
  while (!outgoing_.empty() && ended_.empty()) {
    Outgoing& out = outgoing_.front();
    const int fd = out.attached.get();
    const bool attach = out.sent == 0 && fd >= 0;
    const ssize_t sent = send_some(socket_.get(), out.frame.data() + out.sent, out.frame.size() - out.sent, SCM_RIGHTS,
                                   attach ? &fd : nullptr, sizeof fd);
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (sent < 0) {
      // What a peer has sent before it went may still lie unread: the end of the stream is found by reading.
      if (errno != EPIPE && errno != ECONNRESET) ended_ = system_error("cannot be written to");
      outgoing_.clear();
      queued_bytes_ = 0;
      return;
    }
    last_progress_ms_ = now_ms();
    out.sent += sent;
    if (out.sent < out.frame.size()) continue;
    queued_bytes_ -= out.frame.size();
    outgoing_.pop_front();
  }
}

void PeerSocket::close(const std::string& why) {
  end(why);
  wake();
}

void PeerSocket::end(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ended_.empty()) ended_ = why;
}

void PeerSocket::wake() {
  const uint64_t one = 1;
  // The one way to fail is that the counter is full, and then the thread wakes up anyway.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
}

void PeerSocket::loop() {
  std::string why;
  while (why.empty()) why = wait();
  end(why);
  shutdown(socket_.get(), SHUT_RDWR);
  arrived_.clear();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    outgoing_.clear();
  }
  events_.lost(why);
}

// Waits for something to do, and does it.
std::string PeerSocket::wait() {
  pollfd polled[2] = {{socket_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  int64_t timeout_ms = -1;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_.empty()) return ended_;
    if (greeted_ && !outgoing_.empty()) polled[0].events |= POLLOUT;
    if (!greeted_ || !outgoing_.empty()) {
      timeout_ms = last_progress_ms_ + kPatienceMs - now_ms();
      if (timeout_ms <= 0) return greeted_ ? "does not read what it is sent" : "has not introduced itself";
    }
  }
  if (poll(polled, 2, static_cast<int>(timeout_ms)) < 0) return errno == EINTR ? "" : system_error("poll");
  if (polled[1].revents) {
    uint64_t count;
    [[maybe_unused]] const ssize_t taken = read(wake_.get(), &count, sizeof count);
  }
  if (polled[0].revents & POLLOUT) {
    std::lock_guard<std::mutex> lock(mutex_);
    flush();
  }
  return polled[0].revents & ~POLLOUT ? receive() : "";
}

std::string PeerSocket::receive() {
  char bytes[64 << 10];
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(sizeof(int))];
  iovec part{bytes, sizeof bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t received = recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return "";
  if (received < 0 && errno != ECONNRESET) return system_error("cannot be read from");
  if (received <= 0) return "is gone: its connection is closed";
  keep_ancillary(message);
  if (message.msg_flags & MSG_CTRUNC || arrived_.size() > kMaxDescriptorsKept) {
    return "sent more descriptors than messages";
  }
  incoming_.insert(incoming_.end(), bytes, bytes + received);
  return take_frames();
}

void PeerSocket::keep_ancillary(msghdr& message) {
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET) continue;
    if (head->cmsg_type == SCM_RIGHTS) {
      const size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(head) + i * sizeof fd, sizeof fd);
        arrived_.emplace_back(fd);
      }
    } else if (head->cmsg_type == SCM_CREDENTIALS && !credentials_) {
      ucred theirs;
      std::memcpy(&theirs, CMSG_DATA(head), sizeof theirs);
      pid_ = theirs.pid;
      uid_ = theirs.uid;
      credentials_ = true;
    }
  }
}

std::string PeerSocket::take_frames() {
  size_t at = 0;
  std::string why;
  while (why.empty() && incoming_.size() - at >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, incoming_.data() + at, sizeof header);
    if (header.bytes > kMaxMessageBytes || header.attached > 1) return "sent what is not a message";
    if (incoming_.size() - at - sizeof header < header.bytes) break;
    const char* const body = incoming_.data() + at + sizeof header;
    at += sizeof header + header.bytes;
    Descriptor attached;
    if (header.attached) {
      if (arrived_.empty()) return "sent a message without its descriptor";
      attached = std::move(arrived_.front());
      arrived_.pop_front();
    }
    bool greeted;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      greeted = greeted_;
    }
    if (!greeted) {
      why = greet(body, header.bytes);
      continue;
    }
    try {
      events_.message(body, header.bytes, std::move(attached));
    } catch (const std::exception& error) {
      why = std::string("sent what is not a message: ") + error.what();
    }
  }
  incoming_.erase(incoming_.begin(), incoming_.begin() + at);
  return why;
}

std::string PeerSocket::greet(const char* bytes, size_t size) {
  Hello hello{};
  if (size == sizeof hello) std::memcpy(&hello, bytes, size);
  if (hello.magic != kMagic) return "did not introduce itself as jreshard does";
  if (hello.version != kVersion) {
    return "has another version of jreshard: its messages have version " + std::to_string(hello.version) + ", not " +
           std::to_string(kVersion);
  }
  if (hello.process != peer_) return "introduced itself as process " + std::to_string(hello.process);
  if (!credentials_ || uid_ != geteuid()) return "belongs to another user";
  events_.greeted(pid_);
  std::lock_guard<std::mutex> lock(mutex_);
  greeted_ = true;
  last_progress_ms_ = now_ms();
  flush();
  return "";
}

}  // namespace jreshard
