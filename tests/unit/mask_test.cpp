// visible_keys and empty_rows against the definition, by brute force; the 16-bit conversions.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "rafter/attention.h"
#include "rafter/tensor.h"
#include "tiles/key_range.h"

namespace rafter {
namespace {

bool sees(const Mask& mask, std::int64_t row, std::int64_t key, std::int64_t rows,
          std::int64_t keys) {
  const std::int64_t at = row + (mask.align == MaskAlign::bottom_right ? keys - rows : 0);
  return (mask.window_left < 0 || key >= at - mask.window_left) &&
         (mask.window_right < 0 || key <= at + mask.window_right);
}

TEST(Mask, RangesAndEmptyRowsFollowTheDefinition) {
  for (const MaskAlign align : {MaskAlign::bottom_right, MaskAlign::top_left}) {
    for (const std::int64_t left : {-1, 0, 1, 3, 20}) {
      for (const std::int64_t right : {-1, 0, 2, 15}) {
        for (const std::int64_t rows : {0, 1, 4, 9, 17}) {
          for (const std::int64_t keys : {0, 1, 5, 9, 23}) {
            const Mask mask = Mask::window(left, right, align);
            std::int64_t empty = 0;
            for (std::int64_t i = 0; i < rows; ++i) {
              const KeyRange range = visible_keys(mask, i, rows, keys);
              std::int64_t count = 0;
              for (std::int64_t j = 0; j < keys; ++j) {
                const bool visible = sees(mask, i, j, rows, keys);
                EXPECT_EQ(visible, range.first <= j && j < range.last);
                count += visible ? 1 : 0;
              }
              EXPECT_EQ(range.last - range.first, count);
              empty += count == 0 ? 1 : 0;
            }
            EXPECT_EQ(empty_rows(mask, rows, keys), empty)
                << left << " " << right << " " << rows << " " << keys;
          }
        }
      }
    }
  }
}

// I14: the counts of the reports; and windows at the end of 64 bits.
TEST(Mask, EmptyRowsOfKnownShapes) {
  EXPECT_EQ(empty_rows(Mask::causal(), 2048, 1024), 1024);
  EXPECT_EQ(empty_rows(Mask::window(32, 64), 129, 17), 48);
  EXPECT_EQ(empty_rows(Mask::window(32, 64), 129, 64), 1);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(empty_rows(Mask::window(kMax, kMax), 100, 10), 0);
  EXPECT_EQ(visible_keys(Mask::window(kMax, kMax), 99, 100, 10).last, 10);
  EXPECT_EQ(empty_rows(Mask::causal(), -3, 10), 0);
  EXPECT_EQ(visible_keys(Mask::none(), 5, 5, 10).last, 0) << "row past the end";
}

// I4: positions beyond 32 bits.
TEST(Mask, PositionsBeyond32Bits) {
  for (const std::int64_t keys : {(std::int64_t{1} << 22) + 1, std::int64_t{1} << 40}) {
    const KeyRange range = visible_keys(Mask::window(5, 0), keys - 1, keys, keys);
    EXPECT_EQ(range.first, keys - 6);
    EXPECT_EQ(range.last, keys);
  }
}

TEST(Mask, HullCoversItsRowsAndNothingMore) {
  for (const std::int64_t offset : {-7, 0, 6}) {
    for (const std::int64_t left : {-1, 0, 4}) {
      for (const std::int64_t right : {-1, 0, 3}) {
        const tiles::MaskWindow window{left, right, offset, 11};
        for (std::int64_t begin = 0; begin < 12; ++begin) {
          for (std::int64_t end = begin; end < 14; ++end) {
            std::int64_t first = 11, last = 0;
            for (std::int64_t i = begin; i < end; ++i) {
              const tiles::Range row = window.row(i);
              if (row.size() > 0) {
                first = std::min(first, row.first);
                last = std::max(last, row.last);
              }
            }
            const tiles::Range hull = window.hull(begin, end);
            EXPECT_EQ(hull.size(), last > first ? last - first : 0);
            if (last > first) {
              EXPECT_EQ(hull.first, first);
            }
          }
        }
      }
    }
  }
}

/// Value of f16 bits from its definition.
double f16_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 31) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -24)
                       : sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(Conversions, EveryHalfIsReadAndWrittenExactly) {
  for (std::uint32_t b = 0; b <= 0xffff; ++b) {
    const auto bits = static_cast<std::uint16_t>(b);
    const double want = f16_value(bits);
    const auto got = static_cast<double>(f16_to_f32(bits));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got));
      EXPECT_TRUE(std::isnan(f16_value(f32_to_f16(f16_to_f32(bits)))));
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(b << 16 | 1U)))) ||
                  (b & 0x7f80U) != 0x7f80U);
      continue;
    }
    ASSERT_EQ(got, want) << b;
    ASSERT_EQ(f32_to_f16(f16_to_f32(bits)), bits) << b;
  }
}

/// Rounding to nearest, ties to even: the midpoint of two neighbours and one float to either side.
TEST(Conversions, RoundToNearestEven) {
  for (std::uint16_t bits = 0; bits < 0x7bff; ++bits) {  // every finite neighbour pair of f16
    const auto middle =
        static_cast<float>((f16_value(bits) + f16_value(static_cast<std::uint16_t>(bits + 1))) / 2);
    const auto next = static_cast<std::uint16_t>(bits + 1);
    ASSERT_EQ(f32_to_f16(middle), bits % 2 == 0 ? bits : next) << bits;
    ASSERT_EQ(f32_to_f16(std::nextafterf(middle, 0)), bits) << bits;
    ASSERT_EQ(f32_to_f16(std::nextafterf(middle, 1e30F)), next) << bits;
    ASSERT_EQ(f32_to_f16(-middle), (bits % 2 == 0 ? bits : next) | 0x8000) << bits;
  }
  EXPECT_EQ(f32_to_f16(65519.99F), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0F), 0x7c00);
  for (std::uint32_t bits = 0; bits < 0x7f7f; ++bits) {
    const float middle = std::bit_cast<float>(bits << 16 | 0x8000U);
    ASSERT_EQ(f32_to_bf16(middle), bits % 2 == 0 ? bits : bits + 1) << bits;
    ASSERT_EQ(f32_to_bf16(std::bit_cast<float>(bits << 16 | 0x7fffU)), bits) << bits;
    ASSERT_EQ(f32_to_bf16(std::bit_cast<float>(bits << 16 | 0x8001U)), bits + 1) << bits;
  }
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::infinity()), 0x7f80);
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7f800001U)))));
}

/// Value of e4m3 bits from its definition.
double e4m3_value(int bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  const double sign = (bits & 0x80) != 0 ? -1 : 1;
  if (exponent == 15 && mantissa == 7) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -9)
                       : sign * std::ldexp(8 + mantissa, exponent - 10);
}

TEST(Conversions, EveryE4m3IsReadExactlyAndRoundedToNearestEven) {
  for (int bits = 0; bits <= 0xff; ++bits) {
    const float got = e4m3_to_f32(static_cast<std::uint8_t>(bits));
    if (std::isnan(e4m3_value(bits))) {
      EXPECT_TRUE(std::isnan(got));
    } else {
      EXPECT_EQ(static_cast<double>(got), e4m3_value(bits)) << bits;
    }
    EXPECT_EQ(f32_to_e4m3(got), bits) << bits;
  }
  for (int bits = 0; bits < 0x7e; ++bits) {  // every pair of neighbours
    const auto middle = static_cast<float>((e4m3_value(bits) + e4m3_value(bits + 1)) / 2);
    const int even = bits % 2 == 0 ? bits : bits + 1;
    EXPECT_EQ(f32_to_e4m3(middle), even) << bits;
    EXPECT_EQ(f32_to_e4m3(-middle), even | 0x80) << bits;
    EXPECT_EQ(f32_to_e4m3(std::nextafterf(middle, 0)), bits) << bits;
    EXPECT_EQ(f32_to_e4m3(std::nextafterf(middle, 1e30F)), bits + 1) << bits;
  }
  EXPECT_EQ(f32_to_e4m3(1e30F), 0x7e);
  EXPECT_EQ(f32_to_e4m3(-std::numeric_limits<float>::infinity()), 0xfe);
  EXPECT_EQ(f32_to_e4m3(1e-30F), 0);
}

}  // namespace
}  // namespace rafter
