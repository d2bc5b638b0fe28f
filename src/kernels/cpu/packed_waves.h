// K and V of whole heads, packed once by all threads before the tasks that read them; in waves, so
// that what lies packed at once is bounded. No instruction set.
//
// A wave is whole sequences with all their KV heads, or some KV heads of one long sequence.
// Barriers part packing from tasks, and waves from each other: packing is a few percent of the work
// and is cut finely, so flags per head would gain less than the last chunk takes.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/checked.h"
#include "kernels/cpu/forward_tasks.h"

namespace rafter::cpu {

/// How K and V are cut for packing.
struct PackShape {
  std::int64_t block = 32;    // keys
  std::int64_t chunk = 32;    // keys that are packed as one piece of work; whole blocks
  std::int64_t capacity = 0;  // blocks that lie packed at once; the longest head fits
};

struct Wave {
  tiles::Range sequences;
  tiles::Range heads;                  // KV heads
  std::int64_t tasks = 0, chunks = 0;  // of one KV head
};

/// What a wave writes down, in the workspace.
struct WaveLists {
  std::int64_t* first_block = nullptr;  // of each sequence of the wave, its first head
  Task* tasks = nullptr;
  Task* chunks = nullptr;  // keys [first, last) of a sequence
};

/// Blocks of one KV head over all sequences, at most.
inline std::int64_t most_blocks(const AttentionProblem& p, std::int64_t block) {
  const std::int64_t padded = p.batch * base::div_up(p.seqlen_kv, block);
  return p.layout == Layout::packed ? std::min(padded, p.total_kv / block + p.batch) : padded;
}

inline std::int64_t lists_bytes(const AttentionProblem& p, const TaskShape& shape,
                                const PackShape& pack) {
  return p.batch * static_cast<std::int64_t>(sizeof(std::int64_t)) +
         (most_tasks(p, shape) + most_blocks(p, pack.chunk)) *
             static_cast<std::int64_t>(sizeof(Task));
}

inline WaveLists lists_at(std::byte* memory, const AttentionProblem& p, const TaskShape& shape) {
  WaveLists lists;
  lists.first_block = reinterpret_cast<std::int64_t*>(memory);
  lists.tasks = reinterpret_cast<Task*>(lists.first_block + p.batch);
  lists.chunks = lists.tasks + most_tasks(p, shape);
  return lists;
}

/// Chunks that some query of the wave's sequences sees.
inline std::int64_t list_chunks(const ForwardCall& call, const PackShape& pack,
                                tiles::Range sequences, Task* chunks) {
  const AttentionProblem& p = call.problem.attention;
  std::int64_t count = 0;
  for (std::int64_t b = sequences.first; b < sequences.last; ++b) {
    const Sequence sequence = sequence_of(p, call.in, b);
    const tiles::Range seen = mask_window(p.mask, sequence).hull(0, sequence.seqlen_q);
    for (std::int64_t begin = seen.first / pack.chunk * pack.chunk; begin < seen.last;
         begin += pack.chunk) {
      chunks[count++] = {b, begin, std::min(begin + pack.chunk, sequence.seqlen_kv)};
    }
  }
  return count;
}

/// The wave after `before`; no sequences when there is none. The first comes after a wave of no
/// sequences and all heads.
inline Wave next_wave(const ForwardCall& call, const TaskShape& shape, const PackShape& pack,
                      const Wave& before, const WaveLists& lists) {
  const AttentionProblem& p = call.problem.attention;
  const auto blocks_of = [&](std::int64_t b) {
    return base::div_up(sequence_of(p, call.in, b).seqlen_kv, pack.block);
  };
  Wave wave;
  const bool rest_of_one = before.heads.last < p.heads_kv;
  wave.sequences.first = rest_of_one ? before.sequences.first : before.sequences.last;
  wave.sequences.last = wave.sequences.first;
  wave.heads = {rest_of_one ? before.heads.last : 0, p.heads_kv};
  if (wave.sequences.first >= p.batch) {
    return wave;
  }
  const std::int64_t first_blocks = blocks_of(wave.sequences.first);
  if (rest_of_one || first_blocks * p.heads_kv > pack.capacity) {
    lists.first_block[wave.sequences.first] = 0;
    wave.sequences.last = wave.sequences.first + 1;
    wave.heads.last = std::min(p.heads_kv, wave.heads.first + pack.capacity / first_blocks);
  } else {
    std::int64_t used = 0;
    for (std::int64_t b = wave.sequences.first; b < p.batch; ++b) {
      const std::int64_t needed = blocks_of(b) * p.heads_kv;
      if (used + needed > pack.capacity) {
        break;
      }
      lists.first_block[b] = used;
      used += needed;
      wave.sequences.last = b + 1;
    }
  }
  wave.tasks = list_tasks(call, shape, wave.sequences, lists.tasks);
  wave.chunks = list_chunks(call, pack, wave.sequences, lists.chunks);
  return wave;
}

/// Task `index` of the tasks of one wave times KV heads times chunks of a group. Few heads at a
/// time (they share the caches), and among those the longest tasks first.
struct TaskPlace {
  std::int64_t task = 0, head_kv = 0, head_chunk = 0;
};
inline TaskPlace task_place(const Wave& wave, std::int64_t head_chunks, std::int64_t threads,
                            std::int64_t index) {
  constexpr std::int64_t kTasksOfASection = 8;  // a thread: enough to even out
  const std::int64_t heads = wave.heads.size();
  const std::int64_t of_head = wave.tasks * head_chunks;
  const std::int64_t section =
      std::clamp<std::int64_t>(base::div_up(kTasksOfASection * threads, of_head), 1, heads);
  const std::int64_t at = index / (section * of_head);
  const std::int64_t rest = index % (section * of_head);
  const std::int64_t wide = std::min(section, heads - at * section) * head_chunks;
  return {rest / wide, wave.heads.first + at * section + rest % wide / head_chunks,
          rest % wide % head_chunks};
}

/// Packs and runs wave after wave over the problem's threads:
/// pack(sequence, keys, head_kv, block) where a chunk's first block goes, then
/// body(task, head_kv, head_chunk, block, scratch), `block` the first of its head and sequence.
/// `Scope` is constructed on each thread for as long as it works.
template <typename Scope, typename Pack, typename Body>
void run_waves(const ForwardCall& call, const TaskShape& shape, const PackShape& pack_shape,
               const WaveLists& lists, const Pack& pack, const Body& body) {
  const AttentionProblem& p = call.problem.attention;
  auto* const scratch = static_cast<std::byte*>(call.workspace.data);
  const int threads = call.problem.threads;
  Wave wave;
  wave.heads.last = p.heads_kv;
  const auto block_of = [&](std::int64_t b, std::int64_t head_kv) {
    const std::int64_t blocks =
        base::div_up(sequence_of(p, call.in, b).seqlen_kv, pack_shape.block);
    return lists.first_block[b] + (head_kv - wave.heads.first) * blocks;
  };
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] const Scope scope;
    std::byte* const mine = scratch + omp_get_thread_num() * shape.scratch_bytes;
    for (;;) {
#pragma omp single
      wave = next_wave(call, shape, pack_shape, wave, lists);
      // here, and after both loops, every thread waits for the others
      if (wave.sequences.size() == 0) {
        break;
      }
      const std::int64_t heads = wave.heads.size();
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t i = 0; i < wave.chunks * heads; ++i) {
        const Task& chunk = lists.chunks[i / heads];
        const std::int64_t head_kv = wave.heads.first + i % heads;
        pack(chunk, head_kv, block_of(chunk.sequence, head_kv) + chunk.first / pack_shape.block);
      }
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t i = 0; i < wave.tasks * heads * shape.head_chunks; ++i) {
        const TaskPlace at = task_place(wave, shape.head_chunks, threads, i);
        const Task& task = lists.tasks[at.task];
        body(task, at.head_kv, at.head_chunk, block_of(task.sequence, at.head_kv), mine);
      }
    }
  }
}

}  // namespace rafter::cpu
