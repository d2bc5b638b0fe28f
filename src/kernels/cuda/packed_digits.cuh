// Products of int4 with one or two rows x as products of integers, for the kernels of that.
// Widening eight int4 to pairs of 16 bits takes seven instructions and four more to take an offset
// away; to bytes it takes three. So it is x that is taken apart, once a CTA: of each 256 columns a
// row's elements are integers of 23 bits times a power of two, in three signed bytes ("digits"),
// each a column of B. The products of int4 and digits, and the sum of a group of them, are exact;
// sums of groups times scales are in f32. An element of x becomes a multiple of 2^-22 of the
// largest of its 256 columns, or closer.
#pragma once

#include "kernels/cuda/packed_rows.cuh"

namespace rafter::cuda {

inline constexpr int kDigits = 3;
inline constexpr int kMostDigitRows = 2;  // three columns of B each, four apart
inline constexpr int kUnitCols = 128;

/// Bytes of a plane, one digit of a row: 64 more than a multiple of 128, so that the eight lanes of
/// one phase of a load meet all banks once.
constexpr std::int64_t plane_pitch(std::int64_t k) { return k + 64; }
constexpr std::int64_t digits_bytes(std::int64_t m, std::int64_t k) {
  return m * kDigits * plane_pitch(k) + k / kUnitCols * 16;
}

/// d = A B + c of a tile of 16 rows and 32 columns of bytes. PTX ISA: mma.sync.m16n8k32.
__device__ inline void mma_16_8_32(std::int32_t (&d)[4], const std::uint32_t (&a)[4],
                                   std::uint32_t b0, std::uint32_t b1, const std::int32_t (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}

/// 16 v of the codes v + 8 in the upper halves of bytes, one instruction. PTX ISA: lop3.
__device__ inline std::uint32_t upper_codes(std::uint32_t word) {
  std::uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(word), "r"(0xf0f0f0f0u), "r"(0x80808080u));
  return d;
}

__device__ inline void store_shared(std::uint32_t address, std::uint32_t a, std::uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
__device__ inline float load_shared_f32(std::uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

/// Of integers below 2^22 as f32: their sum with it has them in its last bits.
inline constexpr float kMagic = 12582912.0f;  // 3 · 2^22
inline constexpr std::uint32_t kMagicBits = 0x4b400000u;

/// The digits of four columns, of each a word; they lie in the order in which packed codes do,
/// columns 0, 2, 1, 3.
__device__ inline void digits_of(const float (&x)[4], float factor,
                                 std::uint32_t (&digits)[kDigits]) {
  std::uint32_t u[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // signed bytes: carry from the lower ones
    u[i] = (__float_as_uint(fmaf(x[i], factor, kMagic)) + (0x00008080u - kMagicBits)) ^ 0x00008080u;
  }
  const std::uint32_t even = __byte_perm(u[0], u[2], 0x5140), odd = __byte_perm(u[1], u[3], 0x5140);
  digits[0] = __byte_perm(even, odd, 0x5410);
  digits[1] = __byte_perm(even, odd, 0x7632);
  digits[2] = __byte_perm(__byte_perm(u[0], u[2], 0x7362), __byte_perm(u[1], u[3], 0x7362), 0x5410);
}

/// Takes eight columns of x apart, a warp 256. `factors`: of each unit four words, what
/// the sums of a lane t are multiplied with.
template <DType kX>
__device__ void take_apart(const Raw<false>& raw, std::uint32_t plane, std::uint32_t pitch,
                           std::uint32_t factors, int row, int chunk, bool exists) {
  // Magnitudes order as their bits do.
  const uint4 words = raw.words[0];
  std::uint32_t pair = __vmaxu2(__vmaxu2(words.x & 0x7fff7fffu, words.y & 0x7fff7fffu),
                                __vmaxu2(words.z & 0x7fff7fffu, words.w & 0x7fff7fffu));
  pair = __reduce_max_sync(0xffffffffu, max(pair & 0xffffu, pair >> 16));
  const std::uint32_t largest =
      kX == DType::bf16
          ? pair << 16
          : __float_as_uint(__half2float(__ushort_as_half(static_cast<unsigned short>(pair))));
  float x[kRowWidth];
  unpack(kX, raw, x);
  // 2^up puts the largest into [2^21, 2^22).
  const int exponent = static_cast<int>(largest >> 23);
  const int up = min(127 + 21 - exponent, 120);
  const float factor = __uint_as_float(static_cast<std::uint32_t>(127 + up) << 23);
  std::uint32_t digits[2][kDigits];
  const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
  digits_of(low, factor, digits[0]);
  digits_of(high, factor, digits[1]);
  if (!exists) {
    return;
  }
  const int unit = chunk / 16, block = chunk % 16 / 4, t = chunk % 4;
  const auto to = plane + static_cast<std::uint32_t>(unit * kUnitCols + block / 2 * 64 + t * 16 +
                                                     block % 2 * 8);
#pragma unroll
  for (int d = 0; d < kDigits; ++d) {
    store_shared(to + d * pitch, digits[0][d], digits[1][d]);
  }
  if (chunk % 16 == 0) {  // 16 of the codes; 65536 of the third digit; NaN where x is not finite
    const float down = __uint_as_float(
        exponent == 255 ? 0x7fc00000u : static_cast<std::uint32_t>(127 - 4 - up) << 23);
    store_shared(factors + static_cast<std::uint32_t>(unit * 16 + row * 8), __float_as_uint(down),
                 __float_as_uint(down * 65536.0f));
  }
}

/// Of kAllWarps warps, each with kAllSums sums: their product says the order, and the bits.
template <DType kX, int kScales, int kAllWarps, int kAllSums>
class Digits {
 public:
  static constexpr int kWarps = kAllWarps, kSums = kAllSums;
  static constexpr int kConsumers = kWarps * 32;
  static constexpr int kLateBytes = 100 * 1024;
  static constexpr int kBytes = base::kUnitBytes + kScales * 32;

  static constexpr std::int64_t x_bytes(std::int64_t m, std::int64_t k) {
    return digits_bytes(m, k);
  }

  static __device__ void bring_x(const PackedRowsParams& p, const Shared& at, int thread) {
    constexpr int kTogether = 3;  // loads under way, of a thread
    const auto pitch = static_cast<std::uint32_t>(plane_pitch(p.shape.k));
    const std::uint32_t factors = at.x + static_cast<std::uint32_t>(p.m) * kDigits * pitch;
    const int chunks = static_cast<int>(p.shape.k / kRowWidth);
    for (int row = 0; row < p.m; ++row) {
      const auto* const from =
          reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.x) + row * p.x_stride);
      for (int first = thread; first - thread < chunks; first += kTogether * kConsumers) {
        Raw<false> raw[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first + i * kConsumers < chunks) {
            raw[i].words[0] = __ldcg(from + first + i * kConsumers);
          }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first - thread + i * kConsumers < chunks) {
            const int chunk = first + i * kConsumers;
            take_apart<kX>(raw[i], at.x + row * kDigits * pitch, pitch, factors, row, chunk,
                           chunk < chunks);
          }
        }
      }
    }
    named_barrier_sync(1, kConsumers);
  }

  /// Columns of B that no digit has are others again: their sums are not kept.
  __device__ Digits(std::int64_t k, int m, std::uint32_t x, int lane) : lane_(lane) {
    const auto pitch = static_cast<std::uint32_t>(plane_pitch(k));
    const int g = lane / 4, t = lane % 4;
    const int plane = min(g / 4, m - 1) * kDigits + min(g % 4, kDigits - 1);
    x_ = x + plane * pitch + t * 16;
    factors_ = x + static_cast<std::uint32_t>(m) * kDigits * pitch + (t / 2 < m ? t : t % 2) * 4;
  }
  __device__ Digits(const PackedRowsParams& p, std::uint32_t x, int lane)
      : Digits(p.shape.k, p.m, x, lane) {}

  /// sum[n] += the products of unit u + n kStep, which lies at units[n].
  template <int kUnits, int kStep>
  __device__ void add_units(const std::uint32_t* units, int u, float (*sum)[4]) const {
    constexpr int kBlocks = 4 / kScales;  // of 32 columns, that share a scale
    constexpr std::int32_t kStart[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
#pragma unroll
    for (int n = 0; n < kUnits; ++n) {
      const std::uint32_t values = units[n] + static_cast<std::uint32_t>(kScales * 32 + lane_ * 16),
                          of_x = x_ + (u + n * kStep) * kUnitCols;
      const float factor = load_shared_f32(factors_ + (u + n * kStep) * 16);
      std::int32_t products[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 w = load_shared(values + half * 512), x = load_shared(of_x + half * 64);
        const std::uint32_t words[4] = {w.x, w.y, w.z, w.w}, digits[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int b = 2 * half + j;
          const std::uint32_t a[4] = {upper_codes(words[2 * j] << 4), upper_codes(words[2 * j]),
                                      upper_codes(words[2 * j + 1] << 4),
                                      upper_codes(words[2 * j + 1])};
          if (b % kBlocks == 0) {
            mma_16_8_32(products, a, digits[2 * j], digits[2 * j + 1], kStart);
          } else {
            mma_16_8_32(products, a, digits[2 * j], digits[2 * j + 1], products);
          }
          if ((b + 1) % kBlocks == 0) {
            const std::uint32_t at =
                units[n] + static_cast<std::uint32_t>(b / kBlocks * 32 + lane_ / 4 * 2);
            const float scales[2] = {load_shared_scale(at) * factor,
                                     load_shared_scale(at + 16) * factor};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sum[n][i] = fmaf(scales[i / 2], __int_as_float(products[i]) - kMagic, sum[n][i]);
            }
          }
        }
      }
    }
  }

  template <int kUnits>
  __device__ void add(const std::uint32_t (&units)[2], int u, float (&sum)[kSums][4]) const {
    add_units<kUnits, kWarps>(units, u, sum);
  }

  /// Digits 0 and 1 of a row are lane t's of even t, 2 that of the lane behind it.
  __device__ void keep(const float (&sum)[4], float* sums, int m) const {
    const int g = lane_ / 4, t = lane_ % 4;
    const float second = t % 2 == 0 ? 256.0f : 0.0f;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float all = sum[2 * upper];
      if (t % 2 == 0) {
        all = fmaf(sum[2 * upper + 1], second, all);
      }
      all += __shfl_xor_sync(0xffffffffu, all, 1);
      if (t % 2 == 0 && t / 2 < m) {
        sums[t / 2 * kRows + upper * 8 + g] = all;
      }
    }
  }

 private:
  int lane_;
  std::uint32_t x_, factors_;
};

}  // namespace rafter::cuda
