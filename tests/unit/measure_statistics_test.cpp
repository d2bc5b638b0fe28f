#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "rafter/measure.h"

namespace rafter {
namespace {

TEST(Statistics, QuantilesOfOneToElevenAreTheNumbersThemselves) {
  std::vector<double> samples;
  for (int i = 11; i >= 1; --i) {
    samples.push_back(i);
  }
  const Result<Statistics> s = statistics(samples);
  ASSERT_TRUE(s.is_ok());
  EXPECT_EQ(s->n, 11);
  EXPECT_DOUBLE_EQ(s->median, 6);
  EXPECT_DOUBLE_EQ(s->p10, 2);
  EXPECT_DOUBLE_EQ(s->p90, 10);
  EXPECT_DOUBLE_EQ(s->q1, 3.5);
  EXPECT_DOUBLE_EQ(s->q3, 8.5);
  EXPECT_DOUBLE_EQ(s->min, 1);
  EXPECT_DOUBLE_EQ(s->max, 11);
  // Binomial(11, 1/2): P(X <= 1) = 12/2048 = 0.6%, P(X <= 2) = 67/2048 = 3.3%: ranks 2 and 10.
  EXPECT_DOUBLE_EQ(s->median_low, 2);
  EXPECT_DOUBLE_EQ(s->median_high, 10);
}

TEST(Statistics, OneSampleIsAllItsQuantiles) {
  const double sample = 0.25;
  const Result<Statistics> s = statistics({&sample, 1});
  ASSERT_TRUE(s.is_ok());
  for (double value : {s->median, s->p10, s->p90, s->q1, s->q3, s->median_low, s->median_high}) {
    EXPECT_EQ(value, 0.25);
  }
  EXPECT_EQ(s->relative_deviation, 0);
}

TEST(Statistics, TheIntervalHoldsTheTrueMedianNineteenTimesInTwenty) {
  std::mt19937 generator(7);
  std::lognormal_distribution<double> skewed(0, 1);  // median 1
  for (std::size_t n : {10U, 37U, 600U}) {
    int held = 0;
    constexpr int kTrials = 2000;
    for (int trial = 0; trial < kTrials; ++trial) {
      std::vector<double> samples(n);
      std::generate(samples.begin(), samples.end(), [&] { return skewed(generator); });
      const Result<Statistics> s = statistics(samples);
      held += s->median_low <= 1 && 1 <= s->median_high ? 1 : 0;
    }
    EXPECT_GE(held, kTrials * 94 / 100) << n;
    EXPECT_LE(held, kTrials * 99 / 100) << n;  // and is no wider than it must be
  }
}

TEST(Statistics, PairedDifferencesLeaveOutWhatMeetsBothOfAPair) {
  std::mt19937 generator(3);
  std::uniform_real_distribution<double> drift(1, 2), noise(-0.01, 0.01);
  std::vector<double> slow, fast;
  for (int i = 0; i < 101; ++i) {
    fast.push_back(drift(generator));
    slow.push_back(fast.back() + 0.1 + noise(generator));
  }
  const Result<Statistics> saved = paired_differences(slow, fast),
                           lost = paired_differences(fast, slow);
  ASSERT_TRUE(saved.is_ok() && lost.is_ok());
  EXPECT_NEAR(saved->median, 0.1, 0.01);
  EXPECT_LT(saved->median_high - saved->median_low, 0.01);
  EXPECT_EQ(lost->median, -saved->median);
  fast.pop_back();
  EXPECT_FALSE(paired_differences(slow, fast));
  EXPECT_FALSE(paired_differences({}, {}));
  slow = {1, std::numeric_limits<double>::quiet_NaN()};
  EXPECT_FALSE(paired_differences(slow, slow));
}

TEST(Statistics, ANegativeOrNonFiniteSampleOrNoneIsAnError) {
  for (double bad :
       {-1e-9, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const std::vector<double> samples = {1, 2, bad};
    const Result<Statistics> s = statistics(samples);
    ASSERT_FALSE(s.is_ok()) << bad;
    EXPECT_NE(s.status().message().find("sample 2"), std::string::npos) << s.status().message();
  }
  EXPECT_FALSE(statistics({}).is_ok());
}

Statistics around(double median, double half_width) {
  Statistics s;
  s.n = 20;
  s.median = median;
  s.median_low = median - half_width;
  s.median_high = median + half_width;
  return s;
}

TEST(Wall, TwiceTheWorkInTheSameTimeIsDispatch) {
  const WallVerdict v = judge_wall({around(1, 0.02), around(1.1, 0.02), {}, 0, 0});
  EXPECT_EQ(v.wall, MeasuredWall::dispatch);
  EXPECT_NEAR(v.elasticity, std::log2(1.1), 1e-12);
}

TEST(Wall, AGraphThatSavesLittleSaysThatLaunchesAreNotTheReason) {
  WallEvidence evidence;
  evidence.seconds = around(1, 0.02);
  evidence.seconds_double = around(1.1, 0.02);
  EXPECT_FALSE(judge_wall(evidence).has_launch_share);
  evidence.seconds_stream = around(4, 0.1);
  evidence.seconds_graph = around(1, 0.1);
  const WallVerdict launches = judge_wall(evidence);
  EXPECT_TRUE(launches.has_launch_share);
  EXPECT_DOUBLE_EQ(launches.launch_share, 0.75);
  EXPECT_EQ(launches.reason.find("latency"), std::string::npos);
  evidence.seconds_graph = around(3.9, 0.1);
  const WallVerdict latency = judge_wall(evidence);
  EXPECT_EQ(latency.wall, MeasuredWall::dispatch);
  EXPECT_NE(latency.reason.find("latency"), std::string::npos) << latency.reason;
}

TEST(Wall, TwiceTheWorkInLessThanTwiceTheTimeIsMixed) {
  EXPECT_EQ(judge_wall({around(1, 0.01), around(1.5, 0.01), {}, 0, 0}).wall, MeasuredWall::mixed);
}

TEST(Wall, FlopsAtConstantBytesTellComputeFromBandwidth) {
  const Statistics once = around(1, 0.01), twice = around(2, 0.02);
  EXPECT_EQ(judge_wall({once, twice, around(1.95, 0.02), 2, 1}).wall, MeasuredWall::compute);
  EXPECT_EQ(judge_wall({once, twice, around(1.05, 0.02), 2, 1}).wall, MeasuredWall::bandwidth);
  EXPECT_EQ(judge_wall({once, twice, around(1.4, 0.02), 2, 1}).wall, MeasuredWall::mixed);
  // With the bytes not constant, or the run missing, nothing can be told.
  EXPECT_EQ(judge_wall({once, twice, around(1.95, 0.02), 2, 1.6}).wall, MeasuredWall::ambiguous);
  EXPECT_EQ(judge_wall({once, twice, {}, 0, 0}).wall, MeasuredWall::ambiguous);
  EXPECT_EQ(judge_wall({once, {}, {}, 0, 0}).wall, MeasuredWall::ambiguous);
}

TEST(Wall, FlopsAndBytesThatChangeByFarFactorsTellThemToo) {
  const Statistics once = around(1, 0.001), twice = around(2, 0.002);
  // A quarter of the FLOPs at 0.57 of the bytes, as a product of a quarter of the rows.
  EXPECT_EQ(judge_wall({once, twice, around(0.25, 0.001), 0.25, 0.57}).wall, MeasuredWall::compute);
  EXPECT_EQ(judge_wall({once, twice, around(0.57, 0.001), 0.25, 0.57}).wall,
            MeasuredWall::bandwidth);
  // Twice the bytes at the same FLOPs.
  EXPECT_EQ(judge_wall({once, twice, around(2, 0.002), 1, 2}).wall, MeasuredWall::bandwidth);
  EXPECT_EQ(judge_wall({once, twice, around(1, 0.001), 1, 2}).wall, MeasuredWall::compute);
}

TEST(Wall, ThroughputNearOneRoofStandsAtIt) {
  WallEvidence evidence;
  evidence.seconds = around(1, 0.001);
  evidence.seconds_double = around(1.88, 0.002);
  evidence.double_ratio = 1.9;  // of 1.9 times the work
  evidence.share_of_bandwidth = 0.9;
  evidence.share_of_peak = 0.01;
  EXPECT_EQ(judge_wall(evidence).wall, MeasuredWall::bandwidth);
  std::swap(evidence.share_of_bandwidth, evidence.share_of_peak);
  EXPECT_EQ(judge_wall(evidence).wall, MeasuredWall::compute);
  evidence.share_of_peak = 0.5;
  EXPECT_EQ(judge_wall(evidence).wall, MeasuredWall::ambiguous);
  EXPECT_NE(judge_wall(evidence).reason.find("below both roofs"), std::string::npos);
  evidence.share_of_bandwidth = evidence.share_of_peak = 0.9;
  EXPECT_EQ(judge_wall(evidence).wall, MeasuredWall::ambiguous);
}

TEST(Wall, AnIntervalAcrossALimitIsAmbiguous) {
  EXPECT_EQ(judge_wall({around(1, 0.15), around(1.2, 0.2), {}, 0, 0}).wall,
            MeasuredWall::ambiguous);
  EXPECT_EQ(judge_wall({around(1, 0.01), around(2, 0.02), around(1.6, 0.3), 2, 1}).wall,
            MeasuredWall::ambiguous);
}

TEST(Compare, NeedsBothARatioPastTheThresholdAndIntervalsApart) {
  const MedianInterval base{1, 0.99, 1.01};
  EXPECT_EQ(compare(base, {1.02, 1.01, 1.03}, 0.95), Comparison::same);
  EXPECT_EQ(compare(base, {1.10, 1.09, 1.11}, 0.95), Comparison::slower);
  EXPECT_EQ(compare(base, {1.10, 1.00, 1.20}, 0.95), Comparison::ambiguous);
  EXPECT_EQ(compare(base, {0.90, 0.89, 0.91}, 0.95), Comparison::faster);
  EXPECT_EQ(compare(base, {0.90, 0.80, 1.00}, 0.95), Comparison::ambiguous);
}

TEST(Plateaus, AreFoundBetweenSlopesAndGlitches) {
  //                                   level 1           slope   level 2            glitch
  const std::vector<double> rates = {400, 390, 410, 405, 300, 200, 195, 205,  198,
                                     90,  202, 199, 201, 60,  30,  20,  20.5, 19.8};
  const std::vector<Plateau> p = find_plateaus(rates);
  ASSERT_EQ(p.size(), 3U);
  EXPECT_EQ(p[0].first, 0U);
  EXPECT_EQ(p[0].last, 3U);
  EXPECT_NEAR(p[0].rate, 402.5, 1e-9);
  EXPECT_EQ(p[1].first, 5U);
  EXPECT_EQ(p[1].last, 12U);
  EXPECT_EQ(p[2].first, 15U);
  EXPECT_EQ(p[2].last, 17U);
}

TEST(Plateaus, ASteadySlopeHasNone) {
  std::vector<double> rates;
  for (int i = 0; i < 12; ++i) {
    rates.push_back(1000 * std::pow(0.7, i));
  }
  EXPECT_TRUE(find_plateaus(rates).empty());
  EXPECT_TRUE(find_plateaus({}).empty());
}

TEST(Plateaus, TwoOfTheLargestSizesAreEnough) {
  const std::vector<double> rates = {400, 395, 405, 200, 100, 50, 51};
  const std::vector<Plateau> p = find_plateaus(rates);
  ASSERT_EQ(p.size(), 2U);
  EXPECT_EQ(p[1].first, 5U);
}

}  // namespace
}  // namespace rafter
