// Predictions, ridges, ceilings, crossovers, conventions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "rafter/attention.h"
#include "rafter/model.h"

namespace rafter {
namespace {

template <typename T>
T must(Result<T> result) {
  EXPECT_TRUE(result) << result.status().message();
  return std::move(result).value();
}

Figure figure(double value, const char* unit, double low = 0, double high = 0) {
  return {.value = value,
          .unit = unit,
          .kind = low > 0 ? FigureKind::measured : FigureKind::assumed,
          .source = "a test",
          .low = low,
          .high = high,
          .samples = 0};
}

/// 1000 FLOP/s, 10 B/s, 0.5 s a launch: ridge 100.
DeviceSpec toy() {
  DeviceSpec d;
  d.name = "toy";
  d.figures["peak_bf16_flop_per_s"] = figure(1000, "FLOP/s");
  d.figures["bandwidth_bytes_per_s"] = figure(10, "B/s");
  d.figures["launch_s"] = figure(0.5, "s");
  return d;
}

Cost work(double flops, double bytes, double launches = 1) {
  Cost c;
  c.flops = c.matmul_flops = flops;
  c.bytes = bytes;
  c.launches = launches;
  return c;
}

AttentionProblem square(std::int64_t seqlen, Mask mask = Mask::none()) {
  AttentionProblem p;
  p.seqlen_q = p.seqlen_kv = seqlen;
  p.dtype = DType::bf16;
  p.mask = mask;
  return p;
}

/// A library writes scores slower than a copy does: QKᵀ alone takes longer than its bytes.
TEST(Predict, ScoresLandAtTheRateThatProductsReach) {
  DeviceSpec device = toy();
  device.figures["peak_bf16_flop_per_s"] = figure(1e12, "FLOP/s");
  const double qk_bytes = 64 * 64 * 2 + 2 * 64 * 128 * 2;  // scores, q, k
  for (const Pipeline pipeline : {Pipeline::unfused, Pipeline::half_fused, Pipeline::fused}) {
    const Cost cost = must(attention_cost(square(64), pipeline));
    const double plain = must(predict(cost, device)).time_s;
    EXPECT_EQ(plain, cost.bytes / 10);
    DeviceSpec probed = device;
    probed.figures["bandwidth_scores_bytes_per_s"] = figure(8, "B/s");
    const double more = pipeline == Pipeline::fused ? 0 : qk_bytes / 8 - qk_bytes / 10;
    EXPECT_NEAR(must(predict(cost, probed)).time_s, plain + more, 1e-9 * plain);
    ModelStep step;
    step.model = must(find_model("reference-7b"));
    step.seqlen = 64;
    step.pipeline = pipeline;
    step.causal = false;
    const double layers = 32 * 32;  // and heads
    EXPECT_NEAR(must(model_budget(step, probed)).attention_time_s,
                must(model_budget(step, device)).attention_time_s + layers * more,
                1e-9 * layers * plain);
    probed.figures["bandwidth_scores_bytes_per_s"] = figure(20, "B/s");  // the memory decides
    EXPECT_EQ(must(predict(cost, probed)).time_s, plain);
    probed.figures["peak_bf16_flop_per_s"] = figure(1, "FLOP/s");  // and so do products
    probed.figures["bandwidth_scores_bytes_per_s"] = figure(9.9, "B/s");
    EXPECT_EQ(must(predict(cost, probed)).time_s, cost.flops);
  }
}

TEST(Predict, TheLargestTermIsTheWall) {
  const Prediction compute = must(predict(work(5000, 10), toy()));
  EXPECT_EQ(compute.wall, Wall::compute);
  EXPECT_EQ(compute.time_s, 5);
  EXPECT_EQ(compute.attainable_flop_per_s, 1000);
  EXPECT_EQ(compute.verdict(), "compute-bound");

  const Prediction bandwidth = must(predict(work(100, 50), toy()));
  EXPECT_EQ(bandwidth.wall, Wall::bandwidth);
  EXPECT_EQ(bandwidth.time_s, 5);
  EXPECT_EQ(bandwidth.attainable_flop_per_s, 20);
  EXPECT_EQ(bandwidth.verdict(), "bandwidth-bound");

  const Prediction dispatch = must(predict(work(100, 1), toy()));
  EXPECT_EQ(dispatch.wall, Wall::dispatch);
  EXPECT_EQ(dispatch.time_s, 0.5);
  EXPECT_EQ(dispatch.time_sum_s, 0.1 + 0.1 + 0.5);
  EXPECT_EQ(dispatch.verdict(), "dispatch-bound");
}

TEST(Predict, AnIntensityAtTheRidgeIsComputeBoundAndTheDeadBandIsInclusive) {
  Convention c;
  EXPECT_EQ(must(predict(work(5000, 50), toy(), c)).wall, Wall::compute);
  EXPECT_FALSE(must(predict(work(5000, 50), toy(), c)).near_ridge);
  c.dead_band = 2;
  EXPECT_TRUE(must(predict(work(10000, 50), toy(), c)).near_ridge);
  EXPECT_TRUE(must(predict(work(2500, 50), toy(), c)).near_ridge);
  EXPECT_EQ(must(predict(work(2500, 50), toy(), c)).verdict(), "near-ridge");
  EXPECT_FALSE(must(predict(work(10001, 50), toy(), c)).near_ridge);
  EXPECT_FALSE(must(predict(work(2499, 50), toy(), c)).near_ridge);
}

TEST(Predict, EfficienciesScaleTimesAndNeverTheWall) {
  Convention c;
  c.compute_efficiency = 0.5;
  const Prediction p = must(predict(work(4000, 50), toy(), c));  // intensity 80 below the ridge
  EXPECT_EQ(p.time_compute_s, 8);
  EXPECT_EQ(p.time_s, 8);
  EXPECT_EQ(p.wall, Wall::bandwidth);
  EXPECT_EQ(p.largest_term, Wall::compute);
  EXPECT_EQ(p.attainable_flop_per_s, 800);
  EXPECT_EQ(p.achieved_flop_per_s, 500);
}

TEST(Predict, SumAddsDispatchToTheKernel) {
  Convention c;
  c.time_model = TimeModel::sum;
  EXPECT_EQ(must(predict(work(5000, 10, 4), toy(), c)).time_s, 5 + 2);
}

TEST(Predict, AMissingPeakOrBandwidthIsAnErrorThatNamesIt) {
  Cost c = work(1, 1);
  c.dtype = DType::e4m3;
  EXPECT_THAT(predict(c, toy()).status().message(),
              testing::HasSubstr("toy, which has no peak_e4m3_flop_per_s"));
  DeviceSpec d = toy();
  d.figures.erase("bandwidth_bytes_per_s");
  EXPECT_THAT(predict(work(1, 1), d).status().message(), testing::HasSubstr("bandwidth"));
  Convention one_peak;
  one_peak.peak_per_precision = false;
  EXPECT_EQ(must(predict(c, toy(), one_peak)).peak_flop_per_s, 1000);
}

TEST(Predict, AnUnknownLaunchCostIsNotZero) {
  DeviceSpec d = toy();
  d.figures.erase("launch_s");
  const Prediction p = must(predict(work(100, 1), d));
  EXPECT_TRUE(std::isnan(p.time_dispatch_s));
  EXPECT_THAT(p.dispatch_reason, testing::HasSubstr("launch_s"));
  EXPECT_EQ(p.time_s, 0.1);
  Convention given;
  given.launch_s = 3;
  EXPECT_EQ(must(predict(work(100, 1), d, given)).time_s, 3);
  Convention uncounted;
  uncounted.count_dispatch = false;
  EXPECT_EQ(must(predict(work(100, 1), toy(), uncounted)).time_dispatch_s, 0);
}

TEST(Predict, ARidgeInsideTheErrorBarIsAmbiguous) {
  DeviceSpec d = toy();
  d.figures["bandwidth_bytes_per_s"] = figure(10, "B/s", 8, 12.5);
  const Prediction inside = must(predict(work(10500, 100), d));  // 105 between 80 and 125
  EXPECT_TRUE(inside.ambiguous);
  EXPECT_EQ(inside.verdict(), "ambiguous");
  EXPECT_EQ(inside.ridge_low_flop_per_byte, 80);
  EXPECT_EQ(inside.ridge_high_flop_per_byte, 125);
  EXPECT_EQ(inside.time_low_s, 10.5);
  EXPECT_EQ(inside.time_high_s, 12.5);
  const Prediction outside = must(predict(work(13000, 100), d));
  EXPECT_FALSE(outside.ambiguous);
  EXPECT_EQ(outside.verdict(), "compute-bound");
}

TEST(Predict, NoWorkTakesNoTimeAndNothingDividesByZero) {
  Convention c;
  c.count_dispatch = false;
  const Prediction p = must(predict(work(0, 0), toy(), c));
  EXPECT_EQ(p.time_s, 0);
  EXPECT_EQ(p.achieved_flop_per_s, 0);
  EXPECT_EQ(p.intensity_flop_per_byte, 0);
}

TEST(Prediction, FusedAttentionHasATimeOfItsOwnWhereItsRateWasMeasured) {
  DeviceSpec d = toy();
  const Cost fused = must(attention_cost(square(4096), Pipeline::fused));
  EXPECT_EQ(must(predict(fused, d)).time_fused_s, 0);
  const double roof_s = must(predict(fused, d)).time_s;
  d.figures["attention_bf16_flop_per_s"] = figure(500, "FLOP/s");
  const Prediction p = must(predict(fused, d));
  EXPECT_EQ(p.time_fused_s, fused.flops / 500);
  Cost whole = fused;
  whole.tile_flops *= 1.25;  // blocks that a mask cuts
  EXPECT_EQ(must(predict(whole, d)).time_fused_s, fused.flops * 1.25 / 500);
  EXPECT_EQ(p.time_s, roof_s);  // no roof
  const Cost unfused = must(attention_cost(square(4096), Pipeline::unfused));
  EXPECT_EQ(must(predict(unfused, d)).time_fused_s, 0);
  const Cost backward = must(attention_cost(square(4096), Pipeline::fused, Pass::backward));
  EXPECT_EQ(must(predict(backward, d)).time_fused_s, 0);
  AttentionProblem wide = square(4096);
  wide.head_dim = wide.head_dim_v = 256;  // not measured: quicker than the rate
  EXPECT_EQ(must(predict(must(attention_cost(wide, Pipeline::fused)), d)).time_fused_s, 0);
}

TEST(Ceilings, AscendAndEachIsItsRate) {
  DeviceSpec d = toy();
  d.figures["exp_per_s"] = figure(30, "op/s");
  d.figures["peak_vector_f32_flop_per_s"] = figure(125, "FLOP/s");
  const Cost c = must(attention_cost(square(4096), Pipeline::fused));
  const Prediction p = must(predict(c, d));
  std::map<std::string, double> rate;
  for (std::size_t i = 0; i < p.ceilings.size(); ++i) {
    rate[p.ceilings[i].name] = p.ceilings[i].flop_per_s;
    EXPECT_FALSE(p.ceilings[i].advice.empty());
    if (i > 0) {
      EXPECT_LE(p.ceilings[i - 1].flop_per_s, p.ceilings[i].flop_per_s);
    }
  }
  const double s2 = 4096.0 * 4096;
  EXPECT_EQ(rate.at("compute peak"), 1000);
  EXPECT_EQ(rate.at("no tensor cores"), 125);
  EXPECT_DOUBLE_EQ(rate.at("bandwidth roof"), c.flops / c.bytes * 10);
  EXPECT_DOUBLE_EQ(rate.at("exp unit"), c.flops / (s2 / 30));
  EXPECT_DOUBLE_EQ(rate.at("no tiling"), c.flops / (512 * s2 * 2) * 10);
  EXPECT_DOUBLE_EQ(rate.at("no fusion"),
                   c.flops / must(attention_cost(square(4096), Pipeline::unfused)).bytes * 10);
  EXPECT_DOUBLE_EQ(rate.at("launch"), c.flops / 0.5);
}

TEST(Ceilings, OfTheUnfusedPipelineDoNotNameWhatItAlreadyLacks) {
  const Prediction p = must(predict(must(attention_cost(square(512), Pipeline::unfused)), toy()));
  for (const Ceiling& ceiling : p.ceilings) {
    EXPECT_NE(ceiling.name, "no fusion");
    EXPECT_NE(ceiling.name, "exp unit");  // the device has no such figure
  }
}

struct CrossoverCase {
  const char* name;
  Mask mask;
  Pipeline pipeline;
  Pass pass;
  Convention convention;
};

/// The smallest whole length at the ridge, by trying each.
std::int64_t first_at_ridge(const CrossoverCase& c, const DeviceSpec& d, std::int64_t limit) {
  const double ridge_point = must(ridge(d, DType::bf16, c.convention)).flop_per_byte;
  for (std::int64_t s = 1; s <= limit; ++s) {
    if (must(attention_cost(square(s, c.mask), c.pipeline, c.pass, c.convention)).intensity() >=
        ridge_point) {
      return s;
    }
  }
  return -1;
}

TEST(Crossover, IsWhereAScanOfTheLengthsFindsIt) {
  DeviceSpec d = toy();
  Convention tiled;
  tiled.traffic_model = TrafficModel::tiled;
  tiled.fast_memory_bytes = 1 << 20;
  const CrossoverCase cases[] = {
      {"full", Mask::none(), Pipeline::fused, Pass::forward, {}},
      {"causal", Mask::causal(), Pipeline::fused, Pass::forward, {}},
      {"causal half", Mask::causal(), Pipeline::fused, Pass::forward, Convention::solution()},
      {"window", Mask::window(400, 3), Pipeline::fused, Pass::forward, {}},
      {"window right", Mask::window(-1, 20), Pipeline::fused, Pass::forward, {}},
      {"window left", Mask::window(150, -1), Pipeline::fused, Pass::forward, {}},
      {"tiled", Mask::none(), Pipeline::fused, Pass::forward, tiled},
      {"backward", Mask::causal(), Pipeline::fused, Pass::backward, {}},
      {"lecture", Mask::none(), Pipeline::fused, Pass::forward, Convention::lecture()},
  };
  for (const CrossoverCase& c : cases) {
    SCOPED_TRACE(c.name);
    const Crossover x = must(crossover(square(1, c.mask), c.pipeline, d, c.convention, c.pass));
    ASSERT_TRUE(x.reachable);
    EXPECT_EQ(*x.seqlen_ceil, first_at_ridge(c, d, 2000));
    EXPECT_LE(*x.seqlen, static_cast<double>(*x.seqlen_ceil));
    EXPECT_GT(*x.seqlen, static_cast<double>(*x.seqlen_ceil - 1));
  }
}

TEST(Crossover, FollowsBlocksOfScoresThatLandWhole) {
  DeviceSpec d = toy();
  d.figures["peak_bf16_flop_per_s"] = figure(600, "FLOP/s");
  std::vector<std::int64_t> found;
  for (const char* rows : {"0", "256", "512"}) {
    CrossoverCase c{rows, Mask::causal(), Pipeline::half_fused, Pass::forward, {}};
    ASSERT_TRUE(c.convention.set("score_block_rows", rows));
    const Crossover x = must(crossover(square(1, c.mask), c.pipeline, d, c.convention));
    ASSERT_TRUE(x.reachable) << rows;
    EXPECT_EQ(x.closed_form, found.empty()) << rows;
    EXPECT_EQ(*x.seqlen_ceil, first_at_ridge(c, d, 4000)) << rows;
    found.push_back(*x.seqlen_ceil);
  }
  EXPECT_NE(found[0], found[1]);
  EXPECT_NE(found[1], found[2]);
}

TEST(Crossover, NeverComesWhereTheLimitLiesBelowTheRidge) {
  const DeviceSpec h100 = *find_device("h100-sxm");
  const Crossover unfused = must(crossover(square(1), Pipeline::unfused, h100));
  EXPECT_FALSE(unfused.reachable);
  EXPECT_FALSE(unfused.seqlen || unfused.seqlen_ceil || unfused.seqlen_rounded);
  EXPECT_LT(*unfused.root, 0);
  EXPECT_DOUBLE_EQ(*unfused.intensity_limit_flop_per_byte, 517.0 / 8);
  EXPECT_GT(*unfused.shortfall, 1);
  // A narrow window bounds the intensity of fused attention too.
  const Crossover window = must(crossover(square(1, Mask::window(63, 0)), Pipeline::fused, h100));
  EXPECT_FALSE(window.reachable);
  EXPECT_NEAR(*window.intensity_limit_flop_per_byte, 64 * 517 / (4.0 * 128 * 2 + 4), 1e-6);
  const Crossover fused = must(crossover(square(1), Pipeline::fused, h100));
  EXPECT_FALSE(fused.intensity_limit_flop_per_byte.has_value());
}

TEST(Crossover, RoundsAsTheConventionSays) {
  const DeviceSpec h100 = *find_device("h100-sxm"), a100 = *find_device("a100-80gb-sxm");
  const Convention lecture = Convention::lecture();
  EXPECT_EQ(*must(crossover(square(1), Pipeline::fused, h100, lecture)).seqlen_rounded, 590);
  EXPECT_EQ(*must(crossover(square(1), Pipeline::fused, a100, lecture)).seqlen_rounded, 306);
  EXPECT_EQ(must(ridge(h100, DType::bf16, lecture)).rounded_flop_per_byte, 295);
  Convention ceil = Convention::solution();
  ceil.crossover_rounding = CrossoverRounding::ceil;
  EXPECT_EQ(
      *must(crossover(square(1), Pipeline::fused, *find_device("device-r"), ceil)).seqlen_rounded,
      595);
}

TEST(FusionGain, ByTimesIsTheRatioOfTheTwoPredictions) {
  const DeviceSpec h100 = *find_device("h100-sxm");
  const FusionGain g = must(fusion_gain(square(8192), Pipeline::fused, h100));
  EXPECT_DOUBLE_EQ(g.by_times, g.unfused.time_s / g.pipeline.time_s);
  EXPECT_GT(g.by_times, 4);
  EXPECT_EQ(fusion_gain(square(0), Pipeline::fused, h100).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(Tiling, FollowsItsFormulas) {
  const Tiling t = must(tiling(4096, 64, DType::bf16, 100'000));
  EXPECT_EQ(t.fast_memory_elements, 50'000);
  EXPECT_DOUBLE_EQ(t.tile_rows, 50'000 / 64.0);
  EXPECT_DOUBLE_EQ(t.kv_passes, 4096 / t.tile_rows);
  EXPECT_DOUBLE_EQ(t.io_elements, 4096.0 * 4096 * 64 * 64 / 50'000);
  EXPECT_DOUBLE_EQ(t.io_bytes, 2 * t.io_elements);
  Convention bytes;
  bytes.fast_memory_unit = MemoryUnit::bytes;
  EXPECT_EQ(must(tiling(4096, 64, DType::bf16, 100'000, bytes)).fast_memory_elements, 100'000);
  EXPECT_EQ(tiling(0, 64, DType::bf16, 1e5).status().parameter(), "seqlen");
  EXPECT_EQ(must(tiling(4096, 64, DType::bf16, 128)).tile_rows, 1);
  EXPECT_EQ(tiling(4096, 64, DType::bf16, 127).status().parameter(), "fast_memory_bytes");
  EXPECT_EQ(tiling(1, 64, DType::bf16, std::nan("")).status().parameter(), "fast_memory_bytes");
}

TEST(RecomputeChoice, DependsOnTheMachineAndNotOnTheLength) {
  const DeviceSpec h100 = *find_device("h100-sxm");
  double ratio = 0;
  for (const std::int64_t s : {1, 100, 4096, 100'000}) {
    const RecomputeChoice c = must(recompute_choice(square(s, Mask::causal()), h100));
    EXPECT_DOUBLE_EQ(c.store_over_recompute, c.store_time_s / c.recompute_time_s);
    EXPECT_DOUBLE_EQ(c.recompute_flops / c.store_bytes, c.break_even_ridge_flop_per_byte);
    EXPECT_STREQ(c.cheaper(), "recompute");
    if (ratio > 0) {
      EXPECT_DOUBLE_EQ(c.store_over_recompute, ratio);
    }
    ratio = c.store_over_recompute;
  }
}

TEST(SimpleCosts, GemmAndElementwiseAreTheirListings) {
  const Cost g = must(gemm_cost(
      {.m = 3, .n = 5, .k = 7, .batch = 2, .dtype = DType::bf16, .weight_dtype = DType::int4}));
  EXPECT_EQ(g.flops, 2 * 2 * 3 * 5 * 7);
  EXPECT_EQ(g.bytes, 2 * (3 * 7 * 2 + 5 * 7 * 0.5 + 3 * 5 * 2));
  EXPECT_EQ(gemm_cost({.m = -1}).status().parameter(), "m");
  const Cost add = must(elementwise_cost(ElementwiseProblem::residual_add(1000, DType::f32)));
  EXPECT_EQ(add.flops, 1000);
  EXPECT_EQ(add.bytes, 1000 * 3 * 4);
  EXPECT_EQ(elementwise_cost({.elements = std::nan("")}).status().parameter(), "elements");
}

TEST(Conventions, ReadBackEveryParameterTheyPrint) {
  for (const char* name : {"exact", "lecture", "solution"}) {
    const Convention profile = must(find_convention(name));
    EXPECT_TRUE(profile.validate());
    Convention copy;
    const std::vector<std::string> values = profile.values();
    ASSERT_EQ(values.size(), convention_parameters().size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const Status set = copy.set(convention_parameters()[i].name, values[i]);
      EXPECT_TRUE(set) << set.message();
    }
    EXPECT_EQ(copy.values(), values);
  }
  EXPECT_THAT(find_convention("roof").status().message(), testing::HasSubstr("lecture"));
}

TEST(Conventions, NameWhatWasChanged) {
  Convention c = Convention::lecture();
  ASSERT_TRUE(c.set("softmax-flops-per-element", "1"));
  EXPECT_EQ(c.softmax_flops_per_element, 1);
  EXPECT_EQ(c.name, "lecture, softmax_flops_per_element=1");
  EXPECT_EQ(must(attention_cost(square(8), Pipeline::fused, Pass::forward, c)).convention, c.name);
}

TEST(Conventions, RefuseWhatMeansNothing) {
  Convention c;
  for (const auto& [name, value] :
       std::vector<std::pair<const char*, const char*>>{{"compute_efficiency", "0"},
                                                        {"compute_efficiency", "1.5"},
                                                        {"compute_efficiency", "nan"},
                                                        {"bandwidth_efficiency", "-1"},
                                                        {"dead_band", "0.5"},
                                                        {"dead_band", "inf"},
                                                        {"softmax_flops_per_element", "-1"},
                                                        {"softmax_flops_per_element", "5x"},
                                                        {"score_passes", ""},
                                                        {"count_lse", "maybe"},
                                                        {"traffic_model", "wet"},
                                                        {"n_params", "0"},
                                                        {"score_dtype", "i32"}}) {
    const Status s = c.set(name, value);
    EXPECT_FALSE(s) << name << " = " << value;
    EXPECT_EQ(s.parameter(), name);
  }
  EXPECT_EQ(c.name, "exact");
  EXPECT_FALSE(c.set("colour", "green"));
  c.compute_efficiency = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(c.validate().parameter(), "compute_efficiency");
  EXPECT_EQ(attention_cost(square(1), Pipeline::fused, Pass::forward, c).status().parameter(),
            "compute_efficiency");
}

TEST(OnlineSoftmax, AnySplitGivesTheDirectResult) {
  std::mt19937 random(11);
  std::normal_distribution<double> normal(0, 3);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<std::vector<double>> scores, values;
    double most = -HUGE_VAL;
    for (int block = 0; block < 5; ++block) {
      scores.emplace_back();
      values.emplace_back();
      const int size = std::uniform_int_distribution<int>(0, 4)(random);
      for (int j = 0; j < size; ++j) {
        scores.back().push_back(j == 3 ? -HUGE_VAL : normal(random));
        values.back().push_back(normal(random));
        most = std::max(most, scores.back().back());
      }
    }
    double l = 0, sum = 0;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      for (std::size_t j = 0; j < scores[i].size(); ++j) {
        const double p = std::isinf(most) ? 0 : std::exp(scores[i][j] - most);
        l += p;
        sum += p * values[i][j];
      }
    }
    const SoftmaxTrace t = must(online_softmax(scores, values));
    ASSERT_EQ(t.steps.size(), scores.size());
    if (l == 0) {
      EXPECT_EQ(t.lse, -HUGE_VAL);
      EXPECT_EQ(*t.output, 0);
    } else {
      EXPECT_NEAR(t.lse, most + std::log(l), 1e-12 * std::max(1.0, std::abs(t.lse)));
      EXPECT_NEAR(*t.output, sum / l, 1e-12 * std::max(1.0, std::abs(sum / l)));
    }
  }
}

TEST(OnlineSoftmax, EmptyStatesChangeNoBitAndFarOnesStayFinite) {
  const SoftmaxState x = {.m = 1.25, .l = 3.5, .output = -0.75}, empty;
  for (const SoftmaxState& s : {merge_states(x, empty), merge_states(empty, x)}) {
    EXPECT_EQ(s.m, x.m);
    EXPECT_EQ(s.l, x.l);
    EXPECT_EQ(s.output, x.output);
  }
  EXPECT_EQ(merge_states(empty, empty).lse(), -HUGE_VAL);
  const SoftmaxState far = merge_states({.m = 2000, .l = 1, .output = 1}, {-2000, 1, 5});
  EXPECT_EQ(far.output, 1);
  EXPECT_EQ(far.lse(), 2000);
}

TEST(OnlineSoftmax, RefusesWhatIsNotAScore) {
  EXPECT_EQ(online_softmax({{std::nan("")}}).status().parameter(), "scores");
  EXPECT_EQ(online_softmax({{HUGE_VAL}}).status().parameter(), "scores");
  EXPECT_EQ(online_softmax({{1}, {2}}, {{1}}).status().parameter(), "values");
  EXPECT_EQ(online_softmax({{1, 2}}, {{1}}).status().parameter(), "values");
  const std::vector<double> row = {1, 2, 3, 4, 5};
  EXPECT_EQ(must(split_blocks(row, 2)).size(), 3U);
  EXPECT_EQ(must(split_blocks(row, 2)).back(), std::vector<double>{5});
  EXPECT_EQ(split_blocks(row, 0).status().parameter(), "block");
}

}  // namespace
}  // namespace rafter
