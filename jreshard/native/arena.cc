#include "arena.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace jreshard {

Arena ArenaExports::find(uint64_t address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto after = known_.upper_bound(address);
  if (after != known_.begin()) {
    const Arena& found = std::prev(after)->second;
    uint64_t id = 0;
    // The same addresses may belong to another allocation by now.
    if (found.holds(address) && driver_.PointerGetAttribute(&id, cuda::kPointerAttributeBufferId, address) == 0 &&
        id == found.id) {
      return found;
    }
  }
  Arena arena;
  size_t bytes = 0;
  cuda::DevicePtr base = 0;
  cuda::check(driver_, driver_.MemGetAddressRange(&base, &bytes, address), "cuMemGetAddressRange");
  cuda::check(driver_, driver_.PointerGetAttribute(&arena.id, cuda::kPointerAttributeBufferId, address),
              "cuPointerGetAttribute");
  arena.base = base;
  arena.bytes = bytes;
  cuda::AllocationHandle handle = 0;
  if (driver_.MemRetainAllocationHandle(&handle, reinterpret_cast<void*>(base)) == cuda::kSuccess) {
    driver_.MemRelease(handle);
  } else {
    cuda::IpcMemHandle ipc;
    cuda::check(driver_, driver_.IpcGetMemHandle(&ipc, base),
                "lending the memory of arrays (does XLA_PYTHON_CLIENT_ALLOCATOR name another allocator than the "
                "default?): cuIpcGetMemHandle");
    arena.ipc.assign(ipc.bytes, ipc.bytes + sizeof(ipc.bytes));
  }
  known_[arena.base] = arena;
  return arena;
}

Descriptor ArenaExports::lend(const Arena& arena) {
  if (!arena.ipc.empty()) return Descriptor();
  cuda::AllocationHandle handle = 0;
  cuda::check(driver_, driver_.MemRetainAllocationHandle(&handle, reinterpret_cast<void*>(arena.base)),
              "cuMemRetainAllocationHandle");
  int fd = -1;
  const cuda::Result exported = driver_.MemExportToShareableHandle(&fd, handle, cuda::kHandleTypePosixFd, 0);
  driver_.MemRelease(handle);
  cuda::check(driver_, exported, "lending the memory of arrays: cuMemExportToShareableHandle");
  return Descriptor(fd);
}

ArenaImports::~ArenaImports() {
  for (Import& import : imports_) unmap(import);
}

void ArenaImports::add(Arena arena, Descriptor handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = imports_.begin(); it != imports_.end();) {
    const bool gone = it->arena.base < arena.base + arena.bytes && arena.base < it->arena.base + it->arena.bytes;
    if (gone) unmap(*it);  // the owner has freed it: other memory is there now
    it = gone ? imports_.erase(it) : std::next(it);
  }
  imports_.push_front({std::move(arena), std::move(handle)});
}

const void* ArenaImports::translate(uint64_t address, int ordinal) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = imports_.begin(); it != imports_.end(); ++it) {
    if (!it->arena.holds(address)) continue;
    if (!it->mapped) map(*it);
    if (!it->devices.count(ordinal)) allow(*it, ordinal);
    imports_.splice(imports_.begin(), imports_, it);
    return reinterpret_cast<const void*>(it->mapped + (address - it->arena.base));
  }
  throw std::runtime_error("jreshard: a process published an array in memory that it has not lent");
}

void ArenaImports::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (imports_.size() > kMostMapped) {
    unmap(imports_.back());
    imports_.pop_back();
  }
}

void ArenaImports::map(Import& import) {
  const Arena& arena = import.arena;
  if (!arena.ipc.empty()) {
    cuda::IpcMemHandle handle;
    std::memcpy(handle.bytes, arena.ipc.data(), std::min(arena.ipc.size(), sizeof(handle.bytes)));
    cuda::check(driver_, driver_.IpcOpenMemHandle(&import.mapped, handle, cuda::kIpcLazyPeerAccess),
                "cuIpcOpenMemHandle");
    return;
  }
  cuda::AllocationHandle handle = 0;
  void* const fd = reinterpret_cast<void*>(static_cast<intptr_t>(import.handle.get()));
  cuda::check(driver_, driver_.MemImportFromShareableHandle(&handle, fd, cuda::kHandleTypePosixFd),
              "cuMemImportFromShareableHandle");
  cuda::DevicePtr mapped = 0;
  cuda::Result result = driver_.MemAddressReserve(&mapped, arena.bytes, 0, 0, 0);
  if (result == cuda::kSuccess) {
    result = driver_.MemMap(mapped, arena.bytes, 0, handle, 0);
    if (result != cuda::kSuccess) driver_.MemAddressFree(mapped, arena.bytes);
  }
  driver_.MemRelease(handle);  // the mapping keeps it
  cuda::check(driver_, result, "mapping the memory of another process");
  import.mapped = mapped;
}

void ArenaImports::allow(Import& import, int ordinal) {
  if (import.arena.ipc.empty()) {
    cuda::MemAccess access;
    access.device = ordinal;
    cuda::check(driver_, driver_.MemSetAccess(import.mapped, import.arena.bytes, &access, 1), "cuMemSetAccess");
  }
  import.devices.insert(ordinal);
}

void ArenaImports::unmap(Import& import) {
  if (!import.mapped) return;
  if (!import.arena.ipc.empty()) {
    driver_.IpcCloseMemHandle(import.mapped);
  } else {
    driver_.MemUnmap(import.mapped, import.arena.bytes);
    driver_.MemAddressFree(import.mapped, import.arena.bytes);
  }
  import.mapped = 0;
  import.devices.clear();
}

}  // namespace jreshard
