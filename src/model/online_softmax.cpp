// The online softmax: running maximum and sum, rescaled block by block.
// Source of the algorithm: Milakov & Gimelshein 2018, arXiv 1805.02867.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "rafter/roofline.h"

namespace rafter {
namespace {

/// exp(from − to) with −∞ − −∞ = 0: what was held under the maximum `from`, seen from `to`.
double rescale(double from, double to) { return from == to ? 1 : std::exp(from - to); }

/// The state of one block by itself.
SoftmaxState block_state(const std::vector<double>& scores, const std::vector<double>* values) {
  SoftmaxState state;
  for (const double x : scores) {
    state.m = std::max(state.m, x);
  }
  if (std::isinf(state.m)) {
    return {};  // empty, or all masked
  }
  double weighted = 0;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const double p = std::exp(scores[j] - state.m);
    state.l += p;
    weighted += values != nullptr ? p * (*values)[j] : 0;
  }
  state.output = weighted / state.l;
  return state;
}

Status check_scores(const std::vector<std::vector<double>>& scores) {
  for (const std::vector<double>& block : scores) {
    for (const double x : block) {
      if (std::isnan(x) || x == HUGE_VAL) {
        return Status::invalid_argument("scores", fmt::format("{}", x), "finite numbers and -inf");
      }
    }
  }
  return Status::ok();
}

Status check_values(const std::vector<std::vector<double>>& scores,
                    const std::vector<std::vector<double>>& values) {
  if (values.empty()) {
    return Status::ok();
  }
  if (values.size() != scores.size()) {
    return Status::invalid_argument("values", fmt::format("{} blocks", values.size()),
                                    fmt::format("{} blocks, as scores", scores.size()));
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].size() != scores[i].size()) {
      return Status::invalid_argument("values",
                                      fmt::format("{} in block {}", values[i].size(), i + 1),
                                      fmt::format("{}, one per score", scores[i].size()));
    }
    for (const double v : values[i]) {
      if (!std::isfinite(v)) {
        return Status::invalid_argument("values", fmt::format("{}", v), "finite numbers");
      }
    }
  }
  return Status::ok();
}

}  // namespace

SoftmaxState merge_states(const SoftmaxState& a, const SoftmaxState& b) {
  if (b.l == 0) {
    return a;
  }
  if (a.l == 0) {
    return b;
  }
  SoftmaxState both;
  both.m = std::max(a.m, b.m);
  const double from_a = a.l * rescale(a.m, both.m);
  const double from_b = b.l * rescale(b.m, both.m);
  both.l = from_a + from_b;
  both.output = (from_a * a.output + from_b * b.output) / both.l;
  return both;
}

Result<SoftmaxTrace> online_softmax(const std::vector<std::vector<double>>& scores,
                                    const std::vector<std::vector<double>>& values) {
  if (Status s = check_scores(scores); !s) {
    return s;
  }
  if (Status s = check_values(scores, values); !s) {
    return s;
  }
  SoftmaxTrace trace;
  SoftmaxState state;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const SoftmaxState block = block_state(scores[i], values.empty() ? nullptr : &values[i]);
    const SoftmaxState merged = merge_states(state, block);
    trace.steps.push_back({.m = merged.m,
                           .l = merged.l,
                           .rescale = rescale(state.m, merged.m),
                           .output = merged.output});
    state = merged;
  }
  trace.sum_exp = state.l > 0 ? state.l * std::exp(state.m) : 0;
  trace.lse = state.lse();
  if (!values.empty()) {
    trace.output = state.output;
  }
  return trace;
}

Result<std::vector<std::vector<double>>> split_blocks(std::span<const double> scores,
                                                      std::int64_t block) {
  if (block < 1) {
    return Status::invalid_argument("block", fmt::format("{}", block), "1 and up");
  }
  std::vector<std::vector<double>> blocks;
  const auto size = static_cast<std::size_t>(block);
  for (std::size_t first = 0; first < scores.size();
       first += std::min(size, scores.size() - first)) {
    const std::span<const double> part =
        scores.subspan(first, std::min(size, scores.size() - first));
    blocks.emplace_back(part.begin(), part.end());
  }
  return blocks;
}

}  // namespace rafter
