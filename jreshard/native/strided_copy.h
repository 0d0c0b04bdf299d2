// Copies boxes between shards in host memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "copy_plan.h"

namespace jreshard {

// Calls `visit(source offset, destination offset, rows)` for each line of rows of the innermost dim among the rows
// [begin, end) of `copy`. Within a line, rows lie at the strides of `innermost(copy)`.
template <typename Visit>
void for_each_line(const Copy& copy, int64_t begin, int64_t end, Visit visit);

// A copy without dims is one row.
inline Dim innermost(const Copy& copy) { return copy.dims.empty() ? Dim{1, 0, 0} : copy.dims.back(); }

// Copies rows [begin, end) of `copy`, counted in row-major order over its dims, and of each row the bytes [from, to);
// `src` and `dst` are the shards' starts.
void copy_rows(const Copy& copy, const char* src, char* dst, int64_t begin, int64_t end, int64_t from, int64_t to);

template <typename Visit>
void for_each_line(const Copy& copy, int64_t begin, int64_t end, Visit visit) {
  const Dim inner = innermost(copy);
  const size_t outer_dims = copy.dims.empty() ? 0 : copy.dims.size() - 1;
  for (int64_t row = begin; row < end;) {
    const int64_t first = row % inner.extent;
    const int64_t count = std::min(inner.extent - first, end - row);
    int64_t src_offset = copy.src_offset + first * inner.src_stride;
    int64_t dst_offset = copy.dst_offset + first * inner.dst_stride;
    int64_t outer = row / inner.extent;
    for (size_t d = outer_dims; d-- > 0;) {
      const Dim& dim = copy.dims[d];
      src_offset += outer % dim.extent * dim.src_stride;
      dst_offset += outer % dim.extent * dim.dst_stride;
      outer /= dim.extent;
    }
    visit(src_offset, dst_offset, count);
    row += count;
  }
}

}  // namespace jreshard
