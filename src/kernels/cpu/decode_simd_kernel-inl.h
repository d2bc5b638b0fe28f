// The code of one instruction set for decode: items on vectors or on tiles, and the merge of the
// parts. Compiled once per instruction set (Highway's foreach_target).
#if defined(RAFTER_DECODE_SIMD_KERNEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_DECODE_SIMD_KERNEL_INL_H_
#undef RAFTER_DECODE_SIMD_KERNEL_INL_H_
#else
#define RAFTER_DECODE_SIMD_KERNEL_INL_H_
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/cpu/decode_amx_item-inl.h"
#include "kernels/cpu/decode_simd_item-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

/// A machine whose products all run on vectors.
struct Vectors {
  static constexpr bool kTiles = false;
};

#if HWY_TARGET == HWY_AVX3 && RAFTER_HAS_AMX_CODE
/// One whose products of whole tiles of keys run on AMX.
struct Amx {
  static constexpr bool kTiles = true;
  template <DType kKv>
  struct Scope : hw::amx::TileScope {
    Scope() : TileScope(tile_shapes<kKv>()) {}
  };
  template <int kTile_>
  HWY_INLINE static void zero() {
    hw::amx::zero<kTile_>();
  }
  template <int kTile_>
  HWY_INLINE static void load(const void* from, std::int64_t stride) {
    hw::amx::load<kTile_>(from, stride);
  }
  template <int kTile_>
  HWY_INLINE static void load_past_l1(const void* from, std::int64_t stride) {
    hw::amx::load_past_l1<kTile_>(from, stride);
  }
  template <int kTile_>
  HWY_INLINE static void store(void* to, std::int64_t stride) {
    hw::amx::store<kTile_>(to, stride);
  }
  template <DType kKv, int kC, int kA, int kB>
  HWY_INLINE static void dot() {
    if constexpr (kKv == DType::int8) {
      hw::amx::dot_int8<kC, kA, kB>();
    } else {
      hw::amx::dot_bf16<kC, kA, kB>();
    }
  }
  template <int kC, int kA, int kB>
  HWY_INLINE static void dot_unsigned() {
    hw::amx::dot_unsigned_int8<kC, kA, kB>();
  }
};
#endif

/// An item on vectors.
template <DType kKv>
class VectorItem : public Item<kKv, VectorItem<kKv>> {
  using Base = Item<kKv, VectorItem>;
  friend Base;

 public:
  using Base::Base;

  void compute() {
    this->attend();
    this->write(column_order<kKv, Vectors>(this->run_));
  }

 private:
  void pack_head(std::int64_t head) const { this->pack_queries(head); }

  void compute_heads(const typename Base::Found& now, const Tile& tile, Ahead<kKv>& k_ahead,
                     Ahead<kKv>& v_ahead) const {
    for (std::int64_t head = this->first_head_; head < this->last_head_; ++head) {
      compute_head(head, this->keys_of(head, now, &k_ahead), this->values_of(head, now, &v_ahead),
                   this->tile_of(head, tile));
    }
  }

  void compute_head(std::int64_t head, Rows<kKv> keys, Rows<kKv> values, const Tile& tile) const {
    std::int64_t row = 0;
    for (; this->rows_ - row >= 3; row += 4) {  // three rows are computed as four
      this->template compute_block<4>(keys, values, tile, this->block_of(head, row, tile));
      keys.ahead = values.ahead = nullptr;  // the first row block has prefetched
    }
    if (this->rows_ - row == 2) {
      this->template compute_block<2>(keys, values, tile, this->block_of(head, row, tile));
    } else if (this->rows_ - row == 1) {
      this->template compute_block<1>(keys, values, tile, this->block_of(head, row, tile));
    }
  }
};

template <DType kKv, typename Machine>
void compute_item(const Run& run, std::int64_t item, bool packed, float* scratch) {
  if constexpr (Machine::kTiles) {
    const typename Machine::template Scope<kKv> scope;
    TileItem<kKv, Machine>(run, item, packed, scratch).compute();
  } else {
    VectorItem<kKv>(run, item, packed, scratch).compute();
  }
}

/// The parts of one output row, in their order. Source of the algebra: Milakov & Gimelshein 2018,
/// arXiv 1805.02867.
template <DType kKv, typename Machine>
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
  write_row<kKv>(run, plan.sequence, position, head_q, o, maximum, sum,
                 column_order<kKv, Machine>(run));
}

template <DType kKv, typename Machine = Vectors>
constexpr Functions kFunctions = {compute_item<kKv, Machine>, merge_row<kKv, Machine>};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
