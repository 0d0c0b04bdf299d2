// A stand-in for the part of the CUDA driver that lends device memory between processes, and registers host memory:
// arenas are pages of files, which every importer maps at an address of its own. FakeDriver calls it with its lock
// held.
//
// The "processes" of a test share one address space. So that none gets at what is another's, an address is good for the
// devices of one process only: an arena for its owner's, an import for those that were given access.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "check.h"
#include "cuda_driver.h"
#include "descriptor.h"

enum class ArenaKind { kExportable, kIpc, kPrivate };

class FakeArenas {
 public:
  using DevicePtr = jreshard::cuda::DevicePtr;
  using Result = jreshard::cuda::Result;

  static constexpr size_t kGranularity = 64 << 10;
  static constexpr Result kInvalidValue = 1, kInvalidContext = 201, kAlreadyMapped = 208, kInvalidHandle = 400;

  ~FakeArenas() {
    for (const auto& [base, range] : ranges_) munmap(reinterpret_cast<void*>(base), range.bytes);
  }

  // An arena of a process, at `where` if that is given. Whole multiples of the granularity.
  DevicePtr make(int process, size_t bytes, ArenaKind kind, DevicePtr where = 0) {
    bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    jreshard::Descriptor file(memfd_create("arena", MFD_CLOEXEC));
    CHECK(file && ftruncate(file.get(), bytes) == 0);
    const DevicePtr base = map(where, bytes, PROT_READ | PROT_WRITE, file.get());
    Range& range = ranges_[base];
    range.bytes = bytes;
    range.kind = kind;
    range.id = ++ids_;
    range.process = process;
    range.file = std::make_shared<jreshard::Descriptor>(std::move(file));
    return base;
  }
  void free(DevicePtr base) {
    auto found = ranges_.find(base);
    if (!CHECK(found != ranges_.end() && found->second.kind)) return;
    munmap(reinterpret_cast<void*>(base), found->second.bytes);
    ranges_.erase(found);
  }
  // What keeps memory or addresses, but for arenas.
  std::map<std::string, int> left_behind() const {
    std::map<std::string, int> left;
    for (const auto& [base, range] : ranges_) {
      if (!range.kind) ++left[range.ipc ? "opened" : "reserved"];
    }
    if (!handles_.empty()) left["handles"] = handles_.size();
    if (!registered_.empty()) left["registered"] = registered_.size();
    return left;
  }
  // Whether a device, by its process and ordinal, may read or write there now. What is none of the arenas' is not
  // looked after.
  bool reachable(DevicePtr address, size_t bytes, int process, int ordinal) const {
    const auto* found = at(address);
    if (!found) return true;
    const auto& [base, range] = *found;
    if (address + bytes > base + range.bytes) return false;
    return range.kind ? range.process == process : range.process == process && range.access.count(ordinal);
  }
  bool is_registered(DevicePtr address, int process) const {
    auto after = registered_.upper_bound(address);
    if (after == registered_.begin()) return false;
    const auto& [start, area] = *std::prev(after);
    return address % sizeof(uint64_t) == 0 && address + sizeof(uint64_t) <= start + area.first &&
           area.second == process;
  }

  Result address_range(DevicePtr* base, size_t* bytes, DevicePtr address) const {
    const auto* found = at(address);
    if (!found) return kInvalidValue;
    *base = found->first;
    *bytes = found->second.bytes;
    return 0;
  }
  Result buffer_id(void* out, int attribute, DevicePtr address) const {
    const auto* found = at(address);
    if (attribute != jreshard::cuda::kPointerAttributeBufferId || !found || !found->second.kind) return kInvalidValue;
    std::memcpy(out, &found->second.id, sizeof found->second.id);
    return 0;
  }
  Result retain(uint64_t* handle, void* address) {
    const auto* found = at(reinterpret_cast<DevicePtr>(address));
    if (!found || found->second.kind != ArenaKind::kExportable) return kInvalidValue;
    handles_[*handle = ++ids_] = found->second.file;
    return 0;
  }
  Result export_handle(void* out, uint64_t handle, int type, uint64_t flags) const {
    auto found = handles_.find(handle);
    if (found == handles_.end() || type != jreshard::cuda::kHandleTypePosixFd || flags) return kInvalidValue;
    const int fd = fcntl(found->second->get(), F_DUPFD_CLOEXEC, 0);
    std::memcpy(out, &fd, sizeof fd);
    return fd < 0 ? kInvalidValue : 0;
  }
  Result import_handle(uint64_t* handle, void* fd, int type) {
    jreshard::Descriptor file(fcntl(static_cast<int>(reinterpret_cast<intptr_t>(fd)), F_DUPFD_CLOEXEC, 0));
    if (!file || type != jreshard::cuda::kHandleTypePosixFd) return kInvalidValue;
    handles_[*handle = ++ids_] = std::make_shared<jreshard::Descriptor>(std::move(file));
    return 0;
  }
  Result release(uint64_t handle) { return CHECK(handles_.erase(handle)) ? 0 : kInvalidHandle; }
  Result reserve(DevicePtr* base, size_t bytes, size_t alignment, DevicePtr hint, uint64_t flags) {
    if (!bytes || bytes % kGranularity || alignment || hint || flags) return kInvalidValue;
    *base = map(0, bytes, PROT_NONE, -1);
    ranges_[*base].bytes = bytes;
    return 0;
  }
  Result map_handle(DevicePtr base, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
    Range* const range = reserved(base, bytes);
    auto found = handles_.find(handle);
    if (!range || range->mapped || found == handles_.end() || offset || flags) return kInvalidValue;
    range->mapped = true;
    map(base, bytes, PROT_READ | PROT_WRITE, found->second->get());
    return 0;
  }
  Result unmap(DevicePtr base, size_t bytes) {
    Range* const range = reserved(base, bytes);
    if (!CHECK(range && range->mapped)) return kInvalidValue;
    range->mapped = false;
    range->access.clear();
    map(base, bytes, PROT_NONE, -1);
    return 0;
  }
  Result free_addresses(DevicePtr base, size_t bytes) {
    Range* const range = reserved(base, bytes);
    if (!CHECK(range && !range->mapped)) return kInvalidValue;
    munmap(reinterpret_cast<void*>(base), bytes);
    ranges_.erase(base);
    return 0;
  }
  // `process` is that of the device.
  Result set_access(DevicePtr base, size_t bytes, const jreshard::cuda::MemAccess& access, int process) {
    Range* const range = reserved(base, bytes);
    if (!range || !range->mapped || access.location_type != 1 || access.flags != 3) return kInvalidValue;
    if (!range->access.empty() && range->process != process) return kInvalidValue;
    range->process = process;
    range->access.insert(access.device);
    return 0;
  }
  Result ipc_handle(jreshard::cuda::IpcMemHandle* handle, DevicePtr base) const {
    auto found = ranges_.find(base);
    if (found == ranges_.end() || found->second.kind != ArenaKind::kIpc) return kInvalidValue;
    std::memset(handle->bytes, 0, sizeof handle->bytes);
    std::memcpy(handle->bytes + 8, &found->second.id, sizeof found->second.id);
    return 0;
  }
  Result ipc_open(DevicePtr* base, const jreshard::cuda::IpcMemHandle& handle, unsigned flags, int process,
                  int ordinal) {
    uint64_t id = 0;
    std::memcpy(&id, handle.bytes + 8, sizeof id);
    const Range* owners = nullptr;
    for (const auto& [start, range] : ranges_) {
      if (range.kind && range.id == id) owners = &range;
      if (range.ipc == id && range.process == process && range.access.count(ordinal)) return kAlreadyMapped;
    }
    if (!owners || flags != jreshard::cuda::kIpcLazyPeerAccess) return kInvalidValue;
    *base = map(0, owners->bytes, PROT_READ | PROT_WRITE, owners->file->get());
    Range& range = ranges_[*base];
    range.bytes = owners->bytes;
    range.ipc = id;
    range.process = process;
    range.access = {ordinal};
    return 0;
  }
  Result ipc_close(DevicePtr base, int process, int ordinal) {
    auto found = ranges_.find(base);
    if (!CHECK(found != ranges_.end() && found->second.ipc)) return kInvalidValue;
    if (found->second.process != process || !found->second.access.count(ordinal)) return kInvalidContext;
    munmap(reinterpret_cast<void*>(base), found->second.bytes);
    ranges_.erase(found);
    return 0;
  }
  Result register_host(void* start, size_t bytes, unsigned flags, int process) {
    const size_t page = sysconf(_SC_PAGESIZE);
    const DevicePtr address = reinterpret_cast<DevicePtr>(start);
    if (address % page || bytes % page || flags != jreshard::cuda::kHostRegisterPortableMapped) return kInvalidValue;
    return registered_.emplace(address, std::pair(bytes, process)).second ? 0 : kInvalidValue;
  }
  Result unregister_host(void* start) {
    return CHECK(registered_.erase(reinterpret_cast<DevicePtr>(start))) ? 0 : kInvalidValue;
  }

 private:
  struct Range {
    size_t bytes = 0;
    std::optional<ArenaKind> kind;  // of an arena; else it is a reservation or an import
    uint64_t id = 0;
    int process = 0;
    std::shared_ptr<jreshard::Descriptor> file;
    bool mapped = false;
    uint64_t ipc = 0;      // the id of the arena that was opened
    std::set<int> access;  // ordinals of devices
  };

  static DevicePtr map(DevicePtr where, size_t bytes, int protection, int fd) {
    const int kind = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* const start = mmap(reinterpret_cast<void*>(where), bytes, protection, kind | (where ? MAP_FIXED : 0), fd, 0);
    CHECK(start != MAP_FAILED);
    return reinterpret_cast<DevicePtr>(start);
  }
  const std::pair<const DevicePtr, Range>* at(DevicePtr address) const {
    auto after = ranges_.upper_bound(address);
    if (after == ranges_.begin()) return nullptr;
    const auto& found = *std::prev(after);
    return address - found.first < found.second.bytes ? &found : nullptr;
  }
  Range* reserved(DevicePtr base, size_t bytes) {
    auto found = ranges_.find(base);
    const bool good = found != ranges_.end() && !found->second.kind && !found->second.ipc;
    return good && found->second.bytes == bytes ? &found->second : nullptr;
  }

  std::map<DevicePtr, Range> ranges_;  // by start
  std::map<uint64_t, std::shared_ptr<jreshard::Descriptor>> handles_;
  std::map<DevicePtr, std::pair<size_t, int>> registered_;  // bytes and process, by start
  uint64_t ids_ = 0;
};
