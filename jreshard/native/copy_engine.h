// Boxes as work for a GPU's copy engines.
#pragma once

#include <vector>

#include "copy_plan.h"
#include "cuda_driver.h"

namespace jreshard {

// Collects the copies that one stream makes in one go, contiguous ones to be handed to the driver in a batch.
class CopyBatch {
 public:
  explicit CopyBatch(const cuda::Driver& driver) : driver_(driver) {}

  // Queues `copy` between the shards that start at `src` and `dst`.
  void add(const Copy& copy, const void* src, void* dst);
  size_t size() const { return sizes_.size() + strided_.size(); }
  // The same copies in so many batches, of about as many bytes each.
  std::vector<CopyBatch> split(size_t count) const;
  // Enqueues all that was added. Throws std::runtime_error where the driver refuses.
  void enqueue(cuda::Stream stream);

 private:
  struct Strided {
    const Copy* copy;
    cuda::DevicePtr src;
    cuda::DevicePtr dst;
  };
  void enqueue_contiguous(cuda::Stream stream);
  void enqueue_strided(const Strided& strided, size_t dim, cuda::DevicePtr src, cuda::DevicePtr dst,
                       cuda::Stream stream);

  void add_contiguous(cuda::DevicePtr src, cuda::DevicePtr dst, size_t bytes);

  const cuda::Driver& driver_;
  std::vector<cuda::DevicePtr> srcs_, dsts_;
  std::vector<size_t> sizes_;
  std::vector<Strided> strided_;
};

}  // namespace jreshard
