// One task of the fused forward: a block of queries of one KV head against all keys they see.
// Queries lie in lanes: Sᵀ = K·Qᵀ and Oᵀ = Vᵀ·Pᵀ are the same register-blocked product (broadcast
// a row of the left operand, multiply by vectors of queries), and softmax is vertical throughout.
// Compiled once per instruction set (Highway's foreach_target).
#if defined(RAFTER_FORWARD_SIMD_KERNEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_FORWARD_SIMD_KERNEL_INL_H_
#undef RAFTER_FORWARD_SIMD_KERNEL_INL_H_
#else
#define RAFTER_FORWARD_SIMD_KERNEL_INL_H_
#endif

#include <algorithm>

#include "hw/cpu/unroll.h"
#include "hwy/highway.h"
#include "kernels/cpu/forward_simd_math-inl.h"
#include "kernels/cpu/forward_simd_task.h"
#include "kernels/cpu/forward_tasks.h"
#include "kernels/cpu/simd_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::forward_simd {
namespace HWY_NAMESPACE {
namespace {

/// Sᵀ[kRows · kBlocks][queries] = K · Qᵀ, and `top` the maximum with what it held.
template <int kBlocks, int kVectors>
HWY_INLINE void scores_block(const float* HWY_RESTRICT k, std::int64_t k_stride,
                             const float* HWY_RESTRICT q, std::int64_t head_dim,
                             float* HWY_RESTRICT s, V (&top)[kVectors]) {
  constexpr int kCount = kRows * kBlocks;
  const D d;
  V sum[kCount][kVectors];
  dot_block<kCount, kVectors>(k, k_stride, q, head_dim, sum);
  RAFTER_UNROLL
  for (int i = 0; i < kCount; ++i) {
    RAFTER_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      hn::Store(sum[i][v], d, s + (i * kVectors + v) * kLanes);
      top[v] = hn::Max(top[v], sum[i][v]);
    }
  }
}

/// Oᵀ[kRows · kBlocks][queries] = Oᵀ · alpha + Vᵀ · Pᵀ over `keys` keys. With kMasked, a key that a
/// query does not see is left out by selection: its V may hold anything.
template <int kBlocks, int kVectors, bool kMasked>
HWY_INLINE void values_block(const float* HWY_RESTRICT v_block, std::int64_t v_stride,
                             const float* HWY_RESTRICT p, std::int64_t keys,
                             const float* HWY_RESTRICT alpha,
                             const std::int32_t* HWY_RESTRICT visible, float* HWY_RESTRICT o) {
  const D d;
  V sum[kBlocks][kRows][kVectors];
  sum_block<kBlocks, kVectors, kMasked>(v_block, v_stride, kRows, p, 0, keys, visible, sum);
  RAFTER_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    RAFTER_UNROLL
    for (int i = 0; i < kRows; ++i) {
      RAFTER_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        float* const at = o + ((b * kRows + i) * kVectors + v) * kLanes;
        const V scale = hn::Load(d, alpha + v * kLanes);
        hn::Store(hn::MulAdd(hn::Load(d, at), scale, sum[b][i][v]), d, at);
      }
    }
  }
}

/// Keys of a tile as one panel meets them.
struct PanelTile {
  std::int64_t keys = 0;                  // from the tile's start to the last that any lane sees
  bool masked = false;                    // some lane does not see some key of the tile
  bool select_values = false;             // masked, and V holds inf or NaN somewhere in the tile
  float softcap_log2 = 0;                 // softcap · log2 e, or 0
  const std::int32_t* visible = nullptr;  // [2][queries]: first and last key of each lane, relative
};

/// Softcap and mask on the scores of a panel; top becomes the maximum of what is left.
template <int kVectors>
HWY_NOINLINE void adjust_scores(const PanelTile& tile, float* HWY_RESTRICT s, V (&top)[kVectors]) {
  const D d;
  const DI di;
  const V cap = hn::Set(d, tile.softcap_log2);
  const V hidden = hn::Set(d, kMinusInfinity);
  for (int v = 0; v < kVectors; ++v) {
    const auto first = hn::Load(di, tile.visible + v * kLanes);
    const auto last = hn::Load(di, tile.visible + (kVectors + v) * kLanes);
    V most = hidden;
    for (std::int64_t key = 0; key < tile.keys; ++key) {
      float* const at = s + (key * kVectors + v) * kLanes;
      V score = hn::Load(d, at);
      if (tile.softcap_log2 > 0) {
        score = hn::Mul(cap, tanh_of(score));
      }
      const auto index = hn::Set(di, static_cast<std::int32_t>(key));
      const auto sees = hn::And(hn::Gt(last, index), hn::Not(hn::Gt(first, index)));
      score = hn::IfThenElse(hn::RebindMask(d, sees), score, hidden);
      most = hn::Max(most, score);
      hn::Store(score, d, at);
    }
    top[v] = most;
  }
}

/// One panel of queries against one tile of keys.
template <int kVectors>
void panel_tile(const PanelTile& tile, const tiles::SimdLayout& layout, const float* k,
                const float* v, const float* q, float* s, float* o, float* maximum, float* sum) {
  const D d;
  constexpr int kBlocks = kBlocksAtOnce<kVectors>;
  constexpr std::int64_t kWidth = kVectors * kLanes;
  V top[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    top[i] = hn::Set(d, kMinusInfinity);
  }
  for (std::int64_t key = 0; key < tile.keys; key += kRows * kBlocks) {
    scores_block<kBlocks, kVectors>(k + key * layout.k_stride, layout.k_stride, q, layout.head_dim,
                                    s + key * kWidth, top);
  }
  if (tile.masked || tile.softcap_log2 > 0) {
    adjust_scores<kVectors>(tile, s, top);
  }

  alignas(64) float alpha[kWidth];
  V base[kVectors];
  V total[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    const V before = hn::Load(d, maximum + i * kLanes);
    const V now = hn::Max(before, top[i]);
    // a lane that has seen no key yet: 2^(−∞ − 0) = 0 for all of its scores
    base[i] = hn::IfThenElse(hn::Eq(now, hn::Set(d, kMinusInfinity)), hn::Zero(d), now);
    hn::Store(now, d, maximum + i * kLanes);
    hn::Store(exp2_of(hn::Sub(before, base[i])), d, alpha + i * kLanes);
    total[i] = hn::Zero(d);
  }
  for (std::int64_t key = 0; key < tile.keys; ++key) {
    RAFTER_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      float* const at = s + (key * kVectors + i) * kLanes;
      const V p = exp2_of(hn::Sub(hn::Load(d, at), base[i]));
      total[i] = hn::Add(total[i], p);
      hn::Store(p, d, at);
    }
  }
  for (int i = 0; i < kVectors; ++i) {
    float* const at = sum + i * kLanes;
    hn::Store(hn::MulAdd(hn::Load(d, at), hn::Load(d, alpha + i * kLanes), total[i]), d, at);
  }

  for (std::int64_t c = 0; c < layout.columns; c += kRows * kBlocks) {
    const float* const block = v + c / kRows * layout.v_stride;
    if (tile.select_values) {
      values_block<kBlocks, kVectors, true>(block, layout.v_stride, s, tile.keys, alpha,
                                            tile.visible, o + c * kWidth);
    } else {
      values_block<kBlocks, kVectors, false>(block, layout.v_stride, s, tile.keys, alpha, nullptr,
                                             o + c * kWidth);
    }
  }
}

/// The tile's rows of K as f32, then copies of the last one up to a multiple of kSimdRowPad: they
/// fill register blocks and change no maximum.
template <DType kType>
void pack_keys(const cpu::TileRows<Element<kType>>& tile, const tiles::SimdLayout& layout,
               float* HWY_RESTRICT out) {
  const D d;
  const std::int64_t padded = tiles::round_up(tile.keys, tiles::kSimdRowPad);
  for (std::int64_t key = 0; key < padded; ++key) {
    const auto* const row = tile.row(std::min(key, tile.keys - 1));
    float* const to = out + key * layout.k_stride;
    for (std::int64_t c = 0; c < layout.head_dim; c += kLanes) {
      hn::Store(load_some_f32<kType>(row + c, layout.head_dim - c), d, to + c);
    }
  }
}

/// The tile's rows of V as blocks of kRows columns, key after key, zeros past head_dim_v. True when
/// all are finite.
template <DType kType>
bool pack_values(const cpu::TileRows<Element<kType>>& tile, const tiles::SimdLayout& layout,
                 float* HWY_RESTRICT out) {
  const D d;
  V zeros = hn::Zero(d);  // stays 0 while all is finite: inf · 0 and NaN · 0 are NaN
  for (std::int64_t key = 0; key < tile.keys; ++key) {
    const auto* const row = tile.row(key);
    float* const to = out + key * kRows;
    for (std::int64_t c = 0; c < layout.columns; c += kLanes) {
      const V value = load_some_f32<kType>(row + c, layout.head_dim_v - c);
      zeros = hn::MulAdd(value, hn::Zero(d), zeros);
      float* const block = to + c / kRows * layout.v_stride;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3  // kRows is half a vector
      const hn::Half<D> half;
      hn::StoreU(hn::LowerHalf(half, value), half, block);
      hn::StoreU(hn::UpperHalf(half, value), half, block + layout.v_stride);
#else
      hn::StoreU(value, d, block);
#endif
    }
  }
  return hn::AllTrue(d, hn::Eq(zeros, hn::Zero(d)));
}

/// Qᵀ of one panel: [head_dim][width] f32, scaled; zeros in lanes that hold no query.
template <DType kType>
void pack_queries(const TensorView& q, const cpu::Lanes& lanes, std::int64_t first_lane,
                  std::int64_t width, const tiles::SimdLayout& layout, float scale,
                  float* HWY_RESTRICT rows, float* HWY_RESTRICT out) {
  const D d;
  const std::int64_t used = std::min(width, tiles::round_up(lanes.count - first_lane, 4));
  if (used < width) {
    std::fill_n(out, layout.depth * width, 0.0f);
  }
  for (std::int64_t lane = 0; lane < used; lane += 4) {
    for (std::int64_t i = 0; i < 4; ++i) {
      const std::int64_t at = first_lane + lane + i;
      const auto* const row =
          at < lanes.count ? static_cast<const Element<kType>*>(q.data) +
                                 lanes.offset(at, q.stride_batch, q.stride_seqlen, q.stride_heads)
                           : nullptr;
      for (std::int64_t c = 0; c < layout.depth; c += kLanes) {
        const V value =
            row == nullptr ? hn::Zero(d) : load_some_f32<kType>(row + c, layout.head_dim - c);
        hn::Store(value, d, rows + i * layout.depth + c);
      }
    }
    rows_to_lanes(rows, layout.depth, layout.depth, scale, width, lane, out);
  }
}

/// O = Oᵀ / sum of one panel, transposed back, and lse.
void write_panel(const ForwardOutputs& out, const cpu::Lanes& lanes, std::int64_t first_lane,
                 std::int64_t width, const tiles::SimdLayout& layout, const float* o,
                 const float* maximum, const float* sum, float* HWY_RESTRICT rows) {
  const D4 d4;
  for (std::int64_t lane = 0; lane < width; lane += 4) {
    const std::int64_t count = std::min<std::int64_t>(4, lanes.count - first_lane - lane);
    if (count <= 0) {
      return;
    }
    // a row that saw no key has sum 0 and O 0
    const auto total = hn::Load(d4, sum + lane);
    const auto one = hn::Set(d4, 1.0f);
    const auto inverse = hn::Div(one, hn::IfThenElse(hn::Eq(total, hn::Zero(d4)), one, total));
    lanes_to_rows(o, width, lane, layout.columns, inverse, layout.columns, rows);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t at = first_lane + lane + i;
      const TensorView& view = out.o;
      const std::int64_t offset =
          lanes.offset(at, view.stride_batch, view.stride_seqlen, view.stride_heads);
      store_row(rows + i * layout.columns, layout.head_dim_v, view, offset);
      if (out.lse.data != nullptr) {
        out.lse.data[lanes.offset(at, out.lse.stride_batch, out.lse.stride_seqlen,
                                  out.lse.stride_heads)] =
            lse_of_log2(maximum[lane + i], sum[lane + i]);
      }
    }
  }
}

template <DType kType>
void pack_tile(const Run& run, const cpu::Task& keys, std::int64_t head_kv, std::int64_t tile) {
  using Rows = cpu::TileRows<Element<kType>>;
  const ForwardCall& call = run.call;
  const cpu::Sequence sequence = cpu::sequence_of(call.problem.attention, call.in, keys.sequence);
  const std::int64_t count = keys.last - keys.first;
  pack_keys<kType>(Rows(call, call.in.k, sequence, head_kv, keys.first, count), run.layout,
                   run.packed.k + tile * run.layout.k_floats());
  const bool finite =
      pack_values<kType>(Rows(call, call.in.v, sequence, head_kv, keys.first, count), run.layout,
                         run.packed.v + tile * run.layout.v_floats());
  run.packed.finite[tile] = finite ? 1 : 0;
}

/// Brings part `part` of `parts` of a packed tile on its way to the L2.
inline void prefetch_packed(const float* from, std::int64_t floats, std::int64_t part,
                            std::int64_t parts) {
  constexpr int kRead = 0, kKeepInL2 = 2;
  for (std::int64_t i = floats * part / parts; i < floats * (part + 1) / parts; i += 16) {
    __builtin_prefetch(from + i, kRead, kKeepInL2);
  }
}

template <DType kType>
void run_task(const Run& run, const cpu::Task& task, std::int64_t head_kv, std::int64_t head_chunk,
              std::int64_t first_tile, float* scratch) {
  using Rows = cpu::TileRows<Element<kType>>;
  const ForwardCall& call = run.call;
  const AttentionProblem& problem = call.problem.attention;
  const tiles::SimdLayout& layout = run.layout;
  const cpu::Sequence sequence = cpu::sequence_of(problem, call.in, task.sequence);
  const tiles::MaskWindow window = cpu::mask_window(problem.mask, sequence);
  const cpu::Lanes lanes(problem, run.shape, sequence, window, task, head_kv, head_chunk);
  constexpr float kLog2E = 1.4426950408889634f;
  const bool capped = problem.softcap > 0;
  const float scale =
      capped ? *problem.softmax_scale / problem.softcap : *problem.softmax_scale * kLog2E;

  constexpr std::int64_t kWidth = kBlocking.panel_lanes();
  const std::int64_t tile_kv = layout.tile_kv;
  const bool packed = layout.packed_tiles > 0;
  const std::int64_t panels = (lanes.count + kWidth - 1) / kWidth;
  float* const s = scratch + layout.s;
  float* const rows = scratch + layout.rows;
  auto* const lane_first = reinterpret_cast<std::int64_t*>(scratch + layout.lanes);
  auto* const lane_last = lane_first + layout.panels * kWidth;
  const auto vectors_of = [&](std::int64_t panel) {
    const std::int64_t left = lanes.count - panel * kWidth;
    return left >= kWidth ? kBlocking.panel_vectors : (left + kLanes - 1) / kLanes;
  };
  const auto panel_q = [&](std::int64_t panel) {
    return scratch + layout.q + panel * kWidth * layout.depth;
  };
  const auto panel_o = [&](std::int64_t panel) {
    return scratch + layout.o + panel * kWidth * layout.columns;
  };
  const auto panel_max = [&](std::int64_t panel) {
    return scratch + layout.state + panel * kWidth;
  };
  const auto panel_sum = [&](std::int64_t panel) {
    return scratch + layout.state + (layout.panels + panel) * kWidth;
  };
  const auto prefetch_tile = [&](std::int64_t begin, std::int64_t part, std::int64_t parts) {
    const std::int64_t keys = std::clamp<std::int64_t>(lanes.hull.last - begin, 0, tile_kv);
    if (packed) {
      if (keys > 0) {
        const std::int64_t tile = first_tile + begin / tile_kv;
        prefetch_packed(run.packed.k + tile * layout.k_floats(), keys * layout.k_stride, part,
                        parts);
        prefetch_packed(run.packed.v + tile * layout.v_floats(), layout.v_floats(), part, parts);
      }
      return;
    }
    Rows(call, call.in.k, sequence, head_kv, begin, keys).prefetch(layout.head_dim, part, parts);
    Rows(call, call.in.v, sequence, head_kv, begin, keys).prefetch(layout.head_dim_v, part, parts);
  };

  prefetch_tile(lanes.hull.first / tile_kv * tile_kv, 0, 1);
  cpu::fill_lane_ranges(lanes, window, task.first, panels * kWidth, lane_first, lane_last);
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    const std::int64_t width = vectors_of(panel) * kLanes;
    pack_queries<kType>(call.in.q, lanes, panel * kWidth, width, layout, scale, rows,
                        panel_q(panel));
    std::fill_n(panel_o(panel), width * layout.columns, 0.0f);
    std::fill_n(panel_max(panel), kWidth, kMinusInfinity);
    std::fill_n(panel_sum(panel), kWidth, 0.0f);
  }

  alignas(64) std::int32_t visible[2 * kWidth];
  for (std::int64_t begin = lanes.hull.first / tile_kv * tile_kv; begin < lanes.hull.last;
       begin += tile_kv) {
    const std::int64_t keys = std::min(tile_kv, lanes.hull.last - begin);
    const std::int64_t tile_index = first_tile + begin / tile_kv;
    float* k_tile = scratch + layout.k;
    float* v_tile = scratch + layout.v;
    bool finite = false;
    if (packed) {
      k_tile = run.packed.k + tile_index * layout.k_floats();
      v_tile = run.packed.v + tile_index * layout.v_floats();
      finite = run.packed.finite[tile_index] != 0;
    } else {
      pack_keys<kType>(Rows(call, call.in.k, sequence, head_kv, begin, keys), layout, k_tile);
      finite =
          pack_values<kType>(Rows(call, call.in.v, sequence, head_kv, begin, keys), layout, v_tile);
    }
    for (std::int64_t panel = 0; panel < panels; ++panel) {
      prefetch_tile(begin + tile_kv, panel, panels);
      const std::int64_t vectors = vectors_of(panel);
      const cpu::PanelRange range =
          cpu::panel_range(lane_first + panel * kWidth, lane_last + panel * kWidth,
                           vectors * kLanes, begin, keys, visible);
      if (range.empty) {
        continue;
      }
      // A register block that reaches past the last key meets the next ones of a tile packed for
      // all: what they score must not be in the maximum.
      const bool beyond =
          packed && range.last % tiles::kSimdRowPad != 0 && begin + range.last < sequence.seqlen_kv;
      PanelTile tile;
      tile.keys = range.last;
      tile.masked = !range.all || beyond;
      tile.select_values = tile.masked && !finite;
      tile.softcap_log2 = capped ? problem.softcap * kLog2E : 0.0f;
      tile.visible = visible;
      const auto step = vectors == 1   ? panel_tile<1>
                        : vectors == 2 ? panel_tile<2>
                                       : panel_tile<static_cast<int>(kBlocking.panel_vectors)>;
      step(tile, layout, k_tile, v_tile, panel_q(panel), s, panel_o(panel), panel_max(panel),
           panel_sum(panel));
    }
  }
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    write_panel(call.out, lanes, panel * kWidth, vectors_of(panel) * kLanes, layout, panel_o(panel),
                panel_max(panel), panel_sum(panel), rows);
  }
}

}  // namespace

/// The code of this instruction set for a dtype, for the entries.
Functions functions_of(DType dtype) {
  return dtype == DType::f32    ? Functions{pack_tile<DType::f32>, run_task<DType::f32>}
         : dtype == DType::bf16 ? Functions{pack_tile<DType::bf16>, run_task<DType::bf16>}
                                : Functions{pack_tile<DType::f16>, run_task<DType::f16>};
}

}  // namespace HWY_NAMESPACE
}  // namespace rafter::forward_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
