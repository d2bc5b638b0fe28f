// wgmma of sm_90a: D[64, N] += A[64, 16] B[16, N], f32 accumulators, 16-bit operands. Issued by one
// warpgroup (four warps, 128 threads); B from shared memory, A from shared memory or registers.
//
// Accumulator fragment of a thread: d[4i + 2h + e] is row 16·warp + lane/4 + 8h, column 8i +
// 2·(lane % 4) + e. A from registers holds two such 8-column blocks packed in pairs, in this order.
#pragma once

#include <cstdint>

#include "rafter/tensor.h"

namespace rafter::cuda {

/// Before the first wgmma and after registers that one reads were written. PTX ISA: wgmma.fence.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Closes a group of issued wgmmas. PTX ISA: wgmma.commit_group. Pairs with wgmma_wait().
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most kPending groups are in flight. PTX ISA: wgmma.wait_group.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving reads of accumulators above the wait that makes them valid.
template <int kCount>
__device__ inline void keep_in_place(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(registers[i])::"memory");
  }
}
template <int kCount>
__device__ inline void keep_in_place(std::uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+r"(registers[i])::"memory");
  }
}

/// mma<dtype, N>: the instruction of one shape.
///   shared(d, a, b)     A and B in shared memory, by descriptor: K-major, or MN-major where said;
///                       kAdd false: D = A B
///   registers_k_major(d, a, b)  A from registers, B K-major; kAdd as above
///   registers(d, a, b)  A from registers, B MN-major in shared memory; D += A B
///   registers_or_set(d, a, b, add)  the same; D = A B, whatever D held, where `add` is false
template <DType kDType, int kN>
struct Mma;

#define RAFTER_ACC8(i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define RAFTER_ACC16 RAFTER_ACC8(0), RAFTER_ACC8(8)
#define RAFTER_ACC32 RAFTER_ACC16, RAFTER_ACC8(16), RAFTER_ACC8(24)
#define RAFTER_ACC40 RAFTER_ACC32, RAFTER_ACC8(32)
#define RAFTER_ACC48 RAFTER_ACC40, RAFTER_ACC8(40)
#define RAFTER_ACC64 RAFTER_ACC48, RAFTER_ACC8(48), RAFTER_ACC8(56)
#define RAFTER_ACC80 RAFTER_ACC64, RAFTER_ACC8(64), RAFTER_ACC8(72)
#define RAFTER_ACC88 RAFTER_ACC80, RAFTER_ACC8(80)
#define RAFTER_ACC96 RAFTER_ACC88, RAFTER_ACC8(88)
#define RAFTER_ACC128 \
  RAFTER_ACC96, RAFTER_ACC8(96), RAFTER_ACC8(104), RAFTER_ACC8(112), RAFTER_ACC8(120)

#define RAFTER_D16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define RAFTER_D32 RAFTER_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define RAFTER_D40 RAFTER_D32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define RAFTER_D48 RAFTER_D40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define RAFTER_D64 RAFTER_D48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define RAFTER_D80 RAFTER_D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define RAFTER_D88 RAFTER_D80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define RAFTER_D96 RAFTER_D88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define RAFTER_D128                                                                    \
  RAFTER_D96                                                                           \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
  "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// `count` accumulators, then operands numbered i0 … i5 = count … count + 5.
#define RAFTER_MMA(dtype, type, n, count, i0, i1, i2, i3, i4, i5)                                  \
  template <>                                                                                      \
  struct Mma<DType::dtype, n> {                                                                    \
    template <bool kAdd, bool kMnMajorA = false, bool kMnMajorB = false>                           \
    __device__ static void shared(float (&d)[count], std::uint64_t a, std::uint64_t b) {           \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                        \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type               \
                   " {" RAFTER_D##count "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n}"   \
                   : RAFTER_ACC##count                                                             \
                   : "l"(a), "l"(b), "n"(kAdd ? 1 : 0), "n"(kMnMajorA ? 1 : 0),                    \
                     "n"(kMnMajorB ? 1 : 0)                                                        \
                   : "memory");                                                                    \
    }                                                                                              \
    template <bool kAdd>                                                                           \
    __device__ static void registers_k_major(float (&d)[count], std::uint32_t a0,                  \
                                             std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, \
                                             std::uint64_t b) {                                    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5                                        \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type         \
                   " {" RAFTER_D##count "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4       \
                                        ", p, 1, 1, 0;\n}"                                         \
                   : RAFTER_ACC##count                                                             \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kAdd ? 1 : 0)                 \
                   : "memory");                                                                    \
    }                                                                                              \
    __device__ static void registers_or_set(float (&d)[count], std::uint32_t a0, std::uint32_t a1, \
                                            std::uint32_t a2, std::uint32_t a3, std::uint64_t b,   \
                                            bool add) {                                            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5                                        \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type         \
                   " {" RAFTER_D##count "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4       \
                                        ", p, 1, 1, 1;\n}"                                         \
                   : RAFTER_ACC##count                                                             \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add ? 1 : 0)                  \
                   : "memory");                                                                    \
    }                                                                                              \
    __device__ static void registers(float (&d)[count], std::uint32_t a0, std::uint32_t a1,        \
                                     std::uint32_t a2, std::uint32_t a3, std::uint64_t b) {        \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type               \
                   " {" RAFTER_D##count "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4       \
                                        ", 1, 1, 1, 1;\n"                                          \
                   : RAFTER_ACC##count                                                             \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)                                    \
                   : "memory");                                                                    \
    }                                                                                              \
  };
#define RAFTER_MMA_BOTH(n, count, i0, i1, i2, i3, i4, i5)  \
  RAFTER_MMA(bf16, bf16, n, count, i0, i1, i2, i3, i4, i5) \
  RAFTER_MMA(f16, f16, n, count, i0, i1, i2, i3, i4, i5)

RAFTER_MMA_BOTH(32, 16, 16, 17, 18, 19, 20, 21)
RAFTER_MMA_BOTH(64, 32, 32, 33, 34, 35, 36, 37)
RAFTER_MMA_BOTH(80, 40, 40, 41, 42, 43, 44, 45)
RAFTER_MMA_BOTH(96, 48, 48, 49, 50, 51, 52, 53)
RAFTER_MMA_BOTH(128, 64, 64, 65, 66, 67, 68, 69)
RAFTER_MMA_BOTH(160, 80, 80, 81, 82, 83, 84, 85)
RAFTER_MMA_BOTH(176, 88, 88, 89, 90, 91, 92, 93)
RAFTER_MMA_BOTH(192, 96, 96, 97, 98, 99, 100, 101)
RAFTER_MMA_BOTH(256, 128, 128, 129, 130, 131, 132, 133)

#undef RAFTER_MMA_BOTH
#undef RAFTER_MMA
#undef RAFTER_D128
#undef RAFTER_D96
#undef RAFTER_D88
#undef RAFTER_D80
#undef RAFTER_D64
#undef RAFTER_D48
#undef RAFTER_D40
#undef RAFTER_D32
#undef RAFTER_D16
#undef RAFTER_ACC128
#undef RAFTER_ACC96
#undef RAFTER_ACC88
#undef RAFTER_ACC80
#undef RAFTER_ACC64
#undef RAFTER_ACC48
#undef RAFTER_ACC40
#undef RAFTER_ACC32
#undef RAFTER_ACC16
#undef RAFTER_ACC8

/// Four 8×8 matrices of 16-bit elements: lane l gives the address of row l mod 8 of matrix l / 8.
/// PTX ISA: ldmatrix.
__device__ inline void load_matrices(std::uint32_t (&fragment)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

/// The reverse: stores four 8×8 matrices. PTX ISA: stmatrix.
__device__ inline void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                                      std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

/// Two floats rounded to nearest even and packed, `low` in the low half. PTX ISA: cvt.
template <DType kDType>
__device__ inline std::uint32_t pack(float low, float high) {
  std::uint32_t packed;
  if constexpr (kDType == DType::bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    static_assert(kDType == DType::f16);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

/// 2^x, relative error 2^-22; 2^-inf = 0. PTX ISA: ex2.approx.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace rafter::cuda
