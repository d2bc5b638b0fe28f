// What the kernels of products with packed weights share: a ring of units that the copy engine
// fills, warps that multiply, one that adds their sums. Two CTAs fit an SM, so that the ring of the
// next kernel fills while this one ends; each CTA takes every gridDim-th stripe of 16 rows.
//   consumers  the first kWarps: one unit (1 KiB of values with their scales) of each stage, two
//              stages at a time, into kSums sums by turns. `Products` says how
//   producer   the warp behind them: the copy engine brings kWarps units of a stripe to each of
//              `stages` slots. Where the weight is settled it begins while the kernel before this
//              one still runs. It lets the next begin when kLateBytes are left to ask for: with the
//              ring of the next filled before, the bus waits while this kernel ends
//   finisher   the last: adds a stripe's sums of all warps in a fixed order and stores y, while the
//              consumers go on with the next stripe
// Barriers: full[s] copies → consumers (bytes), empty[s] consumers → producer (one arrival a warp),
// summed[2] consumers → finisher (one arrival a warp), stored[2] finisher → consumers.
#pragma once

#include <algorithm>

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/early.cuh"
#include "hw/cuda/tma.cuh"
#include "kernels/cuda/packed_rows.h"
#include "kernels/cuda/rows.cuh"

namespace rafter::cuda {

inline constexpr int kRows = base::kStripeRows;
inline constexpr int kFewestStages = 2, kGoodStages = 4, kMostStages = 24;
inline constexpr std::int64_t kMostShared = 232448;  // of a CTA. CUDA C++ programming guide, 9.0
inline constexpr std::int64_t kHalfShared = 233472 / 2 - 1024;  // 1 KiB of each is the system's

constexpr int threads_of(int warps) { return (warps + 2) * 32; }
/// Of `sums` partial sums of each row.
constexpr std::int64_t sums_bytes(int sums, std::int64_t m) {
  return std::int64_t{2} * sums * m * kRows * 4;
}
inline constexpr std::int64_t kBarrierBytes = (2 * kMostStages + 5) * 8 + 24;  // a multiple of 64
static_assert(kBarrierBytes % 64 == 0);
constexpr std::int64_t stage_bytes(int warps, const base::PackedShape& s) {
  return warps * s.unit_bytes();
}

/// What a CTA may take of an SM's shared memory where it leaves room for another.
struct Share {
  std::int64_t most = kHalfShared, least = 0;
};

/// Shared memory of a CTA of `warps` consumers with `sums` partial sums in all, whose x takes
/// x_bytes: a share of an SM's, or all of it where that would leave too few stages.
struct Ring {
  std::int64_t stages = 0, shared_bytes = 0;
  bool is_share = false;
};
constexpr Ring ring_of(int warps, int sums, std::int64_t m, std::int64_t x_bytes,
                       const base::PackedShape& s, const Share& share = {}) {
  const std::int64_t front = kBarrierBytes + sums_bytes(sums, m) + x_bytes;
  const std::int64_t stage = stage_bytes(warps, s);
  const bool is_share = front + kGoodStages * stage <= share.most;
  const std::int64_t stages =
      std::min<std::int64_t>(kMostStages, ((is_share ? share.most : kMostShared) - front) / stage);
  return {stages, std::max(share.least, front + stages * stage), is_share};
}
__device__ inline uint4 load_shared(std::uint32_t address) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address));
  return words;
}
/// A bf16 widened.
__device__ inline float load_shared_scale(std::uint32_t address) {
  std::uint16_t bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address));
  return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
}

/// Where a ring of slots stands.
struct Turn {
  int slot = 0;
  std::uint32_t parity = 0;
  __device__ void next(int stages) {
    if (++slot == stages) {
      slot = 0;
      parity ^= 1u;
    }
  }
};

/// Where things lie in shared memory, as addresses.
struct Shared {
  std::uint32_t barriers, x, stages, stage_bytes;
  __device__ std::uint32_t full(int slot) const { return barriers + 16 * slot; }
  __device__ std::uint32_t empty(int slot) const { return barriers + 16 * slot + 8; }
  __device__ std::uint32_t x_is_there() const { return barriers + 16 * kMostStages; }
  __device__ std::uint32_t summed(int side) const { return x_is_there() + 8 + 8 * side; }
  __device__ std::uint32_t stored(int side) const { return x_is_there() + 24 + 8 * side; }
  __device__ std::uint32_t stage(int slot) const { return stages + slot * stage_bytes; }
};

/// One lane. A stage takes an SM some 250 ns: sizes (divisions in 64 bits) are computed before.
/// With them in the loop a product of 46 MB took 21 µs where it takes 14.
template <typename Products>
__device__ void bring_weights(const PackedRowsParams& p, const Shared& at) {
  constexpr int kWarps = Products::kWarps;
  const std::int64_t stripes = p.shape.n / kRows, stripe_bytes = p.shape.stripe_bytes();
  const int units = static_cast<int>(p.shape.stripe_units());
  const int unit_bytes = static_cast<int>(p.shape.unit_bytes());
  const int late = Products::kLateBytes / static_cast<int>(at.stage_bytes);
  int left = static_cast<int>((stripes - blockIdx.x + gridDim.x - 1) / gridDim.x) *
             ((units + kWarps - 1) / kWarps);
  if (left <= late) {
    let_next_grid_begin();
  }
  Turn turn{0, 1};
  for (std::int64_t stripe = blockIdx.x; stripe < stripes; stripe += gridDim.x) {
    const auto* from = static_cast<const std::uint8_t*>(p.weight) + stripe * stripe_bytes;
    for (int u = 0; u < units; u += kWarps) {
      const auto bytes = static_cast<std::uint32_t>(min(kWarps, units - u) * unit_bytes);
      barrier_wait(at.empty(turn.slot), turn.parity);
      barrier_arrive_expect(at.full(turn.slot), bytes);
      bulk_load(at.stage(turn.slot), from, bytes, at.full(turn.slot));
      from += bytes;
      turn.next(p.stages);
      if (--left == late) {
        let_next_grid_begin();
      }
    }
  }
}

/// The finisher: y of stripe after stripe from all partial sums, [2, sums, m, 16 rows]. A lane has
/// one row of a stripe, whose scale and bias it loads while the sums are awaited.
template <int kSums>
__device__ void finish(const PackedRowsParams& p, const Shared& at, const float* sums, int lane) {
  const std::int64_t stripes = p.shape.n / kRows;
  const int size = p.m * kRows, in_stripe = lane % kRows;
  Rows bias, y;
  bias.data = const_cast<void*>(p.bias);
  bias.dtype = p.dtype;
  y.data = p.y;
  y.dtype = p.y_is_f32 ? DType::f32 : p.dtype;
  Turn turn;
  for (std::int64_t stripe = blockIdx.x; stripe < stripes; stripe += gridDim.x) {
    const std::int64_t row = stripe * kRows + in_stripe;
    const float scale =
        p.shape.is_int4()
            ? 1.0f
            : base::load_scale(p.shape, static_cast<const std::uint8_t*>(p.weight), row, 0);
    const float added = p.bias != nullptr ? element(bias, row) : 0.0f;
    barrier_wait(at.summed(turn.slot), turn.parity);
    const float* const all = sums + turn.slot * kSums * size + in_stripe;
    for (int m = lane / kRows; m < p.m; m += 2) {
      float total = 0;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        total += all[i * size + m * kRows];
      }
      store_element(y, m * p.y_stride + row, fmaf(total, scale, added));
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(at.stored(turn.slot));
    }
    turn.next(2);
  }
}

/// A consumer: its unit of every stage, two stages at a time.
template <typename Products>
__device__ void consume(const PackedRowsParams& p, const Shared& at, float* sums, int warp,
                        int lane) {
  const std::int64_t stripes = p.shape.n / kRows;
  const int units = static_cast<int>(p.shape.stripe_units());
  constexpr int kWarps = Products::kWarps;
  const Products products(p, at.x, lane);
  float* const mine = sums + warp * p.m * kRows;
  Turn turn, side{0, 1};
  for (std::int64_t stripe = blockIdx.x; stripe < stripes; stripe += gridDim.x) {
    float sum[Products::kSums][4] = {};
    for (int u = warp; u - warp < units; u += 2 * kWarps) {
      const int slots[2] = {turn.slot, turn.slot + 1 == p.stages ? 0 : turn.slot + 1};
      const bool two = u - warp + kWarps < units;
      barrier_wait(at.full(slots[0]), turn.parity);
      turn.next(p.stages);
      if (two) {
        barrier_wait(at.full(slots[1]), turn.parity);
        turn.next(p.stages);
      }
      const auto bytes = static_cast<std::uint32_t>(warp * Products::kBytes);
      const std::uint32_t of_weight[2] = {at.stage(slots[0]) + bytes, at.stage(slots[1]) + bytes};
      if (u + kWarps < units) {
        products.template add<2>(of_weight, u, sum);
      } else if (u < units) {
        products.template add<1>(of_weight, u, sum);
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(at.empty(slots[0]));
        if (two) {
          barrier_arrive(at.empty(slots[1]));
        }
      }
    }
    barrier_wait(at.stored(side.slot), side.parity);
#pragma unroll
    for (int i = 0; i < Products::kSums; ++i) {
      products.keep(sum[i], mine + (side.slot * Products::kSums + i) * kWarps * p.m * kRows, p.m);
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(at.summed(side.slot));
    }
    side.next(2);
  }
}

/// A kernel's all.
template <typename Products>
__device__ void multiply_rows(const PackedRowsParams& p, std::uint8_t* shared) {
  constexpr int kWarps = Products::kWarps, kProducer = kWarps, kFinisher = kWarps + 1;
  constexpr int kSums = kWarps * Products::kSums;
  auto* const sums = reinterpret_cast<float*>(shared + kBarrierBytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  Shared at;
  at.barriers = shared_address(shared);
  at.x = at.barriers + static_cast<std::uint32_t>(kBarrierBytes + sums_bytes(kSums, p.m));
  at.stages = at.x + static_cast<std::uint32_t>(Products::x_bytes(p.m, p.shape.k));
  at.stage_bytes = static_cast<std::uint32_t>(stage_bytes(kWarps, p.shape));
  if (thread == 0) {
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(at.full(s), 1);
      barrier_init(at.empty(s), kWarps);
    }
    barrier_init(at.x_is_there(), 1);
    for (int side = 0; side < 2; ++side) {
      barrier_init(at.summed(side), kWarps);
      barrier_init(at.stored(side), 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (warp == kProducer) {
    if (!p.weight_is_settled) {
      wait_for_earlier_grids();
    }
    if (lane == 0) {
      bring_weights<Products>(p, at);
    }
    return;
  }
  wait_for_earlier_grids();
  if (warp == kFinisher) {
    finish<kSums>(p, at, sums, lane);
    return;
  }
  Products::bring_x(p, at, thread);
  consume<Products>(p, at, sums, warp, lane);
}

}  // namespace rafter::cuda
