// Calls like an earlier one: of the same options, and of arrays that differ in nothing but where
// they lie. Reading the options and finding the plan takes longer than queueing the kernel, and the
// layers of a model, or the steps of a training loop, ask for the same again and again.
#pragma once

#include <optional>

#include "calls.h"
#include "inputs.h"

namespace rafter::python {

/// What `attend` is called with, but for what each call has of its own (out, return_lse).
struct CallKey {
  const nb::tuple& arrays;
  const nb::tuple& options;
  nb::handle max_seqlen_q, max_seqlen_kv;
  bool decode, grad;
  int heads_first;
};

struct KnownCall {
  DevicePlan plan;
  ForwardArguments arguments;
};

/// The call on these arrays, on the current stream of their library, where one like it is known.
/// Nothing also where an array must be refused, which the long way does.
std::optional<KnownCall> known_call(const CallKey& key);

/// Keeps a call that succeeded, if it is one on a GPU, without bad_pages, of arrays of one type
/// whose library lends what they are (DLPack's exchange interface). The last few are kept.
void remember_call(const CallKey& key, const Inputs& in, const DevicePlan& plan,
                   const ForwardArguments& arguments);

}  // namespace rafter::python
