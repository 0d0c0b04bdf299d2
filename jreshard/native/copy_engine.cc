#include "copy_engine.h"

#include <algorithm>

namespace jreshard {
namespace {

// The driver refuses larger pitches (CU_DEVICE_ATTRIBUTE_MAX_PITCH); such rows are copied one by one.
constexpr int64_t kMaxPitch = (int64_t{1} << 31) - 1;

// CUmemcpyAttributes: sources are read in stream order, and no hint is given where they lie.
struct BatchAttributes {
  unsigned src_access_order = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
  int src_location[2] = {0, 0};
  int dst_location[2] = {0, 0};
  unsigned flags = 0;
};

cuda::DevicePtr address(const void* pointer, int64_t offset) {
  return reinterpret_cast<cuda::DevicePtr>(pointer) + offset;
}

bool fits_pitch(const Dim& dim) { return dim.src_stride <= kMaxPitch && dim.dst_stride <= kMaxPitch; }

// Whether `outer` steps over whole rows of `inner`, which is all that a 3-D copy can express.
bool fits_slices(const Dim& outer, const Dim& inner) {
  return fits_pitch(inner) && outer.src_stride % inner.src_stride == 0 && outer.dst_stride % inner.dst_stride == 0;
}

cuda::Memcpy2D rows(const Copy& copy, const Dim& inner, cuda::DevicePtr src, cuda::DevicePtr dst) {
  cuda::Memcpy2D c{};
  c.src_type = c.dst_type = cuda::kMemoryTypeUnified;
  c.src_device = src;
  c.dst_device = dst;
  c.src_pitch = inner.src_stride;
  c.dst_pitch = inner.dst_stride;
  c.width = copy.run;
  c.height = inner.extent;
  return c;
}

cuda::Memcpy3D slices(const Copy& copy, const Dim& outer, const Dim& inner, cuda::DevicePtr src, cuda::DevicePtr dst) {
  cuda::Memcpy3D c{};
  c.src_type = c.dst_type = cuda::kMemoryTypeUnified;
  c.src_device = src;
  c.dst_device = dst;
  c.src_pitch = inner.src_stride;
  c.dst_pitch = inner.dst_stride;
  c.src_height = outer.src_stride / inner.src_stride;
  c.dst_height = outer.dst_stride / inner.dst_stride;
  c.width = copy.run;
  c.height = inner.extent;
  c.depth = outer.extent;
  return c;
}

}  // namespace

void CopyBatch::add(const Copy& copy, const void* src, void* dst) {
  const cuda::DevicePtr from = address(src, copy.src_offset), to = address(dst, copy.dst_offset);
  if (!copy.dims.empty()) {
    strided_.push_back({&copy, from, to});
    return;
  }
  add_contiguous(from, to, copy.run);
}

void CopyBatch::add_contiguous(cuda::DevicePtr src, cuda::DevicePtr dst, size_t bytes) {
  srcs_.push_back(src);
  dsts_.push_back(dst);
  sizes_.push_back(bytes);
}

std::vector<CopyBatch> CopyBatch::split(size_t count) const {
  std::vector<CopyBatch> out(count, CopyBatch(driver_));
  std::vector<uint64_t> bytes(count);
  const auto least = [&](uint64_t more) -> CopyBatch& {
    const size_t i = std::min_element(bytes.begin(), bytes.end()) - bytes.begin();
    bytes[i] += more;
    return out[i];
  };
  for (size_t i = 0; i < sizes_.size(); ++i) least(sizes_[i]).add_contiguous(srcs_[i], dsts_[i], sizes_[i]);
  for (const Strided& s : strided_) least(s.copy->bytes()).strided_.push_back(s);
  return out;
}

void CopyBatch::enqueue(cuda::Stream stream) {
  enqueue_contiguous(stream);
  for (const Strided& s : strided_) enqueue_strided(s, 0, s.src, s.dst, stream);
  strided_.clear();
}

void CopyBatch::enqueue_contiguous(cuda::Stream stream) {
  if (sizes_.size() > 1 && driver_.MemcpyBatchAsync) {
    BatchAttributes attributes;
    size_t first = 0, failed = 0;
    cuda::check(driver_,
                driver_.MemcpyBatchAsync(dsts_.data(), srcs_.data(), sizes_.data(), sizes_.size(), &attributes, &first,
                                         1, &failed, stream),
                "cuMemcpyBatchAsync");
  } else {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      cuda::check(driver_, driver_.MemcpyAsync(dsts_[i], srcs_[i], sizes_[i], stream), "cuMemcpyAsync");
    }
  }
  srcs_.clear();
  dsts_.clear();
  sizes_.clear();
}

void CopyBatch::enqueue_strided(const Strided& strided, size_t dim, cuda::DevicePtr src, cuda::DevicePtr dst,
                                cuda::Stream stream) {
  const std::vector<Dim>& dims = strided.copy->dims;
  const size_t left = dims.size() - dim;
  if (left == 2 && fits_slices(dims[dim], dims[dim + 1])) {
    const cuda::Memcpy3D c = slices(*strided.copy, dims[dim], dims[dim + 1], src, dst);
    cuda::check(driver_, driver_.Memcpy3DAsync(&c, stream), "cuMemcpy3DAsync");
  } else if (left == 1 && fits_pitch(dims[dim])) {
    const cuda::Memcpy2D c = rows(*strided.copy, dims[dim], src, dst);
    cuda::check(driver_, driver_.Memcpy2DAsync(&c, stream), "cuMemcpy2DAsync");
  } else if (left == 0) {
    cuda::check(driver_, driver_.MemcpyAsync(dst, src, strided.copy->run, stream), "cuMemcpyAsync");
  } else {
    for (int64_t i = 0; i < dims[dim].extent; ++i) {
      enqueue_strided(strided, dim + 1, src + i * dims[dim].src_stride, dst + i * dims[dim].dst_stride, stream);
    }
  }
}

}  // namespace jreshard
