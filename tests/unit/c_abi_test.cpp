// The C ABI: the same results as the C++ API, structs that may grow, errors that name the field.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <thread>
#include <vector>

#include "rafter/attention.h"
#include "support/c_abi_case.h"

namespace rafter::c_abi_case {
namespace {

// What a program compiled today relies on: these numbers never change, structs grow at the end.
static_assert(sizeof(rafter_tensor) == 80 && sizeof(rafter_lse) == 56);
static_assert(sizeof(rafter_indices) == 32 && sizeof(rafter_state) == 136);
static_assert(offsetof(rafter_problem, num_pages) == 136);
static_assert(offsetof(rafter_problem, kv_dtype) == 144);
static_assert(offsetof(rafter_plan_options, device_spec) == 40);
static_assert(offsetof(rafter_plan_options, pass) == 48);
static_assert(offsetof(rafter_forward_args, stream) == 528);
static_assert(sizeof(rafter_bits) == 32 && sizeof(rafter_counts) == 16);
static_assert(offsetof(rafter_forward_args, bad_pages) == 728);
static_assert(offsetof(rafter_backward_args, stream) == 872);
static_assert(offsetof(rafter_cost, near_ridge) == 116);

TEST_F(CAbi, AForwardHasTheBitsOfTheCppApi) {
  make(causal_problem());
  Call run(rafter_plan_workspace_bytes(plan_));
  ASSERT_EQ(rafter_forward(plan_, &run.args), RAFTER_OK) << rafter_error_message();

  const Result<Plan> plan = rafter::plan({.batch = kBatch,
                                          .heads_q = kHeads,
                                          .heads_kv = kHeadsKv,
                                          .seqlen_q = kSeqlen,
                                          .seqlen_kv = kSeqlen,
                                          .head_dim = kDim,
                                          .mask = Mask::causal()},
                                         Device::cpu());
  ASSERT_TRUE(plan);
  Call cpp(plan->workspace_bytes());
  const auto view = [](const std::vector<float>& data, std::int64_t heads) {
    return TensorView::contiguous(data.data(), DType::f32, kBatch, kSeqlen, heads, kDim);
  };
  ASSERT_TRUE(plan->forward(
      {.q = view(cpp.q, kHeads), .k = view(cpp.k, kHeadsKv), .v = view(cpp.v, kHeadsKv)},
      {.o = view(cpp.o, kHeads),
       .lse = LseView::contiguous(cpp.lse.data(), kBatch, kHeads, kSeqlen)},
      {cpp.workspace.data(), plan->workspace_bytes()}));
  EXPECT_TRUE(same(run.o, cpp.o));
  EXPECT_TRUE(same(run.lse, cpp.lse));
  EXPECT_EQ(plan->kernel(), rafter_plan_kernel(plan_));
  EXPECT_EQ(plan->explain(), rafter_plan_explain(plan_));
}

TEST_F(CAbi, EveryOptionOfAProblemChangesTheResult) {
  make(causal_problem());
  Call first(rafter_plan_workspace_bytes(plan_));
  ASSERT_EQ(rafter_forward(plan_, &first.args), RAFTER_OK);
  std::vector<rafter_problem> others(5, causal_problem());
  others[0].mask = RAFTER_MASK_NONE;
  others[1].mask = RAFTER_MASK_WINDOW;
  others[1].window_left = 5;
  others[2].has_softmax_scale = 1;  // a scale of 0 is meant
  others[3].softcap = 0.5f;
  others[4].mask = RAFTER_MASK_WINDOW;
  others[4].window_left = 5;
  others[4].window_right = -1;
  for (const rafter_problem& problem : others) {
    rafter_plan* plan = nullptr;
    ASSERT_EQ(rafter_plan_create(&problem, nullptr, &plan), RAFTER_OK) << rafter_error_message();
    Call run(rafter_plan_workspace_bytes(plan));
    EXPECT_EQ(rafter_forward(plan, &run.args), RAFTER_OK) << rafter_error_message();
    EXPECT_FALSE(same(run.o, first.o)) << &problem - others.data();
    rafter_plan_destroy(plan);
  }
}

TEST_F(CAbi, AnOptionThatWouldBeIgnoredIsRefused) {
  rafter_problem problem = causal_problem();
  problem.window_left = 4;
  expect_refused(problem, RAFTER_INVALID_ARGUMENT, "window_left");
  problem = causal_problem();
  problem.softmax_scale = 0.5f;
  expect_refused(problem, RAFTER_INVALID_ARGUMENT, "softmax_scale");
}

TEST_F(CAbi, ImpossibleValuesAreNamed) {
  rafter_problem problem = causal_problem();
  problem.head_dim = 300;
  expect_refused(problem, RAFTER_INVALID_ARGUMENT, "head_dim");
  EXPECT_STREQ(rafter_error_message(), "head_dim: 300 given; 1 to 256 allowed");
  problem = causal_problem();
  problem.dtype = 0;
  expect_refused(problem, RAFTER_INVALID_ARGUMENT, "dtype");
  problem = causal_problem();
  problem.mask = 7;
  expect_refused(problem, RAFTER_INVALID_ARGUMENT, "mask");
  problem = causal_problem();
  problem.kv_dtype = 99;
  expect_refused(problem, RAFTER_INVALID_ARGUMENT, "kv_dtype");
  problem = causal_problem();
  problem.tree_mask = 2;
  expect_refused(problem, RAFTER_INVALID_ARGUMENT, "tree_mask");
  rafter_plan_options options{};
  options.size = sizeof(options);
  options.kernel = "forward_abacus";
  expect_refused(causal_problem(), RAFTER_INVALID_ARGUMENT, "kernel", &options);
  options.kernel = nullptr;
  options.pass = 2;
  expect_refused(causal_problem(), RAFTER_INVALID_ARGUMENT, "pass", &options);
  options.pass = RAFTER_PASS_FORWARD;
  options.device_spec = "abacus";
  expect_refused(causal_problem(), RAFTER_INVALID_ARGUMENT, "device", &options);
  options.device_spec = "/nowhere/device.json";
  expect_refused(causal_problem(), RAFTER_IO_ERROR, "/nowhere/device.json", &options);
}

TEST_F(CAbi, NullAndEmptyStructsAreErrorsAndNotCrashes) {
  const rafter_problem problem = causal_problem();
  EXPECT_EQ(rafter_plan_create(nullptr, nullptr, &plan_), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "problem");
  EXPECT_EQ(rafter_plan_create(&problem, nullptr, nullptr), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "plan");
  EXPECT_EQ(rafter_forward(nullptr, nullptr), RAFTER_INVALID_ARGUMENT);
  EXPECT_EQ(rafter_backward(nullptr, nullptr), RAFTER_INVALID_ARGUMENT);
  EXPECT_EQ(rafter_merge(nullptr, 1, nullptr), RAFTER_INVALID_ARGUMENT);
  EXPECT_EQ(rafter_plan_cost(nullptr, nullptr), RAFTER_INVALID_ARGUMENT);
  EXPECT_EQ(rafter_explain(&problem, RAFTER_FUSED, nullptr, nullptr), RAFTER_INVALID_ARGUMENT);
  EXPECT_EQ(rafter_plan_kernel(nullptr), nullptr);
  EXPECT_EQ(rafter_plan_workspace_bytes(nullptr), -1);
  rafter_plan_destroy(nullptr);

  make(problem);
  rafter_forward_args args{};
  EXPECT_EQ(rafter_forward(plan_, &args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "args.size");
  args.size = sizeof(args);
  EXPECT_EQ(rafter_forward(plan_, &args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "q.dtype");
}

TEST_F(CAbi, ARunThatDoesNotFitItsPlanWritesNothing) {
  make(causal_problem());
  Call run(rafter_plan_workspace_bytes(plan_));
  run.args.k.shape[1] -= 1;
  EXPECT_EQ(rafter_forward(plan_, &run.args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "k.seqlen");
  for (const float value : run.o) {
    EXPECT_TRUE(std::isnan(value));
  }
}

/// A later version of a struct: the same, with fields behind it.
struct LaterProblem {
  rafter_problem known;
  std::int64_t unknown[2];
};

TEST_F(CAbi, ALargerStructRunsUnlessItUsesWhatIsNotKnown) {
  LaterProblem later{causal_problem(), {0, 0}};
  later.known.size = sizeof(later);
  make(later.known);
  later.unknown[1] = 1;
  expect_refused(later.known, RAFTER_INVALID_ARGUMENT, "problem.size");
}

TEST_F(CAbi, AnOlderStructEndsWhereItSays) {
  rafter_problem older = causal_problem();
  older.kv_dtype = 77;  // not the program's: it was compiled when the struct ended here
  older.size = offsetof(rafter_problem, kv_dtype);
  make(older);
  older.size -= 8;  // no version was that small
  expect_refused(older, RAFTER_INVALID_ARGUMENT, "problem.size");
}

TEST_F(CAbi, ErrorsBelongToTheirThread) {
  rafter_problem problem = causal_problem();
  problem.head_dim = 0;
  expect_refused(problem, RAFTER_INVALID_ARGUMENT, "head_dim");
  std::thread([] { EXPECT_STREQ(rafter_error_message(), ""); }).join();
  EXPECT_STREQ(rafter_error_parameter(), "head_dim");
}

TEST_F(CAbi, PackedSequencesHaveTheBitsOfDenseOnes) {
  make(causal_problem());
  Call dense(rafter_plan_workspace_bytes(plan_));
  ASSERT_EQ(rafter_forward(plan_, &dense.args), RAFTER_OK);

  rafter_problem problem = causal_problem();
  problem.layout = RAFTER_PACKED;
  problem.total_q = problem.total_kv = kBatch * kSeqlen;
  rafter_plan* plan = nullptr;
  ASSERT_EQ(rafter_plan_create(&problem, nullptr, &plan), RAFTER_OK) << rafter_error_message();
  Call packed(rafter_plan_workspace_bytes(plan));
  for (rafter_tensor* t : {&packed.args.q, &packed.args.k, &packed.args.v, &packed.args.o}) {
    *t = rafter_contiguous(t->data, t->dtype, 1, kBatch * kSeqlen, t->shape[2], t->shape[3]);
  }
  packed.args.lse = rafter_contiguous_lse(packed.lse.data(), 1, kHeads, kBatch * kSeqlen);
  const std::int64_t offsets[] = {0, kSeqlen, 2 * kSeqlen};
  packed.args.cu_seqlens_q = packed.args.cu_seqlens_kv = {offsets, 1, 3, RAFTER_I64, 0};
  EXPECT_EQ(rafter_forward(plan, &packed.args), RAFTER_OK) << rafter_error_message();
  EXPECT_TRUE(same(packed.o, dense.o));
  packed.args.cu_seqlens_q.rows = 3;
  packed.args.cu_seqlens_q.cols = 1;
  EXPECT_EQ(rafter_forward(plan, &packed.args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "cu_seqlens_q");
  rafter_plan_destroy(plan);
}

TEST_F(CAbi, MergingWithAnEmptyStateKeepsTheBits) {
  std::vector<float> o = Call::wave(2 * 3 * 4, 0.7f), lse = Call::wave(2 * 3, 0.9f);
  std::vector<float> nothing(o.size(), std::nanf(""));
  std::vector<float> empty(lse.size(), -std::numeric_limits<float>::infinity());
  std::vector<float> o_merged(o.size()), lse_merged(lse.size());
  const auto state = [](std::vector<float>& o_, std::vector<float>& lse_) {
    return rafter_state{rafter_contiguous(o_.data(), RAFTER_F32, 1, 3, 2, 4),
                        rafter_contiguous_lse(lse_.data(), 1, 2, 3)};
  };
  const rafter_state parts[] = {state(nothing, empty), state(o, lse)};
  const rafter_state merged = state(o_merged, lse_merged);
  ASSERT_EQ(rafter_merge(parts, 2, &merged), RAFTER_OK) << rafter_error_message();
  EXPECT_TRUE(same(o_merged, o));
  EXPECT_TRUE(same(lse_merged, lse));
  EXPECT_EQ(rafter_merge(parts, 0, &merged), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "states");
}

TEST_F(CAbi, CostsAreThoseOfTheModel) {
  rafter_problem problem = causal_problem();
  problem.dtype = RAFTER_BF16;
  rafter_cost cost{};
  cost.size = sizeof(cost);
  ASSERT_EQ(rafter_explain(&problem, RAFTER_UNFUSED, "h100-sxm", &cost), RAFTER_OK)
      << rafter_error_message();
  const AttentionProblem same_problem{.batch = kBatch,
                                      .heads_q = kHeads,
                                      .heads_kv = kHeadsKv,
                                      .seqlen_q = kSeqlen,
                                      .seqlen_kv = kSeqlen,
                                      .head_dim = kDim,
                                      .dtype = DType::bf16,
                                      .mask = Mask::causal()};
  const Result<Cost> counted = attention_cost(same_problem, Pipeline::unfused);
  const Result<Prediction> predicted = predict(*counted, *find_device("h100-sxm"));
  EXPECT_EQ(cost.flops, counted->flops);
  EXPECT_EQ(cost.bytes, counted->bytes);
  EXPECT_EQ(cost.time_s, predicted->time_s);
  EXPECT_EQ(cost.wall, RAFTER_WALL_DISPATCH);
  EXPECT_EQ(cost.size, sizeof(cost));

  make(causal_problem());
  ASSERT_EQ(rafter_plan_cost(plan_, &cost), RAFTER_OK);
  EXPECT_GT(cost.time_s, 0);
  cost.size = 8;
  EXPECT_EQ(rafter_plan_cost(plan_, &cost), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "cost.size");
}

TEST_F(CAbi, NamesOfStatuses) {
  EXPECT_STREQ(rafter_status_name(RAFTER_OK), "ok");
  EXPECT_STREQ(rafter_status_name(RAFTER_IO_ERROR), "i/o error");
  EXPECT_STREQ(rafter_status_name(99), "unknown");
  EXPECT_STREQ(rafter_status_name(-1), "unknown");
}

}  // namespace
}  // namespace rafter::c_abi_case
