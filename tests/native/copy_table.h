// Tables of copies as tests write them, boxes made at random, and what copying them has to come to.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "copy_plan.h"

using Words = std::vector<int64_t>;
using Bytes = std::vector<uint8_t>;

constexpr int kSends = 1, kReceives = 2;
constexpr uint8_t kPoison = 0xA5;
constexpr double kLong = 300;
constexpr double kShort = 0.05;

struct Table {
  int64_t chunk;
  std::vector<int> roles;
  std::vector<int> leaf_template;
  std::vector<std::vector<jreshard::Copy>> templates;

  Words words() const {
    Words out{int64_t(roles.size()), int64_t(leaf_template.size()), int64_t(templates.size()), chunk};
    out.insert(out.end(), roles.begin(), roles.end());
    out.insert(out.end(), leaf_template.begin(), leaf_template.end());
    for (const auto& copies : templates) {
      out.push_back(copies.size());
      for (const jreshard::Copy& c : copies) {
        out.insert(out.end(), {c.src_rank, c.dst_rank, c.src_offset, c.dst_offset, c.run, int64_t(c.dims.size())});
        for (const jreshard::Dim& dim : c.dims) out.insert(out.end(), {dim.extent, dim.src_stride, dim.dst_stride});
      }
    }
    return out;
  }
  template <typename Exchange, typename... Args>
  std::shared_ptr<Exchange> exchange(Args&&... args) const {
    const Words table = words();
    std::vector<std::string> names;
    for (size_t rank = 0; rank < roles.size(); ++rank) names.push_back("device " + std::to_string(rank));
    return std::make_shared<Exchange>(jreshard::CopyPlan(table.data(), table.size()), names,
                                      std::forward<Args>(args)...);
  }
};

// A box in a larger array on either side, as the planner makes them; but rows may start at any byte.
struct StridedBox {
  jreshard::Copy copy;
  int64_t src_bytes;
  int64_t dst_bytes;
};

inline StridedBox random_box(std::mt19937& random, int64_t run) {
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  jreshard::Copy copy{0, 1, draw(0, 9), draw(0, 9), run, std::vector<jreshard::Dim>(draw(0, 4))};
  int64_t src = run + draw(0, 5), dst = run + draw(0, 5);
  for (size_t d = copy.dims.size(); d-- > 0;) {
    copy.dims[d] = {draw(1, 5), src, dst};
    src = src * (copy.dims[d].extent + draw(0, 2)) + draw(0, 1) * draw(0, 3);
    dst = dst * (copy.dims[d].extent + draw(0, 2)) + draw(0, 1) * draw(0, 3);
  }
  return {copy, copy.src_offset + src, copy.dst_offset + dst};
}

// Calls `visit(source offset, destination offset)` for each run of the copy.
template <typename Visit>
void for_each_run(const jreshard::Copy& copy, Visit visit, size_t dim = 0, int64_t src_at = 0, int64_t dst_at = 0) {
  if (dim == copy.dims.size()) {
    visit(copy.src_offset + src_at, copy.dst_offset + dst_at);
    return;
  }
  const jreshard::Dim& d = copy.dims[dim];
  for (int64_t i = 0; i < d.extent; ++i) {
    for_each_run(copy, visit, dim + 1, src_at + i * d.src_stride, dst_at + i * d.dst_stride);
  }
}

inline void copy_naively(const jreshard::Copy& copy, const Bytes& src, Bytes& dst) {
  for_each_run(copy, [&](int64_t src_at, int64_t dst_at) {
    for (int64_t i = 0; i < copy.run; ++i) dst[dst_at + i] = src[src_at + i];
  });
}

// The byte at a position of an array, different from its neighbours' and from other calls' and leaves'.
inline uint8_t byte_at(uint32_t call, int leaf, int64_t position) {
  const uint64_t mixed = (position + 1) * 0x9E3779B97F4A7C15u + call * 0xBF58476D1CE4E5B9u + leaf * 0x94D049BBu;
  return mixed >> 56;
}
