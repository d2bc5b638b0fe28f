// What decode hands to the code of one instruction set: items of work, and where the partial
// results of split sequences lie. No instruction set.
//
// An item is one part of the keys of one sequence, some KV heads and up to kDecodeRows query rows
// of each: row = position · group + head of the group. Which items there are follows from each
// sequence's own lengths; threads share them out.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dispatch/kernel_entry.h"
#include "kernels/cpu/sequence.h"
#include "tiles/decode_simd.h"

namespace rafter::decode_simd {

/// One sequence of a run: its parts, and where its items and partial results begin.
struct Plan {
  cpu::Sequence sequence;
  tiles::KeyParts parts;
  std::int64_t row_blocks = 0;   // of kDecodeRows query rows, per KV head
  std::int64_t first_item = 0;   // of all sequences
  std::int64_t first_part = 0;   // rows of partial results before this sequence's
  std::int64_t first_merge = 0;  // output rows that are merged before this sequence's
};

/// One run, the same for all its items.
struct Run {
  const ForwardCall& call;
  tiles::DecodeLayout layout;
  std::int64_t heads = 1;          // KV heads of an item
  std::int64_t turn = 1;           // items that a thread takes at a time, from a multiple on
  const Plan* plans = nullptr;     // [batch + 1], the last holds the totals
  float* partial_o = nullptr;      // [partial rows, layout.columns], not divided by the sum
  float* partial_state = nullptr;  // [partial rows, 2]: maximum (of log2) and sum

  const AttentionProblem& problem() const { return call.problem.attention; }
  std::int64_t group() const { return problem().heads_q / problem().heads_kv; }
  std::int64_t head_ranges() const { return (problem().heads_kv + heads - 1) / heads; }
  std::int64_t items() const { return plans[problem().batch].first_item; }
  std::int64_t merges() const { return plans[problem().batch].first_merge; }
};

/// The sequence that number `i` belongs to, where `first` is what counts up to it.
inline const Plan& plan_of(const Run& run, std::int64_t i, std::int64_t Plan::*first) {
  const Plan* const end = run.plans + run.problem().batch + 1;
  return *(std::upper_bound(run.plans, end, i,
                            [first](std::int64_t n, const Plan& p) { return n < p.*first; }) -
           1);
}

/// Row of the partial results: [part][query head][position] within a sequence.
inline std::int64_t partial_row(const Run& run, const Plan& plan, std::int64_t part,
                                std::int64_t head_q, std::int64_t position) {
  const std::int64_t rows = plan.sequence.seqlen_q;
  return plan.first_part + (part * run.problem().heads_q + head_q) * rows + position;
}

/// Whether an item has the queries of the one before it.
inline bool same_queries(const Run& run, std::int64_t item) {
  const Plan& plan = plan_of(run, item, &Plan::first_item);
  return run.head_ranges() == 1 && plan.row_blocks == 1 && item > plan.first_item;
}

/// Computes item `item`; scratch has layout.floats floats, 64-byte aligned, and holds the queries
/// where they are `packed`: same_queries, and it computed the item before.
using ItemFunction = void (*)(const Run& run, std::int64_t item, bool packed, float* scratch);
/// Merges the parts of output row `row` of those that are split.
using MergeFunction = void (*)(const Run& run, std::int64_t row);

struct Functions {
  ItemFunction item;
  MergeFunction merge;
};

}  // namespace rafter::decode_simd
