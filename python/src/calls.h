// Calls on arrays: plan, memory, run.
#pragma once

#include <optional>

#include "inputs.h"
#include "rafter/attention.h"

namespace rafter::python {

/// A plan and where it runs.
struct DevicePlan {
  Plan plan;
  Device device;
};

/// The plan of a call.
DevicePlan plan_of(const Inputs& in, const Options& options, const MaxLengths& longest, Pass pass);

/// o, or (o, lse).
nb::object forward(const DevicePlan& planned, const ForwardArguments& given, nb::handle out,
                   bool return_lse);

/// (dq, dk, dv). `state` is (o, lse, d_o, dlse), `out` None or (dq, dk, dv).
nb::object backward(const DevicePlan& planned, const Inputs& in, const nb::tuple& state,
                    nb::handle out);

/// (o, lse) of a sequence of (o, lse); `out` None or (o, lse). `packed` says how to read an o of
/// three dims; without it the shapes do.
nb::object merge(const nb::sequence& states, nb::handle out, std::optional<bool> packed,
                 nb::handle stream);

/// `arrays` is (k, v, k_cache, v_cache, seqused, seqused_new, page_table, q, k_scale, v_scale,
/// dropped), `rope` (cos, sin, interleaved); gives q turned, or None without q.
nb::object append(const nb::tuple& arrays, const nb::tuple& rope, nb::handle out,
                  nb::handle stream);

}  // namespace rafter::python
