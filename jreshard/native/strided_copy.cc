#include "strided_copy.h"

#include <cstring>

namespace jreshard {
namespace {

// A constant size lets the compiler turn memcpy into plain loads and stores, several times faster for short runs.
template <int64_t kRun>
void copy_line(const char* src, char* dst, int64_t count, const Dim& dim, int64_t) {
  for (int64_t i = 0; i < count; ++i, src += dim.src_stride, dst += dim.dst_stride) std::memcpy(dst, src, kRun);
}

void copy_line_any(const char* src, char* dst, int64_t count, const Dim& dim, int64_t run) {
  for (int64_t i = 0; i < count; ++i, src += dim.src_stride, dst += dim.dst_stride) std::memcpy(dst, src, run);
}

using CopyLine = void (*)(const char*, char*, int64_t, const Dim&, int64_t);

CopyLine line_for(int64_t run) {
  switch (run) {
    case 1:
      return copy_line<1>;
    case 2:
      return copy_line<2>;
    case 4:
      return copy_line<4>;
    case 8:
      return copy_line<8>;
    case 16:
      return copy_line<16>;
    case 32:
      return copy_line<32>;
    case 64:
      return copy_line<64>;
    default:
      return copy_line_any;
  }
}

}  // namespace

void copy_rows(const Copy& copy, const char* src, char* dst, int64_t begin, int64_t end, int64_t from, int64_t to) {
  const Dim inner = innermost(copy);
  const CopyLine line = line_for(to - from);
  for_each_line(copy, begin, end, [&](int64_t src_offset, int64_t dst_offset, int64_t count) {
    line(src + src_offset + from, dst + dst_offset + from, count, inner, to - from);
  });
}

}  // namespace jreshard
