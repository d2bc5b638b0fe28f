// RAFTER_CPU_ISA: the highest instruction set a CPU kernel may use.
#pragma once

#include <optional>
#include <string_view>

#include "rafter/status.h"

namespace rafter::dispatch {

/// Place of a CPU instruction set in the order portable < avx2 < avx512 < avx512_bf16 < amx;
/// nothing for other names.
std::optional<int> isa_rank(std::string_view instruction_set);

/// The value of RAFTER_CPU_ISA, or an empty view when it is not set.
/// Errors: invalid_argument when it is none of the names above.
Result<std::string_view> isa_limit();

}  // namespace rafter::dispatch
