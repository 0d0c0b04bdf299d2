// Reads boxes out of the memory of another process.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "copy_plan.h"

namespace jreshard {

// Gathers what is to be read until a call to the kernel is worth it.
class PeerReader {
 public:
  explicit PeerReader(pid_t pid) : pid_(pid) {}

  // Asks for what copy_rows would copy, with a source shard that starts at the address `src` of the process.
  // It is read now, or by finish().
  void add(const Copy& copy, uint64_t src, char* dst, int64_t begin, int64_t end, int64_t from, int64_t to);
  // Returns what went wrong, as a phrase that goes on from the process's name, or an empty string.
  std::string finish();

 private:
  // Rows that lie in the scratch memory and belong elsewhere.
  struct Scatter {
    int64_t at;
    char* dst;
    int64_t width;
    Dim rows;
  };

  void add_line(uint64_t src, char* dst, int64_t width, const Dim& rows);
  void add_spans(uint64_t src, char* dst, int64_t width, const Dim& rows);
  void add_part(uint64_t src, char* dst, int64_t bytes);
  bool full(int64_t bytes) const;
  void flush();

  const pid_t pid_;
  std::vector<iovec> local_, remote_;
  int64_t bytes_ = 0;
  std::unique_ptr<char[]> scratch_;
  int64_t scratch_used_ = 0;
  std::vector<Scatter> scatters_;
  std::string error_;
};

}  // namespace jreshard
