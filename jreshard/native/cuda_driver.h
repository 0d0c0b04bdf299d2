// The few functions of the CUDA driver that are used, found with dlopen: neither building nor importing needs CUDA.
// Types and values are those of cuda.h, whose ABI the driver keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace jreshard::cuda {

using Result = int;
using DevicePtr = unsigned long long;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using Context = struct CUctx_st*;
using Device = int;

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kMemoryTypeUnified = 4;
constexpr unsigned kHostRegisterPortableMapped = 3;
constexpr unsigned kStreamWaitValueGeq = 0;
constexpr int kHandleTypePosixFd = 1;
constexpr int kPointerAttributeBufferId = 7;
constexpr unsigned kIpcLazyPeerAccess = 1;

struct Memcpy2D {
  size_t src_x, src_y;
  unsigned src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  size_t src_pitch;
  size_t dst_x, dst_y;
  unsigned dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  size_t dst_pitch;
  size_t width, height;
};

struct Memcpy3D {
  size_t src_x, src_y, src_z, src_lod;
  unsigned src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  void* reserved0;
  size_t src_pitch, src_height;
  size_t dst_x, dst_y, dst_z, dst_lod;
  unsigned dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  void* reserved1;
  size_t dst_pitch, dst_height;
  size_t width, height, depth;
};

using AllocationHandle = unsigned long long;

// CUmemAccessDesc: what a device may do with mapped memory.
struct MemAccess {
  int location_type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
  int device = 0;
  int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};

struct IpcMemHandle {
  char bytes[64];
};

struct Driver {
  Result (*GetErrorString)(Result, const char**);
  Result (*StreamGetCtx)(Stream, Context*);
  Result (*CtxPushCurrent)(Context);
  Result (*CtxPopCurrent)(Context*);
  Result (*DeviceGet)(Device*, int ordinal);
  Result (*DevicePrimaryCtxRetain)(Context*, Device);
  Result (*DevicePrimaryCtxRelease)(Device);
  Result (*StreamCreate)(Stream*, unsigned);
  Result (*StreamDestroy)(Stream);
  Result (*StreamQuery)(Stream);
  Result (*StreamWaitEvent)(Stream, Event, unsigned);
  Result (*EventCreate)(Event*, unsigned);
  Result (*EventDestroy)(Event);
  Result (*EventQuery)(Event);
  Result (*EventRecord)(Event, Stream);
  Result (*MemAlloc)(DevicePtr*, size_t);
  Result (*MemFree)(DevicePtr);
  Result (*MemGetAddressRange)(DevicePtr* base, size_t* bytes, DevicePtr);
  Result (*PointerGetAttribute)(void* out, int attribute, DevicePtr);
  Result (*MemHostRegister)(void*, size_t, unsigned flags);
  Result (*MemHostUnregister)(void*);
  Result (*MemHostGetDevicePointer)(DevicePtr*, void*, unsigned flags);
  Result (*StreamWriteValue64)(Stream, DevicePtr, uint64_t, unsigned flags);
  Result (*StreamWaitValue64)(Stream, DevicePtr, uint64_t, unsigned flags);
  Result (*MemRetainAllocationHandle)(AllocationHandle*, void*);
  Result (*MemExportToShareableHandle)(void* handle, AllocationHandle, int type, uint64_t flags);
  Result (*MemImportFromShareableHandle)(AllocationHandle*, void* handle, int type);
  Result (*MemRelease)(AllocationHandle);
  Result (*MemAddressReserve)(DevicePtr*, size_t bytes, size_t alignment, DevicePtr hint, uint64_t flags);
  Result (*MemAddressFree)(DevicePtr, size_t);
  Result (*MemMap)(DevicePtr, size_t bytes, size_t offset, AllocationHandle, uint64_t flags);
  Result (*MemUnmap)(DevicePtr, size_t);
  Result (*MemSetAccess)(DevicePtr, size_t, const MemAccess*, size_t count);
  Result (*IpcGetMemHandle)(IpcMemHandle*, DevicePtr);
  Result (*IpcOpenMemHandle)(DevicePtr*, IpcMemHandle, unsigned flags);
  Result (*IpcCloseMemHandle)(DevicePtr);
  Result (*MemcpyAsync)(DevicePtr, DevicePtr, size_t, Stream);
  Result (*Memcpy2DAsync)(const Memcpy2D*, Stream);
  Result (*Memcpy3DAsync)(const Memcpy3D*, Stream);
  // Null where the driver is too old.
  Result (*MemcpyBatchAsync)(DevicePtr* dsts, DevicePtr* srcs, size_t* sizes, size_t count, void* attrs,
                             size_t* attr_indices, size_t num_attrs, size_t* fail_index, Stream stream);
};

// The driver of this process. Throws std::runtime_error where it cannot be loaded.
const Driver& driver();

// Throws std::runtime_error where `result` is not success.
void check(const Driver& driver, Result result, const char* what);

// Makes a context, such as that of a stream, current while it lives.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, Stream stream);
  CurrentContext(const Driver& driver, Context context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
};

// The primary context of a device, which is the one that JAX uses, kept alive.
class DeviceContext {
 public:
  DeviceContext(const Driver& driver, int ordinal);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  Context get() const { return context_; }

 private:
  const Driver& driver_;
  Device device_ = 0;
  Context context_ = nullptr;
};

}  // namespace jreshard::cuda
