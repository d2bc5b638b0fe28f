// The scores of decode on tiles: a tile of 64 keys against four query rows. Tiles are loaded from
// the keys as they lie in memory; values stay on vectors (decode_simd_products-inl.h). Vectors are
// Highway's; the tiles are those of Machine, AMX or a test's emulation. Compiled once per
// instruction set (Highway's foreach_target).
//   scores   [16 keys][4 rows] = K [16 keys][64 B] Qᵀ
//            bf16: Q as it was given. int8: Q in three signed digits of base 256, so that sums are
//            exact in int32 and the error is 2^-23 of the row's largest element
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

#include "base/checked.h"
#include "hw/cpu/amx.h"
#include "hwy/highway.h"
#include "kernels/cpu/decode_simd_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET != HWY_SCALAR && RAFTER_HAS_AMX_CODE

/// Tile numbers: four of scores, so that no product waits for the one before it, two of keys by
/// turns, one of queries.
constexpr int kScoresTile = 0, kKeysTile = 4, kQueriesTile = 6;
constexpr std::int64_t kLimbs = 3;      // digits of a query with int8 keys
constexpr std::int64_t kTileKeys = 16;  // rows of a tile of keys
static_assert(kTile == 4 * kTileKeys);

/// Numbers of a row of queries in a tile: four rows, each of them in three digits with int8 keys.
template <DType kKv>
constexpr std::int64_t kQueryColumns = kKv == DType::int8 ? 4 * kLimbs : 4;
/// Elements of head_dim in a tile of keys.
template <DType kKv>
constexpr std::int64_t kTileDepth = 64 / static_cast<std::int64_t>(sizeof(Element<kKv>));

template <DType kKv>
constexpr std::array<hw::amx::TileShape, 8> tile_shapes() {
  constexpr int kBytes = 4 * static_cast<int>(kQueryColumns<kKv>);
  constexpr hw::amx::TileShape kScores = {16, kBytes}, kKeys = {16, 64};
  return {{kScores, kScores, kScores, kScores, kKeys, kKeys, {16, kBytes}, kKeys}};
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
  std::byte* rows = nullptr;     // kTile rows of keys, where they do not lie a stride apart
  std::int32_t* sums = nullptr;  // [kTile][kQueryColumns], int8
};

/// Scores of kTile keys, [key][4]. `stride` bytes lie between the rows of keys; 0: they are copied.
template <DType kKv, typename Machine>
void scores_on_tiles(const Rows<kKv>& keys, std::int64_t stride, const TileQueries& queries,
                     std::int64_t head_dim, const TileScratch& scratch, float* HWY_RESTRICT s) {
  constexpr std::int64_t kColumns = kQueryColumns<kKv>;
  const std::int64_t steps = head_dim / kTileDepth<kKv>;
  const std::int64_t row_bytes = head_dim * static_cast<std::int64_t>(sizeof(Element<kKv>));
  const std::byte* tile[4];
  for (std::int64_t i = 0; i < 4; ++i) {
    tile[i] = reinterpret_cast<const std::byte*>(keys[i * kTileKeys]);
  }
  std::int64_t apart = stride;
  if (stride == 0) {
    apart = row_bytes;
    for (std::int64_t key = 0; key < kTile; ++key) {
      std::memcpy(scratch.rows + key * row_bytes, keys[key], static_cast<std::size_t>(row_bytes));
    }
    for (std::int64_t i = 0; i < 4; ++i) {
      tile[i] = scratch.rows + i * kTileKeys * row_bytes;
    }
  }
  Machine::template zero<kScoresTile>();
  Machine::template zero<kScoresTile + 1>();
  Machine::template zero<kScoresTile + 2>();
  Machine::template zero<kScoresTile + 3>();
  // kTile rows of the next tile of keys, among all products
  const std::int64_t each = base::div_up(kTile, 4 * steps);
  for (std::int64_t step = 0; step < steps; ++step) {
    Machine::template load<kQueriesTile>(queries.tiles + step * 16 * kColumns, 4 * kColumns);
    Machine::template load<kKeysTile>(tile[0] + step * 64, apart);
    Machine::template dot<kKv, kScoresTile, kKeysTile, kQueriesTile>();
    keys.prefetch(each);
    Machine::template load<kKeysTile + 1>(tile[1] + step * 64, apart);
    Machine::template dot<kKv, kScoresTile + 1, kKeysTile + 1, kQueriesTile>();
    keys.prefetch(each);
    Machine::template load<kKeysTile>(tile[2] + step * 64, apart);
    Machine::template dot<kKv, kScoresTile + 2, kKeysTile, kQueriesTile>();
    keys.prefetch(each);
    Machine::template load<kKeysTile + 1>(tile[3] + step * 64, apart);
    Machine::template dot<kKv, kScoresTile + 3, kKeysTile + 1, kQueriesTile>();
    keys.prefetch(each);
  }
  const auto store = [](auto* to, std::int64_t row) {
    Machine::template store<kScoresTile>(to, 4 * row);
    Machine::template store<kScoresTile + 1>(to + kTileKeys * row, 4 * row);
    Machine::template store<kScoresTile + 2>(to + 2 * kTileKeys * row, 4 * row);
    Machine::template store<kScoresTile + 3>(to + 3 * kTileKeys * row, 4 * row);
  };
  if constexpr (kKv == DType::int8) {
    store(scratch.sums, kColumns);
    const D4 d;
    const hn::Rebind<std::int32_t, D4> di;
    const auto a = hn::Load(d, queries.factors);
    const auto b = hn::Load(d, queries.factors + 4);
    const auto c = hn::Load(d, queries.factors + 8);
    for (std::int64_t key = 0; key < kTile; ++key) {
      const std::int32_t* const sum = scratch.sums + key * kColumns;
      auto score = hn::Mul(c, hn::ConvertTo(d, hn::Load(di, sum + 8)));
      score = hn::MulAdd(b, hn::ConvertTo(d, hn::Load(di, sum + 4)), score);
      score = hn::MulAdd(a, hn::ConvertTo(d, hn::Load(di, sum)), score);
      hn::Store(score, d, s + key * 4);
    }
  } else {
    store(s, 4);
    const V scale = hn::Set(D(), queries.factors[0]);
    for (std::int64_t i = 0; i < 4 * kTile; i += kLanes) {
      hn::Store(hn::Mul(hn::Load(D(), s + i), scale), D(), s + i);
    }
  }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
