#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "rafter/measure.h"

namespace rafter {
namespace {

Work sleep_for_us(int us, int* calls = nullptr) {
  return [us, calls] {
    if (calls != nullptr) {
      ++*calls;
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(us);
    while (std::chrono::steady_clock::now() < end) {
    }
    return Status::ok();
  };
}

StopRule short_rule() {
  StopRule rule;
  rule.min_time_s = 0.01;
  rule.max_time_s = 0.5;
  return rule;
}

TEST(Timer, NeverReportsLessThanTheWorkTook) {
  const Result<Timing> timing = time_calls(sleep_for_us(300), short_rule());
  ASSERT_TRUE(timing.is_ok());
  EXPECT_GE(timing->seconds.min, 300e-6);
  EXPECT_GE(timing->seconds.n, 10);
  EXPECT_EQ(timing->calls_per_sample, 1);
}

TEST(Timer, RepeatsShortWorkWithinASample) {
  StopRule rule = short_rule();
  rule.min_sample_s = 1e-3;
  const Result<Timing> timing = time_calls(sleep_for_us(10), rule);
  ASSERT_TRUE(timing.is_ok());
  EXPECT_GE(timing->calls_per_sample, 5);
  EXPECT_GE(timing->seconds.min, 10e-6);
}

TEST(Timer, ColdSamplesAreSingleCalls) {
  StopRule rule = short_rule();
  rule.flush_bytes = 1 << 20;
  const Result<Timing> timing = time_calls(sleep_for_us(1), rule);
  ASSERT_TRUE(timing.is_ok());
  EXPECT_EQ(timing->calls_per_sample, 1);
}

TEST(Timer, StopsWhenTimeIsUpHoweverFewSamples) {
  StopRule rule;
  rule.min_samples = 1000;
  rule.max_time_s = 0.02;
  const Result<Timing> timing = time_calls(sleep_for_us(5000), rule);
  ASSERT_TRUE(timing.is_ok());
  EXPECT_EQ(timing->stop, Stop::time_up);
  EXPECT_LE(timing->seconds.n, 5);
}

TEST(Timer, GivesCandidatesTheSameNumberOfSamples) {
  int first = 0, second = 0;
  const Work candidates[] = {sleep_for_us(200, &first), sleep_for_us(400, &second)};
  const Result<std::vector<Timing>> timings = time_alternating(candidates, short_rule());
  ASSERT_TRUE(timings.is_ok());
  ASSERT_EQ(timings->size(), 2U);
  EXPECT_EQ((*timings)[0].seconds.n, (*timings)[1].seconds.n);
  EXPECT_LT((*timings)[0].seconds.min, (*timings)[1].seconds.min);
  EXPECT_GT(first, 10);
  EXPECT_GT(second, 10);
}

TEST(Timer, PassesOnWhatTheWorkReports) {
  const Result<Timing> timing =
      time_calls([] { return Status::device_error("kernel", "it failed"); }, short_rule());
  ASSERT_FALSE(timing.is_ok());
  EXPECT_EQ(timing.status().code(), StatusCode::kDeviceError);
}

TEST(Gemm, RefusesImpossibleSizesAndUnknownDtypes) {
  EXPECT_EQ(time_gemm(0, 1, 1, DType::f32, 1).status().parameter(), "m");
  EXPECT_EQ(time_gemm(1, 0, 1, DType::f32, 1).status().parameter(), "n");
  EXPECT_EQ(time_gemm(1, 1, -1, DType::f32, 1).status().parameter(), "k");
  EXPECT_EQ(time_gemm(1, 1, 1, DType::f32, -1).status().parameter(), "threads");
  EXPECT_EQ(time_gemm(1, 1, 1, DType::int4, 1).status().code(), StatusCode::kUnsupported);
}

TEST(Probe, QuickProbeHasEveryCeilingTheRooflineRestsOnAndSurvivesItsOwnFile) {
  ProbeOptions options;
  options.quick = true;
  const Result<Probe> probe = probe_cpu(options);
  ASSERT_TRUE(probe.is_ok()) << probe.status().message();
  for (const char* key : {"peak_f32_flop_per_s", "peak_vector_f32_flop_per_s", "exp_per_s",
                          "bandwidth_bytes_per_s", "launch_s", "sm_count"}) {
    ASSERT_NE(probe->spec.find(key), nullptr) << key;
    const Figure& figure = *probe->spec.find(key);
    EXPECT_GT(figure.value, 0) << key;
    EXPECT_FALSE(figure.source.empty()) << key;
    if (figure.samples > 0) {
      EXPECT_LE(figure.low, figure.value) << key;
      EXPECT_GE(figure.high, figure.value) << key;
    }
  }
  const std::string json = to_json(probe->spec);
  const Result<DeviceSpec> again = parse_device(json);
  ASSERT_TRUE(again.is_ok()) << again.status().message();
  EXPECT_EQ(to_json(*again), json);
  EXPECT_EQ(again->find("launch_s")->samples, probe->spec.find("launch_s")->samples);
}

TEST(Timing, TakesTheSecondsThatTheWorkItselfSays) {
  std::int64_t asked = 0;
  const TimedWork work[] = {
      [&](std::int64_t calls) -> Result<double> {
        asked = calls;
        return 1e-6 * static_cast<double>(calls);
      },
      [](std::int64_t calls) -> Result<double> { return 3e-3 * static_cast<double>(calls); }};
  const StopRule rule{.min_samples = 5, .min_time_s = 0.01, .max_time_s = 1};
  const auto timings = time_alternating(std::span<const TimedWork>(work), rule);
  ASSERT_TRUE(timings.is_ok()) << timings.status().message();
  EXPECT_NEAR((*timings)[0].seconds.median, 1e-6, 1e-12);
  EXPECT_GE((*timings)[0].calls_per_sample, 100);  // until a sample lasts min_sample_s
  EXPECT_EQ((*timings)[0].calls_per_sample, asked);
  EXPECT_NEAR((*timings)[1].seconds.median, 3e-3, 1e-9);
  EXPECT_EQ((*timings)[1].calls_per_sample, 1);
}

TEST(Timing, EndsWithTheErrorOfTimedWork) {
  const TimedWork work = [](std::int64_t) -> Result<double> {
    return Status::device_error("work", "lost");
  };
  EXPECT_EQ(time_alternating(std::span<const TimedWork>(&work, 1)).status().parameter(), "work");
}

TEST(Probe, RefusesANegativeNumberOfThreads) {
  ProbeOptions options;
  options.threads = -1;
  EXPECT_EQ(probe_cpu(options).status().parameter(), "threads");
}

TEST(Probe, ASpreadOverTheLimitIsNoisyAndAWiderOneDistrusted) {
  DeviceSpec spec;
  const auto figure = [](double low, double high) {
    Figure f;
    f.kind = FigureKind::measured;
    f.value = high;
    f.low = low;
    f.high = high;
    f.samples = 10;
    return f;
  };
  spec.figures["bandwidth_bytes_per_s"] = figure(9, 10);
  spec.figures["peak_f32_flop_per_s"] = figure(9, 10);
  EXPECT_TRUE(noisy_figures(spec).empty());
  EXPECT_EQ(distrust_of(spec), "");
  spec.figures["peak_f32_flop_per_s"] = figure(7, 10);
  EXPECT_EQ(noisy_figures(spec), std::vector<std::string>{"peak_f32_flop_per_s"});
  EXPECT_EQ(distrust_of(spec), "");
  spec.figures["peak_f32_flop_per_s"] = figure(4, 10);
  EXPECT_NE(distrust_of(spec).find("peak_f32_flop_per_s"), std::string::npos);
  spec.figures.erase("peak_f32_flop_per_s");
  EXPECT_NE(distrust_of(spec).find("missing"), std::string::npos);
}

}  // namespace
}  // namespace rafter
