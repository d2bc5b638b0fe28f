// Products of packed weights with up to eight rows x, for the kernels of that: values become pairs
// of x's dtype, exactly, by masks; mma.sync with 16 rows of the weight as A and the rows of x as B,
// so that one row of x costs what eight do. int4 scales each group's sum, 8 bits each row's; x lies
// in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "hw/cuda/mma.cuh"
#include "kernels/cuda/packed_rows.cuh"

namespace rafter::cuda {

/// Bytes of a row of x in shared memory: 64 more than a multiple of 128, so that the eight lanes of
/// one phase of a load meet all banks once.
constexpr std::int64_t x_pitch(std::int64_t k) { return (k * 2 + 127) / 128 * 128 + 64; }

/// a − b and a · b of two pairs.
template <DType kX>
__device__ std::uint32_t subtract(std::uint32_t a, std::uint32_t b) {
  if constexpr (kX == DType::bf16) {
    const __nv_bfloat162 d = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const std::uint32_t*>(&d);
  } else {
    const __half2 d =
        __hsub2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const std::uint32_t*>(&d);
  }
}
template <DType kX>
__device__ std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  if constexpr (kX == DType::bf16) {
    const __nv_bfloat162 d = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const std::uint32_t*>(&d);
  } else {
    const __half2 d =
        __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const std::uint32_t*>(&d);
  }
}

/// 128 in each half of a pair, of f16 1024: the last bits of the mantissa count ones.
template <DType kX>
constexpr std::uint32_t kOnes = kX == DType::bf16 ? 0x43004300u : 0x64006400u;

/// (a & mask) | bits, one instruction. PTX ISA: lop3.
__device__ inline std::uint32_t and_or(std::uint32_t a, std::uint32_t mask, std::uint32_t bits) {
  std::uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

/// A of one mma from a word of eight int4: nibbles i and i + 4 are v + 8 of pair i.
template <DType kX>
__device__ void unpack_int4(std::uint32_t word, std::uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = subtract<kX>(and_or(word >> (4 * i), 0x000f000fu, kOnes<kX>), kOnes<kX> + 0x00080008u);
  }
}

/// A pair of row g and one of row g + 8 from a word of four int8: ±(128 + |v|) ∓ 128.
template <DType kX>
__device__ void unpack_int8(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
  const auto pair = [](std::uint32_t w) {
    return subtract<kX>(and_or(w, 0x807f807fu, kOnes<kX>), and_or(w, 0x80008000u, kOnes<kX>));
  };
  low = pair(word);
  high = pair(__byte_perm(word, 0, 0x2301));
}

/// The same of four e4m3: exponent and mantissa shifted to where the dtype has them, then the
/// difference of the exponents' biases. Subnormals come out right: they are of both formats.
template <DType kX>
__device__ void unpack_e4m3(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
  constexpr int kShift = kX == DType::bf16 ? 4 : 1;
  constexpr std::uint32_t kMagnitude = kX == DType::bf16 ? 0x07f007f0u : 0x3f803f80u;
  constexpr std::uint32_t kBias = kX == DType::bf16 ? 0x7b807b80u : 0x5c005c00u;  // 2^120, 2^8
  const auto pair = [](std::uint32_t w) {
    return multiply<kX>(and_or(w, 0x80008000u, w >> kShift & kMagnitude), kBias);
  };
  low = pair(word);
  high = pair(word << 8);
}

/// sum += the products of kUnits units; kScales rows of scales lie in front of each. Two chains of
/// sums a unit, so that one mma seldom waits for the one before.
template <DType kX, DType kW, int kScales, int kUnits>
__device__ void multiply_units(const std::uint32_t (&units)[2], const std::uint32_t (&x)[2],
                               int lane, float (&sum)[4]) {
  constexpr int kBlocks = kW == DType::int4 ? 4 : 2;  // of 32 columns
  std::uint32_t words[kUnits][8];
  float chains[kUnits][2][4] = {};
#pragma unroll
  for (int n = 0; n < kUnits; ++n) {
    const std::uint32_t values = units[n] + static_cast<std::uint32_t>(kScales * 32 + lane * 16);
    const uint4 low = load_shared(values), high = load_shared(values + 512);
    const std::uint32_t all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      words[n][i] = all[i];
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int n = 0; n < kUnits; ++n) {
      const uint4 of_x = load_shared(x[n] + b * base::kBlockCols * 2);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        std::uint32_t a[4];
        if constexpr (kW == DType::int4) {
          unpack_int4<kX>(words[n][2 * b + j], a);
        } else if constexpr (kW == DType::int8) {
          unpack_int8<kX>(words[n][4 * b + 2 * j], a[0], a[1]);
          unpack_int8<kX>(words[n][4 * b + 2 * j + 1], a[2], a[3]);
        } else {
          unpack_e4m3<kX>(words[n][4 * b + 2 * j], a[0], a[1]);
          unpack_e4m3<kX>(words[n][4 * b + 2 * j + 1], a[2], a[3]);
        }
        mma_16_8_16<kX>(chains[n][j], a, j == 0 ? of_x.x : of_x.z, j == 0 ? of_x.y : of_x.w);
      }
    }
    constexpr int kShared = kW == DType::int4 ? 4 / std::max(1, kScales) : kBlocks;
    if ((b + 1) % kShared == 0) {
#pragma unroll
      for (int n = 0; n < kUnits; ++n) {
        float scales[2] = {1, 1};
        if constexpr (kW == DType::int4) {
          const std::uint32_t at =
              units[n] + static_cast<std::uint32_t>(b / kShared * 32 + lane / 4 * 2);
          scales[0] = load_shared_scale(at);
          scales[1] = load_shared_scale(at + 16);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[i] = fmaf(scales[i / 2], chains[n][0][i] + chains[n][1][i], sum[i]);
          chains[n][0][i] = chains[n][1][i] = 0;
        }
      }
    }
  }
}

template <DType kX, DType kW, int kScales, int kAllWarps>
class Pairs {
 public:
  static constexpr int kWarps = kAllWarps, kSums = 1;
  static constexpr int kLateBytes = 64 * 1024;
  static constexpr int kBytes = base::kUnitBytes + kScales * 32;

  static constexpr std::int64_t x_bytes(std::int64_t m, std::int64_t k) { return m * x_pitch(k); }

  static __device__ void bring_x(const PackedRowsParams& p, const Shared& at, int thread) {
    if (thread == 0) {
      const auto bytes = static_cast<std::uint32_t>(p.shape.k * 2);
      barrier_arrive_expect(at.x_is_there(), static_cast<std::uint32_t>(p.m) * bytes);
      for (int m = 0; m < p.m; ++m) {
        bulk_load(at.x + m * static_cast<std::uint32_t>(x_pitch(p.shape.k)),
                  static_cast<const std::uint16_t*>(p.x) + m * p.x_stride, bytes, at.x_is_there());
      }
    }
    barrier_wait(at.x_is_there(), 0);
  }

  /// Columns of B past m are the last row again: their sums are not kept.
  __device__ Pairs(std::int64_t k, int m, std::uint32_t x, int lane)
      : lane_(lane),
        x_(x + min(lane / 4, m - 1) * static_cast<std::uint32_t>(x_pitch(k)) + lane % 4 * 16) {}
  __device__ Pairs(const PackedRowsParams& p, std::uint32_t x, int lane)
      : Pairs(p.shape.k, p.m, x, lane) {}

  template <int kUnits>
  __device__ void add(const std::uint32_t (&units)[2], int u, float (&sum)[kSums][4]) const {
    constexpr int kCols = kW == DType::int4 ? 128 : 64;
    const std::uint32_t of_x[2] = {x_ + u * kCols * 2, x_ + (u + kWarps) * kCols * 2};
    multiply_units<kX, kW, kScales, kUnits>(units, of_x, lane_, sum[0]);
  }

  __device__ void keep(const float (&sum)[4], float* sums, int m) const {
    const int g = lane_ / 4, t = lane_ % 4;
    float* const to = sums + 2 * t * kRows + g;
    if (2 * t < m) {
      to[0] = sum[0];
      to[8] = sum[2];
    }
    if (2 * t + 1 < m) {
      to[kRows] = sum[1];
      to[kRows + 8] = sum[3];
    }
  }

 private:
  int lane_;
  std::uint32_t x_;
};

}  // namespace rafter::cuda
