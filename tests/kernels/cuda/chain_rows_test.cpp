// Chains of products in one launch on CUDA: the bits of the operations one by one, each product
// against float64, any number of CTAs, chains that share the device.
#include "kernels/cuda/chain_rows.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/element.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/require_sm90.h"
#include "rafter/layers.h"
#include "support/transformer_oracle.h"

namespace rafter::testing {
namespace {

constexpr float kEps = 1e-5f;
constexpr std::int64_t kGap = 8;  // elements between rows

struct Sizes {
  std::int64_t attended, hidden, inner, qkv;
};
/// Fewer stripes than SMs and lengths of k that leave warps idle; and a model's.
constexpr Sizes kSmall{.attended = 384, .hidden = 256, .inner = 1152, .qkv = 320},
    kWide{.attended = 4096, .hidden = 4096, .inner = 11008, .qkv = 6144};

DeviceBuffer uniform(DType dtype, std::int64_t count, std::uint64_t seed, float bound) {
  DeviceBuffer buffer(static_cast<std::size_t>(count * bits_of(dtype) / 8));
  must(fill_uniform(matrix(buffer.data(), dtype, 1, count), seed, bound, Device::cuda()));
  return buffer;
}
TensorView rows_in(const DeviceBuffer& buffer, DType dtype, std::int64_t rows, std::int64_t cols) {
  TensorView view = matrix(buffer.data(), dtype, rows, cols);
  view.stride_seqlen = cols + kGap;
  view.stride_batch = rows * (cols + kGap);
  return view;
}

struct Format {
  const char* name;
  std::optional<DType> packed;
  std::int64_t group_size;
};

/// A weight with its bias, plain or packed.
class Product {
 public:
  Product(DType dtype, const Format& format, std::int64_t n, std::int64_t k, std::uint64_t seed)
      : dtype_(dtype),
        n_(n),
        k_(k),
        plain_(uniform(dtype, n * k, seed, std::sqrt(3.0f / static_cast<float>(k)))),
        bias_(uniform(dtype, n, seed + 1, 0.5f)) {
    if (format.packed) {
      packed_ =
          PackedWeight{.dtype = *format.packed, .n = n, .k = k, .group_size = format.group_size};
      bytes_.emplace(static_cast<std::size_t>(packed_bytes(packed_).value()));
      packed_.data = bytes_->data();
      must(quantize(matrix(plain_.data(), dtype, n, k), packed_, Device::cuda()));
    }
  }
  Link link(const TensorView& x, const TensorView& out, LinkEnd end) const {
    return {.x = x,
            .weight = bytes_ ? TensorView{} : matrix(plain_.data(), dtype_, n_, k_),
            .packed = packed_,
            .bias = matrix(bias_.data(), dtype_, 1, n_),
            .out = out,
            .end = end};
  }
  /// value · scale, widened.
  std::vector<double> values() const {
    std::vector<double> all(static_cast<std::size_t>(n_ * k_));
    std::vector<std::uint16_t> bits = plain_.download<std::uint16_t>();
    std::vector<float> wide(all.size());
    if (bytes_) {
      std::vector<std::uint8_t> packed = bytes_->download<std::uint8_t>();
      PackedWeight host = packed_;
      host.data = packed.data();
      must(dequantize(host, matrix(wide.data(), DType::f32, n_, k_), Device::cpu()));
    }
    const TensorView view{.data = bits.data(), .dtype = dtype_};
    for (std::int64_t i = 0; i < n_ * k_; ++i) {
      const auto at = static_cast<std::size_t>(i);
      all[at] = bytes_ ? static_cast<double>(wide[at]) : base::load_element(view, i);
    }
    return all;
  }

 private:
  DType dtype_;
  std::int64_t n_, k_;
  DeviceBuffer plain_, bias_;
  PackedWeight packed_;
  std::optional<DeviceBuffer> bytes_;
};

/// A layer's weights, and what a step has in memory, twice: for the chain and for the operations.
struct Layer {
  Layer(DType dtype, const Format& format, const Sizes& s)
      : o(dtype, format, s.hidden, s.attended, 11),
        gate_up(dtype, format, 2 * s.inner, s.hidden, 21),
        down(dtype, format, s.hidden, s.inner, 31),
        qkv(dtype, format, s.qkv, s.hidden, 41),
        mlp_norm(uniform(dtype, s.hidden, 51, 1.0f)),
        input_norm(uniform(dtype, s.hidden, 52, 1.0f)) {}
  Product o, gate_up, down, qkv;
  DeviceBuffer mlp_norm, input_norm;
};
class Step {
 public:
  Step(DType dtype, std::int64_t m, const Sizes& s, const Layer& layer)
      : dtype_(dtype),
        m_(m),
        sizes_(s),
        layer_(layer),
        attended_(uniform(dtype, m * (s.attended + kGap), 1, 1.0f)),
        residual_(size(s.hidden)),
        activated_(size(s.inner)),
        qkv_(size(s.qkv)),
        normed_(size(s.hidden)),
        projected_(size(s.hidden)),
        gate_up_(size(2 * s.inner)),
        words_(std::vector<std::uint8_t>(
            static_cast<std::size_t>(linear_chain_workspace_bytes(links(), Device::cuda())))),
        workspace_(static_cast<std::size_t>(linear_workspace_bytes(Device::cuda()))) {
    reset();
  }
  /// What the chain writes is NaN before, so that what it leaves out is seen.
  void reset(cudaStream_t stream = nullptr) {
    for (const DeviceBuffer* buffer : {&activated_, &qkv_}) {
      EXPECT_EQ(cudaMemsetAsync(buffer->data(), 0xff, buffer->bytes(), stream), cudaSuccess);
    }
    must(fill_uniform(matrix(residual_.data(), dtype_, m_, sizes_.hidden + kGap), 2, 1.0f,
                      Device::cuda(), {stream}));
  }
  TensorView view(const DeviceBuffer& buffer, std::int64_t cols) const {
    return rows_in(buffer, dtype_, m_, cols);
  }
  std::vector<Link> links() const {
    const TensorView residual = view(residual_, sizes_.hidden),
                     act = view(activated_, sizes_.inner);
    std::vector<Link> all = {
        layer_.o.link(view(attended_, sizes_.attended), residual, LinkEnd::add),
        layer_.gate_up.link(residual, act, LinkEnd::swiglu),
        layer_.down.link(act, residual, LinkEnd::add),
        layer_.qkv.link(residual, view(qkv_, sizes_.qkv), LinkEnd::store)};
    all[1].norm = matrix(layer_.mlp_norm.data(), dtype_, 1, sizes_.hidden);
    all[3].norm = matrix(layer_.input_norm.data(), dtype_, 1, sizes_.hidden);
    return all;
  }
  Status chain(std::span<const Link> links, cudaStream_t stream = nullptr) const {
    return linear_chain(links, kEps, {words_.data(), static_cast<std::int64_t>(words_.bytes())},
                        Device::cuda(), {stream});
  }
  Status chain(cudaStream_t stream = nullptr) const { return chain(links(), stream); }
  /// The same by one operation after the other.
  void one_by_one() const {
    const Device gpu = Device::cuda();
    const TensorView residual = view(residual_, sizes_.hidden),
                     normed = view(normed_, sizes_.hidden),
                     projected = view(projected_, sizes_.hidden),
                     both = view(gate_up_, 2 * sizes_.inner), act = view(activated_, sizes_.inner);
    const std::vector<Link> all = links();
    const auto multiply = [&](const Link& l, const TensorView& x, const TensorView& out) {
      must(linear({.x = x, .weight = l.weight, .packed = l.packed, .bias = l.bias}, out,
                  {workspace_.data(), static_cast<std::int64_t>(workspace_.bytes())}, gpu));
    };
    const auto norm = [&](const Link& l) {
      must(rmsnorm({.x = residual, .weight = l.norm, .eps = kEps}, {.y = normed}, gpu));
    };
    multiply(all[0], all[0].x, projected);
    must(pointwise(Pointwise::add, projected, residual, residual, gpu));
    norm(all[1]);
    multiply(all[1], normed, both);
    must(pointwise(Pointwise::swiglu, columns(both, 0, sizes_.inner),
                   columns(both, sizes_.inner, sizes_.inner), act, gpu));
    multiply(all[2], act, projected);
    must(pointwise(Pointwise::add, projected, residual, residual, gpu));
    norm(all[3]);
    multiply(all[3], normed, all[3].out);
  }
  /// What the chain leaves.
  std::vector<std::vector<std::uint16_t>> results() const {
    return {residual_.download<std::uint16_t>(), activated_.download<std::uint16_t>(),
            qkv_.download<std::uint16_t>()};
  }
  bool intact() const {
    for (const DeviceBuffer* buffer : {&attended_, &residual_, &activated_, &qkv_, &words_}) {
      if (!buffer->guards_intact()) {
        return false;
      }
    }
    // The counters; the number of launches and the letters stay.
    const std::vector<unsigned> words = words_.download<unsigned>();
    constexpr std::size_t kStep = sizeof(cuda::ChainWords::Word) / sizeof(unsigned);
    static_assert(offsetof(cuda::ChainWords, launches) == 5 * sizeof(cuda::ChainWords::Word));
    for (std::size_t counter = 0; counter < 5; ++counter) {
      if (words.at(counter * kStep) != 0) {
        return false;
      }
    }
    return true;
  }
  void* words() const { return words_.data(); }

 private:
  std::size_t size(std::int64_t cols) const {
    return static_cast<std::size_t>(m_ * (cols + kGap) * bits_of(dtype_) / 8);
  }
  DType dtype_;
  std::int64_t m_;
  Sizes sizes_;
  const Layer& layer_;
  DeviceBuffer attended_, residual_, activated_, qkv_, normed_, projected_, gate_up_, words_,
      workspace_;
};

class ChainCuda : public ::testing::TestWithParam<std::tuple<DType, Format>> {};
INSTANTIATE_TEST_SUITE_P(
    EveryFormat, ChainCuda,
    ::testing::Combine(::testing::Values(DType::bf16, DType::f16),
                       ::testing::Values(Format{"plain", {}, 0}, Format{"int8", DType::int8, 0},
                                         Format{"e4m3", DType::e4m3, 0},
                                         Format{"int4_32", DType::int4, 32},
                                         Format{"int4_64", DType::int4, 64},
                                         Format{"int4_128", DType::int4, 128})),
    [](const auto& info) {
      return std::string(to_string(std::get<0>(info.param))) + "_" + std::get<1>(info.param).name;
    });

TEST_P(ChainCuda, GivesTheBitsOfItsOperationsOneByOne) {
  RAFTER_SKIP_WITHOUT_SM90();
  const auto& [dtype, format] = GetParam();
  for (const Sizes& sizes : {kSmall, kWide}) {
    const Layer layer(dtype, format, sizes);
    for (const std::int64_t m : {1, 2}) {
      Step chained(dtype, m, sizes, layer), apart(dtype, m, sizes, layer);
      apart.one_by_one();
      const auto wanted = apart.results();
      for (int repeat = 0; repeat < 3; ++repeat) {
        chained.reset();
        must(chained.chain());
        ASSERT_EQ(chained.results(), wanted) << m << " rows of " << sizes.hidden;
        ASSERT_TRUE(chained.intact());
      }
      // A chain right behind a chain, with what the one before left: its letters are older ones.
      chained.reset();
      apart.reset();
      for (int launch = 0; launch < 4; ++launch) {
        must(chained.chain());
        apart.one_by_one();
      }
      ASSERT_EQ(chained.results(), apart.results()) << m << " rows of " << sizes.hidden;
      ASSERT_TRUE(chained.intact());
    }
  }
}

/// Each link by itself, after those before it, against float64 of what was in memory.
TEST_P(ChainCuda, EveryLinkIsItsProduct) {
  RAFTER_SKIP_WITHOUT_SM90();
  const auto& [dtype, format] = GetParam();
  const std::int64_t m = 2;
  const Layer layer(dtype, format, kSmall);
  const Step step(dtype, m, kSmall, layer);
  const std::vector<Link> links = step.links();
  const Product* const products[] = {&layer.o, &layer.gate_up, &layer.down, &layer.qkv};
  const double rounding = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  // Elements of a view that is on the device.
  const auto values = [&, dtype = dtype](const TensorView& view) {
    std::vector<double> all;
    for (std::int64_t row = 0; row < view.seqlen; ++row) {
      std::vector<std::uint16_t> bits(static_cast<std::size_t>(view.head_dim));
      EXPECT_EQ(cudaMemcpy(bits.data(),
                           static_cast<const std::uint16_t*>(view.data) + row * view.stride_seqlen,
                           bits.size() * 2, cudaMemcpyDeviceToHost),
                cudaSuccess);
      const TensorView host{.data = bits.data(), .dtype = dtype};
      for (std::int64_t i = 0; i < view.head_dim; ++i) {
        all.push_back(base::load_element(host, i));
      }
    }
    return all;
  };
  for (std::size_t i = 0; i < links.size(); ++i) {
    const Link& link = links[i];
    const std::int64_t k = link.x.head_dim, cols = link.out.head_dim;
    const std::int64_t n = link.end == LinkEnd::swiglu ? 2 * cols : cols;
    std::vector<double> x = values(link.x);
    const std::vector<double> before = values(link.out), bias = values(link.bias),
                              weight = products[i]->values();
    if (link.norm.data != nullptr) {
      const std::vector<double> norm = values(link.norm);
      for (std::int64_t row = 0; row < m; ++row) {
        double squares = 0;
        for (std::int64_t d = 0; d < k; ++d) {
          const double value = x[static_cast<std::size_t>(row * k + d)];
          squares += value * value;
        }
        for (std::int64_t d = 0; d < k; ++d) {
          x[static_cast<std::size_t>(row * k + d)] *=
              norm[static_cast<std::size_t>(d)] /
              std::sqrt(squares / static_cast<double>(k) + static_cast<double>(kEps));
        }
      }
    }
    must(step.chain(std::span(&link, 1)));
    const std::vector<double> got = values(link.out);
    const auto product = [&](std::int64_t row, std::int64_t col) {
      double sum = bias[static_cast<std::size_t>(col)];
      for (std::int64_t d = 0; d < k; ++d) {
        sum += x[static_cast<std::size_t>(row * k + d)] *
               weight[static_cast<std::size_t>(col * k + d)];
      }
      return sum;
    };
    for (std::int64_t row = 0; row < m; ++row) {
      for (std::int64_t col = 0; col < cols; ++col) {
        const auto at = static_cast<std::size_t>(row * cols + col);
        double wanted = product(row, col);
        if (link.end == LinkEnd::add) {
          wanted += before[at];
        } else if (link.end == LinkEnd::swiglu) {
          wanted *= product(row, col + n / 2) / (1 + std::exp(-wanted));
        }
        // x, where it is normalised, and what is stored are rounded; sums are of magnitude 1.
        ASSERT_NEAR(got[at], wanted, rounding * (std::abs(wanted) + 4))
            << "link " << i << ", row " << row << ", column " << col;
      }
    }
  }
  EXPECT_TRUE(step.intact());
}

/// No CTA waits for one that has not begun: as many as there is room for do all of the work.
TEST_P(ChainCuda, AnyNumberOfCtasDoesAllOfTheWork) {
  RAFTER_SKIP_WITHOUT_SM90();
  const auto& [dtype, format] = GetParam();
  const Layer layer(dtype, format, kSmall);
  Step step(dtype, 2, kSmall, layer);
  must(step.chain());
  const auto wanted = step.results();
  const std::vector<Link> links = step.links();
  for (const int blocks : {1, 2, 7, 1000}) {
    step.reset();
    cuda::ChainParams params;
    params.count = 4;
    params.m = 2;
    params.dtype = dtype;
    params.eps = kEps;
    params.words = static_cast<cuda::ChainWords*>(step.words());
    params.blocks = blocks;
    for (std::size_t i = 0; i < links.size(); ++i) {
      const Link& link = links[i];
      params.phases[i] = {.x = link.x.data,
                          .norm = link.norm.data,
                          .weight = format.packed ? link.packed.data : link.weight.data,
                          .bias = link.bias.data,
                          .y = link.out.data,
                          .x_stride = link.x.stride_seqlen,
                          .y_stride = link.out.stride_seqlen,
                          .packed = format.packed,
                          .group_size = static_cast<int>(format.group_size),
                          .n = format.packed ? link.packed.n : link.weight.seqlen,
                          .k = static_cast<int>(link.x.head_dim),
                          .end = link.end};
    }
    must(cuda::launch_chain_rows(params, nullptr));
    ASSERT_EQ(step.results(), wanted) << blocks << " CTAs";
    ASSERT_TRUE(step.intact());
  }
}

/// 200 launches of each of two chains, as graphs on two streams, while a third stream's products
/// take SMs by turns.
TEST_P(ChainCuda, TwoStreamsAndOthersShareTheDevice) {
  RAFTER_SKIP_WITHOUT_SM90();
  const auto& [dtype, format] = GetParam();
  constexpr int kLaunches = 20, kReplays = 10;
  const Layer layer(dtype, format, kWide);
  std::vector<Step> steps;
  for (int i = 0; i < 3; ++i) {
    steps.emplace_back(dtype, 1, kWide, layer);
  }
  must(steps[2].chain());
  const auto wanted = steps[2].results();
  const std::int64_t n = 2048;
  const DeviceBuffer other(uniform(dtype, n * n, 5, 0.1f)),
      out(static_cast<std::size_t>(n * n * 2)),
      workspace(static_cast<std::size_t>(linear_workspace_bytes(Device::cuda())));
  cudaStream_t streams[3];
  cudaGraphExec_t graphs[2];
  for (cudaStream_t& stream : streams) {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  }
  for (std::size_t i = 0; i < 2; ++i) {
    cudaGraph_t graph;
    ASSERT_EQ(cudaStreamBeginCapture(streams[i], cudaStreamCaptureModeThreadLocal), cudaSuccess);
    for (int launch = 0; launch < kLaunches; ++launch) {
      steps[i].reset(streams[i]);
      must(steps[i].chain(streams[i]));
    }
    ASSERT_EQ(cudaStreamEndCapture(streams[i], &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&graphs[i], graph, 0), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  for (int replay = 0; replay < kReplays; ++replay) {
    for (std::size_t i = 0; i < 2; ++i) {
      ASSERT_EQ(cudaGraphLaunch(graphs[i], streams[i]), cudaSuccess);
    }
    must(linear(
        {.x = matrix(other.data(), dtype, n, n), .weight = matrix(other.data(), dtype, n, n)},
        matrix(out.data(), dtype, n, n),
        {workspace.data(), static_cast<std::int64_t>(workspace.bytes())}, Device::cuda(),
        {streams[2]}));
  }
  for (const cudaStream_t stream : streams) {
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(steps[i].results(), wanted) << "stream " << i;
    EXPECT_TRUE(steps[i].intact());
    EXPECT_EQ(cudaGraphExecDestroy(graphs[i]), cudaSuccess);
  }
  for (const cudaStream_t stream : streams) {
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
}

/// A session's steps are chains where it has one or two sequences, packed weights and fuses, and
/// give the logits of the definition.
TEST(TransformerCuda, AStepOfFewSequencesChainsItsProducts) {
  RAFTER_SKIP_WITHOUT_SM90();
  TransformerConfig config;
  config.model = {.name = "small",
                  .hidden_size = 256,
                  .intermediate_size = 384,
                  .num_layers = 3,
                  .heads_q = 4,
                  .heads_kv = 2,
                  .head_dim = 64,
                  .vocab_size = 64,
                  .qkv_bias = true,
                  .qk_norm = true};
  for (const WeightFormat& weights :
       {WeightFormat{}, WeightFormat{DType::int8, 0}, WeightFormat{DType::int4, 64}}) {
    const Result<Transformer> model =
        Transformer::random(config, 7, Device::cuda(), DType::bf16, weights);
    ASSERT_TRUE(model) << model.status().message();
    const TransformerOracle oracle = TransformerOracle::of(*model);
    for (const bool fuse : {false, true}) {
      for (const std::size_t batch : {1U, 2U, 3U}) {
        Result<TransformerSession> session = TransformerSession::make(
            *model, {.max_batch = 3, .max_seqlen = 40, .page_size = 16, .fuse = fuse});
        ASSERT_TRUE(session) << session.status().message();
        std::vector<std::vector<std::int32_t>> texts = {{5, 61, 3, 3, 17}, {9, 9}, {4}};
        texts.resize(batch);
        must(session->prefill(texts));
        for (std::int32_t step = 0; step < 4; ++step) {
          std::vector<std::int32_t> next;
          for (std::vector<std::int32_t>& text : texts) {
            next.push_back(static_cast<std::int32_t>(7 * step + 3));
            text.push_back(next.back());
          }
          must(session->decode(next));
          // About twenty roundings of 2^-9 on the way.
          ASSERT_LE(logits_error(*session, oracle, texts), 0.05) << batch << ", fuse " << fuse;
        }
        int chains = 0;
        double said = 0;
        for (const StepOperation& operation : session->operations(Phase::decode)) {
          chains += operation.kernel == "chain_rows" ? 1 : 0;
          said += operation.cost.launches;
        }
        EXPECT_EQ(chains, fuse && batch < 3 && weights.dtype ? config.model.num_layers + 1 : 0);
        if (batch < 3) {
          EXPECT_EQ(static_cast<double>(session->count_launches(Phase::decode).value()), said);
          const ModelStep step{.model = config.model,
                               .phase = Phase::decode,
                               .seqlen = 10,
                               .batch = static_cast<std::int64_t>(batch),
                               .pipeline = Pipeline::split_kv,
                               .fuse = fuse,
                               .chain = chains > 0};
          EXPECT_EQ(model_budget(step, *find_device("h200"))->launches, said);
        }
      }
    }
  }
}

TEST(Chain, WhatTheLinkBeforeDoesNotWriteIsRefused) {
  RAFTER_SKIP_WITHOUT_SM90();
  const Format plain{"plain", {}, 0};
  const Layer layer(DType::bf16, plain, kSmall);
  const Step step(DType::bf16, 1, kSmall, layer);
  std::vector<Link> links = step.links();
  links[1].x = links[3].out;
  links[1].x.head_dim = kSmall.hidden;
  const Status refused = step.chain(links);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("links[1]"), std::string::npos) << refused.message();
  // a part of it has its address and strides
  links = step.links();
  links[2].x = columns(links[2].x, 0, 128);
  links[2].weight = matrix(links[2].weight.data, DType::bf16, kSmall.hidden, 128);
  const Status part = step.chain(links);
  EXPECT_EQ(part.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(part.message().find("links[2].x"), std::string::npos) << part.message();
}

TEST(Chain, LinksWithoutColumnsAndPackedWeightsWithoutAnAddressAreRefused) {
  RAFTER_SKIP_WITHOUT_SM90();
  const Format plain{"plain", {}, 0};
  const Layer layer(DType::bf16, plain, kSmall);
  const Step step(DType::bf16, 1, kSmall, layer);
  Link none = step.links()[0], nowhere = none;
  none.x.head_dim = none.weight.head_dim = 0;
  EXPECT_NE(step.chain(std::vector<Link>{none}).message().find("x.head_dim"), std::string::npos);
  nowhere.packed = {.dtype = DType::int8, .n = 16, .k = nowhere.x.head_dim};
  EXPECT_NE(step.chain(std::vector<Link>{nowhere}).message().find("packed.data"),
            std::string::npos);
}

TEST(Chain, WhatNoKernelTakesIsRefusedByName) {
  float memory[64] = {};
  const TensorView one = matrix(memory, DType::bf16, 1, 128),
                   three = matrix(memory, DType::bf16, 3, 128);
  const PackedWeight int4{.dtype = DType::int4, .n = 16, .k = 128, .group_size = 64};
  const PackedWeight int8{.dtype = DType::int8, .n = 16, .k = 128};
  const auto why = [](const std::vector<Link>& links, const Device& device = Device::cuda()) {
    return why_no_linear_chain(links, device);
  };
  const Link good{.x = one, .packed = int4, .out = matrix(memory, DType::bf16, 1, 16)};
  Link wide = good, other = good, bytes = good;
  wide.x = three;
  other.packed.group_size = 128;
  bytes.packed = int8;
  EXPECT_FALSE(why({good}, Device::cpu()).empty());
  EXPECT_EQ(why({good, good, good, good}), "");
  EXPECT_EQ(why({}), "a chain has 1 to 4 products");
  EXPECT_EQ(why({good, good, good, good, good}), "a chain has 1 to 4 products");
  EXPECT_EQ(why({wide}), "chain_rows takes 1 to 2 rows");
  EXPECT_EQ(why({good, other}), "the weights of a chain have one format");
  EXPECT_EQ(why({good, bytes}), "the weights of a chain have one format");
  Link odd = good;
  odd.end = LinkEnd::swiglu;
  EXPECT_EQ(why({odd}), "columns are in multiples of 32");
}

}  // namespace
}  // namespace rafter::testing
