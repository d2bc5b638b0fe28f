// The operations of layers.h on CUDA against the CPU's, and whole models against float64.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <vector>

#include "base/element.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/require_sm90.h"
#include "rafter/layers.h"
#include "support/transformer_oracle.h"

namespace rafter::testing {
namespace {

/// A matrix whose rows lie `gap` elements further apart than they are long, on both sides alike.
class Twin {
 public:
  Twin(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t gap, std::uint64_t seed)
      : host_(static_cast<std::size_t>(rows * (cols + gap)) * 4, 0xff),
        view_(matrix(host_.data(), dtype, rows, cols)) {
    view_.stride_seqlen = cols + gap;
    view_.stride_batch = rows * (cols + gap);
    std::vector<float> values(static_cast<std::size_t>(rows * cols));
    EXPECT_TRUE(
        fill_uniform(matrix(values.data(), DType::f32, rows, cols), seed, 2.0f, Device::cpu()));
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      base::store_element(view_, i / cols * view_.stride_seqlen + i % cols,
                          values[static_cast<std::size_t>(i)]);
    }
    device_ = std::make_unique<DeviceBuffer>(host_);
  }
  const TensorView& host() const { return view_; }
  /// What the device has is what the host has.
  void keep() const {
    const std::vector<std::uint8_t> bytes = device_->download<std::uint8_t>();
    std::memcpy(view_.data, bytes.data(), bytes.size());
  }
  TensorView device() const {
    TensorView view = view_;
    view.data = device_->data();
    return view;
  }
  /// Every element of the device's within `ulps` of the dtype and `absolute` of the host's (0: the
  /// same bits), and nothing between the rows touched.
  void expect_same(double ulps, const char* what, double absolute = 1e-6) const {
    const std::vector<std::uint8_t> bytes = device_->download<std::uint8_t>();
    TensorView got = view_;
    got.data = const_cast<std::uint8_t*>(bytes.data());
    const double ulp = view_.dtype == DType::f32   ? 0x1p-23
                       : view_.dtype == DType::f16 ? 0x1p-10
                                                   : 0x1p-7;
    for (std::int64_t i = 0; i < view_.seqlen * view_.stride_seqlen; ++i) {
      const double a = base::load_element(got, i), b = base::load_element(view_, i);
      if (std::isnan(b)) {
        ASSERT_TRUE(std::isnan(a)) << what << " element " << i;
      } else {
        ASSERT_LE(std::abs(a - b), ulps * ulp * std::abs(b) + (ulps > 0 ? absolute : 0))
            << what << " element " << i << ": " << a << " for " << b;
      }
    }
    EXPECT_TRUE(device_->guards_intact()) << what;
  }

 private:
  std::vector<std::uint8_t> host_;
  TensorView view_;
  std::unique_ptr<DeviceBuffer> device_;
};

class LayersCuda : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(EveryDtype, LayersCuda,
                         ::testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(LayersCuda, RmsNormGivesWhatTheCpuDoes) {
  RAFTER_SKIP_WITHOUT_SM90();
  const DType dtype = GetParam();
  for (const std::int64_t cols : {1, 7, 64, 128, 250, 256, 264, 1001, 4096, 8192, 16384}) {
    for (const std::int64_t gap : {0, 3, 8}) {
      const Twin x(dtype, 3, cols, gap, 1), residual(dtype, 3, cols, gap, 2),
          weight(dtype, 1, cols, 0, 3);
      const Twin y(dtype, 3, cols, gap, 4), sum(dtype, 3, cols, gap, 5);
      for (const Device& device : {Device::cpu(), Device::cuda()}) {
        const bool host = device.kind == Device::Kind::cpu;
        const auto at = [host](const Twin& t) { return host ? t.host() : t.device(); };
        must(rmsnorm({.x = at(x), .residual = at(residual), .weight = at(weight), .eps = 1e-3f},
                     {.y = at(y), .sum = at(sum)}, device));
        must(rmsnorm({.x = at(residual), .weight = at(weight)}, {.y = at(residual)}, device));
      }
      sum.expect_same(0, "sum");
      y.expect_same(1 + (dtype == DType::f32 ? 16 : 0), "y");
      residual.expect_same(1 + (dtype == DType::f32 ? 16 : 0), "in place");
    }
  }
  const Twin wide(dtype, 1, 16385, 0, 1), weight(dtype, 1, 16385, 0, 2);
  EXPECT_EQ(
      rmsnorm({.x = wide.device(), .weight = weight.device()}, {.y = wide.device()}, Device::cuda())
          .parameter(),
      "x.head_dim");
}

/// More rows than the SMs hold are shared out among fewer threads each.
TEST_P(LayersCuda, ARowHasTheSameBitsAmongManyAndFew) {
  RAFTER_SKIP_WITHOUT_SM90();
  const DType dtype = GetParam();
  constexpr std::int64_t kRows = 700, kFew = 3;
  const std::vector<std::int32_t> positions(kRows, 2);
  const DeviceBuffer there(positions);
  const Twin cos(DType::f32, 5, 32, 0, 1), sin(DType::f32, 5, 32, 0, 2);
  const Rope tables{.cos = static_cast<const float*>(cos.device().data),
                    .sin = static_cast<const float*>(sin.device().data),
                    .max_position = 5,
                    .rotary_dim = 64};
  for (const std::int64_t cols : {320, 4096, 8256}) {
    const Twin x(dtype, kRows, cols, 0, 1), weight(dtype, 1, cols, 0, 3);
    const Twin normed(dtype, kRows, cols, 0, 4), turned(dtype, kRows, cols, 0, 5);
    for (const std::int64_t rows : {kRows, kFew}) {
      const auto first = [rows](const Twin& t) {
        TensorView view = t.device();
        view.seqlen = rows;
        return view;
      };
      must(rmsnorm({.x = first(x), .weight = weight.device()}, {.y = first(normed)},
                   Device::cuda()));
      must(rope(heads_of(first(x), cols / 64, 64), {there.data(), DType::i32, rows}, tables,
                heads_of(first(turned), cols / 64, 64), Device::cuda()));
      if (rows == kRows) {
        normed.keep();
        turned.keep();
      }
    }
    normed.expect_same(0, "normed");
    turned.expect_same(0, "turned");
  }
}

TEST_P(LayersCuda, PointwiseGatherAndUniformGiveWhatTheCpuDoes) {
  RAFTER_SKIP_WITHOUT_SM90();
  const DType dtype = GetParam();
  for (const std::int64_t cols : {1, 8, 67, 2048}) {
    for (const std::int64_t gap : {0, 5, 16}) {
      for (const Pointwise function :
           {Pointwise::add, Pointwise::multiply, Pointwise::silu, Pointwise::swiglu}) {
        const Twin a(dtype, 5, cols, gap, 1), b(dtype, 5, cols, gap, 2),
            out(dtype, 5, cols, gap, 3);
        const bool one = function == Pointwise::silu;
        must(pointwise(function, a.host(), one ? TensorView{} : b.host(), out.host(),
                       Device::cpu()));
        must(pointwise(function, a.device(), one ? TensorView{} : b.device(), out.device(),
                       Device::cuda()));
        const bool exact = function == Pointwise::add || function == Pointwise::multiply;
        out.expect_same(exact ? 0 : dtype == DType::f32 ? 16 : 1, to_string(function));
      }
      const Twin table(dtype, 6, cols, gap, 4), out(dtype, 3, cols, gap, 5);
      const std::vector<std::int32_t> rows = {5, 0, 5}, beyond = {6, -1, 2};
      const DeviceBuffer there(rows), bad(beyond);
      must(gather(table.host(), {rows.data(), DType::i32, 3}, out.host(), Device::cpu()));
      must(gather(table.device(), {there.data(), DType::i32, 3}, out.device(), Device::cuda()));
      out.expect_same(0, "gather");
      must(gather(table.device(), {bad.data(), DType::i32, 3}, out.device(), Device::cuda()));
      for (std::int64_t i = 0; i < 2 * out.host().stride_seqlen; ++i) {
        base::store_element(out.host(), i, NAN);
      }
      const std::int64_t size = bits_of(dtype) / 8, row = 2 * table.host().stride_seqlen * size;
      std::memcpy(static_cast<std::byte*>(out.host().data) + row,
                  static_cast<const std::byte*>(table.host().data) + row,
                  static_cast<std::size_t>(cols * size));
      out.expect_same(0, "gather of rows that are not there");
    }
    const Twin random(dtype, 3, cols, 0, 9);
    for (const Device& device : {Device::cpu(), Device::cuda()}) {
      const bool host = device.kind == Device::Kind::cpu;
      must(fill_uniform(host ? random.host() : random.device(), 77, 0.3f, device));
    }
    random.expect_same(0, "uniform");
  }
}

TEST_P(LayersCuda, RopeGivesTheBitsOfTheCpu) {
  RAFTER_SKIP_WITHOUT_SM90();
  const DType dtype = GetParam();
  const std::vector<std::int32_t> positions = {0, 4, 2};
  const DeviceBuffer there(positions);
  for (const auto& [dim, rotary] : {std::pair{16, 16}, std::pair{128, 128}, std::pair{12, 8}}) {
    const std::int64_t heads = dim == 16 ? 9 : 2;
    const Twin cos(DType::f32, 5, rotary / 2, 0, 1), sin(DType::f32, 5, rotary / 2, 0, 2);
    for (const auto pairs : {Rope::Pairs::half_split, Rope::Pairs::interleaved}) {
      const Twin x(dtype, 3, heads * dim, 8, 3);  // turns in place
      for (const Device& device : {Device::cpu(), Device::cuda()}) {
        const bool host = device.kind == Device::Kind::cpu;
        const auto table = [host](const Twin& t) {
          return static_cast<const float*>(host ? t.host().data : t.device().data);
        };
        const TensorView view = heads_of(host ? x.host() : x.device(), heads, dim);
        must(rope(view, {host ? positions.data() : there.data(), DType::i32, 3},
                  {.cos = table(cos),
                   .sin = table(sin),
                   .max_position = 5,
                   .rotary_dim = rotary,
                   .pairs = pairs},
                  view, device));
      }
      x.expect_same(0, "rope");
    }
  }
}

/// Few rows (our kernel) and many (cuBLASLt), with and without a bias, in the dtype and in f32.
TEST_P(LayersCuda, LinearIsTheProductWithTheTransposedWeight) {
  RAFTER_SKIP_WITHOUT_SM90();
  const DType dtype = GetParam();
  const DeviceBuffer workspace(static_cast<std::size_t>(linear_workspace_bytes(Device::cuda())));
  for (const auto& [n, k] : {std::pair{8, 8}, std::pair{24, 2056}, std::pair{40, 11008}}) {
    for (const std::int64_t m : {1, 2, 3, 4, 5, 64}) {
      const Twin x(dtype, m, k, 8, 1), weight(dtype, n, k, 0, 2), bias(dtype, 1, n, 0, 3);
      for (const int kind : {0, 1, 2}) {  // plain, with a bias, in f32
        const Twin out(kind == 2 ? DType::f32 : dtype, m, n, 8, 4);
        must(linear({.x = x.device(),
                     .weight = weight.device(),
                     .bias = kind == 1 ? bias.device() : TensorView{}},
                    out.device(), {workspace.data(), static_cast<std::int64_t>(workspace.bytes())},
                    Device::cuda()));
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) {
            double sum = kind == 1 ? base::load_element(bias.host(), j) : 0;
            for (std::int64_t d = 0; d < k; ++d) {
              sum += base::load_element(x.host(), i * x.host().stride_seqlen + d) *
                     base::load_element(weight.host(), j * k + d);
            }
            base::store_element(out.host(), i * out.host().stride_seqlen + j, sum);
          }
        }
        SCOPED_TRACE(std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k) +
                     ", kind " + std::to_string(kind));
        // Sums of magnitude √k, which tensor cores cut to 24 bits every 16 products.
        out.expect_same(1, "linear", k * 0x1p-20);
      }
    }
  }
}

TEST(AdvanceCuda, AddsToEveryCount) {
  RAFTER_SKIP_WITHOUT_SM90();
  const DeviceBuffer counts(std::vector<std::int32_t>{5, -1, 7});
  must(advance({static_cast<std::int32_t*>(counts.data()), 2}, 3, Device::cuda()));
  EXPECT_EQ(counts.download<std::int32_t>(), (std::vector<std::int32_t>{8, 2, 7}));
  EXPECT_TRUE(counts.guards_intact());
}

/// Prompts prefilled together, decoded together through a captured graph: the logits of the
/// definition, up to the roundings of the dtype between operations.
TEST(TransformerCuda, PrefillAndDecodeGiveTheLogitsOfTheDefinition) {
  RAFTER_SKIP_WITHOUT_SM90();
  TransformerConfig config;
  config.model = {.name = "small",
                  .hidden_size = 64,
                  .intermediate_size = 96,
                  .num_layers = 2,
                  .heads_q = 4,
                  .heads_kv = 2,
                  .head_dim = 32,
                  .vocab_size = 64,
                  .qkv_bias = true,
                  .qk_norm = true};
  for (const auto& [dtype, bound] : {std::pair{DType::bf16, 0.05}, std::pair{DType::f16, 0.007}}) {
    const Result<Transformer> model = Transformer::random(config, 7, Device::cuda(), dtype);
    ASSERT_TRUE(model) << model.status().message();
    const TransformerOracle oracle = TransformerOracle::of(*model);
    for (const bool fuse : {true, false}) {
      for (const std::vector<std::size_t>& lengths :
           {std::vector<std::size_t>{70, 1, 33}, {17}, {9, 9, 9, 9, 9}}) {
        Result<TransformerSession> session = TransformerSession::make(
            *model, {.max_batch = 5, .max_seqlen = 90, .page_size = 16, .fuse = fuse});
        ASSERT_TRUE(session) << session.status().message();
        std::mt19937 generator(3);
        const auto token = [&generator] { return static_cast<std::int32_t>(generator() % 64); };
        std::vector<std::vector<std::int32_t>> texts;
        for (const std::size_t length : lengths) {
          std::generate_n(std::back_inserter(texts.emplace_back()), length, token);
        }
        must(session->prefill(texts));
        for (int step = 0; step < 4; ++step) {
          // The root mean square: about twenty roundings of 2^-9 (f16: 2^-12) on the way.
          ASSERT_LE(logits_error(*session, oracle, texts), bound)
              << to_string(dtype) << ", fuse " << fuse << ", step " << step;
          std::vector<std::int32_t> next;
          for (std::vector<std::int32_t>& text : texts) {
            next.push_back(token());
            text.push_back(next.back());
          }
          must(session->decode(next));
        }
        const Result<std::int64_t> launches = session->count_launches(Phase::decode);
        ASSERT_TRUE(launches) << launches.status().message();
        double said = 0;
        for (const StepOperation& operation : session->operations(Phase::decode)) {
          said += operation.cost.launches;
        }
        // A product of more rows than vector_rows takes may cut k, with a second kernel.
        EXPECT_GE(static_cast<double>(*launches), said);
      }
    }
  }
}

/// Sequences of a length such that the memory holds fourteen and a half.
TEST(TransformerCuda, ACacheFillsTheMemoryAsThePlannerSays) {
  RAFTER_SKIP_WITHOUT_SM90();
  TransformerConfig config;
  config.model = {.name = "wide cache",
                  .hidden_size = 64,
                  .intermediate_size = 64,
                  .num_layers = 8,
                  .heads_q = 64,
                  .heads_kv = 64,
                  .head_dim = 16,
                  .vocab_size = 64};
  const Result<Transformer> model = Transformer::random(config, 7, Device::cuda(), DType::bf16);
  ASSERT_TRUE(model) << model.status().message();
  std::size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  const double capacity = static_cast<double>(free) + model->weight_bytes();
  MemoryProblem problem{.model = config.model, .capacity_bytes = capacity, .page_size = 64};
  Convention held;  // what a session takes before its first step
  held.count_activations = held.count_lse = false;
  held.count_qkvo = CountQkvo::never;
  const double of_token = 2.0 * 8 * 64 * 16 * 2;
  const auto seqlen = static_cast<std::int64_t>(static_cast<double>(free) / 14.5 / of_token);
  for (const std::int64_t batch : {14, 15}) {
    problem.batch = batch;
    const Result<MemoryUse> use = memory_use(problem, seqlen, nullptr, held);
    ASSERT_TRUE(use) << use.status().message();
    EXPECT_EQ(use->fits, batch == 14);
    const Result<TransformerSession> session =
        TransformerSession::make(*model, {.max_batch = batch, .max_seqlen = seqlen});
    EXPECT_EQ(session.is_ok(), use->fits) << batch << " sequences of " << seqlen;
    EXPECT_EQ(session.status().code(), use->fits ? StatusCode::kOk : StatusCode::kDeviceError);
  }
}

}  // namespace
}  // namespace rafter::testing
