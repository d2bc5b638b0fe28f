// The copy engine's part of the fused backward kernel for sm_90a: tiles in, dQ out, a warp each.
#pragma once

#include <cstdint>

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/tma.cuh"
#include "kernels/cuda/backward_sm90_items.cuh"
#include "kernels/cuda/backward_sm90_shared.cuh"
#include "tiles/sm90_descriptor.h"

namespace rafter::cuda {

template <int kRow>
struct BackwardCopies {
  using Shared = BackwardShared<kRow>;
  static constexpr tiles::Sm90BackwardRow kShape = tiles::kSm90BackwardRows[kRow];
  static constexpr int kD = kShape.head_dim;
  static constexpr int kTileQ = kShape.tile_q, kTileKv = kShape.tile_kv;
  static constexpr int kQStages = kShape.q_stages, kDoStages = kShape.d_o_stages;
  static constexpr int kPartsOfWarpgroup = kShape.parts_of_warpgroup();
  static constexpr int kDqBuffers = kShape.dq_buffers;

  __device__ static void load_tile(std::uint32_t destination, const CUtensorMap& map,
                                   std::uint32_t barrier, int rows, int row, int head, int batch) {
#pragma unroll
    for (int box = 0; box < tiles::boxes(kD); ++box) {
      tma_load(destination + box * tiles::box_bytes(rows), map, barrier, box * tiles::kBoxColumns,
               row, head, batch);
    }
  }

  __device__ static void produce(const BackwardParams& params, const Shared& shared) {
    const bool leader = threadIdx.x == 0;
    std::uint32_t n = 0;  // query tiles that went through the rings
    ItemFinder<kTileQ, kTileKv> finder;
    for (std::uint32_t parity = 0;; parity ^= 1) {
      int number = 0;
      if (leader) {
        number = static_cast<int>(atomicAdd(params.counter, 1u));
      }
      number = __shfl_sync(~0u, number, 0);
      const BackwardItem item = finder.find(params, number);
      if (leader) {
        barrier_wait(shared.kv_empty(), parity ^ 1);
        shared.set_item(parity, item);
        load_item(params, shared, item, n);
      }
      if (item.batch < 0) {
        break;
      }
      __syncwarp();
    }
  }

  __device__ static void load_item(const BackwardParams& params, const Shared& shared,
                                   const BackwardItem& item, std::uint32_t& n) {
    const std::uint32_t k_full = shared.k_full(), v_full = shared.v_full();
    const int2 range = item.batch < 0 ? int2{0, 0} : query_tiles_of<kTileQ, kTileKv>(params, item);
    if (range.x >= range.y) {
      barrier_arrive(k_full);
      barrier_arrive(v_full);
      return;
    }
    const int group = static_cast<int>(params.problem.group);
    const int heads_q = static_cast<int>(params.problem.heads_q);
    const int batch = params.problem.cu_seqlens_q.data == nullptr ? item.batch : 0;
    const int key = item.row_kv + item.first_key;
    barrier_arrive_expect(k_full, kShape.kv_bytes());
    load_tile(shared.k(), params.k, k_full, kTileKv, key, item.head * params.k_heads_step,
              batch * params.k_batch_step);
    bool first = true;
#pragma unroll 1
    for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
#pragma unroll 1
      for (int tile = range.y - 1; tile >= range.x; --tile, ++n) {
        const float* const rows =
            params.rows + (std::int64_t{item.slot + tile} * heads_q + head) * (2 * kTileQ);
        const int row = item.row_q + tile * kTileQ;
        const std::uint32_t q_full = shared.q_full(n);
        barrier_wait(shared.q_empty(n), n / kQStages % 2 ^ 1);
        barrier_arrive_expect(q_full, kShape.q_bytes() + kShape.row_bytes());
        load_tile(shared.q(n), params.q, q_full, kTileQ, row, head * params.q_heads_step,
                  batch * params.q_batch_step);
        bulk_load(shared.lse(n), rows, kShape.row_bytes(), q_full);
        if (first) {
          first = false;
          barrier_arrive_expect(v_full, kShape.kv_bytes());
          load_tile(shared.v(), params.v, v_full, kTileKv, key, item.head * params.v_heads_step,
                    batch * params.v_batch_step);
        }
        const std::uint32_t d_o_full = shared.d_o_full(n);
        barrier_wait(shared.d_o_empty(n), n / kDoStages % 2 ^ 1);
        barrier_arrive_expect(d_o_full, kShape.q_bytes() + kShape.row_bytes());
        load_tile(shared.d_o(n), params.d_o, d_o_full, kTileQ, row, head * params.d_o_heads_step,
                  batch * params.d_o_batch_step);
        bulk_load(shared.delta(n), rows + kTileQ, kShape.row_bytes(), d_o_full);
      }
    }
  }

  /// One thread of each warp that adds; they take turns at the query tiles. The first item that a
  /// tile sees writes its sums, the others add to them, in ascending order of keys: the bits do not
  /// depend on who comes when.
  __device__ static void add_dq(const BackwardParams& params, const Shared& shared,
                                std::uint32_t adder) {
    static_assert(kDqBuffers == 1 || kPartsOfWarpgroup == 1);
    const int group = static_cast<int>(params.problem.group);
    const int heads_q = static_cast<int>(params.problem.heads_q);
    std::uint32_t n = 0;  // query tiles so far
    for (std::uint32_t parity = 0;; parity ^= 1) {
      barrier_wait(shared.k_full(), parity);
      const BackwardItem item = shared.item(parity);
      barrier_arrive(shared.kv_empty());
      if (item.batch < 0) {
        break;
      }
      const int2 range = query_tiles_of<kTileQ, kTileKv>(params, item);
      const ScoreMask mask = mask_of_item(params, item);
#pragma unroll 1
      for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
#pragma unroll 1
        for (int tile = range.y - 1; tile >= range.x; --tile, ++n) {
          if (n % kDqBuffers != adder) {
            continue;
          }
          const int end = min((tile + 1) * kTileQ, item.seqlen_q);
          const unsigned turn =  // items that add to the tile before this one
              static_cast<unsigned>(item.first_key / kTileKv -
                                    mask.hull(tile * kTileQ, end).first / kTileKv);
          const std::int64_t index = std::int64_t{item.slot + tile} * heads_q + head;
          while (load_acquire(params.turns + index) != turn) {
          }
          fence_async();
          float* const sums = params.dq_sums + index * (kShape.parts() * kShape.kPartFloats);
#pragma unroll 1
          for (int part = 0; part < kPartsOfWarpgroup; ++part) {
            const std::uint32_t m = n * kPartsOfWarpgroup + part;
#pragma unroll
            for (int w = 0; w < 2; ++w) {
              barrier_wait(shared.dq_full(w, m), m / kDqBuffers % 2);
              float* const to = sums + (w * kPartsOfWarpgroup + part) * kShape.kPartFloats;
              if (turn == 0) {
                bulk_store(to, shared.dq(w, m), kShape.kPartBytes);
              } else {
                bulk_add(to, shared.dq(w, m), kShape.kPartBytes);
              }
              tma_commit_stores();
            }
            tma_wait_stores_read();
            barrier_arrive(shared.dq_empty(0, m));
            barrier_arrive(shared.dq_empty(1, m));
          }
          tma_wait_stores();
          fence_async();
          store_release(params.turns + index, turn + 1);
        }
      }
    }
  }
};

}  // namespace rafter::cuda
