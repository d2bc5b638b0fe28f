// Rows of tensors eight elements a lane: loads and stores of every dtype, 16 bytes at a time where
// the tensor allows it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/rows.h"

namespace rafter::cuda {

inline constexpr int kRowWidth = 8;  // elements of a lane

/// Elements of a lane that there are, of a row of `size`.
__device__ inline int lane_elements(int first, int size) {
  return min(max(size - first, 0), kRowWidth);
}

__device__ inline float element(const Rows& rows, std::int64_t at) {
  switch (rows.dtype) {
    case DType::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(rows.data)[at]);
    case DType::f16:
      return __half2float(static_cast<const __half*>(rows.data)[at]);
    default:
      return static_cast<const float*>(rows.data)[at];
  }
}

/// x = the elements from `at` on; those at or past `count` are 0. f32, bf16 or f16.
__device__ inline void load_eight(const Rows& rows, std::int64_t at, int count,
                                  float (&x)[kRowWidth]) {
  if (!rows.in_vectors || count < kRowWidth) {
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      x[i] = i < count ? element(rows, at + i) : 0.0f;
    }
    return;
  }
  if (rows.dtype == DType::f32) {
    const auto* const from =
        reinterpret_cast<const float4*>(static_cast<const float*>(rows.data) + at);
    const float4 low = from[0], high = from[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    return;
  }
  const uint4 bits =
      *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(rows.data) + at);
  const std::uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 two;
    if (rows.dtype == DType::bf16) {
      two.x = __uint_as_float(pairs[i] << 16);
      two.y = __uint_as_float(pairs[i] & 0xffff0000u);
    } else {
      two = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
    }
    x[2 * i] = two.x;
    x[2 * i + 1] = two.y;
  }
}

/// Two rounded elements of a 16-bit dtype, the first in the low half.
__device__ inline std::uint32_t pack_pair(DType dtype, float low, float high) {
  if (dtype == DType::bf16) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&two);
  }
  const __half2 two = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&two);
}

/// One element of an 8-bit dtype: nearest, ties to even, saturating; NaN is 0 in int8.
__device__ inline unsigned char to_byte(DType dtype, float x) {
  if (dtype == DType::e4m3) {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  }
  const float whole = fminf(fmaxf(rintf(x == x ? x : 0.0f), -127.0f), 127.0f);
  return static_cast<unsigned char>(static_cast<signed char>(whole));
}

__device__ inline void store_element(const Rows& rows, std::int64_t at, float x) {
  switch (rows.dtype) {
    case DType::bf16:
      static_cast<__nv_bfloat16*>(rows.data)[at] = __float2bfloat16_rn(x);
      break;
    case DType::f16:
      static_cast<__half*>(rows.data)[at] = __float2half_rn(x);
      break;
    case DType::f32:
      static_cast<float*>(rows.data)[at] = x;
      break;
    default:
      static_cast<unsigned char*>(rows.data)[at] = to_byte(rows.dtype, x);
  }
}

/// The first `count` of x from `at` on, in any dtype.
__device__ inline void store_eight(const Rows& rows, std::int64_t at, int count,
                                   const float (&x)[kRowWidth]) {
  if (!rows.in_vectors || count < kRowWidth) {
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      if (i < count) {
        store_element(rows, at + i, x[i]);
      }
    }
    return;
  }
  if (rows.dtype == DType::f32) {
    auto* const to = reinterpret_cast<float4*>(static_cast<float*>(rows.data) + at);
    to[0] = float4{x[0], x[1], x[2], x[3]};
    to[1] = float4{x[4], x[5], x[6], x[7]};
  } else if (rows.dtype == DType::bf16 || rows.dtype == DType::f16) {
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(rows.data) + at) =
        uint4{pack_pair(rows.dtype, x[0], x[1]), pack_pair(rows.dtype, x[2], x[3]),
              pack_pair(rows.dtype, x[4], x[5]), pack_pair(rows.dtype, x[6], x[7])};
  } else {
    std::uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      words[i / 4] |= static_cast<std::uint32_t>(to_byte(rows.dtype, x[i])) << (8 * (i % 4));
    }
    *reinterpret_cast<uint2*>(static_cast<unsigned char*>(rows.data) + at) =
        uint2{words[0], words[1]};
  }
}

}  // namespace rafter::cuda
