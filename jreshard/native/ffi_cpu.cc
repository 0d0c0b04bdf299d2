// XLA FFI handlers for CPU devices. They hold no logic: each finds its exchange and hands over the arrays' addresses.
// None blocks: receive and release return futures that the exchange completes or its watchdog fails.
#include <string>

#include "export.h"
#include "ffi_arrays.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace jreshard {
namespace {

namespace ffi = xla::ffi;

ffi::Error no_such_plan() { return ffi::Error::Internal("jreshard: the plan of this program is closed"); }

// The call's number is the one operand that comes from the host. It is handed from chunk to chunk, which orders them.
uint32_t number(ffi::AnyBuffer call) { return *static_cast<const uint32_t*>(call.untyped_data()); }

void hand_on(ffi::AnyBuffer call, ffi::Result<ffi::AnyBuffer> token) {
  *static_cast<uint32_t*>(token->untyped_data()) = number(call);
}

HostExchange::Done complete(ffi::Promise promise) {
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

ffi::Error publish(int32_t ordinal, ffi::AnyBuffer call, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> token,
                   int64_t key, int64_t chunk) {
  const auto opened = find_opened(key);
  if (!opened || !opened->host) return no_such_plan();
  auto arrays = addresses_of(args);
  if (!arrays.has_value()) return arrays.error();
  hand_on(call, token);
  const std::string error =
      opened->host->publish(number(call), opened->rank_of(ordinal), static_cast<int>(chunk), *arrays);
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(error);
}

ffi::Future receive(int32_t ordinal, ffi::AnyBuffer call, ffi::RemainingArgs, ffi::RemainingRets results, int64_t key,
                    int64_t chunk) {
  const auto opened = find_opened(key);
  if (!opened || !opened->host) return failed(no_such_plan());
  auto arrays = addresses_of(results);
  if (!arrays.has_value()) return failed(arrays.error());
  ffi::Promise promise;
  ffi::Future future(promise);
  opened->host->receive(number(call), opened->rank_of(ordinal), static_cast<int>(chunk), std::move(*arrays),
                        complete(std::move(promise)));
  return future;
}

// There is one for all chunks, which end at `end`.
ffi::Future release(int32_t ordinal, ffi::AnyBuffer call, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> token,
                    int64_t key, int64_t) {
  const auto opened = find_opened(key);
  if (!opened || !opened->host) return failed(no_such_plan());
  hand_on(call, token);
  ffi::Promise promise;
  ffi::Future future(promise);
  opened->host->release(number(call), opened->rank_of(ordinal), complete(std::move(promise)));
  return future;
}

}  // namespace
}  // namespace jreshard

using xla::ffi::AnyBuffer;
using xla::ffi::DeviceOrdinal;
using xla::ffi::Ffi;

JRESHARD_EXPORT XLA_FFI_Error* jreshard_cpu_publish(XLA_FFI_CallFrame* frame) {
  static auto* const handler = Ffi::Bind()
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

JRESHARD_EXPORT XLA_FFI_Error* jreshard_cpu_receive(XLA_FFI_CallFrame* frame) {
  static auto* const handler = Ffi::Bind()
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

JRESHARD_EXPORT XLA_FFI_Error* jreshard_cpu_release(XLA_FFI_CallFrame* frame) {
  static auto* const handler = Ffi::Bind()
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
