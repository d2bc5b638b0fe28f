// Warpgroup 0 of forward_sm90: a warp that plans query tiles and loads their queries, and a thread
// that loads keys and values.
#pragma once

#include "hw/cuda/early.cuh"
#include "hw/cuda/tma.cuh"
#include "kernels/cuda/forward_sm90_shared.cuh"

namespace rafter::cuda {

template <int kRow>
struct ForwardLoad {
  static constexpr tiles::Sm90ForwardRow kShape = tiles::kSm90ForwardRows[kRow];
  static constexpr int kD = kShape.head_dim, kDv = kShape.head_dim_v;
  static constexpr int kTileQ = kShape.tile_q(), kTileKv = kShape.tile_kv;
  static constexpr int kWarpgroups = kShape.warpgroups, kStages = kShape.stages;
  static constexpr std::uint32_t kSlots = kShape.q_slots;
  using Shared = ForwardShared<kRow>;
  using Control = typename Shared::Control;

  __device__ static void load_tile(std::uint32_t destination, const CUtensorMap& map,
                                   std::uint32_t barrier, int columns, int rows, int row, int head,
                                   int batch) {
    barrier_arrive_expect(barrier, static_cast<std::uint32_t>(tiles::tile_bytes(rows, columns)));
#pragma unroll
    for (int box = 0; box < tiles::boxes(columns); ++box) {
      tma_load(destination + box * tiles::box_bytes(rows), map, barrier, box * tiles::kBoxColumns,
               row, head, batch);
    }
  }

  /// One warp: finds this CTA's query tiles, tells the others of them and loads their queries.
  __device__ static void plan(const ForwardParams& params, const Shared& shared) {
    Control& control = *shared.control;
    const bool leader = threadIdx.x % 32 == 0;
    TileFinder<kTileQ, kShape.own_ranges> finder;
    int tile = static_cast<int>(blockIdx.x);
    bool drawn_late = false;
    for (std::uint32_t t = 0;; ++t) {
      if (t > 0) {
        tile += static_cast<int>(gridDim.x);
        if (params.counter != nullptr) {
          if (leader) {
            if (kShape.runs_on && drawn_late) {
              await_queries_read(control, t);
            }
            tile = static_cast<int>(atomicAdd(params.counter, 1u) + gridDim.x);
          }
          tile = __shfl_sync(~0u, tile, 0);
        }
      }
      const TileWork work = finder.find(params, tile);
      if (leader) {
        barrier_wait(shared_address(&control.plan_empty[t % Control::kPlans]),
                     t / Control::kPlans % 2 ^ 1);
        PlannedTile<kWarpgroups>& planned = control.plans[t % Control::kPlans];
        static_cast<TileWork&>(planned) = work;
        const int2 range = key_tiles<kTileKv>(params, work, work.first_query, kTileQ);
        planned.range = range;
        // A long tile leaves time to find the next: it is drawn when this one begins, since a CTA
        // that holds tiles back makes the others wait for it in the end.
        constexpr int kLong = 8;
        drawn_late = range.y - range.x > kLong;
        planned.lse = params.lse;
        if (params.lse != nullptr) {
          const std::int64_t batch = params.cu_seqlens_q.data != nullptr ? 0 : work.batch;
          planned.lse += batch * params.lse_stride_batch + work.head * params.lse_stride_heads +
                         (std::int64_t{work.row_q} + work.first_query) * params.lse_stride_seqlen;
        }
#pragma unroll 1
        for (int w = 0; w < kWarpgroups; ++w) {
          const int first = work.first_query + 64 * w;
          planned.own[w] = kShape.own_ranges ? key_tiles<kTileKv>(params, work, first, 64) : range;
          planned.interior[w] = interior_tiles<kTileKv>(params, work, planned.own[w], first);
        }
        barrier_arrive(shared_address(&control.plan_full[t % Control::kPlans]));
        if (work.batch >= 0) {
          load_queries(params, shared, work, t);
        }
      }
      if (work.batch < 0) {
        break;
      }
    }
    if (kShape.own_ranges && params.is_second) {
      wait_for_earlier_grids();  // whoever waits for this grid waits for both
    }
  }

  /// Until the slot that Q of query tile t goes to is free.
  __device__ static void await_queries_read(Control& control, std::uint32_t t) {
#pragma unroll 1
    for (int w = 0; w < kWarpgroups; ++w) {
      barrier_wait(shared_address(&control.q_empty[w][t % kSlots]), t / kSlots % 2 ^ 1);
    }
  }

  __device__ static void load_queries(const ForwardParams& params, const Shared& shared,
                                      const TileWork& work, std::uint32_t t) {
    Control& control = *shared.control;
    const int batch = params.cu_seqlens_q.data == nullptr ? work.batch : 0;
#pragma unroll 1
    for (int w = 0; w < kWarpgroups; ++w) {
      barrier_wait(shared_address(&control.q_empty[w][t % kSlots]), t / kSlots % 2 ^ 1);
      load_tile(shared.q_of(w, t), params.q, shared_address(&control.q_full[w][t % kSlots]), kD, 64,
                work.row_q + work.first_query + 64 * w, work.head * params.q_heads_step,
                batch * params.q_batch_step);
    }
  }

  /// One thread: K and V of the planned query tiles, in one stream in which K runs one key tile
  /// ahead of V.
  __device__ static void load(const ForwardParams& params, const Shared& shared) {
    Control& control = *shared.control;
    std::uint32_t n = 0;  // tiles of K that went through the ring
    bool owes = false;    // V of the last one is still to come, from
    int row = 0, head = 0, batch = 0;
    const auto load_values = [&] {
      if (owes) {
        const std::uint32_t slot = (n - 1) % kStages;
        barrier_wait(shared_address(&control.v_empty[slot]), (n - 1) / kStages % 2 ^ 1);
        load_tile(shared.v_of(slot), params.v, shared_address(&control.v_full[slot]), kDv, kTileKv,
                  row, head * params.v_heads_step, batch * params.v_batch_step);
      }
    };
    for (std::uint32_t t = 0;; ++t) {
      control.await_plan(t);
      const PlannedTile<kWarpgroups>& planned = control.plan(t);
      if (planned.is_empty()) {  // consumers finish the tile before
        load_values();
        owes = false;
        if (planned.batch < 0) {
          return;
        }
      }
      const int2 range = planned.range;
      const int row_kv = planned.row_kv;
      const int next_head = planned.head / params.group;
      const int next_batch = params.cu_seqlens_q.data == nullptr ? planned.batch : 0;
      barrier_arrive(shared_address(&control.plan_empty[t % Control::kPlans]));
#pragma unroll 1
      for (int j = range.y - 1; j >= range.x; --j) {
        const std::uint32_t slot = n % kStages;
        barrier_wait(shared_address(&control.k_empty[slot]), n / kStages % 2 ^ 1);
        load_tile(shared.k_of(slot), params.k, shared_address(&control.k_full[slot]), kD, kTileKv,
                  row_kv + j * kTileKv, next_head * params.k_heads_step,
                  next_batch * params.k_batch_step);
        load_values();
        owes = true;
        row = row_kv + j * kTileKv;
        head = next_head;
        batch = next_batch;
        ++n;
      }
    }
  }
};

}  // namespace rafter::cuda
