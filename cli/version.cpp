#include "cli/version.h"

#include <fmt/format.h>

#include <map>

#include "rafter/kernels.h"
#include "rafter/measure.h"

namespace rafter::cli {
namespace {

/// Instruction sets of some kernels, and whether this machine has them.
using Sets = std::map<std::string, bool>;

std::string names(const Sets& sets) {
  std::string text;
  for (const auto& [set, here] : sets) {
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", set, here ? "" : " (not here)");
  }
  return text;
}

}  // namespace

std::string version_text() {
  std::string text = "rafter " RAFTER_VERSION "\n";
  for (const auto& [key, value] : describe_this_machine()) {
    if (key == "commit" || key == "compiler") {
      text += fmt::format("{:9} {}\n", key, value);
    }
  }
  Sets cpu, cuda;
  std::string kernels;
  for (const KernelInfo& kernel : list_kernels()) {
    Sets& sets = kernel.device == Device::Kind::cuda ? cuda : cpu;
    sets[kernel.instruction_set] |= kernel.machine_has;
    kernels += fmt::format("\n{:9} {}{}", kernels.empty() ? "kernels" : "", kernel.name,
                           kernel.machine_has ? "" : " (not here)");
  }
  text += fmt::format("{:9} {}\n", "cuda", cuda.empty() ? "none in this build" : names(cuda));
  text += fmt::format("{:9} {}", "isa", names(cpu));
  return text + kernels;
}

}  // namespace rafter::cli
