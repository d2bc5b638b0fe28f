// The softmax of forward_sm90: what happens to the scores of one key tile in a thread's registers.
// Fragments as wgmma leaves them: element 4i + 2h + e is row h of the thread's two.
#pragma once

#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/forward_sm90_tiles.cuh"

namespace rafter::cuda {

/// State of one query row pair (rows lane/4 and lane/4 + 8 of a warp's 16) of a thread.
struct RowState {
  float max[2], sum[2], rescale[2];
};

/// 1 / x within 1 ulp; 0 beyond 2^126. PTX ISA: rcp.approx.
__device__ inline float reciprocal_approx(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Softcap, or a scale that is not positive: raw scores become scores in log2 units.
template <int kScores>
__device__ inline void transform_scores(const ForwardParams& params, float (&s)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    s[i] *= params.transform_scale;
    if (params.transform_cap > 0) {  // tanh(x) = 1 − 2 / (e^2x + 1)
      const float part = reciprocal_approx(exp2_approx(s[i]) + 1.0f);
      s[i] = fmaf(-2.0f * params.transform_cap, part, params.transform_cap);
    }
  }
}

/// Of a thread's 32 keys 8i + e (e = 0, 1): bit 2i + e is set for those before `key`.
__device__ inline std::uint32_t keys_before(int key) {
  const std::uint32_t k = static_cast<std::uint32_t>(max(key, 0));
  const std::uint32_t count = min(k / 8 * 2 + min(k % 8, 2u), 32u);
  return static_cast<std::uint32_t>((std::uint64_t{1} << count) - 1);
}

/// A test of a constant bit costs a fraction of two comparisons per score.
template <int kScores>
__device__ inline void mask_scores(const ForwardParams& params, const TileWork& work,
                                   float (&s)[kScores], int query, int column) {
  static_assert(kScores <= 64);
  const Mask32 mask = mask_of(params, work);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Mask32::Range keys = mask.row(query + 8 * h);
    const std::uint32_t seen = keys_before(keys.last - column) & ~keys_before(keys.first - column);
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = s[4 * i + 2 * h + e];
        score = (seen & 1u << (2 * i + e)) != 0 ? score : -INFINITY;
      }
    }
  }
}

/// Scores become probabilities relative to the running maximum; the sum follows. Both rows of the
/// thread advance together: the chains of one hide the latencies of the other.
template <int kScores>
__device__ inline void softmax(float (&s)[kScores], RowState& rows, float scale) {
  float max[2] = {rows.max[0], rows.max[1]};
#pragma unroll
  for (int i = 0; i < kScores; i += 2) {
    max[i / 2 % 2] = fmaxf(max[i / 2 % 2], fmaxf(s[i], s[i + 1]));
  }
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
    const float other[2] = {__shfl_xor_sync(~0u, max[0], lanes),
                            __shfl_xor_sync(~0u, max[1], lanes)};
    max[0] = fmaxf(max[0], other[0]);
    max[1] = fmaxf(max[1], other[1]);
  }
  float offset[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float finite = max[h] == -INFINITY ? 0.0f : max[h];  // a row that sees nothing yet
    rows.rescale[h] = exp2_approx((rows.max[h] - finite) * scale);
    rows.max[h] = max[h];
    offset[h] = finite * scale;
  }
  // The sums start from the last exponential: additions in between would hold up the others.
  float sum[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    s[i] = exp2_approx(fmaf(s[i], scale, -offset[i / 2 % 2]));
  }
#pragma unroll
  for (int i = kScores - 1; i >= 0; --i) {
    sum[i % 4] += s[i];
  }
  rows.sum[0] = fmaf(rows.sum[0], rows.rescale[0], sum[0] + sum[1]);
  rows.sum[1] = fmaf(rows.sum[1], rows.rescale[1], sum[2] + sum[3]);
}

template <DType kDType, int kScores>
__device__ inline void pack_probabilities(std::uint32_t (&p)[kScores / 2],
                                          const float (&s)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    p[i] = pack<kDType>(s[2 * i], s[2 * i + 1]);
  }
}

template <int kOutputs>
__device__ inline void rescale_outputs(float (&o)[kOutputs], const RowState& rows) {
  // Most tiles raise no maximum, and a factor of 1 changes no bit.
  if (!__any_sync(~0u, rows.rescale[0] != 1.0f || rows.rescale[1] != 1.0f)) {
    return;
  }
#pragma unroll
  for (int i = 0; i < kOutputs / 4; ++i) {
    o[4 * i] *= rows.rescale[0];
    o[4 * i + 1] *= rows.rescale[0];
    o[4 * i + 2] *= rows.rescale[1];
    o[4 * i + 3] *= rows.rescale[1];
  }
}

}  // namespace rafter::cuda
