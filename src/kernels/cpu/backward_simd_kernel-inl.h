// One task of the fused backward: a block of keys of one KV head against every query that sees
// them. Keys lie in lanes: S = Q Kᵀ, dP = dO Vᵀ, dVᵀ += dOᵀ P and dKᵀ += Qᵀ dS are the register
// blocks of the forward with the sides exchanged; dQ += dS K has head_dim in lanes.
// Compiled once per instruction set (Highway's foreach_target).
#if defined(RAFTER_BACKWARD_SIMD_KERNEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_BACKWARD_SIMD_KERNEL_INL_H_
#undef RAFTER_BACKWARD_SIMD_KERNEL_INL_H_
#else
#define RAFTER_BACKWARD_SIMD_KERNEL_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hw/cpu/unroll.h"
#include "hwy/highway.h"
#include "kernels/cpu/backward_simd_task.h"
#include "kernels/cpu/simd_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::backward_simd {
namespace HWY_NAMESPACE {
namespace {

namespace blocks = forward_simd::HWY_NAMESPACE;
namespace hn = blocks::hn;
using blocks::D;
using blocks::D4;
using blocks::DI;
using blocks::dot_block;
using blocks::Element;
using blocks::exp2_of;
using blocks::kBlocking;
using blocks::kBlocksAtOnce;
using blocks::kLanes;
using blocks::kRows;
using blocks::lanes_to_rows;
using blocks::load_some_f32;
using blocks::rows_to_lanes;
using blocks::store_row;
using blocks::sum_block;
using blocks::tanh_of;
using blocks::V;

#if HWY_TARGET == HWY_AVX3
constexpr tiles::SimdBackwardBlocking kBackward = tiles::kBackwardAvx512;
#elif HWY_TARGET == HWY_AVX2
constexpr tiles::SimdBackwardBlocking kBackward = tiles::kBackwardAvx2;
#else
constexpr tiles::SimdBackwardBlocking kBackward = tiles::kBackwardPortable;
#endif

constexpr std::int64_t kTileQ = kBackward.tile_q;
constexpr std::int64_t kWidth = kBlocking.panel_lanes();
constexpr int kDqRows = static_cast<int>(kBackward.dq_rows);
constexpr int kDqVectors = static_cast<int>(kBackward.dq_vectors);
constexpr float kLog2E = 1.4426950408889634f;

// ---------------------------------------------------------------------------------- rows of input

template <DType kType>
V widen_row(const void* data, std::int64_t offset, std::int64_t count, std::int64_t padded,
            float* HWY_RESTRICT out) {
  const D d;
  const auto* const row = static_cast<const Element<kType>*>(data) + offset;
  V zeros = hn::Zero(d);  // stays 0 while all is finite: inf · 0 and NaN · 0 are NaN
  for (std::int64_t c = 0; c < padded; c += kLanes) {
    const V value = load_some_f32<kType>(row + c, count - c);
    zeros = hn::MulAdd(value, hn::Zero(d), zeros);
    hn::Store(value, d, out + c);
  }
  return zeros;
}

/// A row of any dtype as f32, zeros up to `padded`; NaN in the result where something is not
/// finite, else zeros.
V widen_row(const TensorView& view, std::int64_t offset, std::int64_t padded, float* out) {
  return view.dtype == DType::f32
             ? widen_row<DType::f32>(view.data, offset, view.head_dim, padded, out)
         : view.dtype == DType::bf16
             ? widen_row<DType::bf16>(view.data, offset, view.head_dim, padded, out)
             : widen_row<DType::f16>(view.data, offset, view.head_dim, padded, out);
}

bool is_zero(V value) { return hn::AllTrue(D(), hn::Eq(value, hn::Zero(D()))); }

float sum_of_lanes(V value) {
  alignas(64) float lanes[kLanes];
  hn::Store(value, D(), lanes);
  float sum = 0;
  for (const float lane : lanes) {
    sum += lane;
  }
  return sum;
}

/// delta = rowsum(dO ∘ O) − dlse, and dq = 0 where no row of a tile sees a key: no task comes
/// there.
void prepare_rows(const Run& run, const cpu::Sequence& s, std::int64_t head_q, std::int64_t first,
                  std::int64_t last) {
  const BackwardInputs& in = run.call.in;
  const tiles::SimdBackwardLayout& layout = run.layout;
  float* const delta = run.delta(s, head_q);
  alignas(64) float d_o[256 + kLanes], o[256 + kLanes];  // head_dim_v is at most 256
  for (std::int64_t row = first; row < last; ++row) {
    widen_row(in.d_o, cpu::offset_of(in.d_o, s.q_batch, s.q_row + row, head_q), layout.columns,
              d_o);
    widen_row(in.o, cpu::offset_of(in.o, s.q_batch, s.q_row + row, head_q), layout.columns, o);
    V sum = hn::Zero(D());
    for (std::int64_t c = 0; c < layout.columns; c += kLanes) {
      sum = hn::MulAdd(hn::Load(D(), d_o + c), hn::Load(D(), o + c), sum);
    }
    delta[row] = sum_of_lanes(sum);
    if (in.dlse.data != nullptr) {
      delta[row] -= *cpu::lse_of(in.dlse, s.q_batch, head_q, s.q_row + row);
    }
  }
  if (cpu::mask_window(run.problem().mask, s).hull(first, last).size() > 0) {
    return;
  }
  alignas(64) constexpr float kZeros[256 + 16] = {};
  const TensorView& dq = run.call.out.dq;
  for (std::int64_t row = first; row < last; ++row) {
    store_row(kZeros, layout.head_dim, dq, cpu::offset_of(dq, s.q_batch, s.q_row + row, head_q));
  }
}

// ------------------------------------------------------------------------------ one task's keys

/// One panel of keys as a tile of query rows meets it.
struct Panel {
  int vectors = 0;
  std::int64_t first_key = 0, keys = 0;   // within the task
  std::int64_t first = 0, last = 0;       // rows of the tile that see some of its keys
  bool empty = true;                      // no row does
  bool masked = false;                    // some row within does not see some key
  const std::int32_t* visible = nullptr;  // [2][lanes]: rows of the tile that see each lane
  float* k = nullptr;                     // [depth][lanes]
  float* v = nullptr;
  float* dk = nullptr;
  float* dv = nullptr;
  float* ds = nullptr;  // [tile_q][lanes]
};

/// A tile of query rows of one head.
struct Tile {
  std::int64_t rows = 0;
  const float* q = nullptr;    // [rows][q_stride]
  const float* d_o = nullptr;  // [rows][o_stride]
  const float* lse = nullptr;  // times log2 e
  const float* delta = nullptr;
  bool q_finite = true, d_o_finite = true;
  float softcap_log2 = 0;  // softcap · log2 e, or 0
};

/// P and dS of the rows of a panel from S and dP, in place.
template <int kVectors, bool kMasked, bool kCapped>
HWY_INLINE void weights_of(const Panel& panel, const Tile& tile, float* HWY_RESTRICT p,
                           float* HWY_RESTRICT ds) {
  const D d;
  const DI di;
  for (std::int64_t r = panel.first; r < panel.last; ++r) {
    const V lse = hn::Set(d, tile.lse[r]);
    const V delta = hn::Set(d, tile.delta[r]);
    RAFTER_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      float* const p_at = p + (r * kVectors + v) * kLanes;
      float* const ds_at = ds + (r * kVectors + v) * kLanes;
      V score = hn::Load(d, p_at);
      V gradient = hn::Sub(hn::Load(d, ds_at), delta);
      if constexpr (kCapped) {
        const V capped = tanh_of(score);
        score = hn::Mul(hn::Set(d, tile.softcap_log2), capped);
        gradient = hn::Mul(gradient, hn::Sub(hn::Set(d, 1.0f), hn::Mul(capped, capped)));
      }
      V weight = exp2_of(hn::Sub(score, lse));
      gradient = hn::Mul(weight, gradient);
      if constexpr (kMasked) {
        const auto index = hn::Set(di, static_cast<std::int32_t>(r));
        const auto from = hn::Load(di, panel.visible + v * kLanes);
        const auto to = hn::Load(di, panel.visible + (kVectors + v) * kLanes);
        const auto sees =
            hn::RebindMask(d, hn::And(hn::Gt(to, index), hn::Not(hn::Gt(from, index))));
        weight = hn::IfThenElse(sees, weight, hn::Zero(d));
        gradient = hn::IfThenElse(sees, gradient, hn::Zero(d));
      }
      hn::Store(weight, d, p_at);
      hn::Store(gradient, d, ds_at);
    }
  }
}

/// out[column][lanes] += Σ over the rows of left[row][column] · weights[row][lanes].
template <int kVectors>
HWY_INLINE void add_products(const Panel& panel, const float* left, std::int64_t left_stride,
                             const float* weights, std::int64_t columns, bool select,
                             float* HWY_RESTRICT out) {
  const D d;
  constexpr int kBlocks = kBlocksAtOnce<kVectors>;
  for (std::int64_t c = 0; c < columns; c += kRows * kBlocks) {
    V sum[kBlocks][kRows][kVectors];
    if (select) {
      sum_block<kBlocks, kVectors, true>(left + c, kRows, left_stride, weights, panel.first,
                                         panel.last, panel.visible, sum);
    } else {
      sum_block<kBlocks, kVectors, false>(left + c, kRows, left_stride, weights, panel.first,
                                          panel.last, nullptr, sum);
    }
    RAFTER_UNROLL
    for (int i = 0; i < kBlocks * kRows; ++i) {
      RAFTER_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        float* const at = out + ((c + i) * kVectors + v) * kLanes;
        hn::Store(hn::Add(hn::Load(d, at), sum[i / kRows][i % kRows][v]), d, at);
      }
    }
  }
}

/// Rows [first, last) of left against the lanes of a panel.
template <int kVectors>
HWY_INLINE void dot_rows(const float* left, std::int64_t left_stride, const float* panel,
                         std::int64_t depth, std::int64_t first, std::int64_t last, float* out) {
  constexpr int kCount = kRows * kBlocksAtOnce<kVectors>;
  for (std::int64_t r = first / kCount * kCount; r < last; r += kCount) {
    V sum[kCount][kVectors];
    dot_block<kCount, kVectors>(left + r * left_stride, left_stride, panel, depth, sum);
    RAFTER_UNROLL
    for (int i = 0; i < kCount; ++i) {
      RAFTER_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        hn::Store(sum[i][v], D(), out + ((r + i) * kVectors + v) * kLanes);
      }
    }
  }
}

/// S, dP, P, dS, dV and dK of a tile of query rows and a panel of keys.
template <int kVectors>
void panel_tile(const Panel& panel, const Tile& tile, const tiles::SimdBackwardLayout& layout,
                float* p) {
  constexpr std::int64_t kLanesHere = kVectors * kLanes;
  dot_rows<kVectors>(tile.q, layout.q_stride, panel.k, layout.head_dim, panel.first, panel.last, p);
  dot_rows<kVectors>(tile.d_o, layout.o_stride, panel.v, layout.head_dim_v, panel.first, panel.last,
                     panel.ds);
  const bool capped = tile.softcap_log2 > 0;
  const auto weights =
      panel.masked
          ? (capped ? weights_of<kVectors, true, true> : weights_of<kVectors, true, false>)
          : (capped ? weights_of<kVectors, false, true> : weights_of<kVectors, false, false>);
  weights(panel, tile, p, panel.ds);
  // dQ takes the rows kDqRows at a time: what stands around those that see this panel is 0.
  const std::int64_t padded = tiles::round_up(panel.last, kDqRows);
  std::fill_n(panel.ds, panel.first * kLanesHere, 0.0f);
  std::fill_n(panel.ds + panel.last * kLanesHere, (padded - panel.last) * kLanesHere, 0.0f);
  add_products<kVectors>(panel, tile.d_o, layout.o_stride, p, layout.columns,
                         panel.masked && !tile.d_o_finite, panel.dv);
  add_products<kVectors>(panel, tile.q, layout.q_stride, panel.ds, layout.depth,
                         panel.masked && !tile.q_finite, panel.dk);
}

/// Whether a row of the tile sees lane `lane` of a panel.
bool sees(const Panel& panel, std::int64_t row, std::int64_t lane) {
  const std::int64_t width = panel.vectors * kLanes;
  return row >= panel.visible[lane] && row < panel.visible[width + lane];
}

/// Part of dQ of kDqRows rows from `row` and kColumns vectors of head_dim: Σ over panels and their
/// keys of dS · K. With kSelect, a key that a row does not see is left out: K may hold anything.
template <int kColumns, bool kSelect>
HWY_INLINE void dq_block(const Panel* panels, std::int64_t count, const float* k_rows,
                         std::int64_t k_stride, std::int64_t row, V (&sum)[kDqRows][kColumns]) {
  const D d;
  RAFTER_UNROLL
  for (int i = 0; i < kDqRows; ++i) {
    RAFTER_UNROLL
    for (int v = 0; v < kColumns; ++v) {
      sum[i][v] = hn::Zero(d);
    }
  }
  for (const Panel* panel = panels; panel < panels + count; ++panel) {
    if (panel->empty || row >= panel->last || row + kDqRows <= panel->first) {
      continue;
    }
    const std::int64_t width = panel->vectors * kLanes;
    const float* const weights = panel->ds + row * width;
    const float* key = k_rows + panel->first_key * k_stride;
    for (std::int64_t lane = 0; lane < panel->keys; ++lane, key += k_stride) {
      V columns[kColumns];
      RAFTER_UNROLL
      for (int v = 0; v < kColumns; ++v) {
        columns[v] = hn::Load(d, key + v * kLanes);
      }
      RAFTER_UNROLL
      for (int i = 0; i < kDqRows; ++i) {
        if (kSelect && !sees(*panel, row + i, lane)) {
          continue;
        }
        const V weight = hn::Set(d, weights[i * width + lane]);
        RAFTER_UNROLL
        for (int v = 0; v < kColumns; ++v) {
          sum[i][v] = hn::MulAdd(weight, columns[v], sum[i][v]);
        }
      }
    }
  }
}

/// dQ of a tile: this task's part on top of what is there, unless it is the first to come.
struct DqTile {
  const Panel* panels = nullptr;
  std::int64_t panel_count = 0;
  const float* k_rows = nullptr;
  std::int64_t rows = 0;
  bool select = false;
  bool first = false;
  float* dq = nullptr;         // [rows][depth]
  float* elsewhere = nullptr;  // [depth]: for rows past the last
};

template <int kColumns, bool kSelect>
void dq_columns(const DqTile& tile, const tiles::SimdBackwardLayout& layout, std::int64_t column) {
  const D d;
  for (std::int64_t row = 0; row < tile.rows; row += kDqRows) {
    V sum[kDqRows][kColumns];
    dq_block<kColumns, kSelect>(tile.panels, tile.panel_count, tile.k_rows + column,
                                layout.q_stride, row, sum);
    RAFTER_UNROLL
    for (int i = 0; i < kDqRows; ++i) {
      float* const to =
          (row + i < tile.rows ? tile.dq + (row + i) * layout.depth : tile.elsewhere) + column;
      RAFTER_UNROLL
      for (int v = 0; v < kColumns; ++v) {
        const V before = tile.first ? hn::Zero(d) : hn::Load(d, to + v * kLanes);
        hn::Store(hn::Add(before, sum[i][v]), d, to + v * kLanes);
      }
    }
  }
}

template <bool kSelect>
void add_dq(const DqTile& tile, const tiles::SimdBackwardLayout& layout) {
  std::int64_t column = 0;
  for (; column + kDqVectors * kLanes <= layout.depth; column += kDqVectors * kLanes) {
    dq_columns<kDqVectors, kSelect>(tile, layout, column);
  }
  for (; column < layout.depth; column += kLanes) {
    dq_columns<1, kSelect>(tile, layout, column);
  }
}

/// The keys of a task and its scratch.
class KeyBlock {
 public:
  KeyBlock(const Run& run, const Task& task, std::int64_t head_kv, float* scratch)
      : run_(run),
        layout_(run.layout),
        s_(cpu::sequence_of(run.problem(), run.call.in, task.sequence)),
        sequence_(task.sequence),
        head_kv_(head_kv),
        first_key_(task.block * run.layout.keys),
        keys_(std::min(run.layout.keys, s_.seqlen_kv - first_key_)),
        window_(cpu::mask_window(run.problem().mask, s_)),
        block_(task.block),
        scratch_(scratch) {}

  void process() {
    const AttentionProblem& p = run_.problem();
    pack();
    const tiles::Range rows = window_.transposed(s_.seqlen_q).hull(first_key_, first_key_ + keys_);
    const std::int64_t group = p.heads_q / p.heads_kv;
    for (std::int64_t head = head_kv_ * group; head < (head_kv_ + 1) * group; ++head) {
      for (std::int64_t tile = rows.first / kTileQ; tile * kTileQ < rows.last; ++tile) {
        process_tile(head, tile);
      }
    }
    write();
  }

 private:
  float* part(std::int64_t offset) const { return scratch_ + offset; }

  /// K and V as panels, K as rows too; dK and dV zero; which rows see each key.
  void pack() {
    const AttentionProblem& p = run_.problem();
    const BackwardInputs& in = run_.call.in;
    const float scale = p.softcap > 0 ? *p.softmax_scale / p.softcap : *p.softmax_scale * kLog2E;
    const tiles::MaskWindow rows_of_key = window_.transposed(s_.seqlen_q);
    lane_first_ = reinterpret_cast<std::int64_t*>(part(layout_.lanes));
    lane_last_ = lane_first_ + layout_.keys;
    float* const k_rows = part(layout_.k_rows);
    float* const rows = part(layout_.rows);
    panel_count_ = base::div_up(keys_, kWidth);
    V zeros = hn::Zero(D());
    for (std::int64_t n = 0; n < panel_count_; ++n) {
      Panel& panel = panels_[n];
      panel.first_key = n * kWidth;
      panel.keys = std::min(kWidth, keys_ - panel.first_key);
      panel.vectors = static_cast<int>(base::div_up(panel.keys, kLanes));
      const std::int64_t width = panel.vectors * kLanes;
      panel.k = part(layout_.k) + n * kWidth * layout_.depth;
      panel.v = part(layout_.v) + n * kWidth * layout_.columns;
      panel.dk = part(layout_.dk) + n * kWidth * layout_.depth;
      panel.dv = part(layout_.dv) + n * kWidth * layout_.columns;
      panel.ds = part(layout_.ds) + n * kWidth * kTileQ;
      std::fill_n(panel.dk, width * layout_.depth, 0.0f);
      std::fill_n(panel.dv, width * layout_.columns, 0.0f);
      for (std::int64_t lane = 0; lane < width; lane += 4) {
        for (std::int64_t i = 0; i < 4; ++i) {
          const std::int64_t key = panel.first_key + lane + i;
          float* const k_row = k_rows + key * layout_.q_stride;
          float* const v_row = rows + i * layout_.columns;
          if (lane + i < panel.keys) {
            zeros = hn::Add(zeros, widen_row(in.k, row_of_key(in.k, key), layout_.depth, k_row));
            widen_row(in.v, row_of_key(in.v, key), layout_.columns, v_row);
          } else {
            std::fill_n(k_row, layout_.depth, 0.0f);
            std::fill_n(v_row, layout_.columns, 0.0f);
          }
          // lanes without a key see what the last key sees: they cost nothing and mask nothing
          const tiles::Range range =
              rows_of_key.row(first_key_ + panel.first_key + std::min(lane + i, panel.keys - 1));
          lane_first_[n * kWidth + lane + i] = range.first;
          lane_last_[n * kWidth + lane + i] = range.last;
        }
        rows_to_lanes(k_rows + (panel.first_key + lane) * layout_.q_stride, layout_.q_stride,
                      layout_.depth, scale, width, lane, panel.k);
        rows_to_lanes(rows, layout_.columns, layout_.columns, 1.0f, width, lane, panel.v);
      }
    }
    k_finite_ = is_zero(zeros);
  }

  std::int64_t row_of_key(const TensorView& view, std::int64_t key) const {
    return cpu::offset_of(view, s_.kv_batch, s_.kv_row + first_key_ + key, head_kv_);
  }

  Tile load_tile(std::int64_t head, std::int64_t first, std::int64_t rows) const {
    const BackwardInputs& in = run_.call.in;
    Tile tile;
    tile.rows = rows;
    float* const q = part(layout_.q);
    float* const d_o = part(layout_.d_o);
    float* const lse = part(layout_.lse);
    V q_zeros = hn::Zero(D()), o_zeros = hn::Zero(D());
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t row = s_.q_row + first + r;
      q_zeros = hn::Add(q_zeros, widen_row(in.q, cpu::offset_of(in.q, s_.q_batch, row, head),
                                           layout_.depth, q + r * layout_.q_stride));
      o_zeros = hn::Add(o_zeros, widen_row(in.d_o, cpu::offset_of(in.d_o, s_.q_batch, row, head),
                                           layout_.columns, d_o + r * layout_.o_stride));
      lse[r] = *cpu::lse_of(in.lse, s_.q_batch, head, row) * kLog2E;
    }
    // register blocks take rows past the last: zeros, whose results nobody reads
    for (std::int64_t r = rows; r < tiles::round_up(rows, tiles::kSimdRowPad); ++r) {
      std::fill_n(q + r * layout_.q_stride, layout_.depth, 0.0f);
      std::fill_n(d_o + r * layout_.o_stride, layout_.columns, 0.0f);
    }
    tile.q = q;
    tile.d_o = d_o;
    tile.lse = lse;
    tile.delta = run_.delta(s_, head) + first;
    tile.q_finite = is_zero(q_zeros);
    tile.d_o_finite = is_zero(o_zeros);
    const float softcap = run_.problem().softcap;
    tile.softcap_log2 = softcap > 0 ? softcap * kLog2E : 0.0f;
    return tile;
  }

  void process_tile(std::int64_t head, std::int64_t number) {
    const std::int64_t first = number * kTileQ;
    const std::int64_t rows = std::min(kTileQ, s_.seqlen_q - first);
    const tiles::Range hull = window_.hull(first, first + rows);
    if (hull.last <= first_key_ || hull.first >= first_key_ + keys_) {
      return;
    }
    const Tile tile = load_tile(head, first, rows);
    bool masked = false;
    for (std::int64_t n = 0; n < panel_count_; ++n) {
      Panel& panel = panels_[n];
      std::int32_t* const visible = visible_ + n * 2 * kWidth;
      const cpu::PanelRange range =
          cpu::panel_range(lane_first_ + n * kWidth, lane_last_ + n * kWidth,
                           panel.vectors * kLanes, first, rows, visible);
      panel.first = range.first;
      panel.last = range.last;
      panel.empty = range.empty;
      panel.masked = !range.all;
      panel.visible = visible;
      masked = masked || panel.masked;
      if (!panel.empty) {
        const auto step = panel.vectors == 1   ? panel_tile<1>
                          : panel.vectors == 2 ? panel_tile<2>
                                               : panel_tile<static_cast<int>(kWidth / kLanes)>;
        step(panel, tile, layout_, part(layout_.p));
      }
    }
    add_to_dq(head, number, first, rows, hull, masked && !k_finite_);
  }

  void add_to_dq(std::int64_t head, std::int64_t number, std::int64_t first, std::int64_t rows,
                 const tiles::Range& hull, bool select) const {
    const std::int64_t first_block = hull.first / layout_.keys;
    const std::int64_t last_block = (hull.last - 1) / layout_.keys;
    const auto mine = static_cast<std::int32_t>(block_ - first_block);
    std::int32_t& turn = run_.turn(s_, sequence_, head, number);
    DqTile tile{.panels = panels_,
                .panel_count = panel_count_,
                .k_rows = part(layout_.k_rows),
                .rows = rows,
                .select = select,
                .first = mine == 0,
                .dq = run_.dq(s_, head) + first * layout_.depth,
                .elsewhere = part(layout_.zero_row)};
    std::fill_n(tile.elsewhere, layout_.depth, 0.0f);
    cpu::wait_for_turn(turn, mine);
    if (select) {
      add_dq<true>(tile, layout_);
    } else {
      add_dq<false>(tile, layout_);
    }
    if (block_ == last_block) {
      write_dq(head, first, rows, tile.dq);
    }
    cpu::end_turn(turn, mine);
  }

  void write_dq(std::int64_t head, std::int64_t first, std::int64_t rows, float* dq) const {
    const D d;
    const TensorView& out = run_.call.out.dq;
    const V scale = hn::Set(d, *run_.problem().softmax_scale);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* const row = dq + r * layout_.depth;
      for (std::int64_t c = 0; c < layout_.depth; c += kLanes) {
        hn::Store(hn::Mul(hn::Load(d, row + c), scale), d, row + c);
      }
      store_row(row, layout_.head_dim, out,
                cpu::offset_of(out, s_.q_batch, s_.q_row + first + r, head));
    }
  }

  /// dK and dV of the block, transposed back.
  void write() const {
    const BackwardOutputs& out = run_.call.out;
    const D4 d4;
    const auto scale = hn::Set(d4, *run_.problem().softmax_scale);
    for (std::int64_t n = 0; n < panel_count_; ++n) {
      const Panel& panel = panels_[n];
      write_panel(panel, panel.dk, layout_.depth, scale, out.dk);
      write_panel(panel, panel.dv, layout_.columns, hn::Set(d4, 1.0f), out.dv);
    }
  }
  void write_panel(const Panel& panel, const float* values, std::int64_t count, hn::Vec<D4> factor,
                   const TensorView& out) const {
    float* const rows = part(layout_.rows);
    for (std::int64_t lane = 0; lane < panel.keys; lane += 4) {
      lanes_to_rows(values, panel.vectors * kLanes, lane, count, factor, count, rows);
      for (std::int64_t i = 0; i < std::min<std::int64_t>(4, panel.keys - lane); ++i) {
        store_row(rows + i * count, out.head_dim, out, row_of_key(out, panel.first_key + lane + i));
      }
    }
  }

  const Run& run_;
  const tiles::SimdBackwardLayout& layout_;
  const cpu::Sequence s_;
  const std::int64_t sequence_, head_kv_, first_key_, keys_;
  const tiles::MaskWindow window_;
  const std::int64_t block_;
  float* const scratch_;
  std::int64_t* lane_first_ = nullptr;
  std::int64_t* lane_last_ = nullptr;
  bool k_finite_ = true;
  std::int64_t panel_count_ = 0;
  Panel panels_[kBackward.max_panels];
  alignas(64) std::int32_t visible_[kBackward.max_panels * 2 * kWidth];
};

void run_task(const Run& run, const Task& task, std::int64_t head_kv, float* scratch) {
  KeyBlock(run, task, head_kv, scratch).process();
}

}  // namespace

/// The code of this instruction set, for the entries.
Functions functions() { return {prepare_rows, run_task}; }

}  // namespace HWY_NAMESPACE
}  // namespace rafter::backward_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
