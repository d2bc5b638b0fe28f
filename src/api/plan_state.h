// What a plan remembers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dispatch/kernel_entry.h"

namespace rafter::detail {

struct PlanState {
  Device device;
  KernelProblem problem;  // complete
  const KernelEntry* entry = nullptr;
  std::string kernel;
  bool forced = false;
  std::vector<Candidate> candidates;
  std::int64_t workspace_bytes = 0;
  Convention convention;  // of the cost
  Cost cost;
  Prediction prediction;
};

}  // namespace rafter::detail
