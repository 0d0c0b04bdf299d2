#include "staging_ring.h"

#include <stdexcept>
#include <string>

namespace jreshard {

std::shared_ptr<StagingRing> StagingRing::of(const cuda::Driver& driver, int ordinal, int64_t bytes) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const rings = new std::map<int, std::weak_ptr<StagingRing>>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::shared_ptr<StagingRing> ring = (*rings)[ordinal].lock();
  if (!ring) (*rings)[ordinal] = ring = std::make_shared<StagingRing>(driver, ordinal);
  ring->grow(bytes);
  return ring;
}

StagingRing::StagingRing(const cuda::Driver& driver, int ordinal)
    : driver_(driver), ordinal_(ordinal), context_(driver, ordinal) {
  const cuda::CurrentContext current(driver_, context_.get());
  try {
    for (cuda::Stream* stream : {&pack_, &unpack_, &local_}) {
      cuda::check(driver_, driver_.StreamCreate(stream, cuda::kStreamNonBlocking), "cuStreamCreate");
    }
    for (Slot* slot : {&out_[0], &out_[1], &in_[0], &in_[1]}) {
      for (cuda::Event* event : {&slot->filled, &slot->emptied}) {
        cuda::check(driver_, driver_.EventCreate(event, cuda::kEventDisableTiming), "cuEventCreate");
      }
    }
  } catch (const std::runtime_error&) {
    free_all();
    throw;
  }
}

StagingRing::~StagingRing() {
  if (driver_.CtxPushCurrent(context_.get()) != cuda::kSuccess) return;
  free_all();
  cuda::Context popped = nullptr;
  driver_.CtxPopCurrent(&popped);
}

void StagingRing::free_all() {
  for (Slot* slot : {&out_[0], &out_[1], &in_[0], &in_[1]}) {
    if (slot->memory) driver_.MemFree(slot->memory);  // waits for the device's work
    for (cuda::Event event : {slot->filled, slot->emptied}) {
      if (event) driver_.EventDestroy(event);
    }
  }
  for (cuda::Stream stream : {pack_, unpack_, local_}) {
    if (stream) driver_.StreamDestroy(stream);
  }
}

void StagingRing::grow(int64_t bytes) {
  if (bytes <= bytes_) return;
  const cuda::CurrentContext current(driver_, context_.get());
  for (Slot* slot : {&out_[0], &out_[1], &in_[0], &in_[1]}) {
    cuda::DevicePtr larger = 0;
    if (driver_.MemAlloc(&larger, bytes) != cuda::kSuccess) {
      throw std::runtime_error("GPU " + std::to_string(ordinal_) + " has no memory for four staging slots of " +
                               std::to_string(bytes) +
                               " bytes outside of JAX's pool; lower JRESHARD_STAGING_MIB or "
                               "XLA_PYTHON_CLIENT_MEM_FRACTION");
    }
    if (slot->memory) driver_.MemFree(slot->memory);
    slot->memory = larger;
  }
  bytes_ = bytes;
}

}  // namespace jreshard
