// What backward_sm90's consumers hold of dK and dV, and how they write it.
#pragma once

#include <cstdint>

#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/backward_sm90_items.cuh"
#include "tiles/sm90_backward.h"

namespace rafter::cuda {

template <DType kDType, int kRow>
struct BackwardStore {
  static constexpr tiles::Sm90BackwardRow kShape = tiles::kSm90BackwardRows[kRow];
  static constexpr bool kSplitsHeadDim = kShape.splits_head_dim;
  static constexpr int kColumns = kSplitsHeadDim ? kShape.head_dim / 2 : kShape.head_dim;
  static constexpr int kSums = kColumns / 2;  // accumulators of a thread

  __device__ static int warpgroup() { return static_cast<int>(threadIdx.x / 128) - 1; }
  /// First key of the warpgroup in the item; the thread's row among the warpgroup's, its second is
  /// 8 further on.
  __device__ static int key_shift() { return kSplitsHeadDim ? 0 : 64 * warpgroup(); }
  __device__ static int row_shift() {
    const int thread = static_cast<int>(threadIdx.x % 128);
    return thread / 32 * 16 + thread % 32 / 4;
  }

  /// Two neighbouring elements, or the first alone.
  template <typename T>
  __device__ static void store_pair(T* to, float low, float high, bool both) {
    T second;
    if constexpr (sizeof(T) == 4) {
      to[0] = low;
      second = high;
    } else {
      const std::uint32_t pair = pack<kDType>(low, high);
      to[0] = static_cast<T>(pair);
      second = static_cast<T>(pair >> 16);
    }
    if (both) {
      to[1] = second;
    }
  }

  /// The four lanes of a row have pair l of blocks 0 … 3 each; lane l gets all pairs of block l.
  __device__ static void transpose_quad(std::uint32_t (&pairs)[4]) {
    const auto exchange = [](bool high, std::uint32_t& low_word, std::uint32_t& high_word,
                             int lanes) {
      const std::uint32_t got = __shfl_xor_sync(~0u, high ? low_word : high_word, lanes);
      (high ? low_word : high_word) = got;
    };
    const bool odd = threadIdx.x % 2 != 0, upper = threadIdx.x % 4 >= 2;
    exchange(odd, pairs[0], pairs[1], 1);
    exchange(odd, pairs[2], pairs[3], 1);
    exchange(upper, pairs[0], pairs[2], 2);
    exchange(upper, pairs[1], pairs[3], 2);
  }

  template <typename T>
  __device__ static void store_sums(const BackwardItem& item, const PlainTensor& t,
                                    std::int64_t batch, int head_dim, float factor,
                                    const float (&sums)[kSums]) {
    const int lane = static_cast<int>(threadIdx.x % 4);
    const int first_column = kSplitsHeadDim ? kColumns * warpgroup() : 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = item.first_key + key_shift() + row_shift() + 8 * h;
      const bool owned = key < item.seqlen_kv;
      T* const row = static_cast<T*>(t.data) + batch * t.stride_batch +
                     (std::int64_t{item.row_kv} + key) * t.stride_seqlen +
                     item.head * t.stride_heads + first_column;
      if (sizeof(T) == 2 && t.aligned) {  // 16 bytes a lane: with 4, stores take longer than a tile
#pragma unroll
        for (int i = 0; i < kSums / 4; i += 4) {
          std::uint32_t pairs[4];
#pragma unroll
          for (int block = 0; block < 4; ++block) {
            const float* const two = sums + 4 * (i + block) + 2 * h;
            pairs[block] = pack<kDType>(two[0] * factor, two[1] * factor);
          }
          transpose_quad(pairs);
          const int column = 8 * (i + lane);
          if (owned && first_column + column < head_dim) {
            *reinterpret_cast<uint4*>(row + column) = {pairs[0], pairs[1], pairs[2], pairs[3]};
          }
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        const int column = 8 * i + 2 * lane;
        if (owned && first_column + column < head_dim) {
          store_pair(row + column, sums[4 * i + 2 * h] * factor, sums[4 * i + 2 * h + 1] * factor,
                     first_column + column + 1 < head_dim);
        }
      }
    }
  }

  __device__ static void store(const BackwardParams& params, const BackwardItem& item,
                               const PlainTensor& t, int head_dim, float factor,
                               const float (&sums)[kSums]) {
    const std::int64_t batch = params.problem.cu_seqlens_q.data == nullptr ? item.batch : 0;
    if (t.is_f32) {
      store_sums<float>(item, t, batch, head_dim, factor, sums);
    } else {
      store_sums<std::uint16_t>(item, t, batch, head_dim, factor, sums);
    }
  }
};

}  // namespace rafter::cuda
