// The table of copies that one plan asks of the local ranks, as the Python planner wrote it.
#pragma once

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
  // 0 reads the array that the source rank publishes; k >= 1 reads the source rank's own destination array, where
  // copies of earlier phases have written.
  int32_t phase = 0;

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
  // `table` is the stream of int64 words that jreshard/_planning/tables.py writes; its docstring gives the format.
  // Throws std::invalid_argument where the stream does not parse.
  CopyPlan(const int64_t* table, size_t words);

  int num_ranks() const { return static_cast<int>(sends_.size()); }
  int num_leaves() const { return static_cast<int>(leaf_template_.size()); }
  int num_templates() const { return static_cast<int>(templates_.size()); }
  int template_of(int leaf) const { return leaf_template_[leaf]; }
  int num_phases() const { return num_phases_; }
  int num_chunks() const { return static_cast<int>(chunk_ends_.size()); }
  bool sends(int rank) const { return sends_[rank]; }
  bool receives(int rank) const { return receives_[rank]; }

  // Leaves travel in chunks, one FFI call each.
  int chunk_begin(int chunk) const { return chunk == 0 ? 0 : chunk_ends_[chunk - 1]; }
  int chunk_end(int chunk) const { return chunk_ends_[chunk]; }

  struct Span {
    const Copy* first;
    const Copy* last;
    const Copy* begin() const { return first; }
    const Copy* end() const { return last; }
  };
  // The copies of `leaf` into `dst_rank`, in the order of their phases.
  Span copies(int leaf, int dst_rank) const { return between(leaf, dst_rank, 0, num_phases_); }
  Span copies(int leaf, int dst_rank, int phase) const { return between(leaf, dst_rank, phase, phase + 1); }

  // The ranks that `dst_rank` reads from in `chunk` in one phase, each once, ascending.
  const std::vector<int>& sources(int chunk, int dst_rank, int phase = 0) const {
    return sources_[slot(chunk, phase, dst_rank)];
  }
  // The other way round: the ranks that read from `src_rank`.
  const std::vector<int>& readers(int chunk, int src_rank, int phase = 0) const {
    return readers_[slot(chunk, phase, src_rank)];
  }
  // Calls `visit(chunk, phase, source, reader)` for each pair of ranks of which one reads from the other.
  template <typename Visit>
  void for_each_read(Visit visit) const {
    for (int chunk = 0; chunk < num_chunks(); ++chunk) {
      for (int phase = 0; phase < num_phases_; ++phase) {
        for (int reader = 0; reader < num_ranks(); ++reader) {
          for (int source : sources(chunk, reader, phase)) visit(chunk, phase, source, reader);
        }
      }
    }
  }
  // The place of what a rank has in a chunk and phase in a vector over all of them, and the length of such a vector.
  size_t slot(int chunk, int phase, int rank) const {
    return (static_cast<size_t>(chunk) * num_phases_ + phase) * num_ranks() + rank;
  }
  size_t num_slots() const { return slot(num_chunks(), 0, 0); }
  // How many (chunk, destination rank) pairs read what `src_rank` publishes.
  int num_readers(int src_rank) const { return num_readers_[src_rank]; }

 private:
  void check_roles(const Copy& copy) const;
  void index_sources();
  Span between(int leaf, int dst_rank, int first_phase, int last_phase) const;

  std::vector<int> chunk_ends_;
  int num_phases_ = 1;
  std::vector<bool> sends_;
  std::vector<bool> receives_;
  std::vector<int32_t> leaf_template_;
  std::vector<std::vector<Copy>> templates_;  // each sorted by destination rank and phase
  std::vector<std::vector<int>> sources_;
  std::vector<std::vector<int>> readers_;
  std::vector<int> num_readers_;
};

}  // namespace jreshard
