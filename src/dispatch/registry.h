// All kernels of this build and whether this machine has them.
#pragma once

#include <span>
#include <string_view>

#include "dispatch/kernel_entry.h"

namespace rafter::dispatch {

/// A kernel entry and the machine's answer to it, asked once per process (CPUID is slow under a
/// hypervisor).
struct Registered {
  const KernelEntry* entry = nullptr;
  Acceptance machine;
};

/// Every kernel of this build, sorted by name.
std::span<const Registered> kernels();

/// The kernel of that name, or null.
const Registered* find_kernel(std::string_view name);

}  // namespace rafter::dispatch
