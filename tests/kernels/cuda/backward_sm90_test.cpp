// backward_sm90 against float64 and against itself.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/backward_sm90_case.h"
#include "support/backward_case.h"

namespace rafter::testing {
namespace {

RunOptions options() { return {.kernel = "backward_sm90", .device = Device::cuda()}; }

struct Named {
  std::string name;
  Case c;
  bool dlse = false;
};
std::ostream& operator<<(std::ostream& out, const Named& named) { return out << named.name; }

/// Lengths around the tiles of 64 and 128 queries and keys, at each instantiation.
std::vector<Named> table() {
  std::vector<Named> all;
  const auto add = [&all](std::string name, std::int64_t rows, std::int64_t keys,
                          AttentionProblem problem, bool dlse = false) -> Case& {
    problem.dtype = problem.dtype == DType::f32 ? DType::bf16 : problem.dtype;
    Case c{.problem = problem};
    all.push_back({std::move(name), c.lengths({rows}, {keys}), dlse});
    return all.back().c;
  };
  const Mask causal = Mask::causal(), top_left = Mask::causal(MaskAlign::top_left);
  for (const std::int64_t d : {64, 128, 256}) {
    const std::string suffix = "_d" + std::to_string(d);
    const AttentionProblem plain{.head_dim = d};
    const auto masked = [d](const Mask& mask) {
      return AttentionProblem{.heads_q = 2, .heads_kv = 1, .head_dim = d, .mask = mask};
    };
    add("one_by_one" + suffix, 1, 1, plain, true);
    add("no_key" + suffix, 70, 0, plain);
    add("no_query" + suffix, 0, 70, plain);
    for (const std::int64_t s : {63, 64, 65, 127, 128, 129}) {
      add("square_" + std::to_string(s) + suffix, s, s, plain, s % 2 == 1);
      add("causal_" + std::to_string(s) + suffix, s, s, masked(causal));
    }
    add("long" + suffix, 200, 330, masked({}), true);
    add("more_queries" + suffix, 300, 40, masked(causal), true);
    add("more_keys" + suffix, 40, 300, masked(causal), true);
    add("top_left" + suffix, 200, 90, masked(top_left), true);
    add("window" + suffix, 210, 330, masked(Mask::window(60, 19)), true);
    add("window_left" + suffix, 200, 260, masked(Mask::window(33, -1)));
    add("window_right" + suffix, 200, 260, masked(Mask::window(-1, 33)));
    add("window_diagonal" + suffix, 150, 150, masked(Mask::window(0, 0)));
    add("window_empty_rows" + suffix, 129, 17, masked(Mask::window(32, 64)), true);
    AttentionProblem capped = masked(causal);
    capped.softcap = 2.5F;
    add("softcap" + suffix, 150, 190, capped, true);
    AttentionProblem scaled = plain;
    scaled.softmax_scale = -0.1F;
    add("scale_negative" + suffix, 70, 90, scaled);
    scaled.softmax_scale = 0.0F;
    add("scale_zero" + suffix, 70, 90, scaled);
    AttentionProblem half = masked(causal);
    half.dtype = DType::f16;
    add("f16" + suffix, 150, 190, half, true);
    add("heads_first" + suffix, 70, 150, masked(causal)).style = Style::heads_first;
    AttentionProblem packed = masked(causal);
    packed.heads_q = 4;
    packed.heads_kv = 2;
    packed.layout = Layout::packed;
    add("packed" + suffix, 0, 0, packed, true)
        .lengths({33, 1, 150, 0, 12, 64}, {33, 130, 220, 7, 0, 65});
    packed.mask = {};
    packed.seqused_kv = true;
    add("packed_seqused" + suffix, 0, 0, packed).lengths({5, 0, 129}, {7, 20, 150});
    AttentionProblem used = masked(causal);
    used.seqused_kv = true;
    add("seqused" + suffix, 0, 0, used, true).lengths({97, 97, 97}, {65, 0, 130});
  }
  for (const std::int64_t d : {1, 7, 8, 20, 24, 40, 63, 72, 96, 100, 136, 192, 248, 255}) {
    add("head_dim_" + std::to_string(d), 70, 150, {.head_dim = d, .mask = causal}, true);
  }
  const std::pair<std::int64_t, std::int64_t> dims[] = {
      {192, 128}, {64, 128}, {128, 64}, {40, 256}, {256, 8}, {64, 33}, {7, 128}, {100, 250}};
  for (const auto& [d, dv] : dims) {
    add("head_dim_" + std::to_string(d) + "_v_" + std::to_string(dv), 70, 150,
        {.head_dim = d, .head_dim_v = dv, .mask = causal}, true);
  }
  AttentionProblem odd{.heads_q = 4, .heads_kv = 2, .head_dim = 100, .mask = causal};
  add("heads_first_d100", 70, 150, odd).style = Style::heads_first;
  odd.dtype = DType::f16;
  add("f16_d100", 150, 190, odd, true);
  odd.layout = Layout::packed;
  odd.seqused_kv = true;
  add("packed_seqused_d100", 0, 0, odd, true).lengths({5, 0, 129, 40}, {7, 20, 150, 0});
  add("group_7", 65, 130, {.heads_q = 7, .heads_kv = 1, .head_dim = 64, .mask = causal});
  return all;
}

class BackwardSm90Case : public ::testing::TestWithParam<Named> {};

TEST_P(BackwardSm90Case, AgreesWithFloat64AndWritesNothingElse) {
  RAFTER_NEEDS_SM90();
  const Case& c = GetParam().c;
  const BackwardValues values = make_backward_values(c, GetParam().dlse);
  RunOptions run = options();
  const Gradients gradients = run_backward(c, values, run);
  EXPECT_TRUE(close_to(gradients, expect_gradients(c, values), c));
  run.fill = Fill::zero;  // what lies around, and the workspace
  EXPECT_TRUE(same_bits(gradients, run_backward(c, values, run)));
}

INSTANTIATE_TEST_SUITE_P(Table, BackwardSm90Case, ::testing::ValuesIn(table()),
                         [](const auto& info) { return info.param.name; });

Case several(std::int64_t head_dim) {
  Case c{.problem = {.heads_q = 4,
                     .heads_kv = 2,
                     .head_dim = head_dim,
                     .dtype = DType::bf16,
                     .mask = Mask::causal(),
                     .layout = Layout::packed}};
  return c.lengths({200, 40, 333, 129}, {200, 40, 400, 129});
}

// Whatever strides o and its gradient have, and whether that is f32; the gradients' too.
TEST(BackwardSm90, StridesOfOutputsAndOfDoChangeNoBit) {
  RAFTER_NEEDS_SM90();
  Case c{.problem = {.heads_q = 2, .head_dim = 72, .dtype = DType::bf16, .mask = Mask::causal()}};
  c.lengths({70, 70}, {150, 150});
  const BackwardValues values = make_backward_values(c, true);
  RunOptions run = options();
  const Gradients reference = run_backward(c, values, run);
  for (const Style style : {Style::gaps, Style::every_other, Style::backwards}) {
    run.style_besides_qkv = style;
    EXPECT_TRUE(same_bits(reference, run_backward(c, values, run))) << static_cast<int>(style);
  }
  run.style_besides_qkv = std::nullopt;
  run.f32_o = true;
  EXPECT_TRUE(same_bits(reference, run_backward(c, values, run)));
  run.index_dtype = DType::i64;
  run.problem_dtype_out = true;
  Gradients rounded = reference;
  for (std::vector<float>* tensor : {&rounded.dq, &rounded.dk, &rounded.dv}) {
    for (float& x : *tensor) {
      x = round_to(DType::bf16, x);
    }
  }
  EXPECT_TRUE(same_bits(rounded, run_backward(c, values, run)));
}

// N1, N2: logits so far below 0 that exp(−lse) overflows, on partial tiles.
TEST(BackwardSm90, VeryNegativeLseOnPartialTiles) {
  RAFTER_NEEDS_SM90();
  const std::pair<std::int64_t, std::int64_t> shapes[] = {
      {1, 97},    {1, 128},   {64, 64},   {192, 192}, {320, 320},
      {640, 640}, {704, 704}, {768, 768}, {832, 832}, {131, 70}};
  for (const auto& [rows, keys] : shapes) {
    SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(keys) + " keys");
    Case c{.problem = {.head_dim = 64, .dtype = DType::bf16, .mask = Mask::causal()}};
    c.lengths({rows}, {keys});
    BackwardValues values = make_backward_values(c, false);
    for (std::size_t i = 0; i < values.in.q.size(); ++i) {
      values.in.q[i] = round_to(DType::bf16, i % 64 == 0 ? 1.0F : values.in.q[i] / 16);
    }
    for (std::size_t i = 0; i < values.in.k.size(); ++i) {
      values.in.k[i] = round_to(DType::bf16, i % 64 == 0 ? -960.0F : values.in.k[i] / 16);
    }
    set_output(c, values);
    EXPECT_TRUE(close_to(run_backward(c, values, options()), expect_gradients(c, values), c));
  }
}

// D4: a sequence alone, and among others packed: the same bits.
TEST(BackwardSm90, ASequenceHasTheSameBitsAloneAndAmongOthers) {
  RAFTER_NEEDS_SM90();
  const Case packed = several(128);
  const BackwardValues values = make_backward_values(packed, true);
  const Gradients all = run_backward(packed, values, options());
  Case alone = packed;
  alone.problem.layout = Layout::dense;
  alone.lengths({333}, {400});  // rows 240 … 572, keys 240 … 639
  const auto part = [](const std::vector<float>& v, std::int64_t first, std::int64_t rows,
                       std::int64_t width) {
    return std::vector<float>(v.begin() + first * width, v.begin() + (first + rows) * width);
  };
  const auto rows = [&](const std::vector<float>& v, std::int64_t width) {
    return part(v, 240, 333, width);
  };
  const auto keys = [&](const std::vector<float>& v) { return part(v, 240, 400, 2 * 128); };
  const BackwardValues mine{
      .in = {rows(values.in.q, 4 * 128), keys(values.in.k), keys(values.in.v)},
      .o = rows(values.o, 4 * 128),
      .d_o = rows(values.d_o, 4 * 128),
      .lse = rows(values.lse, 4),
      .dlse = rows(values.dlse, 4)};
  const Gradients one = run_backward(alone, mine, options());
  EXPECT_TRUE(same_bits({rows(all.dq, 4 * 128), keys(all.dk), keys(all.dv)}, one));
}

// 200 runs give the same bits while another stream keeps the device busy with the same kernel, so
// that each has some of the SMs only.
TEST(BackwardSm90, RepeatsAreBitwiseEqualBesideAnotherStream) {
  RAFTER_NEEDS_SM90();
  for (const std::int64_t head_dim : {64, 128, 256}) {
    Loaded loaded(shape(6, 1100, head_dim, Mask::causal()), 1);
    Loaded busy(shape(3, 1500, head_dim), 2);
    cudaStream_t stream = nullptr, beside = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), cudaSuccess);
    std::vector<std::uint16_t> first;
    for (int i = 0; i < 200; ++i) {
      busy.run(beside);
      loaded.run(stream);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      if (i == 0) {
        first = loaded.bits();
      } else {
        ASSERT_TRUE(loaded.bits() == first) << "run " << i;
      }
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    (void)cudaStreamDestroy(stream);
    (void)cudaStreamDestroy(beside);
  }
}

TEST(BackwardSm90, RunsInAGraphWithTheSameBits) {
  RAFTER_NEEDS_SM90();
  Loaded loaded(shape(3, 300, 128, Mask::causal()), 1);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t runnable = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  loaded.run(stream);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  const std::vector<std::uint16_t> once = loaded.bits();
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  loaded.run(stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&runnable, graph, 0), cudaSuccess);
  for (int i = 0; i < 3; ++i) {
    loaded.poison();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(runnable, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(loaded.bits(), once);
  }
  for (const DeviceBuffer* one : {&loaded.dq, &loaded.dk, &loaded.dv, &loaded.workspace}) {
    EXPECT_TRUE(one->guards_intact());
  }
  (void)cudaGraphExecDestroy(runnable);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

// I9: keys of a sequence without queries and queries of one without keys.
TEST(BackwardSm90, SequencesWithoutQueriesOrKeysHaveGradientZero) {
  RAFTER_NEEDS_SM90();
  for (const std::int64_t head_dim : {64, 128, 256}) {
    Case c{.problem = {.heads_q = 4,
                       .heads_kv = 1,
                       .head_dim = head_dim,
                       .dtype = DType::bf16,
                       .layout = Layout::packed}};
    c.lengths({0, 90, 70, 0}, {190, 130, 0, 7});
    const Gradients g = run_backward(c, make_backward_values(c, true), options());
    const auto zeros = [head_dim](const std::vector<float>& v, std::int64_t heads,
                                  std::int64_t first, std::int64_t count) {
      const auto from = v.begin() + first * heads * head_dim;
      return std::all_of(from, from + count * heads * head_dim, [](float x) { return x == 0.0F; });
    };
    for (const std::vector<float>* one : {&g.dk, &g.dv}) {
      EXPECT_TRUE(zeros(*one, 1, 0, 190) && zeros(*one, 1, 320, 7)) << head_dim;
      EXPECT_FALSE(zeros(*one, 1, 190, 130)) << head_dim;
    }
    EXPECT_TRUE(zeros(g.dq, 4, 90, 70)) << head_dim;
    EXPECT_FALSE(zeros(g.dq, 4, 0, 90)) << head_dim;
  }
}

TEST(BackwardSm90, RefusesByNameWhatItDoesNotDo) {
  const auto reason = [](auto change) {
    KernelProblem problem{shape(1, 8, 128), 1, 0};
    change(problem);
    return entry().accepts(problem).reason;
  };
  EXPECT_EQ(reason([](KernelProblem&) {}), "");
  EXPECT_EQ(reason([](KernelProblem& p) { p.attention.head_dim = 100; }), "");
  EXPECT_EQ(reason([](KernelProblem& p) { p.attention.head_dim_v = 260; }),
            "head_dim 128, head_dim_v 260 is beyond 256");
  EXPECT_EQ(reason([](KernelProblem& p) { p.attention.dtype = DType::f32; }),
            "f32 is not among bf16, f16");
  EXPECT_EQ(reason([](KernelProblem& p) { p.attention.layout = Layout::paged; }),
            "layout paged is not among dense, packed");
  EXPECT_EQ(reason([](KernelProblem& p) { p.attention.seqlen_kv = std::int64_t{1} << 30; }),
            "more than 2^29 rows, or 2^27 query tiles");
  EXPECT_NE(reason([](KernelProblem& p) { p.device_index = 1000; }).find("no CUDA device"),
            std::string::npos);
}

// dQ in f32 and in 16 bits dO, lse and delta of each query tile, and its turn.
TEST(BackwardSm90, ItsWorkspaceGrowsWithTheQueriesAlone) {
  const auto bytes = [](std::int64_t heads, std::int64_t seqlen_q, std::int64_t seqlen_kv) {
    KernelProblem problem{shape(heads, seqlen_q, 128), 1, 0};
    problem.attention.seqlen_kv = seqlen_kv;
    return entry().workspace(problem);
  };
  EXPECT_EQ(bytes(4, 640, 640), bytes(4, 640, 64000));
  constexpr std::int64_t kTiles = 64 * 100, kTurns = 25728;  // 64 + 4 · 6400, rounded up to 128
  EXPECT_EQ(bytes(64, 6400, 64), kTurns + kTiles * (2 * 64 * 4 + 64 * 128 * 4 + 64 * 128 * 2));
}

TEST(BackwardSm90, NamesTheStrideThatTheCopyEngineCannotRead) {
  RAFTER_NEEDS_SM90();
  const Loaded loaded(shape(2, 8, 64), 1);
  TensorView q = TensorView::contiguous(loaded.q.data(), DType::bf16, 1, 8, 2, 64);
  const TensorView k = q;
  q.stride_seqlen = 132;
  const LseView lse = LseView::contiguous(static_cast<float*>(loaded.lse.data()), 1, 2, 8);
  const Status status = entry().backward(
      {loaded.problem,
       {.q = q, .k = k, .v = k, .o = k, .lse = lse, .d_o = k},
       {k, k, k},
       {loaded.workspace.data(), static_cast<std::int64_t>(loaded.workspace.bytes())},
       {}});
  EXPECT_EQ(status.message(), "q.stride_seqlen: 132 given; multiples of 8 elements from 0 allowed");
}

}  // namespace
}  // namespace rafter::testing
