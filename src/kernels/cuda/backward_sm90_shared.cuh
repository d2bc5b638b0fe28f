// Shared memory of the fused backward kernel for sm_90a: tiles, rows and barriers, by address.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hw/cuda/barrier.cuh"
#include "kernels/cuda/backward_sm90_items.cuh"
#include "tiles/sm90_backward.h"

namespace rafter::cuda {

__device__ inline int4 load_int4(std::uint32_t address) {
  int4 x;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ inline void store_int4(std::uint32_t address, int4 x) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ inline float2 load_float2(std::uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

template <int kQStages, int kDoStages, int kDqBuffers>
struct BackwardControl {
  std::uint64_t k_full, v_full, kv_empty;
  std::uint64_t q_full[kQStages], q_empty[kQStages];
  std::uint64_t d_o_full[kDoStages], d_o_empty[kDoStages];
  std::uint64_t ds_full[2];
  std::uint64_t dq_full[2 * kDqBuffers], dq_empty[2 * kDqBuffers];
  alignas(16) int walk[2][4];         // of a warpgroup
  alignas(16) BackwardItem items[2];  // alternating: one is read while the next is written
};

/// Addresses are sums of one register and constants.
template <int kRow>
struct BackwardShared {
  static constexpr tiles::Sm90BackwardRow kShape = tiles::kSm90BackwardRows[kRow];
  static constexpr int kQStages = kShape.q_stages, kDoStages = kShape.d_o_stages;
  static constexpr int kDqBuffers = kShape.dq_buffers;
  using Control = BackwardControl<kQStages, kDoStages, kDqBuffers>;
  static_assert(sizeof(Control) <= tiles::Sm90BackwardRow::kControlBytes);
  static_assert(sizeof(BackwardItem) == 32);

  std::uint32_t base;
  static constexpr std::uint32_t kV = kShape.kv_bytes(), kQ = 2 * kV;
  static constexpr std::uint32_t kDO = kQ + kQStages * kShape.q_bytes();
  static constexpr std::uint32_t kScoreTiles = kDO + kDoStages * kShape.q_bytes();
  static constexpr std::uint32_t kDqParts =
      kScoreTiles + kShape.score_buffers() * kShape.score_bytes();
  static constexpr std::uint32_t kRows = kDqParts + 2 * kDqBuffers * kShape.kPartBytes;
  static constexpr std::uint32_t kControl = kRows + (kQStages + kDoStages) * kShape.row_bytes();

  __device__ std::uint32_t k() const { return base; }
  __device__ std::uint32_t v() const { return base + kV; }
  __device__ std::uint32_t q(std::uint32_t n) const {
    return base + kQ + n % kQStages * kShape.q_bytes();
  }
  __device__ std::uint32_t d_o(std::uint32_t n) const {
    return base + kDO + n % kDoStages * kShape.q_bytes();
  }
  /// lse of a step's queries, with Q; delta, with dO.
  __device__ std::uint32_t lse(std::uint32_t n) const {
    return base + kRows + n % kQStages * kShape.row_bytes();
  }
  __device__ std::uint32_t delta(std::uint32_t n) const {
    return base + kRows + (kQStages + n % kDoStages) * kShape.row_bytes();
  }
  /// dS of a step, kept for the next one; and P.
  __device__ std::uint32_t ds(std::uint32_t n) const {
    return base + kScoreTiles + n % 2 * kShape.score_bytes();
  }
  __device__ std::uint32_t p(std::uint32_t n) const {
    return base + kScoreTiles + (2 + n % 2) * kShape.score_bytes();
  }
  /// Part m of a warpgroup, counted over all steps.
  __device__ std::uint32_t dq(int w, std::uint32_t m) const {
    return base + kDqParts + (w * kDqBuffers + m % kDqBuffers) * kShape.kPartBytes;
  }

  // Barriers.
  __device__ std::uint32_t k_full() const { return base + kControl + offsetof(Control, k_full); }
  __device__ std::uint32_t v_full() const { return base + kControl + offsetof(Control, v_full); }
  __device__ std::uint32_t kv_empty() const {
    return base + kControl + offsetof(Control, kv_empty);
  }
  __device__ std::uint32_t q_full(std::uint32_t n) const {
    return base + kControl + offsetof(Control, q_full) + n % kQStages * 8;
  }
  __device__ std::uint32_t q_empty(std::uint32_t n) const {
    return base + kControl + offsetof(Control, q_empty) + n % kQStages * 8;
  }
  __device__ std::uint32_t d_o_full(std::uint32_t n) const {
    return base + kControl + offsetof(Control, d_o_full) + n % kDoStages * 8;
  }
  __device__ std::uint32_t d_o_empty(std::uint32_t n) const {
    return base + kControl + offsetof(Control, d_o_empty) + n % kDoStages * 8;
  }
  __device__ std::uint32_t ds_full(std::uint32_t n) const {
    return base + kControl + offsetof(Control, ds_full) + n % 2 * 8;
  }
  __device__ std::uint32_t dq_full(int w, std::uint32_t m) const {
    return base + kControl + offsetof(Control, dq_full) + (w * kDqBuffers + m % kDqBuffers) * 8;
  }
  __device__ std::uint32_t dq_empty(int w, std::uint32_t m) const {
    return base + kControl + offsetof(Control, dq_empty) + (w * kDqBuffers + m % kDqBuffers) * 8;
  }

  __device__ std::uint32_t walk(int w) const {
    return base + kControl + offsetof(Control, walk) + w * 16;
  }
  __device__ std::uint32_t item_address(std::uint32_t parity) const {
    return base + kControl + offsetof(Control, items) + parity * sizeof(BackwardItem);
  }
  __device__ BackwardItem item(std::uint32_t parity) const {
    const int4 a = load_int4(item_address(parity)), b = load_int4(item_address(parity) + 16);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  }
  __device__ void set_item(std::uint32_t parity, const BackwardItem& item) const {
    store_int4(item_address(parity), {item.batch, item.head, item.first_key, item.seqlen_q});
    store_int4(item_address(parity) + 16, {item.seqlen_kv, item.row_q, item.row_kv, item.slot});
  }

  __device__ static BackwardShared carve(unsigned char* raw) {
    if (shared_address(raw) % tiles::kSwizzleGroupBytes != 0) {
      __trap();
    }
    return {shared_address(raw)};
  }

  /// One thread, before all else.
  __device__ void init_barriers() const {
    constexpr int kWarps = 8;  // of consumers
    barrier_init(k_full(), 1);
    barrier_init(v_full(), 1);
    barrier_init(kv_empty(), kWarps + kDqBuffers);
    for (std::uint32_t i = 0; i < kQStages; ++i) {
      barrier_init(q_full(i), 1);
      barrier_init(q_empty(i), kWarps);
    }
    for (std::uint32_t i = 0; i < kDoStages; ++i) {
      barrier_init(d_o_full(i), 1);
      barrier_init(d_o_empty(i), kWarps);
    }
    for (std::uint32_t i = 0; i < 2; ++i) {
      barrier_init(ds_full(i), kWarps);
    }
    for (std::uint32_t i = 0; i < kDqBuffers; ++i) {
      for (int w = 0; w < 2; ++w) {
        barrier_init(dq_full(w, i), kWarps / 2);
        barrier_init(dq_empty(w, i), 1);
      }
    }
    barrier_init_fence();
  }
};

}  // namespace rafter::cuda
