// What every kind of exchange offers to Python: calls are opened, may be failed, and end.
#pragma once

#include <cstdint>
#include <string>

namespace jreshard {

class Exchange {
 public:
  using CallId = uint32_t;
  virtual ~Exchange() = default;

  // Opens a call. It fails by itself when it has not ended after `timeout_s` seconds.
  // Returns false where a call of that id is open already.
  virtual bool begin(CallId id, double timeout_s) = 0;
  virtual bool release_now(CallId id) = 0;
  // How many publish and receive steps of the call have run so far, on ranks of this process: what was launched for
  // those cannot fail any more without the call's knowing. More than there are when it has ended; always 0 where steps
  // run later than they are launched.
  virtual int steps_run(CallId) const { return 0; }
  virtual void abort(CallId id, const std::string& reason) = 0;
  virtual void abort_all(const std::string& reason) = 0;
  virtual int open_calls() const = 0;
  // Whether no further call can be opened, because one has failed.
  virtual bool broken() const { return false; }
  // Returns when the call has ended, or throws std::runtime_error with why it failed; where the arrays themselves tell
  // that, returns at once.
  virtual void wait(CallId) {}
};

}  // namespace jreshard
