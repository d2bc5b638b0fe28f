// Loops over a register block: unrolled, so that its arrays live in registers.
#pragma once

#if defined(__clang__)
#define RAFTER_UNROLL _Pragma("clang loop unroll(full)")
#else
#define RAFTER_UNROLL _Pragma("GCC unroll 32")
#endif
