// One task of the fused bf16 forward on matrix units, over an abstract machine M: vectors of 16 f32
// and the product of 2 × 2 tiles. The kernels give it instructions (AMX tiles, VDPBF16PS), the
// tests plain loops, so that packing and schedule are proven on any machine.
//
// Queries lie in columns. Sᵀ [keys][queries] = K · Qᵀ, Oᵀ [columns][queries] = Vᵀ · Pᵀ: both are
// products of a block of 32 rows (A) with two panels of 16 queries (B).
//   S  [panel][key][16] f32, of 32 keys, twice    P  [panel][key / 2][16][2], of a chunk, twice
//   O  [panel][column][16] f32                    packed K, V, Q: forward_bf16_pack.h
// The softmax of a block of 32 keys shares the instruction stream with the products beside it: QKᵀ
// of the block that comes next, and PV of the chunk before. Order of every sum: keys, 32 by 32;
// so no bit depends on chunks, nor on what is overlapped with what.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/forward_bf16_block.h"
#include "kernels/cpu/forward_bf16_pack.h"
#include "kernels/cpu/forward_bf16_run.h"

namespace rafter::forward_bf16 {

/// P may grow to 2^8 before the running maximum moves: bf16 and f32 lose nothing by it, and O is
/// rescaled a few times in a row's life instead of at every block. A rule of each lane by itself.
inline constexpr float kMaximumSlack = 8.0f;

template <typename M>
inline void pack_chunk(const Run& run, const cpu::Sequence& sequence, std::int64_t head_kv,
                       std::int64_t begin, const Chunk& out) {
  const std::int64_t keys = keys_of_chunk(run.layout, sequence, begin);
  const ForwardInputs& in = run.call.in;
  pack_keys<M>(Rows(run.call, in.k, sequence, head_kv, begin, keys), run.layout, out);
  pack_values<M>(Rows(run.call, in.v, sequence, head_kv, begin, keys), run.layout, out);
}

/// Pairs of keys, of one panel, that stand beside each of `products` tile products so that all of
/// a block's do: calls f with it as a constant.
template <typename F>
[[gnu::always_inline]] inline void with_pairs(std::int64_t products, const F& f) {
  static_assert(kBlock / 2 == 16);  // and there are at least four products
  if (products >= 16) {
    f(std::integral_constant<int, 1>());
  } else if (products >= 8) {
    f(std::integral_constant<int, 2>());
  } else {
    f(std::integral_constant<int, 4>());
  }
}

/// One task.
template <typename M, Schedule kSchedule>
class Worker {
 public:
  Worker(const Run& run, const cpu::Task& task, std::int64_t head_kv, std::int64_t head_chunk,
         std::int64_t block, std::byte* scratch)
      : run_(run),
        layout_(run.layout),
        problem_(run.call.problem.attention),
        sequence_(cpu::sequence_of(problem_, run.call.in, task.sequence)),
        window_(cpu::mask_window(problem_.mask, sequence_)),
        lanes_(problem_, run.shape, sequence_, window_, task, head_kv, head_chunk),
        scores_(*problem_.softmax_scale, problem_.softcap),
        head_kv_(head_kv),
        packed_block_(block),
        pairs_(base::div_up(lanes_.count, kBlock)),
        scratch_(scratch),
        q_(reinterpret_cast<std::uint16_t*>(scratch + layout_.q)),
        p_(reinterpret_cast<std::uint16_t*>(scratch + layout_.p)),
        o_(reinterpret_cast<float*>(scratch + layout_.o)),
        s_(reinterpret_cast<float*>(scratch + layout_.s)),
        maximum_(reinterpret_cast<float*>(scratch + layout_.state)),
        sum_(maximum_ + layout_.panels * kPanel),
        lane_first_(reinterpret_cast<std::int64_t*>(scratch + layout_.lanes)),
        lane_last_(lane_first_ + layout_.panels * kPanel),
        pair_(reinterpret_cast<Pair*>(scratch + layout_.pairs)) {
    read_queries(task.first);
  }

  void run() {
    Walk now = {.pair_list = pair_,
                .pairs = pairs_,
                .chunk = layout_.chunk,
                .end = lanes_.hull.last,
                .begin = lanes_.hull.first / layout_.chunk * layout_.chunk};
    bool more = now.next();
    if (more) {
      enter(now.begin);
      multiply_scores(now, s_, [] {});
    }
    while (more) {
      Walk ahead = now;
      more = ahead.next();
      if (now.opens) {
        open(now);
      }
      if (more && ahead.begin != now.begin) {
        enter(ahead.begin);
      }
      step(now, more ? &ahead : nullptr);
      now = ahead;
    }
    finish(before_);
    finish(current_);
    write_outputs();
  }

 private:
  using F = typename M::F;
  static constexpr std::int64_t kMostParts = 8;
  static_assert(kSchedule.most_parts <= kMostParts);

  /// PV of one pair of panels and one chunk: column block by column block, each in `parts` along
  /// the keys, so that every block of scores has as much of it beside it. Between its parts a
  /// column block of O lies in the L1.
  struct Job {
    Chunk chunk;
    std::int64_t begin = 0;  // first key of the chunk
    std::int64_t pair = 0;
    const std::uint16_t* p = nullptr;
    std::int64_t first = 0, last = 0;  // blocks of the chunk
    std::int64_t parts = 1;
    std::int64_t unit = 0, units = 0;          // parts of column blocks: done, and in all
    std::int64_t column = 0, part = 0;         // of the next one
    std::int64_t before[kMostParts + 1] = {};  // blocks before each part
    bool adds = false;                         // to what O holds

    void take(std::int64_t from, std::int64_t to) {
      first = from;
      last = to;
      for (std::int64_t i = 0; i <= parts; ++i) {
        before[i] = (last - first) * i / parts;
      }
    }
    void next() {
      ++unit;
      if (++part == parts) {
        part = 0;
        ++column;
      }
    }
    /// Blocks of the units up to `end`.
    std::int64_t steps_to(std::int64_t end) const {
      std::int64_t steps = 0;
      for (std::int64_t u = unit, i = part; u < end; ++u) {
        steps += before[i + 1] - before[i];
        i = i + 1 == parts ? 0 : i + 1;
      }
      return steps;
    }
  };

  bool packs_itself() const { return layout_.packed_blocks == 0; }
  std::int64_t columns() const { return layout_.columns / kBlock; }
  float* o_of(std::int64_t panel) const { return o_ + panel * kPanel * layout_.columns; }

  /// The chunk at `begin`; the last one asked for is kept, as a division a block is not free.
  const Chunk& chunk_at(std::int64_t begin) {
    if (begin != chunk_begin_) {
      chunk_begin_ = begin;
      chunk_ = find_chunk(begin);
    }
    return chunk_;
  }
  Chunk find_chunk(std::int64_t begin) const {
    const std::int64_t blocks = base::div_up(keys_of_chunk(layout_, sequence_, begin), kBlock);
    if (!packs_itself()) {
      return run_.heads.chunk(layout_, packed_block_ + begin / kBlock, blocks);
    }
    const PackedHeads own = {reinterpret_cast<std::uint16_t*>(scratch_ + layout_.own_k),
                             reinterpret_cast<std::uint16_t*>(scratch_ + layout_.own_v),
                             reinterpret_cast<std::uint8_t*>(scratch_ + layout_.own_finite)};
    return own.chunk(layout_, begin / layout_.chunk % 2 * (layout_.chunk / kBlock), blocks);
  }

  void read_queries(std::int64_t first_query) {
    const std::int64_t lanes = pairs_ * kBlock;
    cpu::fill_lane_ranges(lanes_, window_, first_query, lanes, lane_first_, lane_last_);
    for (std::int64_t pair = 0; pair < pairs_; ++pair) {
      pair_[pair] = Pair();
      for (std::int64_t lane = pair * kBlock; lane < (pair + 1) * kBlock; ++lane) {
        pair_[pair].add(lane_first_[lane], lane_last_[lane]);
      }
    }
    for (std::int64_t panel = 0; panel < 2 * pairs_; ++panel) {
      pack_queries<M>(run_.call.in.q, lanes_, panel * kPanel, layout_, *problem_.softmax_scale < 0,
                      reinterpret_cast<std::uint16_t*>(scratch_ + layout_.rows),
                      q_ + panel * kPanel * layout_.depth);
    }
    std::fill_n(maximum_, lanes, kMinusInfinity);
    std::fill_n(sum_, lanes, 0.0f);
  }

  /// Makes K and V of the chunk at `begin` ready. Of the own ones two lie there: the one before the
  /// last is not needed any more.
  void enter(std::int64_t begin) {
    if (packs_itself()) {
      finish(before_);
      pack_chunk<M>(run_, sequence_, head_kv_, begin, chunk_at(begin));
    }
  }

  /// Starts a pair of panels on a chunk; what was started last waits for its PV now.
  void open(const Walk& now) {
    finish(before_);
    before_ = current_;
    slot_ = 1 - slot_;
    Pair& pair = pair_[now.pair];
    const std::int64_t parts =
        std::clamp<std::int64_t>((now.last - now.block) / columns(), 1, kSchedule.most_parts);
    current_ = {.chunk = chunk_at(now.begin),
                .begin = now.begin,
                .pair = now.pair,
                .p = p_ + slot_ * kBlock * layout_.chunk,
                .parts = parts,
                .units = columns() * parts,
                .adds = pair.written};
    current_.take(now.block, now.last);
    pair.written = true;
    span_ = now.last - now.block;
    due_ = 0;
    owed_ = 0;
    if (packs_itself()) {
      prefetch_rows(now.begin + layout_.chunk, now.pair);
    } else if (kSchedule.prefetch && now.begin != prefetched_) {
      prefetched_ = now.begin;
      prefetch_packed(now.begin + layout_.chunk);
    }
  }

  void prefetch_rows(std::int64_t begin, std::int64_t part) const {
    const std::int64_t keys = std::clamp<std::int64_t>(lanes_.hull.last - begin, 0, layout_.chunk);
    const ForwardInputs& in = run_.call.in;
    Rows(run_.call, in.k, sequence_, head_kv_, begin, keys)
        .prefetch(layout_.head_dim, part, pairs_);
    Rows(run_.call, in.v, sequence_, head_kv_, begin, keys)
        .prefetch(layout_.head_dim_v, part, pairs_);
  }

  /// Lines on their way to the L2, a few a step.
  struct Lines {
    const std::uint16_t* at = nullptr;
    const std::uint16_t* end = nullptr;
    std::int64_t each = 0;  // elements

    Lines() = default;
    Lines(const std::uint16_t* from, std::int64_t elements, std::int64_t steps)
        : at(from), end(from + elements), each(base::div_up(elements, steps * 32) * 32) {}
    void step() {
      constexpr int kRead = 0, kKeepInL2 = 2;
      const std::uint16_t* const to = at + std::min<std::int64_t>(each, end - at);
      for (; at < to; at += 32) {
        __builtin_prefetch(at, kRead, kKeepInL2);
      }
    }
  };

  /// Lets the packed chunk at `begin`, where there is one, arrive while the one before it is used.
  void prefetch_packed(std::int64_t begin) {
    k_lines_ = v_lines_ = Lines();
    if (begin < lanes_.hull.last) {
      const Chunk next = find_chunk(begin);
      const std::int64_t steps = pairs_ * (layout_.chunk / kBlock);
      k_lines_ = Lines(next.k, next.blocks * layout_.block_k(), steps);
      v_lines_ = Lines(next.v, next.blocks * layout_.block_v(), steps);
    }
  }

  template <typename Slice>
  [[gnu::always_inline]] void multiply_scores(const Walk& at, float* s, const Slice& slice) {
    const std::int64_t panel = kPanel * layout_.depth;
    const std::uint16_t* const q = q_ + at.pair * 2 * panel;
    const std::uint16_t* const k = chunk_at(at.begin).k + at.block * layout_.block_k();
    M::template product<false, 4>(
        {k, q, q + panel, layout_.depth / tiles::kBf16Depth, s, s + kBlock * kPanel}, slice);
  }

  /// PV up to unit `end`.
  template <typename Slice>
  [[gnu::always_inline]] void multiply_values(Job& job, std::int64_t end, const Slice& slice) {
    for (; job.unit < end; job.next()) {
      const std::int64_t from = job.first + job.before[job.part];
      const std::int64_t at = (job.column * job.chunk.blocks + from) * 2 * kTileElements;
      const std::uint16_t* const p = job.p + from * kTileElements;
      const std::int64_t sums = job.column * kBlock * kPanel;
      const Product product = {
          job.chunk.v + at,           p,
          p + kPanel * layout_.chunk, job.before[job.part + 1] - job.before[job.part],
          o_of(2 * job.pair) + sums,  o_of(2 * job.pair + 1) + sums};
      if (job.adds || job.part > 0) {
        M::template product<true, 4>(product, slice);
      } else {
        M::template product<false, 4>(product, slice);
      }
    }
  }

  void finish(Job& job) {
    if (job.unit == job.units) {
      return;
    }
    multiply_values(job, job.units, [] {});
    add_not_finite(job);
  }

  /// What elements of V that are not finite do to the lanes that see them.
  [[gnu::noinline]] void add_not_finite(const Job& job) const {
    for (std::int64_t block = job.first; block < job.last; ++block) {
      if (job.chunk.finite[block] == 0) {
        add_not_finite(job, block);
      }
    }
  }
  void add_not_finite(const Job& job, std::int64_t block) const {
    const std::int64_t begin = job.begin + block * kBlock;
    const std::int64_t keys = std::min(kBlock, sequence_.seqlen_kv - begin);
    const Rows rows(run_.call, run_.call.in.v, sequence_, head_kv_, begin, keys);
    for (std::int64_t key = 0; key < keys; ++key) {
      for (std::int64_t c = 0; c < layout_.head_dim_v; ++c) {
        const std::uint16_t v = rows.row(key)[c];
        for (std::int64_t i = 0; i < kBlock && !cpu::is_finite_bf16(v); ++i) {
          const std::int64_t lane = job.pair * kBlock + i;
          if (lane_first_[lane] <= begin + key && begin + key < lane_last_[lane]) {
            const std::uint16_t* const p =
                job.p + i / kPanel * kPanel * layout_.chunk + block * kTileElements;
            const float weight = bf16_to_f32(p[(key / 2 * kPanel + i % kPanel) * 2 + key % 2]);
            o_of(lane / kPanel)[c * kPanel + i % kPanel] += weight * bf16_to_f32(v);
          }
        }
      }
    }
  }

  /// Softcap and mask on a block of scores of both panels.
  void adjust(const Walk& now, float* s) const {
    for (std::int64_t panel = 0; panel < 2; ++panel) {
      alignas(64) std::int32_t visible[2 * kPanel];
      const std::int64_t lane = (2 * now.pair + panel) * kPanel;
      for (std::int64_t i = 0; i < kPanel; ++i) {
        const auto within = [&](std::int64_t key) {
          return static_cast<std::int32_t>(std::clamp<std::int64_t>(key - now.key(), 0, kBlock));
        };
        visible[i] = within(lane_first_[lane + i]);
        visible[kPanel + i] = within(lane_last_[lane + i]);
      }
      adjust_scores<M>(scores_, visible, s + panel * kBlock * kPanel);
    }
  }

  /// Moves the maximum of a panel on; returns what exponents are taken against. Most blocks move
  /// none: then nothing here waits for the scores but a branch.
  [[gnu::always_inline]] F base_of(const Walk& now, std::int64_t panel, const float* s) {
    float* const maximum = maximum_ + (2 * now.pair + panel) * kPanel;
    const auto top = has_tops_ ? M::load(tops_ + panel * kPanel) : top_of<M>(scores_, s);
    const auto minus_infinity = M::set(kMinusInfinity);
    auto most = M::load(maximum);
    const auto moves = M::greater(top, M::add(most, M::set(kMaximumSlack)));
    if (M::any(moves)) {
      const auto moved = M::select(moves, top, most);
      if (M::any(M::greater(M::select(moves, most, minus_infinity), minus_infinity))) {
        // lanes that saw no key yet have nothing to rescale, and 2^−∞ = 0 to do it with
        rescale(now, panel, M::select(moves, exp2_of<M>(M::sub(most, moved)), M::set(1.0f)));
      }
      M::store(maximum, moved);
      most = moved;
    }
    // a lane that has seen no key: 2^(−∞ − 0) = 0 for all of its scores
    return M::select(M::greater(most, minus_infinity), most, M::set(0.0f));
  }

  /// O and sum of a panel times alpha, once O holds all keys before this block.
  [[gnu::noinline]] void rescale(const Walk& now, std::int64_t panel, F alpha) {
    if (before_.pair == now.pair) {
      finish(before_);
    }
    if (current_.first < now.block) {
      Job part = current_;
      part.take(current_.first, now.block);
      finish(part);
      current_.take(now.block, current_.last);
      current_.adds = true;
    }
    float* const sum = sum_ + (2 * now.pair + panel) * kPanel;
    float* const o = o_of(2 * now.pair + panel);
    M::store(sum, M::mul(M::load(sum), alpha));
    for (std::int64_t c = 0; c < layout_.columns; ++c) {
      M::store(o + c * kPanel, M::mul(alpha, M::load(o + c * kPanel)));
    }
  }

  /// Whether scores of the block are used as the product leaves them.
  bool is_plain(const Walk& at) const {
    return scores_.capped_input == 0 && pair_[at.pair].all_see(at.key(), at.key() + kBlock);
  }

  /// Softmax of the block `now`, beside the scores of the block `ahead` and a part of the PV that
  /// waits.
  [[gnu::noinline]] void step(const Walk& now, const Walk* ahead) {
    float* const s = s_ + side_ * 2 * kBlock * kPanel;
    side_ = 1 - side_;
    float* const next = s_ + side_ * 2 * kBlock * kPanel;
    if (!is_plain(now)) {
      adjust(now, s);
    }
    k_lines_.step();
    v_lines_.step();
    const auto zero = M::set(0.0f);
    const auto base0 = base_of(now, 0, s);
    const auto base1 = base_of(now, 1, s + kBlock * kPanel);
    has_tops_ = false;
    auto* const p = reinterpret_cast<std::uint32_t*>(p_ + slot_ * kBlock * layout_.chunk +
                                                     now.block * kTileElements);
    const auto scale = M::set(scores_.scale_log2);
    PanelWeights<M> weights0 = {s, p, scale, M::sub(zero, base0), zero, zero};
    PanelWeights<M> weights1 = {s + kBlock * kPanel,
                                p + kPanel * layout_.chunk / 2,
                                scale,
                                M::sub(zero, base1),
                                zero,
                                zero};
    // units · (block + 1) / blocks of the pair's: the last block takes the last of them
    for (owed_ += before_.units; owed_ >= span_; owed_ -= span_) {
      ++due_;
    }
    const std::int64_t due = std::max(before_.unit, due_);
    const bool completes = before_.unit < due && due == before_.units;
    if constexpr (kSchedule.interleave) {
      interleave(next, ahead, due, weights0, weights1);
    } else {
      weights0.finish();
      weights1.finish();
      if (ahead != nullptr) {
        multiply_scores(*ahead, next, [] {});
      }
      multiply_values(before_, due, [] {});
    }
    if (completes) {
      add_not_finite(before_);
    }
    float* const sum = sum_ + 2 * now.pair * kPanel;
    M::store(sum, M::add(M::load(sum), M::add(weights0.even, weights0.odd)));
    M::store(sum + kPanel, M::add(M::load(sum + kPanel), M::add(weights1.even, weights1.odd)));
  }

  /// The first panel's weights beside the scores, the second one's beside PV, and there, once they
  /// are stored, the maxima of these scores.
  [[gnu::always_inline]] void interleave(float* next, const Walk* ahead, std::int64_t due,
                                         PanelWeights<M>& weights0, PanelWeights<M>& weights1) {
    if (ahead != nullptr) {
      const std::int64_t products = 4 * (layout_.depth / tiles::kBf16Depth);
      with_pairs(
          products, [&](auto pairs) __attribute__((always_inline)) {
            constexpr int kPairs = decltype(pairs)::value;
            multiply_scores(
                *ahead, next, [&]() __attribute__((always_inline)) {
                  weights0.template advance<kPairs>();
                });
          });
    }
    weights0.finish();
    const std::int64_t products = 4 * before_.steps_to(due);
    if (products > 0) {
      const bool early = ahead != nullptr && is_plain(*ahead);
      const auto low = M::set(kMinusInfinity);
      Tops<M> tops = {next, low, low, low, low, products / 4, early ? kBlock : 0};
      with_pairs(
          products, [&](auto pairs) __attribute__((always_inline)) {
            constexpr int kPairs = decltype(pairs)::value;
            multiply_values(
                before_, due, [&]() __attribute__((always_inline)) {
                  weights1.template advance<kPairs>();
                  tops.template advance<4 * kPairs>();
                });
          });
      if (early) {
        tops.finish();
        const auto scale = M::set(scores_.scale_log2);
        M::store(tops_, M::mul(scale, M::max(tops.top0, tops.other0)));
        M::store(tops_ + kPanel, M::mul(scale, M::max(tops.top1, tops.other1)));
        has_tops_ = true;
      }
    }
    weights1.finish();
  }

  void write_outputs() {
    for (std::int64_t panel = 0; panel * kPanel < lanes_.count; ++panel) {
      float* const o = o_of(panel);
      if (!pair_[panel / 2].written) {
        std::fill_n(o, kPanel * layout_.columns, 0.0f);
      }
      write_panel<M>(run_.call.out, lanes_, panel * kPanel, layout_, o, maximum_ + panel * kPanel,
                     sum_ + panel * kPanel, reinterpret_cast<float*>(scratch_ + layout_.rows));
    }
  }

  const Run& run_;
  const tiles::Bf16Layout& layout_;
  const AttentionProblem& problem_;
  const cpu::Sequence sequence_;
  const tiles::MaskWindow window_;
  const cpu::Lanes lanes_;
  const Scores scores_;
  const std::int64_t head_kv_;
  const std::int64_t packed_block_;
  const std::int64_t pairs_;
  std::byte* const scratch_;
  std::uint16_t* const q_;
  std::uint16_t* const p_;
  float* const o_;
  float* const s_;
  float* const maximum_;
  float* const sum_;
  std::int64_t* const lane_first_;
  std::int64_t* const lane_last_;
  Pair* const pair_;

  Chunk chunk_;
  std::int64_t chunk_begin_ = -1;
  Lines k_lines_, v_lines_;
  std::int64_t prefetched_ = -1;  // chunk whose next one they bring

  Job before_;             // complete but for its PV
  Job current_;            // whose P is being made
  std::int64_t span_ = 1;  // blocks of it, beside which all units of `before_` are due
  std::int64_t due_ = 0, owed_ = 0;
  std::int64_t slot_ = 0;  // of P that it fills
  std::int64_t side_ = 0;  // of S that holds the block at hand
  bool has_tops_ = false;  // of that block
  alignas(64) float tops_[2 * kPanel];
};

template <typename M>
inline void pack_keys_and_values(const Run& run, const cpu::Task& keys, std::int64_t head_kv,
                                 std::int64_t block) {
  const cpu::Sequence sequence =
      cpu::sequence_of(run.call.problem.attention, run.call.in, keys.sequence);
  const std::int64_t count = keys_of_chunk(run.layout, sequence, keys.first);
  pack_chunk<M>(run, sequence, head_kv, keys.first,
                run.heads.chunk(run.layout, block, base::div_up(count, kBlock)));
}

template <typename M, Schedule kSchedule>
inline void run_task(const Run& run, const cpu::Task& task, std::int64_t head_kv,
                     std::int64_t head_chunk, std::int64_t block, std::byte* scratch) {
  Worker<M, kSchedule>(run, task, head_kv, head_chunk, block, scratch).run();
}

/// What a kernel hands to forward().
template <typename M, Schedule kSchedule = Schedule{}>
inline constexpr Functions kFunctions = {pack_keys_and_values<M>, run_task<M, kSchedule>};

}  // namespace rafter::forward_bf16
