// The backward on vector units apart from arithmetic: its tasks and their order, where each row's
// delta and dQ stand in the workspace, and the turns in which tasks add to dQ. No instruction set.
//
// A task is a block of keys of one KV head against every query that sees them; it owns dK and dV of
// its keys. Its part of dQ goes on top of what the blocks before it have added: each tile of query
// rows has a turn counter, and a block waits for its turn. Sums then have one order, whoever
// computes them. Blocks of a head are taken in ascending order, so the first block that is not
// done never waits, and a wait is as a rule no wait at all.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "base/checked.h"
#include "dispatch/kernel_entry.h"
#include "kernels/cpu/forward_tasks.h"
#include "kernels/cpu/sequence.h"
#include "tiles/backward_simd.h"

namespace rafter::backward_simd {

/// Block `block` of the keys of one sequence; KV heads come on top.
struct Task {
  std::int64_t sequence = 0;
  std::int64_t block = 0;
  std::int64_t work = 0;  // of this block and those after it: what waits for this one
};

/// Sizes and places in the workspace, in the order: scratch of each thread, tasks, turns, delta,
/// dQ.
struct Places {
  std::int64_t scratch_bytes = 0;                                   // of one thread
  std::int64_t tasks = 0, turns = 0, delta = 0, dq = 0, total = 0;  // byte offsets
  std::int64_t turn_count = 0;
};

inline std::int64_t total_rows(const AttentionProblem& p) {
  return p.layout == Layout::packed ? p.total_q : p.batch * p.seqlen_q;
}

/// Parts of `size` rows, or keys, of all sequences, at most.
inline std::int64_t most_parts(const AttentionProblem& p, std::int64_t total, std::int64_t longest,
                               std::int64_t size) {
  return p.layout == Layout::packed
             ? std::min(total / size + p.batch, p.batch * base::div_up(longest, size))
             : p.batch * base::div_up(longest, size);
}

inline Places places_of(const KernelProblem& problem, const tiles::SimdBackwardLayout& layout) {
  constexpr std::int64_t kFloat = sizeof(float), kAlign = 64;
  const AttentionProblem& p = problem.attention;
  const std::int64_t rows = total_rows(p) * p.heads_q;
  Places out;
  out.scratch_bytes = layout.floats * kFloat;
  out.tasks = problem.threads * out.scratch_bytes;
  out.turns = out.tasks + base::round_up(most_parts(p, p.total_kv, p.seqlen_kv, layout.keys) *
                                             static_cast<std::int64_t>(sizeof(Task)),
                                         kAlign);
  out.turn_count = most_parts(p, p.total_q, p.seqlen_q, layout.blocking.tile_q) * p.heads_q;
  out.delta =
      out.turns +
      base::round_up(out.turn_count * static_cast<std::int64_t>(sizeof(std::int32_t)), kAlign);
  out.dq = out.delta + base::round_up(rows * kFloat, kAlign);
  out.total = out.dq + rows * layout.depth * kFloat;
  return out;
}

/// One call, the same for all its tasks.
struct Run {
  const BackwardCall& call;
  tiles::SimdBackwardLayout layout;
  Places places;

  Run(const BackwardCall& of, const tiles::SimdBackwardLayout& shape)
      : call(of), layout(shape), places(places_of(of.problem, shape)) {}

  const AttentionProblem& problem() const { return call.problem.attention; }
  std::byte* at(std::int64_t bytes) const {
    return static_cast<std::byte*>(call.workspace.data) + bytes;
  }
  Task* tasks() const { return reinterpret_cast<Task*>(at(places.tasks)); }
  float* scratch(int thread) const {
    return reinterpret_cast<float*>(at(thread * places.scratch_bytes));
  }
  /// Of the rows of one head of a sequence, head after head and sequence after sequence.
  std::int64_t first_row(const cpu::Sequence& s, std::int64_t head_q) const {
    const AttentionProblem& p = problem();
    const std::int64_t before = p.layout == Layout::packed ? s.q_row : s.q_batch * p.seqlen_q;
    return before * p.heads_q + head_q * s.seqlen_q;
  }
  float* delta(const cpu::Sequence& s, std::int64_t head_q) const {
    return reinterpret_cast<float*>(at(places.delta)) + first_row(s, head_q);
  }
  float* dq(const cpu::Sequence& s, std::int64_t head_q) const {
    return reinterpret_cast<float*>(at(places.dq)) + first_row(s, head_q) * layout.depth;
  }
  /// How many blocks have added to a tile of a head's rows.
  std::int32_t& turn(const cpu::Sequence& s, std::int64_t sequence, std::int64_t head_q,
                     std::int64_t tile) const {
    const AttentionProblem& p = problem();
    const std::int64_t tile_q = layout.blocking.tile_q;
    // Sequences before this one have at most q_row / tile_q + sequence tiles.
    const std::int64_t before =
        p.layout == Layout::packed
            ? std::min(s.q_row / tile_q + sequence, sequence * base::div_up(p.seqlen_q, tile_q))
            : sequence * base::div_up(p.seqlen_q, tile_q);
    return reinterpret_cast<std::int32_t*>(at(places.turns))[(before + tile) * p.heads_q + head_q];
  }
};

inline void wait_for_turn(std::int32_t& turn, std::int32_t mine) {
  const std::atomic_ref<std::int32_t> now(turn);
  while (now.load(std::memory_order_acquire) != mine) {
    std::this_thread::yield();
  }
}
inline void end_turn(std::int32_t& turn, std::int32_t mine) {
  std::atomic_ref<std::int32_t>(turn).store(mine + 1, std::memory_order_release);
}

/// Writes the tasks of one KV head, those that most work waits for first; returns how many. A
/// block is always before those after it.
inline std::int64_t list_tasks(const Run& run) {
  const AttentionProblem& p = run.problem();
  Task* const tasks = run.tasks();
  const std::int64_t keys = run.layout.keys;
  std::int64_t count = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const cpu::Sequence s = cpu::sequence_of(p, run.call.in, b);
    const tiles::MaskWindow rows = cpu::mask_window(p.mask, s).transposed(s.seqlen_q);
    std::int64_t after = 0;
    const std::int64_t blocks = base::div_up(s.seqlen_kv, keys);
    for (std::int64_t block = blocks - 1; block >= 0; --block) {
      const std::int64_t first = block * keys, last = std::min(first + keys, s.seqlen_kv);
      after += rows.hull(first, last).size() * (last - first);
      tasks[count++] = {b, block, after};
    }
  }
  std::sort(tasks, tasks + count, [](const Task& a, const Task& b) {
    return a.work != b.work           ? a.work > b.work
           : a.sequence != b.sequence ? a.sequence < b.sequence
                                      : a.block < b.block;
  });
  return count;
}

/// The code of one instruction set. Rows: delta = rowsum(dO ∘ O) − dlse of rows [first, last) of a
/// head, and dq = 0 where no row of a tile sees a key. Task: a block of keys of a KV head.
struct Functions {
  void (*rows)(const Run&, const cpu::Sequence&, std::int64_t head_q, std::int64_t first,
               std::int64_t last);
  void (*task)(const Run&, const Task&, std::int64_t head_kv, float* scratch);
};

inline void run_backward(const Run& run, const Functions& code) {
  const AttentionProblem& p = run.problem();
  const std::int64_t listed = list_tasks(run);
  const std::int64_t count = listed * p.heads_kv;
  double pairs = 0;
  for (const Task* task = run.tasks(); task < run.tasks() + listed; ++task) {
    pairs += task->block == 0 ? static_cast<double>(task->work) : 0;
  }
  // two of the five products are over head_dim_v
  const int threads = cpu::worthwhile_threads(
      run.call.problem, 2 * pairs * static_cast<double>(p.heads_q) *
                            static_cast<double>(3 * p.head_dim + 2 * p.head_dim_v));
  const std::int64_t tile_q = run.layout.blocking.tile_q;
  std::fill_n(reinterpret_cast<std::int32_t*>(run.at(run.places.turns)), run.places.turn_count, 0);
  std::atomic<std::int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    for (std::int64_t b = 0; b < p.batch; ++b) {
      const cpu::Sequence s = cpu::sequence_of(p, run.call.in, b);
      const std::int64_t tiles = base::div_up(s.seqlen_q, tile_q);
#pragma omp for schedule(static) nowait
      for (std::int64_t i = 0; i < tiles * p.heads_q; ++i) {
        const std::int64_t first = i % tiles * tile_q;
        code.rows(run, s, i / tiles, first, std::min(first + tile_q, s.seqlen_q));
      }
    }
#pragma omp barrier
    float* const scratch = run.scratch(omp_get_thread_num());
    for (std::int64_t i = next++; i < count; i = next++) {
      code.task(run, run.tasks()[i / p.heads_kv], i % p.heads_kv, scratch);
    }
  }
}

}  // namespace rafter::backward_simd
