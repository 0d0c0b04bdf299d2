// XLA FFI handlers for CUDA devices. They run when a program is launched, and enqueue on its stream.
#include <exception>

#include "export.h"
#include "ffi_arrays.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace jreshard {
namespace {

namespace ffi = xla::ffi;

// Runs `step(exchange, rank)` for the exchange of `key` and the device of this launch.
template <typename Step>
ffi::Error with_exchange(int64_t key, int32_t ordinal, Step step) {
  const auto opened = find_opened(key);
  if (!opened || !opened->gpu) return ffi::Error::Internal("jreshard: the plan of this program is closed");
  try {
    const int rank = opened->rank_of(ordinal);
    if (rank < 0) return ffi::Error::Internal("jreshard: a program ran on a device that its plan does not use");
    step(*opened->gpu, rank);
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

ffi::Error publish(cuda::Stream stream, int32_t ordinal, ffi::AnyBuffer, ffi::RemainingArgs args,
                   ffi::Result<ffi::AnyBuffer>, int64_t key, int64_t chunk) {
  auto arrays = addresses_of(args);
  if (!arrays.has_value()) return arrays.error();
  return with_exchange(key, ordinal, [&](GpuExchange& exchange, int rank) {
    exchange.publish(rank, static_cast<int>(chunk), *arrays, stream);
  });
}

ffi::Error receive(cuda::Stream stream, int32_t ordinal, ffi::AnyBuffer, ffi::RemainingArgs, ffi::RemainingRets results,
                   int64_t key, int64_t chunk) {
  auto arrays = addresses_of(results);
  if (!arrays.has_value()) return arrays.error();
  return with_exchange(key, ordinal, [&](GpuExchange& exchange, int rank) {
    exchange.receive(rank, static_cast<int>(chunk), *arrays, stream);
  });
}

ffi::Error release(cuda::Stream stream, int32_t ordinal, ffi::AnyBuffer, ffi::RemainingArgs,
                   ffi::Result<ffi::AnyBuffer>, int64_t key, int64_t end) {
  return with_exchange(key, ordinal,
                       [&](GpuExchange& exchange, int rank) { exchange.release(rank, static_cast<int>(end), stream); });
}

}  // namespace
}  // namespace jreshard

using xla::ffi::AnyBuffer;
using xla::ffi::DeviceOrdinal;
using xla::ffi::Ffi;
using Stream = xla::ffi::PlatformStream<jreshard::cuda::Stream>;

JRESHARD_EXPORT XLA_FFI_Error* jreshard_cuda_publish(XLA_FFI_CallFrame* frame) {
  static auto* const handler = Ffi::Bind()
                                   .Ctx<Stream>()
                                   .Ctx<DeviceOrdinal>()
                                   .Arg<AnyBuffer>()
                                   .RemainingArgs()
                                   .Ret<AnyBuffer>()
                                   .Attr<int64_t>("key")
                                   .Attr<int64_t>("chunk")
                                   .To(jreshard::publish)
                                   .release();
  return handler->Call(frame);
}

JRESHARD_EXPORT XLA_FFI_Error* jreshard_cuda_receive(XLA_FFI_CallFrame* frame) {
  static auto* const handler = Ffi::Bind()
                                   .Ctx<Stream>()
                                   .Ctx<DeviceOrdinal>()
                                   .Arg<AnyBuffer>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attr<int64_t>("key")
                                   .Attr<int64_t>("chunk")
                                   .To(jreshard::receive)
                                   .release();
  return handler->Call(frame);
}

JRESHARD_EXPORT XLA_FFI_Error* jreshard_cuda_release(XLA_FFI_CallFrame* frame) {
  static auto* const handler = Ffi::Bind()
                                   .Ctx<Stream>()
                                   .Ctx<DeviceOrdinal>()
                                   .Arg<AnyBuffer>()
                                   .RemainingArgs()
                                   .Ret<AnyBuffer>()
                                   .Attr<int64_t>("key")
                                   .Attr<int64_t>("end")
                                   .To(jreshard::release)
                                   .release();
  return handler->Call(frame);
}
