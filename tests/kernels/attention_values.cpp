// The values of an attention case: normal deviates, rounded to what the case stores.
#include <algorithm>
#include <cmath>
#include <random>

#include "support/attention_case.h"
#include "support/placed.h"

namespace rafter::testing {

bool is_scaled(DType kv_dtype) { return kv_dtype == DType::int8 || kv_dtype == DType::e4m3; }

float round_to(DType dtype, float value) {
  switch (dtype) {
    case DType::f16:
      return f16_to_f32(f32_to_f16(value));
    case DType::bf16:
      return bf16_to_f32(f32_to_bf16(value));
    default:
      return value;
  }
}

namespace {

/// Rounds rows [·, heads, dim] to multiples of a factor each and returns the factors. Those have 8
/// significant bits: the multiples are exact in f32.
std::vector<float> quantise(std::vector<float>& rows, std::int64_t dim, std::int64_t heads,
                            DType dtype, Scales kind) {
  const float reach = dtype == DType::int8 ? 126.0f : 440.0f;
  std::vector<float> largest(rows.size() / index(dim), 1e-3f);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    float& one = largest[i / index(dim)];
    one = std::fmax(one, std::fabs(rows[i]));
  }
  if (kind == Scales::per_head) {
    for (std::size_t i = index(heads); i < largest.size(); ++i) {
      float& of_head = largest[i % index(heads)];
      of_head = std::fmax(of_head, largest[i]);
    }
    for (std::size_t i = index(heads); i < largest.size(); ++i) {
      largest[i] = largest[i % index(heads)];
    }
  }
  std::vector<float> scales;
  for (const float one : largest) {
    scales.push_back(kind == Scales::none ? 1.0f : round_to(DType::bf16, one / reach));
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float scale = scales[i / index(dim)];
    rows[i] =
        scale * (dtype == DType::int8 ? std::clamp(std::round(rows[i] / scale), -127.0f, 127.0f)
                                      : e4m3_to_f32(f32_to_e4m3(rows[i] / scale)));
  }
  return scales;
}

}  // namespace

Values make_values(const Case& c) {
  std::mt19937 generator(c.seed);
  std::normal_distribution<double> normal(0.0, 1.0);
  const AttentionProblem& p = c.problem;
  const auto [heads_kv, dim_v] = dims_of(p);
  const auto fill = [&](std::int64_t count, double sigma) {
    std::vector<float> values(index(count));
    for (float& value : values) {
      value = round_to(p.dtype, static_cast<float>(sigma * normal(generator)));
    }
    return values;
  };
  Values values{fill(sum_of(c.lengths_q) * p.heads_q * p.head_dim, c.sigma_q),
                fill(sum_of(c.lengths_kv) * heads_kv * p.head_dim, c.sigma_k),
                fill(sum_of(c.lengths_kv) * heads_kv * dim_v, 1.0)};
  const DType kv = p.kv_dtype.value_or(p.dtype);
  if (is_scaled(kv)) {
    values.k_scale = quantise(values.k, p.head_dim, heads_kv, kv, c.scales);
    values.v_scale = quantise(values.v, dim_v, heads_kv, kv, c.scales);
  }
  if (p.tree_mask) {  // every query itself, and any of the others; the first sees no new token
    std::uniform_int_distribution<std::uint64_t> bits;
    for (const std::int64_t rows : c.lengths_q) {
      for (std::int64_t i = 0; i < rows; ++i) {
        values.tree_mask.push_back(i == 0 ? 0 : bits(generator) | std::uint64_t{1} << i);
      }
    }
  }
  return values;
}

}  // namespace rafter::testing
