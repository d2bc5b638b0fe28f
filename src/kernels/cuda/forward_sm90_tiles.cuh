// The query tiles of forward_sm90: which there are, and which keys they see.
#pragma once

#include "kernels/cuda/forward_sm90.h"
#include "tiles/key_range.h"
#include "tiles/tile_order.h"

namespace rafter::cuda {

/// One query tile, as the planner tells it to the others.
struct TileWork {
  int batch = -1;  // −1: no more tiles
  int head = 0;
  int first_query = 0;        // of the tile, in its sequence
  int seqlen_q = 0;           // of the sequence
  int seqlen_kv = 0;          //
  int row_q = 0, row_kv = 0;  // first row of the sequence in its tensor (packed), else 0
};

using Mask32 = tiles::BasicMaskWindow<int>;

__device__ inline Mask32 mask_of(const ForwardParams& params, const TileWork& work) {
  return {params.window_left, params.window_right,
          params.top_left ? 0 : work.seqlen_kv - work.seqlen_q, work.seqlen_kv};
}

/// Key tiles that some of `rows` queries from `first` sees: [x, y).
template <int kTileKv>
__device__ inline int2 key_tiles(const ForwardParams& params, const TileWork& work, int first,
                                 int rows) {
  const Mask32::Range keys = mask_of(params, work).hull(first, min(first + rows, work.seqlen_q));
  if (keys.size() == 0) {
    return {0, 0};
  }
  return {keys.first / kTileKv, (keys.last + kTileKv - 1) / kTileKv};
}

/// Turns tile numbers into query tiles. Whole warp; tile numbers must grow from call to call.
/// kSelects: launches may take sequences of one kind.
template <int kTileQ, bool kSelects>
struct TileFinder {
  int tiles_before = 0;  // by sequences: of those before first_batch
  int first_batch = 0;

  __device__ TileWork find(const ForwardParams& params, int tile) {
    if (kSelects && params.takes != SequenceKind::all) {
      return by_sequences<kSelects>(params, tile);
    }
    return params.cu_seqlens_q.data == nullptr ? dense(params, tile)
                                               : by_sequences<false>(params, tile);
  }

 private:
  __device__ static int blocks_of(int length) { return (length + kTileQ - 1) / kTileQ; }

  __device__ static TileWork dense(const ForwardParams& params, int tile) {
    const tiles::TileOrder order{params.batch * params.heads_q, blocks_of(params.seqlen_q),
                                 params.section};
    TileWork work;
    if (tile >= order.tiles()) {
      return work;
    }
    const tiles::QueryTile place = order.at(tile);
    work.batch = place.head / params.heads_q;
    work.head = place.head - work.batch * params.heads_q;
    work.first_query = place.block * kTileQ;
    work.seqlen_q = params.seqlen_q;
    work.seqlen_kv =
        params.seqused_kv.data == nullptr
            ? params.seqlen_kv
            : clamped_length(index_at(params.seqused_kv, work.batch), params.seqlen_kv);
    return work;
  }

  /// The first row and the number of one sequence's queries, or of its keys. kOneKind: the batch
  /// may be dense.
  struct Rows {
    int first = 0, count = 0;
  };
  template <bool kOneKind>
  __device__ static Rows rows_of(const DeviceIndices& offsets, int b, int capacity) {
    if (kOneKind && offsets.data == nullptr) {
      return {0, capacity};
    }
    const std::int64_t first = index_at(offsets, b);
    return {static_cast<int>(first), clamped_length(index_at(offsets, b + 1) - first, capacity)};
  }
  template <bool kOneKind>
  __device__ static Rows keys_of(const ForwardParams& params, int b) {
    Rows keys = rows_of<kOneKind>(params.cu_seqlens_kv, b, params.seqlen_kv);
    if (params.seqused_kv.data != nullptr) {
      keys.count = clamped_length(index_at(params.seqused_kv, b), keys.count);
    }
    return keys;
  }

  template <bool kOneKind>
  __device__ static bool takes(const ForwardParams& params, int b, int seqlen_q) {
    return !kOneKind || tiles::is_sm90_forward_short(seqlen_q, keys_of<true>(params, b).count) ==
                            (params.takes == SequenceKind::is_short);
  }

  template <bool kOneKind>
  __device__ TileWork by_sequences(const ForwardParams& params, int tile) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (; first_batch < params.batch; first_batch += 32) {
      const int b = first_batch + lane;
      Rows queries;
      int tiles = 0;
      if (b < params.batch) {
        queries = rows_of<kOneKind>(params.cu_seqlens_q, b, params.seqlen_q);
        tiles = takes<kOneKind>(params, b, queries.count)
                    ? blocks_of(queries.count) * params.heads_q
                    : 0;
      }
      int sum = tiles;  // inclusive scan over the lanes
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        sum += lane >= step ? other : 0;
      }
      const unsigned behind = __ballot_sync(~0u, tile < tiles_before + sum);
      if (behind == 0) {
        tiles_before += __shfl_sync(~0u, sum, 31);
        continue;
      }
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      TileWork work;
      work.batch = first_batch + owner;
      work.seqlen_q = __shfl_sync(~0u, queries.count, owner);
      work.row_q = __shfl_sync(~0u, queries.first, owner);
      const tiles::TileOrder order{params.heads_q, blocks_of(work.seqlen_q), params.section};
      const tiles::QueryTile place =
          order.at(tile - tiles_before - __shfl_sync(~0u, sum - tiles, owner));
      work.head = place.head;
      work.first_query = place.block * kTileQ;
      const Rows keys = keys_of<kOneKind>(params, work.batch);
      work.row_kv = keys.first;
      work.seqlen_kv = keys.count;
      return work;
    }
    return {};
  }
};

/// Key tiles that each of the 64 queries from `first` sees whole, at most [range.x, range.y); they
/// need no mask. Empty (range.y, range.y) when scores must be transformed.
template <int kTileKv>
__device__ inline int2 interior_tiles(const ForwardParams& params, const TileWork& work, int2 range,
                                      int first) {
  const Mask32 mask = mask_of(params, work);
  // The first row ends first, the last row begins last.
  const Mask32::Range last_row = mask.row(first + 63);
  const int begin = max(range.x, (last_row.first + kTileKv - 1) / kTileKv);
  const int end = min(range.y, mask.row(first).last / kTileKv);
  const bool none = params.transform || last_row.size() == 0 || begin >= end;
  return none ? int2{range.y, range.y} : int2{begin, end};
}

/// A query tile and the keys that it sees, as the planner tells it to the others. Ranges of key
/// tiles are [x, y).
template <int kWarpgroups>
struct PlannedTile : TileWork {
  float* lse = nullptr;        // of its first row, null: none
  int2 range{0, 0};            // that some query sees
  int2 interior[kWarpgroups];  // that every query of the warpgroup sees whole
  int2 own[kWarpgroups];       // that some query of the warpgroup sees; where warpgroups walk these

  __device__ bool is_empty() const { return range.x >= range.y; }
};

}  // namespace rafter::cuda
