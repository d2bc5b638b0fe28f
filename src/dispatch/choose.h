// Which kernel runs a problem: the accepted one of least predicted time.
#pragma once

#include <vector>

#include "dispatch/kernel_entry.h"

namespace rafter::dispatch {

struct Choice {
  const KernelEntry* entry = nullptr;
  bool forced = false;                // options.kernel named it
  std::vector<Candidate> candidates;  // every kernel of the device and pass, sorted by name
};

/// Looks at every kernel of options.pass for the device. Errors: invalid_argument for a kernel that
/// does not exist, a pipeline that contradicts the kernel, an unknown RAFTER_CPU_ISA; unsupported
/// lists every kernel and why it refused.
Result<Choice> choose(const KernelProblem& problem, Device::Kind device, const PlanOptions& options,
                      const DeviceSpec& spec);

}  // namespace rafter::dispatch
