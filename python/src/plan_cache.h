// Plans of GPU calls, kept by problem: planning takes longer than queueing a kernel.
#pragma once

#include "rafter/attention.h"

namespace rafter::python {

/// As rafter::plan. Plans for a GPU are kept, those for the CPU are not: their number of threads is
/// that of the moment. The GIL must be held.
Result<Plan> planned(const AttentionProblem& problem, const Device& device,
                     const PlanOptions& options);

}  // namespace rafter::python
