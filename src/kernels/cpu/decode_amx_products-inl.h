// The scores of decode on tiles: a tile of 64 keys against four query rows. Tiles are loaded from
// the keys as they lie in memory (values too: decode_amx_values-inl.h). Vectors are Highway's; the
// tiles are those of Machine, AMX or a test's emulation. Compiled once per instruction set
// (Highway's foreach_target).
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
#include "hw/cpu/unroll.h"
#include "hwy/highway.h"
#include "kernels/cpu/decode_simd_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET != HWY_SCALAR && RAFTER_HAS_AMX_CODE

using DI = hn::Rebind<std::int32_t, D>;

/// Tile numbers, two of each by turns: scores, sums of values, rows of keys or values. The queries'
/// tile is as narrow as those of scores.
constexpr int kScoresTile = 0, kSumsTile = 2, kRowsTile = 4, kQueriesTile = 6, kWeightsTile = 7;
constexpr std::int64_t kLimbs = 3;      // digits of a query with int8 keys
constexpr std::int64_t kTileKeys = 16;  // rows of a tile of keys
static_assert(kTile == 4 * kTileKeys);

/// Numbers of a row of queries in a tile: four rows; with int8 keys each of them in three digits,
/// and four zeros.
template <DType kKv>
constexpr std::int64_t kQueryColumns = kKv == DType::int8 ? 4 * (kLimbs + 1) : 4;
/// Elements of head_dim in a tile of keys.
template <DType kKv>
constexpr std::int64_t kTileDepth = 64 / static_cast<std::int64_t>(sizeof(Element<kKv>));

template <DType kKv>
constexpr std::array<hw::amx::TileShape, 8> tile_shapes() {
  constexpr int kBytes = 4 * static_cast<int>(kQueryColumns<kKv>);
  constexpr hw::amx::TileShape kNarrow = {16, kBytes}, kWhole = {16, 64};
  return {{kNarrow, kNarrow, kWhole, kWhole, kWhole, kWhole, kNarrow, kWhole}};
}

/// Four query rows as tiles: [head_dim / kTileDepth][16][kQueryColumns] of 4 bytes, then the factor
/// of each digit and row, [kLimbs][4].
struct TileQueries {
  std::uint32_t* tiles = nullptr;
  float* factors = nullptr;
};

/// Four words of each of four rows to four rows, `stride` words apart, of a word of each.
HWY_INLINE void transpose_words(const std::uint32_t* r0, const std::uint32_t* r1,
                                const std::uint32_t* r2, const std::uint32_t* r3, std::uint32_t* to,
                                std::int64_t stride) {
  const D4 d;
  const hn::Rebind<std::uint32_t, D4> du;
  const auto load = [&](const std::uint32_t* from) { return hn::BitCast(d, hn::LoadU(du, from)); };
  auto a = load(r0), b = load(r1), c = load(r2), e = load(r3);
  math::transpose4(a, b, c, e);
  hn::Store(hn::BitCast(du, a), du, to);
  hn::Store(hn::BitCast(du, b), du, to + stride);
  hn::Store(hn::BitCast(du, c), du, to + 2 * stride);
  hn::Store(hn::BitCast(du, e), du, to + 3 * stride);
}

/// bf16 rows; a null row is zero.
void pack_tile_queries(const std::uint16_t* const (&rows)[4], std::int64_t head_dim, float scale,
                       const TileQueries& to) {
  for (std::int64_t pair = 0; pair < head_dim / 2; pair += 4) {
    std::uint32_t words[4][4] = {};
    for (std::int64_t r = 0; r < 4; ++r) {
      if (rows[r] != nullptr) {
        std::memcpy(words[r], rows[r] + 2 * pair, sizeof(words[r]));
      }
    }
    transpose_words(words[0], words[1], words[2], words[3], to.tiles + pair * 4, 4);
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
  alignas(64) std::int8_t digits[4][kLimbs][256 + 64];
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
      hn::Store(hn::DemoteTo(d8, hn::ShiftRight<8>(hn::Sub(rest, middle))), d8, digits[r][0] + c);
      hn::Store(hn::DemoteTo(d8, middle), d8, digits[r][1] + c);
      hn::Store(hn::DemoteTo(d8, low), d8, digits[r][2] + c);
    }
    to.factors[r] = unit * 65536;
    to.factors[4 + r] = unit * 256;
    to.factors[8 + r] = unit;
  }
  std::fill_n(to.tiles, head_dim / 4 * kQueryColumns<DType::int8>, 0u);
  for (std::int64_t limb = 0; limb < kLimbs; ++limb) {
    for (std::int64_t four = 0; four < head_dim / 4; four += 4) {
      const auto row = [&](std::int64_t r) {
        return reinterpret_cast<const std::uint32_t*>(digits[r][limb]) + four;
      };
      transpose_words(row(0), row(1), row(2), row(3),
                      to.tiles + four * kQueryColumns<DType::int8> + limb * 4,
                      kQueryColumns<DType::int8>);
    }
  }
}

/// Where kTile rows of keys or values are read: from `at` on, `stride` bytes apart.
struct TileRows {
  const std::byte* at = nullptr;
  std::int64_t stride = 0;
};

/// Rows of keys or values as tiles load them: in place where they lie `stride` bytes apart; where
/// `stride` is 0, copied to `scratch`.
template <DType kKv>
TileRows rows_for_tiles(const Rows<kKv>& rows, std::int64_t stride, std::int64_t dim,
                        std::byte* scratch) {
  if (stride != 0) {
    return {reinterpret_cast<const std::byte*>(rows[0]), stride};
  }
  const std::int64_t row_bytes = dim * static_cast<std::int64_t>(sizeof(Element<kKv>));
  for (std::int64_t key = 0; key < kTile; ++key) {
    std::memcpy(scratch + key * row_bytes, rows[key], static_cast<std::size_t>(row_bytes));
  }
  return {scratch, row_bytes};
}

/// Sums of products of kTile keys and four query rows, [key][kQueryColumns] of 4 bytes. As many
/// rows of `ahead` are prefetched. Keys are used once: they are loaded past the L1.
template <DType kKv, typename Machine>
HWY_INLINE void sums_on_tiles(const TileRows& keys, const TileQueries& queries,
                              std::int64_t head_dim, const Rows<kKv>& ahead,
                              std::int32_t* HWY_RESTRICT sums) {
  constexpr std::int64_t kColumns = kQueryColumns<kKv>;
  const std::int64_t steps = head_dim / kTileDepth<kKv>;
  const std::int64_t each = base::div_up(kTile, 4 * steps);
  for (std::int64_t key = 0; key < kTile; key += 2 * kTileKeys) {
    const std::byte* const from = keys.at + key * keys.stride;
    const std::byte* const next = from + kTileKeys * keys.stride;
    Machine::template zero<kScoresTile>();
    Machine::template zero<kScoresTile + 1>();
    for (std::int64_t step = 0; step < steps; ++step) {
      Machine::template load<kQueriesTile>(queries.tiles + step * 16 * kColumns, 4 * kColumns);
      Machine::template load_past_l1<kRowsTile>(from + step * 64, keys.stride);
      Machine::template dot<kKv, kScoresTile, kRowsTile, kQueriesTile>();
      ahead.prefetch(each);
      Machine::template load_past_l1<kRowsTile + 1>(next + step * 64, keys.stride);
      Machine::template dot<kKv, kScoresTile + 1, kRowsTile + 1, kQueriesTile>();
      ahead.prefetch(each);
    }
    std::int32_t* const to = sums + key * kColumns;
    Machine::template store<kScoresTile>(to, 4 * kColumns);
    Machine::template store<kScoresTile + 1>(to + kTileKeys * kColumns, 4 * kColumns);
  }
}

/// Of four vectors [kLanes / 4 keys][4 rows], [4 rows][kLanes keys].
HWY_INLINE void rows_of_keys(V (&a)[4]) {
#if HWY_TARGET == HWY_AVX3
  const D d;
  alignas(64) static constexpr std::int32_t kOrder[2][16] = {
      {0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29},
      {2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31}};
  const auto two_rows = [](V x, int row, V y) {
    return V{_mm512_permutex2var_ps(x.raw, _mm512_load_si512(kOrder[row / 2]), y.raw)};
  };
  const V low01 = two_rows(a[0], 0, a[1]), low23 = two_rows(a[0], 2, a[1]);
  const V high01 = two_rows(a[2], 0, a[3]), high23 = two_rows(a[2], 2, a[3]);
  a[0] = hn::ConcatLowerLower(d, high01, low01);
  a[1] = hn::ConcatUpperUpper(d, high01, low01);
  a[2] = hn::ConcatLowerLower(d, high23, low23);
  a[3] = hn::ConcatUpperUpper(d, high23, low23);
#else
  alignas(64) float from[kLanes][4];
  alignas(64) float to[4][kLanes];
  for (std::int64_t i = 0; i < 4; ++i) {
    hn::Store(a[i], D(), &from[0][0] + i * kLanes);
  }
  for (std::int64_t i = 0; i < 4 * kLanes; ++i) {
    to[i / kLanes][i % kLanes] = from[i % kLanes][i / kLanes];
  }
  for (std::int64_t i = 0; i < 4; ++i) {
    a[i] = hn::Load(D(), to[i]);
  }
#endif
}

/// Four numbers of each of kLanes / 4 rows that lie `stride` apart.
HWY_INLINE hn::Vec<DI> load_blocks(const std::int32_t* from, std::int64_t stride) {
  const DI d;
  const hn::Rebind<std::int32_t, D4> d4;
  const auto at = [&](std::int64_t i) { return hn::Load(d4, from + i * stride); };
#if HWY_TARGET == HWY_AVX3
  const hn::Half<decltype(d)> half;
  return hn::Combine(d, hn::Combine(half, at(3), at(2)), hn::Combine(half, at(1), at(0)));
#else
  return hn::Combine(d, at(1), at(0));
#endif
}

/// Those sums as scores, [4 rows][kTile].
template <DType kKv>
HWY_INLINE void scores_of_sums(const std::int32_t* HWY_RESTRICT sums, const float* factors,
                               float* HWY_RESTRICT s) {
  const D d;
  for (std::int64_t key = 0; key < kTile; key += kLanes) {
    V score[4];
    RAFTER_UNROLL
    for (int j = 0; j < 4; ++j) {
      if constexpr (kKv == DType::int8) {
        constexpr std::int64_t kColumns = kQueryColumns<kKv>;
        const std::int32_t* const from = sums + (key + j * kLanes / 4) * kColumns;
        const auto digit = [&](std::int64_t i) {
          return hn::ConvertTo(d, load_blocks(from + 4 * i, kColumns));
        };
        const auto factor = [&](std::int64_t i) { return hn::LoadDup128(d, factors + 4 * i); };
        score[j] = hn::Mul(factor(2), digit(2));
        score[j] = hn::MulAdd(factor(1), digit(1), score[j]);
        score[j] = hn::MulAdd(factor(0), digit(0), score[j]);
      } else {
        score[j] =
            hn::Mul(hn::LoadDup128(d, factors),
                    hn::Load(d, reinterpret_cast<const float*>(sums) + 4 * key + j * kLanes));
      }
    }
    rows_of_keys(score);
    RAFTER_UNROLL
    for (int r = 0; r < 4; ++r) {
      hn::Store(score[r], d, s + r * kTile + key);
    }
  }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
