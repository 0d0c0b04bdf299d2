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
      find(library, "cuStreamCreate", d.StreamCreate) && find(library, "cuStreamWaitEvent", d.StreamWaitEvent) &&
      find(library, "cuEventCreate", d.EventCreate) && find(library, "cuEventRecord", d.EventRecord) &&
      find(library, "cuMemcpyAsync", d.MemcpyAsync) && find(library, "cuMemcpy2DAsync_v2", d.Memcpy2DAsync) &&
      find(library, "cuMemcpy3DAsync_v2", d.Memcpy3DAsync);
  if (!out.usable) out.error = "the NVIDIA driver lacks a function that is needed; update it";
  find(library, "cuMemcpyBatchAsync", d.MemcpyBatchAsync);
  return out;
}

}  // namespace

const Driver* driver(std::string* error) {
  static const Loaded* const loaded = new Loaded(load());
  if (!loaded->usable) *error = loaded->error;
  return loaded->usable ? &loaded->driver : nullptr;
}

void check(const Driver& driver, Result result, const char* what) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  driver.GetErrorString(result, &text);
  throw std::runtime_error(std::string("jreshard: ") + what + " failed: " + (text ? text : "unknown") + " (" +
                           std::to_string(result) + ")");
}

StreamContext::StreamContext(const Driver& driver, Stream stream) : driver_(driver) {
  Context context = nullptr;
  check(driver, driver.StreamGetCtx(stream, &context), "cuStreamGetCtx");
  check(driver, driver.CtxPushCurrent(context), "cuCtxPushCurrent");
}

StreamContext::~StreamContext() {
  Context context = nullptr;
  driver_.CtxPopCurrent(&context);
}

}  // namespace jreshard::cuda
