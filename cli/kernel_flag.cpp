#include "cli/kernel_flag.h"

#include <fmt/format.h>

#include <vector>

#include "cli/args.h"
#include "rafter/kernels.h"

namespace rafter::cli {

CLI::Option* add_kernel(CLI::App& command, std::string& target, const std::string& what) {
  return add_text(command, "--kernel", target, what, "NAME");
}

void require_kernel(const std::string& name) {
  if (name.empty()) {
    return;
  }
  std::vector<std::string> names;
  for (const KernelInfo& kernel : list_kernels()) {
    if (kernel.name == name) {
      if (!kernel.machine_has) {
        fail(Exit::no_hardware, "--kernel " + name, kernel.machine_reason);
      }
      return;
    }
    names.push_back(kernel.name);
  }
  fail_flag("--kernel", name, fmt::format("{}", fmt::join(names, ", ")));
}

}  // namespace rafter::cli
