// The register blocks that the fused kernels on vector units are made of, and panels on their way
// in and out of memory. A panel is [depth][lanes]: the lanes are queries (forward) or keys
// (backward), each stands for itself. Compiled once per instruction set (Highway's foreach_target).
#if defined(RAFTER_SIMD_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_SIMD_PRODUCTS_INL_H_
#undef RAFTER_SIMD_PRODUCTS_INL_H_
#else
#define RAFTER_SIMD_PRODUCTS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hw/cpu/unroll.h"
#include "hwy/highway.h"
#include "kernels/cpu/forward_simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::forward_simd {
namespace HWY_NAMESPACE {
namespace {

constexpr int kRows = static_cast<int>(kBlocking.rows);

// Register blocks of one vector of lanes take twice the rows where that is still within registers,
// so that enough additions are in flight.
template <int kVectors>
constexpr int kBlocksAtOnce = kVectors == 1 && kRows < 8 ? 2 : 1;

/// sum[i] = Σ_c rows[i][c] · panel[c]: each row against every lane.
template <int kCount, int kVectors>
HWY_INLINE void dot_block(const float* HWY_RESTRICT rows, std::int64_t row_stride,
                          const float* HWY_RESTRICT panel, std::int64_t depth,
                          V (&sum)[kCount][kVectors]) {
  const D d;
  const float* row[kCount];
  RAFTER_UNROLL
  for (int i = 0; i < kCount; ++i) {
    row[i] = rows + i * row_stride;
    RAFTER_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = hn::Zero(d);
    }
  }
  for (std::int64_t c = 0; c < depth; ++c) {
    V lanes[kVectors];
    RAFTER_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      lanes[v] = hn::Load(d, panel + (c * kVectors + v) * kLanes);
    }
    RAFTER_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const V value = hn::Set(d, row[i][c]);
      RAFTER_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = hn::MulAdd(value, lanes[v], sum[i][v]);
      }
    }
  }
}

/// sum[b][i] = Σ_r left[b · block_step + r · row_step + i] · weights[r] over rows [first, last).
/// With kMasked, a row outside [visible[0], visible[1]) of a lane is left out by selection: what
/// stands on its left may be anything.
template <int kBlocks, int kVectors, bool kMasked>
HWY_INLINE void sum_block(const float* HWY_RESTRICT left, std::int64_t block_step,
                          std::int64_t row_step, const float* HWY_RESTRICT weights,
                          std::int64_t first, std::int64_t last,
                          const std::int32_t* HWY_RESTRICT visible,
                          V (&sum)[kBlocks][kRows][kVectors]) {
  const D d;
  const DI di;
  RAFTER_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    RAFTER_UNROLL
    for (int i = 0; i < kRows; ++i) {
      RAFTER_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sum[b][i][v] = hn::Zero(d);
      }
    }
  }
  for (std::int64_t r = first; r < last; ++r) {
    V weight[kVectors];
    hn::Mask<D> sees[kVectors];
    RAFTER_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      weight[v] = hn::Load(d, weights + (r * kVectors + v) * kLanes);
      if constexpr (kMasked) {
        const auto index = hn::Set(di, static_cast<std::int32_t>(r));
        const auto from = hn::Load(di, visible + v * kLanes);
        const auto to = hn::Load(di, visible + (kVectors + v) * kLanes);
        sees[v] = hn::RebindMask(d, hn::And(hn::Gt(to, index), hn::Not(hn::Gt(from, index))));
      }
    }
    RAFTER_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      RAFTER_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const V value = hn::Set(d, left[b * block_step + r * row_step + i]);
        RAFTER_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const V next = hn::MulAdd(value, weight[v], sum[b][i][v]);
          if constexpr (kMasked) {
            sum[b][i][v] = hn::IfThenElse(sees[v], next, sum[b][i][v]);
          } else {
            sum[b][i][v] = next;
          }
        }
      }
    }
  }
}

/// Four rows of `count` floats, at least 4-padded, as four lanes of a panel [count][width] from
/// lane `lane`, times factor.
HWY_INLINE void rows_to_lanes(const float* HWY_RESTRICT rows, std::int64_t row_stride,
                              std::int64_t count, float factor, std::int64_t width,
                              std::int64_t lane, float* HWY_RESTRICT panel) {
  const D4 d;
  const auto times = hn::Set(d, factor);
  for (std::int64_t c = 0; c < count; c += 4) {
    auto a = hn::Mul(times, hn::LoadU(d, rows + c));
    auto b = hn::Mul(times, hn::LoadU(d, rows + row_stride + c));
    auto e = hn::Mul(times, hn::LoadU(d, rows + 2 * row_stride + c));
    auto f = hn::Mul(times, hn::LoadU(d, rows + 3 * row_stride + c));
    transpose4(a, b, e, f);
    hn::Store(a, d, panel + c * width + lane);
    hn::Store(b, d, panel + (c + 1) * width + lane);
    hn::Store(e, d, panel + (c + 2) * width + lane);
    hn::Store(f, d, panel + (c + 3) * width + lane);
  }
}

/// The way back: lanes [lane, lane + 4) of a panel, each times its factor, as rows of `count`.
HWY_INLINE void lanes_to_rows(const float* HWY_RESTRICT panel, std::int64_t width,
                              std::int64_t lane, std::int64_t count, hn::Vec<D4> factor,
                              std::int64_t row_stride, float* HWY_RESTRICT rows) {
  const D4 d;
  for (std::int64_t c = 0; c < count; c += 4) {
    auto a = hn::Mul(factor, hn::Load(d, panel + c * width + lane));
    auto b = hn::Mul(factor, hn::Load(d, panel + (c + 1) * width + lane));
    auto e = hn::Mul(factor, hn::Load(d, panel + (c + 2) * width + lane));
    auto f = hn::Mul(factor, hn::Load(d, panel + (c + 3) * width + lane));
    transpose4(a, b, e, f);
    hn::Store(a, d, rows + c);
    hn::Store(b, d, rows + row_stride + c);
    hn::Store(e, d, rows + 2 * row_stride + c);
    hn::Store(f, d, rows + 3 * row_stride + c);
  }
}

/// A row of f32 to an output of any dtype.
inline void store_row(const float* row, std::int64_t count, const TensorView& view,
                      std::int64_t offset) {
  if (view.dtype == DType::f32) {
    store_row<DType::f32>(row, count, view.data, offset);
  } else if (view.dtype == DType::bf16) {
    store_row<DType::bf16>(row, count, view.data, offset);
  } else {
    store_row<DType::f16>(row, count, view.data, offset);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::forward_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
