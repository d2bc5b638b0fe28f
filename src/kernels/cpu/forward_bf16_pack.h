// What the fused bf16 forward reads and writes outside its products: K, V and Q into tiles, O and
// lse out of them, over an abstract machine M (forward_bf16_task.h).
//
// Tiles are 16 × 64 bytes and lie in the order in which a block product takes them:
//   K  [key / 32][channel / 32][key / 16 % 2][16 keys][32 channels]
//   V  [column / 32][key / 32][column / 16 % 2][16 columns][32 keys], of one chunk of keys
//   Q  [panel][channel / 32][16 pairs of channels][16 queries][2]
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/cpu/forward_bf16_run.h"

namespace rafter::forward_bf16 {

/// 32 rows (null: zeros) as they lie: [channel / 32][row / 16][16 rows][32 channels].
template <typename M>
inline void pack_block(const std::uint16_t* const* rows, std::int64_t head_dim, std::int64_t depth,
                       std::uint16_t* out) {
  for (std::int64_t i = 0; i < kBlock; ++i) {
    std::uint16_t* const to = out + i / kPanel * kTileElements + i % kPanel * 32;
    for (std::int64_t c = 0; c < depth; c += 32) {
      M::copy_row(to + c / 32 * 2 * kTileElements, rows[i], c, head_dim);
    }
  }
}

/// Rows of a block of keys; null past the last.
template <typename RowOf>
inline void rows_of_block(std::int64_t block, std::int64_t keys, const RowOf& row_of,
                          const std::uint16_t* (&row)[kBlock]) {
  for (std::int64_t i = 0; i < kBlock; ++i) {
    const std::int64_t key = block * kBlock + i;
    row[i] = key < keys ? row_of(key) : nullptr;
  }
}

template <typename M>
inline void pack_keys(const Rows& rows, const tiles::Bf16Layout& layout, const Chunk& out) {
  for (std::int64_t block = 0; block < out.blocks; ++block) {
    const std::uint16_t* row[kBlock];
    rows_of_block(
        block, rows.keys, [&](std::int64_t key) { return rows.row(key); }, row);
    pack_block<M>(row, layout.head_dim, layout.depth, out.k + block * layout.block_k());
  }
}

template <typename M>
inline void pack_values(const Rows& rows, const tiles::Bf16Layout& layout, const Chunk& out) {
  for (std::int64_t block = 0; block < out.blocks; ++block) {
    const std::uint16_t* row[kBlock];
    rows_of_block(
        block, rows.keys, [&](std::int64_t key) { return rows.row(key); }, row);
    const auto tiles_at = [&](std::int64_t c) {
      return out.v + (c / kBlock * out.blocks + block) * 2 * kTileElements;
    };
    bool finite = true;
    for (std::int64_t c = 0; c < layout.columns; c += kBlock) {
      const bool good = M::transpose_rows(tiles_at(c), row, c, layout.head_dim_v);
      finite = finite && good;
    }
    out.finite[block] = finite ? 1 : 0;
    for (std::int64_t i = 0; i < kBlock && !finite; ++i) {
      for (std::int64_t c = 0; c < layout.head_dim_v && row[i] != nullptr; ++c) {
        if (!cpu::is_finite_bf16(row[i][c])) {
          tiles_at(c)[c % kBlock * 32 + i] = 0;
        }
      }
    }
  }
}

/// 16 rows [16][depth] as a panel, channels in pairs.
template <typename M>
inline void pack_panel(const std::uint16_t* rows, std::int64_t depth, std::uint16_t* out) {
  for (std::int64_t c = 0; c < depth; c += 32) {
    M::transpose(reinterpret_cast<const std::uint32_t*>(rows + c), depth / 2,
                 reinterpret_cast<std::uint32_t*>(out + c / 32 * kTileElements), 16);
  }
}

/// Q of one panel; zeros in lanes that hold no query. Negated where the scale is negative, so that
/// the scale of the scores is not.
template <typename M>
inline void pack_queries(const TensorView& q, const cpu::Lanes& lanes, std::int64_t first_lane,
                         const tiles::Bf16Layout& layout, bool negate, std::uint16_t* rows,
                         std::uint16_t* out) {
  for (std::int64_t lane = 0; lane < kPanel; ++lane) {
    const std::int64_t at = first_lane + lane;
    const auto* const row =
        at < lanes.count ? static_cast<const std::uint16_t*>(q.data) +
                               lanes.offset(at, q.stride_batch, q.stride_seqlen, q.stride_heads)
                         : nullptr;
    std::uint16_t* const to = rows + lane * layout.depth;
    for (std::int64_t c = 0; c < layout.depth; c += 32) {
      M::copy_row(to + c, row, c, layout.head_dim);
    }
    for (std::int64_t c = 0; c < layout.depth && negate; ++c) {
      to[c] ^= 0x8000u;
    }
  }
  pack_panel<M>(rows, layout.depth, out);
}

/// Sums of a panel [columns][16 lanes], times a factor of each lane, as rows [16][columns].
template <typename M>
inline void unpack_panel(const float* sums, typename M::F factor, std::int64_t columns,
                         float* rows) {
  alignas(64) float scaled[kTileSums];
  for (std::int64_t c = 0; c < columns; c += 16) {
    for (std::int64_t i = 0; i < 16; ++i) {
      M::store(scaled + i * kPanel, M::mul(factor, M::load(sums + (c + i) * kPanel)));
    }
    M::transpose(reinterpret_cast<const std::uint32_t*>(scaled), 16,
                 reinterpret_cast<std::uint32_t*>(rows + c), columns);
  }
}

/// A row of f32 or bf16 from f32.
template <typename M>
inline void write_row(const TensorView& view, std::int64_t offset, const float* row) {
  for (std::int64_t c = 0; c < view.head_dim; c += 16) {
    const std::int64_t count = std::min<std::int64_t>(16, view.head_dim - c);
    if (view.dtype == DType::f32) {
      M::store_f32(static_cast<float*>(view.data) + offset + c, M::load(row + c), count);
    } else {
      M::store_bf16(static_cast<std::uint16_t*>(view.data) + offset + c, M::load(row + c), count);
    }
  }
}

/// O = Oᵀ / sum of one panel, transposed back, and lse.
template <typename M>
inline void write_panel(const ForwardOutputs& out, const cpu::Lanes& lanes, std::int64_t first_lane,
                        const tiles::Bf16Layout& layout, const float* o, const float* maximum,
                        const float* sum, float* rows) {
  const auto total = M::load(sum);
  const auto one = M::set(1.0f);
  // a row that saw no key has sum 0 and O 0
  const auto inverse = M::div(one, M::select(M::equal(total, M::set(0.0f)), one, total));
  unpack_panel<M>(o, inverse, layout.columns, rows);
  constexpr double kLn2 = 0.6931471805599453;
  for (std::int64_t lane = 0; lane < std::min(kPanel, lanes.count - first_lane); ++lane) {
    const TensorView& view = out.o;
    const std::int64_t offset =
        lanes.offset(first_lane + lane, view.stride_batch, view.stride_seqlen, view.stride_heads);
    write_row<M>(view, offset, rows + lane * layout.columns);
    if (out.lse.data != nullptr) {
      out.lse.data[lanes.offset(first_lane + lane, out.lse.stride_batch, out.lse.stride_seqlen,
                                out.lse.stride_heads)] =
          sum[lane] == 0 ? kMinusInfinity
                         : static_cast<float>(static_cast<double>(maximum[lane]) * kLn2 +
                                              static_cast<double>(std::log(sum[lane])));
    }
  }
}

}  // namespace rafter::forward_bf16
