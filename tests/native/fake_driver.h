// A stand-in for the CUDA driver, on host memory: streams are queues, run when the test says so and in an order drawn
// at random, so that what lacks an event to wait for sooner or later comes too early. One lives at a time.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda_driver.h"

namespace jreshard::cuda {

struct CUctx_st {};

// What an event stands for is the latest record; those who wait keep the one that was the latest when they asked.
struct CUevent_st {
  Context context;
  std::shared_ptr<bool> reached;
};

struct CUstream_st {
  struct Work {
    std::shared_ptr<bool> after;  // null: at once
    std::function<void()> run;
  };
  Context context;
  std::deque<Work> queue;

  bool runnable() const { return !queue.empty() && (!queue.front().after || *queue.front().after); }
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

  static constexpr Result kInvalidValue = 1, kInvalidContext = 201, kInvalidHandle = 400, kTold = 700;

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
        return 0;
      });
    };
    table_.CtxPopCurrent = [](Context* context) {
      return enter("cuCtxPopCurrent", nullptr, [&] {
        if (contexts_.empty()) return kInvalidContext;
        *context = contexts_.back();
        contexts_.pop_back();
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
    table_.EventCreate = [](Event* event, unsigned flags) {
      return enter("cuEventCreate", nullptr, [&] {
        if (contexts_.empty()) return kInvalidContext;
        active_->events_.push_back(std::make_unique<jreshard::cuda::CUevent_st>());
        *event = active_->events_.back().get();
        (*event)->context = contexts_.back();
        return flags == jreshard::cuda::kEventDisableTiming ? 0 : kInvalidValue;
      });
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
        stream->queue.push_back({event->reached, [] {}});
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
  ~FakeDriver() { active_ = nullptr; }
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  const jreshard::cuda::Driver& table() const { return table_; }

  // Another device: its stream, in a context of its own.
  Stream add_device() {
    std::lock_guard<std::mutex> lock(mutex_);
    devices_.push_back(std::make_unique<jreshard::cuda::CUctx_st>());
    return add_stream(devices_.back().get());
  }
  void enqueue(Stream stream, std::function<void()> run) {
    std::lock_guard<std::mutex> lock(mutex_);
    stream->queue.push_back({nullptr, std::move(run)});
  }
  // Runs about that many pieces of work, if there are so many whose turn has come.
  void run(int most) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (most > 0) {
      std::vector<Stream> runnable;
      for (const auto& stream : streams_) {
        if (stream->runnable()) runnable.push_back(stream.get());
      }
      if (runnable.empty()) return;
      const Stream stream = runnable[random_() % runnable.size()];
      // Streams get ahead of each other by a little or by a lot.
      for (int burst = 1 << random_() % 8; burst > 0 && stream->runnable(); --burst, --most) {
        const auto work = std::move(stream->queue.front());
        stream->queue.pop_front();
        work.run();
      }
    }
  }
  void run_all() {
    run(1 << 30);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& stream : streams_) CHECK(stream->queue.empty());
  }

  // Has the n-th call of a function from now fail; n counts from 0.
  void fail(const std::string& function, int n) { failing_ = {function, calls_[function] + n}; }
  int calls(const std::string& function) { return calls_[function]; }
  // Contexts that this thread has pushed and not popped.
  static size_t contexts() { return contexts_.size(); }

  // Copies as they were enqueued, where they are to be noted down instead of made.
  bool only_note = false;
  std::map<std::string, int> noted_calls;
  std::vector<Row> noted_rows;

 private:
  // What every function has in common. With a stream given, its context has to be the current one.
  template <typename Action>
  static Result enter(const std::string& function, Stream stream, Action action) {
    std::lock_guard<std::mutex> lock(active_->mutex_);
    if (std::pair(function, active_->calls_[function]++) == active_->failing_) return kTold;
    if (stream && (contexts_.empty() || contexts_.back() != stream->context)) return kInvalidContext;
    return action();
  }
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
    stream->queue.push_back({nullptr, [rows = std::move(rows)] {
                               for (const Row& row : rows) {
                                 std::memcpy(reinterpret_cast<void*>(row.dst), reinterpret_cast<void*>(row.src),
                                             row.bytes);
                               }
                             }});
    return 0;
  }

  inline static FakeDriver* active_ = nullptr;
  inline static thread_local std::vector<Context> contexts_;

  jreshard::cuda::Driver table_{};
  std::mutex mutex_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<jreshard::cuda::CUctx_st>> devices_;
  std::vector<std::unique_ptr<jreshard::cuda::CUstream_st>> streams_;
  std::vector<std::unique_ptr<jreshard::cuda::CUevent_st>> events_;
  std::map<std::string, int> calls_;
  std::pair<std::string, int> failing_;
};
