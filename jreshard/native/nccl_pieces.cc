#include "nccl_pieces.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace jreshard {
namespace {

// A message costs some 5 µs, two copies within a device some 2 µs: smaller boxes are cheaper by way of the slots.
constexpr int64_t kSmallBytes = 256 << 10;

bool is_dense(const Copy& copy, int64_t Dim::* stride) {
  int64_t expected = copy.run;
  for (size_t d = copy.dims.size(); d-- > 0;) {
    if (copy.dims[d].*stride != expected) return false;
    expected *= copy.dims[d].extent;
  }
  return true;
}

Copy shifted(Copy copy, int64_t src, int64_t dst) {
  copy.src_offset += src;
  copy.dst_offset += dst;
  return copy;
}

// Appends boxes of at most `most` bytes that make up `copy`, cut along the outermost dim where that will do.
void split(const Copy& copy, int64_t most, std::vector<Copy>& out) {
  if (copy.bytes() <= most) {
    out.push_back(copy);
    return;
  }
  if (copy.dims.empty()) {
    for (int64_t at = 0; at < copy.run; at += most) {
      Copy part = shifted(copy, at, at);
      part.run = std::min(most, copy.run - at);
      out.push_back(part);
    }
    return;
  }
  const Dim outer = copy.dims.front();
  const int64_t slices = std::max<int64_t>(1, most / (copy.bytes() / outer.extent));
  for (int64_t at = 0; at < outer.extent; at += slices) {
    Copy part = shifted(copy, at * outer.src_stride, at * outer.dst_stride);
    part.dims.front().extent = std::min(slices, outer.extent - at);
    if (part.dims.front().extent > 1) {
      out.push_back(part);
      continue;
    }
    part.dims.erase(part.dims.begin());
    split(part, most, out);
  }
}

void add_pieces(const Copy& copy, int64_t slot_bytes, std::vector<Piece>& out) {
  const bool small = copy.bytes() < kSmallBytes;
  const bool src_staged = small || !is_dense(copy, &Dim::src_stride);
  const bool dst_staged = small || !is_dense(copy, &Dim::dst_stride);
  std::vector<Copy> parts;
  if (src_staged || dst_staged) {
    split(copy, slot_bytes, parts);
  } else {
    parts.push_back(copy);
  }
  int index = 0;
  for (Copy& part : parts) out.push_back({std::move(part), index++, src_staged, dst_staged});
}

}  // namespace

std::vector<Piece> pieces_of(const CopyPlan& plan, int leaf, const std::vector<Limits>& limits) {
  const int ranks = plan.num_ranks();
  std::vector<Piece> pieces;
  for (int dst = 0; dst < ranks; ++dst) {
    for (const Copy& copy : plan.copies(leaf, dst)) {
      if (copy.src_rank != dst) {
        add_pieces(copy, limits[copy.phase].slot_bytes, pieces);
      } else if (copy.phase > 0) {
        throw std::invalid_argument("rank " + std::to_string(dst) + " passes on to itself in phase " +
                                    std::to_string(copy.phase));
      }
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(), [&](const Piece& a, const Piece& b) {
    const auto key = [&](const Piece& p) {
      return std::tuple(p.copy.phase, p.index, (p.copy.dst_rank - p.copy.src_rank + ranks) % ranks, p.copy.src_rank);
    };
    return key(a) < key(b);
  });
  return pieces;
}

void make_dense(Copy& copy, int64_t Dim::* stride) {
  int64_t expected = copy.run;
  for (size_t d = copy.dims.size(); d-- > 0;) {
    copy.dims[d].*stride = expected;
    expected *= copy.dims[d].extent;
  }
}

}  // namespace jreshard
