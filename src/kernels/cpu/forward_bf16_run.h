// The fused bf16 forward outside its arithmetic: how a call is cut, where packed K and V lie, in
// which order a task visits blocks of scores, and the run itself. No instruction set: included
// before any target region.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "base/checked.h"
#include "kernels/cpu/forward_tasks.h"
#include "kernels/cpu/packed_waves.h"
#include "tiles/forward_bf16.h"

namespace rafter::forward_bf16 {

/// What a measurement may switch; no bit of a result depends on it.
struct Schedule {
  bool interleave = true;  // softmax between the products, or before them
  bool prefetch = true;    // packed K and V of the next chunk to the L2
  int most_parts = 4;      // of a column block's PV along the keys of a chunk, at most 8
};

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
inline constexpr std::int64_t kPanel = tiles::kBf16Rows;
inline constexpr std::int64_t kBlock = tiles::kBf16Block;
/// bf16 elements, or f32 sums, of a tile.
inline constexpr std::int64_t kTileElements = 16 * 32;
inline constexpr std::int64_t kTileSums = 16 * 16;

using Rows = cpu::TileRows<std::uint16_t>;

/// K and V of some keys of one head, in tiles. Zeros stand for keys up to a whole block, for
/// channels and columns up to a whole tile, and for elements of V that are not finite.
struct Chunk {
  std::uint16_t* k = nullptr;
  std::uint16_t* v = nullptr;
  std::uint8_t* finite = nullptr;  // of each block: whether all of V was
  std::int64_t blocks = 0;
};

/// Where K and V of whole heads lie when they are packed before the tasks.
struct PackedHeads {
  std::uint16_t* k = nullptr;
  std::uint16_t* v = nullptr;
  std::uint8_t* finite = nullptr;

  /// The chunk of `blocks` blocks that starts at block `at`.
  Chunk chunk(const tiles::Bf16Layout& layout, std::int64_t at, std::int64_t blocks) const {
    return {k + at * layout.block_k(), v + at * layout.block_v(), finite + at, blocks};
  }
};

struct Run {
  const ForwardCall& call;
  tiles::Bf16Layout layout;
  cpu::TaskShape shape;
  PackedHeads heads;
};

/// Keys [begin, …) of a chunk: as many as the chunk and the sequence have.
inline std::int64_t keys_of_chunk(const tiles::Bf16Layout& layout, const cpu::Sequence& sequence,
                                  std::int64_t begin) {
  return std::min(layout.chunk, sequence.seqlen_kv - begin);
}

/// C [2 × 16 rows][2 panels] = A · B, or C + A · B, over `steps` times 32 of depth.
struct Product {
  const std::uint16_t* a = nullptr;   // [step][2][16 rows][32]
  const std::uint16_t* b0 = nullptr;  // [step][16 pairs][16 queries][2]
  const std::uint16_t* b1 = nullptr;
  std::int64_t steps = 0;
  float* c0 = nullptr;  // [2][16 rows][16 queries]
  float* c1 = nullptr;
};

/// How raw scores become exponents of two.
struct Scores {
  float scale_log2 = 0;    // of a raw score, > 0; with a softcap: of a capped one
  float capped_input = 0;  // softcap: what raw scores are multiplied by before tanh, else 0

  Scores(float softmax_scale, float softcap) {
    constexpr float kLog2E = 1.4426950408889634f;
    const float scale = std::fabs(softmax_scale);
    // not 0, which would make NaN of a hidden score (−∞); no score that f32 can tell from 0 is lost
    scale_log2 = std::max(softcap > 0 ? softcap * kLog2E : scale * kLog2E, 0x1p-100f);
    capped_input = softcap > 0 ? scale / softcap : 0.0f;
  }
};

/// A pair of panels: the keys that its lanes see, and whether O holds anything yet.
struct Pair {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();  // that some lane sees
  std::int64_t last = 0;
  std::int64_t all_first = 0;  // that every lane sees
  std::int64_t all_last = std::numeric_limits<std::int64_t>::max();
  bool written = false;

  void add(std::int64_t from, std::int64_t to) {
    if (from < to) {
      first = std::min(first, from);
      last = std::max(last, to);
      all_first = std::max(all_first, from);
      all_last = std::min(all_last, to);
    } else {
      all_last = 0;
    }
  }
  bool all_see(std::int64_t from, std::int64_t to) const {
    return all_first <= from && to <= all_last;
  }
};

/// The blocks of scores of a task that some lane sees: chunk by chunk, pair of panels by pair, 32
/// keys by 32.
struct Walk {
  const Pair* pair_list = nullptr;
  std::int64_t pairs = 0;
  std::int64_t chunk = 0;
  std::int64_t end = 0;  // of the keys

  std::int64_t begin = 0;            // first key of the chunk
  std::int64_t pair = -1;            // of panels
  std::int64_t block = 0, last = 0;  // of the chunk: this one, and the end of the pair's
  bool opens = false;                // first block of the pair on the chunk

  std::int64_t key() const { return begin + block * kBlock; }
  /// To the next block; false at the end.
  bool next() {
    opens = false;
    if (++block < last) {
      return true;
    }
    while (begin < end) {
      if (++pair == pairs) {
        pair = -1;
        begin += chunk;
        continue;
      }
      const std::int64_t from = std::max(pair_list[pair].first, begin);
      const std::int64_t to = std::min(pair_list[pair].last, begin + chunk);
      if (from < to) {
        block = (from - begin) / kBlock;
        last = base::div_up(to - begin, kBlock);
        opens = true;
        return true;
      }
    }
    return false;
  }
};

inline Acceptance accepts(const KernelProblem& problem) {
  const DType dtype = problem.attention.dtype;
  return dtype == DType::bf16 ? Acceptance::accept()
                              : Acceptance::refuse(std::string(to_string(dtype)) + " is not bf16");
}

/// Query rows of a KV head.
inline std::int64_t rows_of(const AttentionProblem& p) {
  return std::max<std::int64_t>(1, p.seqlen_q * (p.heads_q / p.heads_kv));
}

/// What full blocks of queries reach of the matmul peak is `measured`; the rest of the last block
/// is lost. With few rows to many keys packing K and V is most of the work: the bandwidth is that
/// of forward_simd (14 of 42 GB/s, f32 on an Emerald Rapids), not measured for these kernels.
inline Reach reach(const KernelProblem& problem, double measured) {
  const std::int64_t rows = rows_of(problem.attention);
  const double full = static_cast<double>(rows) / static_cast<double>(base::round_up(rows, kBlock));
  return {.compute = measured * full,
          .bandwidth = problem.attention.seqlen_kv / 16 > rows ? 0.35 : 0.8,
          .fixed_seconds = 4e-6};
}

inline tiles::Bf16Layout layout_of(const KernelProblem& problem,
                                   const tiles::Bf16Blocking& blocking = {}) {
  const AttentionProblem& p = problem.attention;
  return tiles::bf16_layout({.head_dim = p.head_dim,
                             .head_dim_v = p.head_dim_v,
                             .batch = p.batch,
                             .heads_kv = p.heads_kv,
                             .group = p.heads_q / p.heads_kv,
                             .seqlen_q = p.seqlen_q,
                             .seqlen_kv = p.seqlen_kv,
                             .kv_blocks = cpu::most_blocks(p, kBlock),
                             .threads = problem.threads,
                             .tasks_wanted = problem.threads * cpu::kTasksPerThread},
                            blocking);
}

inline cpu::TaskShape shape_of(const tiles::Bf16Layout& layout) {
  return {layout.positions, layout.heads, layout.head_chunks, layout.bytes, kBlock};
}
inline cpu::PackShape pack_shape_of(const tiles::Bf16Layout& layout) {
  return {kBlock, layout.chunk, layout.packed_blocks};
}

/// Bytes of the workspace up to the packed heads, up to what waves write down, and in all.
struct Places {
  std::int64_t k = 0, v = 0, finite = 0, lists = 0, bytes = 0;

  Places(const KernelProblem& problem, const tiles::Bf16Layout& layout) {
    if (layout.packed_blocks == 0) {
      bytes = cpu::tasks_workspace(problem, shape_of(layout));
      return;
    }
    k = problem.threads * layout.bytes;
    v = k + layout.packed_blocks * layout.block_k() * 2;
    finite = v + layout.packed_blocks * layout.block_v() * 2;
    lists = finite + base::round_up(layout.packed_blocks, 64);
    bytes = lists + cpu::lists_bytes(problem.attention, shape_of(layout), pack_shape_of(layout));
  }
};

inline std::int64_t workspace(const KernelProblem& problem,
                              const tiles::Bf16Blocking& blocking = {}) {
  return Places(problem, layout_of(problem, blocking)).bytes;
}

/// The code of one machine. block: first of the packed ones of the task's head and sequence.
struct Functions {
  void (*pack)(const Run&, const cpu::Task& keys, std::int64_t head_kv, std::int64_t block);
  void (*task)(const Run&, const cpu::Task&, std::int64_t head_kv, std::int64_t head_chunk,
               std::int64_t block, std::byte* scratch);
};

template <typename Scope>
Status forward(const ForwardCall& call, const Functions& functions,
               const tiles::Bf16Blocking& blocking = {}) {
  const tiles::Bf16Layout layout = layout_of(call.problem, blocking);
  const Places places(call.problem, layout);
  auto* const memory = static_cast<std::byte*>(call.workspace.data);
  const Run run = {call,
                   layout,
                   shape_of(layout),
                   {reinterpret_cast<std::uint16_t*>(memory + places.k),
                    reinterpret_cast<std::uint16_t*>(memory + places.v),
                    reinterpret_cast<std::uint8_t*>(memory + places.finite)}};
  if (layout.packed_blocks == 0) {
    cpu::run_tasks<Scope>(
        call, run.shape,
        [&](const cpu::Task& task, std::int64_t head_kv, std::int64_t head_chunk,
            std::byte* scratch) { functions.task(run, task, head_kv, head_chunk, 0, scratch); });
    return Status::ok();
  }
  cpu::run_waves<Scope>(
      call, run.shape, pack_shape_of(layout),
      cpu::lists_at(memory + places.lists, call.problem.attention, run.shape),
      [&](const cpu::Task& keys, std::int64_t head_kv, std::int64_t block) {
        functions.pack(run, keys, head_kv, block);
      },
      [&](const cpu::Task& task, std::int64_t head_kv, std::int64_t head_chunk, std::int64_t block,
          std::byte* scratch) { functions.task(run, task, head_kv, head_chunk, block, scratch); });
  return Status::ok();
}

}  // namespace rafter::forward_bf16
