// What the fused CPU kernels share besides arithmetic: tasks and their schedule, which query a lane
// holds, where the keys of a tile lie, and what of a tile a panel of lanes sees. No instruction
// set.
//
// A task is some positions of one sequence times the query heads that share a KV head:
// lane = position · heads + head. Tiles of keys start at fixed multiples whatever the task, and
// lanes never meet, so the bits of a row depend on its own sequence alone.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/checked.h"
#include "dispatch/kernel_entry.h"
#include "kernels/cpu/sequence.h"
#include "tiles/key_range.h"

namespace rafter::cpu {

/// Queries [first, last) of one sequence; heads come on top. `work` orders tasks, longest first.
struct Task {
  std::int64_t sequence = 0;
  std::int64_t first = 0, last = 0;
  std::int64_t work = 0;  // queries · keys, about
};

/// How a kernel cuts a problem.
struct TaskShape {
  std::int64_t positions = 1;       // queries of a task
  std::int64_t heads = 1;           // query heads of a task: the group, or a part of a large one
  std::int64_t head_chunks = 1;     // such parts
  std::int64_t scratch_bytes = 64;  // of a thread; a multiple of 64
  std::int64_t block = 1;           // queries, and keys, that are computed together or not at all
};

/// Enough tasks that the last ones, which are the shortest, even the threads out.
inline constexpr std::int64_t kTasksPerThread = 4;

/// Tasks of one KV head over all sequences, at most.
inline std::int64_t most_tasks(const AttentionProblem& p, const TaskShape& shape) {
  const auto tiles_of = [&](std::int64_t rows) {
    return (rows + shape.positions - 1) / shape.positions;
  };
  return p.layout == Layout::packed
             ? std::min(tiles_of(p.total_q) + p.batch, p.batch * tiles_of(p.seqlen_q))
             : p.batch * tiles_of(p.seqlen_q);
}

inline std::int64_t tasks_workspace(const KernelProblem& problem, const TaskShape& shape) {
  return problem.threads * shape.scratch_bytes +
         most_tasks(problem.attention, shape) * static_cast<std::int64_t>(sizeof(Task));
}

/// Writes the tasks of one KV head over some sequences, longest first; returns how many.
inline std::int64_t list_tasks(const ForwardCall& call, const TaskShape& shape,
                               tiles::Range sequences, Task* tasks) {
  const AttentionProblem& p = call.problem.attention;
  std::int64_t count = 0;
  for (std::int64_t b = sequences.first; b < sequences.last; ++b) {
    const Sequence sequence = sequence_of(p, call.in, b);
    const tiles::MaskWindow window = mask_window(p.mask, sequence);
    for (std::int64_t first = 0; first < sequence.seqlen_q; first += shape.positions) {
      const std::int64_t last = std::min(first + shape.positions, sequence.seqlen_q);
      tasks[count++] = {b, first, last, (last - first) * window.hull(first, last).size()};
    }
  }
  std::sort(tasks, tasks + count, [](const Task& a, const Task& b) { return a.work > b.work; });
  return count;
}

/// Threads that this many FLOPs are worth: one is woken for a million of them, some ten
/// microseconds, or not at all. On a busy machine a wait for a thread that is not running costs
/// milliseconds. Threads never change bits.
inline int worthwhile_threads(const KernelProblem& problem, double flops) {
  constexpr double kFlopsEach = 1e6;
  return static_cast<int>(
      std::clamp(flops / kFlopsEach, 1.0, static_cast<double>(problem.threads)));
}

/// FLOPs of the products of `tasks` of one KV head, over all heads: whole blocks, as they are
/// computed.
inline double flops_of(const AttentionProblem& p, const TaskShape& shape, const Task* tasks,
                       std::int64_t count) {
  double pairs = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t queries = tasks[i].last - tasks[i].first;
    const std::int64_t keys = base::div_up(tasks[i].work, std::max<std::int64_t>(1, queries));
    pairs += static_cast<double>(base::round_up(queries * shape.heads, shape.block)) *
             static_cast<double>(base::round_up(keys, shape.block));
  }
  return 2 * pairs * static_cast<double>(p.heads_kv * shape.head_chunks) *
         static_cast<double>(p.head_dim + p.head_dim_v);
}

/// Runs body(task, head_kv, head_chunk, scratch) for every task over the problem's threads.
/// `Scope` is constructed on each thread for as long as it works.
template <typename Scope, typename Body>
void run_tasks(const ForwardCall& call, const TaskShape& shape, const Body& body) {
  const AttentionProblem& p = call.problem.attention;
  auto* const scratch = static_cast<std::byte*>(call.workspace.data);
  auto* const tasks = reinterpret_cast<Task*>(scratch + call.problem.threads * shape.scratch_bytes);
  const std::int64_t per_task = p.heads_kv * shape.head_chunks;
  const std::int64_t listed = list_tasks(call, shape, {0, p.batch}, tasks);
  const std::int64_t count = listed * per_task;
  const int threads = static_cast<int>(std::clamp<std::int64_t>(
      count, 1, worthwhile_threads(call.problem, flops_of(p, shape, tasks, listed))));
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] const Scope scope;
    std::byte* const mine = scratch + omp_get_thread_num() * shape.scratch_bytes;
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t head = i % per_task;
      body(tasks[i / per_task], head / shape.head_chunks, head % shape.head_chunks, mine);
    }
  }
}
struct NoScope {
  NoScope() {}
};

/// The lanes of a task: which query of which head each one is, and which keys it sees.
struct Lanes {
  std::int64_t batch = 0;
  std::int64_t row = 0;    // first row of the task in the tensor
  std::int64_t head = 0;   // first query head
  std::int64_t heads = 1;  // of the task
  std::int64_t count = 0;
  tiles::Range hull;  // keys that some lane sees

  Lanes(const AttentionProblem& p, const TaskShape& shape, const Sequence& sequence,
        const tiles::MaskWindow& window, const Task& task, std::int64_t head_kv,
        std::int64_t head_chunk)
      : batch(sequence.q_batch),
        row(sequence.q_row + task.first),
        head(head_kv * (p.heads_q / p.heads_kv) + head_chunk * shape.heads),
        heads(std::min(shape.heads, p.heads_q / p.heads_kv - head_chunk * shape.heads)),
        count((task.last - task.first) * heads),
        hull(window.hull(task.first, task.last)) {}

  /// Elements to the row of a lane in a tensor of these strides.
  std::int64_t offset(std::int64_t lane, std::int64_t batch_stride, std::int64_t row_stride,
                      std::int64_t head_stride) const {
    return batch * batch_stride + (row + lane / heads) * row_stride +
           (head + lane % heads) * head_stride;
  }
};

/// Visible keys of `padded` lanes. Lanes without a query see what the last query sees: they cost
/// nothing and mask nothing.
inline void fill_lane_ranges(const Lanes& lanes, const tiles::MaskWindow& window,
                             std::int64_t first_query, std::int64_t padded, std::int64_t* first,
                             std::int64_t* last) {
  for (std::int64_t lane = 0; lane < padded; ++lane) {
    const std::int64_t position = std::min(lane, lanes.count - 1) / lanes.heads;
    const tiles::Range range = window.row(first_query + position);
    first[lane] = range.first;
    last[lane] = range.last;
  }
}

/// What of a tile of `keys` keys from `begin` the lanes of a panel see, relative to its start.
struct PanelRange {
  std::int64_t first = 0;  // no lane sees a key before it
  std::int64_t last = 0;   // no lane sees a key at or past it
  bool empty = true;       // no lane sees any
  bool all = true;         // every lane sees every key
};

/// visible: [2][width], first and last key of each lane within the tile.
inline PanelRange panel_range(const std::int64_t* lane_first, const std::int64_t* lane_last,
                              std::int64_t width, std::int64_t begin, std::int64_t keys,
                              std::int32_t* visible) {
  PanelRange out{.first = keys};
  for (std::int64_t lane = 0; lane < width; ++lane) {
    const std::int64_t from = std::clamp<std::int64_t>(lane_first[lane] - begin, 0, keys);
    const std::int64_t to = std::clamp<std::int64_t>(lane_last[lane] - begin, 0, keys);
    visible[lane] = static_cast<std::int32_t>(from);
    visible[width + lane] = static_cast<std::int32_t>(to);
    if (from < to) {
      out.first = std::min(out.first, from);
      out.last = std::max(out.last, to);
      out.empty = false;
    }
    out.all = out.all && from == 0 && to == keys;
  }
  return out;
}

/// The keys of one tile in K or V: where the row of each lies. T is the element as stored.
template <typename T>
struct TileRows {
  const ForwardCall& call;
  const TensorView& view;
  const Sequence& sequence;
  std::int64_t head_kv = 0;
  std::int64_t begin = 0;  // first key of the tile
  std::int64_t keys = 0;
  bool paged = false;
  const T* first = nullptr;  // row 0 of a tile that is not paged

  TileRows(const ForwardCall& from, const TensorView& tensor, const Sequence& of, std::int64_t head,
           std::int64_t begin_key, std::int64_t key_count)
      : call(from),
        view(tensor),
        sequence(of),
        head_kv(head),
        begin(begin_key),
        keys(key_count),
        paged(from.problem.attention.layout == Layout::paged) {
    if (!paged && keys > 0) {
      first = paged_row(0);
    }
  }
  const T* paged_row(std::int64_t key) const {
    return key_row<T>(call.problem.attention, call.in, view, sequence, begin + key, head_kv);
  }
  const T* row(std::int64_t key) const {
    return paged ? paged_row(key) : first + key * view.stride_seqlen;
  }

  /// Brings part `part` of `parts` of the rows on their way to the L2; they are read once, when
  /// packed.
  void prefetch(std::int64_t columns, std::int64_t part, std::int64_t parts) const {
    constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(T));
    constexpr int kRead = 0, kKeepInL2 = 2;
    for (std::int64_t key = keys * part / parts; key < keys * (part + 1) / parts; ++key) {
      const T* const from = row(key);
      for (std::int64_t c = 0; c < columns; c += kLine) {
        __builtin_prefetch(from + c, kRead, kKeepInL2);
      }
    }
  }
};

inline bool is_finite_bf16(std::uint16_t bits) { return (bits & 0x7f80u) != 0x7f80u; }

}  // namespace rafter::cpu
