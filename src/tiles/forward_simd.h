// Shapes of the fused forward on vector units: how many queries lie in lanes, how many keys make a
// tile, and what one task keeps in the L2 of its core.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rafter::tiles {

/// One instruction set's blocking. A register block holds `rows` × `panel_vectors` accumulators:
/// `rows` keys (or columns of V) by panel_vectors · lanes queries.
struct SimdBlocking {
  std::int64_t registers;      // vector registers of the instruction set
  std::int64_t lanes;          // f32 in a vector
  std::int64_t panel_vectors;  // vectors of queries side by side
  std::int64_t rows;           // keys, or columns of V, of a register block
  std::int64_t tile_kv;        // keys of a tile; tiles start at multiples of it, whatever the task
  std::int64_t max_panels;     // panels of a task
  std::int64_t panel_bytes;    // budget for the Q and O panels of a task

  constexpr std::int64_t panel_lanes() const { return panel_vectors * lanes; }
  /// accumulators + the vectors of the panel + one broadcast value
  constexpr std::int64_t registers_used() const { return rows * panel_vectors + panel_vectors + 1; }
};

// 4 × 3 and 8 × 3 divide every usual head_dim, need 7 loads for 12 FMAs and 11 for 24 (the units do
// two of each a clock), and keep more accumulators than latency × rate = 8.
inline constexpr SimdBlocking kSimdPortable = {16, 4, 2, 4, 128, 8, 192 * 1024};
inline constexpr SimdBlocking kSimdAvx2 = {16, 8, 3, 4, 128, 8, 256 * 1024};
inline constexpr SimdBlocking kSimdAvx512 = {32, 16, 3, 8, 64, 16, 1536 * 1024};

/// Rows of K and columns of V are padded to this many, so that no register block has a remainder.
inline constexpr std::int64_t kSimdRowPad = 8;

constexpr bool fits(const SimdBlocking& b) {
  return b.registers_used() <= b.registers && kSimdRowPad % b.rows == 0 &&
         b.tile_kv % kSimdRowPad == 0 && (b.lanes == b.rows || b.lanes == 2 * b.rows);
}
static_assert(fits(kSimdPortable) && fits(kSimdAvx2) && fits(kSimdAvx512));

constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// What a task is and where its parts lie in a thread's scratch, in floats. A task is `positions`
/// queries of `heads` query heads that share a KV head: lane = position · heads + head.
struct SimdLayout {
  SimdBlocking blocking = {};
  std::int64_t head_dim = 0, head_dim_v = 0;
  std::int64_t heads = 0;        // query heads of a task: the group, or a part of a very large one
  std::int64_t head_chunks = 0;  // tasks that share a KV head and a query tile
  std::int64_t positions = 0;    // queries of a task
  std::int64_t panels = 0;
  std::int64_t tile_kv = 0;       // keys of a tile
  std::int64_t packed_tiles = 0;  // K and V tiles packed at once for all tasks; 0: tasks pack alone
  std::int64_t depth = 0;         // head_dim, padded: rows of a Q panel
  std::int64_t columns = 0;       // head_dim_v, padded: rows of an O panel
  std::int64_t k_stride = 0;  // from one key to the next; no power of two, so that L1 sets spread
  std::int64_t v_stride = 0;  // from one block of `rows` columns of V to the next; likewise
  std::int64_t k = 0, v = 0, q = 0, o = 0, s = 0, state = 0, rows = 0, lanes = 0;  // offsets
  std::int64_t floats = 0;                                                         // in all

  constexpr std::int64_t lanes_used() const { return positions * heads; }
  /// A packed tile of K and one of V, in floats.
  constexpr std::int64_t k_floats() const { return round_up(tile_kv * k_stride, 16); }
  constexpr std::int64_t v_floats() const {
    return round_up(columns / blocking.rows * v_stride, 16);
  }
};

/// What of a problem decides the layout.
struct SimdSizes {
  std::int64_t head_dim = 0, head_dim_v = 0, group = 1;
  std::int64_t batch = 1, heads_kv = 1;
  std::int64_t seqlen_q = 0, seqlen_kv = 0;
  std::int64_t threads = 1, tasks_wanted = 1;  // tasks that keep every thread busy
};

/// Keys of a tile: half as many where K, V, Q and O of a task would crowd the L2 out.
constexpr std::int64_t simd_tile_kv(const SimdBlocking& blocking, std::int64_t head_dim,
                                    std::int64_t head_dim_v) {
  return head_dim + head_dim_v > 320 ? std::min<std::int64_t>(blocking.tile_kv, 64)
                                     : blocking.tile_kv;
}

/// What lies packed at once, unless one KV head alone is longer.
inline constexpr std::int64_t kSimdPackedBytes = std::int64_t{32} << 20;
/// Elements a thread must be spared packing for packing once to pay: what one core has packed,
/// others fetch from its caches and wait for. Measured with 2, 4 and 16 threads.
inline constexpr std::int64_t kSimdElementsWorthSharing = 640 * 1024;

/// Tiles packed at once: enough KV heads for every thread and no fewer than kSimdPackedBytes holds;
/// 0 where tasks had better pack what they read. all_tiles: of one KV head, over all sequences.
constexpr std::int64_t simd_packed_tiles(const SimdSizes& sizes, const SimdLayout& layout,
                                         std::int64_t all_tiles) {
  const std::int64_t tasks_each =
      (sizes.seqlen_q + layout.positions - 1) / layout.positions * layout.head_chunks;
  const std::int64_t heads = sizes.batch * sizes.heads_kv;
  const double saved = static_cast<double>(tasks_each - 1) * static_cast<double>(heads) *
                       static_cast<double>(sizes.seqlen_kv) *
                       static_cast<double>(layout.depth + layout.columns);
  constexpr std::int64_t kLongest = std::int64_t{1} << 40;  // keys; beyond, no size overflows
  if (tasks_each < 2 || sizes.seqlen_kv > kLongest ||
      saved < static_cast<double>(kSimdElementsWorthSharing * sizes.threads)) {
    return 0;
  }
  const std::int64_t bytes = 4 * (layout.k_floats() + layout.v_floats());
  const std::int64_t of_one = (sizes.seqlen_kv + layout.tile_kv - 1) / layout.tile_kv;
  const std::int64_t heads_at_once =
      std::min(heads, std::max<std::int64_t>(1, (2 * sizes.threads + tasks_each - 1) / tasks_each));
  return std::min(sizes.heads_kv * all_tiles,
                  std::max(kSimdPackedBytes / bytes, heads_at_once * of_one));
}

/// The layout for a problem. all_tiles: tiles of one KV head over all sequences, at most. Positions
/// per task and who packs change the speed, never the bits: lanes do not meet.
constexpr SimdLayout simd_layout(const SimdBlocking& blocking, const SimdSizes& sizes,
                                 std::int64_t all_tiles) {
  SimdLayout out;
  out.blocking = blocking;
  out.head_dim = sizes.head_dim;
  out.head_dim_v = sizes.head_dim_v;
  const std::int64_t group = sizes.group, seqlen_q = sizes.seqlen_q;
  const std::int64_t pad = std::max(kSimdRowPad, blocking.lanes);
  out.depth = round_up(sizes.head_dim, pad);
  out.columns = round_up(sizes.head_dim_v, pad);
  out.tile_kv = simd_tile_kv(blocking, sizes.head_dim, sizes.head_dim_v);
  const std::int64_t width = blocking.panel_lanes();
  const std::int64_t one_panel_bytes = 4 * width * (out.depth + out.columns);
  const std::int64_t most =
      std::clamp<std::int64_t>(blocking.panel_bytes / one_panel_bytes, 1, blocking.max_panels);
  const std::int64_t all_lanes = std::max<std::int64_t>(1, seqlen_q * group);
  const std::int64_t tasks_each = std::max<std::int64_t>(
      1, sizes.tasks_wanted / std::max<std::int64_t>(1, sizes.batch * sizes.heads_kv));
  const std::int64_t wanted =
      std::clamp<std::int64_t>(all_lanes / tasks_each / width, 1, most) * width;
  out.heads = std::min(group, most * width);
  out.head_chunks = (group + out.heads - 1) / out.heads;
  out.positions =
      std::min(std::max<std::int64_t>(1, wanted / out.heads), std::max<std::int64_t>(1, seqlen_q));
  out.panels = (out.lanes_used() + width - 1) / width;

  out.k_stride = out.depth + 16;
  out.v_stride = out.tile_kv * blocking.rows + 16;
  out.packed_tiles = simd_packed_tiles(sizes, out, all_tiles);
  const std::int64_t all = out.panels * width;
  std::int64_t at = 0;
  const auto take = [&at](std::int64_t floats) {
    const std::int64_t offset = at;
    at += round_up(floats, 16);
    return offset;
  };
  if (out.packed_tiles == 0) {
    out.k = take(out.k_floats());
    out.v = take(out.v_floats());
  }
  out.q = take(all * out.depth);
  out.o = take(all * out.columns);
  out.s = take(out.tile_kv * width);
  out.state = take(2 * all);                              // running maximum and sum of each lane
  out.rows = take(4 * std::max(out.depth, out.columns));  // four rows on their way in or out
  out.lanes = take(4 * all);                              // visible keys of each lane, 2 × int64
  out.floats = round_up(at + 16, 1024) + 16;              // threads apart by more than a page
  return out;
}

}  // namespace rafter::tiles
