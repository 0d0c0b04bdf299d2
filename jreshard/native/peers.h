// The other processes that this one is linked to, and who hears what they tell about which call.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "descriptor.h"
#include "peer_messages.h"
#include "peer_socket.h"

namespace jreshard {

class Peers : public std::enable_shared_from_this<Peers> {
 public:
  // An exchange with ranks in other processes. Called on the threads of links, never under a lock of Peers.
  class Listener {
   public:
    virtual ~Listener() = default;
    // A message about a call that is open. Messages of one process come in order, but for those that came before
    // open(): who opened the call passes them on, perhaps behind newer ones.
    virtual void heard(int process, const Message& message) = 0;
    // A process is no longer linked; `error` says so with its name. Told for every open call.
    virtual void lost(uint32_t call, int process, const std::string& error) = 0;
  };
  struct Heard {
    int process;
    Message message;
  };

  // `self` is the number by which the others know this process.
  explicit Peers(int self) : self_(self) {}
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  int self() const { return self_; }

  // Links `process`, whom errors call `name`. Throws std::exception where the socket cannot serve, or is not needed.
  void connect(int process, Descriptor socket, std::string name);
  void disconnect(int process);
  bool connected(int process) const;
  std::string name(int process) const;
  // The id of a process that has introduced itself, else 0; also 0 where it lives in a PID namespace of its own.
  pid_t pid(int process) const;
  // Never blocks; to nobody where the process is not linked.
  void send(int process, const Message& message, Descriptor attached = Descriptor());

  // What came with LEND or FLAGS messages.
  struct Lent {
    Message message;
    Descriptor attached;
  };
  // Tells one link with a process from the next one; 0 where there is none.
  uint64_t link_serial(int process) const;
  // The arenas that came over that link since this was last asked.
  std::vector<Lent> take_lent(int process, uint64_t serial);
  // The page of flags that came last over that link for a plan; null where none did.
  std::shared_ptr<const Descriptor> flags(int process, uint64_t serial, int64_t key) const;
  // What an exchange has made of a link. It lasts as long as the link, or as somebody holds it.
  struct Belongings {
    virtual ~Belongings() = default;
  };
  using MakeBelongings = std::function<std::shared_ptr<Belongings>(uint64_t serial)>;
  // What `make` made for the link with a process when this was first called; null where there is none.
  std::shared_ptr<Belongings> belongings(int process, const MakeBelongings& make);

  // From now on `listener` hears of the call. Returns what has been heard of it already.
  std::vector<Heard> open(int64_t key, uint32_t call, std::weak_ptr<Listener> listener);
  // The call has ended: with an error, or with empty text.
  void close(int64_t key, uint32_t call, const std::string& error);

 private:
  using CallKey = std::pair<int64_t, uint32_t>;
  struct Peer {
    std::shared_ptr<PeerSocket> link;
    uint64_t serial;
    pid_t pid = 0;
    std::vector<Lent> lent;
    std::map<int64_t, std::shared_ptr<const Descriptor>> flags;  // by plan; the latest
    std::shared_ptr<Belongings> belongings;
  };

  void greeted(int process, uint64_t serial, pid_t pid);
  void take(int process, uint64_t serial, Message message, Descriptor attached);
  // With the lock held: what belongs to the link rather than to a call.
  static void keep_lent(Peer& peer, Message message, Descriptor attached);
  // Forgets the process, if this link is still its link, and tells all listeners.
  void remove(int process, uint64_t serial, const std::string& why);
  // With the lock held: keeps a message of a call that is not open. What to answer, if anything, is left in `answer`.
  void keep(int process, Message message, Message& answer);
  void allow_reading() const;

  const int self_;
  mutable std::mutex mutex_;
  uint64_t links_made_ = 0;
  std::map<int, Peer> peers_;
  std::map<int, std::string> names_;  // of lost ones too
  std::map<CallKey, std::weak_ptr<Listener>> open_;
  std::map<CallKey, std::vector<Heard>> early_;  // of calls that are not open yet
  std::deque<CallKey> early_order_;
  size_t early_addresses_ = 0;
  std::deque<std::pair<CallKey, std::string>> over_;  // the last calls that have ended
};

}  // namespace jreshard
