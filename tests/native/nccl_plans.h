// Plans with relays, for the tests of the transport over NCCL.
#pragma once

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "copy_table.h"

// As random_plan, but no rank passes anything on to itself.
inline Plan random_relays(std::mt19937& random, int max_leaves, int phases, int max_ranks = 4) {
  Plan plan = random_plan(random, max_leaves, phases, max_ranks);
  for (auto& copies : plan.table.templates) {
    copies.erase(std::remove_if(copies.begin(), copies.end(),
                                [](const jreshard::Copy& c) { return c.phase > 0 && c.src_rank == c.dst_rank; }),
                 copies.end());
  }
  return plan;
}

// Part of an array of rows: some rows, and some bytes of each.
struct Part {
  int64_t row, rows;
  int64_t begin, bytes;
};

// The part in pieces, of rows or of bytes of all rows.
inline std::vector<Part> cut(const Part& part, int64_t pieces, bool by_rows) {
  std::vector<Part> out;
  const int64_t length = by_rows ? part.rows : part.bytes;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t begin = length * i / pieces, size = length * (i + 1) / pieces - begin;
    if (size == 0) continue;
    out.push_back(by_rows ? Part{part.row + begin, size, part.begin, part.bytes}
                          : Part{part.row, part.rows, part.begin + begin, size});
  }
  return out;
}

// Copies a part to its place in an array, from the same place or, packed, from an offset.
inline jreshard::Copy copy_of(const Part& part, int64_t row_bytes, int64_t packed_at = -1) {
  const int64_t at = part.row * row_bytes + part.begin;
  const bool packed = packed_at >= 0, whole_rows = part.bytes == row_bytes;
  jreshard::Copy copy{0, 0, packed ? packed_at : at, at, part.bytes * (whole_rows ? part.rows : 1), {}};
  if (!whole_rows) copy.dims = {{part.rows, packed ? part.bytes : row_bytes, row_bytes}};
  return copy;
}

// Adds a template in which each byte of an array reaches all ranks that receive: a part enters at one of them, and from
// there spreads in up to three phases, each time whole or in pieces. A source holds the whole array, or what it sends.
inline void add_replicas(Plan& plan, std::mt19937& random, int64_t rows, int64_t row_bytes) {
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  plan.add_template();
  std::vector<int> sources, replicas;
  for (size_t rank = 0; rank < plan.table.roles.size(); ++rank) {
    if (plan.table.roles[rank] & kSends) sources.push_back(rank);
    if (plan.table.roles[rank] & kReceives) replicas.push_back(rank);
  }
  for (int rank : replicas) plan.dst_bytes.back()[rank] = rows * row_bytes;
  const bool packed = draw(0, 1);
  int64_t packed_bytes = 0;
  const auto add = [&](int src, int dst, int phase, jreshard::Copy copy) {
    copy.src_rank = src;
    copy.dst_rank = dst;
    copy.phase = phase;
    plan.table.templates.back().push_back(copy);
  };
  for (const Part& part : cut({0, rows, 0, row_bytes}, draw(1, 4), draw(0, 1))) {
    std::shuffle(replicas.begin(), replicas.end(), random);
    for (const Part& piece : cut(part, draw(1, 2), draw(0, 1))) {
      const int source = sources[random() % sources.size()];
      add(source, replicas[0], 0, copy_of(piece, row_bytes, packed ? packed_bytes : -1));
      packed_bytes += piece.rows * piece.bytes;
      int64_t& held = plan.src_bytes.back()[source];
      held = std::max(held, packed ? packed_bytes : rows * row_bytes);
    }
    std::vector<int> phase_of(replicas.size());
    for (size_t i = 1; i < replicas.size(); ++i) {
      size_t from = draw(0, i - 1);
      if (phase_of[from] == 2) from = 0;
      phase_of[i] = phase_of[from] + 1;
      for (const Part& piece : cut(part, draw(1, 2), draw(0, 1))) {
        add(replicas[from], replicas[i], phase_of[i], copy_of(piece, row_bytes));
      }
    }
  }
}

// Arrays of all sizes that reach all ranks that receive, on disjoint devices or on some that are on both sides.
inline Plan replicas_plan(std::mt19937& random, int max_leaves, int ranks, int64_t most_row_bytes) {
  auto draw = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  const bool disjoint = draw(0, 1);
  std::vector<int> roles(ranks);
  for (int rank = 0; rank < ranks; ++rank) roles[rank] = disjoint ? 1 + (rank > 0) : draw(2, 3);
  roles[0] |= kSends;
  Plan plan(draw(1, 8), roles);
  for (int t = draw(1, 4); t > 0; --t) add_replicas(plan, random, draw(1, 9), draw(1, most_row_bytes));
  for (int leaves = draw(1, max_leaves); leaves > 0; --leaves) {
    plan.table.leaf_template.push_back(draw(0, plan.table.templates.size() - 1));
  }
  return plan;
}
