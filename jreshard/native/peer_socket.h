// A connection to another process of the same user on the same host: a Unix stream socket that carries messages, and
// file descriptors beside them. What the messages mean is peer_messages.h's affair.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "descriptor.h"

namespace jreshard {

class PeerSocket : public std::enable_shared_from_this<PeerSocket> {
 public:
  static constexpr size_t kMaxMessageBytes = 1 << 20;

  // What the link's own thread calls. None may block for long, or nothing else is heard of the peer meanwhile.
  struct Events {
    // The peer has introduced itself; its id as this process sees it, or 0 where that cannot be told. Comes first.
    std::function<void(pid_t)> greeted;
    // A message, with the descriptor that came with it if any. What it throws ends the link.
    std::function<void(const char* bytes, size_t size, Descriptor attached)> message;
    // The link has ended, and why: a phrase that goes on from the peer's name. Comes once, and last.
    std::function<void(const std::string& why)> lost;
  };

  // `self` and `peer` are the numbers of the two processes: a peer that gives another number is not listened to.
  static std::shared_ptr<PeerSocket> start(Descriptor socket, int self, int peer, Events events);

  // Never blocks: what the peer does not take at once is queued. A peer that takes nothing for long is given up.
  // Nothing is sent before the peer has introduced itself. What is sent to a lost peer is dropped.
  void send(std::vector<char> bytes, Descriptor attached = Descriptor());
  // Ends the link from this side; returns at once.
  void close(const std::string& why);

 private:
  struct Outgoing {
    std::vector<char> frame;
    size_t sent = 0;
    Descriptor attached;
  };

  PeerSocket(Descriptor socket, int self, int peer, Events events);
  void loop();
  // The next four return why the link has to end, or an empty string.
  std::string wait();
  std::string receive();
  std::string take_frames();
  std::string greet(const char* bytes, size_t size);
  void keep_ancillary(msghdr& message);
  void send_hello();
  void flush();
  void end(const std::string& why);
  void wake();

  const Descriptor socket_;
  const Descriptor wake_;
  const int self_;
  const int peer_;
  const Events events_;

  // Of the link's own thread.
  std::vector<char> incoming_;
  std::deque<Descriptor> arrived_;  // descriptors whose messages are not whole yet
  pid_t pid_ = 0;
  uid_t uid_ = 0;
  bool credentials_ = false;

  std::mutex mutex_;
  std::deque<Outgoing> outgoing_;
  size_t queued_bytes_ = 0;
  int64_t last_progress_ms_ = 0;
  bool greeted_ = false;
  std::string ended_;  // why, once it has
};

}  // namespace jreshard
