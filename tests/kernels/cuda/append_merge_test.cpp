// append() and merge() on CUDA: against float64, against the CPU's bits, in a captured graph.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cuda/captured_graph.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/mirror.h"
#include "kernels/cuda/require_sm90.h"
#include "support/append_case.h"

namespace rafter::testing {
namespace {

Status on_device(AppendScene& scene, const AppendInputs& in, const AppendOutputs& out) {
  const std::vector<Region> regions = scene.regions();
  const Mirror mirror(regions);
  const Status status = append(mirror.at(in), mirror.at(out), Device::cuda());
  mirror.fetch();
  return status;
}

TEST(AppendCuda, WritesRowsAtTheirPositionsInEveryDTypeAndLayout) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const AppendCase& c : append_cases()) {
    SCOPED_TRACE(c.name);
    AppendScene scene(c);
    const Status status = on_device(scene, scene.inputs(), scene.outputs());
    ASSERT_TRUE(status) << status.message();
    scene.check();
  }
}

TEST(AppendCuda, GivesTheBitsOfTheCpu) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const AppendCase& c : append_cases()) {
    SCOPED_TRACE(c.name);
    AppendScene host(c), device(c);
    ASSERT_TRUE(append(host.inputs(), host.outputs(), Device::cpu()));
    ASSERT_TRUE(on_device(device, device.inputs(), device.outputs()));
    EXPECT_TRUE(host.same_bits(device));
  }
}

TEST(AppendCuda, CountsTokensThatHaveNoPlace) {
  RAFTER_SKIP_WITHOUT_SM90();
  AppendCase c{.name = "beyond", .seqlen = 4, .lengths = {0, 6, 9}, .capacity = 8};
  AppendScene dense(c);
  ASSERT_TRUE(on_device(dense, dense.inputs(), dense.outputs()));
  dense.check();
  EXPECT_EQ(dense.dropped(), (std::vector<std::int32_t>{0, 2, 4}));
  c.page_size = 2;
  AppendScene paged(c);
  paged.break_page(0, 1, -1);
  paged.break_page(1, 3, 1000);
  ASSERT_TRUE(on_device(paged, paged.inputs(), paged.outputs()));
  paged.check();
  EXPECT_EQ(paged.dropped(), (std::vector<std::int32_t>{2, 4, 4}));
}

TEST(AppendCuda, TurnsQueriesInPlaceInVectorsAndApart) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t rotary_dim : {16, 8, 6}) {
    AppendCase c{.name = "in place",
                 .dtype = DType::bf16,
                 .seqlen = 3,
                 .lengths = {5, 0},
                 .rotary_dim = rotary_dim,
                 .heads_q = 6};
    AppendScene scene(c);
    AppendOutputs out = scene.outputs();
    const AppendInputs in = scene.inputs();
    out.q = in.q;
    ASSERT_TRUE(on_device(scene, in, out));
    scene.check_queries(out.q);
  }
}

TEST(AppendCuda, AGraphAppendsWhereLengthsSayWhenItRuns) {
  RAFTER_SKIP_WITHOUT_SM90();
  AppendCase c{
      .name = "graph", .dtype = DType::bf16, .seqlen = 1, .lengths = {3, 0}, .page_size = 4};
  AppendScene first(c);
  c.lengths = {8, 5};
  AppendScene later(c);  // the same memory but for the lengths
  const std::vector<Region> regions = first.regions();
  const Mirror mirror(regions);
  const CapturedGraph graph([&](cudaStream_t stream) {
    return append(mirror.at(first.inputs()), mirror.at(first.outputs()), Device::cuda(), {stream});
  });
  void* const lengths = const_cast<void*>(mirror.at(first.inputs().seqused_kv).data);
  ASSERT_EQ(cudaMemcpy(lengths, later.inputs().seqused_kv.data, 2 * sizeof(std::int32_t),
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  graph.launch();
  mirror.fetch();
  ASSERT_TRUE(append(later.inputs(), later.outputs(), Device::cpu()));
  EXPECT_TRUE(first.same_bits(later));
}

/// States of random values, in memory of the host; some rows are empty and full of NaN.
struct States {
  std::int64_t batch = 2, seqlen = 3, heads = 5, head_dim = 64;
  DType dtype = DType::f32;
  std::vector<Placed> o;
  std::vector<std::vector<float>> lse;  // the last one is of the result

  /// With another `shift` other rows are empty, and all values others.
  States(std::size_t count, DType type, std::int64_t dim, Style style, std::int64_t shift = 0)
      : head_dim(dim), dtype(type), shift_(shift) {
    std::mt19937 random(3 + static_cast<std::uint32_t>(shift));
    std::normal_distribution<float> normal;
    const auto rows = index(batch * seqlen * heads);
    for (std::size_t i = 0; i <= count; ++i) {
      o.push_back(place(style, dtype, batch, seqlen, heads, head_dim, Fill::nan));
      lse.emplace_back(rows, std::numeric_limits<float>::quiet_NaN());
      for (std::int64_t row = 0; i < count && row < batch * seqlen * heads; ++row) {
        const std::int64_t kind = (row + shift) % 4;
        const bool empty = kind == 0 || (kind == 1 && i != 1);
        lse[i][index(row)] = empty ? -std::numeric_limits<float>::infinity() : 30 * normal(random);
        for (std::int64_t d = 0; d < head_dim && !empty; ++d) {
          const std::int64_t b = row / (heads * seqlen), h = row / seqlen % heads;
          write(o[i].view, b, row % seqlen, h, d, normal(random));
        }
      }
    }
  }
  /// Of one state or none.
  bool is_copied(std::int64_t row) const { return (row + shift_) % 4 < 2; }
  AttentionState state(std::size_t i) {
    return {o[i].view, LseView::contiguous(lse[i].data(), batch, heads, seqlen)};
  }
  std::vector<AttentionState> states() {
    std::vector<AttentionState> all;
    for (std::size_t i = 0; i + 1 < o.size(); ++i) {
      all.push_back(state(i));
    }
    return all;
  }
  std::vector<Region> regions() {
    std::vector<Region> all;
    for (std::size_t i = 0; i < o.size(); ++i) {
      all.push_back(o[i].buffer.region());
      all.push_back({lse[i].data(), lse[i].size() * sizeof(float)});
    }
    return all;
  }

 private:
  std::int64_t shift_ = 0;
};

/// State `into` of both: within a rounding, and to the bit where rows are copied.
void expect_merged(States& host, States& device, std::size_t into) {
  const float half = host.dtype == DType::bf16  ? 0x1p-8f
                     : host.dtype == DType::f16 ? 0x1p-11f
                                                : 0x1p-23f;
  for (std::int64_t row = 0; row < host.batch * host.heads * host.seqlen; ++row) {
    const float want = host.lse[into][index(row)], got = device.lse[into][index(row)];
    // exp and log of two libraries: the last bit of f32 may differ.
    ASSERT_TRUE(want == got || std::fabs(want - got) <= 0x1p-22f * std::fabs(want))
        << want << " and " << got;
    const std::int64_t b = row / (host.heads * host.seqlen);
    const std::int64_t h = row / host.seqlen % host.heads, i = row % host.seqlen;
    for (std::int64_t d = 0; d < host.head_dim; ++d) {
      const float x = read(host.o[into].view, b, i, h, d);
      const float y = read(device.o[into].view, b, i, h, d);
      ASSERT_LE(std::fabs(x - y), host.is_copied(row) ? 0.0f : half * (std::fabs(x) + 0x1p-10f));
    }
  }
  EXPECT_TRUE(device.o[into].buffer.intact());
}

Status merge_on_device(States& s, std::size_t into) {
  const std::vector<Region> regions = s.regions();
  const Mirror mirror(regions);
  std::vector<AttentionState> there;
  for (const AttentionState& state : s.states()) {
    there.push_back({mirror.at(state.o), mirror.at(state.lse)});
  }
  const AttentionState out = s.state(into);
  const Status status = merge(there, {mirror.at(out.o), mirror.at(out.lse)}, Device::cuda());
  mirror.fetch();
  return status;
}

TEST(MergeCuda, IsTheMergeOfTheCpu) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::size_t count : {1, 2, 8, 9, 256}) {
      for (const std::int64_t dim : {1, 40, 128, 300}) {
        for (const std::size_t into : {count, count - 1}) {  // apart and in place
          SCOPED_TRACE(::testing::Message() << to_string(dtype) << " " << count
                                            << " states, head_dim " << dim << " into " << into);
          const Style style = dim == 40 ? Style::gaps : Style::contiguous;
          States host(count, dtype, dim, style), device(count, dtype, dim, style);
          ASSERT_TRUE(merge(host.states(), host.state(into)));
          const Status status = merge_on_device(device, into);
          ASSERT_TRUE(status) << status.message();
          expect_merged(host, device, into);
        }
      }
    }
  }
}

/// A graph has the places of few states and of many, and none of their values.
TEST(MergeCuda, AGraphMergesWhatStatesAreWhenItRuns) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::size_t count : {3, 20}) {
    SCOPED_TRACE(::testing::Message() << count << " states");
    States device(count, DType::bf16, 40, Style::gaps);
    States first(count, DType::bf16, 40, Style::gaps, 1);
    States second(count, DType::bf16, 40, Style::gaps, 2);
    ASSERT_TRUE(merge(first.states(), first.state(count)));
    ASSERT_TRUE(merge(second.states(), second.state(count)));
    const std::vector<Region> regions = device.regions();
    const Mirror mirror(regions);
    std::vector<AttentionState> there;
    for (const AttentionState& state : device.states()) {
      there.push_back({mirror.at(state.o), mirror.at(state.lse)});
    }
    const AttentionState out = device.state(count);
    const CapturedGraph graph([&](cudaStream_t stream) {
      return merge(there, {mirror.at(out.o), mirror.at(out.lse)}, Device::cuda(), {stream});
    });
    for (States* const step : {&first, &second, &first}) {
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_EQ(
            cudaMemcpy(mirror.at(static_cast<std::byte*>(device.o[i].buffer.data())),
                       step->o[i].buffer.data(), step->o[i].buffer.bytes(), cudaMemcpyHostToDevice),
            cudaSuccess);
        ASSERT_EQ(cudaMemcpy(mirror.at(device.lse[i].data()), step->lse[i].data(),
                             step->lse[i].size() * sizeof(float), cudaMemcpyHostToDevice),
                  cudaSuccess);
      }
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      graph.launch();
      mirror.fetch();
      expect_merged(*step, device, count);
    }
  }
}

TEST(MergeCuda, RefusesByName) {
  RAFTER_SKIP_WITHOUT_SM90();
  States s(2, DType::f32, 8, Style::contiguous);
  std::vector<AttentionState> states = s.states();
  states.resize(kMostMergedStates + 1, states[0]);
  EXPECT_EQ(merge(states, s.state(2), Device::cuda()).parameter(), "states");
  states.resize(2);
  states[1].o.stride_head_dim = 2;
  EXPECT_EQ(merge(states, s.state(2), Device::cuda()).parameter(), "states[1].o.stride_head_dim");
}

}  // namespace
}  // namespace rafter::testing
