// The bulk tensor copy engine of sm_90a: a box of a tensor in global memory to shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace rafter::cuda {

/// Fetches the descriptor of a tensor before its first use. PTX ISA: prefetch.tensormap.
__device__ inline void tma_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}

/// One thread. Copies the box at element coordinates (x innermost) to `destination` (1024-byte
/// aligned under the 128-byte swizzle) and completes its bytes on `barrier`. Elements outside the
/// tensor arrive as zeros and count as bytes. PTX ISA: cp.async.bulk.tensor.
__device__ inline void tma_load(std::uint32_t destination, const CUtensorMap& map,
                                std::uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

/// One thread. Copies the box at `source` to the tensor; elements outside it are left out. The
/// bytes in shared memory were written before fence_shared_to_async() and a barrier. PTX ISA:
/// cp.async.bulk.tensor. Pairs with tma_commit_stores().
__device__ inline void tma_store(const CUtensorMap& map, std::uint32_t source, int x, int y, int z,
                                 int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          reinterpret_cast<std::uint64_t>(&map)),
      "r"(source), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

/// One thread. Copies `bytes` (a multiple of 16) from global to shared memory, both aligned to 16
/// bytes, and completes them on `barrier`. PTX ISA: cp.async.bulk.
__device__ inline void bulk_load(std::uint32_t destination, const void* source, std::uint32_t bytes,
                                 std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
      : "memory");
}

/// The way back. Pairs with tma_commit_stores(). PTX ISA: cp.async.bulk.
__device__ inline void bulk_store(void* destination, std::uint32_t source, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(destination)),
               "r"(source), "r"(bytes)
               : "memory");
}

/// As bulk_store(), of f32 that are added to what is there. PTX ISA: cp.reduce.async.bulk.
__device__ inline void bulk_add(float* destination, std::uint32_t source, std::uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(destination)),
               "r"(source), "r"(bytes)
               : "memory");
}

/// Closes this thread's group of stores. PTX ISA: cp.async.bulk.commit_group.
__device__ inline void tma_commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until this thread's stores have read shared memory. PTX ISA: cp.async.bulk.wait_group.
__device__ inline void tma_wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Waits until this thread's stores and additions are done. PTX ISA: cp.async.bulk.wait_group.
__device__ inline void tma_wait_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace rafter::cuda
