// What the fused CPU backwards share besides arithmetic: their tasks and the order of those, and
// the turns in which tasks add to dQ. No instruction set.
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

namespace rafter::cpu {

/// Block `block` of the keys of one sequence; KV heads come on top.
struct KeyTask {
  std::int64_t sequence = 0;
  std::int64_t block = 0;
  std::int64_t work = 0;  // of this block and those after it: what waits for this one
};

/// How a kernel cuts a problem.
struct KeyTaskShape {
  std::int64_t keys = 1;    // of a block
  std::int64_t tile_q = 1;  // query rows that take a turn together
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
inline std::int64_t most_key_tasks(const AttentionProblem& p, const KeyTaskShape& shape) {
  return most_parts(p, p.total_kv, p.seqlen_kv, shape.keys);
}
/// Tiles of query rows of one head over all sequences, at most.
inline std::int64_t most_tiles(const AttentionProblem& p, const KeyTaskShape& shape) {
  return most_parts(p, p.total_q, p.seqlen_q, shape.tile_q);
}

/// Where the tiles of a sequence stand among those of all sequences, of one head.
inline std::int64_t first_tile(const AttentionProblem& p, const Sequence& s, std::int64_t sequence,
                               std::int64_t tile_q) {
  // Sequences before this one have at most q_row / tile_q + sequence tiles.
  return p.layout == Layout::packed
             ? std::min(s.q_row / tile_q + sequence, sequence * base::div_up(p.seqlen_q, tile_q))
             : sequence * base::div_up(p.seqlen_q, tile_q);
}

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
inline std::int64_t list_key_tasks(const BackwardCall& call, std::int64_t keys, KeyTask* tasks) {
  const AttentionProblem& p = call.problem.attention;
  std::int64_t count = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, call.in, b);
    const tiles::MaskWindow rows = mask_window(p.mask, s).transposed(s.seqlen_q);
    std::int64_t after = 0;
    const std::int64_t blocks = base::div_up(s.seqlen_kv, keys);
    for (std::int64_t block = blocks - 1; block >= 0; --block) {
      const std::int64_t first = block * keys, last = std::min(first + keys, s.seqlen_kv);
      after += rows.hull(first, last).size() * (last - first);
      tasks[count++] = {b, block, after};
    }
  }
  std::sort(tasks, tasks + count, [](const KeyTask& a, const KeyTask& b) {
    return a.work != b.work           ? a.work > b.work
           : a.sequence != b.sequence ? a.sequence < b.sequence
                                      : a.block < b.block;
  });
  return count;
}

/// Where tasks and turns lie: most_key_tasks() and most_tiles() · heads_q of them.
struct KeyTaskLists {
  KeyTask* tasks = nullptr;
  std::int32_t* turns = nullptr;
};

/// Over the problem's threads: rows(sequence, s, head_q, first, last) for every tile of query rows,
/// then body(task, head_kv) for every task. `Scope` is constructed on each thread for as
/// long as it works.
template <typename Scope, typename Rows, typename Body>
void run_key_tasks(const BackwardCall& call, const KeyTaskShape& shape, const KeyTaskLists& lists,
                   const Rows& rows, const Body& body) {
  const AttentionProblem& p = call.problem.attention;
  const std::int64_t listed = list_key_tasks(call, shape.keys, lists.tasks);
  const std::int64_t count = listed * p.heads_kv;
  double pairs = 0;
  for (const KeyTask* task = lists.tasks; task < lists.tasks + listed; ++task) {
    pairs += task->block == 0 ? static_cast<double>(task->work) : 0;
  }
  // two of the five products are over head_dim_v
  const int threads =
      worthwhile_threads(call.problem, 2 * pairs * static_cast<double>(p.heads_q) *
                                           static_cast<double>(3 * p.head_dim + 2 * p.head_dim_v));
  std::fill_n(lists.turns, most_tiles(p, shape) * p.heads_q, 0);
  std::atomic<std::int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] const Scope scope;
    for (std::int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = sequence_of(p, call.in, b);
      const std::int64_t tiles = base::div_up(s.seqlen_q, shape.tile_q);
#pragma omp for schedule(static) nowait
      for (std::int64_t i = 0; i < tiles * p.heads_q; ++i) {
        const std::int64_t first = i % tiles * shape.tile_q;
        rows(b, s, i / tiles, first, std::min(first + shape.tile_q, s.seqlen_q));
      }
    }
#pragma omp barrier
    for (std::int64_t i = next++; i < count; i = next++) {
      body(lists.tasks[i / p.heads_kv], i % p.heads_kv);
    }
  }
}

}  // namespace rafter::cpu
