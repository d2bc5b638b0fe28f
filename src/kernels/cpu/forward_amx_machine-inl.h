// AVX-512 vectors and AMX tiles as the machine of forward_bf16_task.h. Included inside a target
// region, after everything else.
#pragma once

#include "hw/cpu/amx.h"
#include "kernels/cpu/forward_bf16_avx512-inl.h"
#include "kernels/cpu/forward_bf16_task.h"

namespace rafter::forward_amx {
namespace {

struct Amx : forward_bf16::Avx512Vectors {
  template <int kTile>
  static void tile_load(const void* from, std::int64_t stride) {
    hw::amx::load<kTile>(from, stride);
  }
  template <int kTile>
  static void tile_load_past_l1(const void* from, std::int64_t stride) {
    hw::amx::load_past_l1<kTile>(from, stride);
  }
  template <int kTile>
  static void tile_store(void* to, std::int64_t stride) {
    hw::amx::store<kTile>(to, stride);
  }
  template <int kTile>
  static void tile_zero() {
    hw::amx::zero<kTile>();
  }
  template <int kC, int kA, int kB>
  static void tile_dot() {
    hw::amx::dot_bf16<kC, kA, kB>();
  }

  template <bool kAdds, int kSlices = 1, typename Slice>
  [[gnu::always_inline]] static void product(const forward_bf16::Product& x, const Slice& slice) {
    forward_bf16::tile_product<Amx, kAdds, kSlices>(x, slice);
  }
};

}  // namespace
}  // namespace rafter::forward_amx
