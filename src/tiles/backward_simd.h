// Shapes of the fused backward on vector units: how many keys lie in lanes, how many query rows
// make a tile, what a task keeps in the L2 of its core, and where its parts lie in a thread's
// scratch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tiles/forward_simd.h"

namespace rafter::tiles {

/// One instruction set's blocking. Products with keys in lanes take the register blocks of the
/// forward; dQ has head_dim in lanes and `dq_rows` × `dq_vectors` accumulators.
struct SimdBackwardBlocking {
  SimdBlocking products;
  std::int64_t tile_q;       // query rows of a tile; tiles start at multiples of it
  std::int64_t max_panels;   // panels of keys of a task
  std::int64_t panel_bytes;  // budget for K, V, dK and dV of a task
  std::int64_t dq_rows, dq_vectors;

  constexpr std::int64_t registers_used() const {
    return dq_rows * dq_vectors + dq_vectors + 1;  // accumulators, vectors of K, one broadcast
  }
};

inline constexpr SimdBackwardBlocking kBackwardPortable = {kSimdPortable, 96, 8, 256 * 1024, 4, 2};
inline constexpr SimdBackwardBlocking kBackwardAvx2 = {kSimdAvx2, 96, 8, 256 * 1024, 6, 2};
inline constexpr SimdBackwardBlocking kBackwardAvx512 = {kSimdAvx512, 96, 4, 768 * 1024, 12, 2};

constexpr bool fits(const SimdBackwardBlocking& b) {
  return b.registers_used() <= b.products.registers && b.tile_q % kSimdRowPad == 0 &&
         b.tile_q % b.dq_rows == 0;
}
static_assert(fits(kBackwardPortable) && fits(kBackwardAvx2) && fits(kBackwardAvx512));

/// A task is `keys` keys of one KV head, as panels of lanes, against all query rows that see them.
/// `keys` follows from the head dimensions alone: blocks of keys bound the partial sums of dQ, so
/// they decide its bits.
struct SimdBackwardLayout {
  SimdBackwardBlocking blocking = {};
  std::int64_t head_dim = 0, head_dim_v = 0;
  std::int64_t panels = 0;    // of a task
  std::int64_t keys = 0;      // of a task: panels · lanes of a panel
  std::int64_t depth = 0;     // head_dim, padded: rows of a K or dK panel
  std::int64_t columns = 0;   // head_dim_v, padded: rows of a V or dV panel
  std::int64_t q_stride = 0;  // from one row of Q (or K) to the next; no power of two
  std::int64_t o_stride = 0;  // the same of dO
  // Offsets in floats; panels follow each other.
  std::int64_t k = 0, v = 0, dk = 0, dv = 0, k_rows = 0, q = 0, d_o = 0, p = 0, ds = 0, lse = 0,
               delta = 0, rows = 0, lanes = 0, zero_row = 0;
  std::int64_t floats = 0;  // in all
};

constexpr SimdBackwardLayout simd_backward_layout(const SimdBackwardBlocking& blocking,
                                                  std::int64_t head_dim, std::int64_t head_dim_v) {
  SimdBackwardLayout out;
  out.blocking = blocking;
  out.head_dim = head_dim;
  out.head_dim_v = head_dim_v;
  const std::int64_t pad = std::max(kSimdRowPad, blocking.products.lanes);
  out.depth = round_up(head_dim, pad);
  out.columns = round_up(head_dim_v, pad);
  const std::int64_t width = blocking.products.panel_lanes();
  const std::int64_t one_panel_bytes = 4 * width * (3 * out.depth + 2 * out.columns);
  out.panels =
      std::clamp<std::int64_t>(blocking.panel_bytes / one_panel_bytes, 1, blocking.max_panels);
  out.keys = out.panels * width;
  out.q_stride = out.depth + 16;
  out.o_stride = out.columns + 16;
  std::int64_t at = 0;
  const auto take = [&at](std::int64_t floats) {
    const std::int64_t offset = at;
    at += round_up(floats, 16);
    return offset;
  };
  out.k = take(out.keys * out.depth);
  out.v = take(out.keys * out.columns);
  out.dk = take(out.keys * out.depth);
  out.dv = take(out.keys * out.columns);
  out.k_rows = take(out.keys * out.q_stride);
  out.q = take(blocking.tile_q * out.q_stride);
  out.d_o = take(blocking.tile_q * out.o_stride);
  out.p = take(blocking.tile_q * width);
  out.ds = take(blocking.tile_q * out.keys);
  out.lse = take(blocking.tile_q);
  out.delta = take(blocking.tile_q);
  out.rows = take(4 * std::max(out.depth, out.columns));  // four rows on their way in or out
  out.lanes = take(4 * out.keys);                         // rows that see each lane, 2 × int64
  out.zero_row = take(out.depth);                         // where dQ of padding rows goes
  out.floats = round_up(at + 16, 1024) + 16;              // threads apart by more than a page
  return out;
}

}  // namespace rafter::tiles
