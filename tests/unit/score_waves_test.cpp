// Waves of scores by brute force: every row of every pair once, within the budget.
#include "tiles/score_waves.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace rafter::tiles {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

TEST(ScoreWaves, TakeEveryRowOnceWithinTheBudget) {
  for (const std::int64_t pairs : {1, 3, 40}) {
    for (const std::int64_t seqlen_q : {1, 1023, 1024, 5000}) {
      for (const std::int64_t seqlen_kv : {0, 1, 63, 64, 65, 4096}) {
        for (const std::int64_t budget : {std::int64_t{1}, std::int64_t{1} << 22, kGiB}) {
          const ScoreWaves w = plan_score_waves(pairs, seqlen_q, seqlen_kv, 2, 1000, budget);
          EXPECT_GE(w.row_stride, seqlen_kv);
          EXPECT_EQ(w.row_stride % kScoreRowStep, 0);
          EXPECT_LE(w.pairs_per_wave, pairs);
          EXPECT_LE(w.rows_per_wave, seqlen_q);
          std::int64_t waves = 0, rows = 0;
          for (std::int64_t p = 0; p < pairs; p += w.pairs_per_wave) {
            for (std::int64_t r = 0; r < seqlen_q; r += w.rows_per_wave) {
              ++waves;
              rows +=
                  std::min(w.pairs_per_wave, pairs - p) * std::min(w.rows_per_wave, seqlen_q - r);
            }
          }
          EXPECT_EQ(waves, w.waves());
          EXPECT_EQ(rows, pairs * seqlen_q);
          const std::int64_t bytes = 2 * w.score_elements();
          const bool least = w.pairs_per_wave == 1 && w.rows_per_wave <= kWaveRowStep;
          EXPECT_TRUE(bytes <= budget || least) << bytes << " of " << budget;
          EXPECT_TRUE(w.rows_per_wave == seqlen_q || w.rows_per_wave % kWaveRowStep == 0);
        }
      }
    }
  }
}

TEST(ScoreWaves, ThirtyTwoHeadsOf32KGoThroughFourGiBInSixteen) {
  const ScoreWaves w = plan_score_waves(32, 32768, 32768, 2, 0, 4 * kGiB);
  EXPECT_EQ(w.pairs_per_wave, 2);
  EXPECT_EQ(w.waves(), 16);
  EXPECT_EQ(2 * w.score_elements(), 4 * kGiB);
}

// Under a mask a wave is one block of rows of as many pairs as fit: products of many matrices, and
// a stride from pair to pair that the number of pairs does not change.
TEST(ScoreWaves, OfABlockTakeManyPairsAndEachRowOnce) {
  for (const std::int64_t pairs : {1, 3, 40, 200}) {
    for (const std::int64_t seqlen : {0, 1, 1023, 1024, 1025, 5000, 32768}) {
      const ScoreWaves w = plan_block_waves(pairs, seqlen, seqlen, 2, 1024, 4 * kGiB);
      EXPECT_EQ(w.rows_per_wave, std::min<std::int64_t>(1024, seqlen));
      EXPECT_EQ(w.pair_stride(), plan_block_waves(1, seqlen, seqlen, 2, 1024, kGiB).pair_stride());
      EXPECT_LE(w.pairs_per_wave, pairs);
      EXPECT_LE(2 * w.score_elements(), 4 * kGiB);
      const bool all = w.pairs_per_wave == pairs;
      EXPECT_TRUE(all || 2 * (w.pairs_per_wave + 1) * w.pair_stride() > 4 * kGiB);
      std::int64_t rows = 0, waves = 0;
      for (std::int64_t p = 0; p < pairs; p += w.pairs_per_wave) {
        for (std::int64_t r = 0; r < seqlen; r += w.rows_per_wave) {
          ++waves;
          rows += std::min(w.pairs_per_wave, pairs - p) * std::min(w.rows_per_wave, seqlen - r);
        }
      }
      EXPECT_EQ(rows, pairs * seqlen);
      EXPECT_EQ(waves, w.waves());
    }
  }
  // 32 heads of 32768 keys: all of them at once, a block of 1024 rows after the other.
  const ScoreWaves w = plan_block_waves(32, 32768, 32768, 2, 1024, 4 * kGiB);
  EXPECT_EQ(w.pairs_per_wave, 32);
  EXPECT_EQ(w.waves(), 32);
  EXPECT_EQ(2 * w.score_elements(), 2 * kGiB);
}

TEST(PairOrder, RunsCoverEveryPairOnceAndStayAConstantStrideApart) {
  for (const std::int64_t batch : {1, 2, 7}) {
    for (const std::int64_t group : {1, 2, 4}) {
      const std::int64_t heads = 4 * group;
      const PairOrder order = pair_order(batch, heads, group);
      std::set<std::pair<std::int64_t, std::int64_t>> seen;
      std::int64_t runs = 0;
      for (std::int64_t i = 0; i < batch * heads;) {
        const std::int64_t end = order.run_end(i, batch * heads, group);
        ASSERT_GT(end, i);
        ++runs;
        const PairOrder::Pair first = order.at(i);
        for (std::int64_t j = i; j < end; ++j) {
          const PairOrder::Pair pair = order.at(j);
          EXPECT_TRUE(seen.insert({pair.batch, pair.head}).second);
          // One step along either the batch or the heads; K and V step alike or stay.
          EXPECT_EQ(pair.batch, first.batch + (order.batch_fastest ? j - i : 0));
          EXPECT_EQ(pair.head, first.head + (order.batch_fastest ? 0 : j - i));
          EXPECT_TRUE(order.batch_fastest || group == 1 || pair.head / group == first.head / group);
        }
        i = end;
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(batch * heads));
      EXPECT_EQ(runs, std::min(heads, group == 1 ? batch : batch * heads / group));
    }
  }
}

TEST(PairOrder, ARunEndsWhereItsWaveEnds) {
  const PairOrder order{2, 8, false};
  EXPECT_EQ(order.run_end(3, 5, 1), 5);
  EXPECT_EQ(order.run_end(3, 16, 1), 8);
  EXPECT_EQ(order.run_end(3, 16, 4), 4);
}

}  // namespace
}  // namespace rafter::tiles
