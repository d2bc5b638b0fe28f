// Shape of the fused bf16 forward on AMX: 2 × 2 tiles of 16 × 16 sums, queries in columns.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rafter::tiles {

inline constexpr std::int64_t kAmxRows = 16;   // keys, or columns of V, of a tile; queries likewise
inline constexpr std::int64_t kAmxDepth = 32;  // summed by one tile product
inline constexpr std::int64_t kAmxBlock = 32;  // rows and queries of a 2 × 2 block
inline constexpr std::int64_t kAmxTileKv = 128;    // keys between two updates of the softmax state
inline constexpr std::int64_t kAmxMaxLanes = 256;  // queries of a task
static_assert(kAmxTileKv % kAmxDepth == 0 && kAmxMaxLanes % kAmxBlock == 0);

/// Where the parts of a task lie in a thread's scratch, in bytes (all 64-byte aligned).
struct AmxLayout {
  std::int64_t head_dim = 0, head_dim_v = 0;
  std::int64_t heads = 0, head_chunks = 0, positions = 0;
  std::int64_t panels = 0;   // of 16 queries, even
  std::int64_t depth = 0;    // head_dim, padded to a product's depth
  std::int64_t columns = 0;  // head_dim_v, padded to a block's rows
  std::int64_t k = 0, v = 0, q = 0, o = 0, s = 0, p = 0, state = 0, rows = 0, lanes = 0;
  std::int64_t bytes = 0;
};

constexpr AmxLayout amx_layout(std::int64_t head_dim, std::int64_t head_dim_v, std::int64_t group,
                               std::int64_t seqlen_q, std::int64_t kv_heads,
                               std::int64_t tasks_wanted) {
  constexpr auto up = [](std::int64_t n, std::int64_t m) { return (n + m - 1) / m * m; };
  AmxLayout out;
  out.head_dim = head_dim;
  out.head_dim_v = head_dim_v;
  out.depth = up(head_dim, kAmxDepth);
  out.columns = up(head_dim_v, kAmxBlock);
  const std::int64_t tasks_each =
      std::max<std::int64_t>(1, tasks_wanted / std::max<std::int64_t>(1, kv_heads));
  const std::int64_t wanted = std::clamp<std::int64_t>(
      up(std::max<std::int64_t>(1, seqlen_q * group / tasks_each), 32), 32, kAmxMaxLanes);
  out.heads = std::min(group, kAmxMaxLanes);
  out.head_chunks = (group + out.heads - 1) / out.heads;
  out.positions =
      std::min(std::max<std::int64_t>(1, wanted / out.heads), std::max<std::int64_t>(1, seqlen_q));
  const std::int64_t lanes = up(out.positions * out.heads, kAmxBlock);
  out.panels = lanes / kAmxRows;
  std::int64_t at = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t offset = at;
    at += up(bytes, 64);
    return offset;
  };
  out.k = take(kAmxTileKv * out.depth * 2);
  out.v = take(kAmxTileKv * out.columns * 2);
  out.q = take(lanes * out.depth * 2);
  out.o = take(lanes * out.columns * 4);
  out.s = take(kAmxBlock * kAmxTileKv * 4);
  out.p = take(kAmxBlock * kAmxTileKv * 2);
  out.state = take(2 * lanes * 4);
  out.rows = take(16 * std::max(out.depth, out.columns) * 4);
  out.lanes = take(2 * lanes * 8);
  out.bytes = up(at, 4096) + 64;
  return out;
}

}  // namespace rafter::tiles
