#include "copy_plan.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace jreshard {
namespace {

class Reader {
 public:
  Reader(const int64_t* words, size_t count) : next_(words), end_(words + count) {}

  int64_t word() {
    if (next_ == end_) throw std::invalid_argument("the table of copies ends early");
    return *next_++;
  }
  int64_t word_in(int64_t low, int64_t high, const char* what) {
    int64_t value = word();
    if (value < low || value >= high) {
      throw std::invalid_argument(std::string("the table of copies has a bad ") + what + ": " + std::to_string(value));
    }
    return value;
  }
  size_t left() const { return static_cast<size_t>(end_ - next_); }

 private:
  const int64_t* next_;
  const int64_t* end_;
};

constexpr int64_t kMax = int64_t{1} << 62;
constexpr int64_t kMaxPhases = 16;

Copy read_copy(Reader& in, int64_t num_ranks) {
  Copy copy;
  copy.src_rank = static_cast<int32_t>(in.word_in(0, num_ranks, "source rank"));
  copy.dst_rank = static_cast<int32_t>(in.word_in(0, num_ranks, "destination rank"));
  copy.phase = static_cast<int32_t>(in.word_in(0, kMaxPhases, "phase"));
  copy.src_offset = in.word_in(0, kMax, "source offset");
  copy.dst_offset = in.word_in(0, kMax, "destination offset");
  copy.run = in.word_in(1, kMax, "run length");
  copy.dims.resize(in.word_in(0, 64, "number of dims"));
  for (Dim& dim : copy.dims) {
    dim.extent = in.word_in(1, kMax, "extent");
    dim.src_stride = in.word_in(0, kMax, "source stride");
    dim.dst_stride = in.word_in(0, kMax, "destination stride");
  }
  return copy;
}

}  // namespace

CopyPlan::CopyPlan(const int64_t* table, size_t words) {
  Reader in(table, words);
  // Every count is bounded by the words that are left.
  const int64_t ranks = in.word_in(1, static_cast<int64_t>(in.left()) + 1, "number of ranks");
  const int64_t leaves = in.word_in(0, static_cast<int64_t>(in.left()) + 1, "number of leaves");
  const int64_t templates = in.word_in(0, static_cast<int64_t>(in.left()) + 1, "number of templates");
  const int64_t chunks = in.word_in(leaves > 0, leaves + 1, "number of chunks");
  for (int64_t r = 0; r < ranks; ++r) {
    const int64_t role = in.word_in(0, 4, "role");
    sends_.push_back(role & 1);
    receives_.push_back(role & 2);
  }
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t begin = chunk_ends_.empty() ? 0 : chunk_ends_.back();
    chunk_ends_.push_back(static_cast<int>(in.word_in(begin + 1, leaves + 1, "end of a chunk")));
  }
  if (chunks > 0 && chunk_ends_.back() != leaves) {
    throw std::invalid_argument("the table of copies has leaves in no chunk");
  }
  for (int64_t i = 0; i < leaves; ++i) {
    leaf_template_.push_back(static_cast<int32_t>(in.word_in(0, templates, "template")));
  }
  templates_.resize(templates);
  for (auto& copies : templates_) {
    copies.resize(in.word_in(0, static_cast<int64_t>(in.left()) + 1, "number of copies"));
    for (Copy& copy : copies) {
      copy = read_copy(in, ranks);
      check_roles(copy);
      num_phases_ = std::max(num_phases_, copy.phase + 1);
    }
    std::stable_sort(copies.begin(), copies.end(), [](const Copy& a, const Copy& b) {
      return std::tie(a.dst_rank, a.phase) < std::tie(b.dst_rank, b.phase);
    });
  }
  if (in.left()) throw std::invalid_argument("the table of copies has words left over");
  index_sources();
}

void CopyPlan::check_roles(const Copy& copy) const {
  if (copy.phase == 0 ? !sends_[copy.src_rank] : !receives_[copy.src_rank]) {
    throw std::invalid_argument("the table of copies reads from rank " + std::to_string(copy.src_rank) +
                                ", which has nothing to read in phase " + std::to_string(copy.phase));
  }
  if (!receives_[copy.dst_rank]) {
    throw std::invalid_argument("the table of copies writes to rank " + std::to_string(copy.dst_rank) +
                                ", which does not receive");
  }
}

CopyPlan::Span CopyPlan::between(int leaf, int dst_rank, int first_phase, int last_phase) const {
  const std::vector<Copy>& all = templates_[leaf_template_[leaf]];
  auto before = [](const Copy& copy, std::pair<int, int> key) {
    return std::pair<int, int>(copy.dst_rank, copy.phase) < key;
  };
  auto first = std::lower_bound(all.begin(), all.end(), std::pair(dst_rank, first_phase), before);
  auto last = std::lower_bound(first, all.end(), std::pair(dst_rank, last_phase), before);
  return {all.data() + (first - all.begin()), all.data() + (last - all.begin())};
}

void CopyPlan::index_sources() {
  sources_.resize(num_slots());
  readers_.resize(sources_.size());
  num_readers_.assign(num_ranks(), 0);
  for (int chunk = 0; chunk < num_chunks(); ++chunk) {
    std::set<std::tuple<int, int, int>> reads;  // phase, destination, source
    std::set<int32_t> done;
    for (int leaf = chunk_begin(chunk); leaf < chunk_end(chunk); ++leaf) {
      if (!done.insert(leaf_template_[leaf]).second) continue;
      for (const Copy& copy : templates_[leaf_template_[leaf]]) reads.emplace(copy.phase, copy.dst_rank, copy.src_rank);
    }
    for (const auto& [phase, destination, source] : reads) {
      sources_[slot(chunk, phase, destination)].push_back(source);
      readers_[slot(chunk, phase, source)].push_back(destination);
      if (phase == 0) ++num_readers_[source];
    }
  }
}

}  // namespace jreshard
