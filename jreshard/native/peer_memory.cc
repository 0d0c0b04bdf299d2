#include "peer_memory.h"

#include <limits.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "strided_copy.h"

namespace jreshard {
namespace {

// Every part that the kernel is asked for costs it about as much as copying so many bytes; where the gaps between rows
// are smaller, whole spans are read, and the rows picked out here.
constexpr int64_t kWorthOfAPart = 2048;
constexpr int64_t kScratchBytes = 256 << 10;
constexpr size_t kMaxParts = IOV_MAX;
// The kernel moves less than 2 GiB in one call.
constexpr int64_t kMaxCallBytes = 1 << 30;

std::string why(int error) {
  const std::string text = "cannot be read (process_vm_readv: " + std::string(std::strerror(error)) + ")";
  switch (error) {
    case EPERM:
      return text +
             "; both processes must run as one user, the sysctl kernel.yama.ptrace_scope must be 0 or 1, and a "
             "container must not forbid the call (docker: --cap-add=SYS_PTRACE)";
    case ENOSYS:
      return text + "; the kernel lacks the call, or a container forbids it";
    case ESRCH:
      return text + "; it has ended";
    default:
      return text;
  }
}

void append(std::vector<iovec>& parts, char* at, size_t bytes) {
  if (!parts.empty() && static_cast<char*>(parts.back().iov_base) + parts.back().iov_len == at) {
    parts.back().iov_len += bytes;
  } else {
    parts.push_back({at, bytes});
  }
}

// Drops the first `bytes` of the parts from `first` on.
void advance(std::vector<iovec>& parts, size_t& first, size_t bytes) {
  while (bytes > 0) {
    iovec& part = parts[first];
    const size_t taken = std::min(bytes, part.iov_len);
    part.iov_base = static_cast<char*>(part.iov_base) + taken;
    part.iov_len -= taken;
    bytes -= taken;
    if (part.iov_len == 0) ++first;
  }
}

}  // namespace

void PeerReader::add(const Copy& copy, uint64_t src, char* dst, int64_t begin, int64_t end, int64_t from, int64_t to) {
  const Dim inner = innermost(copy);
  for_each_line(copy, begin, end, [&](int64_t src_offset, int64_t dst_offset, int64_t rows) {
    add_line(src + src_offset + from, dst + dst_offset + from, to - from, {rows, inner.src_stride, inner.dst_stride});
  });
}

std::string PeerReader::finish() {
  if (pid_ <= 0) return "cannot be read: it is gone, or lives in a PID namespace that this process does not see";
  flush();
  return error_;
}

void PeerReader::add_line(uint64_t src, char* dst, int64_t width, const Dim& rows) {
  const int64_t gap = rows.src_stride - width;
  if (rows.extent > 1 && gap > 0 && gap <= kWorthOfAPart && width <= kScratchBytes) {
    return add_spans(src, dst, width, rows);
  }
  for (int64_t row = 0; row < rows.extent; ++row) {
    add_part(src + row * rows.src_stride, dst + row * rows.dst_stride, width);
  }
}

// As many rows at a time as fit into the scratch memory, with the gaps between them.
void PeerReader::add_spans(uint64_t src, char* dst, int64_t width, const Dim& rows) {
  if (!scratch_) scratch_.reset(new char[kScratchBytes]);
  for (int64_t row = 0; row < rows.extent;) {
    if (scratch_used_ + width > kScratchBytes) flush();
    const int64_t fit = 1 + (kScratchBytes - scratch_used_ - width) / rows.src_stride;
    const int64_t count = std::min(fit, rows.extent - row);
    const int64_t span = (count - 1) * rows.src_stride + width;
    if (full(span)) flush();
    scatters_.push_back({scratch_used_, dst + row * rows.dst_stride, width, {count, rows.src_stride, rows.dst_stride}});
    scratch_used_ += span;
    add_part(src + row * rows.src_stride, scratch_.get() + scratch_used_ - span, span);
    row += count;
  }
}

void PeerReader::add_part(uint64_t src, char* dst, int64_t bytes) {
  if (full(bytes)) flush();
  append(remote_, reinterpret_cast<char*>(src), bytes);
  append(local_, dst, bytes);
  bytes_ += bytes;
}

bool PeerReader::full(int64_t bytes) const {
  return remote_.size() == kMaxParts || local_.size() == kMaxParts || bytes_ + bytes > kMaxCallBytes;
}

void PeerReader::flush() {
  size_t local = 0, remote = 0;
  while (bytes_ > 0 && error_.empty() && pid_ > 0) {
    const ssize_t got = process_vm_readv(pid_, local_.data() + local, local_.size() - local, remote_.data() + remote,
                                         remote_.size() - remote, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      error_ = why(got < 0 ? errno : EFAULT);
      break;
    }
    // Where that is less than asked for, the rest is asked for again, and either comes or says why not.
    advance(local_, local, got);
    advance(remote_, remote, got);
    bytes_ -= got;
  }
  if (bytes_ == 0) {
    for (const Scatter& s : scatters_) {
      copy_rows({0, 0, 0, 0, s.width, {s.rows}}, scratch_.get() + s.at, s.dst, 0, s.rows.extent, 0, s.width);
    }
  }
  local_.clear();
  remote_.clear();
  scatters_.clear();
  scratch_used_ = 0;
  bytes_ = 0;
}

}  // namespace jreshard
