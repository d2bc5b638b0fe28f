// Offsets beyond 2^31 elements, with little memory: huge strides over reserved address space, and
// broadcast keys.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "support/every_kernel.h"
#include "support/reserved.h"

namespace rafter::testing {
namespace {

class ForwardOffsets : public EveryKernelTest {};

// I2, I1's kind: element offsets past 2^31 through the stride of each dimension in turn.
TEST_P(ForwardOffsets, StridesBeyond32BitsEqualContiguousOnes) {
  constexpr std::int64_t kBatch = 2, kRows = 2, kHeads = 2, kDim = 8;
  constexpr std::size_t kBytes = (std::size_t{1} << 33) + (1 << 20);
  Case c{.problem = {.heads_q = kHeads, .head_dim = kDim, .mask = Mask::causal()}};
  c.lengths({kRows, kRows}, {kRows, kRows});
  RAFTER_SKIP_IF_REFUSED(c, kernel());
  const Values values = make_values(c);
  const Output expected = run_case(c, values, options());
  AttentionProblem problem = c.problem;
  problem.batch = kBatch;
  problem.seqlen_q = problem.seqlen_kv = kRows;
  const Result<Plan> planned = plan(problem, Device::cpu(), {.kernel = kernel(), .threads = 2});
  ASSERT_TRUE(planned) << planned.status().message();
  GuardedBuffer workspace(static_cast<std::size_t>(planned->workspace_bytes()), Fill::nan);
  for (const Far far : {Far::batch, Far::seqlen, Far::heads}) {
    const Reserved spaces[] = {Reserved(kBytes), Reserved(kBytes), Reserved(kBytes),
                               Reserved(kBytes)};
    TensorView views[4];
    for (std::size_t t = 0; t < 4; ++t) {
      ASSERT_NE(spaces[t].data(), nullptr) << "no address space to reserve";
      views[t] = far_view(spaces[t].data(), far, kBatch, kRows, kHeads, kDim);
    }
    const std::vector<float>* sources[] = {&values.q, &values.k, &values.v};
    for (std::size_t t = 0; t < 3; ++t) {
      std::size_t next = 0;
      for (std::int64_t b = 0; b < kBatch; ++b) {
        for (std::int64_t i = 0; i < kRows; ++i) {
          for (std::int64_t h = 0; h < kHeads; ++h) {
            for (std::int64_t d = 0; d < kDim; ++d) {
              at(views[t], b, i, h, d) = (*sources[t])[next++];
            }
          }
        }
      }
    }
    const Status status = planned->forward({views[0], views[1], views[2]}, {views[3], {}},
                                           {workspace.data(), planned->workspace_bytes()});
    ASSERT_TRUE(status) << status.message();
    std::size_t next = 0;
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (std::int64_t i = 0; i < kRows; ++i) {
        for (std::int64_t h = 0; h < kHeads; ++h) {
          for (std::int64_t d = 0; d < kDim; ++d) {
            EXPECT_EQ(at(views[3], b, i, h, d), expected.o[next++]) << static_cast<int>(far);
          }
        }
      }
    }
  }
}

// I4 and the 64-bit audit: 2^22 + 1 keys. One key row broadcast by a stride of 0 stands for all:
// the output is the value row, lse is the score plus log of the count.
TEST_P(ForwardOffsets, FourMillionBroadcastKeys) {
  constexpr std::int64_t kKeys = (std::int64_t{1} << 22) + 1;
  if (any_dtype() != DType::f32) {
    GTEST_SKIP() << kernel() << " is not for f32";
  }
  std::vector<float> q = {0.5F, -1}, k = {2, 0.25F}, v = {3, -7};
  AttentionProblem problem{.seqlen_q = 1, .seqlen_kv = kKeys, .head_dim = 2, .softmax_scale = 1.0F};
  const Result<Plan> planned = plan(problem, Device::cpu(), {.kernel = kernel(), .threads = 2});
  ASSERT_TRUE(planned) << planned.status().message();
  const Reserved workspace(static_cast<std::size_t>(planned->workspace_bytes()) + 64);
  std::vector<float> o(2), lse(1);
  TensorView keys = TensorView::contiguous(k.data(), DType::f32, 1, kKeys, 1, 2);
  keys.stride_seqlen = keys.stride_batch = 0;
  TensorView values = keys;
  values.data = v.data();
  const Status status =
      planned->forward({TensorView::contiguous(q.data(), DType::f32, 1, 1, 1, 2), keys, values},
                       {TensorView::contiguous(o.data(), DType::f32, 1, 1, 1, 2),
                        LseView::contiguous(lse.data(), 1, 1, 1)},
                       {workspace.data(), planned->workspace_bytes()});
  ASSERT_TRUE(status) << status.message();
  EXPECT_NEAR(o[0], 3, 3e-6);
  EXPECT_NEAR(o[1], -7, 7e-6);
  EXPECT_NEAR(lse[0], 0.75 + std::log(static_cast<double>(kKeys)), 4e-6);
}

// I6: 33 728 keys, past what 16 bits hold; zeros in, zeros out, and four rows against the oracle.
TEST_P(ForwardOffsets, KeysBeyond16Bits) {
  Case c{.problem = {.head_dim = 256}};
  c.lengths({4}, {33728});
  RAFTER_SKIP_IF_REFUSED(c, kernel());
  Values zeros = make_values(c);
  static const Values kValues = make_values(c);
  static const Expected kExpected = expect_values(c, kValues);
  EXPECT_TRUE(close_to(run_case(c, kValues, options()), kExpected, c));
  std::fill(zeros.q.begin(), zeros.q.end(), 0.0F);
  std::fill(zeros.k.begin(), zeros.k.end(), 0.0F);
  std::fill(zeros.v.begin(), zeros.v.end(), 0.0F);
  const Output output = run_case(c, zeros, options());
  for (const float value : output.o) {
    EXPECT_EQ(value, 0.0F);
  }
  for (const float lse : output.lse) {
    EXPECT_NEAR(lse, std::log(33728.0), 2e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, ForwardOffsets, ::testing::ValuesIn(cpu_kernels()),
                         kernel_test_name);

}  // namespace
}  // namespace rafter::testing
