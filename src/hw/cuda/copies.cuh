// Copies of 16 bytes from global to shared memory without registers, in groups of a thread:
// cp.async. mma.cuh has those that arrive at a barrier.
#pragma once

#include <cstdint>

namespace rafter::cuda {

/// Copies `bytes` (16 or 0) and asks the memory for no more; the rest of the 16 bytes becomes 0.
/// Both addresses are aligned to 16; that of no bytes is not read. PTX ISA: cp.async.
__device__ inline void copy_16_async_alone(std::uint32_t destination, const void* source,
                                           int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(bytes)
               : "memory");
}

/// Closes this thread's group of copies. PTX ISA: cp.async.commit_group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending groups of this thread are in flight. PTX ISA: cp.async.wait_group.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace rafter::cuda
