// The table of copies that one plan asks of the local ranks, as the Python planner wrote it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace jreshard {

// One dimension of a strided copy. Strides are in bytes.
struct Dim {
  int64_t extent;
  int64_t src_stride;
  int64_t dst_stride;
};

// Copies a box from a source shard into a destination shard: runs of `run` contiguous bytes, repeated over `dims`
// (outermost first). Offsets are in bytes from the start of each shard.
struct Copy {
  int32_t src_rank;
  int32_t dst_rank;
  int64_t src_offset;
  int64_t dst_offset;
  int64_t run;
  std::vector<Dim> dims;

  int64_t rows() const {
    int64_t n = 1;
    for (const Dim& d : dims) n *= d.extent;
    return n;
  }
  int64_t bytes() const { return run * rows(); }
};

// Leaves with the same shape, element size and pair of layouts share one template of copies.
class CopyPlan {
 public:
  // `table` is the stream of int64 words that jreshard/_tables.py writes; its docstring gives the format.
  // Throws std::invalid_argument where the stream does not parse.
  CopyPlan(const int64_t* table, size_t words);

  int num_ranks() const { return static_cast<int>(sends_.size()); }
  int num_leaves() const { return static_cast<int>(leaf_template_.size()); }
  int num_templates() const { return static_cast<int>(templates_.size()); }
  int template_of(int leaf) const { return leaf_template_[leaf]; }
  int num_chunks() const { return (num_leaves() + chunk_ - 1) / chunk_; }
  bool sends(int rank) const { return sends_[rank]; }
  bool receives(int rank) const { return receives_[rank]; }

  // Leaves travel in chunks, one FFI call each.
  int chunk_begin(int chunk) const { return chunk * chunk_; }
  int chunk_end(int chunk) const { return std::min(num_leaves(), (chunk + 1) * chunk_); }

  // The copies of `leaf` into `dst_rank`.
  struct Span {
    const Copy* first;
    const Copy* last;
    const Copy* begin() const { return first; }
    const Copy* end() const { return last; }
  };
  Span copies(int leaf, int dst_rank) const;

  // The ranks that `dst_rank` reads from in `chunk`, each once, ascending.
  const std::vector<int>& sources(int chunk, int dst_rank) const { return sources_[chunk * num_ranks() + dst_rank]; }
  // How many (chunk, destination rank) pairs read from `src_rank`.
  int num_readers(int src_rank) const { return num_readers_[src_rank]; }

 private:
  void index_sources();

  int chunk_ = 1;
  std::vector<bool> sends_;
  std::vector<bool> receives_;
  std::vector<int32_t> leaf_template_;
  std::vector<std::vector<Copy>> templates_;  // each sorted by destination rank
  std::vector<std::vector<int>> sources_;
  std::vector<int> num_readers_;
};

}  // namespace jreshard
