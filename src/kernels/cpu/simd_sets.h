// What the dispatcher asks of every kernel on vector units: the instruction sets that one source is
// compiled for, and what they reach of a machine's ceilings.
#pragma once

#include <string>
#include <string_view>

#include "dispatch/kernel_entry.h"
#include "hwy/targets.h"
#include "tiles/forward_simd.h"

namespace rafter::cpu {

/// Highway asks CPUID at every call, which a virtual machine answers slowly.
inline std::int64_t machine_targets() {
  static const std::int64_t kTargets = hwy::SupportedTargets();
  return kTargets;
}

struct PortableSet {
  static constexpr std::string_view kInstructionSet = "portable";
  static constexpr const char* kNeeds = "baseline instructions";
  static constexpr std::int64_t kTarget = HWY_STATIC_TARGET;
};
struct Avx2Set {
  static constexpr std::string_view kInstructionSet = "avx2";
  static constexpr const char* kNeeds = "AVX2 with FMA and F16C";
  static constexpr std::int64_t kTarget = HWY_AVX2;
};
struct Avx512Set {
  static constexpr std::string_view kInstructionSet = "avx512";
  static constexpr const char* kNeeds = "AVX-512 (F, VL, DQ, BW)";
  static constexpr std::int64_t kTarget = HWY_AVX3;
};

template <typename Set>
Acceptance machine_has() {
  return (machine_targets() & Set::kTarget) != 0
             ? Acceptance::accept()
             : Acceptance::refuse(std::string("this CPU has no ") + Set::kNeeds);
}

inline Acceptance accepts_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16
             ? Acceptance::accept()
             : Acceptance::refuse(std::string(to_string(dtype)) + " is not among f32, bf16, f16");
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
