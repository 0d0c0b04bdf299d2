// Numbers in memory that several processes and their GPUs share: streams write them and wait for them, and so can
// hosts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "cuda_driver.h"
#include "descriptor.h"

namespace jreshard {

class FlagPage {
 public:
  // A page of `count` zeros. Throws std::system_error.
  explicit FlagPage(size_t count);
  // The page behind a descriptor that another process sent. Throws std::system_error, or std::invalid_argument where
  // it has less than `count` numbers.
  FlagPage(Descriptor page, size_t count);
  ~FlagPage();
  FlagPage(const FlagPage&) = delete;
  FlagPage& operator=(const FlagPage&) = delete;

  const Descriptor& descriptor() const { return page_; }
  std::atomic<uint64_t>& operator[](size_t i) { return flags_[i]; }
  void fill(uint64_t value);
  // Lets the GPUs of this process reach the page, if they do not yet; the context of one of them has to be current
  // then, and when the page goes.
  void attach(const cuda::Driver& driver);
  // Where the GPUs find a flag, once it is attached.
  cuda::DevicePtr address(size_t i) const { return device_ + i * sizeof(uint64_t); }

 private:
  void map();

  const Descriptor page_;
  const size_t count_;
  const size_t bytes_;  // whole pages of memory
  std::atomic<uint64_t>* flags_ = nullptr;
  std::mutex attaching_;
  const cuda::Driver* driver_ = nullptr;
  cuda::DevicePtr device_ = 0;
};

}  // namespace jreshard
