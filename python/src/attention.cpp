// Plans, and attention on arrays.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "module.h"

namespace rafter::python {
namespace {

/// One side of a window: None and -1 are unbounded.
std::int64_t bound(nb::handle side) {
  std::int64_t keys = -1;
  if (!side.is_none() && (!nb::try_cast(side, keys) || keys < -1)) {
    raise_invalid("window", nb::cast<std::string>(nb::repr(side)), "0 or more, or None");
  }
  return keys;
}

Mask to_mask(bool causal, nb::handle window, const std::optional<std::string>& align) {
  Mask mask;
  if (!window.is_none()) {
    if (!nb::isinstance<nb::sequence>(window) || nb::len(window) != 2) {
      raise_invalid("window", nb::cast<std::string>(nb::repr(window)), "(left, right)");
    }
    mask.window_left = bound(window[0]);
    mask.window_right = bound(window[1]);
  }
  if (causal) {
    if (mask.window_right > 0) {
      raise_invalid("window", "keys up to " + std::to_string(mask.window_right) + " to the right",
                    "(left, 0) or (left, None) with causal=True");
    }
    mask.window_right = 0;
  }
  if (align) {
    if (mask.is_none()) {
      raise_invalid("align", *align, "None without causal or window");
    }
    if (*align != "bottom-right" && *align != "top-left") {
      raise_invalid("align", *align, "bottom-right, top-left");
    }
    mask.align = *align == "top-left" ? MaskAlign::top_left : MaskAlign::bottom_right;
  }
  return mask;
}

/// A device spec by name or file; the pointer is null for none.
std::unique_ptr<DeviceSpec> to_spec(const std::optional<std::string>& device_spec) {
  return device_spec ? std::make_unique<DeviceSpec>(device_spec_of(*device_spec)) : nullptr;
}

PlanOptions to_options(const std::optional<std::string>& pipeline,
                       const std::optional<std::string>& kernel, int threads, std::int64_t splits,
                       const DeviceSpec* spec) {
  PlanOptions options{
      .kernel = kernel.value_or(""), .threads = threads, .splits = splits, .device_spec = spec};
  if (pipeline) {
    options.pipeline = value_or_raise(parse_pipeline(*pipeline));
  }
  return options;
}

/// What a decode step calls its arguments.
Status with_names_of_decode(const Status& status) {
  std::string parameter = status.parameter();
  for (const auto& [name, decode_name] :
       {std::pair("k", "k_cache"), std::pair("v", "v_cache"), std::pair("seqused_kv", "seqused")}) {
    const std::string_view rest =
        parameter.starts_with(name)
            ? std::string_view(parameter).substr(std::string_view(name).size())
            : " ";
    if (rest.empty() || rest.front() == '.' || rest.front() == '[') {
      parameter = decode_name + std::string(rest);
      break;
    }
  }
  return {status.code(), parameter, status.given(), status.allowed()};
}

/// The arrays of one run, kept alive.
struct Inputs {
  bool decode;
  Tensor q, k, v;
  Indices cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table;

  Inputs(nb::handle q_, nb::handle k_, nb::handle v_, std::tuple<bool, bool, bool> bf16,
         nb::handle cu_q, nb::handle cu_kv, nb::handle seqused, nb::handle table, bool decode_)
      : decode(decode_),
        q("q", q_, false, std::get<0>(bf16)),
        k(decode ? "k_cache" : "k", k_, false, std::get<1>(bf16)),
        v(decode ? "v_cache" : "v", v_, false, std::get<2>(bf16)),
        cu_seqlens_q("cu_seqlens_q", cu_q, 1),
        cu_seqlens_kv("cu_seqlens_kv", cu_kv, 1),
        seqused_kv(decode ? "seqused" : "seqused_kv", seqused, 1),
        page_table("page_table", table, 2) {}

  bool packed() const { return !cu_seqlens_q.view.empty() || !cu_seqlens_kv.view.empty(); }
  void raise_named(const Status& status) const {
    raise(decode ? with_names_of_decode(status) : status);
  }
  ForwardInputs views() const {
    return {.q = q.view(packed()),
            .k = k.view(packed()),
            .v = v.view(packed()),
            .cu_seqlens_q = cu_seqlens_q.view,
            .cu_seqlens_kv = cu_seqlens_kv.view,
            .seqused_kv = seqused_kv.view,
            .page_table = page_table.view};
  }
};

void check_layout(const Inputs& in) {
  if (!in.packed()) {
    return;
  }
  for (const auto& [name, indices] : {std::pair("cu_seqlens_q", &in.cu_seqlens_q),
                                      std::pair("cu_seqlens_kv", &in.cu_seqlens_kv)}) {
    if (indices->view.empty()) {
      raise_invalid(name, "None", "an array: packed sequences need cu_seqlens_q and cu_seqlens_kv");
    }
  }
  if (!in.page_table.view.empty()) {
    raise_invalid("page_table", "an array", "None with cu_seqlens_q (pages go with dense queries)");
  }
}

/// The problem that the shapes of arrays describe.
AttentionProblem problem_of(const Inputs& in) {
  check_layout(in);
  const ForwardInputs views = in.views();
  AttentionProblem problem{.batch = views.q.batch,
                           .heads_q = views.q.heads,
                           .heads_kv = views.k.heads,
                           .seqlen_q = views.q.seqlen,
                           .seqlen_kv = views.k.seqlen,
                           .head_dim = views.q.head_dim,
                           .head_dim_v = views.v.head_dim,
                           .dtype = views.q.dtype,
                           .seqused_kv = !in.seqused_kv.view.empty()};
  if (in.packed()) {
    problem.layout = Layout::packed;
    problem.batch = std::max<std::int64_t>(views.cu_seqlens_q.size - 1, 0);
    problem.total_q = views.q.seqlen;
    problem.total_kv = views.k.seqlen;
    problem.seqlen_q = in.cu_seqlens_q.longest(problem.total_q);
    problem.seqlen_kv = in.cu_seqlens_kv.longest(problem.total_kv);
  } else if (!in.page_table.view.empty()) {
    problem.layout = Layout::paged;
    problem.num_pages = views.k.batch;
    problem.page_size = views.k.seqlen;
    if (__builtin_mul_overflow(views.page_table.cols, problem.page_size, &problem.seqlen_kv)) {
      raise_invalid("page_table", std::to_string(views.page_table.cols) + " pages per sequence",
                    "fewer than 2^63 keys");
    }
  }
  return problem;
}

nb::tuple o_shape(const Inputs& in) {
  const TensorView q = in.q.view(in.packed());
  const auto dim = static_cast<std::size_t>(in.v.rank - 1);
  const std::int64_t head_dim_v = in.v.shape[dim];
  if (in.q.rank == 3) {
    return nb::make_tuple(in.q.shape[0], in.q.shape[1], head_dim_v);
  }
  return nb::make_tuple(q.batch, q.seqlen, q.heads, head_dim_v);
}

nb::tuple lse_shape(const Inputs& in) {
  const TensorView q = in.q.view(in.packed());
  if (in.packed()) {
    return nb::make_tuple(q.heads, q.seqlen);
  }
  return in.q.rank == 3 ? nb::make_tuple(q.batch, q.heads)
                        : nb::make_tuple(q.batch, q.heads, q.seqlen);
}

/// Memory for one run, at a multiple of 64 bytes.
class Scratch {
 public:
  explicit Scratch(std::int64_t bytes) : bytes_(bytes) {
    if (bytes > 0) {
      const std::size_t rounded = (static_cast<std::size_t>(bytes) + 63) / 64 * 64;
      memory_.reset(std::aligned_alloc(64, rounded));
      if (memory_ == nullptr) {
        throw std::bad_alloc();
      }
    }
  }
  Workspace workspace() const { return {memory_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::int64_t bytes_;
  std::unique_ptr<void, Free> memory_;
};

void forward(const Plan& plan, const Inputs& in, const Tensor& o,
             const std::optional<Tensor>& lse) {
  const ForwardInputs views = in.views();
  ForwardOutputs out{.o = o.view(in.packed())};
  if (lse) {
    out.lse = lse->lse(in.packed());
  }
  Status status;
  {
    nb::gil_scoped_release released;
    const Scratch scratch(plan.workspace_bytes());
    status = plan.forward(views, out, scratch.workspace());
  }
  in.raise_named(status);
}

void merge_states(const std::vector<std::pair<Tensor, Tensor>>& states, const Tensor& o,
                  const Tensor& lse) {
  // A packed state has lse [heads, total] beside o [total, heads, head_dim].
  const auto to_state = [](const Tensor& o_, const Tensor& lse_) {
    return AttentionState{o_.view(lse_.rank == 2), lse_.lse(lse_.rank == 2)};
  };
  std::vector<AttentionState> views;
  views.reserve(states.size());
  for (const auto& [state_o, state_lse] : states) {
    views.push_back(to_state(state_o, state_lse));
  }
  const AttentionState out = to_state(o, lse);
  Status status;
  {
    nb::gil_scoped_release released;
    status = rafter::merge(views, out);
  }
  raise(status);
}

/// Contiguous memory of its own, for libraries whose arrays cannot be written from outside.
nb::ndarray<nb::array_api> empty(const std::vector<std::size_t>& shape, const std::string& dtype) {
  using Code = nb::dlpack::dtype_code;
  const std::tuple<const char*, Code, std::uint8_t> kinds[] = {
      {"float32", Code::Float, 32}, {"float16", Code::Float, 16}, {"bfloat16", Code::Bfloat, 16}};
  for (const auto& [name, code, bits] : kinds) {
    if (dtype != name) {
      continue;
    }
    std::int64_t bytes = bits / 8;
    for (const std::size_t size : shape) {
      if (__builtin_mul_overflow(bytes, static_cast<std::int64_t>(size), &bytes)) {
        throw std::bad_alloc();
      }
    }
    void* memory = std::aligned_alloc(64, (static_cast<std::size_t>(bytes) + 64) / 64 * 64);
    if (memory == nullptr) {
      throw std::bad_alloc();
    }
    const nb::capsule owner(memory, [](void* p) noexcept { std::free(p); });
    return nb::ndarray<nb::array_api>(memory, shape.size(), shape.data(), owner, nullptr,
                                      nb::dlpack::dtype{static_cast<std::uint8_t>(code), bits, 1});
  }
  raise_invalid("q.dtype", dtype, "float32, float16, bfloat16");
}

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
  d["window"] = nb::make_tuple(p.mask.window_left, p.mask.window_right);
  d["align"] = p.mask.align == MaskAlign::top_left ? "top-left" : "bottom-right";
  d["softmax_scale"] = *p.softmax_scale;
  d["softcap"] = p.softcap;
  return d;
}

Plan plan_for(const AttentionProblem& problem, const std::optional<std::string>& pipeline,
              const std::optional<std::string>& kernel, int threads, std::int64_t splits,
              const std::optional<std::string>& device_spec, const Inputs* in) {
  const std::unique_ptr<DeviceSpec> spec = to_spec(device_spec);
  Result<Plan> made = rafter::plan(problem, Device::cpu(),
                                   to_options(pipeline, kernel, threads, splits, spec.get()));
  if (!made && in != nullptr) {
    in->raise_named(made.status());
  }
  return value_or_raise(std::move(made));
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<Tensor>(m, "Tensor")
      .def(nb::init<std::string, nb::handle, bool, bool>(), nb::arg("name"),
           nb::arg("array").none(), nb::arg("writable"), nb::arg("bits16_are_bf16"));
  nb::class_<Inputs>(m, "Inputs")
      .def(nb::init<nb::handle, nb::handle, nb::handle, std::tuple<bool, bool, bool>, nb::handle,
                    nb::handle, nb::handle, nb::handle, bool>(),
           nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("bf16"),
           nb::arg("cu_seqlens_q").none(), nb::arg("cu_seqlens_kv").none(),
           nb::arg("seqused_kv").none(), nb::arg("page_table").none(), nb::arg("decode"))
      .def_prop_ro("o_shape", &o_shape)
      .def_prop_ro("lse_shape", &lse_shape);

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

  nb::class_<Plan>(m, "Plan")
      .def_prop_ro("kernel", &Plan::kernel)
      .def_prop_ro("pipeline", [](const Plan& p) { return to_string(p.pipeline()); })
      .def_prop_ro("threads", &Plan::threads)
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes)
      .def_prop_ro("candidates", &Plan::candidates)
      .def_prop_ro("problem", [](const Plan& p) { return problem_dict(p.problem()); })
      .def("explain", &Plan::explain)
      .def("cost", [](const Plan& p) { return cost_dict(p.cost(), p.prediction()); })
      .def("forward", &forward, nb::arg("inputs"), nb::arg("o"), nb::arg("lse").none());

  m.def("empty", &empty, nb::arg("shape"), nb::arg("dtype"));
  m.def(
      "plan_arrays",
      [](const Inputs& in, bool causal, nb::handle window, const std::optional<std::string>& align,
         std::optional<float> softmax_scale, float softcap,
         const std::optional<std::string>& pipeline, const std::optional<std::string>& kernel,
         int threads, std::int64_t splits) {
        AttentionProblem problem = problem_of(in);
        problem.mask = to_mask(causal, window, align);
        problem.softmax_scale = softmax_scale;
        problem.softcap = softcap;
        return plan_for(problem, pipeline, kernel, threads, splits, std::nullopt, &in);
      },
      nb::arg("inputs"), nb::arg("causal"), nb::arg("window").none(), nb::arg("align").none(),
      nb::arg("softmax_scale").none(), nb::arg("softcap"), nb::arg("pipeline").none(),
      nb::arg("kernel").none(), nb::arg("threads"), nb::arg("splits"));
  m.def(
      "plan_sizes",
      [](const nb::dict& sizes, bool causal, nb::handle window,
         const std::optional<std::string>& align, std::optional<float> softmax_scale, float softcap,
         const std::optional<std::string>& pipeline, const std::optional<std::string>& kernel,
         int threads, std::int64_t splits, const std::optional<std::string>& device_spec) {
        AttentionProblem problem = problem_of_sizes(sizes);
        problem.mask = to_mask(causal, window, align);
        problem.softmax_scale = softmax_scale;
        problem.softcap = softcap;
        return plan_for(problem, pipeline, kernel, threads, splits, device_spec, nullptr);
      },
      nb::arg("sizes"), nb::arg("causal"), nb::arg("window").none(), nb::arg("align").none(),
      nb::arg("softmax_scale").none(), nb::arg("softcap"), nb::arg("pipeline").none(),
      nb::arg("kernel").none(), nb::arg("threads"), nb::arg("splits"),
      nb::arg("device_spec").none());
  m.def(
      "merge",
      [](const nb::sequence& states, const Tensor& o, const Tensor& lse) {
        std::vector<std::pair<Tensor, Tensor>> parts;
        for (nb::handle state : states) {
          parts.emplace_back(nb::cast<Tensor>(state[0]), nb::cast<Tensor>(state[1]));
        }
        merge_states(parts, o, lse);
      },
      nb::arg("states"), nb::arg("o"), nb::arg("lse"));
  m.def(
      "explain",
      [](const nb::dict& sizes, bool causal, nb::handle window,
         const std::optional<std::string>& align, const std::string& pipeline,
         const std::string& pass, const std::optional<std::string>& device,
         const std::string& convention, std::int64_t splits) {
        AttentionProblem problem = problem_of_sizes(sizes);
        problem.mask = to_mask(causal, window, align);
        return explain_attention(problem, value_or_raise(parse_pipeline(pipeline)),
                                 value_or_raise(parse_pass(pass)), device, convention, splits);
      },
      nb::arg("sizes"), nb::arg("causal"), nb::arg("window").none(), nb::arg("align").none(),
      nb::arg("pipeline"), nb::arg("pass_"), nb::arg("device").none(), nb::arg("convention"),
      nb::arg("splits"));
}

}  // namespace rafter::python
