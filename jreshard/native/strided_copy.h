// Copies boxes between shards in host memory.
#pragma once

#include <cstdint>

#include "copy_plan.h"

namespace jreshard {

// Copies rows [begin, end) of `copy`, counted in row-major order over its dims, and of each row the bytes [from, to);
// `src` and `dst` are the shards' starts.
void copy_rows(const Copy& copy, const char* src, char* dst, int64_t begin, int64_t end, int64_t from, int64_t to);

}  // namespace jreshard
