// The items of backward_sm90: keys of a KV head, whose gradients one CTA sums.
#pragma once

#include "kernels/cuda/backward_sm90.h"
#include "kernels/cuda/scores.cuh"
#include "tiles/tile_order.h"

namespace rafter::cuda {

/// tile_kv keys of a KV head, as the producer tells the others.
struct BackwardItem {
  int batch = -1;  // −1: no more items
  int head = 0;    // of K and V
  int first_key = 0;
  int seqlen_q = 0, seqlen_kv = 0;
  int row_q = 0, row_kv = 0;  // first row of the sequence in its tensors (packed), else 0
  int slot = 0;               // of the sequence's first query tile
};

/// Turns item numbers into items. Whole warp; numbers must grow from call to call. Items of the
/// heads of a section alternate; those of a head come in ascending order of keys.
template <int kTileQ, int kTileKv>
struct ItemFinder {
  int items_before = 0;  // packed: of the sequences before first_batch
  int first_batch = 0;

  __device__ BackwardItem find(const BackwardParams& params, int number) {
    return params.problem.cu_seqlens_q.data == nullptr ? dense(params, number)
                                                       : packed(params, number);
  }

 private:
  __device__ static int blocks_of(int length) { return (length + kTileKv - 1) / kTileKv; }

  __device__ static int heads_kv(const ScoreProblem& p) {
    return static_cast<int>(p.heads_q / p.group);
  }

  __device__ static BackwardItem item_of(const BackwardParams& params, int batch, int head,
                                         int block) {
    const ScoreSequence s = sequence_of(params.problem, batch);
    const bool packed = params.problem.cu_seqlens_q.data != nullptr;
    return {batch,
            head,
            block * kTileKv,
            s.seqlen_q,
            s.seqlen_kv,
            static_cast<int>(s.row_q),
            static_cast<int>(s.row_kv),
            static_cast<int>(
                tiles::first_slot(packed, batch, s.row_q, params.problem.seqlen_q, kTileQ))};
  }

  __device__ static BackwardItem dense(const BackwardParams& params, int number) {
    const ScoreProblem& p = params.problem;
    const tiles::TileOrder order{static_cast<int>(p.batch) * heads_kv(p), blocks_of(p.seqlen_kv),
                                 params.section};
    if (number >= order.tiles()) {
      return {};
    }
    const tiles::QueryTile place = order.at(number);
    const int batch = place.head / heads_kv(p);
    return item_of(params, batch, place.head - batch * heads_kv(p), order.blocks - 1 - place.block);
  }

  __device__ BackwardItem packed(const BackwardParams& params, int number) {
    const ScoreProblem& p = params.problem;
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (; first_batch < p.batch; first_batch += 32) {
      const int b = first_batch + lane;
      const int length = b < p.batch ? sequence_of(p, b).seqlen_kv : 0;
      const int items = blocks_of(length) * heads_kv(p);
      int sum = items;  // inclusive scan over the lanes
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        sum += lane >= step ? other : 0;
      }
      const unsigned behind = __ballot_sync(~0u, number < items_before + sum);
      if (behind == 0) {
        items_before += __shfl_sync(~0u, sum, 31);
        continue;
      }
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      const int heads = heads_kv(p);
      const tiles::TileOrder order{heads, blocks_of(__shfl_sync(~0u, length, owner)),
                                   min(params.section, heads)};
      const tiles::QueryTile place =
          order.at(number - items_before - __shfl_sync(~0u, sum - items, owner));
      return item_of(params, first_batch + owner, place.head, order.blocks - 1 - place.block);
    }
    return {};
  }
};

__device__ inline ScoreMask mask_of_item(const BackwardParams& params, const BackwardItem& item) {
  return {params.problem.window_left, params.problem.window_right,
          params.problem.top_left ? 0 : item.seqlen_kv - item.seqlen_q, item.seqlen_kv};
}

/// Query tiles that see any of the item's keys: [x, y).
template <int kTileQ, int kTileKv>
__device__ int2 query_tiles_of(const BackwardParams& params, const BackwardItem& item) {
  const int end = min(item.first_key + kTileKv, item.seqlen_kv);
  const ScoreMask::Range rows =
      mask_of_item(params, item).transposed(item.seqlen_q).hull(item.first_key, end);
  if (rows.size() == 0) {
    return {0, 0};
  }
  return {rows.first / kTileQ, (rows.last + kTileQ - 1) / kTileQ};
}

}  // namespace rafter::cuda
