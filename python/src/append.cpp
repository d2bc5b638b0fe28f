// rafter.append: the rows of new tokens into a cache.
#include <optional>
#include <string>
#include <tuple>

#include "calls.h"
#include "errors.h"
#include "rafter/cache.h"
#include "results.h"

namespace rafter::python {
namespace {

/// A table of rope: float32 [max_position, rotary_dim / 2], contiguous.
const float* table(const Tensor& tensor, Rope& rope) {
  const auto& [shape, stride, rank] =
      std::tie(tensor.array.shape, tensor.array.stride, tensor.array.rank);
  if (tensor.dtype != DType::f32 || rank != 2 || stride[1] != 1 || stride[0] != shape[1]) {
    raise_invalid(tensor.name, "an array of another form",
                  "float32 [max_position, rotary_dim / 2], contiguous");
  }
  if (rope.rotary_dim != 0 && (rope.max_position != shape[0] || rope.rotary_dim != 2 * shape[1])) {
    raise_invalid(tensor.name, "another shape than cos has", "tables of one shape");
  }
  rope.max_position = shape[0];
  rope.rotary_dim = 2 * shape[1];
  return static_cast<const float*>(tensor.array.data);
}

/// Factors of an 8-bit cache: given, one per head, or written, one per row.
struct Scale {
  Tensor tensor;
  TensorView given = {}, written = {};

  Scale(const char* name, nb::handle object, const Place& place, const TensorView& cache) {
    if (object.is_none()) {
      return;
    }
    tensor = Tensor(name, object, place);
    if (tensor.array.rank == 1) {
      given = tensor.scale(cache);
      given.batch = given.seqlen = 1;
      return;
    }
    tensor = Tensor(name, object, place, Array::Access::write);
    written = tensor.scale(cache);
  }
};

}  // namespace

nb::object append(const nb::tuple& arrays, const nb::tuple& rope_, nb::handle out,
                  nb::handle stream) {
  const Place place = place_of("k", arrays[0], stream);
  const auto read = [&](const char* name, nb::handle object) {
    return object.is_none() ? Tensor() : Tensor(name, object, place);
  };
  const auto written = [&](const char* name, nb::handle object) {
    return Tensor(name, object, place, Array::Access::write);
  };
  const Tensor k = read("k", arrays[0]), v = read("v", arrays[1]);
  const Tensor k_cache = written("k_cache", arrays[2]), v_cache = written("v_cache", arrays[3]);
  const Indices seqused("seqused", arrays[4], 1, place);
  const Indices seqused_new("seqused_new", arrays[5], 1, place);
  const Indices page_table("page_table", arrays[6], 2, place);
  const Tensor q = read("q", arrays[7]);
  const Counts dropped("dropped", arrays[10], place);
  const Tensor cos = read("cos", rope_[0]), sin = read("sin", rope_[1]);

  AppendOutputs outputs{.k_cache = k_cache.view(false), .v_cache = v_cache.view(false)};
  const Scale k_scale("k_scale", arrays[8], place, outputs.k_cache);
  const Scale v_scale("v_scale", arrays[9], place, outputs.v_cache);
  outputs.k_scale = k_scale.written;
  outputs.v_scale = v_scale.written;
  outputs.dropped = dropped.view;
  AppendInputs inputs{.k = k.view(false),
                      .v = v.view(false),
                      .seqused_kv = seqused.view,
                      .seqused_new = seqused_new.view,
                      .page_table = page_table.view,
                      .k_scale = k_scale.given,
                      .v_scale = v_scale.given};
  if (cos.name.empty() != sin.name.empty()) {
    raise_invalid(cos.name.empty() ? "cos" : "sin", "None", "cos and sin, or neither");
  }
  if (argument<bool>("interleaved", rope_[2], "True or False")) {
    if (cos.name.empty()) {
      raise_invalid("interleaved", "True", "False without cos and sin");
    }
    inputs.rope.pairs = Rope::Pairs::interleaved;
  }
  if (!cos.name.empty()) {
    inputs.rope.cos = table(cos, inputs.rope);
    inputs.rope.sin = table(sin, inputs.rope);
  }
  std::optional<ResultArray> turned;
  if (!q.name.empty()) {
    inputs.q = q.view(false);
    const std::span<const std::int64_t> shape(q.array.shape.data(),
                                              static_cast<std::size_t>(q.array.rank));
    turned.emplace("out", out, place, shape, q.dtype);
    outputs.q = turned->tensor().view(false);
  } else if (!out.is_none()) {
    raise_invalid("out", "an array", "None without q");
  }
  Status status;
  {
    nb::gil_scoped_release released;
    status = rafter::append(inputs, outputs, place.device, place.stream);
  }
  raise(with_names(status, {{"seqused_kv", "seqused"},
                            {"rope.rotary_dim", "rotary_dim"},
                            {"rope.cos", "cos"},
                            {"rope.sin", "sin"}}));
  return turned ? turned->finish(place) : nb::none();
}

}  // namespace rafter::python
