// What forward_sm90 writes: rows of O and lse.
#pragma once

#include "hw/cuda/tma.cuh"
#include "kernels/cuda/forward_sm90_softmax.cuh"
#include "tiles/sm90_descriptor.h"

namespace rafter::cuda {

template <DType kDType, int kRow>
struct ForwardStore {
  static constexpr tiles::Sm90ForwardRow kShape = tiles::kSm90ForwardRows[kRow];
  static constexpr int kDv = kShape.head_dim_v;
  static constexpr int kWarpgroups = kShape.warpgroups;
  static constexpr int kOutputs = kDv / 2;  // accumulators of a thread

  /// Two neighbouring elements of O.
  __device__ static void store_pair(std::uint16_t* o, bool in_pairs, float low, float high) {
    const std::uint32_t pair = pack<kDType>(low, high);
    if (in_pairs) {
      *reinterpret_cast<std::uint32_t*>(o) = pair;
    } else {
      o[0] = static_cast<std::uint16_t>(pair);
      o[1] = static_cast<std::uint16_t>(pair >> 16);
    }
  }
  __device__ static void store_pair(float* o, bool, float low, float high) {
    o[0] = low;
    o[1] = high;
  }

  /// Row h of the thread. The usual case has no branches: each would wait for the store before it.
  template <typename T>
  __device__ static void store_row(const ForwardParams& params, const float (&o)[kOutputs], int h,
                                   float inverse, std::int64_t at) {
    T* const row = static_cast<T*>(params.o) + at;
    if (params.head_dim_v == kDv && params.o_in_pairs) {
#pragma unroll
      for (int i = 0; i < kOutputs / 4; ++i) {
        store_pair(row + 8 * i, true, o[4 * i + 2 * h] * inverse, o[4 * i + 2 * h + 1] * inverse);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kOutputs / 4; ++i) {
      if (8 * i < params.head_dim_v) {
        store_pair(row + 8 * i, params.o_in_pairs, o[4 * i + 2 * h] * inverse,
                   o[4 * i + 2 * h + 1] * inverse);
      }
    }
  }

  /// Where the rows of a warp go.
  struct Place {
    int batch, head;
    int row;   // of the tensor: the first of the warp's 16
    int rows;  // from there to the end of the sequence
  };

  __device__ static Place place_of(const ForwardParams& params, const TileWork& work,
                                   int warpgroup) {
    const int first =
        work.first_query + 64 * warpgroup + static_cast<int>(threadIdx.x % 128) / 32 * 16;
    return {params.cu_seqlens_q.data != nullptr ? 0 : work.batch, work.head, work.row_q + first,
            work.seqlen_q - first};
  }

  /// The factors that turn O into its result; lse is stored.
  __device__ static void finish_rows(const ForwardParams& params,
                                     const PlannedTile<kWarpgroups>& planned, int warpgroup,
                                     const RowState& rows, float (&inverse)[2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float sum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = rows.sum[h] + __shfl_xor_sync(~0u, rows.sum[h], 1);
      sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
      inverse[h] = sum[h] == 0 ? 0.0f : __fdividef(1.0f, sum[h]);  // 0: no key seen; not so NaN
    }
    const int h = lane % 4;  // two of the four lanes that share the rows store one each
    const int row =
        64 * warpgroup + static_cast<int>(threadIdx.x % 128) / 32 * 16 + lane / 4 + 8 * h;
    float* const lse = planned.lse;
    if (h < 2 && lse != nullptr && row < planned.seqlen_q - planned.first_query) {
      constexpr float kLn2 = 0.693147180559945309f;
      const float total = h == 0 ? sum[0] : sum[1];
      const float max = h == 0 ? rows.max[0] : rows.max[1];
      lse[row * params.lse_stride_seqlen] =
          total == 0 ? -INFINITY : max * params.scale_log2 * kLn2 + __logf(total);
    }
  }

  /// The warp's rows through its part of the warpgroup's buffer in shared memory. Only the warp
  /// waits: for its own copy of the query tile before.
  __device__ static void copy_out(const ForwardParams& params, std::uint32_t buffer,
                                  const Place& place, const float (&o)[kOutputs],
                                  const float (&inverse)[2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    buffer += threadIdx.x % 128 / 32 * tiles::tile_bytes(16, kDv);
    if (lane == 0) {
      tma_wait_stores_read();  // of the tile before
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOutputs / 4; i += 2) {
      store_matrices(buffer + tiles::swizzled_chunk_bytes(16, lane % 16, i + lane / 16),
                     pack<kDType>(o[4 * i] * inverse[0], o[4 * i + 1] * inverse[0]),
                     pack<kDType>(o[4 * i + 2] * inverse[1], o[4 * i + 3] * inverse[1]),
                     pack<kDType>(o[4 * i + 4] * inverse[0], o[4 * i + 5] * inverse[0]),
                     pack<kDType>(o[4 * i + 6] * inverse[1], o[4 * i + 7] * inverse[1]));
    }
    fence_shared_to_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int box = 0; box < tiles::boxes(kDv); ++box) {
        tma_store(params.o_map, buffer + box * tiles::box_bytes(16), box * tiles::kBoxColumns,
                  place.row, place.head * params.o_heads_step, place.batch * params.o_batch_step);
      }
      tma_commit_stores();
    }
  }

  __device__ static void store(const ForwardParams& params, std::uint32_t buffer,
                               const Place& place, const float (&o)[kOutputs],
                               const float (&inverse)[2]) {
    if constexpr (kShape.store_by_copy) {
      // The copy engine leaves out rows beyond the tensor, not those of the next sequence.
      if (params.o_by_copy && (params.cu_seqlens_q.data == nullptr || place.rows >= 16))
          [[likely]] {
        copy_out(params, buffer, place, o, inverse);
        return;
      }
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h;
      if (row >= place.rows) {
        continue;
      }
      const std::int64_t at = place.batch * params.o_stride_batch +
                              (place.row + row) * params.o_stride_seqlen +
                              place.head * params.o_stride_heads + 2 * (lane % 4);
      if (params.o_is_f32) {
        store_row<float>(params, o, h, inverse[h], at);
      } else {
        store_row<std::uint16_t>(params, o, h, inverse[h], at);
      }
    }
  }

  /// Zeros and lse = −∞ for the rows of a query tile that sees no key.
  __device__ static void store_nothing(const ForwardParams& params, const TileWork& work,
                                       int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const std::int64_t batch = params.cu_seqlens_q.data != nullptr ? 0 : work.batch;
    const int first = work.first_query + 64 * warpgroup;
    for (int query = first; query < min(first + 64, work.seqlen_q); ++query) {
      const std::int64_t q = std::int64_t{work.row_q} + query;
      const std::int64_t at = batch * params.o_stride_batch + q * params.o_stride_seqlen +
                              work.head * params.o_stride_heads;
      for (int column = thread; column < params.head_dim_v; column += 128) {
        if (params.o_is_f32) {
          static_cast<float*>(params.o)[at + column] = 0;
        } else {
          static_cast<std::uint16_t*>(params.o)[at + column] = 0;
        }
      }
      if (params.lse != nullptr && thread == 0) {
        params.lse[batch * params.lse_stride_batch + work.head * params.lse_stride_heads +
                   q * params.lse_stride_seqlen] = -INFINITY;
      }
    }
  }
};

}  // namespace rafter::cuda
