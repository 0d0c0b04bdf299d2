#include "copy_tasks.h"

#include <algorithm>
#include <utility>

#include "peer_memory.h"
#include "strided_copy.h"

namespace jreshard {
namespace {

constexpr int64_t kLeastTaskBytes = 2 << 20;
constexpr int64_t kMostTaskBytes = 4 << 20;

}  // namespace

TaskBuilder::TaskBuilder(int64_t total_bytes, int threads)
    : task_bytes_(std::clamp(total_bytes / (2 * threads), kLeastTaskBytes, kMostTaskBytes)) {}

void TaskBuilder::add(const Copy& copy, const Origin& src, char* dst) {
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

std::vector<CopyTask> TaskBuilder::take() {
  flush();
  return std::move(tasks_);
}

void TaskBuilder::flush() {
  if (!pieces_.empty()) tasks_.push_back(std::move(pieces_));
  pieces_.clear();
  bytes_ = 0;
}

CopyFault copy_pieces(const CopyTask& pieces) {
  for (size_t i = 0; i < pieces.size();) {
    if (pieces[i].src.process == Origin::kHere) {
      const Piece& p = pieces[i++];
      copy_rows(*p.copy, reinterpret_cast<const char*>(p.src.address), p.dst, p.begin, p.end, p.from, p.to);
      continue;
    }
    const Origin peer = pieces[i].src;
    PeerReader reader(peer.pid);
    for (; i < pieces.size() && pieces[i].src.process == peer.process; ++i) {
      const Piece& p = pieces[i];
      reader.add(*p.copy, p.src.address, p.dst, p.begin, p.end, p.from, p.to);
    }
    if (std::string what = reader.finish(); !what.empty()) return {peer.process, std::move(what)};
  }
  return {Origin::kHere, ""};
}

}  // namespace jreshard
