// GEMM, elementwise kernels, the tiled traffic model, and recompute against store.
#include <fmt/format.h>

#include <cmath>

#include "model/attention_terms.h"
#include "model/check.h"

namespace rafter {

using model::check_range;
using model::first_error;
using model::kMaxLength;

Result<Cost> gemm_cost(const GemmProblem& p, const Convention& convention) {
  const DType weight_dtype = p.weight_dtype.value_or(p.dtype);
  const Status checked = first_error(
      convention.validate(), check_range("m", p.m, 0, kMaxLength),
      check_range("n", p.n, 0, kMaxLength), check_range("k", p.k, 0, kMaxLength),
      check_range("batch", p.batch, 0, kMaxLength), model::check_element("dtype", p.dtype),
      model::check_element("weight_dtype", weight_dtype));
  if (!checked) {
    return checked;
  }
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n);
  const auto k = static_cast<double>(p.k), batch = static_cast<double>(p.batch);
  const double a = batch * m * k * bytes_of(p.dtype);
  const double b = batch * n * k * bytes_of(weight_dtype);
  const double c = batch * m * n * bytes_of(p.dtype);

  Cost cost;
  cost.dtype = p.dtype;
  cost.convention = convention.name;
  cost.matmul_flops = cost.flops = 2 * batch * m * n * k;
  if (convention.count_gemm_activations) {
    cost.bytes_by_term = {{"a", a}, {"b", b}, {"c", c}};
    cost.bytes = a + b + c;
  } else {
    cost.bytes_by_term = {{"b", b}};
    cost.bytes = b;
  }
  cost.footprint_bytes = cost.bytes;
  cost.launches = 1;
  cost.untiled_bytes = batch * m * n * k * (bytes_of(p.dtype) + bytes_of(weight_dtype));
  cost.kernels = {{"gemm", cost.matmul_flops, 0, cost.bytes, batch * (m * k + n * k + m * n)}};
  return cost;
}

// FLOPs per element: RMSNorm squares, adds, scales by 1/rms and by the weight; SwiGLU negates,
// exponentiates, adds 1, divides, multiplies by `up`; RoPE turns a pair with 4 multiplies, 2 adds.
ElementwiseProblem ElementwiseProblem::rmsnorm(double elements, DType dtype) {
  return {.elements = elements, .reads = 1, .writes = 1, .flops_per_element = 4, .dtype = dtype};
}
ElementwiseProblem ElementwiseProblem::residual_add(double elements, DType dtype) {
  return {.elements = elements, .reads = 2, .writes = 1, .flops_per_element = 1, .dtype = dtype};
}
ElementwiseProblem ElementwiseProblem::swiglu(double elements, DType dtype) {
  return {.elements = elements, .reads = 2, .writes = 1, .flops_per_element = 5, .dtype = dtype};
}
ElementwiseProblem ElementwiseProblem::rope(double elements, DType dtype) {
  return {.elements = elements, .reads = 1, .writes = 1, .flops_per_element = 3, .dtype = dtype};
}

Result<Cost> elementwise_cost(const ElementwiseProblem& p, const Convention& convention) {
  const Status checked = first_error(
      convention.validate(), model::check_not_negative("elements", p.elements),
      model::check_not_negative("reads", p.reads), model::check_not_negative("writes", p.writes),
      model::check_not_negative("flops_per_element", p.flops_per_element),
      model::check_element("dtype", p.dtype));
  if (!checked) {
    return checked;
  }
  const double b = bytes_of(p.dtype);
  Cost cost;
  cost.dtype = p.dtype;
  cost.convention = convention.name;
  cost.softmax_flops = cost.flops = p.elements * p.flops_per_element;
  cost.bytes_by_term = {{"read", p.elements * p.reads * b}, {"write", p.elements * p.writes * b}};
  cost.bytes = p.elements * (p.reads + p.writes) * b;
  cost.footprint_bytes = cost.bytes;
  cost.launches = 1;
  cost.kernels = {{"elementwise", 0, cost.flops, cost.bytes, p.elements * (p.reads + p.writes)}};
  return cost;
}

Result<Tiling> tiling(std::int64_t seqlen, std::int64_t head_dim, DType dtype,
                      double fast_memory_bytes, const Convention& convention) {
  const Status checked =
      first_error(convention.validate(), check_range("seqlen", seqlen, 1, kMaxLength),
                  check_range("head_dim", head_dim, 1, model::kMaxHeadDim),
                  model::check_element("dtype", dtype),
                  model::check_positive("fast_memory_bytes", fast_memory_bytes));
  if (!checked) {
    return checked;
  }
  const auto s = static_cast<double>(seqlen), d = static_cast<double>(head_dim);
  const double b = bytes_of(dtype);
  const double m =
      convention.fast_memory_unit == MemoryUnit::bytes ? fast_memory_bytes : fast_memory_bytes / b;
  if (m < d) {
    return Status::invalid_argument(
        "fast_memory_bytes", fmt::format("{}", fast_memory_bytes),
        fmt::format("at least {}, one row of head_dim {},", fast_memory_bytes * d / m, head_dim));
  }
  Tiling t;
  t.fast_memory_elements = m;
  t.tile_rows = m / d;
  t.kv_passes = s * d / m;
  t.io_elements = s * d * t.kv_passes;
  t.io_bytes = t.io_elements * b;
  t.unfused_elements = s * s;
  t.reduction_vs_unfused = m / (d * d);
  t.score_matrix_bytes = s * s * b;
  t.score_matrix_fits = t.score_matrix_bytes <= fast_memory_bytes;
  return t;
}

Result<RecomputeChoice> recompute_choice(const AttentionProblem& problem, const DeviceSpec& device,
                                         const Convention& convention) {
  const Result<Cost> forward = attention_cost(problem, Pipeline::fused, Pass::forward, convention);
  if (!forward) {
    return forward.status();
  }
  const Result<Ridge> roof = ridge(device, problem.dtype, convention);
  const Status checked =
      first_error(roof.status(), check_range("seqlen_q", problem.seqlen_q, 1, kMaxLength),
                  check_range("seqlen_kv", problem.seqlen_kv, 1, kMaxLength));
  if (!checked) {
    return checked;
  }
  const auto d = static_cast<double>(problem.head_dim);
  const double d_v = problem.head_dim_v == 0 ? d : static_cast<double>(problem.head_dim_v);
  const double b = bytes_of(convention.score_dtype.value_or(problem.dtype));
  const double bandwidth = convention.bandwidth_efficiency * roof->bandwidth_bytes_per_s;
  const double rows = static_cast<double>(problem.batch) * static_cast<double>(problem.heads_q) *
                      static_cast<double>(problem.seqlen_q);
  RecomputeChoice choice;
  choice.score_bytes = forward->pairs * b;
  choice.store_bytes = 2 * choice.score_bytes;
  choice.store_time_s = choice.store_bytes / bandwidth;
  choice.recompute_flops = 2 * forward->pairs * d;
  choice.recompute_time_s = choice.recompute_flops / roof->achieved_flop_per_s;
  choice.achieved_ridge_flop_per_byte = roof->achieved_flop_per_s / bandwidth;
  choice.break_even_ridge_flop_per_byte = d / b;  // recompute_flops / store_bytes, for any mask
  choice.store_over_recompute =
      choice.achieved_ridge_flop_per_byte / choice.break_even_ridge_flop_per_byte;
  choice.extra_flops_fraction = d / (2 * d + 2 * d_v);  // over dQ, dK (d) and dV, dP (d_v)
  choice.statistics_bytes = rows * 2 * 4;
  choice.recompute_is_cheaper = choice.store_over_recompute > 1;
  return choice;
}

}  // namespace rafter
