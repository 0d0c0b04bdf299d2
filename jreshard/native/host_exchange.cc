#include "host_exchange.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "strided_copy.h"
#include "workers.h"

namespace jreshard {
namespace {

constexpr size_t kFailuresKept = 64;
// A task is big enough to hide the cost of handing it over, and small enough to even out the threads' loads.
constexpr int64_t kLeastTaskBytes = 2 << 20;
constexpr int64_t kMostTaskBytes = 4 << 20;
// Longer than any process lives, and few enough nanoseconds for the clock to add.
constexpr double kMaxTimeoutS = 1e9;

// Rows [begin, end) of a copy, and of each row the bytes [from, to).
struct Piece {
  const Copy* copy;
  const char* src;
  char* dst;
  int64_t begin;
  int64_t end;
  int64_t from;
  int64_t to;
};

// Collects pieces into tasks of some `task_bytes`.
class TaskBuilder {
 public:
  explicit TaskBuilder(int64_t task_bytes) : task_bytes_(task_bytes) {}

  void add(const Copy& copy, const char* src, char* dst) {
    const int64_t rows = copy.rows();
    const int64_t rows_a_piece = std::max<int64_t>(1, task_bytes_ / copy.run);
    for (int64_t row = 0; row < rows; row += rows_a_piece) {
      const int64_t end = std::min(rows, row + rows_a_piece);
      for (int64_t from = 0; from < copy.run; from += task_bytes_) {
        const int64_t to = std::min(copy.run, from + task_bytes_);
        pieces_.push_back({&copy, src, dst, row, end, from, to});
        bytes_ += (end - row) * (to - from);
        if (bytes_ >= task_bytes_) flush();
      }
    }
  }
  std::vector<std::vector<Piece>> take() {
    flush();
    return std::move(tasks_);
  }

 private:
  void flush() {
    if (!pieces_.empty()) tasks_.push_back(std::move(pieces_));
    pieces_.clear();
    bytes_ = 0;
  }

  const int64_t task_bytes_;
  std::vector<Piece> pieces_;
  int64_t bytes_ = 0;
  std::vector<std::vector<Piece>> tasks_;
};

void copy_pieces(const std::vector<Piece>& pieces) {
  for (const Piece& p : pieces) copy_rows(*p.copy, p.src, p.dst, p.begin, p.end, p.from, p.to);
}

std::string join(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& part : parts) out += (out.empty() ? "" : ", ") + part;
  return out;
}

std::string seconds(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

}  // namespace

HostExchange::HostExchange(CopyPlan plan, std::vector<std::string> rank_names)
    : plan_(std::move(plan)), rank_names_(std::move(rank_names)) {
  if (static_cast<int>(rank_names_.size()) != plan_.num_ranks()) {
    throw std::invalid_argument("the number of rank names is not the number of ranks");
  }
}

bool HostExchange::begin(CallId id, double timeout_s) {
  const int ranks = plan_.num_ranks();
  const int chunks = plan_.num_chunks();
  auto call = std::make_shared<Call>();
  call->sources.resize(ranks);
  call->published.resize(ranks);
  call->readers_left.resize(ranks);
  call->releases.resize(ranks);
  call->jobs.resize(static_cast<size_t>(chunks) * ranks);
  call->timeout_s = timeout_s;
  for (int rank = 0; rank < ranks; ++rank) {
    call->readers_left[rank] = plan_.num_readers(rank);
    if (plan_.sends(rank)) {
      call->sources[rank].resize(plan_.num_leaves());
      call->published[rank].assign(chunks, false);
      ++call->events_left;
    }
    if (!plan_.receives(rank)) continue;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      auto& job = call->jobs[chunk * ranks + rank];
      job = std::make_unique<Job>();
      job->sources_missing = static_cast<int>(plan_.sources(chunk, rank).size());
      ++call->events_left;
    }
  }

  std::lock_guard<std::mutex> lock(mutex_);
  if (!calls_.emplace(id, call).second) return false;
  const std::chrono::duration<double> timeout(std::min(timeout_s, kMaxTimeoutS));
  const auto deadline = Watchdog::Clock::now() + std::chrono::duration_cast<Watchdog::Clock::duration>(timeout);
  call->deadline = Watchdog::shared().at(deadline, [self = shared_from_this(), id] {
    CallPtr call = self->find(id);
    if (call) self->abort(id, self->late(*call));
  });
  return true;
}

HostExchange::CallPtr HostExchange::find(CallId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = calls_.find(id);
  return found == calls_.end() ? nullptr : found->second;
}

int HostExchange::open_calls() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(calls_.size());
}

std::string HostExchange::why_closed(CallId id) const {
  for (const auto& [failed, reason] : failures_) {
    if (failed == id) return reason;
  }
  return "jreshard: this transfer is not under way (call " + std::to_string(id) + ")";
}

std::string HostExchange::misuse(bool takes_part, int chunk, size_t arrays) const {
  if (!takes_part) return "jreshard: a program ran on a device that its plan does not use";
  if (chunk < 0 || chunk >= plan_.num_chunks() ||
      static_cast<size_t>(plan_.chunk_end(chunk) - plan_.chunk_begin(chunk)) != arrays) {
    return "jreshard: a program does not fit its plan";
  }
  return "";
}

std::string HostExchange::publish(CallId id, int rank, int chunk, const std::vector<const void*>& arrays) {
  if (std::string error = misuse(rank >= 0 && plan_.sends(rank), chunk, arrays.size()); !error.empty()) return error;
  Deferred after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(id);
    if (found == calls_.end()) return why_closed(id);
    const CallPtr call = found->second;
    if (call->failed) return call->error;
    if (call->published[rank][chunk]) return "jreshard: a source was published twice";
    std::copy(arrays.begin(), arrays.end(), call->sources[rank].begin() + plan_.chunk_begin(chunk));
    call->published[rank][chunk] = true;
    for (int reader = 0; reader < plan_.num_ranks(); ++reader) {
      const std::vector<int>& sources = plan_.sources(chunk, reader);
      if (!std::binary_search(sources.begin(), sources.end(), rank)) continue;
      Job& waiting = job(*call, chunk, reader);
      if (--waiting.sources_missing == 0 && waiting.started) start(id, call, chunk, reader, after);
    }
  }
  for (auto& action : after) action();
  return "";
}

void HostExchange::receive(CallId id, int rank, int chunk, std::vector<void*> arrays, Done done) {
  const std::string error = misuse(rank >= 0 && plan_.receives(rank), chunk, arrays.size());
  if (!error.empty()) return done(&error);
  Deferred after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(id);
    if (found == calls_.end() || found->second->failed) {
      std::string error = found == calls_.end() ? why_closed(id) : found->second->error;
      after.push_back([done = std::move(done), error = std::move(error)] { done(&error); });
    } else {
      const CallPtr call = found->second;
      Job& mine = job(*call, chunk, rank);
      mine.started = true;
      mine.arrays = std::move(arrays);
      mine.done = std::move(done);
      if (mine.sources_missing == 0) start(id, call, chunk, rank, after);
    }
  }
  for (auto& action : after) action();
}

bool HostExchange::release_now(CallId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = calls_.find(id);
  if (found == calls_.end() || found->second->failed) return false;
  const CallPtr call = found->second;
  if (std::any_of(call->readers_left.begin(), call->readers_left.end(), [](int left) { return left > 0; }))
    return false;
  int releases = 0;
  for (int rank = 0; rank < plan_.num_ranks(); ++rank) releases += plan_.sends(rank);
  end_events(id, call, releases);
  return true;
}

void HostExchange::release(CallId id, int rank, Done done) {
  std::string error = rank >= 0 && plan_.sends(rank) ? "" : misuse(false, 0, 0);
  if (!error.empty()) return done(&error);
  bool ready = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(id);
    if (found == calls_.end()) {
      error = why_closed(id);
    } else if (found->second->readers_left[rank] == 0 && !found->second->failed) {
      const CallPtr call = found->second;
      end_events(id, call, 1);
      ready = true;
    } else {
      found->second->releases[rank] = std::move(done);
      return;
    }
  }
  done(ready ? nullptr : &error);
}

// With the lock held: every source of the job is there.
void HostExchange::start(CallId id, const CallPtr& call, int chunk, int rank, Deferred& after) {
  job(*call, chunk, rank).copying = true;
  ++call->copying;
  after.push_back([this, self = shared_from_this(), id, call, chunk, rank] { run(id, call, chunk, rank); });
}

void HostExchange::run(CallId id, const CallPtr& call, int chunk, int rank) {
  Job& mine = job(*call, chunk, rank);
  int64_t bytes = 0;
  for (int leaf = plan_.chunk_begin(chunk); leaf < plan_.chunk_end(chunk); ++leaf) {
    for (const Copy& copy : plan_.copies(leaf, rank)) bytes += copy.bytes();
  }
  Workers& workers = Workers::shared();
  TaskBuilder builder(std::clamp(bytes / (2 * workers.threads()), kLeastTaskBytes, kMostTaskBytes));
  for (int leaf = plan_.chunk_begin(chunk); leaf < plan_.chunk_end(chunk); ++leaf) {
    char* const dst = static_cast<char*>(mine.arrays[leaf - plan_.chunk_begin(chunk)]);
    for (const Copy& copy : plan_.copies(leaf, rank)) {
      builder.add(copy, static_cast<const char*>(call->sources[copy.src_rank][leaf]), dst);
    }
  }
  std::vector<std::vector<Piece>> tasks = builder.take();
  if (tasks.empty()) return finish(id, call, chunk, rank);
  mine.tasks_left = static_cast<int>(tasks.size());
  std::vector<Workers::Task> work;
  for (auto& pieces : tasks) {
    work.push_back([this, self = shared_from_this(), id, call, chunk, rank, pieces = std::move(pieces)] {
      if (!call->failed) copy_pieces(pieces);
      if (--job(*call, chunk, rank).tasks_left == 0) finish(id, call, chunk, rank);
    });
  }
  // The thread that found the job ready copies too.
  const Workers::Task mine_first = std::move(work.back());
  work.pop_back();
  if (!work.empty()) workers.submit(std::move(work));
  mine_first();
}

void HostExchange::finish(CallId id, const CallPtr& call, int chunk, int rank) {
  Deferred after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Job& mine = job(*call, chunk, rank);
    mine.copying = false;
    --call->copying;
    if (call->failed) {
      after.push_back([done = std::move(mine.done), error = call->error] { done(&error); });
      if (call->copying == 0) close_failed(id, call, after);
    } else {
      int ended = 1;
      after.push_back([done = std::move(mine.done)] { done(nullptr); });
      for (int source : plan_.sources(chunk, rank)) {
        if (--call->readers_left[source] > 0 || !call->releases[source]) continue;
        after.push_back([done = std::move(call->releases[source])] { done(nullptr); });
        call->releases[source] = nullptr;
        ++ended;
      }
      end_events(id, call, ended);
    }
    mine.done = nullptr;
  }
  for (auto& action : after) action();
}

// With the lock held.
void HostExchange::end_events(CallId id, const CallPtr& call, int count) {
  call->events_left -= count;
  if (call->events_left == 0) close(id, call);
}

void HostExchange::abort(CallId id, const std::string& reason) {
  Deferred after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(id);
    if (found == calls_.end()) return;
    if (!found->second->failed) fail(id, found->second, reason, after);
  }
  for (auto& action : after) action();
}

void HostExchange::abort_all(const std::string& reason) {
  std::vector<CallId> open;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : calls_) open.push_back(entry.first);
  }
  for (CallId id : open) abort(id, reason);
}

// With the lock held. Jobs whose copies run are told by finish(), when their memory is no longer written.
void HostExchange::fail(CallId id, CallPtr call, std::string reason, Deferred& after) {
  call->error = std::move(reason);
  call->failed = true;
  for (auto& waiting : call->jobs) {
    if (!waiting || waiting->copying || !waiting->done) continue;
    after.push_back([done = std::move(waiting->done), error = call->error] { done(&error); });
    waiting->done = nullptr;
  }
  if (call->copying == 0) close_failed(id, call, after);
}

// With the lock held. The call stays open until here, so that a release that comes late still waits for the copies.
void HostExchange::close_failed(CallId id, const CallPtr& call, Deferred& after) {
  for (Done& waiting : call->releases) {
    if (!waiting) continue;
    after.push_back([done = std::move(waiting), error = call->error] { done(&error); });
    waiting = nullptr;
  }
  failures_.emplace_back(id, call->error);
  if (failures_.size() > kFailuresKept) failures_.pop_front();
  close(id, call);
}

// With the lock held.
void HostExchange::close(CallId id, const CallPtr& call) {
  Watchdog::shared().cancel(call->deadline);
  calls_.erase(id);
}

// Names whom the call waits for.
std::string HostExchange::late(const Call& call) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> silent_sources, absent_readers;
  for (int rank = 0; rank < plan_.num_ranks(); ++rank) {
    if (plan_.sends(rank) && std::count(call.published[rank].begin(), call.published[rank].end(), false)) {
      silent_sources.push_back(rank_names_[rank]);
    }
    bool absent = false;
    for (int chunk = 0; plan_.receives(rank) && chunk < plan_.num_chunks(); ++chunk) {
      absent |= !call.jobs[chunk * plan_.num_ranks() + rank]->started;
    }
    if (absent) absent_readers.push_back(rank_names_[rank]);
  }
  std::string text = "jreshard: transfer timed out after " + seconds(call.timeout_s);
  if (!silent_sources.empty()) text += "; source not published by " + join(silent_sources);
  if (!absent_readers.empty()) text += "; destination not started on " + join(absent_readers);
  if (silent_sources.empty() && absent_readers.empty()) text += " while copying";
  return text;
}

}  // namespace jreshard
