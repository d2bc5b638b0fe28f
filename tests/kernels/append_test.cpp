// append() on the CPU against float64: where rows go, how they turn, what they are rounded to.
#include <gtest/gtest.h>

#include "support/append_case.h"

namespace rafter::testing {
namespace {

Status on_cpu(const AppendInputs& in, const AppendOutputs& out) {
  return append(in, out, Device::cpu());
}

TEST(Append, WritesRowsAtTheirPositionsInEveryDTypeAndLayout) {
  for (const AppendCase& c : append_cases()) {
    SCOPED_TRACE(c.name);
    AppendScene scene(c);
    const Status status = on_cpu(scene.inputs(), scene.outputs());
    ASSERT_TRUE(status) << status.message();
    scene.check();
  }
}

TEST(Append, CountsTokensPagesAndSequencesBeyond16Bits) {
  for (const AppendCase& c : append_cases_beyond_16_bits()) {
    SCOPED_TRACE(c.name);
    AppendScene scene(c);
    const Status status = on_cpu(scene.inputs(), scene.outputs());
    ASSERT_TRUE(status) << status.message();
    scene.check();
  }
}

TEST(Append, CountsTokensThatHaveNoPlace) {
  AppendCase c{.name = "beyond", .seqlen = 4, .lengths = {0, 6, 9}, .capacity = 8};
  AppendScene dense(c);
  ASSERT_TRUE(on_cpu(dense.inputs(), dense.outputs()));
  dense.check();
  EXPECT_EQ(dense.dropped(), (std::vector<std::int32_t>{0, 2, 4}));

  c.page_size = 2;
  AppendScene paged(c);
  paged.break_page(0, 1, -1);
  paged.break_page(1, 3, 1000);
  ASSERT_TRUE(on_cpu(paged.inputs(), paged.outputs()));
  paged.check();
  EXPECT_EQ(paged.dropped(), (std::vector<std::int32_t>{2, 4, 4}));

  c.rotary_dim = 4;
  c.max_position = 3;
  AppendScene turned(c);
  ASSERT_TRUE(on_cpu(turned.inputs(), turned.outputs()));
  turned.check();
  EXPECT_EQ(turned.dropped(), (std::vector<std::int32_t>{1, 4, 4}));
}

TEST(Append, TurnsQueriesInPlace) {
  AppendCase c{.name = "in place", .seqlen = 3, .lengths = {5, 0}, .rotary_dim = 8, .heads_q = 6};
  AppendScene scene(c);
  AppendOutputs out = scene.outputs();
  AppendInputs in = scene.inputs();
  out.q = in.q;
  ASSERT_TRUE(on_cpu(in, out));
  scene.check_queries(out.q);
}

TEST(Append, ReadsBackWhatAttentionThenSees) {
  AppendCase c{.name = "int8", .seqlen = 1, .lengths = {0}, .cache = DType::int8};
  AppendScene scene(c);
  scene.set_k(0, std::numeric_limits<float>::quiet_NaN());
  const AppendOutputs out = scene.outputs();
  ASSERT_TRUE(on_cpu(scene.inputs(), out));
  EXPECT_TRUE(std::isnan(static_cast<const float*>(out.k_scale.data)[0]));
  EXPECT_TRUE(std::isfinite(static_cast<const float*>(out.v_scale.data)[0]));
}

TEST(Append, RefusesByName) {
  const AppendCase plain{.name = "plain", .seqlen = 2, .lengths = {1, 3}};
  const auto refused = [&](const AppendCase& c, const auto& change) {
    AppendScene scene(c);
    AppendInputs in = scene.inputs();
    AppendOutputs out = scene.outputs();
    change(in, out);
    return on_cpu(in, out).parameter();
  };
  using In = AppendInputs;
  using Out = AppendOutputs;
  EXPECT_EQ(refused(plain, [](In& in, Out&) { in.v.seqlen = 1; }), "v.seqlen");
  EXPECT_EQ(refused(plain, [](In& in, Out&) { in.k.head_dim = 300; }), "k.head_dim");
  EXPECT_EQ(refused(plain, [](In& in, Out&) { in.k.stride_head_dim = 2; }), "k.stride_head_dim");
  EXPECT_EQ(refused(plain, [](In&, Out& out) { out.k_cache.dtype = DType::f16; }), "k_cache.dtype");
  EXPECT_EQ(refused(plain, [](In&, Out& out) { out.v_cache.heads = 1; }), "v_cache.heads");
  EXPECT_EQ(refused(plain, [](In& in, Out& out) { out.k_cache.data = in.k.data; }), "k_cache");
  EXPECT_EQ(refused(plain, [](In& in, Out&) { in.seqused_kv.size = 1; }), "seqused_kv.size");
  EXPECT_EQ(refused(plain, [](In& in, Out&) { in.seqused_kv = {}; }), "seqused_kv.size");
  EXPECT_EQ(refused(plain, [](In&, Out& out) { out.dropped.size = 3; }), "dropped.size");
  EXPECT_EQ(refused(plain, [](In& in, Out&) { in.rope.rotary_dim = 3; }), "rope.rotary_dim");
  const float table[] = {1};
  EXPECT_EQ(refused(plain, [&](In& in, Out&) { in.rope.cos = table; }), "rope.rotary_dim");
  EXPECT_EQ(refused(plain, [](In& in, Out&) { in.rope.pairs = Rope::Pairs::interleaved; }),
            "rope.rotary_dim");
  EXPECT_EQ(refused(plain, [](In& in, Out& out) { in.q = out.q = in.k; }), "q");
  EXPECT_EQ(refused(plain, [](In& in, Out&) { in.k_scale = in.k; }), "k_scale (in).batch");
  const std::int64_t negative[] = {1, -1};
  EXPECT_EQ(refused(plain,
                    [&](In& in, Out&) {
                      in.seqused_kv = {negative, DType::i64, 2, 0};
                    }),
            "seqused_kv[1]");
  const std::int64_t many[] = {1, 3};
  EXPECT_EQ(refused(plain,
                    [&](In& in, Out&) {
                      in.seqused_new = {many, DType::i64, 2, 0};
                    }),
            "seqused_new[1]");
  AppendCase int8 = plain;
  int8.cache = DType::int8;
  EXPECT_EQ(refused(int8, [](In&, Out& out) { out.v_scale = {}; }), "v_scale");
  float factor[2] = {1, 1};
  EXPECT_EQ(refused(int8,
                    [&](In& in, Out&) {
                      in.k_scale = TensorView::contiguous(factor, DType::f32, 1, 1, 2, 1);
                    }),
            "k_scale");
  AppendScene scene(plain);
  EXPECT_EQ(append(scene.inputs(), scene.outputs(), Device::cpu(), {factor}).parameter(), "stream");
  EXPECT_EQ(append(scene.inputs(), scene.outputs(), {Device::Kind::cpu, 1}).parameter(),
            "device.index");
}

}  // namespace
}  // namespace rafter::testing
