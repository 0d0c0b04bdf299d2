// The staging memory of one device: two slots for what it sends and two for what it receives, used in turn.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "cuda_driver.h"

namespace jreshard {

class StagingRing {
 public:
  // A slot, and what has to be over before it is used again. Events are recorded anew at each use; whoever waits for
  // one waits for its latest record.
  struct Slot {
    cuda::DevicePtr memory = 0;
    cuda::Event filled = nullptr;   // packed, or received
    cuda::Event emptied = nullptr;  // sent, or unpacked
    bool used = false;
  };
  // The slots of one wave, and that for what the wave before received.
  struct Turn {
    Slot& out;
    Slot& in;
    const Slot& in_before;
  };

  // The ring of a device of this process, one for all exchanges, which take turns on the device's stream. It grows to
  // slots of `bytes`, while none of them has a call open. Throws std::runtime_error where the device's memory does not
  // suffice; the exchanges that have the ring can go on.
  static std::shared_ptr<StagingRing> of(const cuda::Driver& driver, int ordinal, int64_t bytes);

  StagingRing(const cuda::Driver& driver, int ordinal);
  ~StagingRing();
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  Turn next() {
    turn_ = !turn_;
    return {out_[turn_], in_[turn_], in_[!turn_]};
  }
  cuda::Stream pack_stream() const { return pack_; }
  cuda::Stream unpack_stream() const { return unpack_; }
  // For copies within the device, which need no slot and can go on beside the others.
  cuda::Stream local_stream() const { return local_; }

 private:
  void grow(int64_t bytes);
  void free_all();

  const cuda::Driver& driver_;
  const int ordinal_;
  const cuda::DeviceContext context_;
  int64_t bytes_ = 0;
  bool turn_ = false;
  Slot out_[2], in_[2];
  cuda::Stream pack_ = nullptr, unpack_ = nullptr, local_ = nullptr;
};

}  // namespace jreshard
