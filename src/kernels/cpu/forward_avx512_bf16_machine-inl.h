// AVX-512 vectors and VDPBF16PS as the machine of forward_bf16_task.h. Included inside a target
// region, after everything else.
#pragma once

#include "kernels/cpu/forward_bf16_avx512-inl.h"
#include "kernels/cpu/forward_bf16_task.h"

namespace rafter::forward_avx512_bf16 {
namespace {

struct DotProducts : forward_bf16::Avx512Vectors {
  static I load_pairs(const std::uint16_t* from) { return _mm512_load_si512(from); }
  static I repeat_pair(const std::uint16_t* from) {
    std::int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  /// sum + a₁ b₁ + a₀ b₀ in every lane; round to nearest, subnormals as zero.
  static F dot_pairs(F sum, I a, I b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }

  template <bool kAdds, int kSlices = 1, typename Slice>
  [[gnu::always_inline]] static void product(const forward_bf16::Product& x, const Slice& slice) {
    forward_bf16::vector_product<DotProducts, kAdds>(x, slice);
  }
};

}  // namespace
}  // namespace rafter::forward_avx512_bf16
