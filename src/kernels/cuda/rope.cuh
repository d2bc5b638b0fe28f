// RoPE of rows, as append and rope turn them: products and sums are rounded one by one, as on the
// CPU, so that all of them give the same bits.
#pragma once

#include "kernels/cuda/rope.h"
#include "kernels/cuda/rows.cuh"

namespace rafter::cuda {

/// x turned; y is its partner, and `second` says which of the pair x is.
__device__ inline float turned(float x, float y, float cos, float sin, bool second) {
  const float along = __fmul_rn(x, cos), across = __fmul_rn(y, sin);
  return second ? __fadd_rn(along, across) : __fsub_rn(along, across);
}
__device__ inline void turn_pair(float& first, float& second, float cos, float sin) {
  const float x = first, y = second;
  first = turned(x, y, cos, sin, false);
  second = turned(y, x, cos, sin, true);
}

/// cos and sin of eight pairs.
struct Angles {
  float cos[kRowWidth], sin[kRowWidth];
};

__device__ inline void load_table(const float* from, bool in_vectors, float (&x)[kRowWidth]) {
  if (in_vectors) {
    const float4 low = __ldg(reinterpret_cast<const float4*>(from));
    const float4 high = __ldg(reinterpret_cast<const float4*>(from) + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < kRowWidth; ++i) {
    x[i] = __ldg(from + i);
  }
}

/// Of the pairs from `pair` on, a multiple of eight; rotary_dim is one of sixteen.
__device__ inline void load_angles(const RopeTables& tables, std::int64_t position, int pair,
                                   Angles& angles) {
  const std::int64_t at = position * (tables.rotary_dim / 2) + pair;
  load_table(tables.cos + at, tables.in_vectors, angles.cos);
  load_table(tables.sin + at, tables.in_vectors, angles.sin);
}

/// Halves of rows that pair with each other as they lie, and fill them.
__host__ __device__ inline bool halves_pair(const RopeTables& tables, int head_dim) {
  return !tables.interleaved && tables.rotary_dim == head_dim && head_dim % (2 * kRowWidth) == 0;
}

/// A thread's part of kHeads rows of one token: eight elements of each half. All are on their way
/// before one is used, and all angles are those of the first. `at` is where the first half of the
/// first head begins, for this thread.
template <DType kDType, int kHeads>
struct HalfRows {
  static constexpr bool kWide = kDType == DType::f32;
  Raw<kWide> first[kHeads], second[kHeads];

  __device__ void load(const Rows& from, std::int64_t at, int half, int heads) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < heads) {
        first[h] = load_raw<kWide>(from, at + h * from.stride_heads, kRowWidth);
        second[h] = load_raw<kWide>(from, at + h * from.stride_heads + half, kRowWidth);
      }
    }
  }
  __device__ void store(const Rows& to, std::int64_t at, int half, int heads) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < heads) {
        store_raw<kWide>(to, at + h * to.stride_heads, kRowWidth, first[h]);
        store_raw<kWide>(to, at + h * to.stride_heads + half, kRowWidth, second[h]);
      }
    }
  }
  __device__ void turn(const Angles& angles) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float x[kRowWidth], y[kRowWidth];
      unpack(kDType, first[h], x);
      unpack(kDType, second[h], y);
#pragma unroll
      for (int i = 0; i < kRowWidth; ++i) {
        turn_pair(x[i], y[i], angles.cos[i], angles.sin[i]);
      }
      first[h] = pack_eight<kDType>(x);
      second[h] = pack_eight<kDType>(y);
    }
  }
};

}  // namespace rafter::cuda
