// An exchange whose steps are enqueued on the streams of GPUs, by handlers that run when a program is launched.
#pragma once

#include <stdexcept>
#include <vector>

#include "cuda_driver.h"
#include "exchange.h"

namespace jreshard {

inline std::runtime_error unfit() { return std::runtime_error("jreshard: a program does not fit its plan"); }

class GpuExchange : public Exchange {
 public:
  // Each enqueues on `stream`, the stream of the rank's device; `arrays` holds one pointer a leaf of `chunk`. Throws
  // std::runtime_error.
  virtual void publish(int rank, int chunk, const std::vector<const void*>& arrays, cuda::Stream stream) = 0;
  virtual void receive(int rank, int chunk, const std::vector<void*>& arrays, cuda::Stream stream) = 0;
  // Of the chunks before `end`; ends rise from launch to launch, up to the number of chunks.
  virtual void release(int rank, int end, cuda::Stream stream) = 0;
};

}  // namespace jreshard
