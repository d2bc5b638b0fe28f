// Rows in shared memory that belong to another sequence.
#pragma once

#include <cstdint>

#include "hw/cuda/barrier.cuh"
#include "tiles/sm90_descriptor.h"

namespace rafter::cuda {

/// Rows from `valid` on of a tile of kRows × kColumns 16-bit elements become zeros: 0 · NaN would
/// enter a sum. One warpgroup, which meets at `named_barrier`; every warpgroup writes the same
/// zeros before it reads.
template <int kRows, int kColumns>
__device__ inline void clear_foreign_rows(std::uint32_t tile, int valid, int named_barrier) {
  const int thread = static_cast<int>(threadIdx.x % 128);
  constexpr int kChunks = tiles::kBoxRowBytes / 16;
  for (int chunk = valid * kChunks + thread; chunk < kRows * kChunks; chunk += 128) {
#pragma unroll
    for (int box = 0; box < tiles::boxes(kColumns); ++box) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                       tile + box * tiles::box_bytes(kRows) + chunk * 16),
                   "r"(0)
                   : "memory");
    }
  }
  fence_shared_to_async();
  named_barrier_sync(named_barrier, 128);
}

}  // namespace rafter::cuda
