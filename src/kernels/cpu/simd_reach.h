// What kernels on vector units reach of a machine's ceilings.
#pragma once

#include "dispatch/kernel_entry.h"
#include "hwy/targets.h"
#include "tiles/forward_simd.h"

namespace rafter::cpu {

/// Highway asks CPUID at every call, which a virtual machine answers slowly.
inline std::int64_t machine_targets() {
  static const std::int64_t kTargets = hwy::SupportedTargets();
  return kTargets;
}

/// Of the f32 peak that the machine's widest vectors have, these vectors' part, `measured` of it;
/// f16 and bf16 are computed in f32, whatever units the machine has for them.
inline Reach simd_reach(const KernelProblem& problem, const DeviceSpec& spec,
                        const tiles::SimdBlocking& blocking, double measured) {
  const std::int64_t targets = machine_targets();
  const double widest = (targets & HWY_AVX3) != 0 ? 16 : (targets & HWY_AVX2) != 0 ? 8 : 4;
  // without fused multiply-add half of it
  const double own = static_cast<double>(blocking.lanes) / (blocking.lanes > 4 ? 1 : 2);
  const Result<double> f32 = spec.peak(DType::f32);
  const Result<double> peak = spec.peak(problem.attention.dtype);
  const double of_peak = f32 && peak && *peak > *f32 ? *f32 / *peak : 1;
  return {.compute = measured * own / widest * of_peak, .bandwidth = 0.8, .fixed_seconds = 3e-6};
}

}  // namespace rafter::cpu
