// What kernels for sm_90a ask of a problem before their own conditions.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>

#include "dispatch/kernel_entry.h"
#include "hw/cuda/launch.h"

namespace rafter::cuda {

/// A first device that runs sm_90a code.
inline Acceptance machine_has_sm90() {
  std::string reason = why_not_sm90(0);
  return reason.empty() ? Acceptance::accept() : Acceptance::refuse(std::move(reason));
}

/// The problem's device; machine_has_sm90() has looked at device 0.
inline Acceptance accepts_sm90_device(const KernelProblem& problem) {
  std::string reason =
      problem.device_index == 0 ? std::string() : why_not_sm90(problem.device_index);
  return reason.empty() ? Acceptance::accept() : Acceptance::refuse(std::move(reason));
}

/// 16-bit types, dense or packed, keys in one piece.
inline Acceptance accepts_sm90_layout(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) {
    return Acceptance::refuse(fmt::format("{} is not among bf16, f16", to_string(p.dtype)));
  }
  if (p.layout == Layout::paged) {
    return Acceptance::refuse("layout paged is not among dense, packed");
  }
  if (problem.splits > 1) {
    return Acceptance::refuse(fmt::format("splits {}: it does not split the keys", problem.splits));
  }
  return Acceptance::accept();
}

/// And head dimensions of whole 16-byte chunks.
inline Acceptance accepts_sm90(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  if (Acceptance layout = accepts_sm90_layout(problem); !layout.yes) {
    return layout;
  }
  const std::pair<const char*, std::int64_t> head_dims[] = {{"head_dim", p.head_dim},
                                                            {"head_dim_v", p.head_dim_v}};
  for (const auto& [name, value] : head_dims) {
    if (value % 8 != 0) {
      return Acceptance::refuse(fmt::format("{} {} is not a multiple of 8", name, value));
    }
  }
  return Acceptance::accept();
}

}  // namespace rafter::cuda
