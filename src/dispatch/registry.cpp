#include "dispatch/registry.h"

#include <algorithm>
#include <vector>

namespace rafter {

#define RAFTER_OPERATION(stem)  // those are in operations.cpp
#define RAFTER_KERNEL(stem) std::span<const KernelEntry> entries_##stem();
#include "kernel_list.inc"
#undef RAFTER_KERNEL

namespace dispatch {
namespace {

std::vector<Registered> collect() {
  std::vector<Registered> all;
  const auto add = [&all](std::span<const KernelEntry> entries) {
    for (const KernelEntry& entry : entries) {
      all.push_back({&entry, entry.machine_has()});
    }
  };
#define RAFTER_KERNEL(stem) add(entries_##stem());
#include "kernel_list.inc"
#undef RAFTER_KERNEL
  std::sort(all.begin(), all.end(),
            [](const Registered& a, const Registered& b) { return a.entry->name < b.entry->name; });
  return all;
}

}  // namespace

std::span<const Registered> kernels() {
  static const std::vector<Registered> all = collect();
  return all;
}

const Registered* find_kernel(std::string_view name) {
  for (const Registered& kernel : kernels()) {
    if (kernel.entry->name == name) {
      return &kernel;
    }
  }
  return nullptr;
}

}  // namespace dispatch
}  // namespace rafter
