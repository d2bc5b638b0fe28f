// What the fused bf16 backward reads and writes outside its products, over the machine M of
// forward_bf16_task.h: Q, dO and O into the record of a tile, K and V into tiles, gradients out.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/backward_bf16_run.h"
#include "kernels/cpu/forward_bf16_pack.h"

namespace rafter::backward_bf16 {

/// 32 rows of bf16 or f32 as bf16 [32][padded]; rows from `count` on, and columns past the last,
/// are zeros. False when something is not finite.
template <typename M, typename OffsetOf>
inline bool gather_rows(const TensorView& view, std::int64_t count, const OffsetOf& offset_of,
                        std::int64_t padded, std::uint16_t* out) {
  bool finite = true;
  for (std::int64_t i = 0; i < kBlock; ++i) {
    std::uint16_t* const to = out + i * padded;
    const std::int64_t offset = i < count ? offset_of(i) : 0;
    for (std::int64_t c = 0; c < padded; c += 32) {
      if (i >= count || view.dtype == DType::bf16) {
        const auto* const row = static_cast<const std::uint16_t*>(view.data) + offset;
        M::copy_row(to + c, i < count ? row : nullptr, c, view.head_dim);
      } else {
        const auto* const row = static_cast<const float*>(view.data) + offset;
        for (std::int64_t half = c; half < c + 32; half += 16) {
          const std::int64_t left = std::max<std::int64_t>(0, view.head_dim - half);
          M::store_bf16(to + half, M::load_f32(row + std::min(half, view.head_dim), left), 16);
        }
      }
      finite = finite && M::are_finite(to + c);
    }
  }
  return finite;
}

/// 32 rows [32][padded] as both panels, and as `pair` of the tile with rows in pairs.
template <typename M>
inline void pack_pair(const std::uint16_t* rows, std::int64_t padded, std::int64_t pair,
                      std::int64_t pairs, std::uint16_t* panels, std::uint16_t* row_pairs) {
  for (std::int64_t half = 0; half < 2; ++half) {
    forward_bf16::pack_panel<M>(rows + half * kPanel * padded, padded,
                                panels + (2 * pair + half) * kPanel * padded);
  }
  for (std::int64_t c = 0; c < padded; c += 32) {
    std::uint16_t* const to = row_pairs + (c / kPanel * pairs + pair) * kTileElements;
    for (std::int64_t i = 0; i < kBlock; i += 2) {
      M::interleave(to + i * kPanel, to + pairs * kTileElements + i * kPanel, rows + i * padded + c,
                    rows + (i + 1) * padded + c);
    }
  }
}

/// Σ over a row of dO ∘ O.
template <typename M>
inline float row_dot(const std::uint16_t* d_o, const TensorView& o, std::int64_t offset) {
  auto sum = M::set(0.0f);
  for (std::int64_t c = 0; c < o.head_dim; c += 16) {
    const std::int64_t count = std::min<std::int64_t>(16, o.head_dim - c);
    const auto value =
        o.dtype == DType::f32
            ? M::load_f32(static_cast<const float*>(o.data) + offset + c, count)
            : M::load_bf16(static_cast<const std::uint16_t*>(o.data) + offset + c, count);
    sum = M::fma(M::load_bf16(d_o + c, 16), value, sum);
  }
  alignas(64) float lanes[16];
  M::store(lanes, sum);
  float total = 0;
  for (const float lane : lanes) {
    total += lane;
  }
  return total;
}

/// Rows [first, last) of a head, and what they see of no key.
template <typename M>
inline void pack_tile(const Run& run, const cpu::Sequence& s, std::int64_t sequence,
                      std::int64_t head_q, tiles::Range rows, std::byte* scratch) {
  constexpr float kLog2E = 1.4426950408889634f;
  const tiles::Bf16BackwardLayout& layout = run.layout;
  const BackwardInputs& in = run.call.in;
  const Record record = run.record(run.place_of(s, sequence, head_q, rows.first / layout.tile_q));
  auto* const buffer = reinterpret_cast<std::uint16_t*>(scratch + layout.rows);
  for (std::int64_t pair = 0; pair * kBlock < rows.size(); ++pair) {
    const std::int64_t first = s.q_row + rows.first + pair * kBlock;
    const std::int64_t count = std::min(kBlock, rows.size() - pair * kBlock);
    const auto offset_in = [&](const TensorView& view, std::int64_t i) {
      return cpu::offset_of(view, s.q_batch, first + i, head_q);
    };
    record.q_finite[pair] =
        gather_rows<M>(
            in.q, count, [&](std::int64_t i) { return offset_in(in.q, i); }, layout.depth, buffer)
            ? 1
            : 0;
    pack_pair<M>(buffer, layout.depth, pair, layout.pairs, record.q, record.q_rows);
    record.d_o_finite[pair] =
        gather_rows<M>(
            in.d_o, count, [&](std::int64_t i) { return offset_in(in.d_o, i); }, layout.columns,
            buffer)
            ? 1
            : 0;
    pack_pair<M>(buffer, layout.columns, pair, layout.pairs, record.d_o, record.d_o_rows);
    for (std::int64_t i = 0; i < kBlock; ++i) {
      float lse = 0, delta = 0;  // of no row: nothing sees it
      if (i < count) {
        lse = *cpu::lse_of(in.lse, s.q_batch, head_q, first + i) * -kLog2E;
        delta = row_dot<M>(buffer + i * layout.columns, in.o, offset_in(in.o, i));
        if (in.dlse.data != nullptr) {
          delta -= *cpu::lse_of(in.dlse, s.q_batch, head_q, first + i);
        }
      }
      record.lse[pair * kBlock + i] = lse;
      record.delta[pair * kBlock + i] = delta;
    }
  }
  if (cpu::mask_window(run.problem().mask, s).hull(rows.first, rows.last).size() > 0) {
    return;
  }
  auto* const zeros = reinterpret_cast<float*>(buffer);
  std::fill_n(zeros, layout.depth, 0.0f);
  const TensorView& dq = run.call.out.dq;
  for (std::int64_t row = rows.first; row < rows.last; ++row) {
    forward_bf16::write_row<M>(dq, cpu::offset_of(dq, s.q_batch, s.q_row + row, head_q), zeros);
  }
}

}  // namespace rafter::backward_bf16
