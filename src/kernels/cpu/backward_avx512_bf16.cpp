// Backward attention on AVX-512 with dot products of bf16 pairs (VDPBF16PS), fused; bf16 in (O and
// dO may be f32), bf16 or f32 out, f32 sums, P and dS rounded to bf16.
// Q, O, dO, dQ [batch, heads_q, seqlen_q, head_dim]   K, V, dK, dV [batch, heads_kv, seqlen_kv, …]
// Packing, tasks and schedule are those of backward_amx_bf16 (backward_bf16_task.h); a product is
// that of forward_avx512_bf16. Its units are those of the exponentials, so nothing is gained by
// interleaving the two. Limits: bf16, head_dim contiguous; dense and packed.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "kernels/cpu/backward_bf16_run.h"
#include "kernels/cpu/bf16_machines.h"

#if defined(__x86_64__)
#include <immintrin.h>

// All that is not of one machine stands above, as in forward_avx512_bf16.cpp.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx512bf16,avx2,fma,bmi,bmi2")
#include "kernels/cpu/backward_bf16_task.h"
#include "kernels/cpu/forward_avx512_bf16_machine-inl.h"

namespace rafter::backward_avx512_bf16 {
namespace {
constexpr const backward_bf16::Functions& kFunctions =
    backward_bf16::kFunctions<forward_avx512_bf16::DotProducts,
                              backward_bf16::Schedule{.interleave = false}>;
}  // namespace
}  // namespace rafter::backward_avx512_bf16
#pragma GCC pop_options
#pragma GCC diagnostic pop

namespace rafter {
namespace backward_avx512_bf16 {
namespace {

std::int64_t workspace(const KernelProblem& problem) { return backward_bf16::workspace(problem); }

/// As that of forward_avx512_bf16: measured, 44% of the f32 peak on the same Xeon.
Reach reach(const KernelProblem& problem, const DeviceSpec& spec) {
  return backward_bf16::reach(problem, 0.45 * cpu::dot_product_peak(spec));
}

Status backward(const BackwardCall& call) {
  return backward_bf16::backward<cpu::NoScope>(call, kFunctions);
}

}  // namespace
}  // namespace backward_avx512_bf16

std::span<const KernelEntry> entries_backward_avx512_bf16() {
  static const std::array<KernelEntry, 1> kEntries = {KernelEntry{
      .name = "backward_avx512_bf16",
      .device = Device::Kind::cpu,
      .pipeline = Pipeline::fused,
      .instruction_set = "avx512_bf16",
      .dtypes = {DType::bf16},
      .accepts_text = "bf16, dense and packed, every mask, softcap and group; head_dim contiguous",
      .machine_has = cpu::machine_has_avx512_bf16,
      .accepts = backward_bf16::accepts,
      .reach = backward_avx512_bf16::reach,
      .workspace = backward_avx512_bf16::workspace,
      .backward = backward_avx512_bf16::backward}};
  return kEntries;
}

}  // namespace rafter
#else
namespace rafter {
std::span<const KernelEntry> entries_backward_avx512_bf16() { return {}; }
}  // namespace rafter
#endif
