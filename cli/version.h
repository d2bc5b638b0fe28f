// What `rafter --version` prints.
#pragma once

#include <string>

namespace rafter::cli {

/// The version on the first line; then the commit, the compiler, whether there are CUDA kernels,
/// the instruction sets and the kernels of this build, and which of them this machine has.
std::string version_text();

}  // namespace rafter::cli
