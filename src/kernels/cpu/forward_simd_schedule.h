// The schedule of the fused forward on vector units: tasks, longest first, over OpenMP threads.
// Knows no instruction set.
#pragma once

#include "kernels/cpu/forward_simd_task.h"

namespace rafter::forward_simd {

std::int64_t workspace_bytes(const KernelProblem& problem, const tiles::SimdBlocking& blocking);
Status run_forward(const ForwardCall& call, const tiles::SimdBlocking& blocking,
                   TaskFunction function);

}  // namespace rafter::forward_simd
