// --kernel NAME, the same in every command that can force a kernel.
#pragma once

#include <string>

#include "cli/command.h"

namespace rafter::cli {

CLI::Option* add_kernel(CLI::App& command, std::string& target, const std::string& what);

/// Ends the command when the name is not empty and is no kernel of this build (bad input, lists
/// them), or one that this machine cannot run (no hardware, says what is missing).
void require_kernel(const std::string& name);

}  // namespace rafter::cli
