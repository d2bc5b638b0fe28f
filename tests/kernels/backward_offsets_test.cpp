// I1: gradients through strides beyond 2^31 elements, with little memory: reserved address space.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <vector>

#include "support/backward_case.h"
#include "support/every_kernel.h"
#include "support/placed.h"
#include "support/reserved.h"

namespace rafter::testing {
namespace {

class BackwardOffsets : public EveryKernelTest {};

TEST_P(BackwardOffsets, StridesBeyond32BitsEqualContiguousOnes) {
  constexpr std::int64_t kBatch = 2, kRows = 2, kHeads = 2, kDim = 8;
  constexpr std::size_t kBytes = (std::size_t{1} << 33) + (1 << 20);
  const DType dtype = backward_dtypes(kernel(), {DType::f32, DType::bf16}).at(0);
  Case c{.problem = {.heads_q = kHeads, .head_dim = kDim, .dtype = dtype, .mask = Mask::causal()}};
  c.lengths({kRows, kRows}, {kRows, kRows});
  const BackwardValues values = make_backward_values(c, false);
  const Gradients expected = run_backward(c, values, options());
  std::vector<float> lse(kBatch * kHeads * kRows);
  for (std::size_t i = 0; i < lse.size(); ++i) {  // from [batch, row, head] to [batch, head, row]
    lse[i] = values.lse[i / 4 * 4 + i % 2 * 2 + i / 2 % 2];
  }
  const auto each = [](auto visit) {
    std::size_t n = 0;
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (std::int64_t i = 0; i < kRows; ++i) {
        for (std::int64_t h = 0; h < kHeads; ++h) {
          for (std::int64_t d = 0; d < kDim; ++d) {
            visit(n++, b, i, h, d);
          }
        }
      }
    }
  };
  for (const Far far : {Far::batch, Far::seqlen, Far::heads}) {
    std::array<std::unique_ptr<Reserved>, 8> spaces;
    std::array<TensorView, 8> views;  // q, k, v, o, d_o; in f32 dq, dk, dv
    for (std::size_t t = 0; t < views.size(); ++t) {
      spaces[t] = std::make_unique<Reserved>(kBytes);
      ASSERT_NE(spaces[t]->data(), nullptr) << "no address space to reserve";
      views[t] = far_view(spaces[t]->data(), far, kBatch, kRows, kHeads, kDim);
      views[t].dtype = t < 5 ? dtype : DType::f32;
    }
    const std::array<const std::vector<float>*, 5> sources = {&values.in.q, &values.in.k,
                                                              &values.in.v, &values.o, &values.d_o};
    for (std::size_t t = 0; t < sources.size(); ++t) {
      each([&](std::size_t n, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t d) {
        write(views[t], b, i, h, d, (*sources[t])[n]);
      });
    }
    const Status status =
        call_backward(sized_problem(c), kernel(),
                      {.q = views[0],
                       .k = views[1],
                       .v = views[2],
                       .o = views[3],
                       .lse = LseView::contiguous(lse.data(), kBatch, kHeads, kRows),
                       .d_o = views[4]},
                      {views[5], views[6], views[7]});
    ASSERT_TRUE(status) << status.message();
    each([&](std::size_t n, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t d) {
      EXPECT_EQ(at(views[5], b, i, h, d), expected.dq[n]) << static_cast<int>(far);
      EXPECT_EQ(at(views[6], b, i, h, d), expected.dk[n]) << static_cast<int>(far);
      EXPECT_EQ(at(views[7], b, i, h, d), expected.dv[n]) << static_cast<int>(far);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, BackwardOffsets, ::testing::ValuesIn(backward_kernels()),
                         kernel_test_name);

}  // namespace
}  // namespace rafter::testing
