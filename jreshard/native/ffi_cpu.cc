// XLA FFI handlers for CPU devices. They hold no logic: each finds its exchange and hands over the arrays' addresses.
// None blocks: receive and release return futures that the exchange completes or its watchdog fails.
#include <string>
#include <vector>

#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace jreshard {
namespace {

namespace ffi = xla::ffi;

ffi::Error no_such_plan() { return ffi::Error::Internal("jreshard: the plan of this program is closed"); }

// The per-device rank and the call arrive as operands: a u32[1] shard of the ranks, and a scalar.
using Scalar = ffi::AnyBuffer;

uint32_t first_u32(Scalar buffer) { return *static_cast<const uint32_t*>(buffer.untyped_data()); }

Exchange::Done complete(ffi::Promise promise) {
  return [promise](const std::string* error) mutable {
    if (error) {
      promise.SetError(ffi::Error::Internal(*error));
    } else {
      promise.SetAvailable();
    }
  };
}

ffi::Future failed(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

ffi::Error publish(Scalar call, Scalar rank, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> token, int64_t key,
                   int64_t chunk) {
  auto exchange = find_exchange(key);
  if (!exchange) return no_such_plan();
  std::vector<const void*> arrays;
  arrays.reserve(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    auto array = args.get<ffi::AnyBuffer>(i);
    if (!array.has_value()) return array.error();
    arrays.push_back(array->untyped_data());
  }
  *static_cast<uint32_t*>(token->untyped_data()) = first_u32(call);
  const std::string error =
      exchange->publish(first_u32(call), static_cast<int>(first_u32(rank)), static_cast<int>(chunk), arrays);
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(error);
}

ffi::Future receive(Scalar call, Scalar rank, ffi::RemainingArgs, ffi::RemainingRets results, int64_t key,
                    int64_t chunk) {
  auto exchange = find_exchange(key);
  if (!exchange) return failed(no_such_plan());
  std::vector<void*> arrays;
  arrays.reserve(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    auto array = results.get<ffi::AnyBuffer>(i);
    if (!array.has_value()) return failed(array.error());
    arrays.push_back((*array)->untyped_data());
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  exchange->receive(first_u32(call), static_cast<int>(first_u32(rank)), static_cast<int>(chunk), std::move(arrays),
                    complete(std::move(promise)));
  return future;
}

ffi::Future release(Scalar call, Scalar rank, ffi::Result<ffi::AnyBuffer> token, int64_t key) {
  auto exchange = find_exchange(key);
  if (!exchange) return failed(no_such_plan());
  *static_cast<uint32_t*>(token->untyped_data()) = first_u32(call);
  ffi::Promise promise;
  ffi::Future future(promise);
  exchange->release(first_u32(call), static_cast<int>(first_u32(rank)), complete(std::move(promise)));
  return future;
}

}  // namespace
}  // namespace jreshard

#define JRESHARD_EXPORT extern "C" __attribute__((visibility("default")))

using xla::ffi::AnyBuffer;
using xla::ffi::Ffi;

JRESHARD_EXPORT XLA_FFI_Error* jreshard_cpu_publish(XLA_FFI_CallFrame* frame) {
  static auto* const handler = Ffi::Bind()
                                   .Arg<AnyBuffer>()
                                   .Arg<AnyBuffer>()
                                   .RemainingArgs()
                                   .Ret<AnyBuffer>()
                                   .Attr<int64_t>("key")
                                   .Attr<int64_t>("chunk")
                                   .To(jreshard::publish)
                                   .release();
  return handler->Call(frame);
}

JRESHARD_EXPORT XLA_FFI_Error* jreshard_cpu_receive(XLA_FFI_CallFrame* frame) {
  static auto* const handler = Ffi::Bind()
                                   .Arg<AnyBuffer>()
                                   .Arg<AnyBuffer>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attr<int64_t>("key")
                                   .Attr<int64_t>("chunk")
                                   .To(jreshard::receive)
                                   .release();
  return handler->Call(frame);
}

JRESHARD_EXPORT XLA_FFI_Error* jreshard_cpu_release(XLA_FFI_CallFrame* frame) {
  static auto* const handler = Ffi::Bind()
                                   .Arg<AnyBuffer>()
                                   .Arg<AnyBuffer>()
                                   .Ret<AnyBuffer>()
                                   .Attr<int64_t>("key")
                                   .To(jreshard::release)
                                   .release();
  return handler->Call(frame);
}
