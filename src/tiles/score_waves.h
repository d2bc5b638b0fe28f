// Pipelines that let the score matrix land do so in waves, so that memory is bounded: a wave is a
// range of (sequence, head) pairs, or a range of the query rows of one pair.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rafter::tiles {

/// How the scores of `pairs` (sequence, head) pairs, seqlen_q × seqlen_kv each, go through a
/// buffer.
struct ScoreWaves {
  std::int64_t pairs = 0, seqlen_q = 0;
  std::int64_t row_stride = 0;  // elements from one row of scores to the next
  std::int64_t pairs_per_wave = 1;
  std::int64_t rows_per_wave = 0;

  constexpr std::int64_t pair_stride() const { return rows_per_wave * row_stride; }
  constexpr std::int64_t score_elements() const { return pairs_per_wave * pair_stride(); }
  constexpr std::int64_t row_waves() const {
    return rows_per_wave > 0 ? (seqlen_q + rows_per_wave - 1) / rows_per_wave : 0;
  }
  constexpr std::int64_t waves() const {
    return (pairs + pairs_per_wave - 1) / pairs_per_wave * row_waves();
  }
};

/// Rows of scores start at multiples of 64 elements: whole cache lines.
inline constexpr std::int64_t kScoreRowStep = 64;
/// Part of a pair's rows in a wave is a multiple of this.
inline constexpr std::int64_t kWaveRowStep = 1024;

/// As many pairs in a wave as `budget_bytes` holds, `pair_bytes` for each beside its scores of
/// `score_bytes` an element; where not even one fits, as many of its rows (kWaveRowStep at least).
/// Sizes are such that pairs · seqlen_q · seqlen_kv fits 63 bits.
constexpr ScoreWaves plan_score_waves(std::int64_t pairs, std::int64_t seqlen_q,
                                      std::int64_t seqlen_kv, std::int64_t score_bytes,
                                      std::int64_t pair_bytes, std::int64_t budget_bytes) {
  ScoreWaves waves;
  waves.pairs = pairs;
  waves.seqlen_q = seqlen_q;
  waves.row_stride =
      std::max<std::int64_t>(1, (seqlen_kv + kScoreRowStep - 1) / kScoreRowStep) * kScoreRowStep;
  const std::int64_t row_bytes = waves.row_stride * score_bytes;
  const std::int64_t one = seqlen_q * row_bytes + pair_bytes;
  waves.pairs_per_wave = std::clamp<std::int64_t>(budget_bytes / std::max<std::int64_t>(1, one), 1,
                                                  std::max<std::int64_t>(1, pairs));
  waves.rows_per_wave = seqlen_q;
  if (one > budget_bytes) {
    const std::int64_t steps = budget_bytes / row_bytes / kWaveRowStep;
    waves.rows_per_wave = std::min(seqlen_q, std::max<std::int64_t>(1, steps) * kWaveRowStep);
  }
  return waves;
}

/// The same where products take `rows` rows of a pair at a time (a mask lets each block see keys of
/// its own): a wave is one block of as many pairs as `budget_bytes` holds, so that products are of
/// many matrices and a block's place in the buffer does not depend on how many there are.
constexpr ScoreWaves plan_block_waves(std::int64_t pairs, std::int64_t seqlen_q,
                                      std::int64_t seqlen_kv, std::int64_t score_bytes,
                                      std::int64_t rows, std::int64_t budget_bytes) {
  ScoreWaves waves =
      plan_score_waves(pairs, std::min(rows, seqlen_q), seqlen_kv, score_bytes, 0, budget_bytes);
  waves.seqlen_q = seqlen_q;
  return waves;
}

/// Pairs in one order or the other: heads of a sequence side by side, or sequences of a head.
struct PairOrder {
  std::int64_t batch = 1, heads = 1;
  bool batch_fastest = false;

  struct Pair {
    std::int64_t batch = 0, head = 0;
  };
  constexpr Pair at(std::int64_t index) const {
    return batch_fastest ? Pair{index % batch, index / batch} : Pair{index / heads, index % heads};
  }
  /// Pairs from `index` on, at most to `end`, that lie a constant stride apart in q, k, v and o:
  /// sequences of one head, or heads of one sequence that share K and V or each have their own.
  constexpr std::int64_t run_end(std::int64_t index, std::int64_t end, std::int64_t group) const {
    const std::int64_t length = batch_fastest ? batch : group == 1 ? heads : group;
    return std::min(end, (index / length + 1) * length);
  }
};

/// The order that needs the fewer runs for all pairs.
constexpr PairOrder pair_order(std::int64_t batch, std::int64_t heads, std::int64_t group) {
  const std::int64_t by_heads = group == 1 ? batch : batch * (heads / group);
  return {batch, heads, heads < by_heads};
}

}  // namespace rafter::tiles
