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

// A stripe of rows, or of columns, of an array of whole rows.
struct Stripe {
  int64_t offset;
  int64_t run;
  std::vector<jreshard::Dim> dims;

  int64_t bytes() const { return run * (dims.empty() ? 1 : dims[0].extent); }
};

inline std::vector<Stripe> stripes_of(int64_t rows, int64_t row_bytes, int count, bool by_rows) {
  std::vector<Stripe> out;
  const int64_t length = by_rows ? rows : row_bytes;
  for (int i = 0; i < count; ++i) {
    const int64_t begin = length * i / count, size = length * (i + 1) / count - begin;
    if (size == 0) continue;
    if (by_rows) {
      out.push_back({begin * row_bytes, size * row_bytes, {}});
    } else {
      out.push_back({begin, size, {{rows, row_bytes, row_bytes}}});
    }
  }
  return out;
}

// Adds a template in which each byte of an array reaches all ranks that receive: a stripe enters at one of them, and
// from there spreads in up to three phases. Sources hold the whole array or, in a place of its own, each stripe.
inline void add_replicas(Plan& plan, std::mt19937& random, int64_t rows, int64_t row_bytes, bool by_rows) {
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  plan.add_template();
  std::vector<int> sources, replicas;
  for (size_t rank = 0; rank < plan.table.roles.size(); ++rank) {
    if (plan.table.roles[rank] & kSends) sources.push_back(rank);
    if (plan.table.roles[rank] & kReceives) replicas.push_back(rank);
  }
  for (int rank : replicas) plan.dst_bytes.back()[rank] = rows * row_bytes;
  const bool apart = draw(0, 1);
  int64_t at = 0;
  for (const Stripe& stripe : stripes_of(rows, row_bytes, draw(1, 4), by_rows)) {
    std::shuffle(replicas.begin(), replicas.end(), random);
    std::vector<int> phase_of(replicas.size());
    for (size_t i = 0; i < replicas.size(); ++i) {
      jreshard::Copy copy{0, replicas[i], stripe.offset, stripe.offset, stripe.run, stripe.dims};
      size_t from = i ? draw(0, i - 1) : 0;
      if (phase_of[from] == 2) from = 0;
      phase_of[i] = copy.phase = i ? phase_of[from] + 1 : 0;
      copy.src_rank = i ? replicas[from] : sources[random() % sources.size()];
      if (i == 0 && apart) {
        copy.src_offset = at;
        for (jreshard::Dim& dim : copy.dims) dim.src_stride = copy.run;
      }
      if (i == 0) {
        int64_t& needed = plan.src_bytes.back()[copy.src_rank];
        needed = std::max(needed, apart ? at + stripe.bytes() : rows * row_bytes);
      }
      plan.table.templates.back().push_back(copy);
    }
    at += stripe.bytes();
  }
}

// Arrays of all sizes, by rows and by columns, on disjoint devices or on some that are on both sides.
inline Plan replicas_plan(std::mt19937& random, int max_leaves, int ranks, int64_t most_row_bytes) {
  auto draw = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  const bool disjoint = draw(0, 1);
  std::vector<int> roles(ranks);
  for (int rank = 0; rank < ranks; ++rank) roles[rank] = disjoint ? 1 + (rank > 0) : draw(2, 3);
  roles[0] |= kSends;
  Plan plan(draw(1, 8), roles);
  for (int t = draw(1, 4); t > 0; --t) add_replicas(plan, random, draw(1, 9), draw(1, most_row_bytes), draw(0, 1));
  for (int leaves = draw(1, max_leaves); leaves > 0; --leaves) {
    plan.table.leaf_template.push_back(draw(0, plan.table.templates.size() - 1));
  }
  return plan;
}
