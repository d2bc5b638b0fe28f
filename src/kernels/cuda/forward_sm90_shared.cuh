// The shared memory of forward_sm90: slots of Q, K, V and O, barriers and the plans of query tiles.
#pragma once

#include "hw/cuda/barrier.cuh"
#include "kernels/cuda/forward_sm90_tiles.cuh"
#include "tiles/sm90_descriptor.h"

namespace rafter::cuda {

template <int kWarpgroups, int kStages, int kSlots>
struct ForwardControl {
  static constexpr std::uint32_t kPlans = 4;  // the tile before, this one, the next; a power of two
  std::uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  std::uint64_t q_full[kWarpgroups][kSlots], q_empty[kWarpgroups][kSlots];
  std::uint64_t plan_full[kPlans], plan_empty[kPlans];
  PlannedTile<kWarpgroups> plans[kPlans];  // of tile number t: t % kPlans

  __device__ const PlannedTile<kWarpgroups>& plan(std::uint32_t t) const {
    return plans[t % kPlans];
  }
  __device__ void await_plan(std::uint32_t t) const {
    barrier_wait(shared_address(&plan_full[t % kPlans]), t / kPlans % 2);
  }
};

/// Byte addresses in shared memory.
template <int kRow>
struct ForwardShared {
  static constexpr tiles::Sm90ForwardRow kShape = tiles::kSm90ForwardRows[kRow];
  static constexpr int kWarpgroups = kShape.warpgroups, kStages = kShape.stages;
  static constexpr std::uint32_t kSlots = kShape.q_slots;
  using Control = ForwardControl<kWarpgroups, kStages, kShape.q_slots>;
  static_assert(sizeof(Control) <= tiles::Sm90ForwardRow::kControlBytes);

  std::uint32_t q, k, v, o;  // q, o + warpgroup · bytes; k, v + slot · bytes
  Control* control;

  __device__ std::uint32_t q_of(int w, std::uint32_t tile) const {
    return q + (static_cast<std::uint32_t>(w) * kSlots + tile % kSlots) * kShape.q_bytes();
  }
  __device__ std::uint32_t o_of(int w) const { return o + w * kShape.o_bytes(); }
  __device__ std::uint32_t k_of(std::uint32_t slot) const { return k + slot * kShape.k_bytes(); }
  __device__ std::uint32_t v_of(std::uint32_t slot) const { return v + slot * kShape.v_bytes(); }

  __device__ static ForwardShared carve(unsigned char* raw) {
    const std::uint32_t start = shared_address(raw);
    constexpr std::uint32_t kAlign = tiles::kSwizzleGroupBytes;
    const std::uint32_t aligned = (start + kAlign - 1) / kAlign * kAlign;
    ForwardShared shared;
    shared.q = aligned;
    shared.k = shared.q + kWarpgroups * kShape.q_slots * kShape.q_bytes();
    shared.v = shared.k + kStages * kShape.k_bytes();
    shared.o = shared.v + kStages * kShape.v_bytes();
    const std::uint32_t end = shared.o + kWarpgroups * kShape.o_bytes();
    shared.control = reinterpret_cast<Control*>(raw + (end - start));
    return shared;
  }

  __device__ static void init_barriers(Control& control) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&control.k_full[i]), 1);
      barrier_init(shared_address(&control.v_full[i]), 1);
      barrier_init(shared_address(&control.k_empty[i]), 4 * kWarpgroups);
      barrier_init(shared_address(&control.v_empty[i]), 4 * kWarpgroups);
    }
    for (int w = 0; w < kWarpgroups; ++w) {
      for (std::uint32_t i = 0; i < kSlots; ++i) {
        barrier_init(shared_address(&control.q_full[w][i]), 1);
        barrier_init(shared_address(&control.q_empty[w][i]), 4);
      }
    }
    for (std::uint32_t i = 0; i < Control::kPlans; ++i) {
      barrier_init(shared_address(&control.plan_full[i]), 1);
      barrier_init(shared_address(&control.plan_empty[i]), 4 * kWarpgroups + 1);
    }
    barrier_init_fence();
  }
};

}  // namespace rafter::cuda
