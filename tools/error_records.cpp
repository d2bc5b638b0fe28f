// Prints one record (a line of JSON) per kernel, dtype, length and spread of the scores: how far
// the kernel's result is from float64. docs/numerics.md is rendered from these records.
//   build/rafter_error_records > bench/results/<date>-<device>-errors.jsonl
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "rafter/attention.h"
#include "rafter/kernels.h"
#include "rafter/measure.h"

namespace {

using rafter::DType;

constexpr std::int64_t kHeadDim = 64;
constexpr std::int64_t kReferenceRows = 128;  // of each length, evenly spread

struct Case {
  DType dtype;
  std::int64_t seqlen;
  double score_deviation;  // standard deviation of the scaled scores
};

/// A tensor [1, seqlen, 1, head_dim] in its dtype, and the values that it holds.
struct Tensor {
  std::vector<float> values;
  std::vector<std::uint16_t> half;
  DType dtype;

  Tensor(std::mt19937_64& random, const Case& c, double deviation) : dtype(c.dtype) {
    std::normal_distribution<double> normal(0, deviation);
    for (std::int64_t i = 0; i < c.seqlen * kHeadDim; ++i) {
      auto value = static_cast<float>(normal(random));
      if (dtype != DType::f32) {
        const bool is_bf16 = dtype == DType::bf16;
        half.push_back(is_bf16 ? rafter::f32_to_bf16(value) : rafter::f32_to_f16(value));
        value = is_bf16 ? rafter::bf16_to_f32(half.back()) : rafter::f16_to_f32(half.back());
      }
      values.push_back(value);
    }
  }
  rafter::TensorView view() const {
    const void* data = dtype == DType::f32 ? static_cast<const void*>(values.data()) : half.data();
    return rafter::TensorView::contiguous(
        data, dtype, 1, static_cast<std::int64_t>(values.size()) / kHeadDim, 1, kHeadDim);
  }
  const float* row(std::int64_t i) const { return values.data() + i * kHeadDim; }
};

/// One row of softmax(QKᵀ / √head_dim) V in float64, two passes.
std::vector<double> reference_row(const Tensor& q, const Tensor& k, const Tensor& v,
                                  std::int64_t row, std::int64_t seqlen) {
  std::vector<double> scores(static_cast<std::size_t>(seqlen));
  for (std::int64_t j = 0; j < seqlen; ++j) {
    double dot = 0;
    for (std::int64_t d = 0; d < kHeadDim; ++d) {
      dot += static_cast<double>(q.row(row)[d]) * k.row(j)[d];
    }
    scores[static_cast<std::size_t>(j)] = dot / std::sqrt(static_cast<double>(kHeadDim));
  }
  const double top = *std::max_element(scores.begin(), scores.end());
  std::vector<double> out(kHeadDim, 0.0);
  double sum = 0;
  for (std::int64_t j = 0; j < seqlen; ++j) {
    const double weight = std::exp(scores[static_cast<std::size_t>(j)] - top);
    sum += weight;
    for (std::int64_t d = 0; d < kHeadDim; ++d) {
      out[static_cast<std::size_t>(d)] += weight * v.row(j)[d];
    }
  }
  for (double& value : out) {
    value /= sum;
  }
  return out;
}

struct Reference {
  std::vector<std::int64_t> rows;
  std::vector<std::vector<double>> values;
};

/// What a kernel's f32 output is off by.
struct Errors {
  double max = 0, rms = 0;  // rms relative to the rms of the reference
};

Errors compare(const std::vector<float>& o, const Reference& reference) {
  Errors errors;
  double squares = 0, reference_squares = 0;
  for (std::size_t r = 0; r < reference.rows.size(); ++r) {
    for (std::int64_t d = 0; d < kHeadDim; ++d) {
      const double want = reference.values[r][static_cast<std::size_t>(d)];
      const double got = o[static_cast<std::size_t>(reference.rows[r] * kHeadDim + d)];
      errors.max = std::max(errors.max, std::abs(got - want));
      squares += (got - want) * (got - want);
      reference_squares += want * want;
    }
  }
  errors.rms = std::sqrt(squares / reference_squares);
  return errors;
}

/// Runs the case on a kernel; an unsupported case gives an empty result.
std::vector<float> run(const Case& c, const std::string& kernel, const Tensor& q, const Tensor& k,
                       const Tensor& v) {
  const rafter::AttentionProblem problem{
      .seqlen_q = c.seqlen, .seqlen_kv = c.seqlen, .head_dim = kHeadDim, .dtype = c.dtype};
  const auto plan = rafter::plan(problem, rafter::Device::cpu(), {.kernel = kernel});
  if (!plan) {
    fmt::print(stderr, "{}: {}\n", kernel, plan.status().message());
    return {};
  }
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> workspace(static_cast<std::size_t>(plan->workspace_bytes() + 63) / 64);
  std::vector<float> o(static_cast<std::size_t>(c.seqlen * kHeadDim));
  const rafter::Status done = plan->forward(
      {.q = q.view(), .k = k.view(), .v = v.view()},
      {.o = rafter::TensorView::contiguous(o.data(), DType::f32, 1, c.seqlen, 1, kHeadDim)},
      {.data = workspace.data(), .bytes = plan->workspace_bytes()});
  if (!done) {
    fmt::print(stderr, "{}: {}\n", kernel, done.message());
    return {};
  }
  return o;
}

void print_records(const Case& c, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const Tensor q(random, c, c.score_deviation);
  const Tensor k(random, c, 1);
  const Tensor v(random, c, 1);
  Reference reference;
  const std::int64_t step = std::max<std::int64_t>(1, c.seqlen / kReferenceRows);
  for (std::int64_t row = 0; row < c.seqlen; row += step) {
    reference.rows.push_back(row);
    reference.values.push_back(reference_row(q, k, v, row, c.seqlen));
  }
  for (const rafter::KernelInfo& kernel : rafter::list_kernels()) {
    const bool takes =
        std::find(kernel.dtypes.begin(), kernel.dtypes.end(), c.dtype) != kernel.dtypes.end();
    if (kernel.device != rafter::Device::Kind::cpu || !kernel.machine_has || !takes ||
        kernel.pass != rafter::Pass::forward || kernel.name == "forward_reference") {
      continue;
    }
    const std::vector<float> o = run(c, kernel.name, q, k, v);
    if (o.empty()) {
      continue;
    }
    const Errors errors = compare(o, reference);
    nlohmann::ordered_json record = {{"record", "error"}};
    for (const auto& [key, value] : rafter::describe_this_machine()) {
      record[key == "kernel" ? "system" : key] = value;
    }
    record["kernel"] = kernel.name;
    record["pipeline"] = rafter::to_string(kernel.pipeline);
    record["case"] = {{"dtype", rafter::to_string(c.dtype)},
                      {"seqlen", c.seqlen},
                      {"head_dim", kHeadDim},
                      {"score_deviation", c.score_deviation}};
    record["max_error"] = errors.max;
    record["rms_error"] = errors.rms;
    fmt::print("{}\n", record.dump());
  }
}

}  // namespace

int main() {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const double score_deviation : {1.0, 8.0}) {
      for (const std::int64_t seqlen : {128, 512, 2048, 8192}) {
        print_records({dtype, seqlen, score_deviation}, static_cast<std::uint64_t>(seqlen));
      }
    }
  }
  return 0;
}
