// Calls like an earlier one: of the same options, and of arrays that differ in nothing but where
// they lie. Reading the options and finding the plan takes longer than queueing the kernel, and the
// layers of a model, or the steps of a training loop, ask for the same again and again.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "calls.h"
#include "inputs.h"

namespace rafter::python {

/// The arguments of _core.attend, each by its position: those of Inputs, those of Options, the
/// rest.
enum Argument : std::size_t {
  // clang-format off
  kQ, kK, kV, kCuSeqlensQ, kCuSeqlensKv, kSequsedKv, kPageTable, kKScale, kVScale, kTreeMask,
  kBadPages,
  kCausal, kWindow, kAlign, kSoftmaxScale, kSoftcap, kPipeline, kKernel, kThreads, kSplits,
  kMaxSeqlenQ, kMaxSeqlenKv, kReturnLse, kOut, kDecode, kGrad, kHeadsFirst, kStream,
  // clang-format on
  kArguments
};
constexpr std::size_t kArrayArguments = kBadPages + 1;

/// kArguments objects, borrowed.
using Arguments = PyObject* const*;

struct KnownCall {
  std::shared_ptr<const DevicePlan> plan;
  ForwardArguments arguments;
  bool return_lse;
};

/// The call on these arrays, on the current stream of their library, where one like it is known.
/// Nothing also where an array must be refused, which the long way does.
std::optional<KnownCall> known_call(Arguments given);

/// Keeps a call that succeeded, if it is one on a GPU, on no named stream, without bad_pages, of
/// arrays of one type whose library lends what they are (DLPack's exchange interface). The last few
/// are kept.
void remember_call(Arguments given, const Inputs& in, const DevicePlan& plan,
                   const ForwardArguments& arguments, bool return_lse);

}  // namespace rafter::python
