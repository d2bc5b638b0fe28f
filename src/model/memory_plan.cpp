// What a model holds in memory at a length, and the longest length that fits.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "model/attention_terms.h"
#include "model/check.h"
#include "model/model_shape.h"
#include "model/solve.h"

namespace rafter {
namespace {

struct Planner {
  const MemoryProblem& problem;
  const Convention& convention;
  double capacity = 0;
  double weights = 0;  // bytes
  double live = 1;     // layers
  DType kv_dtype = DType::bf16;
};

/// Terms at a length, each zero where the convention does not count it:
///   weights      all parameters
///   kv_cache     all layers, every sequence
///   scores       one score matrix per live layer where the pipeline lands it (softmax in place)
///   qkvo, lse    of the live layers
///   activations  of the live layers: the residual stream and its norm, and gate and up of the MLP
MemoryUse use_at(const Planner& p, double seqlen) {
  const ModelConfig& m = p.problem.model;
  const Convention& c = p.convention;
  const auto batch = static_cast<double>(p.problem.batch);
  const model::AttentionShape shape = model::attention_shape(m, m.dtype, 1);
  const double b = bytes_of(m.dtype);
  const double tokens = batch * seqlen;
  const bool lands =
      p.problem.pipeline == Pipeline::unfused || p.problem.pipeline == Pipeline::half_fused;
  const double qkvo = model::counted_of(c, p.problem.pipeline).qo
                          ? 2 * (shape.heads_q + shape.heads_kv) * shape.head_dim * tokens * b
                          : 0;
  const double scores =
      lands ? shape.heads_q * batch * seqlen * seqlen * bytes_of(c.score_dtype.value_or(m.dtype))
            : 0;
  const std::int64_t mlps = m.has_experts() ? m.experts_per_token : 1;  // of a token
  const double hidden =
      2 * static_cast<double>(m.hidden_size + mlps * m.intermediate_size) * tokens * b;
  MemoryUse use;
  const auto add = [&](const char* name, double bytes) {
    if (bytes > 0) {
      use.terms.push_back({name, bytes});
      use.footprint_bytes += bytes;
    }
  };
  add("weights", p.weights);
  add("kv_cache", c.count_kv_cache ? batch * model::kv_bytes_per_token(m, p.kv_dtype) *
                                         model::rows_held(m, seqlen, p.problem.page_size)
                                   : 0);
  add("scores", p.live * scores);
  add("qkvo", p.live * qkvo);
  add("lse", c.count_lse ? p.live * shape.heads_q * tokens * 4 : 0);
  add("activations", c.count_activations ? p.live * hidden : 0);
  use.capacity_bytes = p.capacity;
  use.fits = use.footprint_bytes <= p.capacity;
  use.share = use.footprint_bytes / p.capacity;
  return use;
}

Result<Planner> make_planner(const MemoryProblem& problem, const DeviceSpec* device,
                             const Convention& c) {
  const ModelConfig& m = problem.model;
  const bool whole = c.count_weights || c.count_activations;
  const Status checked = model::first_error(
      c.validate(), whole ? model::check_model(m) : model::check_model_attention(m),
      model::check_range("batch", problem.batch, 1, model::kMaxLength),
      model::check_range("page_size", problem.page_size, 0, model::kMaxLength),
      model::check_element("weight_dtype", problem.weight_dtype.value_or(m.dtype)),
      model::check_element("kv_dtype", problem.kv_dtype.value_or(m.dtype)),
      problem.capacity_bytes ? model::check_positive("capacity_bytes", *problem.capacity_bytes)
                             : Status::ok());
  if (!checked) {
    return checked;
  }
  Planner p{.problem = problem, .convention = c};
  const auto layers = static_cast<double>(m.num_layers);
  p.live = c.layers_live == 0 ? layers : c.layers_live;
  if (p.live > layers || p.live != std::floor(p.live)) {
    return Status::invalid_argument("layers_live", fmt::format("{}", c.layers_live),
                                    fmt::format("one, all, whole numbers up to {}", m.num_layers));
  }
  p.kv_dtype = problem.kv_dtype.value_or(m.dtype);
  if (problem.capacity_bytes) {
    p.capacity = *problem.capacity_bytes;
  } else if (device == nullptr) {
    return Status::invalid_argument("capacity_bytes", "neither it nor a device", "one of the two");
  } else if (const Result<double> capacity = model::capacity_of(*device, c); capacity) {
    p.capacity = *capacity;
  } else {
    return capacity.status();
  }
  if (c.count_weights) {
    const Result<ParameterCount> params = count_parameters(m, c);
    if (!params) {
      return params.status();
    }
    p.weights = params->total * bytes_of(problem.weight_dtype.value_or(m.dtype));
  }
  return p;
}

}  // namespace

Result<MemoryUse> memory_use(const MemoryProblem& problem, std::int64_t seqlen,
                             const DeviceSpec* device, const Convention& convention) {
  const Result<Planner> planner = make_planner(problem, device, convention);
  const Status checked = model::first_error(
      planner.status(), model::check_range("seqlen", seqlen, 1, model::kMaxLength));
  if (!checked) {
    return checked;
  }
  return use_at(*planner, static_cast<double>(seqlen));
}

Result<MemoryPlan> plan_memory(const MemoryProblem& problem, const DeviceSpec* device,
                               const Convention& convention) {
  const Result<Planner> planner = make_planner(problem, device, convention);
  if (!planner) {
    return planner.status();
  }
  const auto fits = [&](std::int64_t seqlen) {
    return use_at(*planner, static_cast<double>(seqlen)).fits;
  };
  MemoryPlan plan;
  plan.max_seqlen = std::max<std::int64_t>(0, model::largest_whole(fits, model::kMaxLength));
  plan.at_max = use_at(*planner, static_cast<double>(plan.max_seqlen));
  return plan;
}

}  // namespace rafter
