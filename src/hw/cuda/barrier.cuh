// Synchronisation of sm_90a, one instruction per function: mbarriers in shared memory, named
// barriers, fences, register reallocation.
#pragma once

#include <cstdint>

namespace rafter::cuda {

/// Address of an object in shared memory as PTX wants it.
__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// One thread, once; then barrier_init_fence() and __syncthreads(). PTX ISA: mbarrier.init.
__device__ inline void barrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Makes initialised barriers visible to the copy engine. PTX ISA: fence.mbarrier_init.
__device__ inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives, and announces the bytes that copies will complete on this phase.
/// PTX ISA: mbarrier.arrive.expect_tx. Pairs with barrier_wait().
__device__ inline void barrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// PTX ISA: mbarrier.arrive. Pairs with barrier_wait().
__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// True once the phase of this parity is complete. May suspend the thread for a while.
/// PTX ISA: mbarrier.try_wait.
__device__ inline bool barrier_try_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

/// True if the phase of this parity is complete; does not wait. PTX ISA: mbarrier.test_wait.
__device__ inline bool barrier_test(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

/// Waits until the phase of this parity is complete. A fresh barrier counts its phase −1 (parity 1)
/// as complete: whoever waits for an empty slot starts with parity 1.
__device__ inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}

/// Named barrier among `threads` threads (whole warps): waits for all. PTX ISA: barrier.cta.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Arrives without waiting; those who sync on the same id count it.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Orders this thread's ordinary writes to shared memory before reads by wgmma or TMA that follow a
/// barrier. PTX ISA: fence.proxy.async.
__device__ inline void fence_shared_to_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Orders this thread's accesses to memory in both proxies, ordinary ones and those of the copy
/// engine. PTX ISA: fence.proxy.async.
__device__ inline void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

/// A word in global memory that hands something on to another CTA: what came before the release is
/// seen after the acquire. PTX ISA: st, ld.
__device__ inline void store_release(unsigned* word, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(word)),
               "r"(value)
               : "memory");
}
__device__ inline unsigned load_acquire(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return value;
}

/// All warps of a warpgroup. PTX ISA: setmaxnreg.
template <int kRegisters>
__device__ inline void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace rafter::cuda
