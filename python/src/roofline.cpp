// Costs, predictions, devices and kernels as Python values.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <string>
#include <utility>

#include "errors.h"
#include "module.h"
#include "rafter/kernels.h"
#include "rafter/rafter.h"

namespace rafter::python {
namespace {

/// A figure that may be missing: None in place of NaN.
nb::object number(double value) { return std::isnan(value) ? nb::none() : nb::cast(value); }

nb::dict device_dict(const DeviceSpec& spec) {
  nb::dict figures;
  for (const auto& [key, figure] : spec.figures) {
    nb::dict f;
    f["value"] = figure.value;
    f["unit"] = figure.unit;
    f["kind"] = to_string(figure.kind);
    f["source"] = figure.source;
    figures[key.c_str()] = f;
  }
  nb::dict notes;
  for (const auto& [key, note] : spec.notes) {
    notes[key.c_str()] = note;
  }
  nb::dict d;
  d["name"] = spec.name;
  d["title"] = spec.title;
  d["kind"] = to_string(spec.kind);
  d["figures"] = figures;
  d["notes"] = notes;
  return d;
}

nb::list kernel_dicts() {
  nb::list kernels;
  for (const KernelInfo& info : list_kernels()) {
    nb::list dtypes;
    for (const DType dtype : info.dtypes) {
      dtypes.append(to_string(dtype));
    }
    nb::dict d;
    d["name"] = info.name;
    d["device"] = to_string(info.device);
    d["pass_"] = to_string(info.pass);
    d["pipeline"] = to_string(info.pipeline);
    d["instruction_set"] = info.instruction_set;
    d["dtypes"] = dtypes;
    d["accepts"] = info.accepts;
    d["machine_has"] = info.machine_has;
    d["machine_reason"] = info.machine_reason;
    kernels.append(d);
  }
  return kernels;
}

std::int64_t integer(const std::string& name, nb::handle value) {
  std::int64_t out = 0;
  if (!nb::try_cast(value, out)) {
    raise_invalid_value(name, value, "an integer");
  }
  return out;
}

}  // namespace

DeviceSpec device_spec_of(const std::string& name_or_file) {
  const bool is_file =
      name_or_file.find('/') != std::string::npos || name_or_file.ends_with(".json");
  return value_or_raise(is_file ? load_device(name_or_file) : find_device(name_or_file));
}

AttentionProblem problem_of_sizes(const nb::dict& sizes) {
  AttentionProblem p;
  const std::pair<const char*, std::int64_t*> fields[] = {
      {"batch", &p.batch},           {"heads_q", &p.heads_q},     {"heads_kv", &p.heads_kv},
      {"seqlen_q", &p.seqlen_q},     {"seqlen_kv", &p.seqlen_kv}, {"head_dim", &p.head_dim},
      {"head_dim_v", &p.head_dim_v}, {"total_q", &p.total_q},     {"total_kv", &p.total_kv},
      {"page_size", &p.page_size},   {"num_pages", &p.num_pages}};
  for (const auto& [key, value] : sizes) {
    const std::string name = nb::cast<std::string>(key);
    if (name == "dtype") {
      p.dtype = value_or_raise(parse_dtype(nb::cast<std::string>(nb::str(value))));
      continue;
    }
    if (name == "kv_dtype") {
      if (!value.is_none()) {
        p.kv_dtype = value_or_raise(parse_dtype(nb::cast<std::string>(nb::str(value))));
      }
      continue;
    }
    const std::pair<const char*, bool*> flags[] = {{"seqused_kv", &p.seqused_kv},
                                                   {"tree_mask", &p.tree_mask}};
    for (const auto& [field, to] : flags) {
      if (name == field) {
        *to = argument<bool>(field, value, "True or False");
      }
    }
    for (const auto& [field, to] : fields) {
      if (name == field) {
        *to = integer(name, value);
      }
    }
  }
  p.layout = p.total_q > 0 || p.total_kv > 0 ? Layout::packed
             : p.page_size > 0               ? Layout::paged
                                             : Layout::dense;
  return p;
}

nb::dict cost_dict(const Cost& cost, const Prediction& prediction) {
  nb::dict bytes_by_term;
  for (const ByteTerm& term : cost.bytes_by_term) {
    bytes_by_term[term.name.c_str()] = term.bytes;
  }
  nb::list ceilings;
  for (const Ceiling& ceiling : prediction.ceilings) {
    ceilings.append(nb::make_tuple(ceiling.name, ceiling.flop_per_s, ceiling.advice));
  }
  nb::dict d;
  d["device"] = prediction.device;
  d["convention"] = cost.convention;
  d["dtype"] = to_string(cost.dtype);
  d["flops"] = cost.flops;
  d["matmul_flops"] = cost.matmul_flops;
  d["softmax_flops"] = cost.softmax_flops;
  d["bytes"] = cost.bytes;
  d["bytes_by_term"] = bytes_by_term;
  d["launches"] = cost.launches;
  d["footprint_bytes"] = cost.footprint_bytes;
  d["score_matrix_bytes"] = cost.score_matrix_bytes;
  d["intensity_flop_per_byte"] = prediction.intensity_flop_per_byte;
  d["ridge_flop_per_byte"] = prediction.ridge_flop_per_byte;
  d["peak_flop_per_s"] = prediction.peak_flop_per_s;
  d["bandwidth_bytes_per_s"] = prediction.bandwidth_bytes_per_s;
  d["attainable_flop_per_s"] = prediction.attainable_flop_per_s;
  d["time_s"] = prediction.time_s;
  d["time_compute_s"] = prediction.time_compute_s;
  d["time_bandwidth_s"] = prediction.time_bandwidth_s;
  d["time_dispatch_s"] = number(prediction.time_dispatch_s);
  d["wall"] = to_string(prediction.wall);
  d["near_ridge"] = prediction.near_ridge;
  d["verdict"] = prediction.verdict();
  d["ceilings"] = nb::tuple(ceilings);
  return d;
}

nb::dict explain_attention(const AttentionProblem& problem, Pipeline pipeline, Pass pass,
                           const std::optional<std::string>& device, const std::string& convention,
                           std::int64_t splits) {
  DeviceSpec spec;
  if (device) {
    spec = device_spec_of(*device);
  } else {
    Result<DeviceSpec> probed = load_device(probe_path(Device::Kind::cpu));
    spec = probed ? *std::move(probed) : value_or_raise(find_device("h100-sxm"));
  }
  const Convention how = value_or_raise(find_convention(convention));
  if (splits > 1 && pipeline != Pipeline::split_kv) {
    raise_invalid("splits", std::to_string(splits), "1, or pipeline=\"split-kv\",");
  }
  const Cost cost = value_or_raise(attention_cost(problem, pipeline, pass, how, splits));
  nb::dict d = cost_dict(cost, value_or_raise(predict(cost, spec, how)));
  d["pipeline"] = to_string(pipeline);
  d["pass_"] = to_string(pass);
  return d;
}

void bind_roofline(nb::module_& m) {
  m.attr("__version__") = rafter_version();
  m.def("device_names", &device_names);
  m.def("device", [](const std::string& name) { return device_dict(device_spec_of(name)); });
  m.def("load_device",
        [](const std::string& path) { return device_dict(value_or_raise(load_device(path))); });
  m.def("this_cpu", [] { return device_dict(estimate_this_cpu()); });
  m.def("kernels", &kernel_dicts);
}

}  // namespace rafter::python
