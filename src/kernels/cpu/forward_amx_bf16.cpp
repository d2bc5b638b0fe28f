// Forward attention on AMX: O = softmax(softmax_scale · QKᵀ + mask) V, fused; bf16 in, bf16 or f32
// out, f32 sums and softmax, P rounded to bf16.
// Q, O [batch, heads_q, seqlen_q, head_dim]   K, V [batch, heads_kv, seqlen_kv, head_dim]
// K and Vᵀ are packed into tiles once per KV head; a task owns up to 256 queries of a group and
// walks the keys 32 at a time, Sᵀ = K Qᵀ and Oᵀ += Vᵀ Pᵀ on tiles, and between those products, in
// the same stream of instructions, softcap, mask, maximum, exp2 and sum on AVX-512
// (forward_bf16_task.h). Blocks of keys start at multiples of 32 and every lane stands for itself,
// so the bits of a row depend on its own sequence alone. Limits: bf16, head_dim contiguous; keys
// are not split.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "hw/cpu/amx.h"
#include "kernels/cpu/bf16_machines.h"
#include "kernels/cpu/forward_bf16_run.h"

#if RAFTER_HAS_AMX_CODE
#include <immintrin.h>

// All that is not of one machine stands above: what is compiled below may use AVX-512, and nothing
// of it is inline code that another file could be handed.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined
#pragma GCC diagnostic ignored "-Wuninitialized"        // the same
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,bmi,bmi2")
#include "kernels/cpu/forward_amx_machine-inl.h"

namespace rafter::forward_amx {
namespace {
constexpr const forward_bf16::Functions& kFunctions = forward_bf16::kFunctions<Amx>;
}  // namespace
}  // namespace rafter::forward_amx
#pragma GCC pop_options
#pragma GCC diagnostic pop

namespace rafter {
namespace forward_amx {
namespace {

std::int64_t workspace(const KernelProblem& problem) { return forward_bf16::workspace(problem); }

/// Measured on an Emerald Rapids with two threads: 58% of the probe's bf16 peak at head_dim 128,
/// 55% at 256, 40% at 64.
Reach reach(const KernelProblem& problem, const DeviceSpec&) {
  const AttentionProblem& p = problem.attention;
  Reach reach = forward_bf16::reach(problem, p.head_dim + p.head_dim_v > 192 ? 0.55 : 0.4);
  reach.fixed_seconds = forward_bf16::rows_of(p) < forward_bf16::kPanel ? 4e-6 : 3e-6;
  return reach;
}

Status forward(const ForwardCall& call) {
  return forward_bf16::forward<hw::amx::TileScope>(call, kFunctions);
}

}  // namespace
}  // namespace forward_amx

std::span<const KernelEntry> entries_forward_amx_bf16() {
  static const std::array<KernelEntry, 1> kEntries = {KernelEntry{
      .name = "forward_amx_bf16",
      .device = Device::Kind::cpu,
      .pipeline = Pipeline::fused,
      .instruction_set = "amx",
      .dtypes = {DType::bf16},
      .accepts_text = "bf16, every layout, mask, softcap and group; head_dim contiguous",
      .machine_has = cpu::machine_has_amx,
      .accepts = forward_bf16::accepts,
      .reach = forward_amx::reach,
      .workspace = forward_amx::workspace,
      .forward = forward_amx::forward}};
  return kEntries;
}

}  // namespace rafter
#else
namespace rafter {
std::span<const KernelEntry> entries_forward_amx_bf16() { return {}; }
}  // namespace rafter
#endif
