// Shape of the fused bf16 forward on matrix units: 2 × 2 tiles of 16 × 16 sums, queries in columns.
// How a problem is cut into tasks, what a task's scratch holds, and when K and V are packed once
// for all tasks.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rafter::tiles {

inline constexpr std::int64_t kBf16Rows = 16;  // keys, or columns of V, of a tile; queries likewise
inline constexpr std::int64_t kBf16Depth = 32;  // summed by one tile product
inline constexpr std::int64_t kBf16Block = 32;  // rows and queries of a 2 × 2 block

/// head_dim + head_dim_v up to which a task takes all the queries and keys of its blocking.
inline constexpr std::int64_t kBf16Narrow = 256;

/// What a measurement may vary; no bit of a result depends on it.
struct Bf16Blocking {
  // these two are halved where head_dim + head_dim_v exceeds kBf16Narrow, to stay in the L2
  std::int64_t lanes = 512;      // queries of a task, at most
  std::int64_t chunk = 512;      // keys between a load and a store of O, K and V packed before
  std::int64_t own_chunk = 128;  // the same where a task packs for itself
  std::int64_t packed_bytes = std::int64_t{32} << 20;  // of K and V packed at once, about
  /// Packing once saves the other tasks of a head their own packing; but what one core has packed
  /// others fetch from its caches, and wait for. It pays when a thread is saved so many elements
  /// (measured with 2, 4 and 16 threads: below it, up to half of the time is lost).
  std::int64_t least_saved = 1000000;
};

/// Problem sizes; lengths are capacities.
struct Bf16Sizes {
  std::int64_t head_dim = 0, head_dim_v = 0;
  std::int64_t batch = 0, heads_kv = 0, group = 0;
  std::int64_t seqlen_q = 0, seqlen_kv = 0;  // of one sequence
  std::int64_t kv_blocks = 0;                // of 32 keys, of all sequences, one head
  std::int64_t threads = 0, tasks_wanted = 0;
};

/// Where the parts of a task lie in a thread's scratch, in bytes (all 64-byte aligned).
struct Bf16Layout {
  std::int64_t head_dim = 0, head_dim_v = 0;
  std::int64_t heads = 0, head_chunks = 0, positions = 0;
  std::int64_t panels = 0;   // of 16 queries, even
  std::int64_t depth = 0;    // head_dim, padded to a product's depth
  std::int64_t columns = 0;  // head_dim_v, padded to a block's rows
  std::int64_t chunk = 0;    // keys
  /// 32-key blocks, over heads and sequences, of K and V that lie packed at once; 0: every task
  /// packs what it reads.
  std::int64_t packed_blocks = 0;
  std::int64_t q = 0, o = 0, s = 0, p = 0, state = 0, rows = 0, lanes = 0, pairs = 0;
  std::int64_t own_k = 0, own_v = 0, own_finite = 0;  // two chunks each
  std::int64_t bytes = 0;

  constexpr std::int64_t block_k() const { return kBf16Block * depth; }  // elements
  constexpr std::int64_t block_v() const { return kBf16Block * columns; }
};

/// 32-key blocks to pack at once: so many bytes of them, or heads enough for two tasks a thread,
/// whichever is more; 0 when packing once does not pay.
constexpr std::int64_t bf16_packed_blocks(const Bf16Sizes& sizes, const Bf16Layout& layout,
                                          const Bf16Blocking& blocking) {
  const std::int64_t tasks_each =
      (sizes.seqlen_q + layout.positions - 1) / layout.positions * layout.head_chunks;
  const std::int64_t heads = sizes.batch * sizes.heads_kv;
  const double saved = static_cast<double>((tasks_each - 1) * heads) *
                       static_cast<double>(sizes.seqlen_kv) *
                       static_cast<double>(layout.depth + layout.columns);
  constexpr std::int64_t kLongest = std::int64_t{1} << 40;  // keys; beyond, no size overflows
  if (tasks_each < 2 || sizes.seqlen_kv > kLongest ||
      saved < static_cast<double>(blocking.least_saved * sizes.threads)) {
    return 0;
  }
  const std::int64_t block_bytes = 2 * (layout.block_k() + layout.block_v());
  const std::int64_t of_one = (sizes.seqlen_kv + kBf16Block - 1) / kBf16Block;
  const std::int64_t heads_at_once =
      std::min(heads, std::max<std::int64_t>(1, (2 * sizes.threads + tasks_each - 1) / tasks_each));
  return std::min(sizes.heads_kv * sizes.kv_blocks,
                  std::max(blocking.packed_bytes / block_bytes, heads_at_once * of_one));
}

constexpr Bf16Layout bf16_layout(const Bf16Sizes& sizes, const Bf16Blocking& of_narrow = {}) {
  Bf16Blocking blocking = of_narrow;
  if (sizes.head_dim + sizes.head_dim_v > kBf16Narrow) {
    blocking.lanes = std::max(kBf16Block, blocking.lanes / 2);
    blocking.chunk = std::max(kBf16Block, blocking.chunk / 2);
  }
  constexpr auto up = [](std::int64_t n, std::int64_t m) { return (n + m - 1) / m * m; };
  Bf16Layout out;
  out.head_dim = sizes.head_dim;
  out.head_dim_v = sizes.head_dim_v;
  out.depth = up(sizes.head_dim, kBf16Depth);
  out.columns = up(sizes.head_dim_v, kBf16Block);
  const std::int64_t seqlen_q = std::max<std::int64_t>(1, sizes.seqlen_q);
  const std::int64_t tasks_each = std::max<std::int64_t>(
      1, sizes.tasks_wanted / std::max<std::int64_t>(1, sizes.batch * sizes.heads_kv));
  const std::int64_t wanted = std::clamp<std::int64_t>(
      up(seqlen_q * sizes.group / tasks_each, kBf16Block), kBf16Block, blocking.lanes);
  out.heads = std::min(sizes.group, blocking.lanes);
  out.head_chunks = (sizes.group + out.heads - 1) / out.heads;
  out.positions = std::min(std::max<std::int64_t>(1, wanted / out.heads), seqlen_q);
  const std::int64_t lanes = up(out.positions * out.heads, kBf16Block);
  out.panels = lanes / kBf16Rows;
  out.packed_blocks = bf16_packed_blocks(sizes, out, blocking);
  out.chunk = out.packed_blocks > 0 ? blocking.chunk : blocking.own_chunk;
  std::int64_t at = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t offset = at;
    at += up(bytes, 64);
    return offset;
  };
  out.q = take(lanes * out.depth * 2);
  out.o = take(lanes * out.columns * 4);
  out.s = take(2 * kBf16Block * kBf16Block * 4);
  out.p = take(2 * kBf16Block * out.chunk * 2);
  out.state = take(2 * lanes * 4);
  out.rows = take(kBf16Rows * std::max(out.depth, out.columns) * 4);
  out.lanes = take(2 * lanes * 8);
  out.pairs = take(lanes / kBf16Block * 64);
  if (out.packed_blocks == 0) {
    out.own_k = take(2 * out.chunk * out.depth * 2);
    out.own_v = take(2 * out.chunk * out.columns * 2);
    out.own_finite = take(2 * out.chunk / kBf16Block);
  }
  out.bytes = up(at, 4096) + 64;
  return out;
}

}  // namespace rafter::tiles
