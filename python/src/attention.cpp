// Plans, and attention on arrays, as the package's modules call them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>

#include "calls.h"
#include "errors.h"
#include "inputs.h"
#include "module.h"
#include "plan_cache.h"

namespace rafter::python {
namespace {

nb::dict problem_dict(const AttentionProblem& p) {
  nb::dict d;
  d["batch"] = p.batch;
  d["heads_q"] = p.heads_q;
  d["heads_kv"] = p.heads_kv;
  d["seqlen_q"] = p.seqlen_q;
  d["seqlen_kv"] = p.seqlen_kv;
  d["head_dim"] = p.head_dim;
  d["head_dim_v"] = p.head_dim_v;
  d["dtype"] = to_string(p.dtype);
  d["kv_dtype"] = to_string(p.kv_dtype.value_or(p.dtype));
  d["window"] = nb::make_tuple(p.mask.window_left, p.mask.window_right);
  d["align"] = p.mask.align == MaskAlign::top_left ? "top-left" : "bottom-right";
  d["softmax_scale"] = *p.softmax_scale;
  d["softcap"] = p.softcap;
  d["total_q"] = p.total_q;
  d["total_kv"] = p.total_kv;
  d["page_size"] = p.page_size;
  d["num_pages"] = p.num_pages;
  d["seqused_kv"] = p.seqused_kv;
  d["tree_mask"] = p.tree_mask;
  return d;
}

DevicePlan plan_sizes(const nb::dict& sizes, const nb::tuple& options_, const std::string& device_,
                      const std::string& pass_, const std::optional<std::string>& device_spec) {
  AttentionProblem problem = problem_of_sizes(sizes);
  const Options options(options_);
  options.describe(problem);
  const Pass pass = value_or_raise(parse_pass(pass_));
  const Device device = device_named(device_);
  std::unique_ptr<DeviceSpec> spec;
  if (device_spec) {
    spec = std::make_unique<DeviceSpec>(device_spec_of(*device_spec));
  }
  const PlanOptions plan_options = options.plan_options(pass, spec.get());
  return {value_or_raise(planned(problem, device, plan_options)), device};
}

void bind_plan(nb::module_& m) {
  nb::class_<Candidate>(m, "Candidate", "A kernel that was looked at when planning.")
      .def_ro("kernel", &Candidate::kernel)
      .def_prop_ro("pipeline", [](const Candidate& c) { return to_string(c.pipeline); })
      .def_ro("accepted", &Candidate::accepted)
      .def_ro("seconds", &Candidate::seconds,
              "predicted for one sequence on every core; meaningless when refused")
      .def_ro("refusal", &Candidate::refusal)
      .def_ro("only_when_forced", &Candidate::only_when_forced)
      .def("__repr__", [](const Candidate& c) {
        return "<Candidate " + c.kernel +
               (c.accepted ? ", " + std::to_string(c.seconds) + " s>"
                           : ", refused: " + c.refusal + ">");
      });

  nb::class_<DevicePlan>(m, "Plan")
      .def_prop_ro("kernel", [](const DevicePlan& p) { return p.plan.kernel(); })
      .def_prop_ro("pipeline", [](const DevicePlan& p) { return to_string(p.plan.pipeline()); })
      .def_prop_ro("pass_", [](const DevicePlan& p) { return to_string(p.plan.pass()); })
      .def_prop_ro("device", [](const DevicePlan& p) { return text(p.device); })
      .def_prop_ro("threads", [](const DevicePlan& p) { return p.plan.threads(); })
      .def_prop_ro("workspace_bytes", [](const DevicePlan& p) { return p.plan.workspace_bytes(); })
      .def_prop_ro("candidates", [](const DevicePlan& p) { return p.plan.candidates(); })
      .def_prop_ro("problem", [](const DevicePlan& p) { return problem_dict(p.plan.problem()); })
      .def("explain", [](const DevicePlan& p) { return p.plan.explain(); })
      .def("cost",
           [](const DevicePlan& p) { return cost_dict(p.plan.cost(), p.plan.prediction()); })
      .def(
          "forward",
          [](const DevicePlan& plan, const nb::tuple& arrays, bool return_lse, nb::handle out,
             nb::handle stream) {
            const Inputs in(arrays, stream, false, false);
            return forward(plan, in.forward_arguments(), out, return_lse);
          },
          nb::arg("arrays"), nb::arg("return_lse"), nb::arg("out").none(), nb::arg("stream").none())
      .def(
          "backward",
          [](const DevicePlan& plan, const nb::tuple& arrays, const nb::tuple& state,
             nb::handle out, nb::handle stream) {
            return backward(plan, Inputs(arrays, stream, false, true), state, out);
          },
          nb::arg("arrays"), nb::arg("state"), nb::arg("out").none(), nb::arg("stream").none());
}

}  // namespace

Device device_named(const std::string& name) {
  if (name == "cpu") {
    return Device::cpu();
  }
  const std::string_view rest =
      name.starts_with("cuda") ? std::string_view(name).substr(4) : std::string_view("?");
  if (rest.empty()) {
    return Device::cuda();
  }
  int index = 0;
  const bool is_index = rest.size() > 1 && rest.size() < 6 && rest[0] == ':' &&
                        rest.find_first_not_of("0123456789", 1) == std::string_view::npos;
  if (is_index) {
    index = std::stoi(std::string(rest.substr(1)));
  } else {
    raise_invalid("device", name, "cpu, cuda, cuda:0, cuda:1, ...");
  }
  return Device::cuda(index);
}

void bind_attention(nb::module_& m) {
  bind_plan(m);
  m.def(
      "attend_backward",
      [](const nb::tuple& arrays, const nb::tuple& state, const nb::tuple& options,
         nb::handle max_seqlen_q, nb::handle max_seqlen_kv, nb::handle out, nb::handle stream) {
        const Inputs in(arrays, stream, false, true);
        const DevicePlan plan = plan_of(
            in, Options(options), max_lengths_of(max_seqlen_q, max_seqlen_kv), Pass::backward);
        return backward(plan, in, state, out);
      },
      nb::arg("arrays"), nb::arg("state"), nb::arg("options"), nb::arg("max_seqlen_q").none(),
      nb::arg("max_seqlen_kv").none(), nb::arg("out").none(), nb::arg("stream").none());
  m.def("merge", &merge, nb::arg("states"), nb::arg("out").none(), nb::arg("packed").none(),
        nb::arg("stream").none());
  m.def("append", &append, nb::arg("arrays"), nb::arg("rope"), nb::arg("out").none(),
        nb::arg("stream").none());
  m.def("plan_sizes", &plan_sizes, nb::arg("sizes"), nb::arg("options"), nb::arg("device"),
        nb::arg("pass_"), nb::arg("device_spec").none());
  m.def(
      "explain",
      [](const nb::dict& sizes, nb::handle causal, nb::handle window, nb::handle align,
         const std::string& pipeline, const std::string& pass,
         const std::optional<std::string>& device, const std::string& convention,
         std::int64_t splits) {
        AttentionProblem problem = problem_of_sizes(sizes);
        problem.mask = mask_of(causal, window, align);
        return explain_attention(problem, value_or_raise(parse_pipeline(pipeline)),
                                 value_or_raise(parse_pass(pass)), device, convention, splits);
      },
      nb::arg("sizes"), nb::arg("causal"), nb::arg("window").none(), nb::arg("align").none(),
      nb::arg("pipeline"), nb::arg("pass_"), nb::arg("device").none(), nb::arg("convention"),
      nb::arg("splits"));
}

}  // namespace rafter::python
