// The AVX-512 vectors of forward_bf16_task.h's machine. For kernels with more than AVX-512 to
// offer: included inside their target region, after everything else.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rafter::forward_bf16 {
namespace {

struct Avx512Vectors {
  using F = __m512;
  using I = __m512i;
  using K = __mmask16;

  static F load(const float* from) { return _mm512_load_ps(from); }
  static void store(float* to, F v) { _mm512_store_ps(to, v); }
  static I load_i(const std::int32_t* from) { return _mm512_load_si512(from); }
  static F set(float v) { return _mm512_set1_ps(v); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static K greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static K equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static bool any(K k) { return k != 0; }
  static F select(K k, F yes, F no) { return _mm512_mask_blend_ps(k, no, yes); }
  static K within(I first, I last, std::int32_t key) {
    const I index = _mm512_set1_epi32(key);
    return _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask(first, index), last, index);
  }

  /// x minus the integer below it; 0 of an infinity.
  static F above_floor(F x) {
    constexpr int kFractionAboveFloor = 0x09;
    return _mm512_reduce_ps(x, kFractionAboveFloor);
  }
  /// p · 2^⌊x⌋; 0 where x is −∞.
  static F times_power_of_floor(F p, F x) { return _mm512_scalef_ps(p, x); }

  /// Two rows as pairs of bf16, rounded to nearest.
  static void store_pair(std::uint32_t* to, F even, F odd) {
    const I half = _mm512_set1_epi32(0x8000);
    const I low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const I high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    constexpr int kAndOr = 0xEA;  // (a & b) | c
    _mm512_store_si512(
        to, _mm512_ternarylogic_epi32(high, _mm512_set1_epi32(static_cast<int>(0xffff0000u)), low,
                                      kAndOr));
  }

  /// The same of one row: 32 elements, `low` before `high`.
  static void store_row(std::uint16_t* to, F low, F high) {
    const I half = _mm512_set1_epi32(0x8000);
    const I words =
        _mm512_setr_epi32(0x00030001, 0x00070005, 0x000b0009, 0x000f000d, 0x00130011, 0x00170015,
                          0x001b0019, 0x001f001d, 0x00230021, 0x00270025, 0x002b0029, 0x002f002d,
                          0x00330031, 0x00370035, 0x003b0039, 0x003f003d);  // the odd ones of both
    _mm512_store_si512(
        to, _mm512_permutex2var_epi16(_mm512_add_epi32(_mm512_castps_si512(low), half), words,
                                      _mm512_add_epi32(_mm512_castps_si512(high), half)));
  }
  /// 32 columns of two rows as pairs: 16 columns to `to0`, 16 to `to1`.
  static void interleave(std::uint16_t* to0, std::uint16_t* to1, const std::uint16_t* even,
                         const std::uint16_t* odd) {
    const I first =
        _mm512_setr_epi32(0x00200000, 0x00210001, 0x00220002, 0x00230003, 0x00240004, 0x00250005,
                          0x00260006, 0x00270007, 0x00280008, 0x00290009, 0x002a000a, 0x002b000b,
                          0x002c000c, 0x002d000d, 0x002e000e, 0x002f000f);
    const I second = _mm512_add_epi32(first, _mm512_set1_epi32(0x00100010));
    const I a = _mm512_load_si512(even);
    const I b = _mm512_load_si512(odd);
    _mm512_store_si512(to0, _mm512_permutex2var_epi16(a, first, b));
    _mm512_store_si512(to1, _mm512_permutex2var_epi16(a, second, b));
  }
  /// Whether 32 elements all are.
  static bool are_finite(const std::uint16_t* from) {
    const I magnitude = _mm512_and_si512(_mm512_load_si512(from), _mm512_set1_epi16(0x7fff));
    return _mm512_cmpgt_epu16_mask(magnitude, _mm512_set1_epi16(0x7f7f)) == 0;
  }

  static __mmask32 first_lanes(std::int64_t count) {
    return count >= 32 ? ~__mmask32{0}
                       : static_cast<__mmask32>((1u << std::max<std::int64_t>(count, 0)) - 1u);
  }
  /// row[c … c + 31] where below `end`, else zeros; row may be null.
  static void copy_row(std::uint16_t* to, const std::uint16_t* row, std::int64_t c,
                       std::int64_t end) {
    _mm512_store_si512(to, row == nullptr
                               ? _mm512_setzero_si512()
                               : _mm512_maskz_loadu_epi16(first_lanes(end - c), row + c));
  }

  /// 16 rows of 16 words each, transposed.
  static void transpose(I (&r)[16]) {
    I t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    constexpr int kEven = 0x88, kOdd = 0xdd;  // 128-bit parts 0 and 2, or 1 and 3, of each operand
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const I a = _mm512_shuffle_i32x4(r[i], r[4 + i], kEven);
      const I b = _mm512_shuffle_i32x4(r[i], r[4 + i], kOdd);
      const I e = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], kEven);
      const I f = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], kOdd);
      t[i] = _mm512_shuffle_i32x4(a, e, kEven);
      t[4 + i] = _mm512_shuffle_i32x4(b, f, kEven);
      t[8 + i] = _mm512_shuffle_i32x4(a, e, kOdd);
      t[12 + i] = _mm512_shuffle_i32x4(b, f, kOdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      r[i] = t[i];
    }
  }
  /// The same in memory; strides in words.
  static void transpose(const std::uint32_t* from, std::int64_t from_stride, std::uint32_t* to,
                        std::int64_t to_stride) {
    I r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      r[i] = _mm512_load_si512(from + i * from_stride);
    }
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      _mm512_store_si512(to + i * to_stride, r[i]);
    }
  }
  /// Columns c … c + 31 of 32 rows (null: zeros), where below `end`, else zeros, to two tiles of 16
  /// columns. False when one is not finite.
  static bool transpose_rows(std::uint16_t* to, const std::uint16_t* const* rows, std::int64_t c,
                             std::int64_t end) {
    const __mmask32 mask = first_lanes(end - c);
    const I magnitude = _mm512_set1_epi16(0x7fff);
    I largest = _mm512_setzero_si512();
    const auto row = [&](int i) {
      const I v =
          rows[i] == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(mask, rows[i] + c);
      largest = _mm512_max_epu16(largest, _mm512_and_si512(v, magnitude));
      return v;
    };
    // words of `low`: columns 8g + t of rows 2i and 2i + 1, g the 128-bit part and t from 0 to 3;
    // of `high` the four columns after those
    I low[16], high[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const I even = row(2 * i);
      const I odd = row(2 * i + 1);
      low[i] = _mm512_unpacklo_epi16(even, odd);
      high[i] = _mm512_unpackhi_epi16(even, odd);
    }
    transpose(low);
    transpose(high);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const int column = i / 4 * 8 + i % 4;
      _mm512_store_si512(to + column * 32, low[i]);
      _mm512_store_si512(to + (column + 4) * 32, high[i]);
    }
    return _mm512_cmpgt_epu16_mask(largest, _mm512_set1_epi16(0x7f7f)) == 0;
  }

  /// `count` elements, at most 16, then zeros.
  static F load_f32(const float* from, std::int64_t count) {
    return _mm512_maskz_loadu_ps(static_cast<K>(first_lanes(count)), from);
  }
  static F load_bf16(const std::uint16_t* from, std::int64_t count) {
    const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<K>(first_lanes(count)), from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static void store_f32(float* to, F v, std::int64_t count) {
    _mm512_mask_storeu_ps(to, static_cast<K>(first_lanes(count)), v);
  }
  /// Round to nearest even; NaN stays NaN.
  static void store_bf16(std::uint16_t* to, F v, std::int64_t count) {
    const I bits = _mm512_castps_si512(v);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const I quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const K is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const I result = _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16);
    _mm256_mask_storeu_epi16(to, static_cast<K>(first_lanes(count)), _mm512_cvtepi32_epi16(result));
  }
};

}  // namespace
}  // namespace rafter::forward_bf16
