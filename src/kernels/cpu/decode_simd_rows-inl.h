// Rows of queries, keys, values and output of decode as vectors: loads that widen, the order in
// which elements lie in vectors, and rows on their way to the caches. Compiled once per instruction
// set (Highway's foreach_target).
#if defined(RAFTER_DECODE_SIMD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_DECODE_SIMD_ROWS_INL_H_
#undef RAFTER_DECODE_SIMD_ROWS_INL_H_
#else
#define RAFTER_DECODE_SIMD_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/cpu/decode_simd_task.h"
#include "kernels/cpu/forward_simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

namespace math = forward_simd::HWY_NAMESPACE;
namespace hn = math::hn;
using math::D;
using math::D4;
using math::DU;
using math::Element;
using math::kLanes;
using math::V;

/// Elements loaded at once, as two vectors.
constexpr std::int64_t kStep = 2 * kLanes;
constexpr std::int64_t kTile = tiles::kDecodeTile;

/// Whether the elements of a step are widened in place, the even ones and then the odd ones. The
/// query rows and the output follow that order.
template <DType kKv>
constexpr bool kInterleaved = kKv == DType::bf16&& HWY_TARGET != HWY_SCALAR;

/// In what order columns of O lie while they are added to: as they are; the even ones of a step
/// before its odd ones, as bf16 is widened; of 64 every fourth one, as tiles of bytes leave them.
enum class ColumnOrder { natural, pairs, quads };

/// Where column c lies.
constexpr std::int64_t pair_position(std::int64_t c) {
  return c / kStep * kStep + c % 2 * kLanes + c % kStep / 2;
}
constexpr std::int64_t quad_position(std::int64_t c) {
  return c / 64 * 64 + c % 4 * 16 + c % 64 / 4;
}

/// In what order the columns of O lie while a run of this kernel works.
template <DType kKv, typename Machine>
ColumnOrder column_order(const Run& run) {
  const AttentionProblem& p = run.problem();
  if (Machine::kTiles && kKv == DType::int8 &&
      tiles::decode_fits_tiles(1, p.head_dim, p.head_dim_v)) {
    return ColumnOrder::quads;
  }
  return kInterleaved<kKv> ? ColumnOrder::pairs : ColumnOrder::natural;
}

/// One half of kStep elements as f32.
template <DType kKv, int kHalf>
HWY_INLINE V load_half(const Element<kKv>* HWY_RESTRICT from) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (kInterleaved<kKv>) {
    const DU du;
    const hn::Repartition<std::uint16_t, DU> d16;
    const auto pairs = hn::BitCast(du, hn::LoadU(d16, from));
    return hn::BitCast(
        D(), kHalf == 0 ? hn::ShiftLeft<16>(pairs) : hn::And(pairs, hn::Set(du, 0xffff0000u)));
  }
#endif
  return math::load_f32<kKv>(from + kHalf * kLanes);
}

/// The first `count` of kStep elements, zeros after, in `to`; nothing behind them is read.
template <DType kKv>
HWY_INLINE void copy_some(const Element<kKv>* from, std::int64_t count, Element<kKv>* to) {
  std::memset(to, 0, kStep * sizeof(Element<kKv>));
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(Element<kKv>));
}

/// Rows of the tile that comes next, on their way to the L2: all heads of a key, then the next key,
/// as they lie in memory, a few with every step of what is computed meanwhile.
template <DType kKv>
struct Ahead {
  const Element<kKv>* base = nullptr;     // of the first head
  const std::int64_t* offsets = nullptr;  // of the keys, in elements
  std::int64_t keys = 0, heads = 1;       // of them
  std::int64_t stride_heads = 0, bytes = 0;
  std::int64_t key = 0, head = 0;  // what comes next

  HWY_INLINE void step(std::int64_t rows) {
    for (; rows > 0 && key < keys; --rows) {
      const auto* const row =
          reinterpret_cast<const char*>(base + offsets[key] + head * stride_heads);
      for (std::int64_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(row + b, 0, 2);
      }
      if (++head == heads) {
        head = 0;
        ++key;
      }
    }
  }
};

/// Rows of K or V of one head, by key of the tile.
template <DType kKv>
struct Rows {
  const Element<kKv>* base = nullptr;     // of the head
  const std::int64_t* offsets = nullptr;  // of the keys of the tile, in elements
  Ahead<kKv>* ahead = nullptr;            // rows to prefetch meanwhile; null: none

  const Element<kKv>* operator[](std::int64_t key) const { return base + offsets[key]; }
  HWY_INLINE void prefetch(std::int64_t rows) const {
    if (ahead != nullptr) {
      ahead->step(rows);
    }
  }
};

/// A query row as f32 times scale, in the order of load_half, zeros behind it.
template <DType kKv>
void pack_query(const TensorView& q, std::int64_t offset, std::int64_t head_dim, std::int64_t depth,
                float scale, float* HWY_RESTRICT out) {
  const D d;
  alignas(64) float row[256 + kStep];
  const V factor = hn::Set(d, scale);
  for (std::int64_t c = 0; c < depth; c += kLanes) {
    const std::int64_t left = head_dim - c;
    V value;
    if (q.dtype == DType::f32) {
      value = math::load_some_f32<DType::f32>(static_cast<const float*>(q.data) + offset + c, left);
    } else if (q.dtype == DType::bf16) {
      value = math::load_some_f32<DType::bf16>(
          static_cast<const std::uint16_t*>(q.data) + offset + c, left);
    } else {
      value = math::load_some_f32<DType::f16>(
          static_cast<const std::uint16_t*>(q.data) + offset + c, left);
    }
    hn::Store(hn::Mul(value, factor), d, row + c);
  }
  if constexpr (!kInterleaved<kKv>) {
    std::copy_n(row, depth, out);
    return;
  }
  for (std::int64_t c = 0; c < depth; c += kStep) {
    for (std::int64_t i = 0; i < kLanes; ++i) {
      out[c + i] = row[c + 2 * i];
      out[c + kLanes + i] = row[c + 2 * i + 1];
    }
  }
}

/// O = o / sum of one row, in the order of the head's elements, and its lse.
template <DType kKv>
void write_row(const Run& run, const cpu::Sequence& sequence, std::int64_t position,
               std::int64_t head_q, const float* o, float maximum, float sum, ColumnOrder order) {
  const D d;
  const AttentionProblem& problem = run.problem();
  // a row that saw no key has sum 0 and o 0
  const V inverse = hn::Set(d, 1.0f / (sum == 0 ? 1.0f : sum));
  alignas(64) float scaled[256 + kStep];
  alignas(64) float ordered[256 + kStep];
  for (std::int64_t c = 0; c < run.layout.columns; c += kLanes) {
    hn::Store(hn::Mul(hn::Load(d, o + c), inverse), d, scaled + c);
  }
  const float* row = scaled;
  if (order != ColumnOrder::natural) {
    for (std::int64_t c = 0; c < run.layout.columns; ++c) {
      ordered[c] = scaled[order == ColumnOrder::pairs ? pair_position(c) : quad_position(c)];
    }
    row = ordered;
  }
  const TensorView& out = run.call.out.o;
  const std::int64_t offset =
      cpu::offset_of(out, sequence.q_batch, sequence.q_row + position, head_q);
  if (out.dtype == DType::f32) {
    math::store_row<DType::f32>(row, problem.head_dim_v, out.data, offset);
  } else if (out.dtype == DType::bf16) {
    math::store_row<DType::bf16>(row, problem.head_dim_v, out.data, offset);
  } else {
    math::store_row<DType::f16>(row, problem.head_dim_v, out.data, offset);
  }
  if (run.call.out.lse.data != nullptr) {
    *cpu::lse_of(run.call.out.lse, sequence.q_batch, head_q, sequence.q_row + position) =
        math::lse_of_log2(maximum, sum);
  }
}
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
