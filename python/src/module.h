// What the files of the extension module share.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>

#include "rafter/attention.h"

namespace rafter::python {

namespace nb = nanobind;

void bind_attend(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_roofline(nb::module_& m);
void bind_transformer(nb::module_& m);

/// "cpu", "cuda" or "cuda:N".
Device device_named(const std::string& name);

/// A device by name, or by file when the text has a '/' or ends in .json.
DeviceSpec device_spec_of(const std::string& name_or_file);
/// {name of a size of AttentionProblem: value}; names and types that it does not have are refused.
AttentionProblem problem_of_sizes(const nb::dict& sizes);
/// The fields of rafter.Explanation.
nb::dict cost_dict(const Cost& cost, const Prediction& prediction);
/// The same for an attention on a device (none: this machine's probe when it was made, else
/// h100-sxm).
nb::dict explain_attention(const AttentionProblem& problem, Pipeline pipeline, Pass pass,
                           const std::optional<std::string>& device, const std::string& convention,
                           std::int64_t splits);

}  // namespace rafter::python
