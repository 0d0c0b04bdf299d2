#include "nccl_library.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace jreshard::nccl {
namespace {

template <typename F>
void find(void* handle, const char* symbol, F& function) {
  function = reinterpret_cast<F>(dlsym(handle, symbol));
  if (!function) throw std::runtime_error(std::string("NCCL lacks ") + symbol + "; install a newer one");
}

std::unique_ptr<Library> load(const std::string& path) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(std::string("NCCL cannot be loaded: ") + dlerror());
  auto out = std::make_unique<Library>();
  find(handle, "ncclGetUniqueId", out->GetUniqueId);
  find(handle, "ncclCommInitRankConfig", out->CommInitRankConfig);
  find(handle, "ncclCommGetAsyncError", out->CommGetAsyncError);
  find(handle, "ncclCommAbort", out->CommAbort);
  find(handle, "ncclGroupStart", out->GroupStart);
  find(handle, "ncclGroupEnd", out->GroupEnd);
  find(handle, "ncclSend", out->Send);
  find(handle, "ncclRecv", out->Recv);
  find(handle, "ncclGetErrorString", out->GetErrorString);
  find(handle, "ncclGetLastError", out->GetLastError);
  return out;
}

}  // namespace

const Library& library(const std::string& path) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const loaded = new std::map<std::string, std::unique_ptr<Library>>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<Library>& entry = (*loaded)[path];
  if (!entry) entry = load(path);
  return *entry;
}

void check(const Library& library, Result result, const char* what) {
  if (result == kSuccess || result == kInProgress) return;
  const char* const last = library.GetLastError(nullptr);
  throw std::runtime_error(std::string("jreshard: ") + what + " failed: " + library.GetErrorString(result) +
                           (last && *last ? std::string("; ") + last : ""));
}

}  // namespace jreshard::nccl
