// What the choice of a kernel counts of it.
#include <gtest/gtest.h>

#include "dispatch/predict.h"

namespace rafter::dispatch {
namespace {

Reach all_of_it(const KernelProblem&, const DeviceSpec&) { return {}; }
std::int64_t blocks_of_1024(const KernelProblem&) { return 1024; }

TEST(KernelPredictor, CountsTheBlocksThatAKernelTakesWhole) {
  const DeviceSpec h200 = *find_device("h200");
  KernelProblem problem;
  problem.attention = {.heads_q = 8,
                       .heads_kv = 8,
                       .seqlen_q = 4096,
                       .seqlen_kv = 4096,
                       .head_dim_v = 128,
                       .dtype = DType::bf16,
                       .mask = Mask::causal()};
  KernelEntry visible{.name = "visible",
                      .device = Device::Kind::cuda,
                      .pipeline = Pipeline::unfused,
                      .instruction_set = "",
                      .dtypes = {},
                      .accepts_text = "",
                      .machine_has = nullptr,
                      .accepts = nullptr,
                      .reach = all_of_it,
                      .workspace = nullptr};
  KernelEntry blocks = visible;
  blocks.score_block_rows = blocks_of_1024;
  Predictor predictor(problem, h200, Pass::forward);
  const double seconds = predictor.seconds(blocks);
  Convention convention;
  convention.score_block_rows = 1024;
  const Result<Cost> cost =
      attention_cost(problem.attention, Pipeline::unfused, Pass::forward, convention);
  ASSERT_TRUE(cost);
  EXPECT_EQ(seconds, cost->bytes / h200.find("bandwidth_bytes_per_s")->value);
  EXPECT_LT(predictor.seconds(visible), seconds);  // of the same pipeline, and not its neighbour's
}

}  // namespace
}  // namespace rafter::dispatch
