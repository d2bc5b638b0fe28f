// Clusters of CTAs on sm_90a: who is who, their barrier, and words sent from the shared memory of
// one to that of another. One instruction per function.
#pragma once

#include <vector_types.h>

#include <cstdint>

namespace rafter::cuda {

/// PTX ISA: %clusterid, %cluster_ctarank, %cluster_nctarank.
__device__ inline int cluster_number() {
  std::uint32_t number;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(number));
  return static_cast<int>(number);
}
__device__ inline int cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ inline int cluster_size() {
  std::uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
}

/// Every thread of the cluster arrives; cluster_wait() waits for all. Orders no memory by itself:
/// for barriers that others will use barrier_init_fence() comes before. PTX ISA: barrier.cluster.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Where CTA `rank` of the cluster has what lies at `address` in this one. PTX ISA: mapa.
__device__ inline std::uint32_t cluster_address(std::uint32_t address, int rank) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

/// Writes to another CTA's shared memory and completes the bytes on a barrier there, both by
/// cluster_address(). The other waits with cluster_barrier_wait(). PTX ISA: st.async.
__device__ inline void cluster_send(std::uint32_t to, float4 value, std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}
__device__ inline void cluster_send(std::uint32_t to, float2 value, std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "f"(value.x), "f"(value.y), "r"(barrier)
      : "memory");
}

/// As barrier_wait(), for what other CTAs of the cluster sent. PTX ISA: mbarrier.try_wait.
__device__ inline void cluster_barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

}  // namespace rafter::cuda
