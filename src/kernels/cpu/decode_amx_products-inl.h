// The two products of decode on tiles: a tile of 64 keys against four query rows. Tiles are loaded
// from the keys as they lie in memory; values are interleaved in pairs of keys on their way.
// Vectors are Highway's; the tiles are those of Machine, AMX or a test's emulation. Compiled once
// per instruction set (Highway's foreach_target).
//   scores   [16 keys][4 rows] = K [16 keys][64 B] Qᵀ
//            bf16: Q as it was given. int8: Q in three signed digits of base 256, so that sums are
//            exact in int32 and the error is 2^-23 of the row's largest element
//   values   [4 high, 4 low][16 columns] = P [4 high, 4 low][32 keys] V: P is cut into two bf16
//   that
//            keep 16 bits of it
#if defined(RAFTER_DECODE_AMX_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_DECODE_AMX_PRODUCTS_INL_H_
#undef RAFTER_DECODE_AMX_PRODUCTS_INL_H_
#else
#define RAFTER_DECODE_AMX_PRODUCTS_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hw/cpu/amx.h"
#include "hw/cpu/unroll.h"
#include "hwy/highway.h"
#include "kernels/cpu/decode_simd_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET != HWY_SCALAR && RAFTER_HAS_AMX_CODE

/// Tile numbers. Two of scores, one of keys or of values, one of queries; weights and three of
/// output.
constexpr int kScoresTile = 0, kKeysTile = 2, kQueriesTile = 3, kWeightsTile = 4, kOutTile = 5;
constexpr std::int64_t kOutTiles = 3;
constexpr std::int64_t kLimbs = 3;              // digits of a query with int8 keys
constexpr std::int64_t kTileBytes = 1024;       // of a whole tile
constexpr std::int64_t kTileKeys = 16;          // rows of a tile of keys
constexpr std::int64_t kPairKeys = 32;          // keys of a tile of values
constexpr std::int64_t kWeightsBytes = 8 * 64;  // of a tile of weights

/// Numbers of a row of queries in a tile: four rows, each of them in three digits with int8 keys.
template <DType kKv>
constexpr std::int64_t kQueryColumns = kKv == DType::int8 ? 4 * kLimbs : 4;
/// Elements of head_dim in a tile of keys.
template <DType kKv>
constexpr std::int64_t kTileDepth = 64 / static_cast<std::int64_t>(sizeof(Element<kKv>));

template <DType kKv>
constexpr std::array<hw::amx::TileShape, 8> tile_shapes() {
  constexpr int kBytes = 4 * static_cast<int>(kQueryColumns<kKv>);
  return {{{16, kBytes}, {16, kBytes}, {16, 64}, {16, kBytes}, {8, 64}, {8, 64}, {8, 64}, {8, 64}}};
}

/// Four query rows as tiles: [head_dim / kTileDepth][16][kQueryColumns] of 4 bytes, then the factor
/// of each digit and row, [kLimbs][4].
struct TileQueries {
  std::uint32_t* tiles = nullptr;
  float* factors = nullptr;
};

/// bf16 rows; a null row is zero.
void pack_tile_queries(const std::uint16_t* const (&rows)[4], std::int64_t head_dim, float scale,
                       const TileQueries& to) {
  for (std::int64_t pair = 0; pair < head_dim / 2; ++pair) {
    for (std::int64_t r = 0; r < 4; ++r) {
      std::uint32_t bits = 0;
      if (rows[r] != nullptr) {
        std::memcpy(&bits, rows[r] + 2 * pair, sizeof(bits));
      }
      to.tiles[pair * 4 + r] = bits;
    }
  }
  std::fill_n(to.factors, 4, scale);
}

/// Rows of f32, padded to whole vectors, as digits: q ≈ unit · (65536 a + 256 b + c).
void pack_tile_digits(const float* q, std::int64_t depth, std::int64_t head_dim,
                      const TileQueries& to) {
  constexpr float kLargest = 127 * 65536;
  constexpr float kLeast = 1e-30f;  // below it, a row is zero
  const D d;
  const hn::Rebind<std::int32_t, D> di;
  const hn::Rebind<std::int8_t, D> d8;
  alignas(64) std::int8_t digits[kLimbs][256 + 64];
  for (std::int64_t r = 0; r < 4; ++r) {
    V top = hn::Zero(d);
    bool finite = true;
    for (std::int64_t c = 0; c < depth; c += kLanes) {
      const V value = hn::Abs(hn::Load(d, q + r * depth + c));
      finite = finite && hn::AllTrue(d, hn::Lt(value, hn::Set(d, HUGE_VALF)));
      top = hn::Max(top, value);
    }
    alignas(64) float lanes[kLanes];
    hn::Store(top, d, lanes);
    const float largest = *std::max_element(lanes, lanes + kLanes);
    // a row that is not finite has scores that are not: NaN
    const bool some = finite && largest >= kLeast;
    const float unit =
        !finite ? std::numeric_limits<float>::quiet_NaN() : (some ? largest / kLargest : 0.0f);
    const V inverse = hn::Set(d, some ? kLargest / largest : 0.0f);
    const auto byte_of = [&](auto n) {  // the lowest digit, −128 to 127
      return hn::Sub(hn::And(hn::Add(n, hn::Set(di, 128)), hn::Set(di, 255)), hn::Set(di, 128));
    };
    for (std::int64_t c = 0; c < depth; c += kLanes) {
      const V value = some ? hn::Load(d, q + r * depth + c) : hn::Zero(d);
      const auto limit = hn::Set(di, 127 * 65536);
      const auto n =
          hn::Min(hn::Max(hn::NearestInt(hn::Mul(value, inverse)), hn::Neg(limit)), limit);
      const auto low = byte_of(n);
      const auto rest = hn::ShiftRight<8>(hn::Sub(n, low));
      const auto middle = byte_of(rest);
      hn::Store(hn::DemoteTo(d8, hn::ShiftRight<8>(hn::Sub(rest, middle))), d8, digits[0] + c);
      hn::Store(hn::DemoteTo(d8, middle), d8, digits[1] + c);
      hn::Store(hn::DemoteTo(d8, low), d8, digits[2] + c);
    }
    for (std::int64_t limb = 0; limb < kLimbs; ++limb) {
      for (std::int64_t four = 0; four < head_dim / 4; ++four) {
        std::memcpy(to.tiles + four * kQueryColumns<DType::int8> + limb * 4 + r,
                    digits[limb] + 4 * four, 4);
      }
    }
    to.factors[r] = unit * 65536;
    to.factors[4 + r] = unit * 256;
    to.factors[8 + r] = unit;
  }
}

/// What the tiles of a thread work in.
struct TileScratch {
  std::byte* rows = nullptr;       // 16 rows of keys, where they do not lie a stride apart
  std::int32_t* sums = nullptr;    // [16 keys][kQueryColumns], int8
  std::byte* weights = nullptr;    // two tiles of weights
  std::uint32_t* pairs = nullptr;  // [column tile][2][16 pairs of keys][16 columns]
  float* out = nullptr;            // [8][columns]
};

/// Scores of kTile keys, [key][4]. `stride` bytes lie between the rows of keys; 0: they are copied.
template <DType kKv, typename Machine>
void scores_on_tiles(const Rows<kKv>& keys, std::int64_t stride, const TileQueries& queries,
                     std::int64_t head_dim, const TileScratch& scratch, float* HWY_RESTRICT s) {
  constexpr std::int64_t kColumns = kQueryColumns<kKv>;
  const std::int64_t steps = head_dim / kTileDepth<kKv>;
  const std::int64_t row_bytes = head_dim * static_cast<std::int64_t>(sizeof(Element<kKv>));
  const auto rows_from = [&](std::int64_t key, std::byte* copy) {
    if (stride != 0) {
      return reinterpret_cast<const std::byte*>(keys[key]);
    }
    for (std::int64_t i = 0; i < kTileKeys; ++i) {
      std::memcpy(copy + i * row_bytes, keys[key + i], static_cast<std::size_t>(row_bytes));
    }
    return static_cast<const std::byte*>(copy);
  };
  const std::int64_t apart = stride != 0 ? stride : row_bytes;
  for (std::int64_t key = 0; key < kTile; key += 2 * kTileKeys) {
    const std::byte* const first = rows_from(key, scratch.rows);
    const std::byte* const second =
        rows_from(key + kTileKeys, scratch.rows + kTileKeys * row_bytes);
    Machine::template zero<kScoresTile>();
    Machine::template zero<kScoresTile + 1>();
    for (std::int64_t step = 0; step < steps; ++step) {
      Machine::template load<kQueriesTile>(queries.tiles + step * 16 * kColumns, 4 * kColumns);
      Machine::template load<kKeysTile>(first + step * 64, apart);
      Machine::template dot<kKv, kScoresTile, kKeysTile, kQueriesTile>();
      Machine::template load<kKeysTile>(second + step * 64, apart);
      Machine::template dot<kKv, kScoresTile + 1, kKeysTile, kQueriesTile>();
      keys.prefetch(2 * kTileKeys / steps);
    }
    if constexpr (kKv == DType::int8) {
      Machine::template store<kScoresTile>(scratch.sums, 4 * kColumns);
      Machine::template store<kScoresTile + 1>(scratch.sums + kTileKeys * kColumns, 4 * kColumns);
      const D4 d;
      const hn::Rebind<std::int32_t, D4> di;
      const auto a = hn::Load(d, queries.factors);
      const auto b = hn::Load(d, queries.factors + 4);
      const auto c = hn::Load(d, queries.factors + 8);
      for (std::int64_t i = 0; i < 2 * kTileKeys; ++i) {
        const std::int32_t* const sum = scratch.sums + i * kColumns;
        auto score = hn::Mul(c, hn::ConvertTo(d, hn::Load(di, sum + 8)));
        score = hn::MulAdd(b, hn::ConvertTo(d, hn::Load(di, sum + 4)), score);
        score = hn::MulAdd(a, hn::ConvertTo(d, hn::Load(di, sum)), score);
        hn::Store(score, d, s + (key + i) * 4);
      }
    } else {
      Machine::template store<kScoresTile>(s + key * 4, 16);
      Machine::template store<kScoresTile + 1>(s + (key + kTileKeys) * 4, 16);
    }
  }
  if constexpr (kKv != DType::int8) {
    const V scale = hn::Set(D(), queries.factors[0]);
    for (std::int64_t i = 0; i < 4 * kTile; i += kLanes) {
      hn::Store(hn::Mul(hn::Load(D(), s + i), scale), D(), s + i);
    }
  }
}

/// Transposes every block of 4 × 4 of four vectors.
HWY_INLINE void transpose_blocks(V& a, V& b, V& c, V& e) {
  const D d;
  const V ac_low = hn::InterleaveLower(d, a, c);
  const V ac_high = hn::InterleaveUpper(d, a, c);
  const V be_low = hn::InterleaveLower(d, b, e);
  const V be_high = hn::InterleaveUpper(d, b, e);
  a = hn::InterleaveLower(d, ac_low, be_low);
  b = hn::InterleaveUpper(d, ac_low, be_low);
  c = hn::InterleaveLower(d, ac_high, be_high);
  e = hn::InterleaveUpper(d, ac_high, be_high);
}

/// Upper halves of the lanes of `even` and `odd`, in turn.
HWY_INLINE hn::Vec<hn::Repartition<std::uint16_t, D>> upper_halves(V even, V odd) {
  const DU du;
  const hn::Repartition<std::uint16_t, D> d16;
  return hn::OddEven(hn::BitCast(d16, odd),
                     hn::BitCast(d16, hn::ShiftRight<16>(hn::BitCast(du, even))));
}

/// The first key of pair `pair` of 32 keys; its second is kLanes later. It is the order in which
/// transpose_blocks leaves keys in lanes.
constexpr std::int64_t first_of_pair(std::int64_t pair) {
  const std::int64_t lane = pair % kLanes;
  return pair / kLanes * 2 * kLanes + kLanes / 4 * (lane % 4) + lane / 4;
}

/// Weights [key][4] as two tiles [4 high, 4 low][32 keys], keys in the order of the pairs.
HWY_INLINE void pack_weights(const float* HWY_RESTRICT p, std::byte* HWY_RESTRICT to) {
  const D d;
  const DU du;
  const hn::Repartition<std::uint16_t, D> d16;
  for (std::int64_t key = 0; key < kTile; key += 2 * kLanes) {
    V rows[2][4];
    for (std::int64_t i = 0; i < 4; ++i) {
      rows[0][i] = hn::Load(d, p + 4 * key + i * kLanes);
      rows[1][i] = hn::Load(d, p + 4 * (key + kLanes) + i * kLanes);
    }
    transpose_blocks(rows[0][0], rows[0][1], rows[0][2], rows[0][3]);
    transpose_blocks(rows[1][0], rows[1][1], rows[1][2], rows[1][3]);
    std::byte* const tile = to + key / kPairKeys * kWeightsBytes + key % kPairKeys * 2;
    const auto low = [&](V x) {  // what the upper half leaves, to nearest
      const V high = hn::BitCast(d, hn::And(hn::BitCast(du, x), hn::Set(du, 0xffff0000u)));
      return hn::BitCast(d, hn::Add(hn::BitCast(du, hn::Sub(x, high)), hn::Set(du, 0x8000u)));
    };
    RAFTER_UNROLL
    for (std::int64_t r = 0; r < 4; ++r) {
      hn::StoreU(upper_halves(rows[0][r], rows[1][r]), d16,
                 reinterpret_cast<std::uint16_t*>(tile + r * 64));
      hn::StoreU(upper_halves(low(rows[0][r]), low(rows[1][r])), d16,
                 reinterpret_cast<std::uint16_t*>(tile + (4 + r) * 64));
    }
  }
}

/// kStep columns of two rows of values, interleaved: those of the two halves of a step.
template <DType kKv>
HWY_INLINE void interleave_step(const Element<kKv>* HWY_RESTRICT even,
                                const Element<kKv>* HWY_RESTRICT odd, std::uint32_t* first,
                                std::uint32_t* second) {
  const DU du;
  const hn::Repartition<std::uint16_t, D> d16;
  if constexpr (kKv == DType::bf16) {
    const auto a = hn::LoadU(d16, even);
    const auto b = hn::LoadU(d16, odd);
    const auto low = hn::BitCast(d16, hn::ShiftLeft<16>(hn::BitCast(du, b)));
    const auto high = hn::BitCast(d16, hn::ShiftRight<16>(hn::BitCast(du, a)));
    hn::Store(hn::BitCast(du, hn::OddEven(low, a)), du, first);
    hn::Store(hn::BitCast(du, hn::OddEven(b, high)), du, second);
  } else {  // integers of a byte are bf16 exactly
    const auto pairs = [&](std::int64_t c) {
      return hn::BitCast(du,
                         upper_halves(math::load_f32<kKv>(even + c), math::load_f32<kKv>(odd + c)));
    };
    hn::Store(pairs(0), du, first);
    hn::Store(pairs(kLanes), du, second);
  }
}

template <typename Machine, int kTiles>
HWY_INLINE void multiply_columns(const TileScratch& scratch, std::int64_t tile,
                                 std::int64_t columns) {
  const auto each = [&]<typename F>(const F& f) {
    f.template operator()<0>();
    if constexpr (kTiles > 1) {
      f.template operator()<1>();
    }
    if constexpr (kTiles > 2) {
      f.template operator()<2>();
    }
  };
  each([]<int kI>() { Machine::template zero<kOutTile + kI>(); });
  for (std::int64_t half = 0; half < 2; ++half) {
    Machine::template load<kWeightsTile>(scratch.weights + half * kWeightsBytes, 64);
    each([&]<int kI>() {
      Machine::template load<kKeysTile>(scratch.pairs + ((tile + kI) * 2 + half) * kTileBytes / 4,
                                        64);
      Machine::template dot<DType::bf16, kOutTile + kI, kWeightsTile, kKeysTile>();
    });
  }
  each([&]<int kI>() {
    Machine::template store<kOutTile + kI>(scratch.out + (tile + kI) * 16, 4 * columns);
  });
}

/// o[4][columns] += P V over kTile keys, which all four rows see.
template <DType kKv, typename Machine>
void values_on_tiles(const Rows<kKv>& values, const float* p, std::int64_t head_dim_v,
                     const TileScratch& scratch, float* HWY_RESTRICT o) {
  const D d;
  pack_weights(p, scratch.weights);
  for (std::int64_t half = 0; half < 2; ++half) {
    for (std::int64_t pair = 0; pair < 16; ++pair) {
      const std::int64_t key = half * kPairKeys + first_of_pair(pair);
      const Element<kKv>* const even = values[key];
      const Element<kKv>* const odd = values[key + kLanes];
      values.prefetch(2);
      for (std::int64_t c = 0; c < head_dim_v; c += kStep) {
        const auto at = [&](std::int64_t column) {
          return scratch.pairs + (column / 16 * 2 + half) * kTileBytes / 4 + pair * 16 +
                 column % 16;
        };
        interleave_step<kKv>(even + c, odd + c, at(c), at(c + kLanes));
      }
    }
  }
  const std::int64_t tiles = head_dim_v / 16;
  std::int64_t tile = 0;
  for (; tile + kOutTiles <= tiles; tile += kOutTiles) {
    multiply_columns<Machine, kOutTiles>(scratch, tile, head_dim_v);
  }
  if (tiles - tile == 2) {
    multiply_columns<Machine, 2>(scratch, tile, head_dim_v);
  } else if (tiles - tile == 1) {
    multiply_columns<Machine, 1>(scratch, tile, head_dim_v);
  }
  for (std::int64_t i = 0; i < 4 * head_dim_v; i += kLanes) {
    const V high = hn::Load(d, scratch.out + i);
    const V low = hn::Load(d, scratch.out + 4 * head_dim_v + i);
    // where a value is infinite, the lower half of a weight may be zero
    const V kept = hn::IfThenElseZero(hn::Lt(hn::Abs(high), hn::Set(d, HUGE_VALF)), low);
    hn::Store(hn::Add(hn::Load(d, o + i), hn::Add(high, kept)), d, o + i);
  }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
