// Loops over a register block: unrolled, so that its arrays live in registers. Under the sanitizers
// they stay loops, of the same operations in the same order: instrumented and unrolled, the kernels
// took minutes to compile.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define RAFTER_UNROLL _Pragma("GCC unroll 1")
#elif defined(__clang__)
#define RAFTER_UNROLL _Pragma("clang loop unroll(full)")
#else
#define RAFTER_UNROLL _Pragma("GCC unroll 32")
#endif
