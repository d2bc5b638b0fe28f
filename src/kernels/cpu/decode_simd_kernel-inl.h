// One item of decode: up to kDecodeRows query rows of each of some KV heads against one part of the
// keys of a sequence, a tile of keys at a time; and the merge of the parts.
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

#include "hwy/highway.h"
#include "kernels/cpu/decode_amx_products-inl.h"
#include "kernels/cpu/decode_simd_bytes-inl.h"
#include "kernels/cpu/decode_simd_products-inl.h"
#include "kernels/cpu/decode_simd_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

/// A machine whose products all run on vectors.
struct Vectors {
  static constexpr bool kTiles = false;
};

#if HWY_TARGET == HWY_AVX3 && RAFTER_HAS_AMX_CODE
/// One whose scores run on AMX.
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
  HWY_INLINE static void store(void* to, std::int64_t stride) {
    hw::amx::store<kTile_>(to, stride);
  }
  /// VPDPBUSD, which the region's target does not name; every CPU with AMX has it.
  HWY_INLINE static hn::Vec<DI> dot_bytes(hn::Vec<DI> sum, hn::Vec<DU8> a, hn::Vec<D8> b) {
    __m512i raw = sum.raw;
    asm("vpdpbusd %2, %1, %0" : "+v"(raw) : "v"(a.raw), "v"(b.raw));
    return hn::Vec<DI>{raw};
  }
  template <DType kKv, int kC, int kA, int kB>
  HWY_INLINE static void dot() {
    if constexpr (kKv == DType::int8) {
      hw::amx::dot_int8<kC, kA, kB>();
    } else {
      hw::amx::dot_bf16<kC, kA, kB>();
    }
  }
};
#endif

/// One item, while it runs.
template <DType kKv, typename Machine>
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
    // the next part is this thread's next item
    const bool goes_on = run.head_ranges() == 1 && plan_.row_blocks == 1 &&
                         (item + 1) % run.turn != 0 && part_ + 1 < plan_.parts.count();
    ahead_to_ = goes_on ? std::min(plan_.parts.part(part_ + 1).last, hull.last) : keys_.last;
    auto* const offsets = reinterpret_cast<std::int64_t*>(scratch + run.layout.keys);
    for (std::int64_t i = 0; i < 2; ++i) {
      found_[i] = {{}, offsets + 2 * i * kTile, offsets + (2 * i + 1) * kTile};
    }
  }

  /// Tiles of keys, and the heads of an item within each: a token's heads lie side by side, so
  /// that memory is read in its order. Tiles start at multiples of kTile from the start of the
  /// part, whatever the mask hides.
  void compute() {
    for (std::int64_t head = first_head_; head < last_head_; ++head) {
      start_head(head);
    }
    if (keys_.size() > 0) {
      const std::int64_t origin = plan_.parts.part(part_).first;
      std::int64_t begin = origin + (keys_.first - origin) / kTile * kTile;
      Found now = found_[0], next = found_[1];
      find_rows(begin, keys_.last, now);
      for (; begin < keys_.last; begin += kTile) {
        const std::int64_t after = std::min(begin + kTile, keys_.last);
        find_rows(after, after < keys_.last ? keys_.last : ahead_to_, next);
        compute_tile(now, next);
        std::swap(now, next);
      }
    }
    for (std::int64_t head = first_head_; head < last_head_; ++head) {
      write_head(head);
    }
  }

 private:
  /// Rows of a tile: offsets in elements, the head left out.
  struct Found {
    tiles::Range keys;
    std::int64_t* k = nullptr;
    std::int64_t* v = nullptr;
    bool spaced = false;  // all rows of k are a stride apart
  };

  std::int64_t position(std::int64_t row) const { return (first_row_ + row) / run_.group(); }
  float* of_head(std::int64_t head) const {
    return scratch_ + (head - first_head_) * run_.layout.head;
  }

  void start_head(std::int64_t head) {
    const tiles::DecodeLayout& layout = run_.layout;
    float* const maximum = of_head(head) + layout.state;
    std::fill_n(maximum, layout.rows, math::kMinusInfinity);
    std::fill_n(maximum + layout.rows, layout.rows, 0.0f);
    std::fill_n(of_head(head) + layout.o, layout.rows * layout.columns, 0.0f);
    if (keys_.size() > 0) {
      if constexpr (Machine::kTiles) {
        this->pack_on_tiles(head);
      } else {
        pack_queries(head);
      }
    }
  }

  /// Of q · k: what it gives goes into tanh, or becomes 2^score.
  float scale() const {
    constexpr float kLog2E = 1.4426950408889634f;
    const AttentionProblem& problem = run_.problem();
    return problem.softcap > 0 ? *problem.softmax_scale / problem.softcap
                               : *problem.softmax_scale * kLog2E;
  }
  /// Of row `row` of a KV head, in elements of q.
  std::int64_t query_offset(std::int64_t head, std::int64_t row) const {
    const std::int64_t head_q = head * run_.group() + (first_row_ + row) % run_.group();
    return cpu::offset_of(run_.call.in.q, plan_.sequence.q_batch,
                          plan_.sequence.q_row + position(row), head_q);
  }

  void pack_queries(std::int64_t head) const {
    const tiles::DecodeLayout& layout = run_.layout;
    for (std::int64_t row = 0; row < layout.rows; ++row) {
      float* const q = of_head(head) + layout.q + row * layout.depth;
      if (row >= rows_) {  // fills the last row block
        std::fill_n(q, layout.depth, 0.0f);
        continue;
      }
      pack_query<kKv>(run_.call.in.q, query_offset(head, row), run_.problem().head_dim,
                      layout.depth, scale(), q);
    }
  }

  /// Calls f(i, count, key) for each run of keys of the tile whose rows are a stride apart: from
  /// its i-th key on, which is key `key` of the sequence.
  template <typename F>
  void each_run(const tiles::Range& keys, const F& f) const {
    const AttentionProblem& problem = run_.problem();
    for (std::int64_t key = keys.first; key < keys.last;) {
      std::int64_t same = keys.last - key;
      if (problem.layout == Layout::paged) {
        same = std::min(same, problem.page_size - key % problem.page_size);
      }
      f(key - keys.first, same, key);
      key += same;
    }
  }

  /// Of the tile that starts at `begin`, before `end`.
  void find_rows(std::int64_t begin, std::int64_t end, Found& found) const {
    const ForwardInputs& in = run_.call.in;
    found.keys = {std::max(begin, keys_.first), std::min(begin + kTile, end)};
    found.spaced = true;
    each_run(found.keys, [&](std::int64_t first, std::int64_t count, std::int64_t key) {
      const std::int64_t k = cpu::key_offset(run_.problem(), in, in.k, plan_.sequence, key, 0);
      const std::int64_t v = cpu::key_offset(run_.problem(), in, in.v, plan_.sequence, key, 0);
      found.spaced = found.spaced && (first == 0 || k - found.k[first - 1] == in.k.stride_seqlen);
      for (std::int64_t i = 0; i < count; ++i) {
        found.k[first + i] = k + i * in.k.stride_seqlen;
        found.v[first + i] = v + i * in.v.stride_seqlen;
      }
    });
  }

  /// The factors of the tile's rows of one head.
  void find_scales(const tiles::Range& keys, std::int64_t head, float* k_scale,
                   float* v_scale) const {
    const auto find = [&](const TensorView& scale, float* to) {
      each_run(keys, [&](std::int64_t first, std::int64_t count, std::int64_t key) {
        const float* const from =
            static_cast<const float*>(scale.data) +
            cpu::key_offset(run_.problem(), run_.call.in, scale, plan_.sequence, key, head);
        for (std::int64_t i = 0; i < count; ++i) {
          to[first + i] = from[i * scale.stride_seqlen];
        }
      });
    };
    find(run_.call.in.k_scale, k_scale);
    find(run_.call.in.v_scale, v_scale);
  }

  RowBlock block_of(std::int64_t head, std::int64_t row, std::int64_t block_rows,
                    const Tile& tile) const {
    const tiles::DecodeLayout& layout = run_.layout;
    RowBlock block;
    block.q = of_head(head) + layout.q + row * layout.depth;
    block.s = scratch_ + layout.scores;
    block.o = of_head(head) + layout.o + row * layout.columns;
    block.maximum = of_head(head) + layout.state + row;
    block.sum = block.maximum + layout.rows;
    for (std::int64_t r = 0; r < block_rows; ++r) {
      // a row without a query sees what the last query sees: it masks nothing
      const tiles::Range range = window_.row(position(std::min(row + r, rows_ - 1)));
      block.seen[r] = {std::clamp<std::int64_t>(range.first - tile.begin, 0, tile.keys),
                       std::clamp<std::int64_t>(range.last - tile.begin, 0, tile.keys)};
    }
    return block;
  }

  template <int kRows>
  void compute_block(const Rows<kKv>& keys, const Rows<kKv>& values, const Tile& tile,
                     const RowBlock& block) const {
    const tiles::DecodeLayout& layout = run_.layout;
    const AttentionProblem& problem = run_.problem();
    scores_tile<kKv, kRows>(keys, tile, block, layout.depth, problem.head_dim);
    adjust_scores<kRows>(tile, block);
    softmax<kRows>(tile, block, layout.columns);
    values_tile<kKv, kRows>(values, tile, block, problem.head_dim_v, layout.columns);
  }

#if HWY_TARGET != HWY_SCALAR && RAFTER_HAS_AMX_CODE
  TileQueries tile_queries(std::int64_t head, std::int64_t row) const {
    const tiles::DecodeLayout& layout = run_.layout;
    float* const at = of_head(head) + layout.tile_q + row * layout.depth;
    const std::int64_t words = run_.problem().head_dim / kTileDepth<kKv> * 16 * kQueryColumns<kKv>;
    return {reinterpret_cast<std::uint32_t*>(at), at + words};
  }

  bool fits_tiles() const {
    return tiles::decode_fits_tiles(sizeof(Element<kKv>), run_.problem().head_dim);
  }

  void pack_on_tiles(std::int64_t head) const {
    const tiles::DecodeLayout& layout = run_.layout;
    const std::int64_t head_dim = run_.problem().head_dim;
    if (kKv == DType::int8 || !fits_tiles()) {
      pack_queries(head);
    }
    for (std::int64_t row = 0; row < rows_ && fits_tiles(); row += 4) {
      if constexpr (kKv == DType::int8) {
        pack_tile_digits(of_head(head) + layout.q + row * layout.depth, layout.depth, head_dim,
                         tile_queries(head, row));
      } else {
        const auto* const q = static_cast<const std::uint16_t*>(run_.call.in.q.data);
        const std::uint16_t* rows[4] = {};
        for (std::int64_t r = 0; r < std::min<std::int64_t>(4, rows_ - row); ++r) {
          rows[r] = q + query_offset(head, row + r);
        }
        pack_tile_queries(rows, head_dim, scale(), tile_queries(head, row));
      }
    }
  }

  /// Scores of four rows on tiles; where head_dim does not fit them, or a row does not see a whole
  /// tile of keys, on vectors.
  void compute_head_on_tiles(std::int64_t head, Rows<kKv> keys, Rows<kKv> values, const Tile& tile,
                             bool spaced) const {
    const tiles::DecodeLayout& layout = run_.layout;
    const AttentionProblem& problem = run_.problem();
    const TileScratch scratch = {reinterpret_cast<std::byte*>(scratch_ + layout.tile_rows),
                                 reinterpret_cast<std::int32_t*>(scratch_ + layout.tile_sums)};
    const std::int64_t stride =
        spaced ? run_.call.in.k.stride_seqlen * static_cast<std::int64_t>(sizeof(Element<kKv>)) : 0;
    const bool fits = fits_tiles();
    bool packed = kKv == DType::int8 || !fits;
    for (std::int64_t row = 0; row < rows_; row += 4) {
      const RowBlock block = block_of(head, row, 4, tile);
      if (fits && tile.keys == kTile && sees_all<4>(tile, block)) {
        scores_on_tiles<kKv, Machine>(keys, stride, tile_queries(head, row), problem.head_dim,
                                      scratch, block.s);
        adjust_scores<4>(tile, block);
        softmax<4>(tile, block, layout.columns);
        if (kKv == DType::int8 && problem.head_dim_v % kByteColumns == 0) {
          if constexpr (kKv == DType::int8) {
            values_in_bytes<Machine>(values, block.s, problem.head_dim_v, layout.columns,
                                     reinterpret_cast<std::int8_t*>(scratch_ + layout.tile_values),
                                     block.o);
          }
        } else {
          values_tile<kKv, 4>(values, tile, block, problem.head_dim_v, layout.columns);
        }
      } else {
        if (!packed) {
          pack_queries(head);
          packed = true;
        }
        compute_block<4>(keys, values, tile, block);
      }
      keys.ahead = values.ahead = nullptr;  // the first row block has prefetched
    }
  }
#endif

  void compute_head(std::int64_t head, Rows<kKv> keys, Rows<kKv> values, const Tile& tile) const {
    std::int64_t row = 0;
    for (; rows_ - row >= 3; row += 4) {  // three rows are computed as four
      compute_block<4>(keys, values, tile, block_of(head, row, 4, tile));
      keys.ahead = values.ahead = nullptr;  // the first row block has prefetched
    }
    if (rows_ - row == 2) {
      compute_block<2>(keys, values, tile, block_of(head, row, 2, tile));
    } else if (rows_ - row == 1) {
      compute_block<1>(keys, values, tile, block_of(head, row, 1, tile));
    }
  }

  void compute_tile(const Found& now, const Found& next) const {
    constexpr float kLog2E = 1.4426950408889634f;
    const AttentionProblem& problem = run_.problem();
    const ForwardInputs& in = run_.call.in;
    Tile tile;
    tile.begin = now.keys.first;
    tile.keys = now.keys.size();
    tile.softcap_log2 = problem.softcap > 0 ? problem.softcap * kLog2E : 0.0f;
    const auto* const k = static_cast<const Element<kKv>*>(in.k.data);
    const auto* const v = static_cast<const Element<kKv>*>(in.v.data);
    const auto ahead = [&](const Element<kKv>* data, const std::int64_t* offsets,
                           const TensorView& view, std::int64_t dim) {
      return Ahead<kKv>{.base = data + first_head_ * view.stride_heads,
                        .offsets = offsets,
                        .keys = std::max<std::int64_t>(0, next.keys.size()),
                        .heads = last_head_ - first_head_,
                        .stride_heads = view.stride_heads,
                        .bytes = dim * static_cast<std::int64_t>(sizeof(Element<kKv>))};
    };
    Ahead<kKv> k_ahead = ahead(k, next.k, in.k, problem.head_dim);
    Ahead<kKv> v_ahead = ahead(v, next.v, in.v, problem.head_dim_v);
    for (std::int64_t head = first_head_; head < last_head_; ++head) {
      if constexpr (kKv == DType::int8) {
        float* const scales = scratch_ + run_.layout.scales;
        find_scales(now.keys, head, scales, scales + kTile);
        tile.k_scale = scales;
        tile.v_scale = scales + kTile;
      }
      const Rows<kKv> keys{k + head * in.k.stride_heads, now.k, &k_ahead};
      const Rows<kKv> values{v + head * in.v.stride_heads, now.v, &v_ahead};
      if constexpr (Machine::kTiles) {
        this->compute_head_on_tiles(head, keys, values, tile, now.spaced);
      } else {
        compute_head(head, keys, values, tile);
      }
    }
  }

  void write_head(std::int64_t head) const {
    const tiles::DecodeLayout& layout = run_.layout;
    const bool split = plan_.parts.count() > 1;
    for (std::int64_t row = 0; row < rows_; ++row) {
      const float* const o = of_head(head) + layout.o + row * layout.columns;
      const float maximum = of_head(head)[layout.state + row];
      const float sum = of_head(head)[layout.state + layout.rows + row];
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
  std::int64_t ahead_to_ = 0;                    // end of the keys that may be prefetched
  Found found_[2];                               // this tile's and the next one's
};

template <DType kKv, typename Machine>
void compute_item(const Run& run, std::int64_t item, float* scratch) {
  if constexpr (Machine::kTiles) {
    const typename Machine::template Scope<kKv> scope;
    Item<kKv, Machine>(run, item, scratch).compute();
  } else {
    Item<kKv, Machine>(run, item, scratch).compute();
  }
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

template <DType kKv, typename Machine = Vectors>
constexpr Functions kFunctions = {compute_item<kKv, Machine>, merge_row<kKv>};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
