// Forward attention in float64 by plain loops: the oracle that every other kernel is compared with.
// O = softmax(softmax_scale · QKᵀ + mask) V; f32, f16 or bf16 in, dtype or f32 out, f64 inside;
// K, V of that dtype, or int8 or e4m3 times a factor of each row.
// Q, O [batch, seqlen_q, heads_q, head_dim]   K, V [batch, seqlen_kv, heads_kv, head_dim], packed
// or paged; any strides, head_dim included. One query row at a time: its visible keys' scores,
// their maximum, the exponentials, the sum. A row's work is the same whoever computes it, so
// neither threads nor neighbours change a bit. Workspace: one row of scores per thread.
#include <omp.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "base/checked.h"
#include "base/element.h"
#include "dispatch/kernel_entry.h"
#include "kernels/cpu/sequence.h"

namespace rafter {
namespace {

struct Row {
  cpu::Sequence sequence;
  std::int64_t head_q = 0, row = 0;
};

void forward_row(const ForwardCall& call, const Row& r, double* scores) {
  const AttentionProblem& p = call.problem.attention;
  const ForwardInputs& in = call.in;
  const cpu::Sequence& s = r.sequence;
  const std::int64_t head_kv = r.head_q / (p.heads_q / p.heads_kv);
  const tiles::Range keys = cpu::mask_window(p.mask, s).row(r.row);
  const double scale = *p.softmax_scale;
  const double softcap = p.softcap;
  const auto sees = [&](std::int64_t j) { return cpu::tree_sees(p, in.tree_mask, s, r.row, j); };

  const std::int64_t q_row = cpu::offset_of(in.q, s.q_batch, s.q_row + r.row, r.head_q);
  std::array<double, 256> q;  // head_dim is at most 256
  for (std::int64_t d = 0; d < p.head_dim; ++d) {
    q[static_cast<std::size_t>(d)] = base::load_element(in.q, q_row + d * in.q.stride_head_dim);
  }
  double maximum = -std::numeric_limits<double>::infinity();
  bool has_nan = false;
  std::int64_t seen = 0;
  for (std::int64_t j = keys.first; j < keys.last; ++j) {
    if (!sees(j)) {
      continue;
    }
    ++seen;
    const std::int64_t k_row = cpu::key_offset(p, in, in.k, s, j, head_kv);
    double score = 0;
    for (std::int64_t d = 0; d < p.head_dim; ++d) {
      score += q[static_cast<std::size_t>(d)] *
               base::load_element(in.k, k_row + d * in.k.stride_head_dim);
    }
    score *= scale * double{cpu::key_scale(p, in, in.k_scale, s, j, head_kv)};
    if (softcap > 0) {
      score = softcap * std::tanh(score / softcap);
    }
    scores[j - keys.first] = score;
    has_nan = has_nan || std::isnan(score);
    maximum = score > maximum ? score : maximum;
  }
  if (has_nan) {  // a comparison with NaN is false; the row's result must be NaN all the same
    maximum = std::numeric_limits<double>::quiet_NaN();
  }
  double sum = 0;
  for (std::int64_t j = keys.first; j < keys.last; ++j) {
    if (sees(j)) {
      double& score = scores[j - keys.first];
      score = std::exp(score - maximum);
      sum += score;
    }
  }
  std::array<double, 256> total = {};  // head_dim_v is at most 256
  for (std::int64_t j = keys.first; j < keys.last; ++j) {
    if (!sees(j)) {
      continue;
    }
    const std::int64_t v_row = cpu::key_offset(p, in, in.v, s, j, head_kv);
    const double weight =
        scores[j - keys.first] * double{cpu::key_scale(p, in, in.v_scale, s, j, head_kv)};
    for (std::int64_t d = 0; d < p.head_dim_v; ++d) {
      total[static_cast<std::size_t>(d)] +=
          weight * base::load_element(in.v, v_row + d * in.v.stride_head_dim);
    }
  }
  const TensorView& o = call.out.o;
  const std::int64_t o_row = cpu::offset_of(o, s.q_batch, s.q_row + r.row, r.head_q);
  for (std::int64_t d = 0; d < p.head_dim_v; ++d) {
    const double value = seen > 0 ? total[static_cast<std::size_t>(d)] / sum : 0.0;
    base::store_element(o, o_row + d * o.stride_head_dim, value);
  }
  if (call.out.lse.data != nullptr) {
    *cpu::lse_of(call.out.lse, s.q_batch, r.head_q, s.q_row + r.row) = static_cast<float>(
        seen > 0 ? maximum + std::log(sum) : -std::numeric_limits<double>::infinity());
  }
}

std::int64_t scores_per_thread(const KernelProblem& problem) {
  return base::round_up(problem.attention.seqlen_kv, 8);
}

Status forward(const ForwardCall& call) {
  const AttentionProblem& p = call.problem.attention;
  auto* const scores = static_cast<double*>(call.workspace.data);
  const std::int64_t stride = scores_per_thread(call.problem);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const cpu::Sequence sequence = cpu::sequence_of(p, call.in, b);
    const std::int64_t rows = p.heads_q * sequence.seqlen_q;
#pragma omp parallel for num_threads(call.problem.threads) schedule(dynamic, 4)
    for (std::int64_t i = 0; i < rows; ++i) {
      forward_row(call, {sequence, i / sequence.seqlen_q, i % sequence.seqlen_q},
                  scores + omp_get_thread_num() * stride);
    }
  }
  return Status::ok();
}

Acceptance machine_has() { return Acceptance::accept(); }

Acceptance accepts(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  if (p.dtype != DType::f32 && p.dtype != DType::f16 && p.dtype != DType::bf16) {
    return Acceptance::refuse(std::string(to_string(p.dtype)) + " is not among f32, f16, bf16");
  }
  return Acceptance::accept();
}

// Scalar f64 with a conversion per operand: about 2e8 score-element multiply-adds a second and
// core, measured on a Zen 3 core. No model of it is needed beyond "far behind".
Reach reach(const KernelProblem&, const DeviceSpec&) {
  return {.compute = 0.005, .bandwidth = 0.5};
}

std::int64_t workspace(const KernelProblem& problem) {
  return problem.threads * scores_per_thread(problem) * static_cast<std::int64_t>(sizeof(double));
}

}  // namespace

std::span<const KernelEntry> entries_forward_reference() {
  static const std::array<KernelEntry, 1> kEntries = {
      KernelEntry{.name = "forward_reference",
                  .device = Device::Kind::cpu,
                  .pipeline = Pipeline::fused,
                  .instruction_set = "portable",
                  .dtypes = {DType::f32, DType::f16, DType::bf16},
                  .accepts_text = "everything: float64 plain loops, every layout, mask and stride; "
                                  "only when forced",
                  .machine_has = machine_has,
                  .accepts = accepts,
                  .reach = reach,
                  .workspace = workspace,
                  .forward = forward,
                  .only_when_forced = true,
                  .any_head_dim_stride = true,
                  .kv_dtypes = {DType::int8, DType::e4m3},
                  .tree_mask = true}};
  return kEntries;
}

}  // namespace rafter
