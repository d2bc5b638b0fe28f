// One block of the fused bf16 backward, 32 keys by two panels of 16 query rows, over the machine M
// of forward_bf16_task.h: P and dS from S and dP.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cpu/backward_bf16_run.h"
#include "kernels/cpu/forward_bf16_block.h"

namespace rafter::backward_bf16 {

/// Where S and dP of a block lie: [panel][32 keys][16 rows].
struct Scores {
  float* s = nullptr;
  float* dp = nullptr;
};

/// P and dS of a block, pair of keys by pair of keys.
template <typename M>
struct Weights {
  using F = typename M::F;
  Scores from;
  std::uint16_t* p = nullptr;          // [32 keys][32 rows]
  std::uint16_t* ds = nullptr;         // the same
  std::uint32_t* ds_pairs0 = nullptr;  // [16 pairs of keys][16 rows]
  std::uint32_t* ds_pairs1 = nullptr;
  F scale, lse0, lse1, delta0, delta1;  // P = 2^(scale · S + lse), dS = P · (dP − delta)
  std::int64_t done = kBlock / 2;

  [[gnu::always_inline]] void advance(std::int64_t pairs) {
    const std::int64_t end = std::min(done + pairs, kBlock / 2);
    for (; done < end; ++done) {
      const auto even0 = one(0, 2 * done, lse0, delta0);
      const auto even1 = one(1, 2 * done, lse1, delta1);
      const auto odd0 = one(0, 2 * done + 1, lse0, delta0);
      const auto odd1 = one(1, 2 * done + 1, lse1, delta1);
      store(2 * done, even0, even1);
      store(2 * done + 1, odd0, odd1);
      M::store_pair(ds_pairs0 + done * kPanel, even0.ds, odd0.ds);
      M::store_pair(ds_pairs1 + done * kPanel, even1.ds, odd1.ds);
    }
  }

 private:
  struct One {
    F p, ds;
  };
  [[gnu::always_inline]] One one(std::int64_t panel, std::int64_t key, F lse, F delta) const {
    const std::int64_t at = (panel * kBlock + key) * kPanel;
    const auto weight = forward_bf16::exp2_of<M>(M::fma(M::load(from.s + at), scale, lse));
    return {weight, M::mul(weight, M::sub(M::load(from.dp + at), delta))};
  }
  [[gnu::always_inline]] void store(std::int64_t key, const One& low, const One& high) const {
    M::store_row(p + key * kBlock, low.p, high.p);
    M::store_row(ds + key * kBlock, low.ds, high.ds);
  }
};

/// Softcap and mask on a panel of a block, in place: S becomes the exponent, −∞ where a row does
/// not see a key, and dP becomes dS / P, 0 there. visible: [2][16], first and last key of each row.
template <typename M>
inline void adjust(const Run& run, const std::int32_t* visible, typename M::F lse,
                   typename M::F delta, float* s, float* dp) {
  const auto first = M::load_i(visible);
  const auto last = M::load_i(visible + kPanel);
  for (std::int64_t key = 0; key < kBlock; ++key) {
    auto score = M::load(s + key * kPanel);
    auto slope = M::sub(M::load(dp + key * kPanel), delta);
    if (run.capped_input != 0) {
      score = forward_bf16::tanh_of<M>(M::mul(score, M::set(run.capped_input)));
      slope = M::mul(slope, M::sub(M::set(1.0f), M::mul(score, score)));
    }
    const auto sees = M::within(first, last, static_cast<std::int32_t>(key));
    M::store(s + key * kPanel, M::select(sees, M::fma(score, M::set(run.scale_log2), lse),
                                         M::set(forward_bf16::kMinusInfinity)));
    M::store(dp + key * kPanel, M::select(sees, slope, M::set(0.0f)));
  }
}

}  // namespace rafter::backward_bf16
