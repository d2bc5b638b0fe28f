// The commands with --device cuda on a machine that has one: results against those of a CPU, and
// what a row says that a CPU's does not.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cli/arrays.h"
#include "cli/run_tool.h"

namespace rafter::test {
namespace {

class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!machine_has_cuda()) {
      GTEST_SKIP() << "no sm_90 device";
    }
  }
  std::string path(const std::string& name) const { return folder_ / name; }

 private:
  TemporaryFolder folder_;
};

// Operands are bf16 on both sides; the scores of two pipelines land in it, so a weight is off by
// 2^-8 or so, and o, a mean of values within (−1, 1), by less than 0.02.
TEST_F(Gpu, RunGivesTheResultsOfACpuByEveryPipeline) {
  const Shape q_shape = {2, 70, 4, 64}, k_shape = {2, 130, 2, 64};
  write_f32(path("q.npy"), q_shape, some_values(elements_of(q_shape), 1));
  write_f32(path("k.npy"), k_shape, some_values(elements_of(k_shape), 2));
  write_f32(path("v.npy"), k_shape, some_values(elements_of(k_shape), 3));
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command = {
        "run",     "--q",  path("q.npy"), "--k",   path("k.npy"), "--v",   path("v.npy"),
        "--dtype", "bf16", "--causal",    "--out", path("o.npy"), "--lse", path("lse.npy")};
    command.insert(command.end(), more.begin(), more.end());
    const auto document = run_json(command);
    EXPECT_GT(document.at("measured_time_s").get<double>(), 0);
    return document.at("kernel").get<std::string>();
  };
  run({"--kernel", "forward_reference"});
  const FloatArray o = read_f32(path("o.npy")), lse = read_f32(path("lse.npy"));
  for (const char* pipeline : {"unfused", "half-fused", "fused"}) {
    SCOPED_TRACE(run({"--device", "cuda", "--pipeline", pipeline}));
    const FloatArray gpu_o = read_f32(path("o.npy")), gpu_lse = read_f32(path("lse.npy"));
    EXPECT_LT(largest_difference(gpu_o, o), 0.02);
    EXPECT_LT(largest_difference(gpu_lse, lse), 0.01);
  }
}

// The same of gradients: sums of 130 keys, or of 140 rows of two heads, each weight of which is off
// by 2^-8 or so.
TEST_F(Gpu, RunGivesTheGradientsOfACpuByBothPipelines) {
  const Shape q_shape = {2, 70, 4, 64}, k_shape = {2, 130, 2, 64};
  write_f32(path("q.npy"), q_shape, some_values(elements_of(q_shape), 1));
  write_f32(path("k.npy"), k_shape, some_values(elements_of(k_shape), 2));
  write_f32(path("v.npy"), k_shape, some_values(elements_of(k_shape), 3));
  write_f32(path("do.npy"), q_shape, some_values(elements_of(q_shape), 4));
  const char* const gradients[] = {"dq.npy", "dk.npy", "dv.npy"};
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command = {
        "run",          "--q",          path("q.npy"), "--k",          path("k.npy"),
        "--v",          path("v.npy"),  "--dtype",     "bf16",         "--causal",
        "--dout",       path("do.npy"), "--dq",        path("dq.npy"), "--dk",
        path("dk.npy"), "--dv",         path("dv.npy")};
    command.insert(command.end(), more.begin(), more.end());
    run_json(command);
    std::vector<FloatArray> results;
    for (const char* name : gradients) {
      results.push_back(read_f32(path(name)));
    }
    return results;
  };
  const std::vector<FloatArray> of_cpu = run({"--kernel", "backward_reference"});
  for (const char* pipeline : {"unfused", "fused"}) {
    SCOPED_TRACE(pipeline);
    const std::vector<FloatArray> of_gpu = run({"--device", "cuda", "--pipeline", pipeline});
    for (std::size_t i = 0; i < of_cpu.size(); ++i) {
      EXPECT_LT(largest_difference(of_gpu[i], of_cpu[i]), 0.02) << gradients[i];
    }
  }
}

TEST_F(Gpu, BenchRowsSayWhatLaunchesCostAndWhatWasCounted) {
  // Q, K and V of 201 MB: no L2 holds half of them.
  const auto document =
      run_json({"bench", "attention", "--device", "cuda", "--batch", "4", "--seqlen", "4k",
                "--heads-q", "16", "--head-dim", "128", "--time", "0.005"});
  const double compulsory = 3.0 * 4 * 4096 * 16 * 128 * 2;
  ASSERT_EQ(document.at("benchmarks").size(), 3U);
  for (const auto& row : document.at("benchmarks")) {
    EXPECT_GT(row.at("time_s").get<double>(), 0);
    EXPECT_GT(row.at("time_stream_s").get<double>(), 0);
    EXPECT_GT(row.at("time_graph_s").get<double>(), 0);
    EXPECT_LT(row.at("launch_share").get<double>(), 1);
    if (row.at("counted_bytes").is_null()) {
      EXPECT_FALSE(row.at("counted_bytes_reason").get<std::string>().empty());
    } else {
      // Inputs are read at least, some of them again; what is written last may stay in the L2.
      const double counted = row.at("counted_bytes_read").get<double>();
      EXPECT_GT(counted, 0.5 * compulsory);
      EXPECT_LT(counted, 8 * row.at("bytes").get<double>());
    }
  }
}

}  // namespace
}  // namespace rafter::test
