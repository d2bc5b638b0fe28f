// plan(): what it fills in, what it refuses and with which words, what it chooses, how long it
// takes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "rafter/attention.h"
#include "rafter/kernels.h"

namespace rafter {
namespace {

using ::testing::HasSubstr;

AttentionProblem small() { return {.heads_q = 4, .seqlen_q = 8, .seqlen_kv = 8, .head_dim = 16}; }

Result<Plan> plan_cpu(const AttentionProblem& problem, const PlanOptions& options = {}) {
  return plan(problem, Device::cpu(), options);
}

TEST(Plan, FillsInDefaults) {
  const Result<Plan> planned = plan_cpu(small());
  ASSERT_TRUE(planned) << planned.status().message();
  const AttentionProblem& p = planned->problem();
  EXPECT_EQ(p.heads_kv, 4);
  EXPECT_EQ(p.head_dim_v, 16);
  EXPECT_FLOAT_EQ(*p.softmax_scale, 0.25F);
  EXPECT_GE(planned->threads(), 1);
  EXPECT_GT(planned->cost().flops, 0);
  EXPECT_GT(planned->prediction().time_s, 0);
}

struct BadField {
  const char* field;
  void (*spoil)(AttentionProblem&);
  const char* message;  // the whole line
};
constexpr std::int64_t kHuge = std::int64_t{1} << 62;

const BadField kBadFields[] = {
    {"batch", [](AttentionProblem& p) { p.batch = -1; }, "batch: -1 given; 0 or more allowed"},
    {"heads_q", [](AttentionProblem& p) { p.heads_q = 0; }, "heads_q: 0 given; 1 or more allowed"},
    {"heads_kv", [](AttentionProblem& p) { p.heads_kv = 3; },
     "heads_kv: 3 given; a divisor of heads_q = 4 allowed"},
    {"heads_kv_negative", [](AttentionProblem& p) { p.heads_kv = -2; },
     "heads_kv: -2 given; 0 or more allowed"},
    {"heads_kv_larger", [](AttentionProblem& p) { p.heads_kv = 8; },
     "heads_kv: 8 given; a divisor of heads_q = 4 allowed"},
    {"seqlen_q", [](AttentionProblem& p) { p.seqlen_q = -5; },
     "seqlen_q: -5 given; 0 or more allowed"},
    {"seqlen_kv", [](AttentionProblem& p) { p.seqlen_kv = -5; },
     "seqlen_kv: -5 given; 0 or more allowed"},
    {"head_dim_300", [](AttentionProblem& p) { p.head_dim = 300; },
     "head_dim: 300 given; 1 to 256 allowed"},
    {"head_dim_0", [](AttentionProblem& p) { p.head_dim = 0; },
     "head_dim: 0 given; 1 to 256 allowed"},
    {"head_dim_v", [](AttentionProblem& p) { p.head_dim_v = 257; },
     "head_dim_v: 257 given; 1 to 256 allowed"},
    {"dtype", [](AttentionProblem& p) { p.dtype = DType::i32; },
     "dtype: i32 given; f32, f16, bf16, e4m3, e5m2, int8, int4 allowed"},
    {"window_left", [](AttentionProblem& p) { p.mask = Mask::window(-2, 0); },
     "mask.window_left: -2 given; -1 or more allowed"},
    {"window_right", [](AttentionProblem& p) { p.mask = Mask::window(0, -7); },
     "mask.window_right: -7 given; -1 or more allowed"},
    {"scale", [](AttentionProblem& p) { p.softmax_scale = std::numeric_limits<float>::infinity(); },
     "softmax_scale: inf given; a finite number allowed"},
    {"softcap", [](AttentionProblem& p) { p.softcap = -1; },
     "softcap: -1.000000 given; 0 (off) or a positive finite number allowed"},
    {"total_q", [](AttentionProblem& p) { p.total_q = 5; },
     "total_q: 5 given; 0 (the layout is not packed) allowed"},
    {"page_size", [](AttentionProblem& p) { p.page_size = 16; },
     "page_size: 16 given; 0 (the layout is not paged) allowed"},
    {"page_size_0", [](AttentionProblem& p) { p.layout = Layout::paged; },
     "page_size: 0 given; 1 or more allowed"},
    {"num_pages", [](AttentionProblem& p) { p.num_pages = 3; },
     "num_pages: 3 given; 0 (the layout is not paged) allowed"},
    // I4, the 64-bit audit: sizes whose product leaves 64 bits
    {"q_size", [](AttentionProblem& p) { p.seqlen_q = kHuge; },
     "the size of q and o: 2^63 bytes or more given; less than 2^63 bytes allowed"},
    {"kv_size", [](AttentionProblem& p) { p.seqlen_kv = kHuge; },
     "the size of k and v: 2^63 bytes or more given; less than 2^63 bytes allowed"},
    {"batch_size", [](AttentionProblem& p) { p.batch = kHuge; },
     "the size of q and o: 2^63 bytes or more given; less than 2^63 bytes allowed"},
    {"length_sum",
     [](AttentionProblem& p) {
       p.batch = 0;
       p.seqlen_q = p.seqlen_kv = std::numeric_limits<std::int64_t>::max() - 1;
     },
     "seqlen_q + seqlen_kv: 9223372036854775806 + 9223372036854775806 given; less than 2^63 "
     "allowed"},
};

class PlanRefuses : public ::testing::TestWithParam<BadField> {};
TEST_P(PlanRefuses, ByName) {
  AttentionProblem problem = small();
  GetParam().spoil(problem);
  const Result<Plan> planned = plan_cpu(problem);
  ASSERT_FALSE(planned);
  EXPECT_EQ(planned.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(planned.status().message(), GetParam().message);
}
INSTANTIATE_TEST_SUITE_P(Field, PlanRefuses, ::testing::ValuesIn(kBadFields),
                         [](const auto& info) { return std::string(info.param.field); });

TEST(Plan, RefusesImpossibleOptions) {
  EXPECT_EQ(plan_cpu(small(), {.threads = -1}).status().message(),
            "threads: -1 given; 0 (the OpenMP default) to 4096 allowed");
  EXPECT_EQ(plan_cpu(small(), {.splits = -1}).status().message(),
            "splits: -1 given; 0 or more allowed");
  const Status kernel = plan_cpu(small(), {.kernel = "no_such"}).status();
  EXPECT_EQ(kernel.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(kernel.parameter(), "kernel");
  EXPECT_THAT(kernel.message(), HasSubstr("forward_reference"));
  const Status contradiction =
      plan_cpu(small(), {.pipeline = Pipeline::fused, .kernel = "unfused_onednn"}).status();
  EXPECT_EQ(contradiction.message(),
            "pipeline: fused given; unfused (which unfused_onednn is) allowed");
  EXPECT_FALSE(plan(small(), Device{Device::Kind::cpu, 1}));
  EXPECT_FALSE(plan(small(), Device{Device::Kind::cpu, -1}));
  const Result<DeviceSpec> gpu = find_device("h100-sxm");
  ASSERT_TRUE(gpu);
  EXPECT_EQ(plan_cpu(small(), {.device_spec = &*gpu}).status().parameter(), "device_spec");
}

TEST(Plan, UnsupportedListsEveryKernelAndWhy) {
  AttentionProblem problem = small();
  problem.dtype = DType::e4m3;
  const Status status = plan_cpu(problem).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  for (const KernelInfo& kernel : list_kernels()) {
    if (kernel.device == Device::Kind::cpu && kernel.pass == Pass::forward) {
      EXPECT_THAT(status.message(), HasSubstr(kernel.name));
    }
  }
  EXPECT_THAT(status.message(), HasSubstr("e4m3 is not among"));
}

// An option changes the result or is refused: splits belong to split-kv kernels.
TEST(Plan, SplitsAreRefusedByKernelsThatDoNotSplit) {
  const Result<Plan> planned = plan_cpu(small(), {.kernel = "unfused_onednn", .splits = 4});
  ASSERT_FALSE(planned);
  EXPECT_EQ(planned.status().message(),
            "kernel: unfused_onednn is not supported: unfused_onednn does not split the keys, and "
            "splits is 4");
}

TEST(Plan, ChoosesTheLeastPredictedTime) {
  AttentionProblem problem{.heads_q = 8, .seqlen_q = 1024, .seqlen_kv = 1024, .head_dim = 64};
  const Result<Plan> planned = plan_cpu(problem);
  ASSERT_TRUE(planned) << planned.status().message();
  double chosen = 0;
  for (const Candidate& c : planned->candidates()) {
    chosen = c.kernel == planned->kernel() ? c.seconds : chosen;
  }
  EXPECT_GT(chosen, 0);
  for (const Candidate& c : planned->candidates()) {
    if (c.accepted && !c.only_when_forced) {
      EXPECT_LE(chosen, c.seconds) << c.kernel;
    }
  }
  EXPECT_EQ(planned->pipeline(), Pipeline::fused);
  EXPECT_NE(planned->kernel(), "forward_reference");
}

// Contract 5: which kernel runs, and so the bits, depends on the sequence and the options alone.
TEST(Plan, NeitherBatchNorThreadsNorLayoutChooseTheKernel) {
  const auto kernel_of = [](AttentionProblem p, std::int64_t batch, int threads, Layout layout) {
    p.batch = batch;
    p.layout = layout;
    if (layout == Layout::packed) {
      p.total_q = batch * p.seqlen_q;
      p.total_kv = batch * p.seqlen_kv;
    }
    if (layout == Layout::paged) {
      p.page_size = 16;
      p.num_pages = batch * ((p.seqlen_kv + 15) / 16);
      p.seqused_kv = true;
    }
    const Result<Plan> planned = plan_cpu(p, {.threads = threads});
    return planned ? planned->kernel() : planned.status().message();
  };
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t rows : {1, 2, 4, 8, 16, 32, 128, 512}) {
      for (const std::int64_t keys : {1, 64, 512, 8192}) {
        for (const std::int64_t heads_kv : {1, 2, 8}) {
          const AttentionProblem p{.heads_q = 8,
                                   .heads_kv = heads_kv,
                                   .seqlen_q = rows,
                                   .seqlen_kv = keys,
                                   .head_dim = 32,
                                   .dtype = dtype};
          const std::string alone = kernel_of(p, 1, 1, Layout::dense);
          for (const Layout layout : {Layout::dense, Layout::packed, Layout::paged}) {
            for (const std::int64_t batch : {1, 16, 256}) {
              for (const int threads : {1, 2, 16}) {
                EXPECT_EQ(kernel_of(p, batch, threads, layout), alone)
                    << rows << " rows, " << keys << " keys, batch " << batch << ", " << threads;
              }
            }
          }
        }
      }
    }
  }
}

TEST(Plan, APipelineIsDoneByAKernelOfIt) {
  for (const Pipeline pipeline : {Pipeline::unfused, Pipeline::half_fused, Pipeline::fused}) {
    const Result<Plan> planned = plan_cpu(small(), {.pipeline = pipeline});
    ASSERT_TRUE(planned) << planned.status().message();
    EXPECT_EQ(planned->pipeline(), pipeline);
  }
}

TEST(Plan, ExplainNamesKernelWallAndEveryCandidate) {
  AttentionProblem problem = small();
  problem.mask = Mask::causal();
  problem.softcap = 30;
  const Result<Plan> planned = plan_cpu(problem, {.pipeline = Pipeline::unfused});
  ASSERT_TRUE(planned);
  const std::string text = planned->explain();
  EXPECT_THAT(text, HasSubstr("kernel unfused_onednn (unfused"));
  EXPECT_THAT(text, HasSubstr("causal bottom-right"));
  EXPECT_THAT(text, HasSubstr("softcap 30"));
  EXPECT_THAT(text, HasSubstr("wall: "));
  EXPECT_THAT(text, HasSubstr("refused: is of the pipeline fused"));
  for (const Candidate& c : planned->candidates()) {
    EXPECT_THAT(text, HasSubstr(c.kernel));
  }
  const Result<Plan> forced = plan_cpu(problem, {.kernel = "forward_reference"});
  ASSERT_TRUE(forced);
  EXPECT_THAT(forced->explain(), HasSubstr("chosen: the caller named it"));
}

TEST(Plan, WorkspaceGrowsWithTheScoresOfMaterialisingPipelinesOnly) {
  const auto bytes = [](std::int64_t seqlen, Pipeline pipeline) {
    AttentionProblem problem{.heads_q = 2, .seqlen_q = seqlen, .seqlen_kv = seqlen, .head_dim = 64};
    const Result<Plan> planned = plan_cpu(problem, {.pipeline = pipeline, .threads = 2});
    return planned ? planned->workspace_bytes() : -1;
  };
  for (const Pipeline pipeline : {Pipeline::unfused, Pipeline::half_fused}) {
    EXPECT_GE(bytes(4096, pipeline), 2 * 4096LL * 4096 * 4);
  }
  EXPECT_LT(bytes(4096, Pipeline::fused), 2 * 4096LL * 4096 * 4 / 4);
  EXPECT_LT(bytes(1 << 20, Pipeline::fused), std::int64_t{1} << 30);  // never O(S²)
}

}  // namespace
}  // namespace rafter
