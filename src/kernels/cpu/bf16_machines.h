// Whether this machine has the instructions of the bf16 kernels on tiles and on dot products.
#pragma once

#include <string>

#include "dispatch/kernel_entry.h"
#include "hw/cpu/amx.h"

#if defined(__x86_64__)

namespace rafter::cpu {

inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
inline constexpr const char* kNoAvx512 = "this CPU has no AVX-512 (F, VL, DQ, BW)";

inline Acceptance machine_has_amx() {
  static const std::string reason = [] {
    const std::string refusal = hw::amx::request();
    return !refusal.empty() ? refusal : std::string(has_avx512() ? "" : kNoAvx512);
  }();
  return reason.empty() ? Acceptance::accept() : Acceptance::refuse(reason);
}

inline Acceptance machine_has_avx512_bf16() {
  if (!has_avx512()) {
    return Acceptance::refuse(kNoAvx512);
  }
  return __builtin_cpu_supports("avx512bf16") ? Acceptance::accept()
                                              : Acceptance::refuse("this CPU has no AVX512-BF16");
}

/// Dot products of pairs as a share of the bf16 peak: where that is the peak of AMX, the f32 peak;
/// elsewhere all of it.
inline double dot_product_peak(const DeviceSpec& spec) {
  const Result<double> f32 = spec.peak(DType::f32);
  const Result<double> bf16 = spec.peak(DType::bf16);
  return f32 && bf16 && *bf16 > 2 * *f32 ? *f32 / *bf16 : 1;
}

}  // namespace rafter::cpu
#endif
