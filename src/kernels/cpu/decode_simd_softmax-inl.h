// The softmax of decode over a tile of keys: scale, softcap, mask, maximum, exp2 and sum of up to
// four query rows side by side. Compiled once per instruction set (Highway's foreach_target).
#if defined(RAFTER_DECODE_SIMD_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_DECODE_SIMD_SOFTMAX_INL_H_
#undef RAFTER_DECODE_SIMD_SOFTMAX_INL_H_
#else
#define RAFTER_DECODE_SIMD_SOFTMAX_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/decode_simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

/// [key][kRows] values times the factor of each key.
template <int kRows>
HWY_INLINE void scale_by_key(const float* HWY_RESTRICT factors, std::int64_t keys,
                             float* HWY_RESTRICT s) {
  for (std::int64_t key = 0; key < keys; ++key) {
    for (int r = 0; r < kRows; ++r) {
      s[key * kRows + r] *= factors[key];
    }
  }
}

/// What a tile of keys is to the query rows of an item.
struct Tile {
  std::int64_t begin = 0;  // first key
  std::int64_t keys = 0;
  float softcap_log2 = 0;          // softcap · log2 e, or 0
  const float* k_scale = nullptr;  // of each key; null: none
  const float* v_scale = nullptr;
};

/// Some query rows that go through registers together: their state and where they lie.
struct RowBlock {
  const float* q = nullptr;
  float* s = nullptr;        // [kTile][rows of the block]
  float* o = nullptr;        // [rows of the block][columns]
  float* maximum = nullptr;  // [rows of the block]
  float* sum = nullptr;
  tiles::Range seen[4];  // keys of the tile that each row sees
};

template <int kRows>
bool sees_all(const Tile& tile, const RowBlock& block) {
  return std::all_of(block.seen, block.seen + kRows, [&](const tiles::Range& seen) {
    return seen.first <= 0 && tile.keys <= seen.last;
  });
}

/// Scale, softcap and mask on the scores of a tile; lanes past its keys become −∞.
template <int kRows>
void adjust_scores(const Tile& tile, const RowBlock& block) {
  const D d;
  const std::int64_t count = tile.keys * kRows;
  const std::int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  if (tile.k_scale != nullptr) {
    scale_by_key<kRows>(tile.k_scale, tile.keys, block.s);
  }
  if (tile.softcap_log2 > 0) {
    const V cap = hn::Set(d, tile.softcap_log2);
    for (std::int64_t i = 0; i < padded; i += kLanes) {
      hn::Store(hn::Mul(cap, math::tanh_of(hn::Load(d, block.s + i))), d, block.s + i);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const tiles::Range seen = block.seen[r];
    for (std::int64_t key = 0; key < seen.first; ++key) {
      block.s[key * kRows + r] = math::kMinusInfinity;
    }
    for (std::int64_t key = seen.last; key < tile.keys; ++key) {
      block.s[key * kRows + r] = math::kMinusInfinity;
    }
  }
  std::fill(block.s + count, block.s + padded, math::kMinusInfinity);
}

/// Scores become weights 2^(score − maximum); what the rows had so far is scaled to the new
/// maximum.
template <int kRows>
void softmax(const Tile& tile, const RowBlock& block, std::int64_t columns) {
  const D d;
  const std::int64_t padded = (tile.keys * kRows + kLanes - 1) / kLanes * kLanes;
  V top = hn::Set(d, math::kMinusInfinity);
  for (std::int64_t i = 0; i < padded; i += kLanes) {
    top = hn::Max(top, hn::Load(d, block.s + i));
  }
  alignas(64) float lanes[kLanes];
  alignas(64) float base[kLanes];
  hn::Store(top, d, lanes);
  float alpha[kRows];
  for (int r = 0; r < kRows; ++r) {
    float now = block.maximum[r];
    for (std::int64_t i = r; i < kLanes; i += kRows) {
      now = lanes[i] > now ? lanes[i] : now;
    }
    // a row that has seen no key yet: 2^(−∞ − 0) = 0 for all of its scores
    const float from = now == math::kMinusInfinity ? 0.0f : now;
    alpha[r] = block.maximum[r] - from;
    block.maximum[r] = now;
    for (std::int64_t i = r; i < kLanes; i += kRows) {
      base[i] = from;
    }
  }
  const V subtract = hn::Load(d, base);
  V total = hn::Zero(d);
  for (std::int64_t i = 0; i < padded; i += kLanes) {
    const V p = math::exp2_of(hn::Sub(hn::Load(d, block.s + i), subtract));
    total = hn::Add(total, p);
    hn::Store(p, d, block.s + i);
  }
  hn::Store(total, d, lanes);
  for (int r = 0; r < kRows; ++r) {
    float sum = 0;
    for (std::int64_t i = r; i < kLanes; i += kRows) {
      sum += lanes[i];
    }
    if (block.sum[r] != 0 && alpha[r] == 0) {  // the maximum has not moved
      sum += block.sum[r];
    } else if (block.sum[r] != 0) {  // not the first keys: NaN is not 0 either
      alignas(64) float factor[kLanes];
      hn::Store(math::exp2_of(hn::Set(d, alpha[r])), d, factor);
      sum += block.sum[r] * factor[0];
      float* const o = block.o + r * columns;
      for (std::int64_t c = 0; c < columns; c += kLanes) {
        hn::Store(hn::Mul(hn::Load(d, o + c), hn::Set(d, factor[0])), d, o + c);
      }
    }
    block.sum[r] = sum;
  }
  if (tile.v_scale != nullptr) {
    scale_by_key<kRows>(tile.v_scale, tile.keys, block.s);
  }
}
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
