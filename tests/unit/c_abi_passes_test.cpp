// The C ABI beyond a plain forward pass: gradients, and keys and values kept in eight bits.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "rafter/attention.h"
#include "support/c_abi_case.h"

namespace rafter::c_abi_case {
namespace {

AttentionProblem same_problem() {
  return {.batch = kBatch,
          .heads_q = kHeads,
          .heads_kv = kHeadsKv,
          .seqlen_q = kSeqlen,
          .seqlen_kv = kSeqlen,
          .head_dim = kDim,
          .mask = Mask::causal()};
}

rafter_plan_options backward_options() {
  rafter_plan_options options{};
  options.size = sizeof(options);
  options.pass = RAFTER_PASS_BACKWARD;
  return options;
}

/// The one kernel that takes whatever the API describes.
rafter_plan_options reference_options() {
  rafter_plan_options options{};
  options.size = sizeof(options);
  options.kernel = "forward_reference";
  return options;
}

TensorView view(const void* data, std::int64_t heads, DType dtype = DType::f32,
                std::int64_t head_dim = kDim) {
  return TensorView::contiguous(data, dtype, kBatch, kSeqlen, heads, head_dim);
}

/// A forward pass that has run, gradients of its outputs, and where the others go.
struct BackwardCall : Call {
  std::vector<float> d_o, dlse, dq, dk, dv;
  rafter_backward_args backward{};

  BackwardCall(const rafter_plan* forward_plan, std::int64_t workspace_bytes)
      : Call(rafter_plan_workspace_bytes(forward_plan)) {
    EXPECT_EQ(rafter_forward(forward_plan, &args), RAFTER_OK) << rafter_error_message();
    d_o = wave(kBatch * kSeqlen * kHeads * kDim, 0.29f);
    dlse = wave(kBatch * kSeqlen * kHeads, 0.47f);
    dq.resize(q.size(), std::nanf(""));
    dk.resize(k.size(), std::nanf(""));
    dv.resize(v.size(), std::nanf(""));
    workspace.resize(static_cast<std::size_t>(workspace_bytes / 64 + 1));
    const auto tensor = [](std::vector<float>& data, std::int64_t heads) {
      return rafter_contiguous(data.data(), RAFTER_F32, kBatch, kSeqlen, heads, kDim);
    };
    backward.size = sizeof(backward);
    backward.q = args.q;
    backward.k = args.k;
    backward.v = args.v;
    backward.o = args.o;
    backward.lse = args.lse;
    backward.d_o = tensor(d_o, kHeads);
    backward.dlse = rafter_contiguous_lse(dlse.data(), kBatch, kHeads, kSeqlen);
    backward.dq = tensor(dq, kHeads);
    backward.dk = tensor(dk, kHeadsKv);
    backward.dv = tensor(dv, kHeadsKv);
    backward.workspace = workspace.data();
    backward.workspace_bytes = workspace_bytes;
  }
};

class CAbiBackward : public CAbi {
 protected:
  CAbiBackward() {
    const rafter_problem problem = causal_problem();
    EXPECT_EQ(rafter_plan_create(&problem, nullptr, &forward_plan_), RAFTER_OK);
    const rafter_plan_options options = backward_options();
    make(problem, &options);
  }
  ~CAbiBackward() override { rafter_plan_destroy(forward_plan_); }
  BackwardCall call() { return {forward_plan_, rafter_plan_workspace_bytes(plan_)}; }
  rafter_plan* forward_plan_ = nullptr;
};

TEST_F(CAbiBackward, HasTheBitsOfTheCppApi) {
  BackwardCall c = call();
  ASSERT_EQ(rafter_backward(plan_, &c.backward), RAFTER_OK) << rafter_error_message();

  const Result<Plan> plan = rafter::plan(same_problem(), Device::cpu(), {.pass = Pass::backward});
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->kernel(), rafter_plan_kernel(plan_));
  std::vector<float> dq(c.dq.size()), dk(c.dk.size()), dv(c.dv.size());
  ASSERT_TRUE(plan->backward({.q = view(c.q.data(), kHeads),
                              .k = view(c.k.data(), kHeadsKv),
                              .v = view(c.v.data(), kHeadsKv),
                              .o = view(c.o.data(), kHeads),
                              .lse = LseView::contiguous(c.lse.data(), kBatch, kHeads, kSeqlen),
                              .d_o = view(c.d_o.data(), kHeads),
                              .dlse = LseView::contiguous(c.dlse.data(), kBatch, kHeads, kSeqlen)},
                             {.dq = view(dq.data(), kHeads),
                              .dk = view(dk.data(), kHeadsKv),
                              .dv = view(dv.data(), kHeadsKv)},
                             {c.workspace.data(), plan->workspace_bytes()}));
  EXPECT_TRUE(same(c.dq, dq));
  EXPECT_TRUE(same(c.dk, dk));
  EXPECT_TRUE(same(c.dv, dv));
}

TEST_F(CAbiBackward, AGradientOfLseThatIsNotGivenIsZero) {
  BackwardCall none = call(), zero = call(), some = call();
  none.backward.dlse = rafter_lse{};
  zero.dlse.assign(zero.dlse.size(), 0.0f);
  for (BackwardCall* c : {&none, &zero, &some}) {
    ASSERT_EQ(rafter_backward(plan_, &c->backward), RAFTER_OK) << rafter_error_message();
  }
  EXPECT_TRUE(same(none.dq, zero.dq));
  EXPECT_FALSE(same(none.dq, some.dq));
}

TEST_F(CAbiBackward, APlanRunsThePassThatItWasMadeFor) {
  BackwardCall c = call();
  EXPECT_EQ(rafter_backward(forward_plan_, &c.backward), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "plan") << rafter_error_message();
  EXPECT_EQ(rafter_forward(plan_, &c.args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "plan") << rafter_error_message();
  c.backward.dk.shape[2] = kHeads;
  EXPECT_EQ(rafter_backward(plan_, &c.backward), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "dk.heads") << rafter_error_message();
  c.backward.size = 8;
  EXPECT_EQ(rafter_backward(plan_, &c.backward), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "args.size");
  for (const float value : c.dk) {
    EXPECT_TRUE(std::isnan(value));
  }
}

TEST_F(CAbiBackward, ItsCostIsThatOfTheModel) {
  const rafter_problem problem = causal_problem();
  rafter_cost cost{};
  cost.size = sizeof(cost);
  ASSERT_EQ(rafter_explain_backward(&problem, RAFTER_FUSED, "h100-sxm", &cost), RAFTER_OK)
      << rafter_error_message();
  const Result<Cost> counted = attention_cost(same_problem(), Pipeline::fused, Pass::backward);
  EXPECT_EQ(cost.flops, counted->flops);
  EXPECT_EQ(cost.bytes, counted->bytes);
}

/// k and v as int8 with a factor per token and head, powers of two so that nothing is rounded.
struct QuantizedCall : Call {
  std::vector<std::int8_t> k8, v8;
  std::vector<float> k_scale, v_scale;

  explicit QuantizedCall(std::int64_t workspace_bytes) : Call(workspace_bytes) {
    const std::size_t rows = k.size() / kDim;
    for (std::size_t i = 0; i < k.size(); ++i) {
      k8.push_back(static_cast<std::int8_t>(static_cast<int>(i * 7 % 255) - 127));
      v8.push_back(static_cast<std::int8_t>(static_cast<int>(i * 11 % 255) - 127));
    }
    for (std::size_t row = 0; row < rows; ++row) {
      k_scale.push_back(std::ldexp(1.0f, -7 - static_cast<int>(row % 3)));
      v_scale.push_back(std::ldexp(1.0f, -6 - static_cast<int>(row % 2)));
    }
    args.k = rafter_contiguous(k8.data(), RAFTER_INT8, kBatch, kSeqlen, kHeadsKv, kDim);
    args.v = rafter_contiguous(v8.data(), RAFTER_INT8, kBatch, kSeqlen, kHeadsKv, kDim);
    args.k_scale = rafter_contiguous(k_scale.data(), RAFTER_F32, kBatch, kSeqlen, kHeadsKv, 1);
    args.v_scale = rafter_contiguous(v_scale.data(), RAFTER_F32, kBatch, kSeqlen, kHeadsKv, 1);
  }
};

TEST_F(CAbi, CachesInInt8HaveTheBitsOfTheCppApi) {
  rafter_problem problem = causal_problem();
  problem.kv_dtype = RAFTER_INT8;
  make(problem);
  QuantizedCall c(rafter_plan_workspace_bytes(plan_));
  ASSERT_EQ(rafter_forward(plan_, &c.args), RAFTER_OK) << rafter_error_message();

  AttentionProblem asked = same_problem();
  asked.kv_dtype = DType::int8;
  const Result<Plan> plan = rafter::plan(asked, Device::cpu());
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->kernel(), rafter_plan_kernel(plan_));
  std::vector<float> o(c.o.size());
  ASSERT_TRUE(plan->forward({.q = view(c.q.data(), kHeads),
                             .k = view(c.k8.data(), kHeadsKv, DType::int8),
                             .v = view(c.v8.data(), kHeadsKv, DType::int8),
                             .k_scale = view(c.k_scale.data(), kHeadsKv, DType::f32, 1),
                             .v_scale = view(c.v_scale.data(), kHeadsKv, DType::f32, 1)},
                            {.o = view(o.data(), kHeads)},
                            {c.workspace.data(), plan->workspace_bytes()}));
  EXPECT_TRUE(same(c.o, o));
}

TEST_F(CAbi, FactorsOfAnInt8CacheAreWantedThereAndRefusedElsewhere) {
  rafter_problem problem = causal_problem();
  problem.kv_dtype = RAFTER_INT8;
  make(problem);
  QuantizedCall c(rafter_plan_workspace_bytes(plan_));
  c.args.v_scale.data = nullptr;
  EXPECT_EQ(rafter_forward(plan_, &c.args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "v_scale") << rafter_error_message();

  make(causal_problem());
  Call floats(rafter_plan_workspace_bytes(plan_));
  floats.args.k_scale = c.args.k_scale;
  EXPECT_EQ(rafter_forward(plan_, &floats.args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "k_scale") << rafter_error_message();
}

TEST_F(CAbi, AnE4m3CacheWithoutFactorsIsItsValues) {
  rafter_problem problem = causal_problem();
  make(problem);
  Call floats(rafter_plan_workspace_bytes(plan_));
  std::vector<std::uint8_t> k8, v8;
  for (auto [values, bits] : {std::pair(&floats.k, &k8), std::pair(&floats.v, &v8)}) {
    for (float& value : *values) {
      bits->push_back(f32_to_e4m3(value));
      value = e4m3_to_f32(bits->back());
    }
  }
  ASSERT_EQ(rafter_forward(plan_, &floats.args), RAFTER_OK) << rafter_error_message();

  problem.kv_dtype = RAFTER_E4M3;
  const rafter_plan_options options = reference_options();
  make(problem, &options);
  Call eight(rafter_plan_workspace_bytes(plan_));
  eight.args.k = rafter_contiguous(k8.data(), RAFTER_E4M3, kBatch, kSeqlen, kHeadsKv, kDim);
  eight.args.v = rafter_contiguous(v8.data(), RAFTER_E4M3, kBatch, kSeqlen, kHeadsKv, kDim);
  ASSERT_EQ(rafter_forward(plan_, &eight.args), RAFTER_OK) << rafter_error_message();
  for (std::size_t i = 0; i < eight.o.size(); ++i) {
    ASSERT_NEAR(eight.o[i], floats.o[i], 1e-5f) << i;
  }
}

TEST_F(CAbi, ATreeThatIsAChainIsCausal) {
  make(causal_problem());
  Call causal(rafter_plan_workspace_bytes(plan_));
  ASSERT_EQ(rafter_forward(plan_, &causal.args), RAFTER_OK) << rafter_error_message();

  rafter_problem problem = causal_problem();
  problem.mask = RAFTER_MASK_NONE;
  problem.tree_mask = 1;
  const rafter_plan_options options = reference_options();
  make(problem, &options);
  Call tree(rafter_plan_workspace_bytes(plan_));
  EXPECT_EQ(rafter_forward(plan_, &tree.args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "tree_mask.batch") << rafter_error_message();
  std::vector<std::uint64_t> words;
  for (std::int64_t i = 0; i < kBatch * kSeqlen; ++i) {
    words.push_back((std::uint64_t{2} << (i % kSeqlen)) - 1);
  }
  tree.args.tree_mask = {words.data(), kBatch, kSeqlen, kSeqlen};
  ASSERT_EQ(rafter_forward(plan_, &tree.args), RAFTER_OK) << rafter_error_message();
  for (std::size_t i = 0; i < tree.o.size(); ++i) {
    ASSERT_NEAR(tree.o[i], causal.o[i], 1e-5f) << i;
  }
  words[1] = 2;  // the second token no longer sees the first
  Call apart(rafter_plan_workspace_bytes(plan_));
  apart.args.tree_mask = tree.args.tree_mask;
  ASSERT_EQ(rafter_forward(plan_, &apart.args), RAFTER_OK);
  EXPECT_FALSE(same(apart.o, tree.o));
}

TEST_F(CAbi, BadPagesAreCountedFromZero) {
  rafter_problem problem = causal_problem();
  problem.layout = RAFTER_PAGED;
  problem.page_size = kSeqlen;
  problem.num_pages = kBatch;
  problem.seqused_kv = 1;
  make(problem);
  Call paged(rafter_plan_workspace_bytes(plan_));
  const std::int32_t lengths[kBatch] = {kSeqlen, kSeqlen}, pages[kBatch] = {1, 0};
  std::int32_t bad[kBatch] = {7, 7};
  paged.args.seqused_kv = {lengths, 1, kBatch, RAFTER_I32, 0};
  paged.args.page_table = {pages, kBatch, 1, RAFTER_I32, 0};
  paged.args.bad_pages = {bad, kBatch};
  ASSERT_EQ(rafter_forward(plan_, &paged.args), RAFTER_OK) << rafter_error_message();
  EXPECT_EQ(bad[0], 0);
  EXPECT_EQ(bad[1], 0);
}

}  // namespace
}  // namespace rafter::c_abi_case
