// The host's side of decode: plans of the sequences, sizes of the workspace, and the loop over
// items and merges. No instruction set.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/checked.h"
#include "dispatch/kernel_entry.h"
#include "kernels/cpu/decode_simd_task.h"
#include "kernels/cpu/sequence.h"
#include "tiles/decode_simd.h"

namespace rafter::decode_simd {

constexpr std::int64_t kAlign = 64;  // bytes

/// What decode asks of a set of instructions: the lanes of its vectors, and whether it has tiles.
struct Units {
  std::int64_t lanes = 4;
  bool tiles = false;
};

inline tiles::DecodeLayout layout_of(const AttentionProblem& p, const Units& units) {
  return tiles::decode_layout(2 * units.lanes, p.head_dim, p.head_dim_v,
                              p.seqlen_q * (p.heads_q / p.heads_kv), p.heads_kv, units.tiles);
}

/// Many queries are not split: their partial results would outgrow the keys.
inline tiles::KeyParts parts_of(std::int64_t seqlen_q, std::int64_t seqlen_kv,
                                std::int64_t splits) {
  return {seqlen_kv, splits == 0 && seqlen_q > tiles::kDecodeQueries ? 1 : splits};
}
inline std::int64_t parts_of(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  return parts_of(p.seqlen_q, p.seqlen_kv, problem.splits).count();
}

/// Workspace: scratch of each thread, then plans, then partial results.
struct Sizes {
  std::int64_t thread_bytes = 0, plan_bytes = 0;
  std::int64_t partial_rows = 0;
  std::int64_t total_bytes = 0;
};
/// Nothing when they exceed 2^60 bytes.
inline std::optional<Sizes> sizes_of(const KernelProblem& problem, const Units& units) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 60;
  const AttentionProblem& p = problem.attention;
  const std::int64_t split_queries =
      problem.splits > 0 ? p.seqlen_q : std::min(p.seqlen_q, tiles::kDecodeQueries);
  const auto rows_per_kv = base::checked_product({split_queries, p.heads_q});
  if (!rows_per_kv || *rows_per_kv > kLimit || p.batch > kLimit / 1024) {
    return std::nullopt;
  }
  const tiles::DecodeLayout layout = layout_of(p, units);
  Sizes sizes;
  sizes.thread_bytes =
      base::round_up(layout.floats * static_cast<std::int64_t>(sizeof(float)), kAlign);
  sizes.plan_bytes =
      base::round_up((p.batch + 1) * static_cast<std::int64_t>(sizeof(Plan)), kAlign);
  const std::int64_t parts = parts_of(split_queries, p.seqlen_kv, problem.splits).count();
  std::optional<std::int64_t> all_parts = 0;
  if (parts > 1) {
    all_parts = base::checked_product({p.batch, parts});
    if (all_parts && p.layout == Layout::packed && problem.splits == 0) {
      all_parts = std::min(*all_parts, p.total_kv / tiles::kDecodeChunk + p.batch);
    }
  }
  const auto rows = all_parts ? base::checked_product({*all_parts, *rows_per_kv}) : std::nullopt;
  const auto partial_bytes = rows
                                 ? base::checked_product({*rows, layout.columns + 2,
                                                          static_cast<std::int64_t>(sizeof(float))})
                                 : std::nullopt;
  if (!partial_bytes || *partial_bytes > kLimit) {
    return std::nullopt;
  }
  sizes.partial_rows = *rows;
  sizes.total_bytes = problem.threads * sizes.thread_bytes + sizes.plan_bytes +
                      base::round_up(*partial_bytes, kAlign);
  return sizes;
}

/// Writes the plan of every sequence and the totals behind the last.
inline void write_plans(const ForwardCall& call, Plan* plans, Run& run) {
  const AttentionProblem& p = call.problem.attention;
  Plan next;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    Plan& plan = plans[b];
    plan = next;
    plan.sequence = cpu::sequence_of(p, call.in, b);
    plan.parts = parts_of(plan.sequence.seqlen_q, plan.sequence.seqlen_kv, call.problem.splits);
    plan.row_blocks = base::div_up(plan.sequence.seqlen_q * run.group(), tiles::kDecodeRows);
    const std::int64_t parts = plan.parts.count();
    next.first_item += plan.row_blocks * parts;
    if (parts > 1) {
      next.first_merge += plan.sequence.seqlen_q * p.heads_q;
      next.first_part += parts * plan.sequence.seqlen_q * p.heads_q;
    }
  }
  plans[p.batch] = next;
  // Tokens lie in memory with their heads side by side: an item reads all of them, unless that
  // leaves threads without work. Heads do not meet, so this changes no bit.
  constexpr std::int64_t kItemsPerThread = 4;
  const std::int64_t units = std::max<std::int64_t>(1, next.first_item);
  const std::int64_t ranges = std::clamp<std::int64_t>(
      base::div_up(call.problem.threads * kItemsPerThread, units), 1, p.heads_kv);
  run.heads = std::min(base::div_up(p.heads_kv, ranges), run.layout.heads);
  for (std::int64_t b = 0; b <= p.batch; ++b) {
    plans[b].first_item *= run.head_ranges();
  }
  run.plans = plans;
}

inline Status forward(const ForwardCall& call, const Units& units, const Functions& functions) {
  const Sizes sizes = sizes_of(call.problem, units).value_or(Sizes{});
  const int threads = call.problem.threads;
  auto* const scratch = static_cast<std::byte*>(call.workspace.data);
  auto* const plans = reinterpret_cast<Plan*>(scratch + threads * sizes.thread_bytes);
  Run run{.call = call, .layout = layout_of(call.problem.attention, units)};
  run.partial_o =
      reinterpret_cast<float*>(scratch + threads * sizes.thread_bytes + sizes.plan_bytes);
  run.partial_state = run.partial_o + sizes.partial_rows * run.layout.columns;
  write_plans(call, plans, run);
  const std::int64_t items = run.items();
  const std::int64_t merges = run.merges();
  // a thread that takes items in a row prefetches from one into the next
  run.turn = std::clamp<std::int64_t>(items / (4 * threads), 1, 8);
#pragma omp parallel num_threads(static_cast <int>(std::clamp <std::int64_t>(items, 1, threads)))
  {
    auto* const mine =
        reinterpret_cast<float*>(scratch + omp_get_thread_num() * sizes.thread_bytes);
    std::int64_t before = -1;  // the item of this thread
#pragma omp for schedule(dynamic, run.turn)
    for (std::int64_t item = 0; item < items; ++item) {
      functions.item(run, item, item == before + 1 && same_queries(run, item), mine);
      before = item;
    }
    // after the barrier of the loop above: all parts are there
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < merges; ++row) {
      functions.merge(run, row);
    }
  }
  return Status::ok();
}

}  // namespace rafter::decode_simd
