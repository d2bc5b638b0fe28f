#include <omp.h>

#include <algorithm>

#include "kernels/cpu/forward_simd_schedule.h"
#include "kernels/cpu/sequence.h"

namespace rafter::forward_simd {
namespace {

tiles::SimdLayout layout_of(const KernelProblem& problem, const tiles::SimdBlocking& blocking) {
  const AttentionProblem& p = problem.attention;
  // Enough tasks that the last ones, which are the shortest, even the threads out.
  constexpr std::int64_t kTasksPerThread = 4;
  return tiles::simd_layout(blocking, p.head_dim, p.head_dim_v, p.heads_q / p.heads_kv, p.seqlen_q,
                            p.batch * p.heads_kv, problem.threads * kTasksPerThread);
}

/// Tasks of one KV head over all sequences, at most.
std::int64_t most_tasks(const AttentionProblem& p, const tiles::SimdLayout& layout) {
  const auto tiles_of = [&](std::int64_t rows) {
    return (rows + layout.positions - 1) / layout.positions;
  };
  return p.layout == Layout::packed
             ? std::min(tiles_of(p.total_q) + p.batch, p.batch * tiles_of(p.seqlen_q))
             : p.batch * tiles_of(p.seqlen_q);
}

std::int64_t scratch_bytes(const KernelProblem& problem, const tiles::SimdLayout& layout) {
  return problem.threads * layout.floats * static_cast<std::int64_t>(sizeof(float));
}

/// Writes the tasks of one KV head, longest first; returns how many.
std::int64_t list_tasks(const ForwardCall& call, const tiles::SimdLayout& layout, Task* tasks) {
  const AttentionProblem& p = call.problem.attention;
  std::int64_t count = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const cpu::Sequence sequence = cpu::sequence_of(p, call.in, b);
    const tiles::MaskWindow window = cpu::mask_window(p.mask, sequence);
    for (std::int64_t first = 0; first < sequence.seqlen_q; first += layout.positions) {
      const std::int64_t last = std::min(first + layout.positions, sequence.seqlen_q);
      tasks[count++] = {b, first, last, (last - first) * window.hull(first, last).size()};
    }
  }
  std::sort(tasks, tasks + count, [](const Task& a, const Task& b) { return a.work > b.work; });
  return count;
}

}  // namespace

std::int64_t workspace_bytes(const KernelProblem& problem, const tiles::SimdBlocking& blocking) {
  const tiles::SimdLayout layout = layout_of(problem, blocking);
  return scratch_bytes(problem, layout) +
         most_tasks(problem.attention, layout) * static_cast<std::int64_t>(sizeof(Task));
}

Status run_forward(const ForwardCall& call, const tiles::SimdBlocking& blocking,
                   TaskFunction function) {
  const AttentionProblem& p = call.problem.attention;
  const Run run = {call, layout_of(call.problem, blocking)};
  auto* const scratch = static_cast<float*>(call.workspace.data);
  auto* const tasks = reinterpret_cast<Task*>(static_cast<std::byte*>(call.workspace.data) +
                                              scratch_bytes(call.problem, run.layout));
  const std::int64_t chunks = run.layout.head_chunks;
  const std::int64_t per_task = p.heads_kv * chunks;
  const std::int64_t count = list_tasks(call, run.layout, tasks) * per_task;
  const int threads = static_cast<int>(std::clamp<std::int64_t>(count, 1, call.problem.threads));
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t head = i % per_task;
    function(run, tasks[i / per_task], head / chunks, head % chunks,
             scratch + omp_get_thread_num() * run.layout.floats);
  }
  return Status::ok();
}

}  // namespace rafter::forward_simd
