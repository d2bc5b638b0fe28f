// A weight [n, k] in int8, e4m3 or int4 as it lies in memory, and the rule by which it is rounded;
// the same on every device.
//
// Rows come in stripes of 16, a stripe in units of 1024 bytes of values along k: 128 columns of 4
// bits, 64 of 8. A unit is two tiles of 512 bytes, a tile 32 chunks of 16 bytes, one of each lane
// of a warp, laid out so that a word is what mma.sync wants of a lane after a mask and a shift. Of
// lane (g, t) = (lane / 4, lane % 4) a chunk has rows g and g + 8 and columns 8 t … 8 t + 7 of each
// block of 32 columns: a tile of 8 bits is one block, of 4 bits two.
// int4: in front of each unit its scales, bf16 [128 / group_size, 16 rows]. int8, e4m3: behind the
// last stripe a scale of each row, f32 [n].
#pragma once

#include <bit>
#include <cstdint>

#include "rafter/tensor.h"

namespace rafter::base {

inline constexpr std::int64_t kStripeRows = 16;
inline constexpr std::int64_t kUnitBytes = 1024;  // of values
inline constexpr std::int64_t kChunkBytes = 16;
inline constexpr int kBlockCols = 32;

struct PackedShape {
  DType dtype = DType::int8;  // int8, e4m3, int4
  std::int64_t n = 0, k = 0, group_size = 0;

  constexpr bool is_int4() const { return dtype == DType::int4; }
  constexpr std::int64_t unit_cols() const { return is_int4() ? 128 : 64; }
  /// Rows of 16 scales in front of a unit.
  constexpr std::int64_t unit_scales() const { return is_int4() ? unit_cols() / group_size : 0; }
  constexpr std::int64_t unit_bytes() const { return kUnitBytes + unit_scales() * 32; }
  constexpr std::int64_t stripe_units() const { return k / unit_cols(); }
  constexpr std::int64_t stripe_bytes() const { return stripe_units() * unit_bytes(); }
  constexpr std::int64_t values_bytes() const { return n / kStripeRows * stripe_bytes(); }
  constexpr std::int64_t bytes() const { return values_bytes() + (is_int4() ? 0 : n * 4); }
  constexpr std::int64_t chunks() const { return n / kStripeRows * stripe_units() * 64; }
  /// Blocks of 32 columns of a chunk.
  constexpr int chunk_blocks() const { return is_int4() ? 2 : 1; }
  /// Columns that share a scale.
  constexpr std::int64_t scale_cols() const { return is_int4() ? group_size : k; }
};

/// Where a chunk lies, and its first row and column: it has rows `row` and `row` + 8, and eight
/// columns from `col` + 32 b on of each of its blocks b.
struct ChunkPlace {
  std::int64_t offset = 0;  // bytes
  std::int64_t row = 0, col = 0;
};
constexpr ChunkPlace place_of_chunk(const PackedShape& s, std::int64_t chunk) {
  const std::int64_t lane = chunk % 32, tile = chunk / 32 % 2, unit = chunk / 64;
  const std::int64_t stripe = unit / s.stripe_units(), in_stripe = unit % s.stripe_units();
  return {unit * s.unit_bytes() + s.unit_scales() * 32 + chunk % 64 * kChunkBytes,
          stripe * kStripeRows + lane / 4,
          in_stripe * s.unit_cols() + tile * s.chunk_blocks() * kBlockCols + lane % 4 * 8};
}

/// Calls visit(upper, i, row, col) for every element of a chunk.
template <typename Visit>
constexpr void visit_chunk(const PackedShape& s, const ChunkPlace& place, Visit visit) {
  for (int upper = 0; upper < 2; ++upper) {
    for (int i = 0; i < s.chunk_blocks() * 8; ++i) {
      visit(upper, i, place.row + 8 * upper, place.col + i / 8 * kBlockCols + i % 8);
    }
  }
}

/// Bytes from the beginning to the scale of an element: bf16 of int4, else f32.
constexpr std::int64_t scale_offset(const PackedShape& s, std::int64_t row, std::int64_t col) {
  if (!s.is_int4()) {
    return s.values_bytes() + row * 4;
  }
  return row / kStripeRows * s.stripe_bytes() + col / s.unit_cols() * s.unit_bytes() +
         (col % s.unit_cols() / s.group_size * kStripeRows + row % kStripeRows) * 2;
}
/// `packed`: bytes. constexpr so that kernels may call it.
template <typename Byte>
constexpr float load_scale(const PackedShape& s, const Byte* packed, std::int64_t row,
                           std::int64_t col) {
  const void* const at = packed + scale_offset(s, row, col);
  return s.is_int4() ? bf16_to_f32(*static_cast<const std::uint16_t*>(at))
                     : *static_cast<const float*>(at);
}

/// Where a code lies in a chunk: in which word, and from which bit on. `upper`: of row + 8. `i`:
/// which of the columns, block by block. An e4m3 and an int8 (a sign, seven bits of magnitude) are
/// bytes of a half word; int8 codes keep the sign at the far end of it, see int8_bits().
struct CodePlace {
  int word, bit;
};
constexpr CodePlace place_of_code(DType dtype, int upper, int i) {
  const int step = i % 8 / 4, pair = i % 4 / 2, element = i % 2;
  if (dtype == DType::int4) {
    return {i / 8 * 2 + step, 4 * (2 * pair + upper) + 16 * element};
  }
  return {2 * step + pair, 16 * element + 8 * (dtype == DType::e4m3 ? 1 - upper : upper)};
}

/// An int8 as its bits of a half word: |v| in the byte of its row, the sign in the top bit of the
/// other byte (row) or of the low one (row + 8).
constexpr std::uint32_t int8_bits(int upper, int value) {
  const std::uint32_t sign = value < 0 ? 1 : 0;
  const auto magnitude = static_cast<std::uint32_t>(value < 0 ? -value : value);
  return upper != 0 ? magnitude << 8 | sign << 7 : magnitude | sign << 15;
}

/// What a code is of: value = code · scale. int4: v + 8; int8: int8_bits() of its half word.
constexpr std::uint32_t encode(DType dtype, float quotient) {
  if (dtype == DType::e4m3) {
    return f32_to_e4m3(quotient);
  }
  const float limit = dtype == DType::int4 ? 7.0f : 127.0f;
  const float cut = quotient > limit ? limit : quotient < -limit ? -limit : quotient;
  constexpr float kRound = 0x1.8p23f;  // its sum has no bits behind the point: ties go to even
  const int value = static_cast<int>((cut + kRound) - kRound);
  return static_cast<std::uint32_t>(dtype == DType::int4 ? value + 8 : value);
}

/// A code into its chunk, whose words were 0.
constexpr void put_code(DType dtype, int upper, int i, std::uint32_t code,
                        std::uint32_t (&words)[4]) {
  const CodePlace at = place_of_code(dtype, upper, i);
  words[at.word] |= dtype == DType::int8 ? int8_bits(upper, static_cast<int>(code)) << (i % 2 * 16)
                                         : code << at.bit;
}

/// The value of a code, without its scale.
constexpr float code_value(DType dtype, int upper, int i, const std::uint32_t (&words)[4]) {
  const CodePlace at = place_of_code(dtype, upper, i);
  const std::uint32_t word = words[at.word];
  switch (dtype) {
    case DType::int4:
      return static_cast<float>(static_cast<int>(word >> at.bit & 15u) - 8);
    case DType::e4m3:
      return e4m3_to_f32(static_cast<std::uint8_t>(word >> at.bit & 255u));
    default: {
      const std::uint32_t half = word >> (i % 2 * 16);
      const auto magnitude = static_cast<float>(upper != 0 ? half >> 8 & 127u : half & 127u);
      return (half >> (upper != 0 ? 7 : 15) & 1u) != 0 ? -magnitude : magnitude;
    }
  }
}

/// The scale of elements whose largest magnitude has these f32 bits: magnitude / 7, 127 or 448,
/// that of int4 rounded to bf16; NaN where an element is not finite.
constexpr float scale_of(DType dtype, std::uint32_t largest_bits) {
  if (largest_bits >= 0x7f800000u) {
    return std::bit_cast<float>(0x7fc00000u);
  }
  const auto largest = std::bit_cast<float>(largest_bits);
  switch (dtype) {
    case DType::int4:
      return bf16_to_f32(f32_to_bf16(largest / 7.0f));
    case DType::e4m3:
      return largest / 448.0f;
    default:
      return largest / 127.0f;
  }
}
/// Bits of |value|: they order as the magnitudes do, NaN last.
constexpr std::uint32_t magnitude_bits(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
}
/// A value by its scale; a scale of 0 or NaN leaves nothing to divide by.
constexpr float quotient_of(float value, float scale) { return scale > 0 ? value / scale : 0.0f; }

}  // namespace rafter::base
