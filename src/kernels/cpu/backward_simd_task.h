// The backward on vector units apart from arithmetic: where each row's delta and dQ stand in the
// workspace, and the run itself. Tasks and their turns: backward_tasks.h. No instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/checked.h"
#include "dispatch/kernel_entry.h"
#include "kernels/cpu/backward_tasks.h"
#include "kernels/cpu/sequence.h"
#include "tiles/backward_simd.h"

namespace rafter::backward_simd {

using Task = cpu::KeyTask;

/// Sizes and places in the workspace, in the order: scratch of each thread, tasks, turns, delta,
/// dQ.
struct Places {
  std::int64_t scratch_bytes = 0;                                   // of one thread
  std::int64_t tasks = 0, turns = 0, delta = 0, dq = 0, total = 0;  // byte offsets
};

inline cpu::KeyTaskShape shape_of(const tiles::SimdBackwardLayout& layout) {
  return {layout.keys, layout.blocking.tile_q};
}

inline Places places_of(const KernelProblem& problem, const tiles::SimdBackwardLayout& layout) {
  constexpr std::int64_t kFloat = sizeof(float), kAlign = 64;
  const AttentionProblem& p = problem.attention;
  const std::int64_t rows = cpu::total_rows(p) * p.heads_q;
  Places out;
  out.scratch_bytes = layout.floats * kFloat;
  out.tasks = problem.threads * out.scratch_bytes;
  out.turns = out.tasks + base::round_up(cpu::most_key_tasks(p, shape_of(layout)) *
                                             static_cast<std::int64_t>(sizeof(Task)),
                                         kAlign);
  out.delta = out.turns + base::round_up(cpu::most_tiles(p, shape_of(layout)) * p.heads_q *
                                             static_cast<std::int64_t>(sizeof(std::int32_t)),
                                         kAlign);
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
    const std::int64_t before = cpu::first_tile(p, s, sequence, layout.blocking.tile_q);
    return reinterpret_cast<std::int32_t*>(at(places.turns))[(before + tile) * p.heads_q + head_q];
  }
};

/// The code of one instruction set. Rows: delta = rowsum(dO ∘ O) − dlse of rows [first, last) of a
/// head, and dq = 0 where no row of a tile sees a key. Task: a block of keys of a KV head.
struct Functions {
  void (*rows)(const Run&, const cpu::Sequence&, std::int64_t head_q, std::int64_t first,
               std::int64_t last);
  void (*task)(const Run&, const Task&, std::int64_t head_kv, float* scratch);
};

inline void run_backward(const Run& run, const Functions& code) {
  cpu::run_key_tasks<cpu::NoScope>(
      run.call, shape_of(run.layout),
      {run.tasks(), reinterpret_cast<std::int32_t*>(run.at(run.places.turns))},
      [&](std::int64_t, const cpu::Sequence& s, std::int64_t head_q, std::int64_t first,
          std::int64_t last) { code.rows(run, s, head_q, first, last); },
      [&](const Task& task, std::int64_t head_kv) {
        code.task(run, task, head_kv, run.scratch(omp_get_thread_num()));
      });
}

}  // namespace rafter::backward_simd
