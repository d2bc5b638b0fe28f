// The C ABI on a GPU: the device is an option of the plan, the stream a field of the run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "rafter/attention.h"
#include "rafter/measure.h"
#include "rafter/rafter.h"

namespace rafter {
namespace {

TEST(CAbiCuda, AForwardOnAStreamHasTheBitsOfTheCppApi) {
  if (const std::string why = why_no_cuda(); !why.empty()) {
    GTEST_SKIP() << why;
  }
  constexpr std::int64_t kSeqlen = 200, kHeads = 4, kHeadsKv = 2, kDim = 64;
  const Device device = Device::cuda();
  const Result<DeviceClock> clock = DeviceClock::make(device);
  ASSERT_TRUE(clock) << clock.status().message();
  const auto memory = [&](std::int64_t bytes, std::uint32_t seed) {
    Result<DeviceMemory> made = DeviceMemory::allocate(device, bytes);
    EXPECT_TRUE(made && made->fill_random(DType::bf16, seed));
    return *std::move(made);
  };
  const std::int64_t bytes = kSeqlen * kHeads * kDim * 2, bytes_kv = kSeqlen * kHeadsKv * kDim * 2;
  const DeviceMemory q = memory(bytes, 1), k = memory(bytes_kv, 2), v = memory(bytes_kv, 3);
  const DeviceMemory o_c = memory(bytes, 4), o_cpp = memory(bytes, 5);
  const auto downloaded = [&](const DeviceMemory& from) {
    std::vector<std::uint16_t> values(static_cast<std::size_t>(bytes / 2));
    EXPECT_TRUE(from.download(values.data(), bytes));
    return values;
  };

  rafter_problem problem{};
  problem.size = sizeof(problem);
  problem.batch = 1;
  problem.heads_q = kHeads;
  problem.heads_kv = kHeadsKv;
  problem.seqlen_q = problem.seqlen_kv = kSeqlen;
  problem.head_dim = kDim;
  problem.dtype = RAFTER_BF16;
  problem.mask = RAFTER_MASK_CAUSAL;
  rafter_plan_options options{};
  options.size = sizeof(options);
  options.device = RAFTER_CUDA;
  rafter_plan* c_plan = nullptr;
  ASSERT_EQ(rafter_plan_create(&problem, &options, &c_plan), RAFTER_OK) << rafter_error_message();
  const Result<Plan> plan = rafter::plan({.heads_q = kHeads,
                                          .heads_kv = kHeadsKv,
                                          .seqlen_q = kSeqlen,
                                          .seqlen_kv = kSeqlen,
                                          .head_dim = kDim,
                                          .dtype = DType::bf16,
                                          .mask = Mask::causal()},
                                         device);
  ASSERT_TRUE(plan) << plan.status().message();
  EXPECT_EQ(plan->kernel(), rafter_plan_kernel(c_plan));
  const DeviceMemory workspace = memory(std::max<std::int64_t>(plan->workspace_bytes(), 64), 6);

  rafter_forward_args args{};
  args.size = sizeof(args);
  const auto tensor = [](const DeviceMemory& data, std::int64_t heads) {
    return rafter_contiguous(data.data(), RAFTER_BF16, 1, kSeqlen, heads, kDim);
  };
  args.q = tensor(q, kHeads);
  args.k = tensor(k, kHeadsKv);
  args.v = tensor(v, kHeadsKv);
  args.o = tensor(o_c, kHeads);
  args.workspace = workspace.data();
  args.workspace_bytes = plan->workspace_bytes();
  args.stream = clock->stream().handle;
  ASSERT_EQ(rafter_forward(c_plan, &args), RAFTER_OK) << rafter_error_message();
  rafter_plan_destroy(c_plan);
  ASSERT_TRUE(clock->synchronize());

  const auto view = [](const DeviceMemory& data, std::int64_t heads) {
    return TensorView::contiguous(data.data(), DType::bf16, 1, kSeqlen, heads, kDim);
  };
  ASSERT_TRUE(plan->forward({.q = view(q, kHeads), .k = view(k, kHeadsKv), .v = view(v, kHeadsKv)},
                            {.o = view(o_cpp, kHeads)}, {workspace.data(), plan->workspace_bytes()},
                            clock->stream()));
  ASSERT_TRUE(clock->synchronize());
  EXPECT_EQ(downloaded(o_c), downloaded(o_cpp));
}

}  // namespace
}  // namespace rafter
