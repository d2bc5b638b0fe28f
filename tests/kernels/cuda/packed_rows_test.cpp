// Packed weights on CUDA: the bits of the CPU, and products against float64.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/element.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/require_sm90.h"
#include "rafter/layers.h"
#include "support/transformer_oracle.h"

namespace rafter::testing {
namespace {

struct Format {
  const char* name;
  DType dtype;
  std::int64_t group_size;
};
class PackedCuda : public ::testing::TestWithParam<std::tuple<DType, Format>> {};
INSTANTIATE_TEST_SUITE_P(
    EveryFormat, PackedCuda,
    ::testing::Combine(::testing::Values(DType::bf16, DType::f16),
                       ::testing::Values(Format{"int8", DType::int8, 0},
                                         Format{"e4m3", DType::e4m3, 0},
                                         Format{"int4_32", DType::int4, 32},
                                         Format{"int4_64", DType::int4, 64},
                                         Format{"int4_128", DType::int4, 128})),
    [](const auto& info) {
      return std::string(to_string(std::get<0>(info.param))) + "_" + std::get<1>(info.param).name;
    });

/// Rows `gap` elements further apart than they are long, of a 16-bit dtype; gaps are NaN.
std::vector<std::uint16_t> some_rows(DType dtype, std::int64_t rows, std::int64_t cols,
                                     std::int64_t gap, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(rows * cols));
  EXPECT_TRUE(
      fill_uniform(matrix(values.data(), DType::f32, rows, cols), seed, 0.5f, Device::cpu()));
  std::vector<std::uint16_t> all(static_cast<std::size_t>(rows * (cols + gap)), 0xffff);
  for (std::int64_t i = 0; i < rows * cols; ++i) {
    const float value = values[static_cast<std::size_t>(i)];
    all[static_cast<std::size_t>(i / cols * (cols + gap) + i % cols)] =
        dtype == DType::bf16 ? f32_to_bf16(value) : f32_to_f16(value);
  }
  return all;
}
TensorView strided(void* data, DType dtype, std::int64_t rows, std::int64_t cols,
                   std::int64_t gap) {
  TensorView view = matrix(data, dtype, rows, cols);
  view.stride_seqlen = cols + gap;
  view.stride_batch = rows * (cols + gap);
  return view;
}

TEST_P(PackedCuda, QuantizeAndDequantizeGiveTheBitsOfTheCpu) {
  RAFTER_SKIP_WITHOUT_SM90();
  const auto& [dtype, format] = GetParam();
  const std::int64_t n = 48, k = 1152;
  std::vector<std::uint16_t> weight = some_rows(dtype, n, k, 0, 3);
  std::fill_n(weight.begin() + 5 * k, k, 0);
  weight[7 * k + 9] = 0x7fff;             // NaN in both
  for (std::int64_t i = 0; i < k; ++i) {  // subnormal codes of e4m3
    weight[static_cast<std::size_t>(9 * k + i)] =
        dtype == DType::bf16 ? f32_to_bf16(std::ldexp(1.0f, -static_cast<int>(i % 20)))
                             : f32_to_f16(std::ldexp(1.0f, -static_cast<int>(i % 20)));
  }
  PackedWeight host{.dtype = format.dtype, .n = n, .k = k, .group_size = format.group_size};
  const auto bytes = static_cast<std::size_t>(packed_bytes(host).value());
  alignas(16) std::vector<std::uint8_t> on_host(bytes);
  const DeviceBuffer plain(weight), packed(bytes), back(weight.size() * 2);
  PackedWeight device = host;
  host.data = on_host.data();
  device.data = packed.data();
  ASSERT_EQ(reinterpret_cast<std::uintptr_t>(host.data) % 16, 0U);
  must(quantize(matrix(weight.data(), dtype, n, k), host, Device::cpu()));
  must(quantize(matrix(plain.data(), dtype, n, k), device, Device::cuda()));
  EXPECT_EQ(packed.download<std::uint8_t>(), on_host);
  EXPECT_TRUE(packed.guards_intact());
  std::vector<std::uint16_t> wanted(weight.size());
  must(dequantize(host, matrix(wanted.data(), dtype, n, k), Device::cpu()));
  must(dequantize(device, matrix(back.data(), dtype, n, k), Device::cuda()));
  std::vector<std::uint16_t> got = back.download<std::uint16_t>();
  const TensorView a{.data = got.data(), .dtype = dtype}, b{.data = wanted.data(), .dtype = dtype};
  for (std::int64_t i = 0; i < n * k; ++i) {  // NaN has several bits
    ASSERT_TRUE(std::isnan(base::load_element(a, i)) ? std::isnan(base::load_element(b, i))
                                                     : got[i] == wanted[i])
        << i;
  }
  EXPECT_TRUE(back.guards_intact());
}

/// Few rows (our kernel) and many (dequantised, cuBLASLt), more stripes than SMs, lengths of k that
/// leave warps idle, with and without a bias, in the dtype and in f32.
TEST_P(PackedCuda, AProductIsThatOfValuesTimesScales) {
  RAFTER_SKIP_WITHOUT_SM90();
  const auto& [dtype, format] = GetParam();
  for (const auto& [n, k] :
       {std::pair{16, 128}, std::pair{48, 2176}, std::pair{2144, 256}, std::pair{32, 11008}}) {
    const std::vector<std::uint16_t> weight = some_rows(dtype, n, k, 0, 3),
                                     bias = some_rows(dtype, 1, n, 0, 4);
    PackedWeight shape{.dtype = format.dtype, .n = n, .k = k, .group_size = format.group_size};
    const DeviceBuffer plain(weight), packed(static_cast<std::size_t>(packed_bytes(shape).value())),
        of_bias(bias);
    shape.data = packed.data();
    must(quantize(matrix(plain.data(), dtype, n, k), shape, Device::cuda()));
    std::vector<std::uint8_t> bytes = packed.download<std::uint8_t>();
    PackedWeight host = shape;
    host.data = bytes.data();
    std::vector<float> values(static_cast<std::size_t>(n) * k);
    must(dequantize(host, matrix(values.data(), DType::f32, n, k), Device::cpu()));
    for (const std::int64_t m : {1, 2, 5, 8, 9}) {
      const std::vector<std::uint16_t> x = some_rows(dtype, m, k, 8, 5);
      const DeviceBuffer of_x(x), workspace(static_cast<std::size_t>(
                                      linear_workspace_bytes(m, dtype, Device::cuda(), shape)));
      const bool few = linear_kernel(m, dtype, Device::cuda(), shape) == "packed_rows";
      EXPECT_EQ(few, m <= 8) << m;
      for (const int kind : {0, 1, 2}) {  // plain, with a bias, in f32
        const DType out_dtype = kind == 2 ? DType::f32 : dtype;
        const DeviceBuffer out(static_cast<std::size_t>(m * (n + 8) * bits_of(out_dtype) / 8));
        must(linear({.x = strided(of_x.data(), dtype, m, k, 8),
                     .packed = shape,
                     .bias = kind == 1 ? matrix(of_bias.data(), dtype, 1, n) : TensorView{},
                     .weight_is_settled = true},
                    strided(out.data(), out_dtype, m, n, 8),
                    {workspace.data(), static_cast<std::int64_t>(workspace.bytes())},
                    Device::cuda()));
        std::vector<std::uint8_t> got = out.download<std::uint8_t>();
        const TensorView y = strided(got.data(), out_dtype, m, n, 8);
        const TensorView of{.data = const_cast<std::uint16_t*>(x.data()), .dtype = dtype},
            added{.data = const_cast<std::uint16_t*>(bias.data()), .dtype = dtype};
        // Sums cut to 24 bits every 16 products; rounded once to the dtype; many rows multiply
        // weights that were rounded to it.
        const double ulp = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
        for (std::int64_t i = 0; i < m * n; i += kind == 0 ? 1 : 7) {
          const std::int64_t row = i / n, col = i % n;
          double sum = kind == 1 ? base::load_element(added, col) : 0, magnitude = 0;
          for (std::int64_t d = 0; d < k; ++d) {
            const double product = base::load_element(of, row * (k + 8) + d) *
                                   values[static_cast<std::size_t>(col * k + d)];
            sum += product;
            magnitude += product * product;
          }
          const double bound = (kind == 2 ? 0 : ulp * std::abs(sum)) +
                               std::sqrt(magnitude) * (few ? 0x1p-14 : 6 * ulp);
          ASSERT_NEAR(base::load_element(y, row * (n + 8) + col), sum, bound)
              << m << " x " << n << " x " << k << ", kind " << kind << ": " << row << ", " << col;
        }
        for (std::int64_t row = 0; row < m; ++row) {  // between the rows: as it was
          ASSERT_TRUE(std::isnan(base::load_element(y, row * (n + 8) + n + 3)));
        }
        EXPECT_TRUE(out.guards_intact());
      }
    }
  }
}

/// A row's bits are its own among rows that one kernel takes (int4: one or two, or more), and the
/// same when the weight is read ahead.
TEST_P(PackedCuda, ARowsBitsDoNotDependOnTheOthers) {
  RAFTER_SKIP_WITHOUT_SM90();
  const auto& [dtype, format] = GetParam();
  const std::int64_t n = 4096, k = 1024, m = 8;
  PackedWeight shape{.dtype = format.dtype, .n = n, .k = k, .group_size = format.group_size};
  const DeviceBuffer plain(some_rows(dtype, n, k, 0, 3)), x(some_rows(dtype, m, k, 0, 5)),
      packed(static_cast<std::size_t>(packed_bytes(shape).value())),
      workspace(static_cast<std::size_t>(linear_workspace_bytes(Device::cuda())));
  shape.data = packed.data();
  must(quantize(matrix(plain.data(), dtype, n, k), shape, Device::cuda()));
  must(synchronize(Device::cuda(), {}));
  const auto product = [&](std::int64_t first, std::int64_t rows, bool settled) {
    const DeviceBuffer out(static_cast<std::size_t>(rows * n * 4));
    must(linear({.x = matrix(static_cast<std::uint16_t*>(x.data()) + first * k, dtype, rows, k),
                 .packed = shape,
                 .weight_is_settled = settled},
                matrix(out.data(), DType::f32, rows, n),
                {workspace.data(), static_cast<std::int64_t>(workspace.bytes())}, Device::cuda()));
    return out.download<float>();
  };
  const std::vector<float> together = product(0, m, true);
  EXPECT_EQ(together, product(0, m, false));
  const auto expect_rows = [&](const std::vector<float>& got, std::int64_t first,
                               const std::vector<float>& all, std::int64_t at) {
    EXPECT_EQ(got, std::vector<float>(all.begin() + at * n,
                                      all.begin() + at * n + static_cast<std::int64_t>(got.size())))
        << "from row " << first;
  };
  for (std::int64_t i = 0; i + 3 <= m; ++i) {
    expect_rows(product(i, 3, true), i, together, i);
  }
  for (std::int64_t i = 0; i < m; ++i) {
    const std::vector<float> alone = product(i, 1, true);
    expect_rows(alone, i, product(i / 2 * 2, 2, true), i % 2);
    if (format.dtype != DType::int4) {
      expect_rows(alone, i, together, i);
    }
  }
}

/// Rows of magnitudes 2^30 apart, of zeros, of numbers that are not finite: each row is its own.
TEST_P(PackedCuda, RowsOfEveryMagnitudeAreMultiplied) {
  RAFTER_SKIP_WITHOUT_SM90();
  const auto& [dtype, format] = GetParam();
  const std::int64_t n = 64, k = 1024;
  PackedWeight shape{.dtype = format.dtype, .n = n, .k = k, .group_size = format.group_size};
  const DeviceBuffer plain(some_rows(dtype, n, k, 0, 3)),
      packed(static_cast<std::size_t>(packed_bytes(shape).value())),
      workspace(static_cast<std::size_t>(linear_workspace_bytes(Device::cuda())));
  shape.data = packed.data();
  must(quantize(matrix(plain.data(), dtype, n, k), shape, Device::cuda()));
  std::vector<std::uint8_t> bytes = packed.download<std::uint8_t>();
  PackedWeight host = shape;
  host.data = bytes.data();
  std::vector<float> values(static_cast<std::size_t>(n * k));
  must(dequantize(host, matrix(values.data(), DType::f32, n, k), Device::cpu()));
  const auto narrow = [dtype = dtype](float value) {
    return dtype == DType::bf16 ? f32_to_bf16(value) : f32_to_f16(value);
  };
  const auto widen = [dtype = dtype](std::uint16_t bits) {
    return dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  };
  for (const int kind : {0, 1, 2, 3}) {
    std::vector<std::uint16_t> x(static_cast<std::size_t>(2 * k));
    for (std::int64_t i = 0; i < 2 * k; ++i) {
      const int step = static_cast<int>(i * 7 % 31) - 16;  // of f16: into its subnormals
      const float sign = i % 3 == 0 ? -1.0f : 1.0f, odd = 1 + static_cast<float>(i % 13) / 16;
      x[static_cast<std::size_t>(i)] = narrow(i >= k      ? sign * odd
                                              : kind == 0 ? sign * odd * std::ldexp(1.0f, step)
                                              : kind == 1 ? 0.0f
                                                          : sign * odd);
    }
    if (kind >= 2) {
      x[300] = narrow(kind == 2 ? INFINITY : NAN);
    }
    const DeviceBuffer of_x(x), out(static_cast<std::size_t>(2 * n * 4));
    must(linear({.x = matrix(of_x.data(), dtype, 2, k), .packed = shape},
                matrix(out.data(), DType::f32, 2, n),
                {workspace.data(), static_cast<std::int64_t>(workspace.bytes())}, Device::cuda()));
    const std::vector<float> y = out.download<float>();
    for (std::int64_t i = 0; i < 2 * n; ++i) {
      const std::int64_t row = i / n, col = i % n;
      if (row == 0 && kind >= 2) {
        EXPECT_FALSE(std::isfinite(y[static_cast<std::size_t>(i)])) << kind << ": " << col;
        continue;
      }
      double sum = 0, magnitude = 0;
      for (std::int64_t d = 0; d < k; ++d) {
        const double product =
            static_cast<double>(widen(x[static_cast<std::size_t>(row * k + d)])) *
            values[static_cast<std::size_t>(col * k + d)];
        sum += product;
        magnitude += product * product;
      }
      ASSERT_NEAR(y[static_cast<std::size_t>(i)], sum, std::sqrt(magnitude) * 0x1p-14)
          << kind << ": " << row << ", " << col;
    }
    EXPECT_TRUE(out.guards_intact());
  }
}

/// Prefill (dequantised) and decode (packed, through a captured graph) of a whole model.
TEST(TransformerCuda, QuantizedWeightsGiveTheLogitsOfTheirValues) {
  RAFTER_SKIP_WITHOUT_SM90();
  TransformerConfig config;
  config.model = {.name = "small",
                  .hidden_size = 256,
                  .intermediate_size = 384,
                  .num_layers = 2,
                  .heads_q = 4,
                  .heads_kv = 2,
                  .head_dim = 64,
                  .vocab_size = 64,
                  .qkv_bias = true};
  for (const DType weights : {DType::int8, DType::e4m3, DType::int4}) {
    const Result<Transformer> model =
        Transformer::random(config, 7, Device::cuda(), DType::bf16, {weights, 64});
    ASSERT_TRUE(model) << model.status().message();
    const TransformerOracle oracle = TransformerOracle::of(*model);
    Result<TransformerSession> session =
        TransformerSession::make(*model, {.max_batch = 2, .max_seqlen = 40, .page_size = 16});
    ASSERT_TRUE(session) << session.status().message();
    std::vector<std::vector<std::int32_t>> texts = {{5, 61, 3, 3, 17},
                                                    std::vector<std::int32_t>(19, 9)};
    must(session->prefill(texts));
    for (int step = 0; step < 4; ++step) {
      // About twenty roundings of 2^-9 on the way, as with plain weights.
      ASSERT_LE(logits_error(*session, oracle, texts), 0.05)
          << to_string(weights) << ", step " << step;
      const std::vector<std::int32_t> next = {step, 7 * step};
      texts[0].push_back(next[0]);
      texts[1].push_back(next[1]);
      must(session->decode(next));
    }
    for (const StepOperation& operation : session->operations(Phase::decode)) {
      if (operation.name == "qkv" || operation.name == "down") {
        EXPECT_EQ(operation.kernel, "chain_rows");
      }
    }
    for (const StepOperation& operation : session->operations(Phase::prefill)) {
      if (operation.name == "qkv" || operation.name == "down") {
        EXPECT_EQ(operation.kernel, "dequantize+cublaslt");
        EXPECT_EQ(operation.cost.launches, 2);
      }
    }
  }
}

}  // namespace
}  // namespace rafter::testing
