// Forward attention on AVX-512 with dot products of bf16 pairs (VDPBF16PS): O =
// softmax(softmax_scale · QKᵀ + mask) V, fused; bf16 in, bf16 or f32 out, f32 sums and softmax, P
// rounded to bf16.
// Q, O [batch, heads_q, seqlen_q, head_dim]   K, V [batch, heads_kv, seqlen_kv, head_dim]
// Packing, schedule and softmax are those of forward_amx_bf16 (forward_bf16_task.h); a product
// keeps 8 rows by 32 queries in registers over its whole depth, a row's pairs repeated to all
// lanes. Its units are those of the softmax, so nothing is gained by interleaving the two. Limits:
// bf16, head_dim contiguous; keys are not split.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "kernels/cpu/bf16_machines.h"
#include "kernels/cpu/forward_bf16_run.h"

#if defined(__x86_64__)
#include <immintrin.h>

// All that is not of one machine stands above: what is compiled below may use AVX-512, and nothing
// of it is inline code that another file could be handed.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined
#pragma GCC diagnostic ignored "-Wuninitialized"        // the same
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx512bf16,avx2,fma,bmi,bmi2")
#include "kernels/cpu/forward_avx512_bf16_machine-inl.h"

namespace rafter::forward_avx512_bf16 {
namespace {
constexpr const forward_bf16::Functions& kFunctions =
    forward_bf16::kFunctions<DotProducts, forward_bf16::Schedule{.interleave = false}>;
}  // namespace
}  // namespace rafter::forward_avx512_bf16
#pragma GCC pop_options
#pragma GCC diagnostic pop

namespace rafter {
namespace forward_avx512_bf16 {
namespace {

std::int64_t workspace(const KernelProblem& problem) { return forward_bf16::workspace(problem); }

/// 45% of what cpu::dot_product_peak() leaves, measured on an Emerald Rapids; elsewhere not
/// measured.
Reach reach(const KernelProblem& problem, const DeviceSpec& spec) {
  return forward_bf16::reach(problem, 0.45 * cpu::dot_product_peak(spec));
}

Status forward(const ForwardCall& call) {
  return forward_bf16::forward<cpu::NoScope>(call, kFunctions);
}

}  // namespace
}  // namespace forward_avx512_bf16

std::span<const KernelEntry> entries_forward_avx512_bf16() {
  static const std::array<KernelEntry, 1> kEntries = {KernelEntry{
      .name = "forward_avx512_bf16",
      .device = Device::Kind::cpu,
      .pipeline = Pipeline::fused,
      .instruction_set = "avx512_bf16",
      .dtypes = {DType::bf16},
      .accepts_text = "bf16, every layout, mask, softcap and group; head_dim contiguous",
      .machine_has = cpu::machine_has_avx512_bf16,
      .accepts = forward_bf16::accepts,
      .reach = forward_avx512_bf16::reach,
      .workspace = forward_avx512_bf16::workspace,
      .forward = forward_avx512_bf16::forward}};
  return kEntries;
}

}  // namespace rafter
#else
namespace rafter {
std::span<const KernelEntry> entries_forward_avx512_bf16() { return {}; }
}  // namespace rafter
#endif
