// Backward attention in float64 by plain loops: the oracle that every other backward kernel is
// compared with. With P = exp(S − lse), S = softmax_scale · QKᵀ + mask (softcap applied),
//   dV = Pᵀ dO   dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O) + dlse)   dQ = dS K   dK = dSᵀ Q
// f32, f16 or bf16 in, that or f32 out, f64 inside; dense or packed, any strides, head_dim
// included. A task is one KV head of one sequence: it walks the query heads of the group and their
// rows in order, so neither threads nor neighbours change a bit. Workspace: dK and dV of one
// sequence in f64 per thread.
#include <omp.h>

#include <array>

#include "kernels/cpu/backward_plain.h"

namespace rafter {
namespace {

Status backward(const BackwardCall& call) {
  const AttentionProblem& p = call.problem.attention;
  auto* const scratch = static_cast<double*>(call.workspace.data);
  const std::int64_t stride = cpu::plain::backward_doubles(p);
#pragma omp parallel for num_threads(call.problem.threads) schedule(dynamic, 1)
  for (std::int64_t i = 0; i < p.batch * p.heads_kv; ++i) {
    cpu::plain::backward_head(call, cpu::sequence_of(p, call.in, i / p.heads_kv), i % p.heads_kv,
                              scratch + omp_get_thread_num() * stride);
  }
  return Status::ok();
}

Acceptance machine_has() { return Acceptance::accept(); }

Acceptance accepts(const KernelProblem& problem) {
  const DType dtype = problem.attention.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16) {
    return Acceptance::refuse(std::string(to_string(dtype)) + " is not among f32, f16, bf16");
  }
  return Acceptance::accept();
}

// As forward_reference: no model of it is needed beyond "far behind".
Reach reach(const KernelProblem&, const DeviceSpec&) {
  return {.compute = 0.005, .bandwidth = 0.5};
}

std::int64_t workspace(const KernelProblem& problem) {
  return problem.threads * cpu::plain::backward_doubles(problem.attention) *
         static_cast<std::int64_t>(sizeof(double));
}

}  // namespace

std::span<const KernelEntry> entries_backward_reference() {
  static const std::array<KernelEntry, 1> kEntries = {
      KernelEntry{.name = "backward_reference",
                  .device = Device::Kind::cpu,
                  .pipeline = Pipeline::fused,
                  .instruction_set = "portable",
                  .dtypes = {DType::f32, DType::f16, DType::bf16},
                  .accepts_text = "dense and packed, every mask and stride: float64 plain loops; "
                                  "only when forced",
                  .machine_has = machine_has,
                  .accepts = accepts,
                  .reach = reach,
                  .workspace = workspace,
                  .backward = backward,
                  .only_when_forced = true,
                  .any_head_dim_stride = true}};
  return kEntries;
}

}  // namespace rafter
