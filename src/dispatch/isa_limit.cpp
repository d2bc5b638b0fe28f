#include "dispatch/isa_limit.h"

#include <array>
#include <cstdlib>

namespace rafter::dispatch {
namespace {
constexpr std::array<std::string_view, 5> kOrder = {"portable", "avx2", "avx512", "avx512_bf16",
                                                    "amx"};
}  // namespace

std::optional<int> isa_rank(std::string_view instruction_set) {
  for (std::size_t i = 0; i < kOrder.size(); ++i) {
    if (kOrder[i] == instruction_set) {
      return static_cast<int>(i);
    }
  }
  return std::nullopt;
}

Result<std::string_view> isa_limit() {
  const char* value = std::getenv("RAFTER_CPU_ISA");
  if (value == nullptr || *value == '\0') {
    return std::string_view();
  }
  if (!isa_rank(value)) {
    return Status::invalid_argument("RAFTER_CPU_ISA", value,
                                    "portable, avx2, avx512, avx512_bf16 or amx");
  }
  return std::string_view(value);
}

}  // namespace rafter::dispatch
