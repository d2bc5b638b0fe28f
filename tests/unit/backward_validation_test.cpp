// What a backward plan and run refuse, by name; and on an error nothing is written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "rafter/attention.h"
#include "rafter/kernels.h"

namespace rafter {
namespace {

using ::testing::HasSubstr;

constexpr float kUntouched = 12345.0F;
constexpr std::int64_t kRows = 3, kKeys = 5, kHeads = 2, kDim = 4;

/// A correct call; tests spoil one thing of it.
struct Call {
  AttentionProblem problem{
      .heads_q = kHeads, .seqlen_q = kRows, .seqlen_kv = kKeys, .head_dim = kDim};
  PlanOptions options{.pass = Pass::backward, .threads = 1};
  std::vector<float> q, k, v, o, d_o, lse, dlse, dq, dk, dv;
  alignas(64) std::byte scratch[1 << 21];
  BackwardInputs in;
  BackwardOutputs out;
  Workspace workspace;

  Call() {
    const auto query = [](std::vector<float>& data, float value) {
      data.assign(kRows * kHeads * kDim, value);
      return TensorView::contiguous(data.data(), DType::f32, 1, kRows, kHeads, kDim);
    };
    const auto key = [](std::vector<float>& data, float value) {
      data.assign(kKeys * kHeads * kDim, value);
      return TensorView::contiguous(data.data(), DType::f32, 1, kKeys, kHeads, kDim);
    };
    const auto row = [](std::vector<float>& data) {
      data.assign(kRows * kHeads, 1.0F);
      return LseView::contiguous(data.data(), 1, kHeads, kRows);
    };
    in = {.q = query(q, 1),
          .k = key(k, 1),
          .v = key(v, 1),
          .o = query(o, 1),
          .lse = row(lse),
          .d_o = query(d_o, 1),
          .dlse = row(dlse)};
    out = {query(dq, kUntouched), key(dk, kUntouched), key(dv, kUntouched)};
    workspace = {scratch, sizeof(scratch)};
  }
  Status run() const {
    const Result<Plan> planned = plan(problem, Device::cpu(), options);
    return planned ? planned->backward(in, out, workspace) : planned.status();
  }
  bool untouched() const {
    const auto all = [](const std::vector<float>& data) {
      return std::all_of(data.begin(), data.end(), [](float x) { return x == kUntouched; });
    };
    return all(dq) && all(dk) && all(dv);
  }
};

struct Refusal {
  const char* name;
  void (*spoil)(Call&);
  const char* message;
};
const Refusal kRefusals[] = {
    {"q_heads", [](Call& c) { c.in.q.heads = 3; }, "q.heads: 3 given; 2 allowed"},
    {"d_o_rows", [](Call& c) { c.in.d_o.seqlen = 4; }, "d_o.seqlen: 4 given; 3 allowed"},
    {"o_null", [](Call& c) { c.in.o.data = nullptr; },
     "o: null given; a pointer to its elements allowed"},
    {"lse_null", [](Call& c) { c.in.lse.data = nullptr; },
     "lse: null given; a pointer to its elements allowed"},
    {"dlse_heads", [](Call& c) { c.in.dlse.heads = 1; }, "dlse.heads: 1 given; 2 allowed"},
    {"k_dtype", [](Call& c) { c.in.k.dtype = DType::bf16; },
     "k.dtype: bf16 given; f32 (the problem's dtype) allowed"},
    {"dv_dtype", [](Call& c) { c.out.dv.dtype = DType::bf16; },
     "dv.dtype: bf16 given; f32 allowed"},
    {"dk_shape", [](Call& c) { c.out.dk.head_dim = 2; }, "dk.head_dim: 2 given; 4 allowed"},
    {"dq_is_q", [](Call& c) { c.out.dq = c.in.q; },
     "dq: memory that overlaps q given; an output apart from all other tensors allowed"},
    {"dk_is_dv", [](Call& c) { c.out.dk = c.out.dv; },
     "dk: memory that overlaps dv given; an output apart from all other tensors allowed"},
    {"dq_expanded", [](Call& c) { c.out.dq.stride_seqlen = 0; },
     "dq.stride_seqlen: 0 given; strides of an output that keep its elements apart: here more than "
     "0 allowed"},
    {"workspace", [](Call& c) { c.workspace.bytes = 8; }, nullptr},
    {"cu_seqlens",
     [](Call& c) {
       c.in.cu_seqlens_q = {c.q.data(), DType::i32, 2};
     },
     "cu_seqlens_q: an array given; none (it belongs to the packed layout) allowed"},
    {"paged",
     [](Call& c) {
       c.problem.layout = Layout::paged;
       c.problem.page_size = 1;
       c.problem.num_pages = 5;
     },
     "layout: paged with pass = backward is not supported: dense or packed (pages may be shared; a "
     "gradient cannot be)"},
    {"int8_keys", [](Call& c) { c.problem.kv_dtype = DType::int8; },
     "kv_dtype: int8 with pass = backward is not supported: only f32, as q"},
    {"forward_kernel", [](Call& c) { c.options.kernel = "forward_reference"; }, nullptr},
    {"half_fused", [](Call& c) { c.options.pipeline = Pipeline::half_fused; }, nullptr},
    {"splits", [](Call& c) { c.options.splits = 2; }, nullptr},
};

TEST(Backward, RefusesByNameAndWritesNothing) {
  for (const Refusal& refusal : kRefusals) {
    SCOPED_TRACE(refusal.name);
    Call call;
    refusal.spoil(call);
    const Status status = call.run();
    EXPECT_FALSE(status);
    if (refusal.message != nullptr) {
      EXPECT_EQ(status.message(), refusal.message);
    }
    EXPECT_TRUE(call.untouched());
  }
  Call call;
  const Status status = call.run();
  EXPECT_TRUE(status) << status.message();
  EXPECT_FALSE(call.untouched());
}

TEST(Backward, APlanRunsItsOwnPass) {
  Call call;
  const Result<Plan> backward = plan(call.problem, Device::cpu(), call.options);
  ASSERT_TRUE(backward) << backward.status().message();
  EXPECT_EQ(backward->pass(), Pass::backward);
  const ForwardInputs in{.q = call.in.q, .k = call.in.k, .v = call.in.v};
  EXPECT_EQ(backward->forward(in, {.o = call.out.dq}, call.workspace).message(),
            "plan: a plan of the backward pass given; one made with PlanOptions::pass = forward "
            "allowed");
  const Result<Plan> forward = plan(call.problem, Device::cpu(), {.threads = 1});
  ASSERT_TRUE(forward) << forward.status().message();
  EXPECT_EQ(forward->pass(), Pass::forward);
  EXPECT_EQ(forward->backward(call.in, call.out, call.workspace).parameter(), "plan");
  EXPECT_TRUE(call.untouched());
}

TEST(Backward, ThePlanCarriesTheCostOfItsPass) {
  Call call;
  const Result<Plan> planned = plan(call.problem, Device::cpu(), call.options);
  ASSERT_TRUE(planned) << planned.status().message();
  const Result<Cost> cost = attention_cost(planned->problem(), planned->pipeline(), Pass::backward);
  ASSERT_TRUE(cost);
  EXPECT_EQ(planned->cost().flops, cost->flops);
  EXPECT_THAT(planned->explain(), HasSubstr("attention backward"));
  for (const Candidate& candidate : planned->candidates()) {
    EXPECT_EQ(candidate.kernel.rfind("backward_", 0), 0U) << candidate.kernel;
  }
}

TEST(Backward, NothingNeedsNoPointers) {
  AttentionProblem problem{.batch = 0, .seqlen_q = 4, .seqlen_kv = 4, .head_dim = 8};
  const Result<Plan> planned = plan(problem, Device::cpu(), {.pass = Pass::backward, .threads = 1});
  ASSERT_TRUE(planned) << planned.status().message();
  const auto empty = TensorView::contiguous(nullptr, DType::f32, 0, 4, 1, 8);
  const LseView lse = LseView::contiguous(nullptr, 0, 1, 4);
  Call call;
  const Status status =
      planned->backward({.q = empty, .k = empty, .v = empty, .o = empty, .lse = lse, .d_o = empty},
                        {empty, empty, empty}, call.workspace);
  EXPECT_TRUE(status) << status.message();
}

}  // namespace
}  // namespace rafter
