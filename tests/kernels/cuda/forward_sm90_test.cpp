// forward_sm90 against the float64 reference and against itself.
#include <cmath>
#include <cstring>

#include "kernels/cuda/forward_sm90_case.h"

namespace rafter {
namespace {

using namespace testing::forward_sm90;
using testing::DeviceBuffer;

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](std::string name, AttentionProblem p) -> Case& {
    all.push_back({.name = std::move(name),
                   .problem = p,
                   .lengths_q = {},
                   .lengths_kv = {},
                   .used = {},
                   .o_order = {},
                   .o_dtype = p.dtype});
    return all.back();
  };
  const Mask causal = Mask::causal();
  const Mask top_left = Mask::causal(MaskAlign::top_left);
  for (const std::int64_t d : {64, 128, 256}) {
    const std::string suffix = "_d" + std::to_string(d);
    add("one" + suffix, shape(1, 1, 1, 1, 1, d));
    for (const std::int64_t s : {63, 64, 65, 79, 80, 81, 127, 128, 129, 191, 192, 193, 257}) {
      add("s" + std::to_string(s) + suffix, shape(1, 2, 2, s, s, d));
      add("causal_s" + std::to_string(s) + suffix, shape(1, 2, 2, s, s, d, causal));
    }
    add("long" + suffix, shape(2, 3, 3, 700, 1030, d));
    add("long_causal" + suffix, shape(2, 3, 3, 700, 1030, d, causal));
    add("many_heads" + suffix, shape(5, 20, 4, 150, 150, d, causal));
    add("more_queries_causal" + suffix, shape(1, 2, 1, 500, 130, d, causal));
    add("more_queries_top_left" + suffix, shape(1, 2, 1, 500, 130, d, top_left));
    add("top_left" + suffix, shape(1, 2, 1, 300, 700, d, top_left));
    add("window" + suffix, shape(1, 2, 2, 600, 640, d, Mask::window(100, 37)));
    add("window_left" + suffix, shape(1, 2, 2, 600, 600, d, Mask::window(50, 0)));
    add("window_right" + suffix, shape(1, 2, 2, 500, 600, d, Mask::window(-1, 17)));
    add("window_narrow" + suffix, shape(1, 1, 1, 300, 300, d, Mask::window(0, 0)));
    add("window_top_left" + suffix,
        shape(1, 2, 2, 300, 900, d, Mask::window(70, 5, MaskAlign::top_left)));
    add("window_empty_rows" + suffix, shape(1, 1, 1, 129, 17, d, Mask::window(32, 64)));
    add("f16" + suffix, shape(2, 2, 1, 333, 444, d, causal, DType::f16));
    add("no_keys" + suffix, shape(2, 2, 1, 70, 0, d));
    add("heads_first" + suffix, shape(2, 4, 2, 200, 300, d, causal)).order = Order::heads_first;
    add("spread_strides" + suffix, shape(2, 4, 2, 200, 300, d)).order = Order::spread;
    add("o_f32" + suffix, shape(1, 2, 2, 200, 300, d)).o_dtype = DType::f32;
    Case& used = add("seqused" + suffix, shape(5, 4, 2, 150, 400, d));
    used.used = {0, 1, 130, 400, 257};
    Case& used_causal = add("seqused_causal" + suffix, shape(5, 4, 2, 150, 400, d, causal));
    used_causal.used = {0, 1, 130, 400, 257};
    used_causal.wide_indices = true;
    Case& packed = add("packed" + suffix, shape(1, 3, 1, 300, 520, d));
    packed.problem.layout = Layout::packed;
    packed.lengths_q = {5, 0, 300, 129, 1, 64};
    packed.lengths_kv = {7, 20, 300, 0, 520, 65};
    Case& packed_causal = add("packed_causal" + suffix, shape(1, 4, 2, 300, 520, d, causal));
    packed_causal.problem.layout = Layout::packed;
    packed_causal.lengths_q = {5, 0, 300, 129, 1, 64};
    packed_causal.lengths_kv = {7, 20, 310, 100, 520, 65};
    packed_causal.wide_indices = true;
    Case& many = add("packed_many" + suffix, shape(1, 2, 2, 150, 150, d, causal));
    many.problem.layout = Layout::packed;
    for (std::int64_t i = 0; i < 100; ++i) {
      many.lengths_q.push_back(i * 37 % 151);
      many.lengths_kv.push_back(i * 37 % 151);
    }
    Case& softcap = add("softcap" + suffix, shape(1, 2, 2, 200, 300, d, causal));
    softcap.problem.softcap = 5;
    softcap.spread = 10;
    add("scale_negative" + suffix, shape(1, 1, 1, 100, 300, d)).problem.softmax_scale = -0.1f;
    add("scale_zero" + suffix, shape(1, 1, 1, 100, 300, d, causal)).problem.softmax_scale = 0.0f;
    add("sharp" + suffix, shape(1, 2, 2, 200, 500, d, causal)).spread = 30;
  }
  // What the copy engine cannot write, where a sequence that is short under a mask stores it and
  // where others do.
  for (const std::int64_t d : {64, 128, 256}) {
    const AttentionProblem p = shape(2, 4, 2, 300, 400, d, causal);
    const std::string suffix = "_short_d" + std::to_string(d);
    add("o_f32" + suffix, p).o_dtype = DType::f32;
    add("o_odd" + suffix, p).o_order = Order::odd;
    add("o_spread" + suffix, p).o_order = Order::spread;
    Case& odd_f32 = add("o_odd_f32" + suffix, p);
    odd_f32.o_order = Order::odd;
    odd_f32.o_dtype = DType::f32;
    add("o_columns" + suffix, p).problem.head_dim_v = d - 24;
    Case& columns_f32 = add("o_columns_f32" + suffix, p);
    columns_f32.problem.head_dim_v = 24;
    columns_f32.o_dtype = DType::f32;
    Case& columns_odd = add("o_columns_odd" + suffix, p);
    columns_odd.problem.head_dim_v = 24;
    columns_odd.o_order = Order::odd;
  }
  // Several query tiles a CTA, in some of which a warpgroup of three has no query or no key.
  add("many_tiles", shape(5, 40, 8, 200, 140, 64));
  add("many_tiles_causal", shape(5, 28, 4, 400, 330, 64, causal));
  add("many_tiles_window", shape(5, 28, 4, 400, 400, 64, Mask::window(70, 150)));
  // The same beyond the keys of the row for short sequences, and at its last.
  add("many_tiles_causal_1100", shape(2, 40, 4, 400, 1100, 64, causal));
  add("many_tiles_window_1100", shape(2, 40, 4, 400, 1100, 64, Mask::window(70, 150)));
  add("many_tiles_causal_1024", shape(1, 40, 4, 1024, 1024, 64, causal));
  add("many_tiles_narrow_1024", shape(1, 40, 4, 1024, 1024, 64, Mask::window(3, 0)));
  // Sequences that are short under a mask among others that are not.
  for (const auto& [name, mask] :
       {std::pair{"causal", causal}, std::pair{"window", Mask::window(70, 150)}}) {
    Case& packed =
        add(std::string("both_kinds_packed_") + name, shape(1, 12, 4, 1200, 1200, 64, mask));
    packed.problem.layout = Layout::packed;
    packed.lengths_q = {512, 1200, 40, 193, 300, 1024, 0, 700, 256};
    packed.lengths_kv = {512, 1200, 40, 1024, 1025, 1024, 500, 300, 0};
    Case& used =
        add(std::string("both_kinds_seqused_") + name, shape(6, 12, 4, 500, 1300, 64, mask));
    used.used = {1300, 0, 512, 1025, 1024, 77};
  }
  // Equal tiles that are drawn from the counter.
  add("many_equal_tiles", shape(1, 70, 14, 130, 1030, 128));
  for (const std::int64_t d : {8, 24, 40, 56, 72, 80, 96, 104, 120, 136, 160, 192, 224}) {
    add("head_dim_" + std::to_string(d), shape(1, 2, 1, 150, 200, d, causal));
  }
  const std::pair<std::int64_t, std::int64_t> dims[] = {
      {192, 128}, {64, 128}, {128, 64}, {40, 256}, {256, 8}};
  for (const auto& [d, dv] : dims) {
    add("head_dim_" + std::to_string(d) + "_v_" + std::to_string(dv),
        shape(1, 2, 1, 150, 200, d, causal))
        .problem.head_dim_v = dv;
  }
  for (const std::int64_t group : {5, 7, 16, 71}) {
    add("group_" + std::to_string(group), shape(1, group, 1, 65, 130, 128, causal));
  }
  return all;
}

class EveryCase : public ::testing::TestWithParam<Case> {};

TEST_P(EveryCase, AgreesWithFloat64AndWritesNothingElse) {
  RAFTER_NEEDS_SM90();
  const Trial trial(GetParam());
  expect_close(trial, GetParam(), trial.kernel(2), trial.reference());
}

Case packed_case(const std::vector<std::int64_t>& lengths, const Mask& mask) {
  Case c = make_case(shape(1, 4, 2, 700, 700, 128, mask));
  c.problem.layout = Layout::packed;
  c.lengths_q = c.lengths_kv = lengths;
  return c;
}

// Its bits depend on the sequence alone: packed alone, or between others of other lengths.
TEST(ForwardSm90, ASequenceHasTheSameBitsAloneAndAmongOthers) {
  RAFTER_NEEDS_SM90();
  for (const Mask& mask : {Mask::none(), Mask::causal(), Mask::window(90, 10)}) {
    const Trial among(packed_case({40, 1, 333, 700, 0, 129}, mask));
    const Trial alone(packed_case({333}, mask));
    const std::int64_t begin = 41;  // of the sequence of 333 rows
    alone.q().copy_rows(among.q(), begin, 333);
    alone.k().copy_rows(among.k(), begin, 333);
    alone.v().copy_rows(among.v(), begin, 333);
    const std::vector<float> all = among.kernel().o, one = alone.kernel().o;
    const std::int64_t row = 4 * 128;
    EXPECT_TRUE(std::equal(one.begin(), one.begin() + 333 * row, all.begin() + begin * row));
  }
}

// The same of a dense batch: a CTA takes its query tiles among others, from whichever tile before.
TEST(ForwardSm90, ADenseSequenceHasTheSameBitsAloneAndInABatch) {
  RAFTER_NEEDS_SM90();
  for (const Mask& mask : {Mask::none(), Mask::causal(), Mask::window(90, 10)}) {
    const Trial among(make_case(shape(20, 16, 4, 520, 520, 64, mask)));
    const Trial alone(make_case(shape(1, 16, 4, 520, 520, 64, mask)));
    const std::int64_t begin = 13 * 520;  // of the sequence in the batch
    alone.q().copy_rows(among.q(), begin, 520);
    alone.k().copy_rows(among.k(), begin, 520);
    alone.v().copy_rows(among.v(), begin, 520);
    const std::vector<float> all = among.kernel().o, one = alone.kernel().o;
    EXPECT_TRUE(std::equal(one.begin(), one.end(), all.begin() + begin * 16 * 64));
  }
}

// Shared memory holds whatever the kernel before left: here NaN in every tile.
TEST(ForwardSm90, NothingOfTheKernelBeforeEnters) {
  RAFTER_NEEDS_SM90();
  const Trial trial(packed_case({33, 11, 12, 12, 5}, Mask::none()));
  const std::vector<float> clean = trial.kernel().o;
  Case nan_case = make_case(shape(8, 16, 16, 600, 600, 128), std::vector<std::int64_t>(8, 0));
  nan_case.used.assign(8, 0);  // no key is owned: k and v hold NaN only
  const Trial poison(nan_case);
  Loaded loaded(poison);
  for (int i = 0; i < 3; ++i) {
    loaded.set_used(std::vector<std::int32_t>(8, 600));
    loaded.run();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_TRUE(std::isnan(loaded.read().o[0]));
    const std::vector<float> again = trial.kernel().o;
    EXPECT_EQ(std::memcmp(again.data(), clean.data(), clean.size() * 4), 0);
  }
}

// A NaN in a query stays in that query's row.
TEST(ForwardSm90, ANanQueryRowIsNanAndTheOthersAreNot) {
  RAFTER_NEEDS_SM90();
  const Trial trial(make_case(shape(1, 1, 1, 100, 200, 128)));
  trial.q().set(0, 17, 0, 3, NAN);
  const Answer answer = trial.kernel();
  for (std::size_t i = 0; i < 100; ++i) {
    EXPECT_EQ(std::isnan(answer.o[i * 128]), i == 17) << "row " << i;
    EXPECT_EQ(std::isnan(answer.lse[i]), i == 17) << "row " << i;
  }
}

/// Captured once, replayed after the lengths changed on the device.
void expect_graph_reads_lengths(const AttentionProblem& problem,
                                const std::vector<std::vector<std::int32_t>>& lengths) {
  const Trial trial(make_case(
      problem,
      std::vector<std::int64_t>(static_cast<std::size_t>(problem.batch), problem.seqlen_kv)));
  Loaded loaded(trial);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t runnable = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  loaded.run(stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&runnable, graph, 0), cudaSuccess);
  for (const std::vector<std::int32_t>& used : lengths) {
    loaded.set_used(used);
    loaded.poison();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(runnable, stream), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<std::uint8_t> replayed = loaded.bits();
    loaded.poison();
    loaded.run();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(loaded.bits(), replayed);
  }
  (void)cudaGraphExecDestroy(runnable);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

TEST(ForwardSm90, AGraphReadsLengthsWhenItIsReplayed) {
  RAFTER_NEEDS_SM90();
  expect_graph_reads_lengths(shape(3, 2, 1, 64, 500, 128, Mask::causal()),
                             {{0, 77, 500}, {500, 1, 128}});
  // A sequence of the kind that another launch takes turns into one of this.
  expect_graph_reads_lengths(shape(3, 20, 10, 300, 1500, 64, Mask::causal()),
                             {{0, 1024, 1500}, {1500, 1500, 1200}, {100, 500, 1000}});
}

// 200 runs give the same bits while another stream keeps the device busy.
TEST(ForwardSm90, RepeatsAreBitwiseEqualBesideAnotherStream) {
  RAFTER_NEEDS_SM90();
  const Trial trial(packed_case({700, 40, 333, 129}, Mask::causal()));
  const Trial other(make_case(shape(2, 8, 8, 512, 512, 64)));
  Loaded loaded(trial), busy(other);
  cudaStream_t stream = nullptr, beside = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), cudaSuccess);
  std::vector<std::uint8_t> first;
  for (int i = 0; i < 200; ++i) {
    busy.run(beside);
    loaded.run(stream);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    if (i == 0) {
      first = loaded.bits();
    } else {
      ASSERT_EQ(loaded.bits(), first) << "run " << i;
    }
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  (void)cudaStreamDestroy(stream);
  (void)cudaStreamDestroy(beside);
}

// Offsets beyond 2^31 elements in q, k, v and o.
TEST(ForwardSm90, FarBatchesHaveTheBitsOfNearOnes) {
  RAFTER_NEEDS_SM90();
  const KernelProblem problem{completed(shape(2, 2, 2, 70, 70, 64)), 1, 0};
  const Trial near(make_case(shape(2, 2, 2, 70, 70, 64)));
  const std::vector<float> want = near.kernel().o;
  const std::int64_t far_stride = (std::int64_t{1} << 31) + 64;
  const std::size_t sequence = 70 * 2 * 64;
  std::vector<void*> memory(4, nullptr);
  std::vector<TensorView> views;
  const std::vector<std::uint16_t>* contents[] = {&near.q().bits, &near.k().bits, &near.v().bits};
  for (std::size_t i = 0; i < 4; ++i) {
    const std::size_t bytes = (static_cast<std::size_t>(far_stride) + sequence) * 2;
    if (cudaMalloc(&memory[i], bytes) != cudaSuccess) {
      (void)cudaGetLastError();
      GTEST_SKIP() << "less than 17 GiB of device memory";
    }
    views.push_back(TensorView::contiguous(memory[i], DType::bf16, 2, 70, 2, 64));
    views.back().stride_batch = far_stride;
    for (std::size_t b = 0; b < 2 && i < 3; ++b) {
      ASSERT_EQ(
          cudaMemcpy(static_cast<std::uint16_t*>(memory[i]) + b * far_stride,
                     contents[i]->data() + b * sequence, sequence * 2, cudaMemcpyHostToDevice),
          cudaSuccess);
    }
  }
  const Status status =
      Loaded::entry().forward({problem, {views[0], views[1], views[2]}, {views[3], {}}, {}, {}});
  EXPECT_TRUE(status.is_ok()) << status.message();
  std::vector<std::uint16_t> got(2 * sequence);
  for (std::size_t b = 0; b < 2; ++b) {
    ASSERT_EQ(cudaMemcpy(got.data() + b * sequence,
                         static_cast<std::uint16_t*>(memory[3]) + b * far_stride, sequence * 2,
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(bf16_to_f32(got[i]), want[i]) << "element " << i;
  }
  for (void* pointer : memory) {
    (void)cudaFree(pointer);
  }
}

TEST(ForwardSm90, DrawsTilesFromAWorkspaceOnlyWhereACtaTakesMoreThanOne) {
  RAFTER_NEEDS_SM90();
  const KernelEntry& entry = entries_forward_sm90()[0];
  const auto bytes = [&](std::int64_t heads, Mask mask, std::int64_t keys = 64) {
    return entry.workspace({.attention = shape(1, heads, heads, 64, keys, 128, mask)});
  };
  EXPECT_EQ(bytes(8, Mask::causal()), 0);
  EXPECT_GT(bytes(4096, Mask::causal()), 0);
  EXPECT_EQ(bytes(4096, Mask::none()), 0);
  EXPECT_GT(bytes(4096, Mask::none(), 1024), 0);
  EXPECT_EQ(bytes(8, Mask::none(), 1024), 0);
}

TEST(ForwardSm90, RefusesByNameWhatItDoesNotDo) {
  const auto reason = [](AttentionProblem p) {
    return Loaded::entry().accepts({completed(p), 1, 0}).reason;
  };
  AttentionProblem p = shape(1, 1, 1, 8, 8, 100);
  EXPECT_EQ(reason(p), "head_dim 100 is not a multiple of 8");
  p.head_dim = 128;
  p.head_dim_v = 4;
  EXPECT_EQ(reason(p), "head_dim_v 4 is not a multiple of 8");
  p.head_dim_v = 128;
  p.dtype = DType::f32;
  EXPECT_EQ(reason(p), "f32 is not among bf16, f16");
  p.dtype = DType::bf16;
  p.layout = Layout::paged;
  EXPECT_EQ(reason(p), "layout paged is not among dense, packed");
  p.layout = Layout::dense;
  EXPECT_EQ(reason(p), "");
  EXPECT_EQ(Loaded::entry().accepts({completed(p), 1, 3}).reason,
            "splits 3: it does not split the keys");
}

TEST(ForwardSm90, NamesTheStrideThatTheCopyEngineCannotRead) {
  RAFTER_NEEDS_SM90();
  const KernelProblem problem{completed(shape(1, 2, 2, 8, 8, 64)), 1, 0};
  const DeviceBuffer memory(std::size_t{1} << 16);
  TensorView q = TensorView::contiguous(memory.data(), DType::bf16, 1, 8, 2, 64);
  const TensorView k = q;
  q.stride_seqlen = 132;
  const Status status =
      Loaded::entry().forward({problem, {q, k, k}, {k, {}}, {memory.data(), 64}, {}});
  EXPECT_EQ(status.message(), "q.stride_seqlen: 132 given; multiples of 8 elements from 0 allowed");
}

INSTANTIATE_TEST_SUITE_P(ForwardSm90, EveryCase, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace rafter
