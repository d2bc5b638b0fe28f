// quantize(), dequantize() and products with packed weights on the CPU, against the rule that
// layers.h states, applied element by element.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "rafter/layers.h"
#include "support/must.h"

namespace rafter {
namespace {

using testing::must;

struct Packed {
  PackedWeight weight;
  std::vector<std::uint64_t> bytes;  // aligned

  Packed(DType dtype, std::int64_t n, std::int64_t k, std::int64_t group_size) {
    weight = {.dtype = dtype, .n = n, .k = k, .group_size = group_size};
    const Result<std::int64_t> size = packed_bytes(weight);
    EXPECT_TRUE(size) << size.status().message();
    bytes.assign(static_cast<std::size_t>(*size / 8 + 2), ~std::uint64_t{0});
    auto* const first = reinterpret_cast<std::byte*>(bytes.data());
    weight.data = first + (16 - reinterpret_cast<std::uintptr_t>(first) % 16) % 16;
  }
};

std::vector<float> some_values(std::int64_t count, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(count));
  EXPECT_TRUE(fill_uniform(matrix(values.data(), DType::f32, 1, count), seed, 0.5f, Device::cpu()));
  return values;
}

/// What an element becomes by its scale.
float rounded(DType dtype, float value, float scale) {
  if (scale == 0) {
    return 0;
  }
  if (dtype == DType::e4m3) {
    return e4m3_to_f32(f32_to_e4m3(value / scale)) * scale;
  }
  const float limit = dtype == DType::int4 ? 7 : 127;
  return std::min(limit, std::max(-limit, std::nearbyintf(value / scale))) * scale;
}

struct Format {
  const char* name;
  DType dtype;
  std::int64_t group_size;
  float limit;
};
class EveryFormat : public ::testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(PackedWeight, EveryFormat,
                         ::testing::Values(Format{"int8", DType::int8, 0, 127},
                                           Format{"e4m3", DType::e4m3, 0, 448},
                                           Format{"int4_32", DType::int4, 32, 7},
                                           Format{"int4_64", DType::int4, 64, 7},
                                           Format{"int4_128", DType::int4, 128, 7}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(EveryFormat, EveryElementIsTheNearestMultipleOfItsScale) {
  const Format f = GetParam();
  const std::int64_t n = 48, k = 384, cols = f.group_size > 0 ? f.group_size : k;
  std::vector<float> values = some_values(n * k, 3);
  std::fill_n(values.begin() + 5 * k, k, 0.0f);  // a row of nothing
  values[static_cast<std::size_t>(7 * k + 9)] = NAN;
  values[static_cast<std::size_t>(8 * k + k - 1)] = -INFINITY;
  const Packed packed(f.dtype, n, k, f.group_size);
  must(quantize(matrix(values.data(), DType::f32, n, k), packed.weight, Device::cpu()));
  std::vector<float> got(values.size(), NAN);
  must(dequantize(packed.weight, matrix(got.data(), DType::f32, n, k), Device::cpu()));
  for (std::int64_t row = 0; row < n; ++row) {
    for (std::int64_t first = 0; first < k; first += cols) {
      const float* const of = values.data() + row * k + first;
      float largest = 0;
      bool finite = true;
      for (std::int64_t i = 0; i < cols; ++i) {
        largest = std::max(largest, std::abs(of[i]));
        finite = finite && std::isfinite(of[i]);
      }
      float scale = largest / f.limit;
      if (f.dtype == DType::int4) {
        scale = bf16_to_f32(f32_to_bf16(scale));
      }
      for (std::int64_t i = 0; i < cols; ++i) {
        const float value = got[static_cast<std::size_t>(row * k + first + i)];
        if (finite) {
          ASSERT_EQ(value, rounded(f.dtype, of[i], scale)) << row << ", " << first + i;
        } else {
          ASSERT_TRUE(std::isnan(value)) << row << ", " << first + i;
        }
      }
    }
  }
  std::vector<std::uint16_t> half(values.size());
  must(dequantize(packed.weight, matrix(half.data(), DType::bf16, n, k), Device::cpu()));
  for (std::size_t i = 0; i < half.size(); ++i) {
    ASSERT_TRUE(std::isnan(got[i]) ? std::isnan(bf16_to_f32(half[i]))
                                   : half[i] == f32_to_bf16(got[i]))
        << i;
  }
}

TEST_P(EveryFormat, AProductIsThatOfTheDequantizedWeight) {
  const Format f = GetParam();
  const std::int64_t m = 3, n = 32, k = 256;
  const std::vector<float> values = some_values(n * k, 3), x = some_values(m * k, 4),
                           bias = some_values(n, 5);
  const Packed packed(f.dtype, n, k, f.group_size);
  must(quantize(matrix(values.data(), DType::f32, n, k), packed.weight, Device::cpu()));
  std::vector<float> plain(values.size());
  must(dequantize(packed.weight, matrix(plain.data(), DType::f32, n, k), Device::cpu()));
  std::vector<float> y(static_cast<std::size_t>(m * n), NAN);
  const std::int64_t needed = linear_workspace_bytes(m, DType::f32, Device::cpu(), packed.weight);
  EXPECT_EQ(needed, n * k * 4);
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> workspace(static_cast<std::size_t>(needed / 64));
  const LinearInputs in{.x = matrix(x.data(), DType::f32, m, k),
                        .packed = packed.weight,
                        .bias = matrix(bias.data(), DType::f32, 1, n)};
  const Workspace lent{workspace.data(), needed};
  must(linear(in, matrix(y.data(), DType::f32, m, n), lent, Device::cpu()));
  EXPECT_EQ(linear_kernel(m, DType::f32, Device::cpu(), packed.weight), "dequantize+onednn");
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = bias[static_cast<std::size_t>(j)];
      for (std::int64_t d = 0; d < k; ++d) {
        sum += static_cast<double>(x[static_cast<std::size_t>(i * k + d)]) *
               plain[static_cast<std::size_t>(j * k + d)];
      }
      ASSERT_NEAR(y[static_cast<std::size_t>(i * n + j)], sum, 1e-5) << i << ", " << j;
    }
  }
  EXPECT_EQ(linear(in, matrix(y.data(), DType::f32, m, n), {lent.data, needed - 4}, Device::cpu())
                .parameter(),
            "workspace.bytes");
}

TEST(PackedWeight, WhatCannotBePackedIsRefusedByName) {
  const auto refused = [](const PackedWeight& w) { return packed_bytes(w).status().parameter(); };
  const PackedWeight good{.dtype = DType::int4, .n = 16, .k = 256, .group_size = 128};
  EXPECT_EQ(refused(good), "");
  const auto with = [&good](auto change) {
    PackedWeight w = good;
    change(w);
    return w;
  };
  EXPECT_EQ(refused(with([](PackedWeight& w) { w.group_size = 96; })), "shape.group_size");
  EXPECT_EQ(refused(with([](PackedWeight& w) { w.group_size = 0; })), "shape.group_size");
  EXPECT_EQ(refused(with([](PackedWeight& w) { w.dtype = DType::int8; })), "shape.group_size");
  EXPECT_EQ(refused(with([](PackedWeight& w) { w.dtype = DType::bf16; })), "shape.dtype");
  EXPECT_EQ(refused(with([](PackedWeight& w) { w.n = 24; })), "shape.n");
  EXPECT_EQ(refused(with([](PackedWeight& w) { w.k = 192; })), "shape.k");
  EXPECT_EQ(refused(with([](PackedWeight& w) { w.k = 0; })), "shape.k");
  EXPECT_EQ(refused(with([](PackedWeight& w) { w.n = std::int64_t{1} << 60; })), "shape.n");

  const Packed packed(DType::int8, 16, 64, 0);
  std::vector<float> values(16 * 80);
  TensorView view = matrix(values.data(), DType::f32, 16, 64);
  view.stride_seqlen = 80;
  EXPECT_EQ(quantize(view, packed.weight, Device::cpu()).parameter(), "weight.stride_seqlen");
  PackedWeight off = packed.weight;
  off.data = static_cast<std::byte*>(off.data) + 8;
  view.stride_seqlen = 64;
  EXPECT_EQ(quantize(view, off, Device::cpu()).parameter(), "out");
  const LinearInputs both{
      .x = matrix(values.data(), DType::f32, 1, 64), .weight = view, .packed = packed.weight};
  std::vector<float> y(16);
  EXPECT_EQ(linear(both, matrix(y.data(), DType::f32, 1, 16), {}, Device::cpu()).parameter(),
            "packed");
  const LinearInputs longer{.x = matrix(values.data(), DType::f32, 1, 128),
                            .packed = packed.weight};
  EXPECT_EQ(linear(longer, matrix(y.data(), DType::f32, 1, 16), {}, Device::cpu()).parameter(),
            "packed.k");
}

}  // namespace
}  // namespace rafter
