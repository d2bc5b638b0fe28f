// Device code that the kernels over landed scores share: sequences, masks, conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/scores.h"
#include "tiles/key_range.h"

namespace rafter::cuda {

inline constexpr float kLog2E = 1.44269504088896341f;
using ScoreMask = tiles::BasicMaskWindow<int>;

/// One sequence: lengths, and where its rows start (packed; else 0).
struct ScoreSequence {
  int seqlen_q, seqlen_kv;
  std::int64_t row_q, row_kv;
  std::int64_t batch;  // of the tensors: 0 where rows are packed
};

__device__ inline ScoreSequence sequence_of(const ScoreProblem& p, std::int64_t b) {
  ScoreSequence s{p.seqlen_q, p.seqlen_kv, 0, 0, b};
  if (p.cu_seqlens_q.data != nullptr) {
    s.row_q = index_at(p.cu_seqlens_q, b);
    s.row_kv = index_at(p.cu_seqlens_kv, b);
    s.seqlen_q = clamped_length(index_at(p.cu_seqlens_q, b + 1) - s.row_q, p.seqlen_q);
    s.seqlen_kv = clamped_length(index_at(p.cu_seqlens_kv, b + 1) - s.row_kv, p.seqlen_kv);
    s.batch = 0;
  }
  if (p.seqused_kv.data != nullptr) {
    s.seqlen_kv = clamped_length(index_at(p.seqused_kv, b), s.seqlen_kv);
  }
  return s;
}

__device__ inline tiles::PairOrder::Pair pair_at(const ScoreProblem& p, std::int64_t index) {
  return tiles::PairOrder{p.batch, p.heads_q, p.batch_fastest}.at(index);
}

__device__ inline ScoreMask mask_of(const ScoreProblem& p, const ScoreSequence& s) {
  return {p.window_left, p.window_right, p.top_left ? 0 : s.seqlen_kv - s.seqlen_q, s.seqlen_kv};
}

/// Two packed 16-bit elements as floats, the low one first.
template <DType kDType>
__device__ inline float2 unpack(std::uint32_t pair) {
  if constexpr (kDType == DType::bf16) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else {
    __half2 halves;
    memcpy(&halves, &pair, sizeof pair);
    return __half22float2(halves);
  }
}

/// Two packed −∞.
template <DType kDType>
__device__ constexpr std::uint32_t minus_infinities() {
  return kDType == DType::bf16 ? 0xff80ff80u : 0xfc00fc00u;
}

/// The larger of either two of 16 bits; a NaN loses.
template <DType kDType>
__device__ inline std::uint32_t pairwise_max(std::uint32_t a, std::uint32_t b) {
  using Pair = std::conditional_t<kDType == DType::bf16, __nv_bfloat162, __half2>;
  Pair x, y;
  memcpy(&x, &a, sizeof x);
  memcpy(&y, &b, sizeof y);
  x = __hmax2(x, y);
  memcpy(&a, &x, sizeof a);
  return a;
}

/// softcap · tanh(score / softcap), tanh(x) = 1 − 2 / (e^2x + 1).
__device__ inline float capped(const ScoreProblem& p, float score) {
  return p.cap * (1.0f - __fdividef(2.0f, exp2_approx(score * p.cap_exponent) + 1.0f));
}

/// exp(score − top), in log2 units.
__device__ inline float weight(float score, float top) {
  return exp2_approx((score - top) * kLog2E);
}

/// A maximum that can be subtracted: a row that sees nothing yet has none.
__device__ inline float finite_top(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

/// Where the lse of a row goes; null when it is not wanted.
__device__ inline float* lse_at(const LseTarget& lse, const ScoreSequence& s, std::int64_t head,
                                int row) {
  return lse.data == nullptr ? nullptr
                             : lse.data + s.batch * lse.stride_batch + head * lse.stride_heads +
                                   (s.row_q + row) * lse.stride_seqlen;
}

__device__ inline void store_lse(const LseTarget& lse, const ScoreSequence& s, std::int64_t head,
                                 int row, float value) {
  if (float* const at = lse_at(lse, s, head, row); at != nullptr) {
    *at = value;
  }
}

/// lse of a row with `keys` visible keys. All scores −∞: NaN, as for any infinity among them.
__device__ inline float lse_of(int keys, float maximum, float sum) {
  return keys == 0 ? -INFINITY : sum == 0 ? NAN : maximum + logf(sum);
}
/// What a row's weights are multiplied by.
__device__ inline float inverse_of(int keys, float sum) {
  return keys == 0 ? 0.0f : sum == 0 ? NAN : 1.0f / sum;
}

}  // namespace rafter::cuda
