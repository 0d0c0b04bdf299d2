// Copies on the host, cut into tasks for the worker threads.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "copy_plan.h"

namespace jreshard {

// Where a source shard is: in this process, or in another one.
struct Origin {
  static constexpr int kHere = -1;

  uint64_t address;
  int process = kHere;
  pid_t pid = 0;
};

// Rows [begin, end) of a copy, and of each row the bytes [from, to).
struct Piece {
  const Copy* copy;
  Origin src;
  char* dst;
  int64_t begin;
  int64_t end;
  int64_t from;
  int64_t to;
};

using CopyTask = std::vector<Piece>;

// Collects copies into tasks that are big enough to hide the cost of handing them over, and small enough to even out
// the threads' loads.
class TaskBuilder {
 public:
  // `total_bytes` is what all copies come to.
  TaskBuilder(int64_t total_bytes, int threads);

  void add(const Copy& copy, const Origin& src, char* dst);
  std::vector<CopyTask> take();

 private:
  void flush();

  const int64_t task_bytes_;
  CopyTask pieces_;
  int64_t bytes_ = 0;
  std::vector<CopyTask> tasks_;
};

// What went wrong with copying from another process: a phrase that goes on from the process's name.
struct CopyFault {
  int process;
  std::string what;  // empty where all went well
};

CopyFault copy_pieces(const CopyTask& pieces);

}  // namespace jreshard
