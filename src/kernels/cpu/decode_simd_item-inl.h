// One item of decode, whatever multiplies: up to kDecodeRows query rows of each of some KV heads
// against one part of the keys of a sequence, a tile of keys at a time. Compiled once per
// instruction set (Highway's foreach_target).
#if defined(RAFTER_DECODE_SIMD_ITEM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_DECODE_SIMD_ITEM_INL_H_
#undef RAFTER_DECODE_SIMD_ITEM_INL_H_
#else
#define RAFTER_DECODE_SIMD_ITEM_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/decode_simd_products-inl.h"
#include "kernels/cpu/decode_simd_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

/// One item, while it runs. Derived packs the queries of a head (pack_head) and computes all heads
/// of a tile (compute_heads).
template <DType kKv, typename Derived>
class Item {
 public:
  Item(const Run& run, std::int64_t item, bool packed, float* scratch)
      : run_(run),
        plan_(plan_of(run, item, &Plan::first_item)),
        window_(cpu::mask_window(run.problem().mask, plan_.sequence)),
        scratch_(scratch),
        queries_packed_(packed) {
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

 protected:
  /// Rows of a tile: offsets in elements, the head left out.
  struct Found {
    tiles::Range keys;
    std::int64_t* k = nullptr;
    std::int64_t* v = nullptr;
    bool spaced = false;  // all rows of k, and of v, are a stride apart
  };

  /// Tiles of keys, and the heads of an item within each: a token's heads lie side by side, so
  /// that memory is read in its order. Tiles start at multiples of kTile from the start of the
  /// part, whatever the mask hides.
  void attend() {
    for (std::int64_t head = first_head_; head < last_head_; ++head) {
      start_head(head);
      if (!queries_packed_) {
        derived().pack_head(head);
      }
    }
    queries_packed_ = true;
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
  }

  void write(ColumnOrder order) const {
    for (std::int64_t head = first_head_; head < last_head_; ++head) {
      write_head(head, order);
    }
  }

  std::int64_t position(std::int64_t row) const { return (first_row_ + row) / run_.group(); }
  float* of_head(std::int64_t head) const {
    return scratch_ + (head - first_head_) * run_.layout.head;
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

  /// What four query rows from `row` on see of a tile.
  void find_seen(std::int64_t row, const Tile& tile, tiles::Range (&seen)[4]) const {
    for (std::int64_t r = 0; r < 4; ++r) {
      // a row without a query sees what the last query sees: it masks nothing
      const tiles::Range range = window_.row(position(std::min(row + r, rows_ - 1)));
      seen[r] = {std::clamp<std::int64_t>(range.first - tile.begin, 0, tile.keys),
                 std::clamp<std::int64_t>(range.last - tile.begin, 0, tile.keys)};
    }
  }

  RowBlock block_at(std::int64_t head, std::int64_t row) const {
    const tiles::DecodeLayout& layout = run_.layout;
    RowBlock block;
    block.q = of_head(head) + layout.q + row * layout.depth;
    block.s = scratch_ + layout.scores;
    block.o = of_head(head) + layout.o + row * layout.columns;
    block.maximum = of_head(head) + layout.state + row;
    block.sum = block.maximum + layout.rows;
    return block;
  }
  RowBlock block_of(std::int64_t head, std::int64_t row, const Tile& tile) const {
    RowBlock block = block_at(head, row);
    find_seen(row, tile, block.seen);
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

  Rows<kKv> keys_of(std::int64_t head, const Found& now, Ahead<kKv>* ahead) const {
    const TensorView& k = run_.call.in.k;
    return {static_cast<const Element<kKv>*>(k.data) + head * k.stride_heads, now.k, ahead};
  }
  Rows<kKv> values_of(std::int64_t head, const Found& now, Ahead<kKv>* ahead) const {
    const TensorView& v = run_.call.in.v;
    return {static_cast<const Element<kKv>*>(v.data) + head * v.stride_heads, now.v, ahead};
  }
  /// The tile with the factors of one head.
  Tile tile_of(std::int64_t head, const Tile& tile) const {
    Tile out = tile;
    if constexpr (kKv == DType::int8) {
      out.k_scale += (head - first_head_) * kTile;
      out.v_scale += (head - first_head_) * kTile;
    }
    return out;
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
  bool queries_packed_;
  Found found_[2];  // this tile's and the next one's

 private:
  Derived& derived() { return static_cast<Derived&>(*this); }

  void start_head(std::int64_t head) const {
    const tiles::DecodeLayout& layout = run_.layout;
    float* const maximum = of_head(head) + layout.state;
    std::fill_n(maximum, layout.rows, math::kMinusInfinity);
    std::fill_n(maximum + layout.rows, layout.rows, 0.0f);
    std::fill_n(of_head(head) + layout.o, layout.rows * layout.columns, 0.0f);
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
      found.spaced = found.spaced && (first == 0 || (k - found.k[first - 1] == in.k.stride_seqlen &&
                                                     v - found.v[first - 1] == in.v.stride_seqlen));
      for (std::int64_t i = 0; i < count; ++i) {
        found.k[first + i] = k + i * in.k.stride_seqlen;
        found.v[first + i] = v + i * in.v.stride_seqlen;
      }
    });
  }

  /// The factors of a tile's rows, of all heads, [head][kTile]. Those of `next` are prefetched.
  void find_scales(const TensorView& scale, const tiles::Range& keys, const tiles::Range& next,
                   float* to) const {
    const auto* const data = static_cast<const float*>(scale.data);
    const auto first_of = [&](std::int64_t key) {
      return data +
             cpu::key_offset(run_.problem(), run_.call.in, scale, plan_.sequence, key, first_head_);
    };
    each_run(next, [&](std::int64_t, std::int64_t count, std::int64_t key) {
      const float* const from = first_of(key);
      for (std::int64_t i = 0; i < count; ++i) {
        __builtin_prefetch(from + i * scale.stride_seqlen, 0, 2);
      }
    });
    const std::int64_t heads = last_head_ - first_head_;
    const D4 d;
    each_run(keys, [&](std::int64_t first, std::int64_t count, std::int64_t key) {
      const float* const from = first_of(key);
      // four heads of four keys at a time, where heads lie side by side
      const std::int64_t fours = scale.stride_heads == 1 ? heads / 4 * 4 : 0;
      const std::int64_t quads = count / 4 * 4;
      for (std::int64_t i = 0; i < quads; i += 4) {
        const float* const row = from + i * scale.stride_seqlen;
        for (std::int64_t h = 0; h < fours; h += 4) {
          auto a = hn::LoadU(d, row + h), b = hn::LoadU(d, row + scale.stride_seqlen + h);
          auto c = hn::LoadU(d, row + 2 * scale.stride_seqlen + h);
          auto e = hn::LoadU(d, row + 3 * scale.stride_seqlen + h);
          math::transpose4(a, b, c, e);
          float* const out = to + h * kTile + first + i;
          hn::StoreU(a, d, out);
          hn::StoreU(b, d, out + kTile);
          hn::StoreU(c, d, out + 2 * kTile);
          hn::StoreU(e, d, out + 3 * kTile);
        }
      }
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = h < fours ? quads : 0; i < count; ++i) {
          to[h * kTile + first + i] = from[i * scale.stride_seqlen + h * scale.stride_heads];
        }
      }
    });
  }

  void compute_tile(const Found& now, const Found& next) {
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
    if constexpr (kKv == DType::int8) {
      float* const scales = scratch_ + run_.layout.scales;
      float* const v_scales = scales + (last_head_ - first_head_) * kTile;
      find_scales(in.k_scale, now.keys, next.keys, scales);
      find_scales(in.v_scale, now.keys, next.keys, v_scales);
      tile.k_scale = scales;
      tile.v_scale = v_scales;
    }
    derived().compute_heads(now, tile, k_ahead, v_ahead);
  }

  void write_head(std::int64_t head, ColumnOrder order) const {
    const tiles::DecodeLayout& layout = run_.layout;
    const bool split = plan_.parts.count() > 1;
    for (std::int64_t row = 0; row < rows_; ++row) {
      const float* const o = of_head(head) + layout.o + row * layout.columns;
      const float maximum = of_head(head)[layout.state + row];
      const float sum = of_head(head)[layout.state + layout.rows + row];
      const std::int64_t head_q = head * run_.group() + (first_row_ + row) % run_.group();
      if (!split) {
        write_row<kKv>(run_, plan_.sequence, position(row), head_q, o, maximum, sum, order);
        continue;
      }
      const std::int64_t at = partial_row(run_, plan_, part_, head_q, position(row));
      std::copy_n(o, layout.columns, run_.partial_o + at * layout.columns);
      run_.partial_state[2 * at] = maximum;
      run_.partial_state[2 * at + 1] = sum;
    }
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
