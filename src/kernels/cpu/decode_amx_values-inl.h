// Weights and values of decode on tiles: the softmax of a tile of 64 keys and four query rows, and
// O += P V with values loaded from the cache as they lie there. Compiled once per instruction set
// (Highway's foreach_target).
// A tile product wants two keys (int8: four) of a column side by side; in the cache two (four)
// columns of a key lie there. So each weight stands beside zeros, in every place in turn:
//   sums [16][16] += W [16][16 keys · 4 B] V [16 keys][64 B]
//   bf16   W rows (p, 0) and (0, p) give the even and the odd columns; p in two parts of bf16, so
//          that it is off by 2^-17 of itself: 4 query rows × 2 parts × 2 places
//   int8   W rows (p, 0, 0, 0) … (0, 0, 0, p) give every fourth column; p ≈ n · max p / 65535 in
//          two digits, a product each, with exact sums: 4 query rows × 4 places
// No value is moved, widened or interleaved.
#if defined(RAFTER_DECODE_AMX_VALUES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_DECODE_AMX_VALUES_INL_H_
#undef RAFTER_DECODE_AMX_VALUES_INL_H_
#else
#define RAFTER_DECODE_AMX_VALUES_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/checked.h"
#include "hw/cpu/unroll.h"
#include "hwy/highway.h"
#include "kernels/cpu/decode_amx_products-inl.h"
#include "kernels/cpu/decode_simd_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET != HWY_SCALAR && RAFTER_HAS_AMX_CODE

constexpr std::int64_t kGroups = kTile / kTileKeys;
constexpr std::int64_t kTileWords = 16 * 16;  // 4-byte elements of a whole tile
/// Columns of V in a tile.
template <DType kKv>
constexpr std::int64_t kTileColumns = 64 / static_cast<std::int64_t>(sizeof(Element<kKv>));

/// Rows of V of the next tile that are prefetched beside the maximum of a query row, and beside its
/// exponentials: where memory rests meanwhile, as many tokens take a tenth longer.
template <DType kKv>
constexpr std::int64_t kRowsBesideWeights = kKv == DType::int8 ? 4 : 2;

/// Weights of a tile of keys as tiles, [digit][kGroups][16][16 keys] of 4 bytes; int8 has two
/// digits.
struct TileWeights {
  std::uint32_t* tiles = nullptr;
  float unit[4] = {};  // int8: of a row's digits; 0: they hold nothing of it
  bool held = true;    // int8: whether digits hold the weights of all rows
};

/// Weights p of query row r and the keys from `key` on, as bf16.
HWY_INLINE void store_weights(V p, std::int64_t r, std::int64_t key, std::uint32_t* tiles) {
  const D d;
  const DU du;
  const auto upper = hn::Set(du, 0xffff0000u);
  const auto high = hn::And(hn::BitCast(du, p), upper);
  // what is left has 16 bits: rounded to 8 of them
  const auto low = hn::Add(hn::BitCast(du, hn::Sub(p, hn::BitCast(d, high))), hn::Set(du, 0x8000u));
  std::uint32_t* const to = tiles + key / kTileKeys * kTileWords + r * 4 * 16 + key % kTileKeys;
  hn::Store(hn::ShiftRight<16>(high), du, to);
  hn::Store(high, du, to + 16);
  hn::Store(hn::ShiftRight<16>(low), du, to + 32);
  hn::Store(hn::And(low, upper), du, to + 48);
}

/// The same as digits of p · inverse, below 2^16.
HWY_INLINE void store_digits(V p, V inverse, std::int64_t r, std::int64_t key,
                             std::uint32_t* tiles) {
  const DU du;
  const auto byte = hn::Set(du, 255);
  // rounds to an integer in the low bits
  const auto n = hn::BitCast(du, hn::MulAdd(p, inverse, hn::Set(D(), 8388608.0f)));
  // a digit in each place of its four, by both units that shift
  const auto store = [&](auto digit, std::uint32_t* to) {
    hn::Store(digit, du, to);
    hn::Store(hn::ShiftLeftBytes<1>(digit), du, to + 16);
    hn::Store(hn::ShiftLeft<16>(digit), du, to + 32);
    hn::Store(hn::ShiftLeftBytes<3>(digit), du, to + 48);
  };
  std::uint32_t* const to = tiles + key / kTileKeys * kTileWords + r * 4 * 16 + key % kTileKeys;
  store(hn::And(n, byte), to);
  store(hn::And(hn::ShiftRight<8>(n), byte), to + kGroups * kTileWords);
}

/// Numbers of four query rows.
struct FourRows {
  alignas(16) float row[4];

  explicit FourRows(hn::Vec<D4> v) { hn::Store(v, D4(), row); }
  HWY_INLINE V operator[](std::int64_t r) const { return hn::Set(D(), row[r]); }
};

/// The sums of four rows and what they have so far, after their maximum went from `before` to `now`
/// for some of them.
inline void rescale(const RowBlock& block, const FourRows& before, const FourRows& now,
                    std::int64_t columns, float (&sum)[4]) {
  const D d;
  for (std::int64_t r = 0; r < 4; ++r) {
    if (block.sum[r] != 0 && before.row[r] == now.row[r]) {  // this one has not moved
      sum[r] += block.sum[r];
    } else if (block.sum[r] != 0) {  // not the first keys: NaN is not 0 either
      const V factor = math::exp2_of(hn::Set(d, before.row[r] - now.row[r]));
      sum[r] += block.sum[r] * hn::GetLane(factor);
      float* const o = block.o + r * columns;
      for (std::int64_t c = 0; c < columns; c += kLanes) {
        hn::Store(hn::Mul(hn::Load(d, o + c), factor), d, o + c);
      }
    }
  }
}

/// Scores s [4][kTile], all of them seen, become weights; what the rows had so far is scaled to the
/// new maximum. Weights stay in s where `keep` asks for it, or where digits do not hold them: those
/// of a row with one that is negative or not finite, or that are all next to nothing.
template <DType kKv>
HWY_INLINE void weights_of_scores(const Tile& tile, const RowBlock& block, std::int64_t columns,
                                  bool keep, const Rows<kKv>& ahead, float* HWY_RESTRICT s,
                                  TileWeights& weights) {
  constexpr int kVectors = static_cast<int>(kTile / kLanes);
  const D d;
  const D4 d4;
  V x[4][kVectors];
  V top[4];
  RAFTER_UNROLL
  for (int r = 0; r < 4; ++r) {
    ahead.prefetch(kRowsBesideWeights<kKv>);
    top[r] = hn::Set(d, math::kMinusInfinity);
    RAFTER_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      x[r][i] = hn::Load(d, s + r * kTile + i * kLanes);
      if constexpr (kKv == DType::int8) {
        x[r][i] = hn::Mul(x[r][i], hn::Load(d, tile.k_scale + i * kLanes));
      }
      if (tile.softcap_log2 > 0) {
        x[r][i] = hn::Mul(hn::Set(d, tile.softcap_log2), math::tanh_of(x[r][i]));
      }
      top[r] = hn::Max(top[r], x[r][i]);
    }
  }
  const auto most =
      over_lanes(top[0], top[1], top[2], top[3], [](auto a, auto b) { return hn::Max(a, b); });
  const auto maximum = hn::Load(d4, block.maximum);
  const auto highest = hn::IfThenElse(hn::Gt(most, maximum), most, maximum);
  // a row that has seen no key yet: 2^(−∞ − 0) = 0 for all of its scores
  const auto minus_infinity = hn::Set(d4, math::kMinusInfinity);
  const FourRows from(hn::IfThenZeroElse(hn::Eq(highest, minus_infinity), highest));
  V total[4];
  RAFTER_UNROLL
  for (int r = 0; r < 4; ++r) {
    ahead.prefetch(kRowsBesideWeights<kKv>);
    const V subtract = from[r];
    total[r] = hn::Zero(d);
    RAFTER_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      x[r][i] = math::exp2_of(hn::Sub(x[r][i], subtract));
      total[r] = hn::Add(total[r], x[r][i]);
    }
  }
  const auto sums = sums_of_lanes(total[0], total[1], total[2], total[3]);
  const auto sum_before = hn::Load(d4, block.sum);
  if (hn::AllTrue(d4, hn::Eq(maximum, hn::Load(d4, from.row)))) {
    hn::Store(hn::Add(sums, sum_before), d4, block.sum);
  } else {
    alignas(16) float now[4];
    hn::Store(sums, d4, now);
    rescale(block, FourRows(maximum), from, columns, now);
    hn::Store(hn::Load(d4, now), d4, block.sum);
  }
  hn::Store(highest, d4, block.maximum);
  if constexpr (kKv == DType::int8) {
    // as integers, what is negative or not finite lies above all the rest
    const auto most_bits = [](auto a, auto b) {
      const hn::DFromV<decltype(a)> df;
      const hn::RebindToUnsigned<decltype(df)> du;
      return hn::BitCast(df, hn::Max(hn::BitCast(du, a), hn::BitCast(du, b)));
    };
    RAFTER_UNROLL
    for (int r = 0; r < 4; ++r) {
      top[r] = hn::Zero(d);
      RAFTER_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        x[r][i] = hn::Mul(x[r][i], hn::Load(d, tile.v_scale + i * kLanes));
        top[r] = most_bits(top[r], x[r][i]);
      }
    }
    constexpr float kLargest = 65535, kLeast = 1e-30f, kMost = 1e30f;
    const auto largest = over_lanes(top[0], top[1], top[2], top[3], most_bits);
    const auto some =
        hn::And(hn::Ge(largest, hn::Set(d4, kLeast)), hn::Lt(largest, hn::Set(d4, kMost)));
    const FourRows inverse(hn::IfThenElseZero(some, hn::Div(hn::Set(d4, kLargest), largest)));
    hn::StoreU(hn::IfThenElseZero(some, hn::Mul(largest, hn::Set(d4, 1 / kLargest))), d4,
               weights.unit);
    const hn::Rebind<std::uint32_t, D4> du4;
    const auto none = hn::RebindMask(d4, hn::Eq(hn::BitCast(du4, largest), hn::Zero(du4)));
    weights.held = hn::AllTrue(d4, hn::Or(some, none));
    keep = keep || !weights.held;
    RAFTER_UNROLL
    for (int r = 0; r < 4; ++r) {
      const V factor = inverse[r];
      RAFTER_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        store_digits(x[r][i], factor, r, i * kLanes, weights.tiles);
      }
    }
  } else {
    RAFTER_UNROLL
    for (int r = 0; r < 4; ++r) {
      RAFTER_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        store_weights(x[r][i], r, i * kLanes, weights.tiles);
      }
    }
  }
  if (keep) {
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < kVectors; ++i) {
        hn::Store(x[r][i], d, s + r * kTile + i * kLanes);
      }
    }
  }
}

/// Sums of weights times values, a tile for every kTileColumns columns and digit: [16][16] of f32,
/// of int32 with int8. head_dim_v is a multiple of kTileColumns.
template <DType kKv, typename Machine>
HWY_INLINE void values_on_tiles(const TileRows& values, const TileWeights& weights,
                                std::int64_t head_dim_v, const Rows<kKv>& ahead,
                                std::int32_t* HWY_RESTRICT sums) {
  const std::int64_t stride = kTileKeys * values.stride;
  const std::int64_t tiles = head_dim_v / kTileColumns<kKv>;
  const std::int64_t each = base::div_up(kTile - 8 * kRowsBesideWeights<kKv>, kGroups * tiles);
  const auto weight = [&](std::int64_t digit, std::int64_t group) {
    return weights.tiles + (digit * kGroups + group) * kTileWords;
  };
  // sums of two tiles of columns at a time, with int8 in two digits: so a weight is loaded once for
  // both
  for (std::int64_t t = 0; t < tiles; t += 2) {
    const std::byte* at = values.at + t * 64;
    const bool two = t + 1 < tiles;
    if constexpr (kKv == DType::int8) {
      constexpr int kLow = kScoresTile, kHigh = kSumsTile;
      constexpr int kLowWeights = kWeightsTile, kHighWeights = kQueriesTile;
      Machine::template zero<kLow>();
      Machine::template zero<kLow + 1>();
      Machine::template zero<kHigh>();
      Machine::template zero<kHigh + 1>();
      for (std::int64_t group = 0; group < kGroups; ++group, at += stride) {
        Machine::template load<kLowWeights>(weight(0, group), 64);
        Machine::template load_past_l1<kRowsTile>(at, values.stride);
        Machine::template dot_unsigned<kLow, kLowWeights, kRowsTile>();
        Machine::template load<kHighWeights>(weight(1, group), 64);
        Machine::template dot_unsigned<kHigh, kHighWeights, kRowsTile>();
        ahead.prefetch(each);
        if (two) {
          Machine::template load_past_l1<kRowsTile + 1>(at + 64, values.stride);
          Machine::template dot_unsigned<kLow + 1, kLowWeights, kRowsTile + 1>();
          Machine::template dot_unsigned<kHigh + 1, kHighWeights, kRowsTile + 1>();
          ahead.prefetch(each);
        }
      }
      Machine::template store<kLow>(sums + 2 * t * kTileWords, 64);
      Machine::template store<kHigh>(sums + (2 * t + 1) * kTileWords, 64);
      if (two) {
        Machine::template store<kLow + 1>(sums + (2 * t + 2) * kTileWords, 64);
        Machine::template store<kHigh + 1>(sums + (2 * t + 3) * kTileWords, 64);
      }
    } else {
      Machine::template zero<kSumsTile>();
      Machine::template zero<kSumsTile + 1>();
      for (std::int64_t group = 0; group < kGroups; ++group, at += stride) {
        Machine::template load<kWeightsTile>(weight(0, group), 64);
        Machine::template load_past_l1<kRowsTile>(at, values.stride);
        Machine::template dot<kKv, kSumsTile, kWeightsTile, kRowsTile>();
        ahead.prefetch(each);
        if (two) {
          Machine::template load_past_l1<kRowsTile + 1>(at + 64, values.stride);
          Machine::template dot<kKv, kSumsTile + 1, kWeightsTile, kRowsTile + 1>();
          ahead.prefetch(each);
        }
      }
      Machine::template store<kSumsTile>(sums + t * kTileWords, 64);
      if (two) {
        Machine::template store<kSumsTile + 1>(sums + (t + 1) * kTileWords, 64);
      }
    }
  }
}

/// o [4][columns] += those sums, in the order of columns that column_order says.
template <DType kKv>
HWY_INLINE void add_sums(const std::int32_t* HWY_RESTRICT sums, const float (&unit)[4],
                         std::int64_t head_dim_v, std::int64_t columns, float* HWY_RESTRICT o) {
  const D d;
  const std::int64_t tiles = head_dim_v / kTileColumns<kKv>;
  for (std::int64_t t = 0; t < tiles; ++t) {
    for (std::int64_t r = 0; r < 4; ++r) {
      float* const at = o + r * columns + t * kTileColumns<kKv>;
      const std::int64_t row = r * 4 * 16;
      if constexpr (kKv == DType::int8) {
        const DI di;
        const V factor = hn::Set(d, unit[r]);
        const std::int32_t* const low = sums + 2 * t * kTileWords + row;
        RAFTER_UNROLL
        for (std::int64_t i = 0; i < 64; i += kLanes) {
          const auto high = hn::ShiftLeft<8>(hn::Load(di, low + kTileWords + i));
          const V sum = hn::ConvertTo(d, hn::Add(high, hn::Load(di, low + i)));
          hn::Store(hn::MulAdd(factor, sum, hn::Load(d, at + i)), d, at + i);
        }
      } else {
        const float* const from = reinterpret_cast<const float*>(sums) + t * kTileWords + row;
        RAFTER_UNROLL
        for (std::int64_t i = 0; i < 16; i += kLanes) {
          RAFTER_UNROLL
          for (std::int64_t odd = 0; odd < 2; ++odd) {
            float* const to = at + 2 * i + odd * kLanes;
            const float* const part = from + odd * 16 + i;
            const V sum = hn::Add(hn::Load(d, part), hn::Load(d, part + 32));
            hn::Store(hn::Add(hn::Load(d, to), sum), d, to);
          }
        }
      }
    }
  }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
