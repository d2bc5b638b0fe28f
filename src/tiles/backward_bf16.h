// Shape of the fused bf16 backward on matrix units: products of 32 rows by two panels of 16
// columns, as in the forward. How many keys make a task, how many query rows a tile, what a tile's
// record and a task's scratch hold.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tiles/forward_bf16.h"

namespace rafter::tiles {

/// What a measurement may vary; no bit of a result depends on it: every sum goes 32 by 32, in
/// order, whoever holds it.
struct Bf16BackwardBlocking {
  // these two are halved where head_dim + head_dim_v exceeds kBf16Narrow, to stay in the L2
  std::int64_t keys = 256;    // of a task, at most
  std::int64_t tile_q = 256;  // query rows of a tile, at most
  std::int64_t least_keys = 64;
};

/// Problem sizes; lengths are capacities.
struct Bf16BackwardSizes {
  std::int64_t head_dim = 0, head_dim_v = 0;
  std::int64_t seqlen_q = 0, seqlen_kv = 0;  // of one sequence
  std::int64_t heads = 0;                    // KV heads of all sequences
  std::int64_t tasks_wanted = 0;
};

/// Offsets in bytes, all multiples of 64.
struct Bf16BackwardLayout {
  std::int64_t head_dim = 0, head_dim_v = 0;
  std::int64_t depth = 0;    // head_dim, padded to a block
  std::int64_t columns = 0;  // head_dim_v, padded to a block
  std::int64_t keys = 0;     // of a task
  std::int64_t blocks = 0;   // of 32 keys
  std::int64_t tile_q = 0;
  std::int64_t pairs = 0;  // of panels of 16 rows, of a tile

  // A tile's record: Q and dO packed twice, with channels in pairs for S and dP, with rows in pairs
  // for dK and dV; −lse · log2 e and delta of its rows; dQᵀ.
  std::int64_t q = 0, d_o = 0, q_rows = 0, d_o_rows = 0, lse = 0, delta = 0, finite = 0, dq = 0;
  std::int64_t record_bytes = 0;

  // A thread's scratch.
  std::int64_t k = 0, v = 0, kt = 0;         // packed
  std::int64_t dk = 0, dv = 0;               // sums
  std::int64_t p = 0, ds = 0, ds_pairs = 0;  // of a tile, keys in rows, then in pairs
  std::int64_t s = 0;                        // S and dP of a block, twice
  std::int64_t ranges = 0, k_finite = 0, rows = 0,
               clean = 0;  // of pairs; rows on their way; a whole product
  std::int64_t scratch_bytes = 0;
};

constexpr Bf16BackwardLayout bf16_backward_layout(const Bf16BackwardSizes& sizes,
                                                  const Bf16BackwardBlocking& of_narrow = {}) {
  constexpr auto up = [](std::int64_t n, std::int64_t m) { return (n + m - 1) / m * m; };
  Bf16BackwardBlocking blocking = of_narrow;
  if (sizes.head_dim + sizes.head_dim_v > kBf16Narrow) {
    blocking.keys = std::max(kBf16Block, blocking.keys / 2);
    blocking.tile_q = std::max(kBf16Block, blocking.tile_q / 2);
  }
  Bf16BackwardLayout out;
  out.head_dim = sizes.head_dim;
  out.head_dim_v = sizes.head_dim_v;
  out.depth = up(sizes.head_dim, kBf16Depth);
  out.columns = up(sizes.head_dim_v, kBf16Block);
  // blocks of a head enough for the threads, if they are not too short for that
  const std::int64_t wanted_each =
      std::max<std::int64_t>(1, sizes.tasks_wanted / std::max<std::int64_t>(1, sizes.heads));
  out.keys = std::clamp(up((sizes.seqlen_kv + wanted_each - 1) / wanted_each, kBf16Block),
                        std::min(blocking.least_keys, blocking.keys), blocking.keys);
  out.blocks = out.keys / kBf16Block;
  out.tile_q = std::min(blocking.tile_q, up(std::max<std::int64_t>(1, sizes.seqlen_q), kBf16Block));
  out.pairs = out.tile_q / kBf16Block;
  constexpr std::int64_t kHalf = 2, kFloat = 4;
  std::int64_t at = 0;
  const auto take = [&at, up](std::int64_t bytes) {
    const std::int64_t offset = at;
    at += up(bytes, 64);
    return offset;
  };
  out.q = take(out.tile_q * out.depth * kHalf);
  out.d_o = take(out.tile_q * out.columns * kHalf);
  out.q_rows = take(out.tile_q * out.depth * kHalf);
  out.d_o_rows = take(out.tile_q * out.columns * kHalf);
  out.lse = take(out.tile_q * kFloat);
  out.delta = take(out.tile_q * kFloat);
  out.finite = take(2 * out.pairs);
  out.dq = take(out.tile_q * out.depth * kFloat);
  out.record_bytes = at;
  at = 0;
  const std::int64_t wider = std::max(out.depth, out.columns);
  out.k = take(out.keys * out.depth * kHalf);
  out.v = take(out.keys * out.columns * kHalf);
  out.kt = take(out.keys * out.depth * kHalf);
  out.dk = take(out.keys * out.depth * kFloat);
  out.dv = take(out.keys * out.columns * kFloat);
  out.p = take(out.tile_q * out.keys * kHalf);
  out.ds = take(out.tile_q * out.keys * kHalf);
  out.ds_pairs = take(out.tile_q * out.keys * kHalf);
  out.s = take(2 * 2 * kBf16Block * kBf16Block * kFloat);
  out.ranges = take((out.pairs + out.blocks) * 16);
  out.k_finite = take(out.blocks);
  out.rows = take(kBf16Block * wider * kFloat);
  out.clean = take(std::max(out.tile_q, out.keys) * wider * kHalf);
  out.scratch_bytes = up(at, 4096) + 64;  // threads apart by more than a page
  return out;
}

}  // namespace rafter::tiles
