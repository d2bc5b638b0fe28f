// One task of the fused bf16 forward on AMX tiles, over an abstract machine M: vectors of 16 f32
// and eight tiles of 16 × 64 bytes. forward_amx_bf16.cpp gives it the instructions; the tests give
// it plain loops, so that packing and schedule are proven on any machine.
//
// Queries lie in columns. Sᵀ [keys][queries] = K · Qᵀ takes K's rows as they are (A) and Q's pairs
// of channels interleaved (B); Oᵀ [columns][queries] = Vᵀ · Pᵀ takes Vᵀ, transposed as it is packed
// (A), and pairs of rows of Pᵀ, interleaved as they are rounded to bf16 (B). A panel is 16 queries;
// a block is 2 × 2 tiles: 32 keys (or columns of V) by two panels.
//   packed K  [key / 16][channel / 32][16][32]      packed Q  [panel][channel / 32][16
//   pairs][16][2] packed V  [column / 16][key / 32][16][32]       P         [panel][key / 2][16][2]
//   S         [panel][key][16] f32                  O         [panel][column][16] f32
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/checked.h"
#include "kernels/cpu/forward_tasks.h"
#include "tiles/forward_amx.h"

namespace rafter::forward_amx {

struct Run {
  const ForwardCall& call;
  tiles::AmxLayout layout;
  cpu::TaskShape shape;
};

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
inline constexpr std::int64_t kPanel = tiles::kAmxRows;
inline constexpr std::int64_t kTileKv = tiles::kAmxTileKv;
/// bf16 elements, or f32 sums, of a tile.
inline constexpr std::int64_t kTileElements = 16 * 32;
inline constexpr std::int64_t kTileSums = 16 * 16;
inline constexpr std::int64_t kRowBytes = 64;
/// P may grow to 2^8 before the running maximum moves: bf16 and f32 lose nothing by it, and O is
/// rescaled a few times in a row's life instead of at every tile. A rule of each lane by itself.
inline constexpr float kMaximumSlack = 8.0f;

/// S of 32 keys and two panels.
template <typename M>
inline void scores_block(const std::uint16_t* k, const std::uint16_t* q0, const std::uint16_t* q1,
                         std::int64_t steps, float* s0, float* s1) {
  const std::uint16_t* const k1 = k + steps * kTileElements;
  M::template tile_zero<0>();
  M::template tile_zero<1>();
  M::template tile_zero<2>();
  M::template tile_zero<3>();
  for (std::int64_t step = 0; step < steps; ++step) {
    const std::int64_t at = step * kTileElements;
    M::template tile_load<4>(k + at, kRowBytes);
    M::template tile_load<6>(q0 + at, kRowBytes);
    M::template tile_dot<0, 4, 6>();
    M::template tile_load<7>(q1 + at, kRowBytes);
    M::template tile_dot<1, 4, 7>();
    M::template tile_load<5>(k1 + at, kRowBytes);
    M::template tile_dot<2, 5, 6>();
    M::template tile_dot<3, 5, 7>();
  }
  M::template tile_store<0>(s0, kRowBytes);
  M::template tile_store<1>(s1, kRowBytes);
  M::template tile_store<2>(s0 + kTileSums, kRowBytes);
  M::template tile_store<3>(s1 + kTileSums, kRowBytes);
}

/// O of 32 columns and two panels, plus V · P over `steps` times 32 keys.
template <typename M>
inline void values_block(const std::uint16_t* v, const std::uint16_t* p0, const std::uint16_t* p1,
                         std::int64_t steps, float* o0, float* o1) {
  const std::uint16_t* const v1 = v + kTileKv / tiles::kAmxDepth * kTileElements;
  M::template tile_load<0>(o0, kRowBytes);
  M::template tile_load<1>(o1, kRowBytes);
  M::template tile_load<2>(o0 + kTileSums, kRowBytes);
  M::template tile_load<3>(o1 + kTileSums, kRowBytes);
  for (std::int64_t step = 0; step < steps; ++step) {
    const std::int64_t at = step * kTileElements;
    M::template tile_load<4>(v + at, kRowBytes);
    M::template tile_load<6>(p0 + at, kRowBytes);
    M::template tile_dot<0, 4, 6>();
    M::template tile_load<7>(p1 + at, kRowBytes);
    M::template tile_dot<1, 4, 7>();
    M::template tile_load<5>(v1 + at, kRowBytes);
    M::template tile_dot<2, 5, 6>();
    M::template tile_dot<3, 5, 7>();
  }
  M::template tile_store<0>(o0, kRowBytes);
  M::template tile_store<1>(o1, kRowBytes);
  M::template tile_store<2>(o0 + kTileSums, kRowBytes);
  M::template tile_store<3>(o1 + kTileSums, kRowBytes);
}

/// tanh: an odd polynomial below 0.625 (coefficients: Cephes, tanhf.c), beyond it
/// 1 − 2 / (e^{2|x|} + 1).
template <typename M>
inline typename M::F tanh_of(typename M::F x) {
  const auto magnitude = M::max(M::sub(M::set(0.0f), x), x);
  const auto square = M::mul(x, x);
  auto p = M::fma(M::set(-5.70498872745e-3f), square, M::set(2.06390887954e-2f));
  p = M::fma(p, square, M::set(-5.37397155531e-2f));
  p = M::fma(p, square, M::set(1.33314422036e-1f));
  p = M::fma(p, square, M::set(-3.33332819422e-1f));
  const auto small = M::fma(M::mul(p, square), x, x);
  const auto bounded = M::select(M::greater(magnitude, M::set(40.0f)), M::set(40.0f), magnitude);
  const auto e = M::exp2(M::mul(bounded, M::set(2.8853900817779268f)));
  const auto large = M::sub(M::set(1.0f), M::div(M::set(2.0f), M::add(e, M::set(1.0f))));
  const auto negative = M::greater(M::set(0.0f), x);
  const auto big = M::greater(magnitude, M::set(0.625f));
  return M::select(big, M::select(negative, M::sub(M::set(0.0f), large), large), small);
}

/// How raw scores become exponents of two.
struct Scores {
  float scale_log2 = 0;    // of a raw score, ≥ 0; with a softcap: of a capped one
  float capped_input = 0;  // softcap: what raw scores are multiplied by before tanh, else 0
};

/// One panel on one tile.
struct PanelTile {
  std::int64_t rows = 0;                  // keys, padded to 32
  bool masked = false;                    // some lane does not see some of those rows
  const std::int32_t* visible = nullptr;  // [2][16]: first and last key of each lane
};

/// Softcap and mask on the scores of a panel.
template <typename M>
inline void adjust_scores(const PanelTile& tile, const Scores& scores, float* s) {
  const auto first = M::load_i(tile.visible);
  const auto last = M::load_i(tile.visible + kPanel);
  const auto hidden = M::set(kMinusInfinity);
  for (std::int64_t key = 0; key < tile.rows; ++key) {
    auto score = M::load(s + key * kPanel);
    if (scores.capped_input != 0) {
      score = tanh_of<M>(M::mul(score, M::set(scores.capped_input)));
    }
    const auto sees = M::within(first, last, static_cast<std::int32_t>(key));
    M::store(s + key * kPanel, M::select(sees, score, hidden));
  }
}

/// Softmax of one panel on one tile: S becomes P; maximum and sum move on, O is rescaled when some
/// lane's maximum moved by more than the slack.
template <typename M>
inline void softmax_panel(const PanelTile& tile, const Scores& scores, float* s, std::uint16_t* p,
                          float* maximum, float* sum, float* o, std::int64_t columns) {
  if (tile.masked || scores.capped_input != 0) {
    adjust_scores<M>(tile, scores, s);
  }
  auto top0 = M::load(s);
  auto top1 = M::load(s + kPanel);
  auto top2 = M::load(s + 2 * kPanel);
  auto top3 = M::load(s + 3 * kPanel);
  for (std::int64_t key = 4; key < tile.rows; key += 4) {
    top0 = M::max(top0, M::load(s + key * kPanel));
    top1 = M::max(top1, M::load(s + (key + 1) * kPanel));
    top2 = M::max(top2, M::load(s + (key + 2) * kPanel));
    top3 = M::max(top3, M::load(s + (key + 3) * kPanel));
  }
  const auto scale = M::set(scores.scale_log2);
  const auto top = M::mul(scale, M::max(M::max(top0, top1), M::max(top2, top3)));
  const auto before = M::load(maximum);
  auto total0 = M::set(0.0f);
  auto total1 = M::set(0.0f);
  const auto moves = M::greater(top, M::add(before, M::set(kMaximumSlack)));
  const auto now = M::select(moves, top, before);
  const auto minus_infinity = M::set(kMinusInfinity);
  // a lane that has seen no key yet: 2^(−∞ − 0) = 0 for all of its scores
  const auto base = M::select(M::greater(now, minus_infinity), now, M::set(0.0f));
  auto carried = M::load(sum);
  if (M::any(moves)) {
    const auto alpha = M::select(moves, M::exp2(M::sub(before, base)), M::set(1.0f));
    carried = M::mul(carried, alpha);
    for (std::int64_t c = 0; c < columns; ++c) {
      M::store(o + c * kPanel, M::mul(alpha, M::load(o + c * kPanel)));
    }
    M::store(maximum, now);
  }
  const auto offset = M::sub(M::set(0.0f), base);
  auto* const pairs = reinterpret_cast<std::uint32_t*>(p);
  for (std::int64_t key = 0; key < tile.rows; key += 2) {
    const auto even = M::exp2(M::fma(M::load(s + key * kPanel), scale, offset));
    const auto odd = M::exp2(M::fma(M::load(s + (key + 1) * kPanel), scale, offset));
    total0 = M::add(total0, even);
    total1 = M::add(total1, odd);
    M::store_pair(pairs + key / 2 * kPanel, even, odd);
  }
  M::store(sum, M::add(carried, M::add(total0, total1)));
}

/// K of the tile; rows up to a multiple of 32 keys and channels up to the depth are zeros.
template <typename M>
inline void pack_keys(const cpu::TileRows<std::uint16_t>& tile, const tiles::AmxLayout& layout,
                      std::uint16_t* out) {
  const std::int64_t steps = layout.depth / tiles::kAmxDepth;
  const std::int64_t padded = base::round_up(tile.keys, tiles::kAmxBlock);
  for (std::int64_t key = 0; key < padded; ++key) {
    const std::uint16_t* const row = key < tile.keys ? tile.row(key) : nullptr;
    std::uint16_t* const to = out + key / 16 * steps * kTileElements + key % 16 * 32;
    for (std::int64_t step = 0; step < steps; ++step) {
      M::copy_row(to + step * kTileElements, row, step * 32, layout.head_dim);
    }
  }
}

/// V of the tile, transposed; keys up to a multiple of 32 and columns past head_dim_v are zeros.
/// False when some element is not finite; those are zeros too, add_not_finite() brings them back.
template <typename M>
inline bool pack_values(const cpu::TileRows<std::uint16_t>& tile, const tiles::AmxLayout& layout,
                        std::uint16_t* out) {
  alignas(64) std::uint32_t pairs[16 * 16];
  constexpr std::int64_t kSteps = kTileKv / tiles::kAmxDepth;
  bool finite = true;
  for (std::int64_t key = 0; key < tile.keys; key += 32) {
    const std::uint16_t* rows[32];
    for (std::int64_t i = 0; i < 32; ++i) {
      rows[i] = key + i < tile.keys ? tile.row(key + i) : nullptr;
    }
    for (std::int64_t c = 0; c < layout.columns; c += 16) {
      for (std::int64_t i = 0; i < 16; ++i) {
        const bool good =
            M::interleave(pairs + i * 16, rows[2 * i], rows[2 * i + 1], c, layout.head_dim_v);
        finite = finite && good;
      }
      std::uint16_t* const to = out + (c / 16 * kSteps + key / 32) * kTileElements;
      M::transpose(pairs, 16, reinterpret_cast<std::uint32_t*>(to), 16);
    }
  }
  for (std::int64_t key = 0; key < tile.keys && !finite; ++key) {
    for (std::int64_t c = 0; c < layout.head_dim_v; ++c) {
      if (!cpu::is_finite_bf16(tile.row(key)[c])) {
        out[(c / 16 * kSteps + key / 32) * kTileElements + c % 16 * 32 + key % 32] = 0;
      }
    }
  }
  return finite;
}

/// What elements of V that are not finite do to the lanes that see them.
template <typename M>
inline void add_not_finite(const cpu::TileRows<std::uint16_t>& tile, std::int64_t columns,
                           const PanelTile& panel, const std::uint16_t* p, float* o) {
  for (std::int64_t key = 0; key < std::min(tile.keys, panel.rows); ++key) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::uint16_t v = tile.row(key)[c];
      for (std::int64_t lane = 0; lane < kPanel && !cpu::is_finite_bf16(v); ++lane) {
        if (key >= panel.visible[lane] && key < panel.visible[kPanel + lane]) {
          const float weight = bf16_to_f32(p[(key / 2 * kPanel + lane) * 2 + key % 2]);
          o[c * kPanel + lane] += weight * bf16_to_f32(v);
        }
      }
    }
  }
}

/// Q of one panel, pairs of channels interleaved; zeros in lanes that hold no query. Negated where
/// the scale is negative, so that the scale of the scores is not.
template <typename M>
inline void pack_queries(const TensorView& q, const cpu::Lanes& lanes, std::int64_t first_lane,
                         const tiles::AmxLayout& layout, bool negate, std::uint16_t* rows,
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
  for (std::int64_t c = 0; c < layout.depth; c += 32) {
    M::transpose(reinterpret_cast<const std::uint32_t*>(rows + c), layout.depth / 2,
                 reinterpret_cast<std::uint32_t*>(out + c / 32 * kTileElements), 16);
  }
}

/// O = Oᵀ / sum of one panel, transposed back, and lse.
template <typename M>
inline void write_panel(const ForwardOutputs& out, const cpu::Lanes& lanes, std::int64_t first_lane,
                        const tiles::AmxLayout& layout, const float* o, const float* maximum,
                        const float* sum, float* rows) {
  const auto total = M::load(sum);
  const auto one = M::set(1.0f);
  // a row that saw no key has sum 0 and O 0
  const auto inverse = M::div(one, M::select(M::equal(total, M::set(0.0f)), one, total));
  alignas(64) float scaled[kTileSums];
  for (std::int64_t c = 0; c < layout.columns; c += 16) {
    for (std::int64_t i = 0; i < 16; ++i) {
      M::store(scaled + i * kPanel, M::mul(inverse, M::load(o + (c + i) * kPanel)));
    }
    M::transpose(reinterpret_cast<const std::uint32_t*>(scaled), 16,
                 reinterpret_cast<std::uint32_t*>(rows + c), layout.columns);
  }
  constexpr double kLn2 = 0.6931471805599453;
  for (std::int64_t lane = 0; lane < std::min(kPanel, lanes.count - first_lane); ++lane) {
    const TensorView& view = out.o;
    const std::int64_t offset =
        lanes.offset(first_lane + lane, view.stride_batch, view.stride_seqlen, view.stride_heads);
    const float* const row = rows + lane * layout.columns;
    for (std::int64_t c = 0; c < layout.head_dim_v; c += 16) {
      const std::int64_t count = std::min<std::int64_t>(16, layout.head_dim_v - c);
      if (view.dtype == DType::f32) {
        M::store_f32(static_cast<float*>(view.data) + offset + c, M::load(row + c), count);
      } else {
        M::store_bf16(static_cast<std::uint16_t*>(view.data) + offset + c, M::load(row + c), count);
      }
    }
    if (out.lse.data != nullptr) {
      out.lse.data[lanes.offset(first_lane + lane, out.lse.stride_batch, out.lse.stride_seqlen,
                                out.lse.stride_heads)] =
          sum[lane] == 0 ? kMinusInfinity
                         : static_cast<float>(static_cast<double>(maximum[lane]) * kLn2 +
                                              static_cast<double>(std::log(sum[lane])));
    }
  }
}

template <typename M>
void run_task(const Run& run, const cpu::Task& task, std::int64_t head_kv, std::int64_t head_chunk,
              std::byte* scratch) {
  using Rows = cpu::TileRows<std::uint16_t>;
  const ForwardCall& call = run.call;
  const AttentionProblem& problem = call.problem.attention;
  const tiles::AmxLayout& layout = run.layout;
  const cpu::Sequence sequence = cpu::sequence_of(problem, call.in, task.sequence);
  const tiles::MaskWindow window = cpu::mask_window(problem.mask, sequence);
  const cpu::Lanes lanes(problem, run.shape, sequence, window, task, head_kv, head_chunk);
  constexpr float kLog2E = 1.4426950408889634f;
  const float scale = std::fabs(*problem.softmax_scale);
  const bool capped = problem.softcap > 0;
  const Scores scores = {capped ? problem.softcap * kLog2E : scale * kLog2E,
                         capped ? scale / problem.softcap : 0.0f};

  auto* const k = reinterpret_cast<std::uint16_t*>(scratch + layout.k);
  auto* const v = reinterpret_cast<std::uint16_t*>(scratch + layout.v);
  auto* const q = reinterpret_cast<std::uint16_t*>(scratch + layout.q);
  auto* const o = reinterpret_cast<float*>(scratch + layout.o);
  auto* const s = reinterpret_cast<float*>(scratch + layout.s);
  auto* const p = reinterpret_cast<std::uint16_t*>(scratch + layout.p);
  auto* const maximum = reinterpret_cast<float*>(scratch + layout.state);
  auto* const sum = maximum + layout.panels * kPanel;
  auto* const rows = reinterpret_cast<float*>(scratch + layout.rows);
  auto* const lane_first = reinterpret_cast<std::int64_t*>(scratch + layout.lanes);
  auto* const lane_last = lane_first + layout.panels * kPanel;
  const std::int64_t panels = base::round_up(lanes.count, tiles::kAmxBlock) / kPanel;
  const std::int64_t q_panel = kPanel * layout.depth;
  const std::int64_t o_panel = kPanel * layout.columns;
  const auto prefetch_tile = [&](std::int64_t begin, std::int64_t part, std::int64_t parts) {
    const std::int64_t keys = std::clamp<std::int64_t>(lanes.hull.last - begin, 0, kTileKv);
    Rows(call, call.in.k, sequence, head_kv, begin, keys).prefetch(layout.head_dim, part, parts);
    Rows(call, call.in.v, sequence, head_kv, begin, keys).prefetch(layout.head_dim_v, part, parts);
  };

  prefetch_tile(lanes.hull.first / kTileKv * kTileKv, 0, 1);
  cpu::fill_lane_ranges(lanes, window, task.first, panels * kPanel, lane_first, lane_last);
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    pack_queries<M>(call.in.q, lanes, panel * kPanel, layout, *problem.softmax_scale < 0,
                    reinterpret_cast<std::uint16_t*>(rows), q + panel * q_panel);
  }
  std::fill_n(o, panels * o_panel, 0.0f);
  std::fill_n(maximum, panels * kPanel, kMinusInfinity);
  std::fill_n(sum, panels * kPanel, 0.0f);

  alignas(64) std::int32_t visible[2][2 * kPanel];
  for (std::int64_t begin = lanes.hull.first / kTileKv * kTileKv; begin < lanes.hull.last;
       begin += kTileKv) {
    const std::int64_t keys = std::min(kTileKv, lanes.hull.last - begin);
    const Rows values(call, call.in.v, sequence, head_kv, begin, keys);
    pack_keys<M>(Rows(call, call.in.k, sequence, head_kv, begin, keys), layout, k);
    const bool finite = pack_values<M>(values, layout, v);
    for (std::int64_t panel = 0; panel < panels; panel += 2) {
      prefetch_tile(begin + kTileKv, panel / 2, panels / 2);
      PanelTile tile[2];
      std::int64_t last = 0;
      for (std::int64_t i = 0; i < 2; ++i) {
        const cpu::PanelRange range =
            cpu::panel_range(lane_first + (panel + i) * kPanel, lane_last + (panel + i) * kPanel,
                             kPanel, begin, keys, visible[i]);
        last = std::max(last, range.last);
        tile[i].masked = !range.all;
        tile[i].visible = visible[i];
      }
      if (last == 0) {
        continue;
      }
      const std::int64_t padded = base::round_up(last, tiles::kAmxBlock);
      const std::int64_t steps = layout.depth / tiles::kAmxDepth;
      const std::uint16_t* const q0 = q + panel * q_panel;
      for (std::int64_t key = 0; key < padded; key += tiles::kAmxBlock) {
        scores_block<M>(k + key / 16 * steps * kTileElements, q0, q0 + q_panel, steps,
                        s + key * kPanel, s + (kTileKv + key) * kPanel);
      }
      float* const o0 = o + panel * o_panel;
      for (std::int64_t i = 0; i < 2; ++i) {
        tile[i].rows = padded;
        tile[i].masked = tile[i].masked || padded > keys;
        softmax_panel<M>(tile[i], scores, s + i * kTileKv * kPanel, p + i * kTileKv * kPanel,
                         maximum + (panel + i) * kPanel, sum + (panel + i) * kPanel,
                         o0 + i * o_panel, layout.columns);
      }
      for (std::int64_t c = 0; c < layout.columns; c += tiles::kAmxBlock) {
        values_block<M>(v + c / 16 * (kTileKv / tiles::kAmxDepth) * kTileElements, p,
                        p + kTileKv * kPanel, padded / tiles::kAmxDepth, o0 + c * kPanel,
                        o0 + o_panel + c * kPanel);
      }
      for (std::int64_t i = 0; i < 2 && !finite; ++i) {
        add_not_finite<M>(values, layout.head_dim_v, tile[i], p + i * kTileKv * kPanel,
                          o0 + i * o_panel);
      }
    }
  }
  for (std::int64_t panel = 0; panel * kPanel < lanes.count; ++panel) {
    write_panel<M>(call.out, lanes, panel * kPanel, layout, o + panel * o_panel,
                   maximum + panel * kPanel, sum + panel * kPanel, rows);
  }
}

}  // namespace rafter::forward_amx
