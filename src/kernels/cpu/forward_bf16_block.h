// One block of the fused bf16 forward, 32 rows by two panels of 16 queries, over an abstract
// machine M (forward_bf16_task.h): its products on tiles or on vectors, and what softmax does to
// its scores.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/forward_bf16_run.h"

namespace rafter::forward_bf16 {

/// A product on a unit of eight tiles. slice() is vector work for the time that a tile product
/// takes (kSlices 4) or that four take (1): the unit holds two or three products that wait, and
/// what stands behind more of them in the program waits as well. A is loaded
/// past the L1: K and V stream from the L2, and would drive out Q, S, P and O.
template <typename M, bool kAdds, int kSlices, typename Slice>
[[gnu::always_inline]] inline void tile_product(const Product& x, const Slice& slice) {
  constexpr std::int64_t kRow = 64;  // bytes
  if constexpr (kAdds) {
    M::template tile_load<0>(x.c0, kRow);
    M::template tile_load<1>(x.c1, kRow);
    M::template tile_load<2>(x.c0 + kTileSums, kRow);
    M::template tile_load<3>(x.c1 + kTileSums, kRow);
  } else {
    M::template tile_zero<0>();
    M::template tile_zero<1>();
    M::template tile_zero<2>();
    M::template tile_zero<3>();
  }
  static_assert(kSlices == 1 || kSlices == 4);
  const auto between = [&]() __attribute__((always_inline)) {
    if constexpr (kSlices == 4) {
      slice();
    }
  };
  for (std::int64_t step = 0; step < x.steps; ++step) {
    const std::uint16_t* const a = x.a + step * 2 * kTileElements;
    M::template tile_load_past_l1<4>(a, kRow);
    M::template tile_load<6>(x.b0 + step * kTileElements, kRow);
    M::template tile_dot<0, 4, 6>();
    between();
    M::template tile_load<7>(x.b1 + step * kTileElements, kRow);
    M::template tile_dot<1, 4, 7>();
    between();
    M::template tile_load_past_l1<5>(a + kTileElements, kRow);
    M::template tile_dot<2, 5, 6>();
    between();
    M::template tile_dot<3, 5, 7>();
    slice();
  }
  M::template tile_store<0>(x.c0, kRow);
  M::template tile_store<1>(x.c1, kRow);
  M::template tile_store<2>(x.c0 + kTileSums, kRow);
  M::template tile_store<3>(x.c1 + kTileSums, kRow);
}

/// The same on vectors with a dot product of pairs: 8 rows of both panels stay in registers from
/// the first step to the last.
template <typename M, bool kAdds, typename Slice>
[[gnu::always_inline]] inline void vector_product(const Product& x, const Slice& slice) {
  constexpr std::int64_t kRows = 8;
  static_assert(kPanel % kRows == 0);
  for (std::int64_t row = 0; row < kBlock; row += kRows) {
    float* const c0 = x.c0 + row * kPanel;
    float* const c1 = x.c1 + row * kPanel;
    typename M::F sum0[kRows], sum1[kRows];
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < kRows; ++i) {
      sum0[i] = kAdds ? M::load(c0 + i * kPanel) : M::set(0.0f);
      sum1[i] = kAdds ? M::load(c1 + i * kPanel) : M::set(0.0f);
    }
    const std::uint16_t* const a = x.a + row / kPanel * kTileElements + row % kPanel * 32;
    for (std::int64_t step = 0; step < x.steps; ++step) {
      for (std::int64_t pair = 0; pair < 16; ++pair) {
        const auto b0 = M::load_pairs(x.b0 + step * kTileElements + pair * 32);
        const auto b1 = M::load_pairs(x.b1 + step * kTileElements + pair * 32);
        const std::uint16_t* const at = a + step * 2 * kTileElements + pair * 2;
#pragma GCC unroll 8
        for (std::int64_t i = 0; i < kRows; ++i) {
          const auto ai = M::repeat_pair(at + i * 32);
          sum0[i] = M::dot_pairs(sum0[i], ai, b0);
          sum1[i] = M::dot_pairs(sum1[i], ai, b1);
        }
      }
    }
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < kRows; ++i) {
      M::store(c0 + i * kPanel, sum0[i]);
      M::store(c1 + i * kPanel, sum1[i]);
    }
    slice();
  }
}

/// 2^x; exactly 1 at 0, below 2e-7 of relative error between −126 and 0, 0 at −∞, NaN at NaN. A
/// polynomial on the distance to the integer below, exact at both ends: a score that rounding puts
/// next to the maximum weighs 1. Coefficients: Remez on [0, 1], both ends held, then moved by a few
/// units in the last place for the least error in f32.
template <typename M>
[[gnu::always_inline]] inline typename M::F exp2_of(typename M::F x) {
  const auto r = M::above_floor(x);
  auto p = M::fma(M::set(0x1.eca6ecp-10f), r, M::set(0x1.269deap-7f));
  p = M::fma(p, r, M::set(0x1.c9443ep-5f));
  p = M::fma(p, r, M::set(0x1.ebd89ap-3f));
  p = M::fma(p, r, M::set(0x1.62e4cap-1f));
  p = M::fma(p, r, M::set(1.0f));
  return M::times_power_of_floor(p, x);
}

/// The same below 3.4e-6 of relative error: for weights, which bf16 rounds by 2e-3.
template <typename M>
[[gnu::always_inline]] inline typename M::F weight_of(typename M::F x) {
  const auto r = M::above_floor(x);
  auto p = M::fma(M::set(0x1.bc31dap-7f), r, M::set(0x1.aa3fcap-5f));
  p = M::fma(p, r, M::set(0x1.ee5884p-3f));
  p = M::fma(p, r, M::set(0x1.62d51cp-1f));
  p = M::fma(p, r, M::set(1.0f));
  return M::times_power_of_floor(p, x);
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
  const auto e = exp2_of<M>(M::mul(bounded, M::set(2.8853900817779268f)));
  const auto large = M::sub(M::set(1.0f), M::div(M::set(2.0f), M::add(e, M::set(1.0f))));
  const auto negative = M::greater(M::set(0.0f), x);
  const auto big = M::greater(magnitude, M::set(0.625f));
  return M::select(big, M::select(negative, M::sub(M::set(0.0f), large), large), small);
}

/// Softcap and mask on the scores of a panel. visible: [2][16], first and last key of each lane.
template <typename M>
inline void adjust_scores(const Scores& scores, const std::int32_t* visible, float* s) {
  const auto first = M::load_i(visible);
  const auto last = M::load_i(visible + kPanel);
  const auto hidden = M::set(kMinusInfinity);
  for (std::int64_t key = 0; key < kBlock; ++key) {
    auto score = M::load(s + key * kPanel);
    if (scores.capped_input != 0) {
      score = tanh_of<M>(M::mul(score, M::set(scores.capped_input)));
    }
    const auto sees = M::within(first, last, static_cast<std::int32_t>(key));
    M::store(s + key * kPanel, M::select(sees, score, hidden));
  }
}

/// Largest score of each lane, scaled.
template <typename M>
inline typename M::F top_of(const Scores& scores, const float* s) {
  auto top0 = M::load(s);
  auto top1 = M::load(s + kPanel);
  auto top2 = M::load(s + 2 * kPanel);
  auto top3 = M::load(s + 3 * kPanel);
  for (std::int64_t key = 4; key < kBlock; key += 4) {
    top0 = M::max(top0, M::load(s + key * kPanel));
    top1 = M::max(top1, M::load(s + (key + 1) * kPanel));
    top2 = M::max(top2, M::load(s + (key + 2) * kPanel));
    top3 = M::max(top3, M::load(s + (key + 3) * kPanel));
  }
  return M::mul(M::set(scores.scale_log2), M::max(M::max(top0, top1), M::max(top2, top3)));
}

/// The largest scores of a block of two panels, a few rows at a time.
template <typename M>
struct Tops {
  using F = typename M::F;
  const float* s = nullptr;  // [2][32][16]
  F top0, top1, other0, other1;
  std::int64_t wait = 0;  // slices before the first: the scores are not stored yet
  std::int64_t left = 0;  // rows

  /// kRows, even, divides 32.
  template <int kRows>
  [[gnu::always_inline]] void advance() {
    if (wait > 0) {
      --wait;
    } else if (left > 0) {
#pragma GCC unroll 8
      for (int i = 0; i < kRows; i += 2) {
        two();
      }
      left -= kRows;
    }
  }
  [[gnu::always_inline]] void finish() {
#pragma GCC unroll 1
    for (; left > 0; left -= 2) {
      two();
    }
  }

 private:
  [[gnu::always_inline]] void two() {
    top0 = M::max(top0, M::load(s));
    top1 = M::max(top1, M::load(s + kBlock * kPanel));
    other0 = M::max(other0, M::load(s + kPanel));
    other1 = M::max(other1, M::load(s + (kBlock + 1) * kPanel));
    s += 2 * kPanel;
  }
};

/// P of one panel of a block, pair of keys by pair of keys, and its sums.
template <typename M>
struct PanelWeights {
  using F = typename M::F;
  const float* s = nullptr;    // [32][16]
  std::uint32_t* p = nullptr;  // [16 pairs][16]
  F scale, offset, even, odd;
  std::int64_t left = kBlock / 2;

  /// kPairs divides 16.
  template <int kPairs>
  [[gnu::always_inline]] void advance() {
    if (left > 0) {
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) {
        one();
      }
      left -= kPairs;
    }
  }
  [[gnu::always_inline]] void finish() {
#pragma GCC unroll 1
    for (; left > 0; --left) {
      one();
    }
  }

 private:
  [[gnu::always_inline]] void one() {
    const auto e = weight_of<M>(M::fma(M::load(s), scale, offset));
    const auto o = weight_of<M>(M::fma(M::load(s + kPanel), scale, offset));
    even = M::add(even, e);
    odd = M::add(odd, o);
    M::store_pair(p, e, o);
    s += 2 * kPanel;
    p += kPanel;
  }
};

}  // namespace rafter::forward_bf16
