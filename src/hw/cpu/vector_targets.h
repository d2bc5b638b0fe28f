// The instruction sets that a source on vector units is compiled for: portable, AVX2, AVX-512, but
// for those that cmake/InstructionSets.cmake leaves out. Stands before hwy/foreach_target.h.
#pragma once

#ifndef RAFTER_OMITTED_TARGETS
#define RAFTER_OMITTED_TARGETS 0
#endif
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | RAFTER_OMITTED_TARGETS)
