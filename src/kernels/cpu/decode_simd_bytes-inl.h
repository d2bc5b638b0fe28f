// O += P V of decode with values of a byte, in integers: four keys of a column lie in one lane, and
// an instruction that sums four products of bytes (Machine::dot_bytes) takes them against weights
// of 16 bits, a byte at a time. Compiled once per instruction set (Highway's foreach_target).
//   weights  of a row: q ≈ p · 65535 / max p, in two digits of base 256; the error of a weight is
//            2^-17 of the largest of the tile, and all sums are exact
//   values   [64 columns][4 keys] by two rounds of interleaving, which leave columns 4j … 4j + 3 of
//            every 16 in vector j
#if defined(RAFTER_DECODE_SIMD_BYTES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_DECODE_SIMD_BYTES_INL_H_
#undef RAFTER_DECODE_SIMD_BYTES_INL_H_
#else
#define RAFTER_DECODE_SIMD_BYTES_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/checked.h"
#include "hw/cpu/unroll.h"
#include "hwy/highway.h"
#include "kernels/cpu/decode_simd_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET != HWY_SCALAR && RAFTER_HAS_AMX_CODE

using DI = hn::Rebind<std::int32_t, D>;
using D8 = hn::Repartition<std::int8_t, D>;
using DU8 = hn::Repartition<std::uint8_t, D>;

constexpr std::int64_t kQuads = kTile / 4;         // groups of four keys
constexpr std::int64_t kByteColumns = 4 * kLanes;  // of a vector of bytes

/// Weights of a tile as digits: [digit][kQuads][4 rows], each four bytes, one of each key.
struct ByteWeights {
  alignas(64) std::uint32_t digits[2][kQuads][4];
  float unit[4];  // of each row; 0: the row adds nothing
  bool held[4];   // whether bytes hold the weights of the row
};

/// Keys of quad q, in the order of its bytes, are q + 0, 32, 16 and 48: lanes of four vectors of
/// weights, so that cutting them moves nothing between lanes.
constexpr std::int64_t kQuadKeys[4] = {0, 32, 16, 48};

/// Cuts weights [key][4]. Bytes do not hold those of a row where one is negative or not finite, or
/// where all are next to nothing.
HWY_INLINE void cut_weights(const float* HWY_RESTRICT p, ByteWeights& out) {
  const D d;
  const DU du;
  // as integers, what is negative or not finite lies above all the rest
  auto top = hn::Zero(du);
  for (std::int64_t i = 0; i < 4 * kTile; i += kLanes) {
    top = hn::Max(top, hn::BitCast(du, hn::Load(d, p + i)));
  }
  top = hn::Max(top, hn::SwapAdjacentBlocks(top));
  if constexpr (kLanes == 16) {
    top = hn::Max(top, hn::ConcatLowerUpper(du, top, top));
  }
  constexpr float kLargest = 65535, kLeast = 1e-30f, kMost = 1e30f;
  const V largest = hn::BitCast(d, top);
  const auto some =
      hn::And(hn::Ge(largest, hn::Set(d, kLeast)), hn::Lt(largest, hn::Set(d, kMost)));
  const V inverse = hn::IfThenElseZero(some, hn::Div(hn::Set(d, kLargest), largest));
  alignas(64) float lanes[kLanes];
  alignas(64) float units[kLanes];
  hn::Store(largest, d, lanes);
  hn::Store(hn::IfThenElseZero(some, hn::Mul(largest, hn::Set(d, 1 / kLargest))), d, units);
  for (std::int64_t r = 0; r < 4; ++r) {
    out.unit[r] = units[r];
    out.held[r] = units[r] != 0 || lanes[r] == 0;
  }
  constexpr std::int64_t kApart = 16 * 4;  // floats from a key to the 16th after it
  for (std::int64_t i = 0; i < kApart; i += kLanes) {
    const auto cut = [&](std::int64_t key) {  // 16 bits, below the bits of 2^23
      const V x = hn::Load(d, p + i + 4 * key);
      return hn::BitCast(du, hn::MulAdd(x, inverse, hn::Set(d, 8388608.0f)));
    };
    const auto pair = [&](std::int64_t first, std::int64_t second) {
      return hn::Or(hn::And(cut(first), hn::Set(du, 0xffffu)), hn::ShiftLeft<16>(cut(second)));
    };
    const auto a = pair(0, 16);
    const auto b = pair(32, 48);
    const auto low = hn::Set(du, 0x00ff00ffu);
    hn::Store(hn::Or(hn::And(a, low), hn::ShiftLeft<8>(hn::And(b, low))), du,
              &out.digits[0][0][0] + i);
    hn::Store(hn::Or(hn::And(hn::ShiftRight<8>(a), low), hn::AndNot(low, b)), du,
              &out.digits[1][0][0] + i);
  }
}

/// kByteColumns columns of four rows, the four bytes of a column side by side.
HWY_INLINE void interleave_quad(const std::int8_t* const (&row)[4], std::int8_t* HWY_RESTRICT to) {
  const D8 d8;
  const hn::Repartition<std::int16_t, D> d16;
  const auto a = hn::LoadU(d8, row[0]), b = hn::LoadU(d8, row[1]);
  const auto c = hn::LoadU(d8, row[2]), e = hn::LoadU(d8, row[3]);
  const auto ab_low = hn::BitCast(d16, hn::InterleaveLower(d8, a, b));
  const auto ab_high = hn::BitCast(d16, hn::InterleaveUpper(d8, a, b));
  const auto ce_low = hn::BitCast(d16, hn::InterleaveLower(d8, c, e));
  const auto ce_high = hn::BitCast(d16, hn::InterleaveUpper(d8, c, e));
  const auto store = [&](std::int64_t j, auto x) {
    hn::Store(hn::BitCast(d8, x), d8, to + j * kByteColumns);
  };
  store(0, hn::InterleaveLower(d16, ab_low, ce_low));
  store(1, hn::InterleaveUpper(d16, ab_low, ce_low));
  store(2, hn::InterleaveLower(d16, ab_high, ce_high));
  store(3, hn::InterleaveUpper(d16, ab_high, ce_high));
}

/// The order of columns that interleave_quad leaves, undone: a[j] are then the j-th kLanes columns.
HWY_INLINE void order_columns(V (&a)[4]) {
  const D d;
  const V even0 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(a[1]), a[0]);
  const V odd0 = hn::OddEvenBlocks(a[1], hn::SwapAdjacentBlocks(a[0]));
  const V even1 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(a[3]), a[2]);
  const V odd1 = hn::OddEvenBlocks(a[3], hn::SwapAdjacentBlocks(a[2]));
  if constexpr (kLanes == 16) {
    a[0] = hn::ConcatLowerLower(d, even1, even0);
    a[1] = hn::ConcatLowerLower(d, odd1, odd0);
    a[2] = hn::ConcatUpperUpper(d, even1, even0);
    a[3] = hn::ConcatUpperUpper(d, odd1, odd0);
  } else {
    a[0] = even0;
    a[1] = even1;
    a[2] = odd0;
    a[3] = odd1;
  }
}

/// o of rows r and r + 1 += over the quads of `values` [kQuads][4][kByteColumns].
template <typename Machine>
HWY_INLINE void add_two_rows(const std::int8_t* HWY_RESTRICT values, const ByteWeights& weights,
                             std::int64_t r, std::int64_t columns, float* HWY_RESTRICT o) {
  const D d;
  const DI di;
  const D8 d8;
  hn::Vec<DI> sum[2][2][4];  // [row][digit][vector]
  RAFTER_UNROLL
  for (int row = 0; row < 2; ++row) {
    RAFTER_UNROLL
    for (int digit = 0; digit < 2; ++digit) {
      RAFTER_UNROLL
      for (int j = 0; j < 4; ++j) {
        sum[row][digit][j] = hn::Zero(di);
      }
    }
  }
  for (std::int64_t quad = 0; quad < kQuads; ++quad) {
    hn::Vec<D8> value[4];
    RAFTER_UNROLL
    for (int j = 0; j < 4; ++j) {
      value[j] = hn::Load(d8, values + (quad * 4 + j) * kByteColumns);
    }
    RAFTER_UNROLL
    for (int row = 0; row < 2; ++row) {
      RAFTER_UNROLL
      for (int digit = 0; digit < 2; ++digit) {
        const auto weight = hn::BitCast(DU8(), hn::Set(DU(), weights.digits[digit][quad][r + row]));
        RAFTER_UNROLL
        for (int j = 0; j < 4; ++j) {
          sum[row][digit][j] = Machine::dot_bytes(sum[row][digit][j], weight, value[j]);
        }
      }
    }
  }
  RAFTER_UNROLL
  for (int row = 0; row < 2; ++row) {
    V total[4];
    RAFTER_UNROLL
    for (int j = 0; j < 4; ++j) {
      total[j] = hn::ConvertTo(d, hn::Add(hn::ShiftLeft<8>(sum[row][1][j]), sum[row][0][j]));
    }
    order_columns(total);
    const V unit = hn::Set(d, weights.unit[r + row]);
    RAFTER_UNROLL
    for (int j = 0; j < 4; ++j) {
      float* const at = o + (r + row) * columns + j * kLanes;
      hn::Store(hn::MulAdd(unit, total[j], hn::Load(d, at)), d, at);
    }
  }
}

/// o[4][columns] += P V over kTile keys, which all four rows see, head_dim_v a multiple of
/// kByteColumns; rows whose weights bytes do not hold are added on vectors. `scratch`: a tile of
/// kByteColumns columns.
template <typename Machine>
HWY_INLINE void values_in_bytes(const Rows<DType::int8>& values, const float* p,
                                std::int64_t head_dim_v, std::int64_t columns,
                                std::int8_t* HWY_RESTRICT scratch, float* HWY_RESTRICT o) {
  ByteWeights weights;
  cut_weights(p, weights);
  // a tile's rows of what comes next, among the quads of all columns
  const std::int64_t each = base::div_up(4 * kByteColumns, head_dim_v);
  for (std::int64_t c = 0; c < head_dim_v; c += kByteColumns) {
    for (std::int64_t quad = 0; quad < kQuads; ++quad) {
      values.prefetch(each);
      const std::int8_t* row[4];
      RAFTER_UNROLL
      for (int i = 0; i < 4; ++i) {
        row[i] = values[quad + kQuadKeys[i]] + c;
      }
      interleave_quad(row, scratch + quad * 4 * kByteColumns);
    }
    add_two_rows<Machine>(scratch, weights, 0, columns, o + c);
    add_two_rows<Machine>(scratch, weights, 2, columns, o + c);
  }
  for (std::int64_t r = 0; r < 4; ++r) {
    if (!weights.held[r]) {
      add_values<DType::int8, 1>(values, 0, kTile, p + r, 4, head_dim_v, columns, o + r * columns);
    }
  }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
