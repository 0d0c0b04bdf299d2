#include "cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace jreshard::cuda {
namespace {

struct Loaded {
  Driver driver{};
  bool usable = false;
  std::string error;
};

template <typename F>
bool find(void* library, const char* symbol, F& function) {
  function = reinterpret_cast<F>(dlsym(library, symbol));
  return function != nullptr;
}

Loaded load() {
  Loaded out;
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    out.error = "the NVIDIA driver (libcuda.so.1) cannot be loaded; install it: " + std::string(dlerror());
    return out;
  }
  Driver& d = out.driver;
  out.usable =
      find(library, "cuGetErrorString", d.GetErrorString) && find(library, "cuStreamGetCtx", d.StreamGetCtx) &&
      find(library, "cuCtxPushCurrent_v2", d.CtxPushCurrent) && find(library, "cuCtxPopCurrent_v2", d.CtxPopCurrent) &&
      find(library, "cuDeviceGet", d.DeviceGet) &&
      find(library, "cuDevicePrimaryCtxRetain", d.DevicePrimaryCtxRetain) &&
      find(library, "cuDevicePrimaryCtxRelease_v2", d.DevicePrimaryCtxRelease) &&
      find(library, "cuStreamCreate", d.StreamCreate) && find(library, "cuStreamDestroy_v2", d.StreamDestroy) &&
      find(library, "cuStreamQuery", d.StreamQuery) && find(library, "cuStreamWaitEvent", d.StreamWaitEvent) &&
      find(library, "cuEventCreate", d.EventCreate) && find(library, "cuEventDestroy_v2", d.EventDestroy) &&
      find(library, "cuEventQuery", d.EventQuery) && find(library, "cuEventRecord", d.EventRecord) &&
      find(library, "cuMemAlloc_v2", d.MemAlloc) && find(library, "cuMemFree_v2", d.MemFree) &&
      find(library, "cuMemGetAddressRange_v2", d.MemGetAddressRange) &&
      find(library, "cuPointerGetAttribute", d.PointerGetAttribute) &&
      find(library, "cuMemHostRegister_v2", d.MemHostRegister) &&
      find(library, "cuMemHostUnregister", d.MemHostUnregister) &&
      find(library, "cuMemHostGetDevicePointer_v2", d.MemHostGetDevicePointer) &&
      find(library, "cuStreamWriteValue64_v2", d.StreamWriteValue64) &&
      find(library, "cuStreamWaitValue64_v2", d.StreamWaitValue64) &&
      find(library, "cuMemRetainAllocationHandle", d.MemRetainAllocationHandle) &&
      find(library, "cuMemExportToShareableHandle", d.MemExportToShareableHandle) &&
      find(library, "cuMemImportFromShareableHandle", d.MemImportFromShareableHandle) &&
      find(library, "cuMemRelease", d.MemRelease) && find(library, "cuMemAddressReserve", d.MemAddressReserve) &&
      find(library, "cuMemAddressFree", d.MemAddressFree) && find(library, "cuMemMap", d.MemMap) &&
      find(library, "cuMemUnmap", d.MemUnmap) && find(library, "cuMemSetAccess", d.MemSetAccess) &&
      find(library, "cuIpcGetMemHandle", d.IpcGetMemHandle) &&
      find(library, "cuIpcOpenMemHandle_v2", d.IpcOpenMemHandle) &&
      find(library, "cuIpcCloseMemHandle", d.IpcCloseMemHandle) && find(library, "cuMemcpyAsync", d.MemcpyAsync) &&
      find(library, "cuMemcpy2DAsync_v2", d.Memcpy2DAsync) && find(library, "cuMemcpy3DAsync_v2", d.Memcpy3DAsync);
  if (!out.usable) out.error = "the NVIDIA driver lacks a function that is needed; update it";
  find(library, "cuMemcpyBatchAsync", d.MemcpyBatchAsync);
  return out;
}

}  // namespace

const Driver& driver() {
  static const Loaded* const loaded = new Loaded(load());
  if (!loaded->usable) throw std::runtime_error(loaded->error);
  return loaded->driver;
}

void check(const Driver& driver, Result result, const char* what) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  driver.GetErrorString(result, &text);
  throw std::runtime_error(std::string("jreshard: ") + what + " failed: " + (text ? text : "unknown") + " (" +
                           std::to_string(result) + ")");
}

CurrentContext::CurrentContext(const Driver& driver, Stream stream) : driver_(driver) {
  Context context = nullptr;
  check(driver, driver.StreamGetCtx(stream, &context), "cuStreamGetCtx");
  check(driver, driver.CtxPushCurrent(context), "cuCtxPushCurrent");
}

CurrentContext::CurrentContext(const Driver& driver, Context context) : driver_(driver) {
  check(driver, driver.CtxPushCurrent(context), "cuCtxPushCurrent");
}

CurrentContext::~CurrentContext() {
  Context context = nullptr;
  driver_.CtxPopCurrent(&context);
}

DeviceContext::DeviceContext(const Driver& driver, int ordinal) : driver_(driver) {
  check(driver, driver.DeviceGet(&device_, ordinal), "cuDeviceGet");
  check(driver, driver.DevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

DeviceContext::~DeviceContext() { driver_.DevicePrimaryCtxRelease(device_); }

}  // namespace jreshard::cuda
