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
    std::int64_t unit = 0, units = 0;  // parts of column blocks: done, and in all
    bool adds = false;                 // to what O holds

    /// Blocks of keys before part `part` of a column block, and of all parts before a unit.
    std::int64_t before(std::int64_t part) const { return (last - first) * part / parts; }
    std::int64_t steps_to(std::int64_t end) const {
      return end / parts * (last - first) + before(end % parts);
    }
  };

  bool packs_itself() const { return layout_.packed_blocks == 0; }
  std::int64_t columns() const { return layout_.columns / kBlock; }
  float* o_of(std::int64_t panel) const { return o_ + panel * kPanel * layout_.columns; }

  Chunk chunk_at(std::int64_t begin) const {
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
                .first = now.block,
                .last = now.last,
                .parts = parts,
                .unit = 0,
                .units = columns() * parts,
                .adds = pair.written};
    pair.written = true;
    opened_ = now.block;
    if (packs_itself()) {
      prefetch_rows(now.begin + layout_.chunk, now.pair);
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

  /// This step's part of the next chunk.
  void prefetch_packed(const Walk& now) const {
    const std::int64_t begin = now.begin + layout_.chunk;
    if (begin >= lanes_.hull.last) {
      return;
    }
    const Chunk next = chunk_at(begin);
    const std::int64_t blocks = layout_.chunk / kBlock;
    const std::int64_t part = now.pair * blocks + now.block;
    const auto lines = [&](const std::uint16_t* from, std::int64_t elements) {
      constexpr int kRead = 0, kKeepInL2 = 2;
      const std::int64_t parts = pairs_ * blocks;
      for (std::int64_t i = elements / 32 * part / parts; i < elements / 32 * (part + 1) / parts;
           ++i) {
        __builtin_prefetch(from + i * 32, kRead, kKeepInL2);
      }
    };
    lines(next.k, next.blocks * layout_.block_k());
    lines(next.v, next.blocks * layout_.block_v());
  }

  template <typename Slice>
  [[gnu::always_inline]] void multiply_scores(const Walk& at, float* s, const Slice& slice) {
    const std::int64_t panel = kPanel * layout_.depth;
    const std::uint16_t* const q = q_ + at.pair * 2 * panel;
    const std::uint16_t* const k = chunk_at(at.begin).k + at.block * layout_.block_k();
    M::template product<false>(
        {k, q, q + panel, layout_.depth / tiles::kBf16Depth, s, s + kBlock * kPanel}, slice);
  }

  /// PV up to unit `end`.
  template <typename Slice>
  [[gnu::always_inline]] void multiply_values(Job& job, std::int64_t end, const Slice& slice) {
    for (; job.unit < end; ++job.unit) {
      const std::int64_t part = job.unit % job.parts;
      const std::int64_t from = job.first + job.before(part);
      const std::int64_t at = (job.unit / job.parts * job.chunk.blocks + from) * 2 * kTileElements;
      const std::uint16_t* const p = job.p + from * kTileElements;
      const std::int64_t column = job.unit / job.parts * kBlock * kPanel;
      const Product product = {job.chunk.v + at,
                               p,
                               p + kPanel * layout_.chunk,
                               job.before(part + 1) - job.before(part),
                               o_of(2 * job.pair) + column,
                               o_of(2 * job.pair + 1) + column};
      if (job.adds || part > 0) {
        M::template product<true>(product, slice);
      } else {
        M::template product<false>(product, slice);
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
  void add_not_finite(const Job& job) const {
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
    const auto top = top_of<M>(scores_, s);
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
      part.last = now.block;
      finish(part);
      current_.first = now.block;
      current_.adds = true;
    }
    float* const sum = sum_ + (2 * now.pair + panel) * kPanel;
    float* const o = o_of(2 * now.pair + panel);
    M::store(sum, M::mul(M::load(sum), alpha));
    for (std::int64_t c = 0; c < layout_.columns; ++c) {
      M::store(o + c * kPanel, M::mul(alpha, M::load(o + c * kPanel)));
    }
  }

  /// Softmax of the block `now`, beside the scores of the block `ahead` and a part of the PV that
  /// waits.
  void step(const Walk& now, const Walk* ahead) {
    float* const s = s_ + side_ * 2 * kBlock * kPanel;
    side_ = 1 - side_;
    float* const next = s_ + side_ * 2 * kBlock * kPanel;
    if (scores_.capped_input != 0 || !pair_[now.pair].all_see(now.key(), now.key() + kBlock)) {
      adjust(now, s);
    }
    if (kSchedule.prefetch && !packs_itself()) {
      prefetch_packed(now);
    }
    const auto zero = M::set(0.0f);
    const auto base0 = base_of(now, 0, s);
    const auto base1 = base_of(now, 1, s + kBlock * kPanel);
    auto* const p = reinterpret_cast<std::uint32_t*>(p_ + slot_ * kBlock * layout_.chunk +
                                                     now.block * kTileElements);
    Exponentials<M> exponentials = {.s0 = s,
                                    .s1 = s + kBlock * kPanel,
                                    .p0 = p,
                                    .p1 = p + kPanel * layout_.chunk / 2,
                                    .scale = M::set(scores_.scale_log2),
                                    .offset0 = M::sub(zero, base0),
                                    .offset1 = M::sub(zero, base1),
                                    .even0 = zero,
                                    .odd0 = zero,
                                    .even1 = zero,
                                    .odd1 = zero};
    // the last block of the pair takes the last of them
    const std::int64_t due =
        std::max(before_.unit, before_.units * (now.block - opened_ + 1) / (now.last - opened_));
    const std::int64_t quarters = (ahead != nullptr ? layout_.depth / tiles::kBf16Depth : 0) +
                                  before_.steps_to(due) - before_.steps_to(before_.unit);
    std::int64_t each = 0;
    if (kSchedule.interleave) {
      each = base::div_up(kBlock / 2, std::max<std::int64_t>(1, quarters));
    } else {
      exponentials.advance(kBlock / 2);
    }
    const auto slice = [&]() __attribute__((always_inline)) {
      if constexpr (kSchedule.interleave) {
        exponentials.advance(each);
      }
    };
    if (ahead != nullptr) {
      multiply_scores(*ahead, next, slice);
    }
    if (before_.unit < due) {
      multiply_values(before_, due, slice);
      if (before_.unit == before_.units) {
        add_not_finite(before_);
      }
    }
    exponentials.advance(kBlock / 2);
    float* const sum = sum_ + 2 * now.pair * kPanel;
    M::store(sum, M::add(M::load(sum), M::add(exponentials.even0, exponentials.odd0)));
    M::store(sum + kPanel,
             M::add(M::load(sum + kPanel), M::add(exponentials.even1, exponentials.odd1)));
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

  Job before_;               // complete but for its PV
  Job current_;              // whose P is being made
  std::int64_t opened_ = 0;  // first block of it
  std::int64_t slot_ = 0;    // of P that it fills
  std::int64_t side_ = 0;    // of S that holds the block at hand
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
