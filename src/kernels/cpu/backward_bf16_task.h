// One task of the fused bf16 backward on matrix units, over the machine M of forward_bf16_task.h: a
// block of keys of one KV head against every query row that sees them.
//
// Sᵀ = K Qᵀ and dPᵀ = V dOᵀ have query rows in columns; rounded to bf16, Pᵀ and dSᵀ are left
// operands as they lie, of dV += Pᵀ dO and dK += dSᵀ Q. dQ is kept transposed, dQᵀ += Kᵀ dSᵀ, whose
// right operand is dSᵀ with keys in pairs. So nothing is transposed in the loop. All five are
// products of a block of 32 rows (A) with two panels of 16 columns (B); every sum goes over keys,
// or query rows, 32 by 32 in order, whatever the blocking. Vector work on a block of scores shares
// the instruction stream with S and dP of the next one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/backward_bf16_block.h"
#include "kernels/cpu/backward_bf16_pack.h"
#include "kernels/cpu/backward_bf16_run.h"

namespace rafter::backward_bf16 {

template <typename M, Schedule kSchedule>
class KeyBlock {
 public:
  KeyBlock(const Run& run, const cpu::KeyTask& task, std::int64_t head_kv, std::byte* scratch)
      : run_(run),
        layout_(run.layout),
        s_(cpu::sequence_of(run.problem(), run.call.in, task.sequence)),
        window_(cpu::mask_window(run.problem().mask, s_)),
        sequence_(task.sequence),
        head_kv_(head_kv),
        block_(task.block),
        first_key_(task.block * layout_.keys),
        keys_(std::min(layout_.keys, s_.seqlen_kv - first_key_)),
        scratch_(scratch),
        blocks_of_pair_(at<tiles::Range>(layout_.ranges)),
        pairs_of_block_(blocks_of_pair_ + layout_.pairs),
        k_finite_(at<std::uint8_t>(layout_.k_finite)) {}

  void process() {
    const std::int64_t group = run_.problem().heads_q / run_.problem().heads_kv;
    const tiles::Range rows = window_.transposed(s_.seqlen_q).hull(first_key_, first_key_ + keys_);
    pack_keys();
    std::fill_n(at<float>(layout_.dk), layout_.keys * layout_.depth, 0.0f);
    std::fill_n(at<float>(layout_.dv), layout_.keys * layout_.columns, 0.0f);
    for (std::int64_t head = head_kv_ * group; head < (head_kv_ + 1) * group; ++head) {
      for (std::int64_t tile = rows.first / layout_.tile_q; tile * layout_.tile_q < rows.last;
           ++tile) {
        process_tile(head, tile);
      }
    }
    write(layout_.dk, layout_.depth, *run_.problem().softmax_scale, run_.call.out.dk);
    write(layout_.dv, layout_.columns, 1.0f, run_.call.out.dv);
  }

 private:
  using F = typename M::F;

  template <typename T>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(scratch_ + offset);
  }
  std::int64_t row_of_key(const TensorView& view, std::int64_t key) const {
    return cpu::offset_of(view, s_.kv_batch, s_.kv_row + first_key_ + key, head_kv_);
  }

  /// K and V as they lie, and Kᵀ.
  void pack_keys() const {
    const BackwardInputs& in = run_.call.in;
    for (std::int64_t block = 0; block * kBlock < keys_; ++block) {
      const std::uint16_t* row[kBlock];
      const auto rows_in = [&](const TensorView& view) {
        forward_bf16::rows_of_block(
            block, keys_,
            [&](std::int64_t key) {
              return static_cast<const std::uint16_t*>(view.data) + row_of_key(view, key);
            },
            row);
      };
      rows_in(in.v);
      forward_bf16::pack_block<M>(row, layout_.head_dim_v, layout_.columns,
                                  at<std::uint16_t>(layout_.v) + block * kBlock * layout_.columns);
      rows_in(in.k);
      forward_bf16::pack_block<M>(row, layout_.head_dim, layout_.depth,
                                  at<std::uint16_t>(layout_.k) + block * kBlock * layout_.depth);
      bool finite = true;
      for (std::int64_t c = 0; c < layout_.depth; c += kBlock) {
        std::uint16_t* const to = at<std::uint16_t>(layout_.kt) +
                                  (c / kBlock * layout_.blocks + block) * 2 * kTileElements;
        finite = M::transpose_rows(to, row, c, layout_.head_dim) && finite;
      }
      k_finite_[block] = finite ? 1 : 0;
    }
  }

  /// A tile of query rows of one head as this block of keys meets it.
  struct Tile {
    Record record;
    std::int64_t first = 0, rows = 0, pairs = 0;
  };

  /// Which blocks of keys each pair of panels sees, and the other way round.
  void find_ranges(const Tile& tile) {
    const std::int64_t blocks = base::div_up(keys_, kBlock);
    std::fill_n(pairs_of_block_, blocks, tiles::Range{});
    for (std::int64_t pair = 0; pair < tile.pairs; ++pair) {
      const std::int64_t first = tile.first + pair * kBlock;
      const tiles::Range hull =
          window_.hull(first, std::min(first + kBlock, tile.first + tile.rows));
      const std::int64_t from = std::max<std::int64_t>(hull.first - first_key_, 0);
      const std::int64_t to = std::min(hull.last - first_key_, keys_);
      blocks_of_pair_[pair] =
          from < to ? tiles::Range{from / kBlock, base::div_up(to, kBlock)} : tiles::Range{};
      for (std::int64_t block = blocks_of_pair_[pair].first; block < blocks_of_pair_[pair].last;
           ++block) {
        tiles::Range& pairs = pairs_of_block_[block];
        pairs = {pairs.size() == 0 ? pair : pairs.first, pair + 1};
      }
    }
  }

  /// Whether there are 32 rows in the pair and every one sees all 32 keys.
  bool all_see(const Tile& tile, std::int64_t pair, std::int64_t block) const {
    const std::int64_t first = tile.first + pair * kBlock;
    if ((pair + 1) * kBlock > tile.rows) {
      return false;
    }
    const std::int64_t begin = first_key_ + block * kBlock, end = begin + kBlock;
    const tiles::Range top = window_.row(first), bottom = window_.row(first + kBlock - 1);
    return top.first <= begin && end <= top.last && bottom.first <= begin && end <= bottom.last;
  }
  bool sees(const Tile& tile, std::int64_t row, std::int64_t key) const {
    const tiles::Range range = window_.row(tile.first + row);
    return row < tile.rows && range.first <= first_key_ + key && first_key_ + key < range.last;
  }

  void process_tile(std::int64_t head, std::int64_t number) {
    const std::int64_t first = number * layout_.tile_q;
    const std::int64_t rows = std::min(layout_.tile_q, s_.seqlen_q - first);
    const tiles::Range hull = window_.hull(first, first + rows);
    if (hull.last <= first_key_ || hull.first >= first_key_ + keys_) {
      return;
    }
    const std::int64_t place = run_.place_of(s_, sequence_, head, number);
    const Tile tile = {run_.record(place), first, rows, base::div_up(rows, kBlock)};
    find_ranges(tile);
    make_scores(tile);
    add_over_rows(tile, layout_.p, tile.record.d_o_rows, tile.record.d_o_finite, layout_.columns,
                  layout_.dv);
    add_over_rows(tile, layout_.ds, tile.record.q_rows, tile.record.q_finite, layout_.depth,
                  layout_.dk);
    const std::int64_t first_block = hull.first / layout_.keys;
    const std::int64_t last_block = (hull.last - 1) / layout_.keys;
    const auto mine = static_cast<std::int32_t>(block_ - first_block);
    std::int32_t& turn = run_.turn(place);
    cpu::wait_for_turn(turn, mine);
    add_to_dq(tile, mine == 0);
    if (block_ == last_block) {
      write_dq(tile, head);
    }
    cpu::end_turn(turn, mine);
  }

  // ------------------------------------------------------------------- S, dP, P and dS of a tile

  struct Place {
    std::int64_t pair = 0, block = 0;
  };

  void make_scores(const Tile& tile) {
    Place now;
    bool started = false;
    for (std::int64_t pair = 0; pair < tile.pairs; ++pair) {
      for (std::int64_t block = blocks_of_pair_[pair].first; block < blocks_of_pair_[pair].last;
           ++block) {
        const Place next = {pair, block};
        step(tile, started ? &now : nullptr, &next);
        now = next;
        started = true;
      }
    }
    step(tile, started ? &now : nullptr, nullptr);
  }

  Scores scores_of(std::int64_t side) const {
    float* const s = at<float>(layout_.s) + side * 2 * kBlock * kBlock;
    return {s, s + kBlock * kBlock};
  }

  /// P and dS of the block `now`, beside S and dP of the block `next`.
  void step(const Tile& tile, const Place* now, const Place* next) {
    Weights<M> weights;
    if (now != nullptr) {
      weights = weights_of(tile, *now, scores_of(side_));
    }
    side_ = 1 - side_;
    std::int64_t each = 0;
    if (kSchedule.interleave) {
      each = base::div_up(kBlock / 2, (layout_.depth + layout_.columns) / tiles::kBf16Depth);
    } else {
      weights.advance(kBlock / 2);
    }
    const auto slice = [&]() __attribute__((always_inline)) {
      if constexpr (kSchedule.interleave) {
        weights.advance(each);
      }
    };
    if (next != nullptr) {
      const Scores to = scores_of(side_);
      multiply(at<std::uint16_t>(layout_.k), tile.record.q, layout_.depth, *next, to.s, slice);
      multiply(at<std::uint16_t>(layout_.v), tile.record.d_o, layout_.columns, *next, to.dp, slice);
    }
    weights.advance(kBlock / 2);
  }

  Weights<M> weights_of(const Tile& tile, const Place& now, const Scores& from) const {
    const float* const lse = tile.record.lse + now.pair * kBlock;
    const float* const delta = tile.record.delta + now.pair * kBlock;
    const std::int64_t rows_at = (now.block * layout_.pairs + now.pair) * 2 * kTileElements;
    const std::int64_t pairs_at = (2 * now.pair * layout_.blocks + now.block) * kTileSums;
    Weights<M> out;
    out.from = from;
    out.p = at<std::uint16_t>(layout_.p) + rows_at;
    out.ds = at<std::uint16_t>(layout_.ds) + rows_at;
    out.ds_pairs0 = at<std::uint32_t>(layout_.ds_pairs) + pairs_at;
    out.ds_pairs1 = out.ds_pairs0 + layout_.blocks * kTileSums;
    out.done = 0;
    if (run_.capped_input == 0 && all_see(tile, now.pair, now.block)) {
      out.scale = M::set(run_.scale_log2);
      out.lse0 = M::load(lse);
      out.lse1 = M::load(lse + kPanel);
      out.delta0 = M::load(delta);
      out.delta1 = M::load(delta + kPanel);
      return out;
    }
    for (std::int64_t panel = 0; panel < 2; ++panel) {
      alignas(64) std::int32_t visible[2 * kPanel];
      for (std::int64_t i = 0; i < kPanel; ++i) {
        const std::int64_t row = now.pair * kBlock + panel * kPanel + i;
        const tiles::Range range = row < tile.rows ? window_.row(tile.first + row) : tiles::Range{};
        const auto within = [&](std::int64_t key) {
          return static_cast<std::int32_t>(
              std::clamp<std::int64_t>(key - first_key_ - now.block * kBlock, 0, kBlock));
        };
        visible[i] = within(range.first);
        visible[kPanel + i] = range.size() > 0 ? within(range.last) : visible[i];
      }
      const std::int64_t part = panel * kBlock * kPanel;
      adjust<M>(run_, visible, M::load(lse + panel * kPanel), M::load(delta + panel * kPanel),
                from.s + part, from.dp + part);
    }
    out.scale = M::set(1.0f);
    out.lse0 = out.lse1 = out.delta0 = out.delta1 = M::set(0.0f);
    return out;
  }

  template <typename Slice>
  [[gnu::always_inline]] void multiply(const std::uint16_t* keys, const std::uint16_t* rows,
                                       std::int64_t padded, const Place& next, float* to,
                                       const Slice& slice) const {
    const std::uint16_t* const panel = rows + next.pair * kBlock * padded;
    M::template product<false>({keys + next.block * kBlock * padded, panel, panel + kPanel * padded,
                                padded / tiles::kBf16Depth, to, to + kBlock * kPanel},
                               slice);
  }

  // --------------------------------------------------------------------------------- dK, dV and dQ

  /// sums [block][channel / 16][32 keys][16] += weights · rows: dV from P and dO, dK from dS and Q.
  void add_over_rows(const Tile& tile, std::int64_t weights_at, const std::uint16_t* rows,
                     const std::uint8_t* finite, std::int64_t padded, std::int64_t sums_at) const {
    const std::int64_t panels = padded / kPanel, pairs = layout_.pairs;
    const bool all_finite = std::all_of(finite, finite + tile.pairs, [](auto f) { return f != 0; });
    const std::uint16_t* right = rows;
    if (!all_finite) {
      right = clean(rows, layout_.tile_q * padded);
    }
    for (std::int64_t block = 0; block * kBlock < keys_; ++block) {
      const tiles::Range seen = pairs_of_block_[block];
      if (seen.size() == 0) {
        continue;
      }
      const std::uint16_t* const weights =
          at<std::uint16_t>(weights_at) + block * pairs * 2 * kTileElements;
      float* const sums = at<float>(sums_at) + block * kBlock * padded;
      // 0 · NaN is NaN: only what all rows see may meet rows that are not finite
      bool whole = true;
      for (std::int64_t pair = seen.first; pair < seen.last && !all_finite; ++pair) {
        whole = whole && (finite[pair] != 0 || all_see(tile, pair, block));
      }
      const std::uint16_t* const from = whole ? rows : right;
      for (std::int64_t panel = 0; panel < panels; panel += 2) {
        const std::uint16_t* const b = from + (panel * pairs + seen.first) * kTileElements;
        float* const c = sums + panel * kBlock * kPanel;
        M::template product<true>({weights + seen.first * 2 * kTileElements, b,
                                   b + pairs * kTileElements, seen.size(), c, c + kBlock * kPanel},
                                  [] {});
      }
      for (std::int64_t pair = seen.first; pair < seen.last && !whole; ++pair) {
        if (finite[pair] == 0) {
          add_rows_not_finite(tile, {pair, block}, weights, rows, panels, sums);
        }
      }
    }
  }

  /// What elements of rows that are not finite do to the keys that see them.
  void add_rows_not_finite(const Tile& tile, const Place& here, const std::uint16_t* weights,
                           const std::uint16_t* rows, std::int64_t panels, float* sums) const {
    for (std::int64_t i = 0; i < panels * kTileElements; ++i) {
      const std::int64_t panel = i / kTileElements, column = i / 2 % kPanel;
      const std::int64_t row = i % kTileElements / kBlock * 2 + i % 2;
      const std::uint16_t value =
          rows[(panel * layout_.pairs + here.pair) * kTileElements + i % kTileElements];
      for (std::int64_t key = 0; key < kBlock && !cpu::is_finite_bf16(value); ++key) {
        if (sees(tile, here.pair * kBlock + row, here.block * kBlock + key)) {
          const std::uint16_t weight = weights[(here.pair * kBlock + key) * kBlock + row];
          sums[(panel * kBlock + key) * kPanel + column] +=
              bf16_to_f32(weight) * bf16_to_f32(value);
        }
      }
    }
  }

  /// A copy in which zeros stand for what is not finite.
  const std::uint16_t* clean(const std::uint16_t* from, std::int64_t count) const {
    auto* const to = at<std::uint16_t>(layout_.clean);
    std::transform(from, from + count, to,
                   [](std::uint16_t x) { return cpu::is_finite_bf16(x) ? x : std::uint16_t{0}; });
    return to;
  }

  /// dQᵀ [channels][rows] += Kᵀ dSᵀ, or = for the first that comes.
  void add_to_dq(const Tile& tile, bool first) const {
    const std::int64_t blocks = layout_.blocks;
    const auto* const kt = at<std::uint16_t>(layout_.kt);
    for (std::int64_t pair = 0; pair < tile.pairs; ++pair) {
      float* const dq = tile.record.dq + pair * kBlock * layout_.depth;
      const tiles::Range seen = blocks_of_pair_[pair];
      if (seen.size() == 0) {
        if (first) {
          std::fill_n(dq, kBlock * layout_.depth, 0.0f);
        }
        continue;
      }
      bool whole = true;
      for (std::int64_t block = seen.first; block < seen.last; ++block) {
        whole = whole && (k_finite_[block] != 0 || all_see(tile, pair, block));
      }
      const std::uint16_t* const left = whole ? kt : clean(kt, layout_.keys * layout_.depth);
      const std::uint16_t* const b =
          at<std::uint16_t>(layout_.ds_pairs) + (2 * pair * blocks + seen.first) * kTileElements;
      for (std::int64_t c = 0; c < layout_.depth; c += kBlock) {
        const Product product = {left + (c / kBlock * blocks + seen.first) * 2 * kTileElements,
                                 b,
                                 b + blocks * kTileElements,
                                 seen.size(),
                                 dq + c * kPanel,
                                 dq + (layout_.depth + c) * kPanel};
        if (first) {
          M::template product<false>(product, [] {});
        } else {
          M::template product<true>(product, [] {});
        }
      }
      for (std::int64_t block = seen.first; block < seen.last && !whole; ++block) {
        if (k_finite_[block] == 0) {
          add_keys_not_finite(tile, {pair, block}, dq);
        }
      }
    }
  }

  /// What elements of K that are not finite do to the rows that see them.
  void add_keys_not_finite(const Tile& tile, const Place& here, float* dq) const {
    for (std::int64_t i = 0; i < kBlock * layout_.depth; ++i) {
      const std::int64_t channel = i / kBlock, key = i % kBlock;
      const std::uint16_t value = at<std::uint16_t>(
          layout_.kt)[(channel / kBlock * layout_.blocks + here.block) * 2 * kTileElements +
                      i % (2 * kTileElements)];
      for (std::int64_t row = 0; row < kBlock && !cpu::is_finite_bf16(value); ++row) {
        if (sees(tile, here.pair * kBlock + row, here.block * kBlock + key)) {
          const std::int64_t panel = 2 * here.pair + row / kPanel;
          const std::uint16_t weight = at<std::uint16_t>(
              layout_.ds_pairs)[(panel * layout_.blocks + here.block) * kTileElements +
                                (key / 2 * kPanel + row % kPanel) * 2 + key % 2];
          dq[(row / kPanel * layout_.depth + channel) * kPanel + row % kPanel] +=
              bf16_to_f32(weight) * bf16_to_f32(value);
        }
      }
    }
  }

  void write_dq(const Tile& tile, std::int64_t head) const {
    const TensorView& out = run_.call.out.dq;
    auto* const rows = at<float>(layout_.rows);
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      if (row % kPanel == 0) {
        forward_bf16::unpack_panel<M>(tile.record.dq + row * layout_.depth,
                                      M::set(*run_.problem().softmax_scale), layout_.depth, rows);
      }
      forward_bf16::write_row<M>(out,
                                 cpu::offset_of(out, s_.q_batch, s_.q_row + tile.first + row, head),
                                 rows + row % kPanel * layout_.depth);
    }
  }

  /// dK or dV of the block.
  void write(std::int64_t sums_at, std::int64_t padded, float scale, const TensorView& out) const {
    const float* const sums = at<float>(sums_at);
    auto* const row = at<float>(layout_.rows);
    const auto factor = M::set(scale);
    for (std::int64_t key = 0; key < keys_; ++key) {
      for (std::int64_t c = 0; c < padded; c += kPanel) {
        const std::int64_t from =
            key / kBlock * kBlock * padded + c * kBlock + key % kBlock * kPanel;
        M::store(row + c, M::mul(factor, M::load(sums + from)));
      }
      forward_bf16::write_row<M>(out, row_of_key(out, key), row);
    }
  }

  const Run& run_;
  const tiles::Bf16BackwardLayout& layout_;
  const cpu::Sequence s_;
  const tiles::MaskWindow window_;
  const std::int64_t sequence_, head_kv_, block_, first_key_, keys_;
  std::byte* const scratch_;
  tiles::Range* const blocks_of_pair_;
  tiles::Range* const pairs_of_block_;
  std::uint8_t* const k_finite_;
  std::int64_t side_ = 0;  // of S and dP that holds the block at hand
};

template <typename M, Schedule kSchedule>
inline void run_task(const Run& run, const cpu::KeyTask& task, std::int64_t head_kv,
                     std::byte* scratch) {
  KeyBlock<M, kSchedule>(run, task, head_kv, scratch).process();
}

/// What a kernel hands to backward().
template <typename M, Schedule kSchedule = Schedule{}>
inline constexpr Functions kFunctions = {pack_tile<M>, run_task<M, kSchedule>};

}  // namespace rafter::backward_bf16
