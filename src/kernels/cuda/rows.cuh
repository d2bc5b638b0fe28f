// Rows of tensors eight elements a lane: loads and stores of every dtype, 16 bytes at a time where
// the tensor allows it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "kernels/cuda/rows.h"

namespace rafter::cuda {

inline constexpr int kRowWidth = 8;  // elements of a lane

/// a / b of counts; where both fit, by the division of 32 bits, which is a third of the other's.
__device__ inline std::int64_t quotient(std::int64_t a, std::int64_t b) {
  return (a | b) >> 32 == 0 ? static_cast<unsigned>(a) / static_cast<unsigned>(b) : a / b;
}

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

/// Eight elements as they lie in memory: of 16 bits each, or of 32.
template <bool kWide>
struct Raw {
  uint4 words[kWide ? 2 : 1] = {};
};

/// The elements from `at` on; those at or past `count` are 0.
template <bool kWide>
__device__ Raw<kWide> load_raw(const Rows& rows, std::int64_t at, int count) {
  using Element = std::conditional_t<kWide, std::uint32_t, std::uint16_t>;
  const auto* const from = static_cast<const Element*>(rows.data) + at;
  Raw<kWide> raw;
  if (rows.in_vectors && count == kRowWidth) {
#pragma unroll
    for (int i = 0; i < (kWide ? 2 : 1); ++i) {
      raw.words[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    return raw;
  }
  Element elements[kRowWidth];
#pragma unroll
  for (int i = 0; i < kRowWidth; ++i) {
    elements[i] = i < count ? from[i] : Element{0};
  }
  memcpy(&raw, elements, sizeof(raw));
  return raw;
}

/// The first `count` of them to where `rows` has the same dtype.
template <bool kWide>
__device__ void store_raw(const Rows& rows, std::int64_t at, int count, const Raw<kWide>& raw) {
  using Element = std::conditional_t<kWide, std::uint32_t, std::uint16_t>;
  auto* const to = static_cast<Element*>(rows.data) + at;
  if (rows.in_vectors && count == kRowWidth) {
#pragma unroll
    for (int i = 0; i < (kWide ? 2 : 1); ++i) {
      reinterpret_cast<uint4*>(to)[i] = raw.words[i];
    }
    return;
  }
  Element elements[kRowWidth];
  memcpy(elements, &raw, sizeof(raw));
#pragma unroll
  for (int i = 0; i < kRowWidth; ++i) {
    if (i < count) {
      to[i] = elements[i];
    }
  }
}

__device__ inline void unpack(DType, const Raw<true>& raw, float (&x)[kRowWidth]) {
  memcpy(x, &raw, sizeof(x));
}
__device__ inline void unpack(DType dtype, const Raw<false>& raw, float (&x)[kRowWidth]) {
  const std::uint32_t pairs[4] = {raw.words[0].x, raw.words[0].y, raw.words[0].z, raw.words[0].w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 two;
    if (dtype == DType::bf16) {
      two.x = __uint_as_float(pairs[i] << 16);
      two.y = __uint_as_float(pairs[i] & 0xffff0000u);
    } else {
      two = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
    }
    x[2 * i] = two.x;
    x[2 * i + 1] = two.y;
  }
}

/// x = the elements from `at` on; those at or past `count` are 0. f32, bf16 or f16.
__device__ inline void load_eight(const Rows& rows, std::int64_t at, int count,
                                  float (&x)[kRowWidth]) {
  if (rows.dtype == DType::f32) {
    unpack(rows.dtype, load_raw<true>(rows, at, count), x);
  } else {
    unpack(rows.dtype, load_raw<false>(rows, at, count), x);
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

/// Eight elements rounded, as they lie in memory.
template <DType kDType>
__device__ Raw<kDType == DType::f32> pack_eight(const float (&x)[kRowWidth]) {
  Raw<kDType == DType::f32> raw;
  if constexpr (kDType == DType::f32) {
    memcpy(&raw, x, sizeof(raw));
  } else {
    raw.words[0] = uint4{pack_pair(kDType, x[0], x[1]), pack_pair(kDType, x[2], x[3]),
                         pack_pair(kDType, x[4], x[5]), pack_pair(kDType, x[6], x[7])};
  }
  return raw;
}

/// One element of an 8-bit dtype: nearest, ties to even, saturating; NaN is 0 in int8.
__device__ inline std::uint32_t to_byte(DType dtype, float x) {
  if (dtype == DType::e4m3) {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  }
  return static_cast<std::uint32_t>(min(max(__float2int_rn(x), -127), 127)) & 0xffu;
}

/// Four of them, the first in the low byte.
__device__ inline std::uint32_t to_bytes(DType dtype, float a, float b, float c, float d) {
  if (dtype == DType::e4m3) {
    const std::uint32_t low = __nv_cvt_float2_to_fp8x2(float2{a, b}, __NV_SATFINITE, __NV_E4M3);
    const std::uint32_t high = __nv_cvt_float2_to_fp8x2(float2{c, d}, __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
  }
  const std::uint32_t low = __byte_perm(to_byte(dtype, a), to_byte(dtype, b), 0x0040);
  const std::uint32_t high = __byte_perm(to_byte(dtype, c), to_byte(dtype, d), 0x0040);
  return __byte_perm(low, high, 0x5410);
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
      static_cast<unsigned char*>(rows.data)[at] =
          static_cast<unsigned char>(to_byte(rows.dtype, x));
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
    *reinterpret_cast<uint2*>(static_cast<unsigned char*>(rows.data) + at) = uint2{
        to_bytes(rows.dtype, x[0], x[1], x[2], x[3]), to_bytes(rows.dtype, x[4], x[5], x[6], x[7])};
  }
}

/// Two ulp of f32 away at most; 1 + exp(−x) beyond 2^126 gives 0, which the limit is.
__device__ inline float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

}  // namespace rafter::cuda
