#include "calls.h"

#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "errors.h"
#include "plan_cache.h"
#include "rafter/cache.h"
#include "results.h"

namespace rafter::python {
namespace {

/// Runs `call` without the GIL. A CPU's workspace is made there too: it may be large.
template <typename Call>
Status run(const Place& place, std::int64_t workspace_bytes, const Call& call) {
  std::optional<Scratch> scratch;
  if (place.is_cuda()) {
    scratch.emplace(place, workspace_bytes);
  }
  Status status;
  {
    nb::gil_scoped_release released;
    if (!scratch) {
      const Scratch of_host(place, workspace_bytes);
      status = call(of_host.workspace());
    } else {
      status = call(scratch->workspace());
    }
  }
  return status;  // after it the GPU's workspace goes back, behind the queued work
}

void check_device(const DevicePlan& planned, const Place& place) {
  if (planned.device.kind != place.device.kind || planned.device.index != place.device.index) {
    raise_invalid("q", "an array on " + text(place.device), text(planned.device) + " (the plan's)");
  }
}

std::span<const std::int64_t> sizes_of(const Tensor& tensor) {
  return {tensor.array.shape.data(), static_cast<std::size_t>(tensor.array.rank)};
}

/// A pair of a sequence, or a ValueError that names it.
std::pair<nb::object, nb::object> pair_of(const std::string& name, nb::handle object) {
  if (!nb::isinstance<nb::tuple>(object) && !nb::isinstance<nb::list>(object)) {
    raise_invalid(name, nb::cast<std::string>(nb::str(object.type().attr("__name__"))),
                  "a pair (o, lse)");
  }
  if (nb::len(object) != 2) {
    raise_invalid(name, std::to_string(nb::len(object)) + " arrays", "a pair (o, lse)");
  }
  return {object[0], object[1]};
}

/// Whether a state of o with three dims is of packed sequences, lse [heads, total], or of one query
/// each, lse [batch, heads]: its shapes say so, or the caller where both would fit.
bool is_packed(const Tensor& o, const Tensor& lse, std::optional<bool> stated) {
  if (o.array.rank != 3 || lse.array.rank != 2) {
    if (stated.value_or(false)) {
      raise_invalid("packed", "True", "None or False where o has not three dims and lse two");
    }
    return false;
  }
  const auto& [rows, heads] = std::tie(o.array.shape[0], o.array.shape[1]);
  if (rows == heads && !stated) {
    raise_invalid("packed", "None where " + lse.name + " may be [heads, total] or [batch, heads]",
                  "True or False");
  }
  return stated.value_or(lse.array.shape[0] == heads && lse.array.shape[1] == rows);
}

}  // namespace

DevicePlan plan_of(const Inputs& in, const Options& options, const MaxLengths& longest, Pass pass) {
  AttentionProblem problem = in.problem(longest);
  options.describe(problem);
  Result<Plan> made = planned(problem, in.place.device, options.plan_options(pass));
  if (!made) {
    in.raise_named(made.status());
  }
  return {*std::move(made), in.place.device};
}

nb::object forward(const DevicePlan& planned, const ForwardArguments& given, nb::handle out,
                   bool return_lse) {
  const Place& place = given.place;
  check_device(planned, place);
  const ResultArray o("out", out, place, given.o_shape.span(), given.dtype, ResultArray::Fill::none,
                      given.o_heads_first);
  std::optional<ResultArray> lse;
  ForwardOutputs outputs{.o = o.tensor().view(given.packed), .bad_pages = given.bad_pages};
  if (return_lse) {
    lse.emplace("lse", nb::none(), place, given.lse_shape.span(), DType::f32);
    outputs.lse = lse->tensor().lse(given.packed);
  }
  const Status done = run(place, planned.plan.workspace_bytes(), [&](Workspace workspace) {
    return planned.plan.forward(given.in, outputs, workspace, place.stream);
  });
  given.raise_named(done ? done : with_names(done, {{"o", "out"}}));
  return lse ? nb::make_tuple(o.finish(place), lse->finish(place)) : o.finish(place);
}

nb::object backward(const DevicePlan& planned, const Inputs& in, const nb::tuple& state,
                    nb::handle out) {
  check_device(planned, in.place);
  const auto read = [&](const char* name, nb::handle object) {
    return Tensor(name, object, in.place, Array::Access::read, true);
  };
  const Tensor o = read("o", state[0]), lse = read("lse", state[1]), d_o = read("d_o", state[2]);
  const bool packed = in.packed();
  const ForwardInputs given = in.views();
  BackwardInputs inputs{.q = given.q,
                        .k = given.k,
                        .v = given.v,
                        .o = o.view(packed),
                        .lse = lse.lse(packed),
                        .d_o = d_o.view(packed),
                        .cu_seqlens_q = given.cu_seqlens_q,
                        .cu_seqlens_kv = given.cu_seqlens_kv,
                        .seqused_kv = given.seqused_kv};
  Tensor dlse;
  if (const nb::handle object = state[3]; !object.is_none()) {
    dlse = read("dlse", object);
    inputs.dlse = dlse.lse(packed);
  }
  const bool made = out.is_none();
  const ResultArray::Fill fill =
      in.leaves_rows() ? ResultArray::Fill::zero : ResultArray::Fill::none;
  const auto result = [&](const char* name, int i, const Tensor& like) {
    const nb::object given_out = made ? nb::none() : nb::object(out[i]);
    return ResultArray(name, given_out, in.place, sizes_of(like), in.q.dtype, fill);
  };
  const ResultArray dq = result("dq", 0, in.q), dk = result("dk", 1, in.k),
                    dv = result("dv", 2, in.v);
  const BackwardOutputs outputs{dq.tensor().view(packed), dk.tensor().view(packed),
                                dv.tensor().view(packed)};
  in.raise_named(run(in.place, planned.plan.workspace_bytes(), [&](Workspace workspace) {
    return planned.plan.backward(inputs, outputs, workspace, in.place.stream);
  }));
  return nb::make_tuple(dq.finish(in.place), dk.finish(in.place), dv.finish(in.place));
}

nb::object merge(const nb::sequence& states, nb::handle out, std::optional<bool> stated,
                 nb::handle stream) {
  const std::size_t count = nb::len(states);
  if (count == 0) {
    raise_invalid("states", "none", "one state or more");
  }
  Place place;
  std::vector<std::pair<Tensor, Tensor>> parts;
  std::vector<nb::object> kept;
  for (std::size_t i = 0; i < count; ++i) {
    const std::string name = "states[" + std::to_string(i) + "]";
    kept.push_back(states[i]);
    const auto [o, lse] = pair_of(name, kept.back());
    if (i == 0) {
      place = place_of(name + ".o", o, stream);
    }
    parts.emplace_back(Tensor(name + ".o", o, place), Tensor(name + ".lse", lse, place));
  }
  const bool packed = is_packed(parts[0].first, parts[0].second, stated);
  std::vector<AttentionState> views;
  for (const auto& [o, lse] : parts) {
    views.push_back({o.view(packed), lse.lse(packed)});
  }
  const auto [out_o, out_lse] = out.is_none()
                                    ? std::pair<nb::object, nb::object>(nb::none(), nb::none())
                                    : pair_of("out", out);
  const ResultArray o("out.o", out_o, place, sizes_of(parts[0].first), parts[0].first.dtype);
  const ResultArray lse("out.lse", out_lse, place, sizes_of(parts[0].second), DType::f32);
  const AttentionState to{o.tensor().view(packed), lse.tensor().lse(packed)};
  Status status;
  {
    nb::gil_scoped_release released;
    status = rafter::merge(views, to, place.device, place.stream);
  }
  raise(status);
  return out.is_none() ? nb::make_tuple(o.finish(place), lse.finish(place)) : nb::borrow(out);
}

}  // namespace rafter::python
