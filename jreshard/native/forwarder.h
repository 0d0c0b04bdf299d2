// Passes to an exchange what comes on the threads of links and of the watchdog, for as long as the exchange is there.
// Those threads never hold the exchange itself: who lets it go last may have to wait for its devices.
#pragma once

#include <mutex>
#include <string>

#include "peers.h"

namespace jreshard {

class Forwarder : public Peers::Listener {
 public:
  class Target {
   public:
    virtual ~Target() = default;
    // The deadline of a call has passed.
    virtual void expired(uint32_t call) = 0;
    // As of Peers::Listener; not for who has no links.
    virtual void heard(int, const Message&) {}
    virtual void lost(uint32_t, int, const std::string&) {}
  };

  explicit Forwarder(Target& target) : target_(&target) {}

  void heard(int process, const Message& message) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (target_) target_->heard(process, message);
  }
  void lost(uint32_t call, int process, const std::string& error) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (target_) target_->lost(call, process, error);
  }
  void expired(uint32_t call) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (target_) target_->expired(call);
  }
  // When it returns, nothing is passed on any more. Not to be called with a lock that the target takes when it hears.
  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    target_ = nullptr;
  }

 private:
  std::mutex mutex_;
  Target* target_;
};

}  // namespace jreshard
