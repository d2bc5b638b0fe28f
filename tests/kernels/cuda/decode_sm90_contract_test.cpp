// decode_sm90 against itself and at its limits: bits, poison, bad pages, sizes, graphs.
#include <cmath>
#include <limits>
#include <string>

#include "base/element.h"
#include "kernels/cuda/decode_sm90_launch.h"
#include "kernels/cuda/decode_sm90_rig.h"

namespace rafter::testing {
namespace {

TEST(DecodeSm90Contract, BitsOfASequenceDependOnItAlone) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const DType kv : {DType::bf16, DType::int8, DType::e4m3}) {
    Case c = decode_sm90_case(DType::bf16, kv, 4, 128);
    c.problem.mask = Mask::causal();
    c.lengths(each(5, 2), {3000, 7, 512, 0, 1025});
    const Values values = make_values(c);
    const Output expected = run_case(c, values, on_sm90());
    ASSERT_FALSE(expected.o.empty());
    for (std::size_t b = 0; b < c.lengths_kv.size(); ++b) {
      SCOPED_TRACE(::testing::Message() << to_string(kv) << ", sequence " << b);
      Case alone = c;
      alone.lengths({2}, {c.lengths_kv[b]});
      const Values mine = values_of(c, values, b);
      const Output output = output_of(c, expected, b);
      EXPECT_TRUE(same_bits(run_case(alone, mine, on_sm90()), output));
      Case packed = alone;
      packed.problem.layout = Layout::packed;
      packed.problem.seqused_kv = false;
      EXPECT_TRUE(same_bits(run_case(packed, mine, on_sm90()), output)) << "packed";
    }
    for (const std::int64_t page_size : {1, 16, 100}) {
      EXPECT_TRUE(same_bits(run_case(paged(c, page_size), values, on_sm90()), expected))
          << "pages of " << page_size;
    }
    for (const Style style : {Style::gaps, Style::heads_first}) {
      Case other = c;
      other.style = style;
      EXPECT_TRUE(same_bits(run_case(other, values, on_sm90()), expected));
    }
  }
}

/// CTAs have many units: heads lie within one, are cut between two, between several.
TEST(DecodeSm90Contract, BitsDoNotDependOnWhereSharesOfCtasEnd) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const bool even : {true, false}) {
    for (const std::int64_t splits : {0, 5, 128}) {
      Case c = decode_sm90_case(DType::bf16, DType::bf16, 4, 64);
      c.problem.seqused_kv = !even;
      std::vector<std::int64_t> lengths;
      for (std::int64_t b = 0; b < 45; ++b) {
        lengths.push_back(even ? 1500 : (b * 397) % 2000);
      }
      c.lengths(each(lengths.size(), 1), lengths);
      const Values values = make_values(c);
      const Output expected = run_case(c, values, on_sm90(splits));
      ASSERT_FALSE(expected.o.empty());
      EXPECT_TRUE(same_bits(run_case(c, values, on_sm90(splits)), expected)) << "a repeat";
      for (std::size_t b = 0; b < lengths.size(); b += 4) {
        SCOPED_TRACE(::testing::Message() << splits << " splits, sequence " << b);
        Case alone = c;
        alone.lengths({1}, {lengths[b]});
        EXPECT_TRUE(same_bits(run_case(alone, values_of(c, values, b), on_sm90(splits)),
                              output_of(c, expected, b)));
      }
    }
  }
}

TEST(DecodeSm90Contract, WhatLiesOutsideChangesNoBit) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const DType kv : {DType::bf16, DType::int8, DType::e4m3}) {
    for (const std::int64_t page_size : {0, 16}) {
      Case c = decode_sm90_case(DType::bf16, kv, 4, 72);
      c = page_size > 0 ? paged(c, page_size) : c;
      c.lengths(each(3, 1), {777, 1, 65});
      const Values values = make_values(c);
      Output outputs[2];
      for (const Fill fill : {Fill::nan, Fill::zero}) {
        RunOptions options = on_sm90();
        options.fill = fill;
        outputs[fill == Fill::nan ? 0 : 1] = run_case(c, values, options);
      }
      EXPECT_TRUE(same_bits(outputs[0], outputs[1])) << to_string(kv) << ", pages of " << page_size;
    }
  }
}

/// The case without the keys of some columns of its only sequence: what bad pages leave.
void drop_keys(Case& c, Values& values, std::int64_t first, std::int64_t last) {
  const std::int64_t row = c.problem.heads_kv * c.problem.head_dim;
  for (std::vector<float>* rows : {&values.k, &values.v}) {
    rows->erase(rows->begin() + first * row, rows->begin() + last * row);
  }
  c.lengths_kv[0] -= last - first;
}

TEST(DecodeSm90Contract, PagesThatDoNotExistAreNotSeenAndCounted) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t page_size : {1, 8, 16, 64}) {
    Case c = paged(decode_sm90_case(DType::bf16, DType::bf16, 4, 64), page_size);
    c.lengths({1}, {1000});
    Values values = make_values(c);
    const std::int64_t pages = (1000 + page_size - 1) / page_size;
    RunOptions options = on_sm90();
    options.wrong_pages = {{0, 2, -1}, {0, 3, pages + 2}, {0, pages - 1, 1 << 30}};
    const Output output = run_case(c, values, options);
    EXPECT_EQ(output.bad_pages, std::vector<std::int32_t>{3});
    drop_keys(c, values, (pages - 1) * page_size, 1000);
    drop_keys(c, values, 2 * page_size, 4 * page_size);
    EXPECT_TRUE(close_to(output, expect_values(c, values), c)) << "pages of " << page_size;
    // All of them: an empty row. None: nothing counted.
    c.lengths({1, 1}, {3 * page_size, 1});
    values = make_values(c);
    options.wrong_pages = {{0, 0, -1}, {0, 1, -7}, {0, 2, 1 << 30}};
    const Output empty = run_case(c, values, options);
    ASSERT_FALSE(empty.o.empty());
    EXPECT_EQ(empty.bad_pages, (std::vector<std::int32_t>{3, 0}));
    EXPECT_EQ(empty.lse[0], -std::numeric_limits<float>::infinity());
    EXPECT_EQ(empty.o[0], 0.0f);
  }
}

TEST(DecodeSm90Contract, PageIdsAndBatchesPast65535) {
  RAFTER_SKIP_WITHOUT_SM90();
  Case pages = paged(decode_sm90_case(DType::bf16, DType::bf16, 2, 64, 1), 1);
  pages.spare_pages = 80000;
  pages.lengths(each(2, 1), {600, 100});
  check_case(pages, on_sm90());
  Case batch = decode_sm90_case(DType::bf16, DType::bf16, 1, 8, 1);
  batch.lengths(each(70000, 1), {});
  for (std::int64_t b = 0; b < 70000; ++b) {
    batch.lengths_kv.push_back(b % 4);
  }
  check_case(batch, on_sm90());
}

void serves_growing_lengths(std::int64_t batch, std::int64_t group) {
  SCOPED_TRACE(::testing::Message() << batch << " sequences, " << group << " heads a KV head");
  Rig rig(rig_problem(batch, group));
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  rig.set({100, 2000, 1, 33}, 1);
  rig.poison();
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  rig.run(stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
  const std::vector<std::int32_t> lengths[] = {{100, 2000, 1, 33},       {101, 2001, 2, 34},
                                               {2048, 2048, 2048, 2048}, {0, 0, 0, 0},
                                               {0, 1900, 0, 64},         {777, 0, 65, 0}};
  for (std::uint32_t step = 0; step < std::size(lengths); ++step) {
    rig.set(lengths[step], step + 1);
    for (int repeat = 0; repeat < 3; ++repeat) {  // the same graph over what it left behind
      ASSERT_EQ(cudaGraphLaunch(ready, stream), cudaSuccess);
    }
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const std::vector<std::uint32_t> replayed = rig.bits();
    rig.poison();
    rig.run();
    EXPECT_EQ(replayed, rig.bits()) << "step " << step;
  }
  (void)cudaGraphExecDestroy(ready);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

TEST(DecodeSm90Contract, OneGraphServesGrowingLengthsMovingPagesAndEmptyBatches) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t group : {4, 12}) {
    serves_growing_lengths(4, group);
    serves_growing_lengths(1, group);
  }
}

/// A graph over lengths that grow, shrink and vanish, against float64: a cache of one capacity with
/// lengths on the device, dense or in pages.
void replays_rightly(const AttentionProblem& problem, const char* way) {
  SCOPED_TRACE(::testing::Message()
               << way << " of " << problem.batch << " sequences of " << problem.seqlen_q
               << " tokens, pages of " << problem.page_size);
  EXPECT_EQ(launch_of(problem).way, way);
  Rig rig(problem);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  rig.set({1, 1, 1, 1}, 1);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  rig.run(stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
  const std::vector<std::int32_t> lengths[] = {
      {126, 1000, 3, 33}, {127, 999, 4, 34}, {130, 0, 5, 257}, {0, 0, 0, 0}, {1000, 1, 640, 2}};
  rig.poison();
  for (std::uint32_t step = 0; step < std::size(lengths); ++step) {
    rig.set(lengths[step], step + 1);
    for (int repeat = 0; repeat < 2; ++repeat) {  // over what it left behind, too
      ASSERT_EQ(cudaGraphLaunch(ready, stream), cudaSuccess);
    }
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_TRUE(rig.is_right(lengths[step])) << "step " << step;
  }
  (void)cudaGraphExecDestroy(ready);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

TEST(DecodeSm90Contract, OneGraphMatchesFloat64WhileLengthsGrow) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t batch : {1, 4}) {
    for (const std::int64_t page_size : {0, 16}) {
      for (const DType kv : {DType::bf16, DType::e4m3}) {
        for (const std::int64_t tokens : {1, 4}) {
          AttentionProblem problem = rig_problem(batch, tokens == 1 ? 4 : 2);
          problem.seqlen_q = tokens;
          problem.tree_mask = tokens > 1;
          problem.seqlen_kv = 1000;
          problem.head_dim = 64;
          problem.kv_dtype = kv;
          problem.layout = page_size > 0 ? Layout::paged : Layout::dense;
          problem.page_size = page_size;
          problem.num_pages = page_size > 0 ? 4 * 64 : 0;
          replays_rightly(problem, kv == DType::e4m3
                                       ? (batch == 1 ? "columns in clusters" : "columns")
                                       : (batch == 1 ? "clusters" : "units"));
        }
      }
    }
  }
}

void repeats_under_load(const AttentionProblem& problem, const char* way) {
  SCOPED_TRACE(::testing::Message() << way << " of " << problem.batch << " sequences");
  EXPECT_EQ(launch_of(problem).way, way);
  Rig rig(problem), other(rig_problem());
  if (problem.seqused_kv) {
    rig.set({2000, 100, 513, 0}, 3);
  }
  other.set({2048, 2048, 2048, 2048}, 4);
  rig.poison();
  rig.run();
  const std::vector<std::uint32_t> expected = rig.bits();
  cudaStream_t streams[2] = {};
  for (cudaStream_t& stream : streams) {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  }
  for (int repeat = 0; repeat < 100; ++repeat) {
    rig.poison();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (int load = 0; load < 3; ++load) {
      other.run(streams[1]);
    }
    rig.run(streams[0]);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(rig.bits(), expected) << "run " << repeat;
  }
  for (cudaStream_t stream : streams) {
    (void)cudaStreamDestroy(stream);
  }
}

TEST(DecodeSm90Contract, RepeatsItsBitsUnderTheLoadOfAnotherStream) {
  RAFTER_SKIP_WITHOUT_SM90();
  repeats_under_load(rig_problem(), "units");
  repeats_under_load(rig_problem(4, 12), "columns");
  repeats_under_load(rig_problem(1, 4), "clusters");
  repeats_under_load(rig_problem(1, 12), "columns in clusters");
  for (const std::int64_t batch : {1, 4}) {
    AttentionProblem e4m3 = rig_problem(batch);
    e4m3.kv_dtype = DType::e4m3;
    repeats_under_load(e4m3, batch == 1 ? "columns in clusters" : "columns");
  }
  repeats_under_load(heads_problem(), "heads");
}

TEST(DecodeSm90Contract, LengthsBeyondCapacityAreClampedToIt) {
  RAFTER_SKIP_WITHOUT_SM90();
  Rig rig(rig_problem());
  rig.set({2048, 0, 5, 2048}, 1);
  rig.poison();
  rig.run();
  const std::vector<std::uint32_t> expected = rig.bits();
  rig.set({5000, -3, 5, 2147483647}, 1);
  rig.poison();
  rig.run();
  EXPECT_EQ(rig.bits(), expected);
}

/// Dense and in pages of whole blocks or not, where warps have keys and columns.
TEST(DecodeSm90Contract, LengthsBeyondCapacityAreClampedToItInClusters) {
  RAFTER_SKIP_WITHOUT_SM90();
  struct Shape {
    std::int64_t group, page_size;
    DType kv;
  };
  for (const Shape& s :
       {Shape{4, 0, DType::bf16}, Shape{4, 16, DType::bf16}, Shape{4, 24, DType::bf16},
        Shape{12, 0, DType::bf16}, Shape{12, 16, DType::bf16}, Shape{4, 0, DType::e4m3},
        Shape{4, 16, DType::e4m3}}) {
    SCOPED_TRACE(::testing::Message()
                 << s.group << " heads, pages of " << s.page_size << ", " << to_string(s.kv));
    AttentionProblem problem = rig_problem(1, s.group);
    problem.kv_dtype = s.kv;
    problem.layout = s.page_size > 0 ? Layout::paged : Layout::dense;
    problem.page_size = s.page_size;
    problem.num_pages = s.page_size > 0 ? 140 : 0;
    EXPECT_EQ(launch_of(problem).way,
              s.group > 8 || s.kv != DType::bf16 ? "columns in clusters" : "clusters");
    Rig rig(problem);
    constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
    const std::pair<std::int32_t, std::vector<std::int32_t>> clamped[] = {
        {2048, {2049, 5000, kMost}}, {0, {-3, -kMost - 1}}};
    for (const auto& [length, beyond] : clamped) {
      rig.set({length}, 1);
      rig.poison();
      rig.run();
      const std::vector<std::uint32_t> expected = rig.bits();
      EXPECT_TRUE(rig.is_right({length})) << length << " keys";
      for (const std::int32_t given : beyond) {
        rig.set({given}, 1);
        rig.poison();
        rig.run();
        EXPECT_EQ(rig.bits(), expected) << given << " keys";
      }
    }
  }
}

/// Bytes of rows of a cache as the kernel reads them.
std::vector<std::uint8_t> cache_bytes(DType kv, const std::vector<float>& values,
                                      const std::vector<float>& scales, std::int64_t row) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (kv == DType::int8) {
      const float scale = scales[i / index(row)];
      bytes.push_back(static_cast<std::uint8_t>(std::lround(values[i] / scale)));
    } else {
      const std::uint16_t bits = f32_to_bf16(values[i]);
      bytes.push_back(static_cast<std::uint8_t>(bits & 0xff));
      bytes.push_back(static_cast<std::uint8_t>(bits >> 8));
    }
  }
  return bytes;
}

/// Two sequences, or two pages, so far apart that their distance in elements needs more than 31
/// bits. Only the rows in use are written. Lengths on the device: units, else clusters.
void check_far_keys(DType kv, bool used) {
  SCOPED_TRACE(::testing::Message() << to_string(kv) << (used ? ", lengths on the device" : ""));
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 1024;
  constexpr std::int64_t kKeys = 200, kDim = 64, kPart = kKeys * kDim;
  const std::int64_t size = bits_of(kv) / 8;
  std::size_t free_bytes = 0, total_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  const std::size_t bytes = index(size * (kFar + 2 * kPart));
  if (free_bytes < bytes + (std::size_t{1} << 30)) {
    GTEST_SKIP() << "needs " << bytes << " bytes of device memory";
  }
  Case c = decode_sm90_case(DType::bf16, kv, 4, kDim, 1);
  c.lengths(each(2, 1), {kKeys, kKeys});
  AttentionProblem problem = sized_problem(c);
  problem.seqlen_kv = kKeys;
  problem.seqused_kv = used;
  const std::string way = kv == DType::int8 ? "columns" : used ? "units" : "clusters";
  const DecodeLaunch launch = launch_of(problem);
  EXPECT_EQ(launch.way, way == "columns" && !used ? "columns in clusters" : way);
  EXPECT_EQ(launch.params.by_box, used);
  const Values values = make_values(c);
  DeviceBuffer cache(bytes), q(cache_bytes(DType::bf16, values.q, {}, kDim)),
      o(index(2 * 4 * kDim * 4)), workspace(std::size_t{8} << 20);
  const std::vector<float> none(1);
  const DeviceBuffer k_scale(kv == DType::int8 ? values.k_scale : none),
      v_scale(kv == DType::int8 ? values.v_scale : none),
      lengths(std::vector<std::int32_t>{kKeys, kKeys}), table(std::vector<std::int32_t>{0, 1});
  const auto k = cache_bytes(kv, values.k, values.k_scale, kDim),
             v = cache_bytes(kv, values.v, values.v_scale, kDim);
  auto* const base = static_cast<std::uint8_t*>(cache.data());
  for (std::int64_t b = 0; b < 2; ++b) {  // K, then V behind it
    for (const auto& [from, at] : {std::pair{&k, b * kFar}, std::pair{&v, b * kFar + kPart}}) {
      ASSERT_EQ(cudaMemcpy(base + at * size, from->data() + b * kPart * size, index(kPart * size),
                           cudaMemcpyHostToDevice),
                cudaSuccess);
    }
  }
  TensorView keys = TensorView::contiguous(base, kv, 2, kKeys, 1, kDim);
  keys.stride_batch = kFar;
  TensorView rows = keys;
  rows.data = base + kPart * size;
  const auto run = [&](const AttentionProblem& p, const IndexView& pages) {
    const Result<Plan> made = plan(p, Device::cuda(), {.kernel = "decode_sm90"});
    EXPECT_TRUE(made) << made.status().message();
    EXPECT_LE(made->workspace_bytes(), static_cast<std::int64_t>(workspace.bytes()));
    o.poison();
    ForwardInputs in{
        .q = TensorView::contiguous(q.data(), DType::bf16, 2, 1, 4, kDim), .k = keys, .v = rows};
    in.page_table = pages;
    if (used) {
      in.seqused_kv = {lengths.data(), DType::i32, 2, 0};
    }
    if (kv == DType::int8) {
      in.k_scale = TensorView::contiguous(k_scale.data(), DType::f32, 2, kKeys, 1, 1);
      in.v_scale = TensorView::contiguous(v_scale.data(), DType::f32, 2, kKeys, 1, 1);
    }
    const Status status =
        made->forward(in, {TensorView::contiguous(o.data(), DType::f32, 2, 1, 4, kDim)},
                      {workspace.data(), static_cast<std::int64_t>(workspace.bytes())});
    EXPECT_TRUE(status) << status.message();
    return Output{o.download<float>(), {}};
  };
  const Output dense = run(problem, {});
  EXPECT_TRUE(close_to(dense, expect_values(c, values), c));
  AttentionProblem paged = problem;
  paged.layout = Layout::paged;
  paged.page_size = kKeys;
  paged.num_pages = 2;
  EXPECT_TRUE(same_bits(run(paged, {table.data(), DType::i32, 2, 1}), dense));
}

TEST(DecodeSm90Contract, KeysPast2To31Elements) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const DType kv : {DType::bf16, DType::int8}) {
    for (const bool used : {false, true}) {
      check_far_keys(kv, used);
    }
  }
}

TEST(DecodeSm90Plan, IsChosenForOneQueryAndSaysWhatItRefuses) {
  RAFTER_SKIP_WITHOUT_SM90();
  AttentionProblem p{.heads_q = 32,
                     .heads_kv = 8,
                     .seqlen_q = 1,
                     .seqlen_kv = 8192,
                     .head_dim = 128,
                     .dtype = DType::bf16};
  const Result<Plan> chosen = plan(p, Device::cuda());
  ASSERT_TRUE(chosen) << chosen.status().message();
  EXPECT_EQ(chosen->kernel(), "decode_sm90") << chosen->explain();
  p.dtype = DType::f32;
  const Status refused = plan(p, Device::cuda(), {.kernel = "decode_sm90"}).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  EXPECT_NE(refused.message().find("f32 is not among bf16, f16"), std::string::npos);
}

}  // namespace
}  // namespace rafter::testing
