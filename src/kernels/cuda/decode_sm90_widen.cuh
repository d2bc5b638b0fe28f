// Elements of 8-bit caches as 16-bit values.
#pragma once

#include "hw/cuda/wgmma.cuh"

namespace rafter::cuda {

/// Two bytes of a cache, in the low half of `bytes`, as a pair of 16-bit values.
template <DType kTo>
__device__ inline std::uint32_t widen(std::uint32_t bytes, bool e4m3) {
  std::uint32_t halves;
  if (e4m3) {
    asm("{\n.reg .b16 two;\ncvt.u16.u32 two, %1;\ncvt.rn.f16x2.e4m3x2 %0, two;\n}"
        : "=r"(halves)
        : "r"(bytes));
  } else {
    // Biased by 128 the bytes are the low mantissa bits of 1024 + x + 128.
    const std::uint32_t biased = __byte_perm(bytes ^ 0x8080u, 0x64646464u, 0x4140);
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(biased), "r"(0x64806480u));
  }
  if constexpr (kTo == DType::f16) {
    return halves;
  } else {
    float low, high;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(low), "=f"(high)
        : "r"(halves));
    return pack<kTo>(low, high);
  }
}

}  // namespace rafter::cuda
