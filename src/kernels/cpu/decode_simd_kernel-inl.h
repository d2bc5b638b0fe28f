// One item of decode: up to kDecodeRows query rows of each of some KV heads against one part of the
// keys of a sequence. head_dim lies in lanes: keys and values stream through registers as they lie
// in memory, once for every four query rows, and nothing is packed but the queries.
// Compiled once per instruction set (Highway's foreach_target).
#if defined(RAFTER_DECODE_SIMD_KERNEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_DECODE_SIMD_KERNEL_INL_H_
#undef RAFTER_DECODE_SIMD_KERNEL_INL_H_
#else
#define RAFTER_DECODE_SIMD_KERNEL_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "hw/cpu/unroll.h"
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
/// Accumulators of a register block: enough that additions in flight hide their latency, and on
/// AVX-512, which has the registers, that a load of the query rows serves four keys.
constexpr int kInFlight = HWY_TARGET == HWY_AVX3 ? 16 : 8;
constexpr std::int64_t kTile = tiles::kDecodeTile;
constexpr std::int64_t kChunk = tiles::kDecodeChunk;

/// bf16 vectors hold the even and the odd elements of a step: a shift and a mask widen them in
/// place. The query rows and the output follow that order.
template <DType kKv>
constexpr bool kInterleaved = kKv == DType::bf16&& HWY_TARGET != HWY_SCALAR;

/// kStep elements as f32.
template <DType kKv>
HWY_INLINE void load_step(const Element<kKv>* HWY_RESTRICT from, V& first, V& second) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (kInterleaved<kKv>) {
    const D d;
    const DU du;
    const hn::Repartition<std::uint16_t, DU> d16;
    const auto pairs = hn::BitCast(du, hn::LoadU(d16, from));
    first = hn::BitCast(d, hn::ShiftLeft<16>(pairs));
    second = hn::BitCast(d, hn::And(pairs, hn::Set(du, 0xffff0000u)));
    return;
  }
#endif
  first = math::load_f32<kKv>(from);
  second = math::load_f32<kKv>(from + kLanes);
}

/// The first `count` of them, zeros after; nothing behind them is read.
template <DType kKv>
HWY_INLINE void load_some_step(const Element<kKv>* from, std::int64_t count, V& first, V& second) {
  alignas(64) Element<kKv> buffer[kStep] = {};
  std::memcpy(buffer, from, static_cast<std::size_t>(count) * sizeof(Element<kKv>));
  load_step<kKv>(buffer, first, second);
}

/// Lane i of the result is the sum of the lanes of sum[i]; the order of additions is the same for
/// each.
HWY_INLINE hn::Vec<D4> sums_of_lanes(V a, V b, V c, V e) {
#if HWY_TARGET == HWY_SCALAR
  math::transpose4(a, b, c, e);
  return hn::Add(hn::Add(a, c), hn::Add(b, e));
#else
  const D d;
  const hn::Repartition<double, D> pairs;
  const V ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const V ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto low = hn::InterleaveLower(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, ce));
  const auto high = hn::InterleaveUpper(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, ce));
  const V quarters = hn::Add(hn::BitCast(d, low), hn::BitCast(d, high));
  const hn::Half<D> half;
  const auto halves = hn::Add(hn::LowerHalf(half, quarters), hn::UpperHalf(half, quarters));
#if HWY_TARGET == HWY_AVX3
  return hn::Add(hn::LowerHalf(D4(), halves), hn::UpperHalf(D4(), halves));
#else
  return halves;
#endif
#endif
}

/// The lines of a row of `bytes`, on their way to the caches.
HWY_INLINE void prefetch_row(const void* row, std::int64_t bytes) {
  for (std::int64_t b = 0; b < bytes; b += 64) {
    __builtin_prefetch(static_cast<const char*>(row) + b, 0, 3);
  }
}

/// Rows of K or V of one head, by key of the chunk. Those of the next tile to be read are
/// prefetched while these are computed with.
template <DType kKv>
struct Rows {
  const Element<kKv>* base = nullptr;       // of the head
  const std::int64_t* offsets = nullptr;    // of the keys of the tile, in elements
  const Element<kKv>* next_base = nullptr;  // of what comes next; null: nothing
  const std::int64_t* next_offsets = nullptr;
  std::int64_t next_count = 0;
  std::int64_t next_bytes = 0;

  const Element<kKv>* operator[](std::int64_t key) const { return base + offsets[key]; }
  HWY_INLINE void prefetch(std::int64_t key, std::int64_t count) const {
    const std::int64_t last = std::min(key + count, next_count);
    for (std::int64_t i = key; i < last; ++i) {
      prefetch_row(next_base + next_offsets[i], next_bytes);
    }
  }
};

/// The sums of a block plus one step of keys times queries.
template <int kKeys, int kRows>
HWY_INLINE void scores_step(const V (&first)[kKeys], const V (&second)[kKeys],
                            const float* HWY_RESTRICT q, std::int64_t depth,
                            V (&sum)[kKeys][kRows]) {
  const D d;
  RAFTER_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const V query = hn::Load(d, q + r * depth);
    RAFTER_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      sum[k][r] = hn::MulAdd(query, first[k], sum[k][r]);
    }
  }
  RAFTER_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const V query = hn::Load(d, q + r * depth + kLanes);
    RAFTER_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      sum[k][r] = hn::MulAdd(query, second[k], sum[k][r]);
    }
  }
}

/// Scores of kInFlight / kRows keys, [key][kRows]. Keys at or past `count` repeat the last one.
template <DType kKv, int kRows>
HWY_INLINE void scores_block(const Rows<kKv>& keys, std::int64_t key, std::int64_t count,
                             const float* HWY_RESTRICT q, std::int64_t depth, std::int64_t head_dim,
                             float* HWY_RESTRICT s) {
  constexpr int kKeys = kInFlight / kRows;
  const D d;
  V sum[kKeys][kRows];
  const Element<kKv>* row[kKeys];
  RAFTER_UNROLL
  for (int k = 0; k < kKeys; ++k) {
    row[k] = keys[std::min(key + k, count - 1)];
    RAFTER_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sum[k][r] = hn::Zero(d);
    }
  }
  V first[kKeys], second[kKeys];
  std::int64_t c = 0;
  for (; c + kStep <= head_dim; c += kStep) {
    RAFTER_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      load_step<kKv>(row[k] + c, first[k], second[k]);
    }
    scores_step<kKeys, kRows>(first, second, q + c, depth, sum);
  }
  if (c < head_dim) {
    for (int k = 0; k < kKeys; ++k) {
      load_some_step<kKv>(row[k] + c, head_dim - c, first[k], second[k]);
    }
    scores_step<kKeys, kRows>(first, second, q + c, depth, sum);
  }
  // four sums at a time, in the order of s: [key][row]
  RAFTER_UNROLL
  for (int i = 0; i < kInFlight; i += 4) {
    if (key + i / kRows >= count) {
      break;  // what s has room for ends with the last four
    }
    hn::Store(
        sums_of_lanes(sum[i / kRows][i % kRows], sum[(i + 1) / kRows][(i + 1) % kRows],
                      sum[(i + 2) / kRows][(i + 2) % kRows], sum[(i + 3) / kRows][(i + 3) % kRows]),
        D4(), s + i);
  }
}

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

/// o[kRows][kSteps · kStep columns] += P V over the keys [first, last) of the tile; weights of a
/// key lie `stride` apart. With kPartial the step has only `left` columns.
template <DType kKv, int kRows, int kSteps, bool kPartial>
HWY_INLINE void values_block(const Rows<kKv>& values, std::int64_t first, std::int64_t last,
                             const float* HWY_RESTRICT p, std::int64_t stride, std::int64_t column,
                             std::int64_t left, std::int64_t columns, float* HWY_RESTRICT o) {
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
  for (std::int64_t key = first; key < last; ++key) {
    const Element<kKv>* const row = values[key] + column;
    V value[kSteps][2];
    RAFTER_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      if constexpr (kPartial) {
        load_some_step<kKv>(row, left, value[i][0], value[i][1]);
      } else {
        load_step<kKv>(row + i * kStep, value[i][0], value[i][1]);
      }
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
void add_values(const Rows<kKv>& values, std::int64_t first, std::int64_t last, const float* p,
                std::int64_t stride, std::int64_t head_dim_v, std::int64_t columns, float* o) {
  constexpr int kSteps = std::min(kInFlight / 2 / kRows, 4);
  const std::int64_t blocks = std::max<std::int64_t>(1, head_dim_v / (kSteps * kStep));
  std::int64_t c = 0;
  std::int64_t done = 0;  // blocks of columns that prefetched their part of what comes next
  for (; c + kSteps * kStep <= head_dim_v; c += kSteps * kStep) {
    values.prefetch(kTile * done / blocks, kTile * (done + 1) / blocks - kTile * done / blocks);
    ++done;
    values_block<kKv, kRows, kSteps, false>(values, first, last, p, stride, c, kStep, columns, o);
  }
  for (; c + kStep <= head_dim_v; c += kStep) {
    values_block<kKv, kRows, 1, false>(values, first, last, p, stride, c, kStep, columns, o);
  }
  if (c < head_dim_v) {
    values_block<kKv, kRows, 1, true>(values, first, last, p, stride, c, head_dim_v - c, columns,
                                      o);
  }
}

/// What a chunk of keys is to the query rows of an item.
struct Chunk {
  std::int64_t begin = 0;  // first key
  std::int64_t keys = 0;
  float softcap_log2 = 0;          // softcap · log2 e, or 0
  const float* k_scale = nullptr;  // of each key; null: none
  const float* v_scale = nullptr;
};

/// Some query rows that go through registers together: their state and where they lie.
struct RowBlock {
  const float* q = nullptr;
  float* s = nullptr;        // [kChunk][rows of the block]
  float* o = nullptr;        // [rows of the block][columns]
  float* maximum = nullptr;  // [rows of the block]
  float* sum = nullptr;
  tiles::Range seen[4];  // keys of the chunk that each row sees
};

/// Scale, softcap and mask on the scores of a chunk; lanes past its keys become −∞.
template <int kRows>
void adjust_scores(const Chunk& chunk, const RowBlock& block) {
  const D d;
  const std::int64_t count = chunk.keys * kRows;
  const std::int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  if (chunk.k_scale != nullptr) {
    scale_by_key<kRows>(chunk.k_scale, chunk.keys, block.s);
  }
  if (chunk.softcap_log2 > 0) {
    const V cap = hn::Set(d, chunk.softcap_log2);
    for (std::int64_t i = 0; i < padded; i += kLanes) {
      hn::Store(hn::Mul(cap, math::tanh_of(hn::Load(d, block.s + i))), d, block.s + i);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const tiles::Range seen = block.seen[r];
    for (std::int64_t key = 0; key < seen.first; ++key) {
      block.s[key * kRows + r] = math::kMinusInfinity;
    }
    for (std::int64_t key = seen.last; key < chunk.keys; ++key) {
      block.s[key * kRows + r] = math::kMinusInfinity;
    }
  }
  std::fill(block.s + count, block.s + padded, math::kMinusInfinity);
}

/// Scores become weights 2^(score − maximum); what the rows had so far is scaled to the new
/// maximum.
template <int kRows>
void softmax(const Chunk& chunk, const RowBlock& block, std::int64_t columns) {
  const D d;
  const std::int64_t padded = (chunk.keys * kRows + kLanes - 1) / kLanes * kLanes;
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
    if (block.sum[r] != 0) {  // not the first keys: NaN is not 0 either
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
  if (chunk.v_scale != nullptr) {
    scale_by_key<kRows>(chunk.v_scale, chunk.keys, block.s);
  }
}

/// o += P V over the keys [begin, end) of the chunk. A row that does not see all of them is added
/// by itself over those that it sees: V elsewhere may hold anything.
template <DType kKv, int kRows>
void values_tile(const Rows<kKv>& values, std::int64_t begin, std::int64_t end,
                 const RowBlock& block, std::int64_t head_dim_v, std::int64_t columns) {
  const float* const p = block.s + begin * kRows;
  const bool all = std::all_of(block.seen, block.seen + kRows, [&](const tiles::Range& seen) {
    return seen.first <= begin && end <= seen.last;
  });
  if (all) {
    add_values<kKv, kRows>(values, 0, end - begin, p, kRows, head_dim_v, columns, block.o);
    return;
  }
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t first = std::clamp(block.seen[r].first, begin, end) - begin;
    const std::int64_t last = std::clamp(block.seen[r].last, begin, end) - begin;
    if (first < last) {
      add_values<kKv, 1>(values, first, last, p + r, kRows, head_dim_v, columns,
                         block.o + r * columns);
    }
  }
}

template <DType kKv, int kRows>
void scores_tile(const Rows<kKv>& keys, std::int64_t begin, std::int64_t count,
                 const RowBlock& block, std::int64_t depth, std::int64_t head_dim) {
  constexpr int kKeys = kInFlight / kRows;
  for (std::int64_t key = 0; key < count; key += kKeys) {
    keys.prefetch(key, kKeys);
    scores_block<kKv, kRows>(keys, key, count, block.q, depth, head_dim,
                             block.s + (begin + key) * kRows);
  }
}

/// A query row as f32 times scale, in the order of load_step, zeros behind it.
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
  for (std::int64_t c = 0; c < depth; ++c) {
    const std::int64_t in_step = c % kStep;
    const std::int64_t from =
        kInterleaved<kKv> ? c - in_step + in_step % kLanes * 2 + in_step / kLanes : c;
    out[c] = row[from];
  }
}

/// O = o / sum of one row, in the order of the head's elements, and its lse.
template <DType kKv>
void write_row(const Run& run, const cpu::Sequence& sequence, std::int64_t position,
               std::int64_t head_q, const float* o, float maximum, float sum) {
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
  if constexpr (kInterleaved<kKv>) {
    for (std::int64_t c = 0; c < run.layout.columns; ++c) {
      const std::int64_t in_step = c % kStep;
      ordered[c] = scaled[c - in_step + in_step % 2 * kLanes + in_step / 2];
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

/// One item, while it runs.
template <DType kKv>
class Item {
 public:
  Item(const Run& run, std::int64_t item, float* scratch)
      : run_(run),
        plan_(plan_of(run, item, &Plan::first_item)),
        window_(cpu::mask_window(run.problem().mask, plan_.sequence)),
        scratch_(scratch) {
    // The row blocks of a head range follow each other, so that they find its keys in the cache.
    const std::int64_t i = item - plan_.first_item;
    part_ = i / (plan_.row_blocks * run.head_ranges());
    first_head_ = i / plan_.row_blocks % run.head_ranges() * run.heads;
    last_head_ = std::min(first_head_ + run.heads, run.problem().heads_kv);
    first_row_ = i % plan_.row_blocks * tiles::kDecodeRows;
    rows_ = std::min(tiles::kDecodeRows, plan_.sequence.seqlen_q * run.group() - first_row_);
    const tiles::Range part = plan_.parts.part(part_);
    const tiles::Range hull =
        window_.hull(first_row_ / run.group(), (first_row_ + rows_ - 1) / run.group() + 1);
    keys_ = {std::max(part.first, hull.first), std::min(part.last, hull.last)};
  }

  void compute() {
    for (std::int64_t head = first_head_; head < last_head_; ++head) {
      compute_head(head);
    }
  }

 private:
  std::int64_t position(std::int64_t row) const { return (first_row_ + row) / run_.group(); }

  /// Chunks start at multiples of kChunk from the start of the part, whatever the mask hides.
  void compute_head(std::int64_t head) {
    const tiles::DecodeLayout& layout = run_.layout;
    float* const maximum = scratch_ + layout.state;
    std::fill_n(maximum, layout.rows, math::kMinusInfinity);
    std::fill_n(maximum + layout.rows, layout.rows, 0.0f);
    std::fill_n(scratch_ + layout.o, layout.rows * layout.columns, 0.0f);
    if (keys_.size() > 0) {
      pack_queries(head);
      const std::int64_t origin = plan_.parts.part(part_).first;
      std::int64_t begin = origin + (keys_.first - origin) / kChunk * kChunk;
      for (; begin < keys_.last; begin += kChunk) {
        const std::int64_t first = std::max(begin, keys_.first);
        const std::int64_t last = std::min(begin + kChunk, keys_.last);
        compute_chunk(head, first, last - first);
      }
    }
    write_head(head);
  }

  void pack_queries(std::int64_t head) {
    constexpr float kLog2E = 1.4426950408889634f;
    const AttentionProblem& problem = run_.problem();
    const tiles::DecodeLayout& layout = run_.layout;
    const float scale = problem.softcap > 0 ? *problem.softmax_scale / problem.softcap
                                            : *problem.softmax_scale * kLog2E;
    for (std::int64_t row = 0; row < layout.rows; ++row) {
      float* const q = scratch_ + layout.q + row * layout.depth;
      if (row >= rows_) {  // fills the last row block
        std::fill_n(q, layout.depth, 0.0f);
        continue;
      }
      const std::int64_t head_q = head * run_.group() + (first_row_ + row) % run_.group();
      const std::int64_t offset = cpu::offset_of(run_.call.in.q, plan_.sequence.q_batch,
                                                 plan_.sequence.q_row + position(row), head_q);
      pack_query<kKv>(run_.call.in.q, offset, problem.head_dim, layout.depth, scale, q);
    }
  }

  /// Offsets and scales of the chunk's rows, in elements, the head left out of the offsets.
  void find_rows(std::int64_t head, std::int64_t begin, std::int64_t count) {
    const ForwardInputs& in = run_.call.in;
    const AttentionProblem& problem = run_.problem();
    auto* const k = reinterpret_cast<std::int64_t*>(scratch_ + run_.layout.keys);
    for (std::int64_t key = 0; key < count;) {
      const std::int64_t j = begin + key;
      std::int64_t same = count - key;  // keys whose rows are a stride apart
      if (problem.layout == Layout::paged) {
        same = std::min(same, problem.page_size - j % problem.page_size);
      }
      const std::int64_t k_row = cpu::key_offset(problem, in, in.k, plan_.sequence, j, 0);
      const std::int64_t v_row = cpu::key_offset(problem, in, in.v, plan_.sequence, j, 0);
      for (std::int64_t i = 0; i < same; ++i) {
        k[key + i] = k_row + i * in.k.stride_seqlen;
        k[kChunk + key + i] = v_row + i * in.v.stride_seqlen;
      }
      if constexpr (kKv == DType::int8) {
        float* const scales = scratch_ + run_.layout.keys + 4 * kChunk;
        const float* const ks = static_cast<const float*>(in.k_scale.data) +
                                cpu::key_offset(problem, in, in.k_scale, plan_.sequence, j, head);
        const float* const vs = static_cast<const float*>(in.v_scale.data) +
                                cpu::key_offset(problem, in, in.v_scale, plan_.sequence, j, head);
        for (std::int64_t i = 0; i < same; ++i) {
          scales[key + i] = ks[i * in.k_scale.stride_seqlen];
          scales[kChunk + key + i] = vs[i * in.v_scale.stride_seqlen];
        }
      }
      key += same;
    }
  }

  RowBlock block_of(std::int64_t row, std::int64_t block_rows, const Chunk& chunk) const {
    const tiles::DecodeLayout& layout = run_.layout;
    RowBlock block;
    block.q = scratch_ + layout.q + row * layout.depth;
    block.s = scratch_ + layout.scores + row * kChunk;
    block.o = scratch_ + layout.o + row * layout.columns;
    block.maximum = scratch_ + layout.state + row;
    block.sum = block.maximum + layout.rows;
    for (std::int64_t r = 0; r < block_rows; ++r) {
      // a row without a query sees what the last query sees: it masks nothing
      const tiles::Range range = window_.row(position(std::min(row + r, rows_ - 1)));
      block.seen[r] = {std::clamp<std::int64_t>(range.first - chunk.begin, 0, chunk.keys),
                       std::clamp<std::int64_t>(range.last - chunk.begin, 0, chunk.keys)};
    }
    return block;
  }

  /// Calls f with blocks of 4, 2 and 1 rows; three rows are computed as four.
  template <typename F>
  void each_block(const Chunk& chunk, const F& f) const {
    std::int64_t row = 0;
    for (; rows_ - row >= 3; row += 4) {
      f.template operator()<4>(block_of(row, 4, chunk));
    }
    if (rows_ - row == 2) {
      f.template operator()<2>(block_of(row, 2, chunk));
    } else if (rows_ - row == 1) {
      f.template operator()<1>(block_of(row, 1, chunk));
    }
  }

  void compute_chunk(std::int64_t head, std::int64_t begin, std::int64_t count) {
    constexpr float kLog2E = 1.4426950408889634f;
    const AttentionProblem& problem = run_.problem();
    const tiles::DecodeLayout& layout = run_.layout;
    const ForwardInputs& in = run_.call.in;
    find_rows(head, begin, count);
    const auto* const k_offsets = reinterpret_cast<const std::int64_t*>(scratch_ + layout.keys);
    const auto* const v_offsets = k_offsets + kChunk;
    const auto* const k = static_cast<const Element<kKv>*>(in.k.data) + head * in.k.stride_heads;
    const auto* const v = static_cast<const Element<kKv>*>(in.v.data) + head * in.v.stride_heads;
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Element<kKv>));
    Chunk chunk;
    chunk.begin = begin;
    chunk.keys = count;
    chunk.softcap_log2 = problem.softcap > 0 ? problem.softcap * kLog2E : 0.0f;
    if constexpr (kKv == DType::int8) {
      chunk.k_scale = scratch_ + layout.keys + 4 * kChunk;
      chunk.v_scale = chunk.k_scale + kChunk;
    }

    Rows<kKv> rows;
    const auto next = [&](const Element<kKv>* base, const std::int64_t* offsets, std::int64_t first,
                          std::int64_t dim) {
      rows.next_base = base;
      rows.next_offsets = offsets + first;
      rows.next_count = std::clamp<std::int64_t>(count - first, 0, kTile);
      rows.next_bytes = dim * kBytes;
    };
    rows.base = k;
    for (std::int64_t tile = 0; tile < count; tile += kTile) {
      rows.offsets = k_offsets + tile;
      if (tile + kTile < count) {
        next(k, k_offsets, tile + kTile, problem.head_dim);
      } else {
        next(v, v_offsets, 0, problem.head_dim_v);
      }
      const std::int64_t keys = std::min(kTile, count - tile);
      each_block(chunk, [&]<int kRows>(const RowBlock& block) {
        scores_tile<kKv, kRows>(rows, tile, keys, block, layout.depth, problem.head_dim);
        rows.next_count = 0;  // the first row block has prefetched them
      });
    }
    each_block(chunk, [&]<int kRows>(const RowBlock& block) {
      adjust_scores<kRows>(chunk, block);
      softmax<kRows>(chunk, block, layout.columns);
    });
    rows.base = v;
    for (std::int64_t tile = 0; tile < count; tile += kTile) {
      rows.offsets = v_offsets + tile;
      if (tile + kTile < count) {
        next(v, v_offsets, tile + kTile, problem.head_dim_v);
      } else if (head + 1 < last_head_) {
        next(k + in.k.stride_heads, k_offsets, 0, problem.head_dim);
      } else {
        rows.next_count = 0;
      }
      const std::int64_t end = std::min(tile + kTile, count);
      each_block(chunk, [&]<int kRows>(const RowBlock& block) {
        values_tile<kKv, kRows>(rows, tile, end, block, problem.head_dim_v, layout.columns);
        rows.next_count = 0;
      });
    }
  }

  void write_head(std::int64_t head) const {
    const tiles::DecodeLayout& layout = run_.layout;
    const bool split = plan_.parts.count() > 1;
    for (std::int64_t row = 0; row < rows_; ++row) {
      const float* const o = scratch_ + layout.o + row * layout.columns;
      const float maximum = scratch_[layout.state + row];
      const float sum = scratch_[layout.state + layout.rows + row];
      const std::int64_t head_q = head * run_.group() + (first_row_ + row) % run_.group();
      if (!split) {
        write_row<kKv>(run_, plan_.sequence, position(row), head_q, o, maximum, sum);
        continue;
      }
      const std::int64_t at = partial_row(run_, plan_, part_, head_q, position(row));
      std::copy_n(o, layout.columns, run_.partial_o + at * layout.columns);
      run_.partial_state[2 * at] = maximum;
      run_.partial_state[2 * at + 1] = sum;
    }
  }

  const Run& run_;
  const Plan& plan_;
  tiles::MaskWindow window_;
  float* scratch_;
  std::int64_t part_ = 0;
  std::int64_t first_head_ = 0, last_head_ = 0;  // KV heads
  std::int64_t first_row_ = 0, rows_ = 0;        // query rows of each
  tiles::Range keys_;                            // of the part that some of them see
};

template <DType kKv>
void compute_item(const Run& run, std::int64_t item, float* scratch) {
  Item<kKv>(run, item, scratch).compute();
}

/// The parts of one output row, in their order. Source of the algebra: Milakov & Gimelshein 2018,
/// arXiv 1805.02867.
template <DType kKv>
void merge_row(const Run& run, std::int64_t row) {
  const D d;
  const Plan& plan = plan_of(run, row, &Plan::first_merge);
  const std::int64_t head_q = (row - plan.first_merge) / plan.sequence.seqlen_q;
  const std::int64_t position = (row - plan.first_merge) % plan.sequence.seqlen_q;
  const std::int64_t columns = run.layout.columns;
  const std::int64_t parts = plan.parts.count();
  const auto at = [&](std::int64_t part) { return partial_row(run, plan, part, head_q, position); };
  float maximum = math::kMinusInfinity;
  for (std::int64_t part = 0; part < parts; ++part) {
    const float one = run.partial_state[2 * at(part)];
    maximum = one > maximum ? one : maximum;
  }
  const float base = maximum == math::kMinusInfinity ? 0.0f : maximum;
  alignas(64) float o[256 + kStep];
  alignas(64) float weight[kLanes];
  std::fill_n(o, columns, 0.0f);
  float sum = 0;
  for (std::int64_t part = 0; part < parts; ++part) {
    const float* const state = run.partial_state + 2 * at(part);
    if (state[1] == 0) {  // saw no key
      continue;
    }
    const float* const from = run.partial_o + at(part) * columns;
    const V factor = math::exp2_of(hn::Set(d, state[0] - base));
    hn::Store(factor, d, weight);
    sum += state[1] * weight[0];
    for (std::int64_t c = 0; c < columns; c += kLanes) {
      hn::Store(hn::MulAdd(hn::Load(d, from + c), factor, hn::Load(d, o + c)), d, o + c);
    }
  }
  write_row<kKv>(run, plan.sequence, position, head_q, o, maximum, sum);
}

template <DType kKv>
constexpr Functions kFunctions = {compute_item<kKv>, merge_row<kKv>};

}  // namespace

/// The code of this instruction set for a dtype of K and V, for the entries.
Functions functions(DType kv_dtype) {
  return kv_dtype == DType::f32    ? kFunctions<DType::f32>
         : kv_dtype == DType::bf16 ? kFunctions<DType::bf16>
         : kv_dtype == DType::f16  ? kFunctions<DType::f16>
                                   : kFunctions<DType::int8>;
}

}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
