// y = x weightᵀ + bias for up to eight rows x: what a decode step multiplies with.
// x [m, k] in bf16 or f16, weight [n, k] packed in 8 or 4 bits an element
// (src/base/packed_weight.h), y [m, n] in x's dtype or f32, sums in f32.
// The wall is bandwidth: 2 m FLOP for each weight of one byte or half. kernels/cuda/packed_rows.cuh
// has the schedule. Here values become pairs of x's dtype, exactly, by masks; mma.sync with 16 rows
// of the weight as A and the rows of x as B, so that one row of x costs what eight do. int4 scales
// each group's sum, 8 bits each row's; x lies in shared memory. One or two rows and int4 have
// inst/packed_digits.cu. The bits are the same with every run, and a row's do not depend on the
// other rows.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "hw/cuda/early.h"
#include "hw/cuda/mma.cuh"
#include "kernels/cuda/packed_rows.cuh"

namespace rafter::cuda {
namespace {

constexpr int kPairWarps = 8;

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
__device__ std::uint32_t and_or(std::uint32_t a, std::uint32_t mask, std::uint32_t bits) {
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

template <DType kX, DType kW, int kScales>
class Pairs {
 public:
  static constexpr int kWarps = kPairWarps, kSums = 1;
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
  __device__ Pairs(const PackedRowsParams& p, std::uint32_t x, int lane)
      : lane_(lane),
        x_(x + min(lane / 4, p.m - 1) * static_cast<std::uint32_t>(x_pitch(p.shape.k)) +
           lane % 4 * 16) {}

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

template <DType kX, DType kW, int kScales>
__global__ void __launch_bounds__(threads_of(kPairWarps), 2)
    packed_rows(const __grid_constant__ PackedRowsParams p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  multiply_rows<Pairs<kX, kW, kScales>>(p, shared);
}

template <DType kX>
const void* kernel_of(const base::PackedShape& weight) {
  switch (weight.dtype) {
    case DType::int4:
      return weight.group_size == 128
                 ? reinterpret_cast<const void*>(&packed_rows<kX, DType::int4, 1>)
             : weight.group_size == 64
                 ? reinterpret_cast<const void*>(&packed_rows<kX, DType::int4, 2>)
                 : reinterpret_cast<const void*>(&packed_rows<kX, DType::int4, 4>);
    case DType::int8:
      return reinterpret_cast<const void*>(&packed_rows<kX, DType::int8, 0>);
    default:
      return reinterpret_cast<const void*>(&packed_rows<kX, DType::e4m3, 0>);
  }
}

Ring pairs_ring(std::int64_t m, const base::PackedShape& shape) {
  return ring_of(kPairWarps, kPairWarps, m, m * x_pitch(shape.k), shape);
}

}  // namespace

bool packed_rows_takes(std::int64_t m, const base::PackedShape& shape) {
  return m <= kMostPackedRows && shape.k < (std::int64_t{1} << 20) &&
         pairs_ring(m, shape).stages >= kFewestStages;
}

Status launch_packed_rows(PackedRowsParams params, void* stream) {
  if (packed_digits_takes(params.m, params.shape)) {
    return launch_packed_digits(params, stream);
  }
  const Result<int> sms = sm_count();
  if (!sms) {
    return sms.status();
  }
  const Ring ring = pairs_ring(params.m, params.shape);
  params.stages = static_cast<int>(ring.stages);
  void* arguments[] = {&params};
  const void* const kernel = params.dtype == DType::bf16 ? kernel_of<DType::bf16>(params.shape)
                                                         : kernel_of<DType::f16>(params.shape);
  return launch_early(kernel,
                      {.blocks = static_cast<unsigned>(std::min<std::int64_t>(
                           *sms * (ring.is_share ? 2 : 1), params.shape.n / kRows)),
                       .threads = threads_of(kPairWarps),
                       .shared_bytes = static_cast<unsigned>(ring.shared_bytes),
                       .stream = stream},
                      arguments);
}

}  // namespace rafter::cuda
