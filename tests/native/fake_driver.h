// A stand-in for the CUDA driver, on host memory: streams are queues, run when the test says so and in an order drawn
// at random, so that what lacks an event to wait for sooner or later comes too early. One lives at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda_driver.h"
#include "fake_arenas.h"

namespace jreshard::cuda {

struct CUctx_st {
  int process = 0;
  int ordinal = 0;
  int retained = 0;
};

// What an event stands for is the latest record; those who wait keep the one that was the latest when they asked.
struct CUevent_st {
  Context context;
  std::shared_ptr<bool> reached;
};

struct CUstream_st {
  struct Work {
    std::function<bool()> ready;  // asked when its turn has come; null: at once
    std::function<void()> run;
  };
  Context context;
  bool destroyed = false;
  std::deque<Work> queue;

  bool runnable() const { return !queue.empty() && (!queue.front().ready || queue.front().ready()); }
};

}  // namespace jreshard::cuda

class FakeDriver {
 public:
  using DevicePtr = jreshard::cuda::DevicePtr;
  using Context = jreshard::cuda::Context;
  using Event = jreshard::cuda::Event;
  using Result = jreshard::cuda::Result;
  using Stream = jreshard::cuda::Stream;

  struct Row {
    DevicePtr dst, src;
    size_t bytes;
    bool operator==(const Row& o) const { return dst == o.dst && src == o.src && bytes == o.bytes; }
  };

  static constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kInvalidHandle = 400, kTold = 700;

  explicit FakeDriver(uint32_t seed, bool has_batch = true) : random_(seed) {
    active_ = this;
    table_.GetErrorString = [](Result result, const char** text) {
      *text = result == kTold ? "as told" : "misuse";
      return Result{0};
    };
    table_.StreamGetCtx = [](Stream stream, Context* context) {
      return enter("cuStreamGetCtx", nullptr, [&] {
        *context = stream->context;
        return 0;
      });
    };
    table_.CtxPushCurrent = [](Context context) {
      return enter("cuCtxPushCurrent", nullptr, [&] {
        contexts_.push_back(context);
        ++active_->pushed_;
        return 0;
      });
    };
    table_.CtxPopCurrent = [](Context* context) {
      return enter("cuCtxPopCurrent", nullptr, [&] {
        if (contexts_.empty()) return kInvalidContext;
        *context = contexts_.back();
        contexts_.pop_back();
        --active_->pushed_;
        return 0;
      });
    };
    table_.StreamCreate = [](Stream* stream, unsigned flags) {
      return enter("cuStreamCreate", nullptr, [&] {
        if (contexts_.empty()) return kInvalidContext;
        *stream = active_->add_stream(contexts_.back());
        return flags == jreshard::cuda::kStreamNonBlocking ? 0 : kInvalidValue;
      });
    };
    table_.StreamDestroy = [](Stream stream) {
      return enter("cuStreamDestroy", nullptr, [&] {
        CHECK(!std::exchange(stream->destroyed, true));  // its work goes on
        return 0;
      });
    };
    table_.StreamQuery = [](Stream stream) {
      return enter("cuStreamQuery", stream, [&] { return stream->queue.empty() ? 0 : jreshard::cuda::kNotReady; });
    };
    table_.DeviceGet = [](jreshard::cuda::Device* device, int ordinal) {
      return enter("cuDeviceGet", nullptr, [&] {
        *device = ordinal;
        return ordinal >= 0 && ordinal < int(active_->devices_.size()) ? 0 : kInvalidValue;
      });
    };
    table_.DevicePrimaryCtxRetain = [](Context* context, jreshard::cuda::Device device) {
      return enter("cuDevicePrimaryCtxRetain", nullptr, [&] {
        *context = active_->devices_[device].get();
        ++(*context)->retained;
        return 0;
      });
    };
    table_.DevicePrimaryCtxRelease = [](jreshard::cuda::Device device) {
      return enter("cuDevicePrimaryCtxRelease", nullptr, [&] {
        CHECK(--active_->devices_[device]->retained >= 0);
        return 0;
      });
    };
    table_.MemAlloc = [](DevicePtr* memory, size_t bytes) {
      return enter("cuMemAlloc", nullptr, [&] {
        if (contexts_.empty()) return kInvalidContext;
        if (!bytes) return kInvalidValue;
        if (bytes > active_->memory) return kOutOfMemory;
        active_->memory -= bytes;
        *memory = reinterpret_cast<DevicePtr>(std::malloc(bytes));
        active_->allocated_[*memory] = bytes;
        return 0;
      });
    };
    table_.MemFree = [](DevicePtr memory) {
      return enter("cuMemFree", nullptr, [&] {
        if (contexts_.empty()) return kInvalidContext;
        auto found = active_->allocated_.find(memory);
        if (!CHECK(found != active_->allocated_.end())) return kInvalidValue;
        CHECK(active_->finish(contexts_.back()));
        active_->memory += found->second;
        std::free(reinterpret_cast<void*>(memory));
        active_->allocated_.erase(found);
        return 0;
      });
    };
    table_.EventCreate = [](Event* event, unsigned flags) {
      return enter("cuEventCreate", nullptr, [&] {
        if (contexts_.empty()) return kInvalidContext;
        active_->events_.push_back(std::make_unique<jreshard::cuda::CUevent_st>());
        *event = active_->events_.back().get();
        (*event)->context = contexts_.back();
        return flags == jreshard::cuda::kEventDisableTiming ? 0 : kInvalidValue;
      });
    };
    table_.EventDestroy = [](Event event) {
      return enter("cuEventDestroy", nullptr, [&] {
        auto& events = active_->events_;
        auto found = std::find_if(events.begin(), events.end(), [&](const auto& e) { return e.get() == event; });
        if (!CHECK(found != events.end())) return kInvalidHandle;
        events.erase(found);
        return 0;
      });
    };
    table_.EventQuery = [](Event event) {
      return enter(
          "cuEventQuery", nullptr,
          [&] {
            if (active_->queries_need_context && contexts_.empty()) return kInvalidContext;
            return !event->reached || *event->reached ? 0 : jreshard::cuda::kNotReady;
          },
          event->context);
    };
    table_.EventRecord = [](Event event, Stream stream) {
      return enter("cuEventRecord", stream, [&] {
        if (event->context != stream->context) return kInvalidHandle;
        event->reached = std::make_shared<bool>(false);
        stream->queue.push_back({nullptr, [reached = event->reached] { *reached = true; }});
        return 0;
      });
    };
    table_.StreamWaitEvent = [](Stream stream, Event event, unsigned flags) {
      return enter("cuStreamWaitEvent", stream, [&] {
        // The driver takes an event that was never recorded, and waits for nothing: here that is a fault.
        if (!event || !event->reached || flags) return kInvalidHandle;
        stream->queue.push_back({[reached = event->reached] { return *reached; }, [] {}});
        return 0;
      });
    };
    table_.MemcpyAsync = [](DevicePtr dst, DevicePtr src, size_t bytes, Stream stream) {
      return enter("cuMemcpyAsync", stream,
                   [&] { return active_->copy("cuMemcpyAsync", {{dst, src, bytes}}, stream); });
    };
    table_.Memcpy2DAsync = [](const jreshard::cuda::Memcpy2D* c, Stream stream) {
      return enter("cuMemcpy2DAsync", stream, [&] {
        std::vector<Row> rows;
        if (!add_rows(*c, 0, 0, rows)) return kInvalidValue;
        return active_->copy("cuMemcpy2DAsync", std::move(rows), stream);
      });
    };
    table_.Memcpy3DAsync = [](const jreshard::cuda::Memcpy3D* c, Stream stream) {
      return enter("cuMemcpy3DAsync", stream, [&] {
        std::vector<Row> rows;
        if (c->src_z || c->dst_z || c->src_lod || c->dst_lod) return kInvalidValue;
        if (c->src_height < c->height || c->dst_height < c->height) return kInvalidValue;
        for (size_t z = 0; z < c->depth; ++z) {
          if (!add_rows(*c, z * c->src_height, z * c->dst_height, rows)) return kInvalidValue;
        }
        return active_->copy("cuMemcpy3DAsync", std::move(rows), stream);
      });
    };
    fill_in_arenas();
    table_.MemcpyBatchAsync = nullptr;
    if (!has_batch) return;
    table_.MemcpyBatchAsync = [](DevicePtr* dsts, DevicePtr* srcs, size_t* sizes, size_t count, void* attributes,
                                 size_t* indices, size_t num_attributes, size_t*, Stream stream) {
      return enter("cuMemcpyBatchAsync", stream, [&] {
        if (num_attributes != 1 || indices[0] != 0 || *static_cast<unsigned*>(attributes) != 1) return kInvalidValue;
        std::vector<Row> rows;
        for (size_t i = 0; i < count; ++i) rows.push_back({dsts[i], srcs[i], sizes[i]});
        return active_->copy("cuMemcpyBatchAsync", std::move(rows), stream);
      });
    };
  }
  ~FakeDriver() {
    active_ = nullptr;
    for (const auto& [address, bytes] : allocated_) std::free(reinterpret_cast<void*>(address));
  }
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  const jreshard::cuda::Driver& table() const { return table_; }

  // Another device, which one process of several uses: its stream, in a context of its own.
  Stream add_device(int process = 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    devices_.push_back(std::make_unique<jreshard::cuda::CUctx_st>());
    devices_.back()->process = process;
    devices_.back()->ordinal = devices_.size() - 1;
    main_streams_.push_back(add_stream(devices_.back().get()));
    return main_streams_.back();
  }
  void enqueue(Stream stream, std::function<void()> run) {
    std::unique_lock<std::mutex> lock(mutex_);
    await_room(lock, stream);
    stream->queue.push_back({nullptr, std::move(run)});
  }
  // Holds a stream up until `open` says otherwise.
  void hold(Stream stream, std::function<bool()> open) {
    std::lock_guard<std::mutex> lock(mutex_);
    stream->queue.push_back({std::move(open), [] {}});
  }
  DevicePtr make_arena(int process, size_t bytes, ArenaKind kind, DevicePtr where = 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    return arenas_.make(process, bytes, kind, where);
  }
  void free_arena(DevicePtr base) {
    std::lock_guard<std::mutex> lock(mutex_);
    arenas_.free(base);
  }
  // Runs about that many pieces of work, if there are so many whose turn has come. False where there was none.
  bool run(int most) {
    std::lock_guard<std::mutex> lock(mutex_);
    return run_some(most);
  }
  void run_all() {
    run(1 << 30);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& stream : streams_) CHECK(stream->queue.empty());
  }

  // Has the n-th call of a function from now fail; n counts from 0.
  void fail(const std::string& function, int n) {
    std::lock_guard<std::mutex> lock(mutex_);
    failing_ = {function, calls_[function] + n};
  }
  int calls(const std::string& function) {
    std::lock_guard<std::mutex> lock(mutex_);
    return calls_[function];
  }
  // Contexts that this thread has pushed and not popped.
  static size_t contexts() { return contexts_.size(); }
  // The same of all threads.
  int contexts_of_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    return pushed_;
  }
  static Context context() { return contexts_.empty() ? nullptr : contexts_.back(); }

  // What was made and not destroyed: events, streams, pieces of memory, what was mapped of arenas, and holds of
  // contexts.
  std::map<std::string, int> left_behind() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::map<std::string, int> left = arenas_.left_behind();
    if (!events_.empty()) left["events"] = events_.size();
    if (!allocated_.empty()) left["memory"] = allocated_.size();
    for (const auto& stream : streams_) {
      if (!stream->destroyed && !is_main(stream.get())) ++left["streams"];
    }
    for (const auto& device : devices_) {
      if (device->retained) left["contexts"] += device->retained;
    }
    return left;
  }

  // How many launches wait for their queues.
  int held_up() {
    std::lock_guard<std::mutex> lock(mutex_);
    int launches = 0;
    for (const auto& [context, count] : held_up_) launches += count;
    return launches;
  }

  // For stand-ins of other libraries, which enqueue on the streams. What is enqueued runs with the lock held.
  std::mutex& mutex() { return mutex_; }
  bool has_room(Stream stream) const { return stream->queue.size() < queue_limit; }

  // How much work a stream takes ahead; who enqueues more waits. And the bytes of all devices together that are free.
  std::atomic<size_t> queue_limit{size_t(-1)};
  // Whether others who call the driver in the same context, or ask for its events, wait too then.
  std::atomic<bool> full_queues_hold_up{false};
  size_t memory = size_t(-1) / 2;

  bool queries_need_context = false;

  // Copies as they were enqueued, where they are to be noted down instead of made.
  bool only_note = false;
  std::map<std::string, int> noted_calls;
  std::vector<Row> noted_rows;

 private:
  // What every function has in common. With a stream given, its context has to be the current one. `context` is what
  // the function works in, where that need not be the current one.
  template <typename Action>
  static Result enter(const std::string& function, Stream stream, Action action, Context context = nullptr) {
    std::unique_lock<std::mutex> lock(active_->mutex_);
    if (std::pair(function, active_->calls_[function]++) == active_->failing_) return kTold;
    if (stream && (contexts_.empty() || contexts_.back() != stream->context)) return kInvalidContext;
    if (!context) context = FakeDriver::context();
    if (active_->full_queues_hold_up && context) active_->await_launches(lock, context);
    if (stream) {
      CHECK(!stream->destroyed);
      active_->await_room(lock, stream);
    }
    return action();
  }
  void await_room(std::unique_lock<std::mutex>& lock, Stream stream) {
    if (has_room(stream)) return;
    ++held_up_[stream->context];
    CHECK(room_.wait_for(lock, std::chrono::seconds(60), [&] { return has_room(stream); }));
    --held_up_[stream->context];
    room_.notify_all();
  }
  void await_launches(std::unique_lock<std::mutex>& lock, Context context) {
    CHECK(room_.wait_for(lock, std::chrono::seconds(60), [&] { return held_up_[context] == 0; }));
  }
  bool run_some(int most) {
    bool any = false;
    while (most > 0) {
      std::vector<Stream> runnable;
      for (const auto& stream : streams_) {
        if (stream->runnable()) runnable.push_back(stream.get());
      }
      if (runnable.empty()) break;
      const Stream stream = runnable[random_() % runnable.size()];
      // Streams get ahead of each other by a little or by a lot.
      for (int burst = 1 << random_() % 8; burst > 0 && stream->runnable(); --burst, --most) {
        const auto work = std::move(stream->queue.front());
        stream->queue.pop_front();
        work.run();
        any = true;
      }
    }
    if (any) room_.notify_all();
    return any;
  }
  // Waits for all work of a device. False where that would be for ever.
  bool finish(Context context) {
    run_some(1 << 30);
    return std::all_of(streams_.begin(), streams_.end(),
                       [&](const auto& stream) { return stream->context != context || stream->queue.empty(); });
  }
  bool reachable(DevicePtr address, size_t bytes, Context context) const {
    return arenas_.reachable(address, bytes, context->process, context->ordinal);
  }
  static std::atomic<uint64_t>& flag_at(DevicePtr address) {
    return *reinterpret_cast<std::atomic<uint64_t>*>(address);
  }
  void fill_in_arenas();
  bool is_main(Stream stream) const { return std::count(main_streams_.begin(), main_streams_.end(), stream); }
  Stream add_stream(Context context) {
    streams_.push_back(std::make_unique<jreshard::cuda::CUstream_st>());
    streams_.back()->context = context;
    return streams_.back().get();
  }
  // The rows of one slice, which starts some rows on. False where the driver would refuse.
  template <typename Pitched>
  static bool add_rows(const Pitched& c, size_t src_row, size_t dst_row, std::vector<Row>& rows) {
    constexpr size_t kMaxPitch = 0x7FFFFFFF;
    if (c.src_type != jreshard::cuda::kMemoryTypeUnified || c.dst_type != c.src_type) return false;
    if (c.src_x || c.src_y || c.dst_x || c.dst_y || !c.width || !c.height) return false;
    if (c.src_pitch < c.width || c.dst_pitch < c.width) return false;
    if (c.src_pitch > kMaxPitch || c.dst_pitch > kMaxPitch) return false;
    for (size_t y = 0; y < c.height; ++y) {
      rows.push_back({c.dst_device + (dst_row + y) * c.dst_pitch, c.src_device + (src_row + y) * c.src_pitch, c.width});
    }
    return true;
  }
  Result copy(const char* function, std::vector<Row> rows, Stream stream) {
    if (rows.empty()) return kInvalidValue;
    for (const Row& row : rows) {
      if (!row.bytes) return kInvalidValue;
    }
    if (only_note) {
      ++noted_calls[function];
      noted_rows.insert(noted_rows.end(), rows.begin(), rows.end());
      return 0;
    }
    stream->queue.push_back(
        {nullptr, [this, context = stream->context, rows = std::move(rows)] {
           for (const Row& row : rows) {
             const bool mapped = reachable(row.src, row.bytes, context) && reachable(row.dst, row.bytes, context);
             if (!CHECK(mapped)) continue;
             std::memcpy(reinterpret_cast<void*>(row.dst), reinterpret_cast<void*>(row.src), row.bytes);
           }
         }});
    return 0;
  }

  inline static FakeDriver* active_ = nullptr;
  inline static thread_local std::vector<Context> contexts_;

  jreshard::cuda::Driver table_{};
  std::mutex mutex_;
  std::condition_variable room_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<jreshard::cuda::CUctx_st>> devices_;
  std::vector<std::unique_ptr<jreshard::cuda::CUstream_st>> streams_;
  std::vector<Stream> main_streams_;  // one a device
  std::vector<std::unique_ptr<jreshard::cuda::CUevent_st>> events_;
  std::map<DevicePtr, size_t> allocated_;
  FakeArenas arenas_;
  int pushed_ = 0;
  std::map<Context, int> held_up_;
  std::map<std::string, int> calls_;
  std::pair<std::string, int> failing_;
};

inline void FakeDriver::fill_in_arenas() {
  using jreshard::cuda::AllocationHandle;
  using jreshard::cuda::IpcMemHandle;
  using jreshard::cuda::MemAccess;
  table_.MemHostRegister = [](void* start, size_t bytes, unsigned flags) {
    return enter("cuMemHostRegister", nullptr, [&] {
      if (contexts_.empty()) return kInvalidContext;
      return active_->arenas_.register_host(start, bytes, flags, contexts_.back()->process);
    });
  };
  table_.MemHostUnregister = [](void* start) {
    return enter("cuMemHostUnregister", nullptr,
                 [&] { return contexts_.empty() ? kInvalidContext : active_->arenas_.unregister_host(start); });
  };
  table_.MemHostGetDevicePointer = [](DevicePtr* device, void* start, unsigned flags) {
    return enter("cuMemHostGetDevicePointer", nullptr, [&] {
      *device = reinterpret_cast<DevicePtr>(start);
      return contexts_.empty() ? kInvalidContext : flags ? kInvalidValue : 0;
    });
  };
  table_.StreamWriteValue64 = [](Stream stream, DevicePtr flag, uint64_t value, unsigned flags) {
    return enter("cuStreamWriteValue64", stream, [&] {
      const int process = stream->context->process;
      if (flags || !active_->arenas_.is_registered(flag, process)) return kInvalidValue;
      stream->queue.push_back({nullptr, [flag, value, process] {
                                 if (CHECK(active_->arenas_.is_registered(flag, process))) flag_at(flag) = value;
                               }});
      return 0;
    });
  };
  table_.StreamWaitValue64 = [](Stream stream, DevicePtr flag, uint64_t value, unsigned flags) {
    return enter("cuStreamWaitValue64", stream, [&] {
      const int process = stream->context->process;
      if (flags != jreshard::cuda::kStreamWaitValueGeq || !active_->arenas_.is_registered(flag, process)) {
        return kInvalidValue;
      }
      stream->queue.push_back({[flag, value, process] {
                                 const bool registered = CHECK(active_->arenas_.is_registered(flag, process));
                                 return !registered || static_cast<int64_t>(flag_at(flag) - value) >= 0;
                               },
                               [] {}});
      return 0;
    });
  };
  table_.MemGetAddressRange = [](DevicePtr* base, size_t* bytes, DevicePtr address) {
    return enter("cuMemGetAddressRange", nullptr, [&] {
      return contexts_.empty() ? kInvalidContext : active_->arenas_.address_range(base, bytes, address);
    });
  };
  table_.PointerGetAttribute = [](void* out, int attribute, DevicePtr address) {
    return enter("cuPointerGetAttribute", nullptr, [&] {
      return contexts_.empty() ? kInvalidContext : active_->arenas_.buffer_id(out, attribute, address);
    });
  };
  table_.MemRetainAllocationHandle = [](AllocationHandle* handle, void* address) {
    return enter("cuMemRetainAllocationHandle", nullptr, [&] {
      uint64_t made = 0;
      const Result result = active_->arenas_.retain(&made, address);
      *handle = made;
      return result;
    });
  };
  table_.MemExportToShareableHandle = [](void* out, AllocationHandle handle, int type, uint64_t flags) {
    return enter("cuMemExportToShareableHandle", nullptr,
                 [&] { return active_->arenas_.export_handle(out, handle, type, flags); });
  };
  table_.MemImportFromShareableHandle = [](AllocationHandle* handle, void* fd, int type) {
    return enter("cuMemImportFromShareableHandle", nullptr, [&] {
      uint64_t made = 0;
      const Result result = active_->arenas_.import_handle(&made, fd, type);
      *handle = made;
      return result;
    });
  };
  table_.MemRelease = [](AllocationHandle handle) {
    return enter("cuMemRelease", nullptr, [&] { return active_->arenas_.release(handle); });
  };
  table_.MemAddressReserve = [](DevicePtr* base, size_t bytes, size_t alignment, DevicePtr hint, uint64_t flags) {
    return enter("cuMemAddressReserve", nullptr,
                 [&] { return active_->arenas_.reserve(base, bytes, alignment, hint, flags); });
  };
  table_.MemAddressFree = [](DevicePtr base, size_t bytes) {
    return enter("cuMemAddressFree", nullptr, [&] { return active_->arenas_.free_addresses(base, bytes); });
  };
  table_.MemMap = [](DevicePtr base, size_t bytes, size_t offset, AllocationHandle handle, uint64_t flags) {
    return enter("cuMemMap", nullptr, [&] { return active_->arenas_.map_handle(base, bytes, offset, handle, flags); });
  };
  table_.MemUnmap = [](DevicePtr base, size_t bytes) {
    return enter("cuMemUnmap", nullptr, [&] { return active_->arenas_.unmap(base, bytes); });
  };
  table_.MemSetAccess = [](DevicePtr base, size_t bytes, const MemAccess* access, size_t count) {
    return enter("cuMemSetAccess", nullptr, [&] {
      const bool known = count == 1 && access->device >= 0 && access->device < int(active_->devices_.size());
      if (!known) return kInvalidValue;
      return active_->arenas_.set_access(base, bytes, *access, active_->devices_[access->device]->process);
    });
  };
  table_.IpcGetMemHandle = [](IpcMemHandle* handle, DevicePtr base) {
    return enter("cuIpcGetMemHandle", nullptr, [&] { return active_->arenas_.ipc_handle(handle, base); });
  };
  table_.IpcOpenMemHandle = [](DevicePtr* base, IpcMemHandle handle, unsigned flags) {
    return enter("cuIpcOpenMemHandle", nullptr, [&] {
      if (contexts_.empty()) return kInvalidContext;
      const Context context = contexts_.back();
      return active_->arenas_.ipc_open(base, handle, flags, context->process, context->ordinal);
    });
  };
  table_.IpcCloseMemHandle = [](DevicePtr base) {
    return enter("cuIpcCloseMemHandle", nullptr, [&] {
      if (contexts_.empty()) return kInvalidContext;
      return active_->arenas_.ipc_close(base, contexts_.back()->process, contexts_.back()->ordinal);
    });
  };
}

// Has the devices get on by themselves while it lives.
class RunningDevices {
 public:
  explicit RunningDevices(FakeDriver& driver, int burst = 64)
      : thread_([this, &driver, burst] {
          while (!stop_) {
            if (!driver.run(burst)) std::this_thread::sleep_for(std::chrono::microseconds(20));
          }
        }) {}
  ~RunningDevices() {
    stop_ = true;
    thread_.join();
  }
  RunningDevices(const RunningDevices&) = delete;
  RunningDevices& operator=(const RunningDevices&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};
