// The addresses of the arrays that an FFI handler was given, whatever the platform.
#pragma once

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jreshard {

inline xla::ffi::ErrorOr<std::vector<const void*>> addresses_of(xla::ffi::RemainingArgs args) {
  std::vector<const void*> addresses;
  addresses.reserve(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    auto array = args.get<xla::ffi::AnyBuffer>(i);
    if (!array.has_value()) return xla::ffi::Unexpected(array.error());
    addresses.push_back(array->untyped_data());
  }
  return addresses;
}

inline xla::ffi::ErrorOr<std::vector<void*>> addresses_of(xla::ffi::RemainingRets results) {
  std::vector<void*> addresses;
  addresses.reserve(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    auto array = results.get<xla::ffi::AnyBuffer>(i);
    if (!array.has_value()) return xla::ffi::Unexpected(array.error());
    addresses.push_back((*array)->untyped_data());
  }
  return addresses;
}

}  // namespace jreshard
