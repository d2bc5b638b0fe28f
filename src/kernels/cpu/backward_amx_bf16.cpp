// Backward attention on AMX, fused: scores are computed again from Q, K and lse; bf16 in (O and dO
// may be f32), bf16 or f32 out, f32 sums, P and dS rounded to bf16.
// Q, O, dO, dQ [batch, heads_q, seqlen_q, head_dim]   K, V, dK, dV [batch, heads_kv, seqlen_kv, …]
// Before all: Q and dO of each tile of query rows packed twice, and delta = rowsum(dO ∘ O) − dlse.
// Then one task per block of keys of a KV head, over the heads of the group and their tiles
//   Sᵀ = K Qᵀ | dPᵀ = V dOᵀ | Pᵀ = exp2(S − lse), dS = P ∘ (dP − delta) | dV += Pᵀ dO, dK += dSᵀ Q
// on tiles, with the exponentials in the same stream of instructions on AVX-512
// (backward_bf16_task.h), and dQᵀ += Kᵀ dSᵀ in turn: block after block of keys. Every sum goes 32
// by 32 in order, so the bits of a gradient depend on its own sequence alone. Limits: bf16,
// head_dim contiguous; dense and packed.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "hw/cpu/amx.h"
#include "kernels/cpu/backward_bf16_run.h"
#include "kernels/cpu/bf16_machines.h"

#if RAFTER_HAS_AMX_CODE
#include <immintrin.h>

// All that is not of one machine stands above, as in forward_amx_bf16.cpp.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,bmi,bmi2")
#include "kernels/cpu/backward_bf16_task.h"
#include "kernels/cpu/forward_amx_machine-inl.h"

namespace rafter::backward_amx {
namespace {
constexpr const backward_bf16::Functions& kFunctions = backward_bf16::kFunctions<forward_amx::Amx>;
}  // namespace
}  // namespace rafter::backward_amx
#pragma GCC pop_options
#pragma GCC diagnostic pop

namespace rafter {
namespace backward_amx {
namespace {

std::int64_t workspace(const KernelProblem& problem) { return backward_bf16::workspace(problem); }

/// Measured on an Emerald Rapids with two threads: 40% of the probe's bf16 peak at head_dim 128,
/// 30% at 64.
Reach reach(const KernelProblem& problem, const DeviceSpec&) {
  const AttentionProblem& p = problem.attention;
  return backward_bf16::reach(problem, p.head_dim + p.head_dim_v > 192 ? 0.4 : 0.3);
}

Status backward(const BackwardCall& call) {
  return backward_bf16::backward<hw::amx::TileScope>(call, kFunctions);
}

}  // namespace
}  // namespace backward_amx

std::span<const KernelEntry> entries_backward_amx_bf16() {
  static const std::array<KernelEntry, 1> kEntries = {KernelEntry{
      .name = "backward_amx_bf16",
      .device = Device::Kind::cpu,
      .pipeline = Pipeline::fused,
      .instruction_set = "amx",
      .dtypes = {DType::bf16},
      .accepts_text = "bf16, dense and packed, every mask, softcap and group; head_dim contiguous",
      .machine_has = cpu::machine_has_amx,
      .accepts = backward_bf16::accepts,
      .reach = backward_amx::reach,
      .workspace = backward_amx::workspace,
      .backward = backward_amx::backward}};
  return kEntries;
}

}  // namespace rafter
#else
namespace rafter {
std::span<const KernelEntry> entries_backward_amx_bf16() { return {}; }
}  // namespace rafter
#endif
