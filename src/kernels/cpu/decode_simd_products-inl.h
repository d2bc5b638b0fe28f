// The two products of decode on vectors: scores of a tile of keys, and values times weights.
// head_dim lies in lanes: keys and values stream through registers as they lie in memory, once for
// every four query rows. Compiled once per instruction set (Highway's foreach_target).
#if defined(RAFTER_DECODE_SIMD_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_DECODE_SIMD_PRODUCTS_INL_H_
#undef RAFTER_DECODE_SIMD_PRODUCTS_INL_H_
#else
#define RAFTER_DECODE_SIMD_PRODUCTS_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "base/checked.h"
#include "hw/cpu/unroll.h"
#include "hwy/highway.h"
#include "kernels/cpu/decode_simd_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

/// Lane i of the result is op over the lanes of the i-th vector; the order is the same for each.
template <typename Op>
HWY_INLINE hn::Vec<D4> over_lanes(V a, V b, V c, V e, const Op& op) {
#if HWY_TARGET == HWY_SCALAR
  math::transpose4(a, b, c, e);
  return op(op(a, c), op(b, e));
#else
  const D d;
  const hn::Repartition<double, D> pairs;
  const V ab = op(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const V ce = op(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto low = hn::InterleaveLower(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, ce));
  const auto high = hn::InterleaveUpper(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, ce));
  const V quarters = op(hn::BitCast(d, low), hn::BitCast(d, high));
  const hn::Half<D> half;
  const auto halves = op(hn::LowerHalf(half, quarters), hn::UpperHalf(half, quarters));
#if HWY_TARGET == HWY_AVX3
  return op(hn::LowerHalf(D4(), halves), hn::UpperHalf(D4(), halves));
#else
  return halves;
#endif
#endif
}
HWY_INLINE hn::Vec<D4> sums_of_lanes(V a, V b, V c, V e) {
  return over_lanes(a, b, c, e, [](auto x, auto y) { return hn::Add(x, y); });
}

/// Keys of a register block of kRows query rows: sums enough that additions in flight hide their
/// latency, as many as registers hold beside a vector of each key and one of a query.
template <int kRows>
constexpr int kKeys = HWY_TARGET == HWY_AVX3                ? 16 / kRows
                      : HWY_TARGET == HWY_AVX2&& kRows == 4 ? 3
                                                            : 8 / kRows;

/// Adds to the sums of a block one half of a step of keys times queries.
template <DType kKv, int kHalf, int kRows>
HWY_INLINE void scores_half(const Element<kKv>* const (&row)[kKeys<kRows>], std::int64_t column,
                            const float* HWY_RESTRICT q, std::int64_t depth,
                            V (&sum)[kKeys<kRows>][kRows]) {
  V key[kKeys<kRows>];
  RAFTER_UNROLL
  for (int k = 0; k < kKeys<kRows>; ++k) {
    key[k] = load_half<kKv, kHalf>(row[k] + column);
  }
  RAFTER_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const V query = hn::Load(D(), q + r * depth + kHalf * kLanes);
    RAFTER_UNROLL
    for (int k = 0; k < kKeys<kRows>; ++k) {
      sum[k][r] = hn::MulAdd(query, key[k], sum[k][r]);
    }
  }
}

/// Scores of kKeys keys, [key][kRows]. Keys at or past `count` repeat the last one. As many
/// rows of what comes next are prefetched.
template <DType kKv, int kRows>
HWY_INLINE void scores_block(const Rows<kKv>& keys, std::int64_t key, std::int64_t count,
                             const float* HWY_RESTRICT q, std::int64_t depth, std::int64_t head_dim,
                             float* HWY_RESTRICT s) {
  constexpr int kCount = kKeys<kRows>;
  V sum[kCount][kRows];
  const Element<kKv>* row[kCount];
  RAFTER_UNROLL
  for (int k = 0; k < kCount; ++k) {
    row[k] = keys[std::min(key + k, count - 1)];
    RAFTER_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sum[k][r] = hn::Zero(D());
    }
  }
  // a row at a time among the products: a burst would hold the buffers that loads wait for
  const std::int64_t each = base::div_up(kCount, std::max<std::int64_t>(1, head_dim / kStep));
  std::int64_t ahead = 0;
  std::int64_t c = 0;
  for (; c + kStep <= head_dim; c += kStep) {
    if (ahead < kCount) {
      keys.prefetch(each);
      ahead += each;
    }
    scores_half<kKv, 0, kRows>(row, c, q + c, depth, sum);
    scores_half<kKv, 1, kRows>(row, c, q + c, depth, sum);
  }
  if (c < head_dim) {
    keys.prefetch(kCount - ahead);
    alignas(64) Element<kKv> rest[kCount][kStep];
    for (int k = 0; k < kCount; ++k) {
      copy_some<kKv>(row[k] + c, head_dim - c, rest[k]);
      row[k] = rest[k];
    }
    scores_half<kKv, 0, kRows>(row, 0, q + c, depth, sum);
    scores_half<kKv, 1, kRows>(row, 0, q + c, depth, sum);
  }
  // four sums at a time, in the order of s: [key][row]
  RAFTER_UNROLL
  for (int i = 0; i < kCount * kRows; i += 4) {
    if (key + i / kRows >= count) {
      break;  // what s has room for ends with the last four
    }
    hn::Store(
        sums_of_lanes(sum[i / kRows][i % kRows], sum[(i + 1) / kRows][(i + 1) % kRows],
                      sum[(i + 2) / kRows][(i + 2) % kRows], sum[(i + 3) / kRows][(i + 3) % kRows]),
        D4(), s + i);
  }
}

/// o[kRows][kSteps · kStep columns] += P V over the keys [first, last) of the tile; weights of a
/// key lie `stride` apart. With kPartial the step has only `left` columns. A row of what comes next
/// is prefetched with `every` keys.
template <DType kKv, int kRows, int kSteps, bool kPartial>
HWY_INLINE void values_block(const Rows<kKv>& values, std::int64_t first, std::int64_t last,
                             const float* HWY_RESTRICT p, std::int64_t stride, std::int64_t column,
                             std::int64_t left, std::int64_t columns, std::int64_t every,
                             float* HWY_RESTRICT o) {
  const D d;
  V sum[kSteps][2][kRows];
  RAFTER_UNROLL
  for (int i = 0; i < kSteps; ++i) {
    RAFTER_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sum[i][0][r] = hn::Zero(d);
      sum[i][1][r] = hn::Zero(d);
    }
  }
  for (std::int64_t begin = first; begin < last; begin += every) {
    values.prefetch(1);
    const std::int64_t end = std::min(begin + every, last);
    for (std::int64_t key = begin; key < end; ++key) {
      const Element<kKv>* row = values[key] + column;
      alignas(64) Element<kKv> rest[kStep];
      if constexpr (kPartial) {
        copy_some<kKv>(row, left, rest);
        row = rest;
      }
      V value[kSteps][2];
      RAFTER_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        value[i][0] = load_half<kKv, 0>(row + i * kStep);
        value[i][1] = load_half<kKv, 1>(row + i * kStep);
      }
      RAFTER_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const V weight = hn::Set(d, p[key * stride + r]);
        RAFTER_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          sum[i][0][r] = hn::MulAdd(weight, value[i][0], sum[i][0][r]);
          sum[i][1][r] = hn::MulAdd(weight, value[i][1], sum[i][1][r]);
        }
      }
    }
  }
  RAFTER_UNROLL
  for (int r = 0; r < kRows; ++r) {
    RAFTER_UNROLL
    for (int i = 0; i < 2 * kSteps; ++i) {
      float* const at = o + r * columns + column + i * kLanes;
      hn::Store(hn::Add(hn::Load(d, at), sum[i / 2][i % 2][r]), d, at);
    }
  }
}

/// The same over all columns.
template <DType kKv, int kRows>
HWY_INLINE void add_columns(const Rows<kKv>& values, std::int64_t first, std::int64_t last,
                            const float* p, std::int64_t stride, std::int64_t head_dim_v,
                            std::int64_t columns, float* o) {
  constexpr int kInFlight = HWY_TARGET == HWY_AVX3 ? 16 : 8;
  constexpr int kSteps = std::min(kInFlight / 2 / kRows, 4);
  constexpr std::int64_t kBlock = kSteps * kStep;
  const std::int64_t every = std::max<std::int64_t>(1, head_dim_v / kBlock);
  std::int64_t c = 0;
  for (; c + kBlock <= head_dim_v; c += kBlock) {
    values_block<kKv, kRows, kSteps, false>(values, first, last, p, stride, c, kStep, columns,
                                            every, o);
  }
  for (; c + kStep <= head_dim_v; c += kStep) {
    values_block<kKv, kRows, 1, false>(values, first, last, p, stride, c, kStep, columns, every, o);
  }
  if (c < head_dim_v) {
    values_block<kKv, kRows, 1, true>(values, first, last, p, stride, c, head_dim_v - c, columns,
                                      every, o);
  }
}

/// Whole loops over 128 elements that the compiler sees to be 128 take four fifths of the time of
/// loops over as many as there are.
inline constexpr std::int64_t kUsualDim = 128;

template <DType kKv, int kRows>
void add_values(const Rows<kKv>& values, std::int64_t first, std::int64_t last, const float* p,
                std::int64_t stride, std::int64_t head_dim_v, std::int64_t columns, float* o) {
  if (head_dim_v == kUsualDim) {
    add_columns<kKv, kRows>(values, first, last, p, stride, kUsualDim, kUsualDim, o);
  } else {
    add_columns<kKv, kRows>(values, first, last, p, stride, head_dim_v, columns, o);
  }
}

/// o += P V over the keys of a tile. A row that does not see all of them is added by itself over
/// those that it sees: V elsewhere may hold anything.
template <DType kKv, int kRows>
void values_tile(const Rows<kKv>& values, const Tile& tile, const RowBlock& block,
                 std::int64_t head_dim_v, std::int64_t columns) {
  if (sees_all<kRows>(tile, block)) {
    add_values<kKv, kRows>(values, 0, tile.keys, block.s, kRows, head_dim_v, columns, block.o);
    return;
  }
  for (int r = 0; r < kRows; ++r) {
    const tiles::Range seen = block.seen[r];
    if (seen.first < seen.last) {
      add_values<kKv, 1>(values, seen.first, seen.last, block.s + r, kRows, head_dim_v, columns,
                         block.o + r * columns);
    }
  }
}

template <DType kKv, int kRows>
HWY_INLINE void scores_of_tile(const Rows<kKv>& keys, const Tile& tile, const RowBlock& block,
                               std::int64_t depth, std::int64_t head_dim) {
  for (std::int64_t key = 0; key < tile.keys; key += kKeys<kRows>) {
    scores_block<kKv, kRows>(keys, key, tile.keys, block.q, depth, head_dim, block.s + key * kRows);
  }
}

template <DType kKv, int kRows>
void scores_tile(const Rows<kKv>& keys, const Tile& tile, const RowBlock& block, std::int64_t depth,
                 std::int64_t head_dim) {
  if (head_dim == kUsualDim) {
    scores_of_tile<kKv, kRows>(keys, tile, block, kUsualDim, kUsualDim);
  } else {
    scores_of_tile<kKv, kRows>(keys, tile, block, depth, head_dim);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
