// The pipelines whose scores land on a CUDA device: against float64 on the table of cases, against
// the fused kernel where the reference would take too long, and what they refuse.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/element.h"
#include "cli/case_run.h"
#include "cli/cases.h"
#include "dispatch/kernel_entry.h"
#include "hw/cuda/passes.h"
#include "kernels/cuda/bf16_on_device.h"
#include "rafter/layers.h"
#include "rafter/measure.h"

namespace rafter {
std::span<const KernelEntry> entries_unfused_cublaslt();
std::span<const KernelEntry> entries_half_fused_sm90();

namespace {

using cli::AttentionCase;
using cli::CaseOutput;

const KernelEntry& entry_of(const std::string& name) {
  return name == "unfused_cublaslt" ? entries_unfused_cublaslt()[0] : entries_half_fused_sm90()[0];
}

KernelProblem problem_of(std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv,
                         std::int64_t seqlen, std::int64_t head_dim) {
  KernelProblem problem;
  problem.attention = {.batch = batch,
                       .heads_q = heads_q,
                       .heads_kv = heads_kv,
                       .seqlen_q = seqlen,
                       .seqlen_kv = seqlen,
                       .head_dim = head_dim,
                       .head_dim_v = head_dim,
                       .dtype = DType::bf16,
                       .softmax_scale = 1.0f / std::sqrt(static_cast<float>(head_dim))};
  return problem;
}

class LandedScores : public ::testing::TestWithParam<std::string> {
 protected:
  const KernelEntry& entry() const { return entry_of(GetParam()); }
  bool missing() const { return !entry().machine_has().yes; }
};

#define RAFTER_NEEDS_DEVICE()                     \
  if (missing()) {                                \
    GTEST_SKIP() << entry().machine_has().reason; \
  }

TEST_P(LandedScores, AgreeWithFloat64OnEveryCaseTheyTake) {
  RAFTER_NEEDS_DEVICE();
  int taken = 0;
  for (const AttentionCase& c : cli::attention_cases()) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      SCOPED_TRACE(c.name + " " + to_string(dtype));
      const cli::CaseValues values = cli::make_values(c, dtype);
      const cli::CaseRun run{.kernel = GetParam(), .device = Device::cuda()};
      const Result<CaseOutput> output = cli::run_case(c, dtype, values, run);
      if (!output) {  // refused by name: a head_dim, a layout, strides
        EXPECT_NE(output.status().code(), StatusCode::kDeviceError) << output.status().message();
        continue;
      }
      ++taken;
      const auto expected = cli::expectation_of(c, dtype, values);
      ASSERT_TRUE(expected.is_ok());
      EXPECT_EQ(cli::difference(c, *output, *expected), "");
      const Result<CaseOutput> again = cli::run_case(
          c, dtype, values, {.kernel = GetParam(), .poison = 0, .device = Device::cuda()});
      ASSERT_TRUE(again.is_ok()) << again.status().message();
      EXPECT_EQ(cli::bit_difference(c, *output, *again), "");
    }
  }
  EXPECT_GT(taken, 40);
}

/// q, k, v, o and a workspace on the device, random.
struct Loaded {
  KernelProblem problem;
  DeviceMemory q, k, v, o, lse, workspace;

  static Loaded make(const KernelProblem& problem, std::int64_t workspace_bytes) {
    const AttentionProblem& p = problem.attention;
    const auto memory = testing::poisoned_memory;
    const std::int64_t q_bytes = 2 * p.batch * p.seqlen_q * p.heads_q * p.head_dim;
    const std::int64_t k_bytes = 2 * p.batch * p.seqlen_kv * p.heads_kv * p.head_dim;
    Loaded loaded{problem,         memory(q_bytes), memory(k_bytes),        memory(k_bytes),
                  memory(q_bytes), memory(q_bytes), memory(workspace_bytes)};
    std::uint32_t seed = 1;
    for (const DeviceMemory* one : {&loaded.q, &loaded.k, &loaded.v}) {
      EXPECT_TRUE(one->fill_random(DType::bf16, seed++).is_ok());
    }
    return loaded;
  }
  Status run(const KernelEntry& entry, Stream stream = {}) const {
    const AttentionProblem& p = problem.attention;
    const auto view = [&](const DeviceMemory& memory, std::int64_t seqlen, std::int64_t heads) {
      return TensorView::contiguous(memory.data(), p.dtype, p.batch, seqlen, heads, p.head_dim);
    };
    const ForwardInputs in{view(q, p.seqlen_q, p.heads_q), view(k, p.seqlen_kv, p.heads_kv),
                           view(v, p.seqlen_kv, p.heads_kv)};
    const ForwardOutputs out{
        view(o, p.seqlen_q, p.heads_q),
        LseView::contiguous(static_cast<float*>(lse.data()), p.batch, p.heads_q, p.seqlen_q)};
    return entry.forward({problem, in, out, {workspace.data(), workspace.bytes()}, stream});
  }
  std::vector<std::uint16_t> output() const { return testing::bits_of_memory(o); }
};

// The other pipeline is the reference: they share the scores' product and nothing else. Both land
// the scores in bf16; P is rounded once in one and never scaled in the other: 2^-8 each.
TEST_P(LandedScores, AgreeWithTheOtherPipelineOverSeveralWaves) {
  RAFTER_NEEDS_DEVICE();
  struct Shape {
    std::int64_t heads, seqlen;
    bool causal;
  };
  // 40 heads of 8192²: waves of heads. One head of 65536²: waves of rows. Under a mask waves of
  // 1024 rows, of 256 heads at most.
  for (const Shape& shape : {Shape{40, 8192, false}, Shape{300, 8192, true}, Shape{1, 65536, false},
                             Shape{1, 65536, true}}) {
    KernelProblem problem = problem_of(1, shape.heads, shape.heads, shape.seqlen, 64);
    problem.attention.mask = shape.causal ? Mask::causal() : Mask::none();
    const std::int64_t bytes = entry().workspace(problem);
    EXPECT_LT(bytes, std::int64_t{5} << 30);
    const Loaded loaded = Loaded::make(problem, bytes);
    ASSERT_TRUE(loaded.o.fill(0xff).is_ok());
    ASSERT_TRUE(loaded.workspace.fill(0xff).is_ok());
    const Status status = loaded.run(entry());
    ASSERT_TRUE(status.is_ok()) << status.message();
    const std::vector<std::uint16_t> ours = loaded.output();
    ASSERT_TRUE(loaded.o.fill(0xff).is_ok());
    const bool unfused = GetParam() == "unfused_cublaslt";
    ASSERT_TRUE(loaded.run(entry_of(unfused ? "half_fused_sm90" : "unfused_cublaslt")).is_ok());
    EXPECT_LT(testing::relative_difference(ours, loaded.output()), 0.01);
  }
}

TEST_P(LandedScores, RunInAGraphWithTheSameBits) {
  RAFTER_NEEDS_DEVICE();
  const KernelProblem problem = problem_of(3, 8, 2, 512, 128);
  const Loaded loaded = Loaded::make(problem, entry().workspace(problem));
  ASSERT_TRUE(loaded.run(entry()).is_ok());
  const std::vector<std::uint16_t> once = loaded.output();
  Result<DeviceClock> clock = DeviceClock::make(Device::cuda());
  ASSERT_TRUE(clock.is_ok());
  ASSERT_TRUE(loaded.o.fill(0xff).is_ok());
  const TimedWork graph =
      clock->timed([&] { return loaded.run(entry(), clock->stream()); }, Queueing::graph);
  const Result<double> seconds = graph(3);
  ASSERT_TRUE(seconds.is_ok()) << seconds.status().message();
  EXPECT_GT(*seconds, 0);
  EXPECT_EQ(loaded.output(), once);
}

TEST_P(LandedScores, RefuseByNameWhatTheyDoNotDo) {
  const auto reason = [&](auto change) {
    KernelProblem problem = problem_of(2, 4, 2, 128, 64);
    change(problem);
    return entry().accepts(problem).reason;
  };
  EXPECT_EQ(reason([](KernelProblem&) {}), "");
  EXPECT_EQ(reason([](KernelProblem& p) { p.attention.dtype = DType::f32; }),
            "f32 is not among bf16, f16");
  EXPECT_EQ(reason([](KernelProblem& p) { p.attention.layout = Layout::paged; }),
            "layout paged is not among dense, packed");
  EXPECT_EQ(reason([](KernelProblem& p) { p.attention.head_dim_v = 20; }),
            "head_dim_v 20 is not a multiple of 8");
  EXPECT_EQ(reason([](KernelProblem& p) { p.splits = 3; }), "splits 3: it does not split the keys");
  EXPECT_EQ(reason([](KernelProblem& p) { p.attention.seqlen_kv = std::int64_t{1} << 30; }),
            "more than 2^29 rows, or scores beyond 2^63 bytes");
}

TEST_P(LandedScores, RefuseADeviceThatIsNotHere) {
  KernelProblem problem = problem_of(1, 1, 1, 16, 64);
  problem.device_index = 1000;
  EXPECT_NE(entry().accepts(problem).reason.find("no CUDA device"), std::string::npos);
}

TEST_P(LandedScores, HoldTheScoresOfAWaveAndSayHowMany) {
  // Beside the scores: cuBLASLt's, and from an address aligned to 64 bytes to one to 256.
  constexpr std::int64_t kBeside = (std::int64_t{32} << 20) + 192;
  const KernelProblem small = problem_of(2, 4, 2, 128, 64);
  EXPECT_EQ(entry().workspace(small), 2 * 4 * 128 * 128 * 2 + kBeside);
  EXPECT_EQ(entry().note(small), "");
  const KernelProblem large = problem_of(1, 32, 32, 32768, 128);
  EXPECT_EQ(entry().workspace(large), (std::int64_t{4} << 30) + kBeside);
  EXPECT_EQ(entry().note(large), "scores of 68.7 GB go through 4.3 GB of workspace in 16 waves");
  KernelProblem masked = large;
  masked.attention.mask = Mask::causal();
  EXPECT_EQ(entry().workspace(masked), (std::int64_t{2} << 30) + kBeside);
  EXPECT_EQ(entry().note(masked), "scores of 68.7 GB go through 2.1 GB of workspace in 32 waves");
}

TEST_P(LandedScores, SayHowManyRowsLandTogether) {
  KernelProblem problem = problem_of(2, 4, 2, 5000, 64);
  problem.attention.mask = Mask::causal();
  EXPECT_EQ(entry().score_block_rows(problem), 1024);
  problem.attention.layout = Layout::packed;
  EXPECT_EQ(entry().score_block_rows(problem), 5000);
}

TEST_P(LandedScores, CostWhatTheirProductsTakeWhole) {
  RAFTER_NEEDS_DEVICE();
  KernelProblem problem = problem_of(2, 4, 2, 5000, 64);
  problem.attention.mask = Mask::causal();
  const Result<Plan> made = plan(problem.attention, Device::cuda(), {.kernel = GetParam()});
  ASSERT_TRUE(made) << made.status().message();
  const double blocks = 1024.0 * (1024 + 2048 + 3072 + 4096) + 904.0 * 5000;
  const double visible = 5000.0 * 5001 / 2;
  const bool unfused = GetParam() == "unfused_cublaslt";
  EXPECT_EQ(made->cost().matmul_flops, 2 * 4 * 2 * 64 * (blocks + (unfused ? blocks : visible)));
  EXPECT_EQ(made->convention().score_block_rows, 1024);
}

// Where lengths are on the device, padded copies of q, k, v (and o of the unfused pipeline).
TEST_P(LandedScores, PadWhatIsPacked) {
  KernelProblem packed = problem_of(2, 4, 2, 128, 64);
  packed.attention.layout = Layout::packed;
  packed.attention.total_q = packed.attention.total_kv = 200;
  KernelProblem dense = packed;
  dense.attention.layout = Layout::dense;
  const std::int64_t copies = 2 * 4 * 128 * 64 * (3 * 2);
  const std::int64_t outputs = GetParam() == "unfused_cublaslt" ? 2 * 4 * 128 * 64 * 4 : 0;
  EXPECT_EQ(entry().workspace(packed) - entry().workspace(dense), copies + outputs);
  EXPECT_NE(entry().note(packed).find("padded to its capacity"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Cuda, LandedScores,
                         ::testing::Values("unfused_cublaslt", "half_fused_sm90"),
                         [](const auto& info) { return info.param; });

// ---- what measure.h offers of a device

TEST(CudaDevice, SaysWhyItIsNotHere) {
  const std::string why = why_no_cuda(1000);
  EXPECT_EQ(why.find("no CUDA device"), 0U) << why;
  const Device nowhere = Device::cuda(1000);
  EXPECT_FALSE(DeviceMemory::allocate(nowhere, 16).is_ok());
  EXPECT_FALSE(DeviceClock::make(nowhere).is_ok());
  EXPECT_EQ(probe_cuda(nowhere).status().code(), StatusCode::kDeviceError);
}

TEST(CudaDevice, MemoryComesBackAsItWent) {
  if (const std::string why = why_no_cuda(); !why.empty()) {
    GTEST_SKIP() << why;
  }
  std::vector<float> there(1000);
  for (std::size_t i = 0; i < there.size(); ++i) {
    there[i] = static_cast<float>(i) / 3;
  }
  const Result<DeviceMemory> memory = DeviceMemory::allocate(Device::cuda(), 4000);
  ASSERT_TRUE(memory.is_ok());
  ASSERT_TRUE(memory->upload(there.data(), 4000).is_ok());
  std::vector<float> back(1000);
  ASSERT_TRUE(memory->download(back.data(), 4000).is_ok());
  EXPECT_EQ(back, there);
  EXPECT_EQ(memory->upload(there.data(), 4001).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(memory->fill(0).is_ok());
  ASSERT_TRUE(memory->download(back.data(), 4000).is_ok());
  EXPECT_EQ(back, std::vector<float>(1000, 0.0f));
}

/// A copy from pageable memory may return while it is on its way.
TEST(CudaDevice, AnUploadIsThereForAKernelOnAnyStream) {
  if (const std::string why = why_no_cuda(); !why.empty()) {
    GTEST_SKIP() << why;
  }
  const Result<DeviceClock> clock = DeviceClock::make(Device::cuda());
  ASSERT_TRUE(clock.is_ok());
  constexpr std::int64_t kCount = 12000;  // 48 kB
  const Result<DeviceMemory> memory = DeviceMemory::allocate(Device::cuda(), 4 * kCount);
  ASSERT_TRUE(memory.is_ok());
  const CountView counts{static_cast<std::int32_t*>(memory->data()), kCount};
  for (std::int32_t round = 0; round < 2000; ++round) {
    const std::vector<std::int32_t> there(kCount, 3 * round);
    ASSERT_TRUE(memory->upload(there.data(), 4 * kCount).is_ok());
    ASSERT_TRUE(advance(counts, 1, Device::cuda(), clock->stream()).is_ok());
    ASSERT_TRUE(clock->synchronize().is_ok());
    std::vector<std::int32_t> back(kCount);
    ASSERT_TRUE(memory->download(back.data(), 4 * kCount).is_ok());
    ASSERT_EQ(back, std::vector<std::int32_t>(kCount, 3 * round + 1)) << round;
  }
}

TEST(CudaDevice, RandomValuesAreFiniteCentredAndRepeat) {
  if (const std::string why = why_no_cuda(); !why.empty()) {
    GTEST_SKIP() << why;
  }
  constexpr std::int64_t kCount = 1 << 16;
  const Result<DeviceMemory> memory = DeviceMemory::allocate(Device::cuda(), 4 * kCount);
  ASSERT_TRUE(memory.is_ok());
  std::vector<float> first(kCount), second(kCount);
  for (std::vector<float>* values : {&first, &second}) {
    ASSERT_TRUE(memory->fill_random(DType::f32, 5).is_ok());
    ASSERT_TRUE(memory->download(values->data(), 4 * kCount).is_ok());
  }
  EXPECT_EQ(first, second);
  double sum = 0, squares = 0;
  for (const float value : first) {
    EXPECT_LT(std::fabs(value), 2);
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.02);            // 9 standard errors
  EXPECT_NEAR(squares / kCount, 1.0 / 3, 0.02);  // four uniform values of variance 1/12
}

TEST(CudaDevice, CountsTheBytesOfACopy) {
  if (const std::string why = why_no_cuda(); !why.empty()) {
    GTEST_SKIP() << why;
  }
  constexpr std::int64_t kBytes = std::int64_t{1} << 30;
  const Result<DeviceMemory> from = DeviceMemory::allocate(Device::cuda(), kBytes);
  const Result<DeviceMemory> to = DeviceMemory::allocate(Device::cuda(), kBytes);
  const Result<DeviceClock> clock = DeviceClock::make(Device::cuda());
  ASSERT_TRUE(from.is_ok() && to.is_ok() && clock.is_ok());
  const Result<CountedBytes> counted = clock->count(
      [&] { return cuda::copy_pass(to->data(), from->data(), kBytes, clock->stream().handle); });
  if (!counted) {
    GTEST_SKIP() << counted.status().message();
  }
  EXPECT_NEAR(counted->read, kBytes, 0.03 * kBytes);
  EXPECT_LT(counted->written, 1.03 * kBytes);
  EXPECT_GT(counted->written, 0.9 * kBytes);  // the rest is in the L2
}

// A call on an idle stream is timed without what queueing it takes: ten empty kernels take the
// device less than the host takes to launch them.
TEST(CudaDevice, TimesACallWithoutItsLaunches) {
  if (const std::string why = why_no_cuda(); !why.empty()) {
    GTEST_SKIP() << why;
  }
  const Result<DeviceClock> clock = DeviceClock::make(Device::cuda());
  ASSERT_TRUE(clock.is_ok());
  int calls = 0;
  const Work slow_to_queue = [&] {
    ++calls;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return cuda::empty_launch(clock->stream().handle);
  };
  const TimedWork timed = clock->timed(slow_to_queue, Queueing::stream, 1 << 20);
  ASSERT_TRUE(timed(1).is_ok());
  const Result<double> seconds = timed(1);
  ASSERT_TRUE(seconds.is_ok());
  EXPECT_EQ(calls, 2);
  EXPECT_LT(*seconds, 1e-3);
  EXPECT_GT(*seconds, 0);
}

}  // namespace
}  // namespace rafter
