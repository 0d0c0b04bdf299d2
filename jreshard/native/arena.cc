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
  for (Import& import : gone_) unmap(import);
}

void ArenaImports::add(Arena arena, Descriptor handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = imports_.begin(); it != imports_.end();) {
    const auto each = it++;
    const Arena& old = each->arena;
    const bool gone = old.base < arena.base + arena.bytes && arena.base < old.base + old.bytes;
    if (gone) gone_.splice(gone_.end(), imports_, each);  // the owner has freed it: other memory is there now
  }
  imports_.push_front({std::move(arena), std::move(handle)});
}

const void* ArenaImports::translate(uint64_t address, int ordinal) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = imports_.begin(); it != imports_.end(); ++it) {
    if (!it->arena.holds(address)) continue;
    imports_.splice(imports_.begin(), imports_, it);
    const cuda::DevicePtr base = it->arena.ipc.empty() ? (allow(*it, ordinal), it->mapped) : open(*it, ordinal);
    return reinterpret_cast<const void*>(base + (address - it->arena.base));
  }
  throw std::runtime_error("jreshard: a process published an array in memory that it has not lent");
}

void ArenaImports::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Import& import : gone_) unmap(import);
  gone_.clear();
  size_t mapped = 0;
  for (Import& import : imports_) {
    if (import.used() && ++mapped > kMostMapped) unmap(import);
  }
}

void ArenaImports::map(Import& import) {
  const size_t bytes = import.arena.bytes;
  cuda::AllocationHandle handle = 0;
  void* const fd = reinterpret_cast<void*>(static_cast<intptr_t>(import.handle.get()));
  cuda::check(driver_, driver_.MemImportFromShareableHandle(&handle, fd, cuda::kHandleTypePosixFd),
              "cuMemImportFromShareableHandle");
  cuda::DevicePtr mapped = 0;
  cuda::Result result = driver_.MemAddressReserve(&mapped, bytes, 0, 0, 0);
  if (result == cuda::kSuccess) {
    result = driver_.MemMap(mapped, bytes, 0, handle, 0);
    if (result != cuda::kSuccess) driver_.MemAddressFree(mapped, bytes);
  }
  driver_.MemRelease(handle);  // the mapping keeps it
  cuda::check(driver_, result, "mapping the memory of another process");
  import.mapped = mapped;
}

void ArenaImports::allow(Import& import, int ordinal) {
  if (!import.mapped) map(import);
  if (import.devices.count(ordinal)) return;
  cuda::MemAccess access;
  access.device = ordinal;
  cuda::check(driver_, driver_.MemSetAccess(import.mapped, import.arena.bytes, &access, 1), "cuMemSetAccess");
  import.devices.insert(ordinal);
}

// Belongs to the context that is current.
cuda::DevicePtr ArenaImports::open(Import& import, int ordinal) {
  auto found = import.opened.find(ordinal);
  if (found != import.opened.end()) return found->second;
  cuda::IpcMemHandle handle{};
  std::memcpy(handle.bytes, import.arena.ipc.data(), std::min(import.arena.ipc.size(), sizeof(handle.bytes)));
  cuda::DevicePtr opened = 0;
  cuda::check(driver_, driver_.IpcOpenMemHandle(&opened, handle, cuda::kIpcLazyPeerAccess), "cuIpcOpenMemHandle");
  return import.opened[ordinal] = opened;
}

void ArenaImports::unmap(Import& import) {
  if (import.mapped) {
    driver_.MemUnmap(import.mapped, import.arena.bytes);
    driver_.MemAddressFree(import.mapped, import.arena.bytes);
    import.mapped = 0;
    import.devices.clear();
  }
  for (auto [ordinal, opened] : import.opened) {
    try {
      const cuda::DeviceContext device(driver_, ordinal);
      const cuda::CurrentContext context(driver_, device.get());
      driver_.IpcCloseMemHandle(opened);
    } catch (const std::runtime_error&) {
      // The context is gone, and all that was mapped in it.
    }
  }
  import.opened.clear();
}

}  // namespace jreshard
