// Matrix products of one warp on registers, and the loads that feed them: mma.sync, ldmatrix,
// movmatrix, cp.async.
//
// Fragments of a thread, g = lane / 4, t = lane % 4, each register a pair of 16-bit values:
//   A [16, 16]  a0 (g, 2t), a1 (g + 8, 2t), a2 (g, 2t + 8), a3 (g + 8, 2t + 8); pairs along columns
//   B [16, 8]   b0 (2t, g), b1 (2t + 8, g); pairs along rows
//   D [16, 8]   d0 (g, 2t), d1 (g, 2t + 1), d2 (g + 8, 2t), d3 (g + 8, 2t + 1), f32
#pragma once

#include <cstdint>

#include "rafter/tensor.h"

namespace rafter::cuda {

/// D += A B. PTX ISA: mma.sync.m16n8k16.
template <DType kDType>
__device__ inline void mma_16_8_16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                   std::uint32_t b1) {
  if constexpr (kDType == DType::bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(kDType == DType::f16);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Four 8 × 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
/// Register i holds elements (2t, g) and (2t + 1, g) of matrix i. PTX ISA: ldmatrix with .trans;
/// load_matrices() of wgmma.cuh is the same without.
__device__ inline void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// Transposes an 8 × 8 matrix of 16-bit elements held as by load_matrices(). PTX ISA: movmatrix.
__device__ inline std::uint32_t transpose_matrix(std::uint32_t r) {
  std::uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
  return transposed;
}

/// Copies `bytes` (4 or 0) of global to shared memory without registers; the rest of the 4 bytes
/// becomes 0. copies.cuh has 16 bytes. PTX ISA: cp.async.
__device__ inline void copy_4_async(std::uint32_t destination, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
               "r"(bytes)
               : "memory");
}
/// This thread arrives at an mbarrier once its copies so far are there. PTX ISA:
/// cp.async.mbarrier.arrive.noinc. Pairs with barrier_wait().
__device__ inline void arrive_with_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace rafter::cuda
