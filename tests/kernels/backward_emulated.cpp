// backward_amx_bf16 and backward_avx512_bf16 on the emulated machines, as kernels of their own for
// the tests of the backward pass: packing, schedule and turns are proven where those instructions
// are not.
#include <array>

#include "kernels/bf16_emulated.h"
#include "kernels/cpu/backward_bf16_run.h"
#include "support/backward_case.h"
// after what has no instruction set
#include "kernels/cpu/backward_bf16_task.h"

namespace rafter::testing {
namespace {

/// Short tasks and tiles, so that small cases have several of both.
constexpr tiles::Bf16BackwardBlocking kShort = {.keys = 64, .tile_q = 64};

constexpr backward_bf16::Schedule kApart = {.interleave = false};

std::int64_t workspace(const KernelProblem& problem) {
  return backward_bf16::workspace(problem, kShort);
}
template <typename M, backward_bf16::Schedule kSchedule>
Status backward(const BackwardCall& call) {
  return backward_bf16::backward<cpu::NoScope>(call, backward_bf16::kFunctions<M, kSchedule>,
                                               kShort);
}

template <typename M, backward_bf16::Schedule kSchedule>
KernelEntry entry(std::string_view name) {
  return {.name = name,
          .device = Device::Kind::cpu,
          .pipeline = Pipeline::fused,
          .instruction_set = "emulated",
          .dtypes = {DType::bf16},
          .accepts_text = "",
          .machine_has = Acceptance::accept,
          .accepts = backward_bf16::accepts,
          .reach = nullptr,
          .workspace = workspace,
          .backward = backward<M, kSchedule>};
}

}  // namespace

std::span<const KernelEntry> emulated_backwards() {
  static const std::array kEntries = {
      entry<EmulatedAmx, backward_bf16::Schedule{}>("emulated_backward_amx_bf16"),
      entry<EmulatedDotProducts, kApart>("emulated_backward_avx512_bf16")};
  return kEntries;
}

}  // namespace rafter::testing
