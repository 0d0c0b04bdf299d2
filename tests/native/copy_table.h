// Tables of copies as tests write them, boxes made at random, and what copying them has to come to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "copy_plan.h"

using Words = std::vector<int64_t>;
using Bytes = std::vector<uint8_t>;

constexpr int kSends = 1, kReceives = 2;
constexpr uint8_t kPoison = 0xA5;
constexpr double kLong = 300;
constexpr double kShort = 0.05;

struct Table {
  int64_t chunk;  // leaves of each but the last
  std::vector<int> roles;
  std::vector<int> leaf_template;
  std::vector<std::vector<jreshard::Copy>> templates;
  bool grows = false;  // each chunk has one leaf more than the one before

  Words chunk_ends() const {
    Words out;
    const int64_t leaves = leaf_template.size();
    for (int64_t end = 0, size = chunk; end < leaves; size += grows) out.push_back(end = std::min(leaves, end + size));
    return out;
  }
  Words words() const {
    const Words ends = chunk_ends();
    Words out{int64_t(roles.size()), int64_t(leaf_template.size()), int64_t(templates.size()), int64_t(ends.size())};
    out.insert(out.end(), roles.begin(), roles.end());
    out.insert(out.end(), ends.begin(), ends.end());
    out.insert(out.end(), leaf_template.begin(), leaf_template.end());
    for (const auto& copies : templates) {
      out.push_back(copies.size());
      for (const jreshard::Copy& c : copies) {
        out.insert(out.end(),
                   {c.src_rank, c.dst_rank, c.phase, c.src_offset, c.dst_offset, c.run, int64_t(c.dims.size())});
        for (const jreshard::Dim& dim : c.dims) out.insert(out.end(), {dim.extent, dim.src_stride, dim.dst_stride});
      }
    }
    return out;
  }
  template <typename Exchange, typename... Args>
  std::shared_ptr<Exchange> exchange(Args&&... args) const {
    const auto make = [](auto&&... all) { return std::make_shared<Exchange>(std::forward<decltype(all)>(all)...); };
    return exchange_from(make, std::forward<Args>(args)...);
  }
  // What `open(plan, rank names, args...)` gives.
  template <typename Open, typename... Args>
  auto exchange_from(Open open, Args&&... args) const {
    const Words table = words();
    std::vector<std::string> names;
    for (size_t rank = 0; rank < roles.size(); ++rank) names.push_back("device " + std::to_string(rank));
    return open(jreshard::CopyPlan(table.data(), table.size()), std::move(names), std::forward<Args>(args)...);
  }
};

// A box in a larger array on either side, as the planner makes them; but rows may start at any byte.
struct StridedBox {
  jreshard::Copy copy;
  int64_t src_bytes;
  int64_t dst_bytes;
};

inline StridedBox random_box(std::mt19937& random, int64_t run) {
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  jreshard::Copy copy{0, 1, draw(0, 9), draw(0, 9), run, std::vector<jreshard::Dim>(draw(0, 4))};
  int64_t src = run + draw(0, 5), dst = run + draw(0, 5);
  for (size_t d = copy.dims.size(); d-- > 0;) {
    copy.dims[d] = {draw(1, 5), src, dst};
    src = src * (copy.dims[d].extent + draw(0, 2)) + draw(0, 1) * draw(0, 3);
    dst = dst * (copy.dims[d].extent + draw(0, 2)) + draw(0, 1) * draw(0, 3);
  }
  return {copy, copy.src_offset + src, copy.dst_offset + dst};
}

// Calls `visit(source offset, destination offset)` for each run of the copy.
template <typename Visit>
void for_each_run(const jreshard::Copy& copy, Visit visit, size_t dim = 0, int64_t src_at = 0, int64_t dst_at = 0) {
  if (dim == copy.dims.size()) {
    visit(copy.src_offset + src_at, copy.dst_offset + dst_at);
    return;
  }
  const jreshard::Dim& d = copy.dims[dim];
  for (int64_t i = 0; i < d.extent; ++i) {
    for_each_run(copy, visit, dim + 1, src_at + i * d.src_stride, dst_at + i * d.dst_stride);
  }
}

inline void copy_naively(const jreshard::Copy& copy, const Bytes& src, Bytes& dst) {
  for_each_run(copy, [&](int64_t src_at, int64_t dst_at) {
    for (int64_t i = 0; i < copy.run; ++i) dst[dst_at + i] = src[src_at + i];
  });
}

// The byte at a position of an array, different from its neighbours' and from other calls' and leaves'.
inline uint8_t byte_at(uint32_t call, int leaf, int64_t position) {
  const uint64_t mixed = (position + 1) * 0x9E3779B97F4A7C15u + call * 0xBF58476D1CE4E5B9u + leaf * 0x94D049BBu;
  return mixed >> 56;
}

// A table with the sizes of its arrays.
struct Plan {
  Table table;
  std::vector<std::vector<int64_t>> src_bytes, dst_bytes;  // [template][rank]

  Plan(int64_t chunk, std::vector<int> roles) : table{chunk, std::move(roles), {}, {}} {}

  void add_template() {
    table.templates.emplace_back();
    src_bytes.emplace_back(table.roles.size());
    dst_bytes.emplace_back(table.roles.size());
  }
  // Adds a copy to the last template, to behind what the destination gets already.
  void add(int src, int dst, StridedBox box, bool reread = false) {
    int64_t &from = src_bytes.back()[src], &to = dst_bytes.back()[dst];
    box.copy.src_rank = src;
    box.copy.dst_rank = dst;
    if (!reread) box.copy.src_offset += from;
    box.copy.dst_offset += to;
    from = reread ? std::max(from, box.src_bytes) : from + box.src_bytes;
    to += box.dst_bytes;
    table.templates.back().push_back(box.copy);
  }
  // Adds a copy that reads, out of what `src` has got in earlier phases, as much as its `received` bytes have room for.
  void forward(int phase, int src, int dst, StridedBox box, int64_t received) {
    if (box.src_bytes > received) return;
    int64_t& to = dst_bytes.back()[dst];
    box.copy.src_rank = src;
    box.copy.dst_rank = dst;
    box.copy.phase = phase;
    box.copy.dst_offset += to;
    to += box.dst_bytes;
    table.templates.back().push_back(box.copy);
  }
};

inline Plan random_plan(std::mt19937& random, int max_leaves, int phases = 1, int max_ranks = 4) {
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  std::vector<int> roles(draw(1, max_ranks));
  const int sets = draw(0, 2);  // the same devices on both sides, disjoint ones, or any
  for (size_t rank = 0; rank < roles.size(); ++rank) {
    roles[rank] = sets == 0 || roles.size() == 1 ? 3 : sets == 1 ? 1 + rank % 2 : draw(1, 3);
  }
  Plan plan(draw(0, 1) ? 64 : draw(1, 9), roles);
  plan.table.grows = plan.table.chunk % 2;
  for (int t = draw(1, 5); t > 0; --t) {
    plan.add_template();
    for (int phase = 0; phase < phases; ++phase) {
      const std::vector<int64_t> received = plan.dst_bytes.back();
      for (size_t src = 0; src < roles.size(); ++src) {
        for (size_t dst = 0; dst < roles.size(); ++dst) {
          if (!(roles[src] & (phase ? kReceives : kSends)) || !(roles[dst] & kReceives)) continue;
          for (int boxes = draw(0, 3); boxes > 0; --boxes) {
            const StridedBox box = random_box(random, draw(1, 4));
            phase ? plan.forward(phase, src, dst, box, received[src]) : plan.add(src, dst, box, draw(0, 1));
          }
        }
      }
    }
  }
  for (int leaves = draw(1, max_leaves); leaves > 0; --leaves) {
    plan.table.leaf_template.push_back(draw(0, plan.table.templates.size() - 1));
  }
  return plan;
}

// What one device publishes and receives in a call: all at once or, every other time, each chunk launched by itself.
template <typename Steps>
void move_whole_or_in_parts(Steps& steps, uint32_t call, int rank, int chunks) {
  if (call % 2) {
    steps.publish(call, rank);
    steps.receive(call, rank);
    return;
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    steps.publish_chunks(call, rank, {chunk});
    steps.receive_chunks(call, rank, {chunk});
  }
}

// What the source array of a leaf holds in a call.
inline Bytes source_bytes(uint32_t call, int leaf, int rank, size_t size) {
  Bytes out(size);
  for (size_t i = 0; i < size; ++i) out[i] = byte_at(call, leaf * 16 + rank, i);
  return out;
}

// What the destination arrays of a leaf come to, by rank, where they held kPoison before.
inline std::vector<Bytes> expected_arrays(const Plan& plan, const jreshard::CopyPlan& parsed, uint32_t call, int leaf) {
  const int ranks = parsed.num_ranks(), kind = plan.table.leaf_template[leaf];
  std::vector<Bytes> dst, readable;
  for (int rank = 0; rank < ranks; ++rank) {
    dst.emplace_back(plan.dst_bytes[kind][rank], kPoison);
    readable.push_back(source_bytes(call, leaf, rank, plan.src_bytes[kind][rank]));
  }
  for (int phase = 0; phase < parsed.num_phases(); ++phase) {
    for (int rank = 0; rank < ranks; ++rank) {
      for (const jreshard::Copy& copy : parsed.copies(leaf, rank, phase)) {
        copy_naively(copy, readable[copy.src_rank], dst[rank]);
      }
    }
    readable = dst;
  }
  return dst;
}
