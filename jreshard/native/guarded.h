// Errors across the C interface.
#pragma once

#include <cstddef>
#include <cstdio>
#include <exception>

namespace jreshard {

// Runs `body`; what it throws becomes the text of `error`, which has `capacity` bytes. Returns whether it did not
// throw.
template <typename Body>
bool guarded(char* error, size_t capacity, Body body) {
  try {
    body();
    return true;
  } catch (const std::exception& e) {
    std::snprintf(error, capacity, "%s", e.what());
    return false;
  }
}

}  // namespace jreshard
