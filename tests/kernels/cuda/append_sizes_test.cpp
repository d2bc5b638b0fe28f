// append() on CUDA where 16 or 32 bits do not count what there is, and in a graph while pages move.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "base/element.h"
#include "kernels/cuda/captured_graph.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/mirror.h"
#include "kernels/cuda/require_sm90.h"
#include "support/append_case.h"

namespace rafter::testing {
namespace {

TEST(AppendCuda, CountsTokensPagesAndSequencesBeyond16Bits) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const AppendCase& c : append_cases_beyond_16_bits()) {
    SCOPED_TRACE(c.name);
    AppendScene scene(c);
    const std::vector<Region> regions = scene.regions();
    const Mirror mirror(regions);
    const Status status =
        append(mirror.at(scene.inputs()), mirror.at(scene.outputs()), Device::cuda());
    mirror.fetch();
    ASSERT_TRUE(status) << status.message();
    scene.check();
  }
}

/// A cache [pages, K or V, page_size, heads, head_dim]: a page of K, then its page of V.
class PairedPages {
 public:
  static constexpr std::int64_t kPageSize = 16, kHeads = 2, kDim = 128;
  static constexpr std::int64_t kElements = 2 * kPageSize * kHeads * kDim;  // of K and V of a page

  PairedPages(DType dtype, std::int64_t pages)
      : dtype_(dtype),
        pages_(pages),
        rows_(index(pages * page_bytes())),
        k_scale_(index(pages * kFactors * 4)),
        v_scale_(index(pages * kFactors * 4)) {}

  AppendOutputs outputs() const {
    AppendOutputs out{.k_cache = rows(0), .v_cache = rows(1)};
    if (dtype_ == DType::int8) {
      out.k_scale = factors(k_scale_);
      out.v_scale = factors(v_scale_);
    }
    return out;
  }
  /// Both parts of a page, and its factors.
  std::vector<std::byte> page(std::int64_t id) const {
    std::vector<std::byte> bytes(index(page_bytes() + 2 * kFactors * 4));
    std::byte* to = bytes.data();
    const auto fetch = [&](const DeviceBuffer& from, std::int64_t size) {
      EXPECT_EQ(cudaMemcpy(to, static_cast<const std::byte*>(from.data()) + id * size, index(size),
                           cudaMemcpyDeviceToHost),
                cudaSuccess);
      to += size;
    };
    fetch(rows_, page_bytes());
    fetch(k_scale_, kFactors * 4);
    fetch(v_scale_, kFactors * 4);
    return bytes;
  }

 private:
  static constexpr std::int64_t kFactors = kPageSize * kHeads;  // of a page of K or of V
  std::int64_t page_bytes() const { return kElements * bits_of(dtype_) / 8; }
  TensorView rows(std::int64_t part) const {
    TensorView view =
        TensorView::contiguous(static_cast<std::byte*>(rows_.data()) + part * page_bytes() / 2,
                               dtype_, pages_, kPageSize, kHeads, kDim);
    view.stride_batch = kElements;
    return view;
  }
  TensorView factors(const DeviceBuffer& memory) const {
    return TensorView::contiguous(memory.data(), DType::f32, pages_, kPageSize, kHeads, 1);
  }

  DType dtype_;
  std::int64_t pages_;
  DeviceBuffer rows_, k_scale_, v_scale_;
};

/// Two sequences of 20 new tokens, turned, behind 0 and 12 others, in two pages each.
class TwoSequences {
 public:
  TwoSequences()
      : k_(random_rows(1)),
        v_(random_rows(2)),
        cos_(angles(0)),
        sin_(angles(1)),
        lengths_(std::vector<std::int32_t>{0, 12}) {}

  void append_to(const PairedPages& cache, const std::vector<std::int32_t>& table) const {
    const DeviceBuffer pages(table);
    const auto rows = [](const DeviceBuffer& memory) {
      return TensorView::contiguous(memory.data(), DType::bf16, 2, kTokens, PairedPages::kHeads,
                                    PairedPages::kDim);
    };
    AppendInputs in{
        .k = rows(k_), .v = rows(v_), .seqused_kv = {lengths_.data(), DType::i32, 2, 0}};
    in.page_table = {pages.data(), DType::i32, 4, 2};
    in.rope = {static_cast<const float*>(cos_.data()), static_cast<const float*>(sin_.data()),
               kPositions, PairedPages::kDim};
    const Status status = append(in, cache.outputs(), Device::cuda());
    EXPECT_TRUE(status) << status.message();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

 private:
  static constexpr std::int64_t kTokens = 20, kPositions = 32;
  static std::vector<std::uint16_t> random_rows(std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> bits(index(2 * kTokens * PairedPages::kHeads * PairedPages::kDim));
    for (std::uint16_t& one : bits) {
      one = f32_to_bf16(normal(random));
    }
    return bits;
  }
  static std::vector<float> angles(double shift) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < kPositions * PairedPages::kDim / 2; ++i) {
      values.push_back(static_cast<float>(std::sin(0.37 * static_cast<double>(i) + shift)));
    }
    return values;
  }

  DeviceBuffer k_, v_, cos_, sin_, lengths_;
};

/// int8 by lanes of a warp, with factors; bf16 by halves of rows.
TEST(AppendCuda, PagesBeyond2To31ElementsGetTheBitsOfNearOnes) {
  RAFTER_SKIP_WITHOUT_SM90();
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) / PairedPages::kElements;
  const TwoSequences tokens;
  for (const DType dtype : {DType::int8, DType::bf16}) {
    SCOPED_TRACE(to_string(dtype));
    const PairedPages near(dtype, 4), far(dtype, kFar + 3);
    const std::vector<std::int32_t> near_table = {2, 0, 3, 1};
    const std::vector<std::int32_t> far_table = {kFar + 2, kFar - 1, kFar, 70'000};
    tokens.append_to(near, near_table);
    tokens.append_to(far, far_table);
    for (std::size_t i = 0; i < far_table.size(); ++i) {
      const std::vector<std::byte> want = near.page(near_table[i]);
      EXPECT_TRUE(far.page(far_table[i]) == want) << "page " << far_table[i];
      EXPECT_LT(std::count(want.begin(), want.end(), std::byte{0xff}),
                static_cast<std::ptrdiff_t>(want.size()))
          << "nothing was written to page " << near_table[i];
    }
  }
}

void set(const Mirror& mirror, const Indices& shared, Indices now) {
  void* const to =
      const_cast<std::byte*>(mirror.at(static_cast<const std::byte*>(shared.view.data)));
  EXPECT_EQ(cudaMemcpy(to, now.buffer.data(), now.buffer.bytes(), cudaMemcpyHostToDevice),
            cudaSuccess);
}

/// Three sequences of five tokens; before each replay lengths and the whole table change, some
/// pages to ones that do not exist, and lengths beyond the capacity of 24.
void expect_graph_of_the_cpu(const AppendCase& c) {
  const std::int64_t batch = 3, cols = c.capacity / c.page_size, places = batch * cols + 3;
  AppendScene host(c), device(c);
  Indices lengths = make_indices(c.lengths, DType::i32);
  Indices pages = make_indices(std::vector<std::int64_t>(index(batch * cols)), DType::i32, cols);
  const auto inputs_of = [](const AppendScene& scene, const Indices& used, const Indices& table) {
    AppendInputs in = scene.inputs();
    in.seqused_kv = used.view;
    in.page_table = table.view;
    return in;
  };
  std::vector<Region> regions = device.regions();
  regions.push_back(lengths.buffer.region());
  regions.push_back(pages.buffer.region());
  const Mirror mirror(regions);
  const CapturedGraph graph([&](cudaStream_t stream) {
    return append(mirror.at(inputs_of(device, lengths, pages)), mirror.at(device.outputs()),
                  Device::cuda(), {stream});
  });
  std::mt19937 random(9);
  const std::vector<std::int64_t> steps[] = {{0, 3, 9}, {5, 8, 14}, {19, 23, 0}, {1, 2, 40}};
  for (const std::vector<std::int64_t>& used : steps) {
    std::vector<std::int64_t> ids(index(places));
    std::iota(ids.begin(), ids.end(), std::int64_t{0});
    std::shuffle(ids.begin(), ids.end(), random);
    ids.resize(index(batch * cols));
    ids[1] = -1;
    ids[index(cols)] = places;
    const Indices used_now = make_indices(used, DType::i32);
    const Indices pages_now = make_indices(ids, DType::i32, cols);
    const Status on_host =
        append(inputs_of(host, used_now, pages_now), host.outputs(), Device::cpu());
    ASSERT_TRUE(on_host) << on_host.message();
    set(mirror, lengths, used_now);
    set(mirror, pages, pages_now);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    graph.launch();
    mirror.fetch();
    EXPECT_TRUE(device.same_bits(host)) << "lengths from " << used[0] << " on";
  }
}

TEST(AppendCuda, AGraphFollowsPagesThatMove) {
  RAFTER_SKIP_WITHOUT_SM90();
  AppendCase c{.name = "halves",
               .dtype = DType::bf16,
               .seqlen = 5,
               .lengths = {0, 0, 0},
               .head_dim = 64,
               .head_dim_v = 64,
               .page_size = 4,
               .rotary_dim = 64,
               .heads_q = 3};
  expect_graph_of_the_cpu(c);
  c.cache = DType::e4m3;
  c.rotary_dim = 32;
  c.pairs = Rope::Pairs::interleaved;
  expect_graph_of_the_cpu(c);
}

}  // namespace
}  // namespace rafter::testing
