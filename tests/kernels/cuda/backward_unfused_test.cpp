// backward_unfused_cublaslt: against float64 on the table of cases, against the fused kernel where
// the reference would take too long, and what it refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/element.h"
#include "cli/case_backward.h"
#include "cli/cases.h"
#include "dispatch/kernel_entry.h"
#include "kernels/cuda/bf16_on_device.h"
#include "rafter/measure.h"
#include "support/backward_case.h"

namespace rafter {
std::span<const KernelEntry> entries_backward_sm90();
std::span<const KernelEntry> entries_backward_unfused_cublaslt();
std::span<const KernelEntry> entries_forward_sm90();

namespace {

constexpr const char* kName = "backward_unfused_cublaslt";

const KernelEntry& entry() { return entries_backward_unfused_cublaslt()[0]; }

#define RAFTER_NEEDS_DEVICE()                     \
  if (!entry().machine_has().yes) {               \
    GTEST_SKIP() << entry().machine_has().reason; \
  }

TEST(BackwardUnfusedCuda, AgreesWithFloat64OnEveryCaseItTakes) {
  RAFTER_NEEDS_DEVICE();
  int taken = 0;
  for (const cli::AttentionCase& c : cli::attention_cases()) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      SCOPED_TRACE(c.name + " " + to_string(dtype));
      if (!cli::runs_backward(c)) {
        continue;
      }
      const auto values = cli::make_backward_values(c, dtype);
      ASSERT_TRUE(values.is_ok());
      const auto run = [&](int poison) {
        cli::CaseRun how{.kernel = kName, .device = Device::cuda()};
        how.poison = static_cast<decltype(how.poison)>(poison);
        return cli::run_backward(c, dtype, *values, how);
      };
      const auto gradients = run(0xff);
      if (!gradients) {  // refused by name: a head_dim, softcap, strides
        EXPECT_NE(gradients.status().code(), StatusCode::kDeviceError)
            << gradients.status().message();
        continue;
      }
      ++taken;
      const auto expected = cli::expectation_of(c, dtype, *values);
      ASSERT_TRUE(expected.is_ok());
      EXPECT_EQ(cli::difference(c, *gradients, *expected), "");
      const auto again = run(0);
      ASSERT_TRUE(again.is_ok()) << again.status().message();
      EXPECT_EQ(cli::bit_difference(c, *gradients, *again), "");
    }
  }
  EXPECT_GT(taken, 40);
}

/// Largest difference of the gradients over the largest gradient.
double relative_difference(const testing::Gradients& a, const testing::Gradients& b) {
  double worst = 0, most = 0;
  for (std::vector<float> testing::Gradients::*one :
       {&testing::Gradients::dq, &testing::Gradients::dk, &testing::Gradients::dv}) {
    if ((a.*one).size() != (b.*one).size()) {
      return HUGE_VAL;
    }
    for (std::size_t i = 0; i < (a.*one).size(); ++i) {
      const double difference = std::fabs((a.*one)[i] - (b.*one)[i]);
      worst = std::isnan(difference) ? HUGE_VAL : std::fmax(worst, difference);
      most = std::fmax(most, std::fabs((b.*one)[i]));
    }
  }
  return most > 0 ? worst / most : HUGE_VAL;
}

// o and its gradient of any strides, or in f32: dO is copied where cuBLASLt cannot take it. The
// library may choose other orders of sums for other strides: dP, rounded to bf16, may differ by
// 2^-8 of it.
TEST(BackwardUnfusedCuda, TakesAnyStridesOfOAndItsGradient) {
  RAFTER_NEEDS_DEVICE();
  testing::Case c{
      .problem = {.heads_q = 2, .head_dim = 72, .dtype = DType::bf16, .mask = Mask::causal()}};
  c.lengths({70, 70}, {150, 150});
  testing::BackwardValues values = testing::make_backward_values(c, true);
  testing::RunOptions run{.kernel = kName, .device = Device::cuda()};
  const testing::Gradients plain = testing::run_backward(c, values, run);
  run.f32_o = true;
  EXPECT_LT(relative_difference(testing::run_backward(c, values, run), plain), 0x1p-8);
  run.style_besides_qkv = testing::Style::gaps;  // outputs too: products cannot write those
  testing::Gradients none;
  EXPECT_EQ(testing::try_backward(c, values, run, none).parameter(), "dq.stride_batch");
  c.problem.heads_kv = 1;  // gradients are sums of a group, written by a kernel of ours
  values = testing::make_backward_values(c, true);
  EXPECT_LT(relative_difference(
                testing::run_backward(c, values, run),
                testing::run_backward(c, values, {.kernel = kName, .device = Device::cuda()})),
            0x1p-8);
}

/// Tensors of a problem on the device: random q, k, v and d_o; o and lse of a forward run.
struct Loaded {
  KernelProblem problem;
  DeviceMemory q, k, v, o, d_o, lse, dq, dk, dv, workspace;

  static Loaded make(const KernelProblem& problem) {
    const AttentionProblem& p = problem.attention;
    const std::int64_t q_bytes = 2 * p.batch * p.seqlen_q * p.heads_q * p.head_dim;
    const std::int64_t k_bytes = 2 * p.batch * p.seqlen_kv * p.heads_kv * p.head_dim;
    const std::int64_t room =
        std::max(entry().workspace(problem), entries_backward_sm90()[0].workspace(problem));
    const auto memory = testing::poisoned_memory;
    Loaded loaded{problem,         memory(q_bytes), memory(k_bytes), memory(k_bytes),
                  memory(q_bytes), memory(q_bytes), memory(q_bytes), memory(q_bytes),
                  memory(k_bytes), memory(k_bytes), memory(room)};
    std::uint32_t seed = 1;
    for (const DeviceMemory* one : {&loaded.q, &loaded.k, &loaded.v, &loaded.d_o}) {
      EXPECT_TRUE(one->fill_random(DType::bf16, seed++).is_ok());
    }
    const KernelEntry& forward = entries_forward_sm90()[0];
    const DeviceMemory scratch = memory(std::max<std::int64_t>(forward.workspace(problem), 64));
    const ForwardInputs in{loaded.queries(loaded.q), loaded.keys(loaded.k), loaded.keys(loaded.v)};
    const ForwardOutputs out{loaded.queries(loaded.o), loaded.rows()};
    const Status done = forward.forward({problem, in, out, {scratch.data(), scratch.bytes()}, {}});
    EXPECT_TRUE(done.is_ok()) << done.message();
    return loaded;
  }
  TensorView queries(const DeviceMemory& m) const {
    const AttentionProblem& p = problem.attention;
    return TensorView::contiguous(m.data(), p.dtype, p.batch, p.seqlen_q, p.heads_q, p.head_dim);
  }
  TensorView keys(const DeviceMemory& m) const {
    const AttentionProblem& p = problem.attention;
    return TensorView::contiguous(m.data(), p.dtype, p.batch, p.seqlen_kv, p.heads_kv, p.head_dim);
  }
  LseView rows() const {
    const AttentionProblem& p = problem.attention;
    return LseView::contiguous(static_cast<float*>(lse.data()), p.batch, p.heads_q, p.seqlen_q);
  }
  Status run(const KernelEntry& kernel, Stream stream = {}) const {
    const BackwardInputs in{.q = queries(q),
                            .k = keys(k),
                            .v = keys(v),
                            .o = queries(o),
                            .lse = rows(),
                            .d_o = queries(d_o)};
    return kernel.backward({problem,
                            in,
                            {queries(dq), keys(dk), keys(dv)},
                            {workspace.data(), workspace.bytes()},
                            stream});
  }
  void poison() const {
    for (const DeviceMemory* one : {&dq, &dk, &dv, &workspace}) {
      EXPECT_TRUE(one->fill(0xff).is_ok());
    }
  }
};

KernelProblem problem_of(std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv,
                         std::int64_t seqlen_q, std::int64_t seqlen_kv, const Mask& mask = {}) {
  constexpr std::int64_t kHeadDim = 64;
  KernelProblem problem;
  problem.attention = {.batch = batch,
                       .heads_q = heads_q,
                       .heads_kv = heads_kv,
                       .seqlen_q = seqlen_q,
                       .seqlen_kv = seqlen_kv,
                       .head_dim = kHeadDim,
                       .head_dim_v = kHeadDim,
                       .dtype = DType::bf16,
                       .mask = mask,
                       .softmax_scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim))};
  return problem;
}

// Blocks of 1024 rows and keys: masks that cut, skip and touch them. The fused kernel is the
// reference; here S, P, dP and dS are rounded to bf16, 2^-9 each.
TEST(BackwardUnfusedCuda, AgreesWithTheFusedKernelOverSeveralBlocks) {
  RAFTER_NEEDS_DEVICE();
  const KernelProblem problems[] = {
      problem_of(2, 2, 2, 1500, 1500),
      problem_of(1, 2, 2, 2300, 2300, Mask::causal()),
      problem_of(3, 2, 1, 1100, 2300, Mask::causal()),
      problem_of(1, 2, 2, 2300, 1100, Mask::causal()),
      problem_of(1, 2, 2, 3200, 3200, Mask::window(1040, 30)),
      problem_of(1, 4, 2, 3200, 3200, Mask::window(100, 0)),
      problem_of(1, 2, 2, 2048, 4096, Mask::window(0, 10, MaskAlign::top_left)),
      problem_of(2, 1, 1, 1025, 1023, Mask::causal(MaskAlign::top_left))};
  for (const KernelProblem& problem : problems) {
    const AttentionProblem& p = problem.attention;
    SCOPED_TRACE(std::to_string(p.seqlen_q) + " rows, " + std::to_string(p.seqlen_kv) + " keys");
    const Loaded loaded = Loaded::make(problem);
    ASSERT_TRUE(loaded.run(entries_backward_sm90()[0]).is_ok());
    const DeviceMemory* const outputs[] = {&loaded.dq, &loaded.dk, &loaded.dv};
    std::vector<std::vector<std::uint16_t>> fused;
    for (const DeviceMemory* one : outputs) {
      fused.push_back(testing::bits_of_memory(*one));
    }
    loaded.poison();
    const Status status = loaded.run(entry());
    ASSERT_TRUE(status.is_ok()) << status.message();
    for (std::size_t i = 0; i < fused.size(); ++i) {
      EXPECT_LT(testing::relative_difference(testing::bits_of_memory(*outputs[i]), fused[i]), 0.01)
          << "of dq, dk, dv: " << i;
    }
  }
}

TEST(BackwardUnfusedCuda, RepeatsInAGraphAndOnAStreamHaveTheSameBits) {
  RAFTER_NEEDS_DEVICE();
  const Loaded loaded = Loaded::make(problem_of(2, 4, 2, 500, 700, Mask::causal()));
  ASSERT_TRUE(loaded.run(entry()).is_ok());
  const auto all = [&] {
    return std::vector{testing::bits_of_memory(loaded.dq), testing::bits_of_memory(loaded.dk),
                       testing::bits_of_memory(loaded.dv)};
  };
  const auto once = all();
  Result<DeviceClock> clock = DeviceClock::make(Device::cuda());
  ASSERT_TRUE(clock.is_ok());
  for (const Queueing how : {Queueing::stream, Queueing::graph}) {
    loaded.poison();
    const TimedWork work = clock->timed([&] { return loaded.run(entry(), clock->stream()); }, how);
    const Result<double> seconds = work(20);
    ASSERT_TRUE(seconds.is_ok()) << seconds.status().message();
    EXPECT_EQ(all(), once);
  }
}

TEST(BackwardUnfusedCuda, RefusesByNameWhatItDoesNotDo) {
  const auto reason = [](auto change) {
    KernelProblem problem = problem_of(2, 4, 2, 128, 128);
    change(problem.attention);
    return entry().accepts(problem).reason;
  };
  EXPECT_EQ(reason([](AttentionProblem& p) { p.dtype = DType::f32; }),
            "f32 is not among bf16, f16");
  EXPECT_EQ(reason([](AttentionProblem& p) { p.layout = Layout::paged; }),
            "layout paged is not among dense, packed");
  EXPECT_EQ(reason([](AttentionProblem& p) { p.head_dim = 20; }),
            "head_dim 20 is not a multiple of 8");
  EXPECT_EQ(reason([](AttentionProblem& p) { p.softcap = 5; }),
            "softcap: stored probabilities do not give its derivative");
  EXPECT_EQ(reason([](AttentionProblem& p) { p.seqlen_kv = std::int64_t{1} << 30; }),
            "more than 2^29 rows, or scores beyond 2^60 bytes");
}

// Its memory grows with S²: only who asks for the pipeline gets it, and then does.
TEST(BackwardUnfusedCuda, IsChosenOnlyWhereThePipelineIsAskedFor) {
  RAFTER_NEEDS_DEVICE();
  for (const std::int64_t head_dim : {64, 128, 256}) {
    for (const std::int64_t seqlen : {128, 4096, 16384}) {
      const AttentionProblem problem{.heads_q = 8,
                                     .seqlen_q = seqlen,
                                     .seqlen_kv = seqlen,
                                     .head_dim = head_dim,
                                     .dtype = DType::bf16};
      PlanOptions options{.pass = Pass::backward};
      const Result<Plan> by_itself = plan(problem, Device::cuda(), options);
      options.pipeline = Pipeline::unfused;
      const Result<Plan> asked_for = plan(problem, Device::cuda(), options);
      ASSERT_TRUE(by_itself.is_ok() && asked_for.is_ok());
      EXPECT_EQ(by_itself->kernel(), "backward_sm90");
      EXPECT_EQ(asked_for->kernel(), kName);
    }
  }
}

TEST(BackwardUnfusedCuda, RefusesScoresThatTheDeviceDoesNotHold) {
  RAFTER_NEEDS_DEVICE();
  EXPECT_EQ(entry().accepts(problem_of(2, 4, 2, 128, 128)).reason, "");
  const std::string reason = entry().accepts(problem_of(1, 64, 64, 65536, 65536)).reason;
  EXPECT_EQ(reason.find("needs a workspace of 110"), 0U) << reason;  // 1100.1 GB
  EXPECT_NE(reason.find("GB of the device"), std::string::npos) << reason;
}

// P and dS, what cuBLASLt may use, delta and dO; copies and sums where heads share keys.
TEST(BackwardUnfusedCuda, HoldsTheScoresTwice) {
  constexpr std::int64_t kBeside = (std::int64_t{32} << 20) + 192;
  const std::int64_t rows = 2 * 4 * 128;
  const std::int64_t alone = 2 * rows * 128 * 2 + rows * 4 + rows * 64 * 2;
  EXPECT_EQ(entry().workspace(problem_of(2, 4, 4, 128, 128)), alone + kBeside);
  EXPECT_EQ(entry().workspace(problem_of(2, 4, 2, 128, 128)),
            alone + rows * 64 * (3 * 2 + 4) + kBeside);
}

}  // namespace
}  // namespace rafter
