// Checks of the operations of layers.h, then the device's kernel.
#include "rafter/layers.h"

#include <array>
#include <string>

#include "api/checks.h"
#include "api/operations.h"
#include "base/checked.h"
#include "base/packed_weight.h"
#include "dispatch/operations.h"
#include "model/check.h"

namespace rafter {

const char* to_string(Pointwise function) {
  switch (function) {
    case Pointwise::add:
      return "add";
    case Pointwise::multiply:
      return "multiply";
    case Pointwise::silu:
      return "silu";
    case Pointwise::swiglu:
      return "swiglu";
  }
  return "unknown";
}

namespace {

/// The layer operations of a device that is there.
Result<const LayerOperations*> operations_of(const char* name, const Device& device,
                                             Stream stream) {
  if (Status s = api::check_device(device, stream); !s) {
    return s;
  }
  const OperationEntry* const entry = dispatch::find_layers(device.kind);
  if (Status s = api::check_operation(name, entry, device); !s) {
    return s;
  }
  return entry->layers;
}

Status check_float(const char* name, const TensorView& tensor) {
  switch (tensor.dtype) {
    case DType::f32:
    case DType::f16:
    case DType::bf16:
      break;
    default:
      return Status::invalid_argument(std::string(name) + ".dtype", to_string(tensor.dtype),
                                      "f32, f16 or bf16");
  }
  for (const std::int64_t size : {tensor.batch, tensor.seqlen, tensor.heads, tensor.head_dim}) {
    if (size < 0) {
      return Status::invalid_argument(name, "a negative size", "sizes of 0 or more");
    }
  }
  return Status::ok();
}

api::Shape shape_of(const TensorView& t) { return {{t.batch, t.seqlen, t.heads, t.head_dim}}; }

/// An output apart from an input, or (where `in_place`) the same elements.
struct NamedTensor {
  const char* name;
  const TensorView& tensor;
};
Status check_output(NamedTensor output, std::initializer_list<NamedTensor> inputs, bool in_place) {
  const api::View view = api::view_of(output.name, output.tensor);
  if (Status s = api::check_no_self_overlap(view); !s) {
    return s;
  }
  for (const NamedTensor& input : inputs) {
    if (in_place && api::same_place(output.tensor, input.tensor)) {
      continue;
    }
    if (Status s = api::check_disjoint(view, api::view_of(input.name, input.tensor)); !s) {
      return s;
    }
  }
  return Status::ok();
}

/// Rows of an index within [0, limit), where they can be read.
Status check_rows(const char* name, const IndexView& rows, std::int64_t size, std::int64_t limit,
                  const Device& device) {
  if (Status s = api::check_index(name, rows, size); !s) {
    return s;
  }
  for (std::int64_t i = 0; device.kind == Device::Kind::cpu && i < size; ++i) {
    if (rows[i] < 0 || rows[i] >= limit) {
      return Status::invalid_argument(std::string(name) + "[" + std::to_string(i) + "]",
                                      std::to_string(rows[i]), "0 to " + std::to_string(limit - 1));
    }
  }
  return Status::ok();
}

Status check_rmsnorm(const RmsNormInputs& in, const RmsNormOutputs& out) {
  const api::Shape shape = shape_of(in.x);
  const DType dtype = in.x.dtype;
  const bool adds = in.residual.data != nullptr;
  if (adds != (out.sum.data != nullptr)) {
    return Status::invalid_argument(adds ? "sum" : "residual", "null",
                                    "both of residual and sum, or neither, are");
  }
  if (!(in.eps >= 0) || in.eps > 1) {
    return Status::invalid_argument("eps", std::to_string(in.eps), "0 to 1");
  }
  Status checked = model::first_error(
      check_float("x", in.x), api::check_tensor("x", in.x, dtype, shape),
      api::check_tensor("weight", in.weight, dtype, {{1, 1, 1, in.x.head_dim}}),
      api::check_tensor("y", out.y, dtype, shape), check_output({"y", out.y}, {{"x", in.x}}, true),
      check_output({"y", out.y}, {{"weight", in.weight}}, false));
  if (!checked || !adds) {
    return checked;
  }
  return model::first_error(
      api::check_tensor("residual", in.residual, dtype, shape),
      api::check_tensor("sum", out.sum, dtype, shape),
      check_output({"sum", out.sum}, {{"x", in.x}, {"residual", in.residual}}, true),
      check_output({"sum", out.sum}, {{"weight", in.weight}, {"y", out.y}}, false),
      check_output({"y", out.y}, {{"residual", in.residual}}, true));
}

/// That there can be such a packed weight.
Status check_packed(const char* name, const PackedWeight& w) {
  const auto field = [name](const char* which) { return std::string(name) + "." + which; };
  const bool int4 = w.dtype == DType::int4;
  if (!int4 && w.dtype != DType::int8 && w.dtype != DType::e4m3) {
    return Status::invalid_argument(field("dtype"), to_string(w.dtype), "int8, e4m3 or int4");
  }
  if (int4 ? w.group_size != 32 && w.group_size != 64 && w.group_size != 128 : w.group_size != 0) {
    return Status::invalid_argument(field("group_size"), std::to_string(w.group_size),
                                    int4 ? "32, 64 or 128" : "0: a scale is a row's");
  }
  if (w.n < 0 || w.n % base::kStripeRows != 0) {
    return Status::invalid_argument(field("n"), std::to_string(w.n), "multiples of 16");
  }
  const base::PackedShape shape{w.dtype, w.n, w.k, w.group_size};
  if (w.k <= 0 || w.k % shape.unit_cols() != 0) {
    return Status::invalid_argument(field("k"), std::to_string(w.k),
                                    "multiples of " + std::to_string(shape.unit_cols()));
  }
  const auto bytes = base::checked_product({w.n, w.k});
  if (!bytes || *bytes > (std::int64_t{1} << 50)) {
    return Status::invalid_argument(field("n"), std::to_string(w.n),
                                    "fewer than 2^50 elements with k = " + std::to_string(w.k));
  }
  return Status::ok();
}
std::int64_t bytes_of_packed(const PackedWeight& w) {
  return base::PackedShape{w.dtype, w.n, w.k, w.group_size}.bytes();
}
/// Its bytes as a view, so that overlaps are seen.
TensorView packed_view(const PackedWeight& w) {
  return matrix(w.data, DType::int8, 1, bytes_of_packed(w));
}
Status check_packed_memory(const char* name, const PackedWeight& w) {
  if (Status s = check_packed(name, w); !s) {
    return s;
  }
  if (w.n > 0 && w.data == nullptr) {
    return Status::invalid_argument(name, "null", "an address");
  }
  return reinterpret_cast<std::uintptr_t>(w.data) % base::kChunkBytes == 0
             ? Status::ok()
             : Status::invalid_argument(name, "an address that is not a multiple of 16",
                                        "addresses aligned to 16 bytes");
}

/// A weight beside its packed form, in either direction.
Status check_pack(const char* name, const TensorView& view, const PackedWeight& packed,
                  const char* packed_name, bool to_packed) {
  Status checked =
      model::first_error(check_packed_memory(packed_name, packed), check_float(name, view),
                         api::check_tensor(name, view, view.dtype, {{1, packed.n, 1, packed.k}}));
  if (!checked) {
    return checked;
  }
  if (packed.n > 1 && view.stride_seqlen != packed.k) {
    return Status::invalid_argument(std::string(name) + ".stride_seqlen",
                                    std::to_string(view.stride_seqlen), std::to_string(packed.k));
  }
  const TensorView bytes = packed_view(packed);
  const NamedTensor plain{name, view}, other{packed_name, bytes};
  return to_packed ? check_output(other, {plain}, false) : check_output(plain, {other}, false);
}

/// The weight, in the dtype of x or packed.
Status check_weight(const LinearInputs& in, std::int64_t k) {
  if (in.packed.data == nullptr) {
    const std::int64_t n = in.weight.seqlen;
    Status checked = api::check_tensor("weight", in.weight, in.x.dtype, {{1, n, 1, k}});
    return checked && n > 1 && in.weight.stride_seqlen != k
               ? Status::invalid_argument("weight.stride_seqlen",
                                          std::to_string(in.weight.stride_seqlen),
                                          std::to_string(k))
               : checked;
  }
  if (in.weight.data != nullptr) {
    return Status::invalid_argument("packed", "a tensor beside weight", "one of the two");
  }
  if (Status s = check_packed_memory("packed", in.packed); !s) {
    return s;
  }
  return in.packed.k == k ? Status::ok()
                          : Status::invalid_argument("packed.k", std::to_string(in.packed.k),
                                                     "x's " + std::to_string(k));
}

Status check_linear(const LinearInputs& in, const TensorView& out, Workspace workspace,
                    const Device& device) {
  const bool packed = in.packed.data != nullptr;
  const std::int64_t m = in.x.seqlen, k = in.x.head_dim,
                     n = packed ? in.packed.n : in.weight.seqlen;
  const DType dtype = in.x.dtype;
  const bool has_bias = in.bias.data != nullptr;
  Status checked = model::first_error(check_float("x", in.x),
                                      api::check_tensor("x", in.x, dtype, {{1, m, 1, k}}));
  if (!checked) {
    return checked;
  }
  if (k == 0) {
    return Status::invalid_argument("x.head_dim", "0", "1 or more");
  }
  if (Status s = check_weight(in, k); !s) {
    return s;
  }
  const bool f32 = out.dtype == DType::f32 && !has_bias;
  const TensorView weight = packed ? packed_view(in.packed) : in.weight;
  const char* const weight_name = packed ? "packed" : "weight";
  checked = model::first_error(
      api::check_tensor("out", out, f32 ? DType::f32 : dtype, {{1, m, 1, n}}),
      has_bias ? api::check_tensor("bias", in.bias, dtype, {{1, 1, 1, n}}) : Status::ok(),
      check_output({"out", out}, {{"x", in.x}, {weight_name, weight}, {"bias", in.bias}}, false),
      api::check_workspace(workspace, linear_workspace_bytes(m, dtype, device, in.packed)));
  if (!checked) {
    return checked;
  }
  if (device.kind == Device::Kind::cuda) {
    for (const auto& [name, size] : {std::pair{"x.head_dim", k}, std::pair{"weight.seqlen", n},
                                     std::pair{"x.stride_seqlen", in.x.stride_seqlen},
                                     std::pair{"out.stride_seqlen", out.stride_seqlen}}) {
      if (size % 8 != 0) {
        return Status::invalid_argument(name, std::to_string(size), "multiples of 8 on CUDA");
      }
    }
  }
  if (std::string why = why_no_linear(dtype, device); !why.empty()) {
    return Status::unsupported("x.dtype", to_string(dtype), std::move(why));
  }
  return Status::ok();
}

/// Of a link of an array: errors are of links[i].
Status check_link(const Link& link, std::int64_t m, const Device& device) {
  const bool packed = link.packed.data != nullptr;
  const std::int64_t k = link.x.head_dim, n = packed ? link.packed.n : link.weight.seqlen;
  const std::int64_t cols = link.end == LinkEnd::swiglu ? n / 2 : n;
  const DType dtype = link.x.dtype;
  const TensorView weight = packed ? packed_view(link.packed) : link.weight;
  const bool has_bias = link.bias.data != nullptr, has_norm = link.norm.data != nullptr;
  if (k < 1) {
    return Status::invalid_argument("x.head_dim", std::to_string(k), "1 or more");
  }
  if (!packed && link.packed.k != 0) {
    return Status::invalid_argument("packed.data", "null", "an address, or packed.k = 0");
  }
  Status checked = model::first_error(
      check_float("x", link.x), api::check_tensor("x", link.x, dtype, {{1, m, 1, k}}),
      check_weight({.x = link.x, .weight = link.weight, .packed = link.packed}, k),
      api::check_tensor("out", link.out, dtype, {{1, m, 1, cols}}),
      has_bias ? api::check_tensor("bias", link.bias, dtype, {{1, 1, 1, n}}) : Status::ok(),
      has_norm ? api::check_tensor("norm", link.norm, dtype, {{1, 1, 1, k}}) : Status::ok(),
      check_output({"out", link.out},
                   {{"x", link.x}, {"weight", weight}, {"bias", link.bias}, {"norm", link.norm}},
                   false));
  if (!checked) {
    return checked;
  }
  for (const auto& [name, stride] : {std::pair{"x.stride_seqlen", link.x.stride_seqlen},
                                     std::pair{"out.stride_seqlen", link.out.stride_seqlen}}) {
    if (device.kind == Device::Kind::cuda && stride % 8 != 0) {
      return Status::invalid_argument(name, std::to_string(stride), "multiples of 8 on CUDA");
    }
  }
  return Status::ok();
}

}  // namespace

Status rmsnorm(const RmsNormInputs& in, const RmsNormOutputs& out, const Device& device,
               Stream stream) {
  const Result<const LayerOperations*> layers = operations_of("rmsnorm", device, stream);
  if (Status s = layers ? check_rmsnorm(in, out) : layers.status(); !s) {
    return s;
  }
  return (*layers)->rmsnorm({in, out, {device.index, stream}});
}

Status pointwise(Pointwise function, const TensorView& a, const TensorView& b,
                 const TensorView& out, const Device& device, Stream stream) {
  const Result<const LayerOperations*> layers = operations_of("pointwise", device, stream);
  if (!layers) {
    return layers.status();
  }
  const bool one = function == Pointwise::silu;
  if (one ? b.data != nullptr : b.data == nullptr && a.elements() > 0) {
    return Status::invalid_argument("b", one ? "a tensor" : "null",
                                    one ? "none of silu" : "a tensor");
  }
  const api::Shape shape = shape_of(a);
  Status checked = model::first_error(
      check_float("a", a), api::check_tensor("a", a, a.dtype, shape),
      one ? Status::ok() : api::check_tensor("b", b, a.dtype, shape),
      api::check_tensor("out", out, a.dtype, shape), check_output({"out", out}, {{"a", a}}, true),
      one ? Status::ok() : check_output({"out", out}, {{"b", b}}, true));
  return checked ? (*layers)->pointwise({function, a, b, out, {device.index, stream}}) : checked;
}

Status rope(const TensorView& x, const IndexView& positions, const Rope& rope,
            const TensorView& out, const Device& device, Stream stream) {
  const Result<const LayerOperations*> layers = operations_of("rope", device, stream);
  if (!layers) {
    return layers.status();
  }
  const api::Shape shape = {{1, x.seqlen, x.heads, x.head_dim}};
  Status checked = model::first_error(
      check_float("x", x), api::check_tensor("x", x, x.dtype, shape),
      api::check_tensor("out", out, x.dtype, shape), check_output({"out", out}, {{"x", x}}, true),
      api::check_rope(rope, x.head_dim));
  if (checked) {
    checked = check_rows("positions", positions, x.seqlen, rope.max_position, device);
  }
  return checked ? (*layers)->rope({x, positions, rope, out, {device.index, stream}}) : checked;
}

Status gather(const TensorView& table, const IndexView& rows, const TensorView& out,
              const Device& device, Stream stream) {
  const Result<const LayerOperations*> layers = operations_of("gather", device, stream);
  if (!layers) {
    return layers.status();
  }
  Status checked = model::first_error(
      check_float("table", table),
      api::check_tensor("table", table, table.dtype, {{1, table.seqlen, 1, table.head_dim}}),
      api::check_tensor("out", out, table.dtype, {{1, rows.size, 1, table.head_dim}}),
      check_output({"out", out}, {{"table", table}}, false));
  if (checked) {
    checked = check_rows("rows", rows, rows.size, table.seqlen, device);
  }
  return checked ? (*layers)->gather({table, rows, out, {device.index, stream}}) : checked;
}

Status linear(const LinearInputs& in, const TensorView& out, Workspace workspace,
              const Device& device, Stream stream) {
  const Result<const LayerOperations*> layers = operations_of("linear", device, stream);
  if (Status s = layers ? check_linear(in, out, workspace, device) : layers.status(); !s) {
    return s;
  }
  return (*layers)->linear({in, out, workspace, {device.index, stream}});
}

Status linear_chain(std::span<const Link> links, float eps, Workspace workspace,
                    const Device& device, Stream stream) {
  const Result<const LayerOperations*> layers = operations_of("linear_chain", device, stream);
  if (!layers) {
    return layers.status();
  }
  if (!(eps >= 0) || eps > 1) {
    return Status::invalid_argument("eps", std::to_string(eps), "0 to 1");
  }
  for (std::size_t i = 0; i < links.size(); ++i) {
    if (Status s = check_link(links[i], links[0].x.seqlen, device); !s) {
      return Status::invalid_argument("links[" + std::to_string(i) + "]", s.message(),
                                      "links that are in order");
    }
  }
  for (std::size_t i = 1; i < links.size(); ++i) {
    const std::string name = "links[" + std::to_string(i) + "]";
    const TensorView& before = links[i - 1].out;
    if (links[i].x.head_dim != before.head_dim || !api::same_place(links[i].x, before)) {
      return Status::invalid_argument(name + ".x", "another tensor",
                                      "what the link before it writes");
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (links[i].out.head_dim == links[j].out.head_dim &&
          api::same_place(links[i].out, links[j].out)) {
        continue;
      }
      if (Status s = api::check_disjoint(api::view_of((name + ".out").c_str(), links[i].out),
                                         api::view_of("an earlier out", links[j].out));
          !s) {
        return s;
      }
    }
  }
  if (Status s = api::check_workspace(workspace, linear_chain_workspace_bytes(links, device)); !s) {
    return s;
  }
  if (std::string why = why_no_linear_chain(links, device); !why.empty()) {
    return Status::unsupported("links", std::to_string(links.size()) + " products", std::move(why));
  }
  return (*layers)->linear_chain({links, eps, workspace, {device.index, stream}});
}

std::int64_t linear_chain_workspace_bytes(std::span<const Link> links, const Device& device) {
  const OperationEntry* const entry = dispatch::find_layers(device.kind);
  return entry == nullptr || entry->layers->linear_chain == nullptr
             ? 0
             : entry->layers->linear_chain_workspace_bytes(links);
}

std::string why_no_linear_chain(std::span<const Link> links, const Device& device) {
  const OperationEntry* const entry = dispatch::find_layers(device.kind);
  return entry == nullptr || entry->layers->linear_chain == nullptr
             ? std::string("no chain runs on ") + to_string(device.kind)
             : entry->layers->why_no_linear_chain(links);
}

Result<std::int64_t> packed_bytes(const PackedWeight& shape) {
  Status checked = check_packed("shape", shape);
  return checked ? Result<std::int64_t>(bytes_of_packed(shape)) : checked;
}

Status quantize(const TensorView& weight, const PackedWeight& out, const Device& device,
                Stream stream) {
  const Result<const LayerOperations*> layers = operations_of("quantize", device, stream);
  if (Status s = layers ? check_pack("weight", weight, out, "out", true) : layers.status(); !s) {
    return s;
  }
  return (*layers)->quantize({weight, out, {device.index, stream}});
}

Status dequantize(const PackedWeight& weight, const TensorView& out, const Device& device,
                  Stream stream) {
  const Result<const LayerOperations*> layers = operations_of("dequantize", device, stream);
  if (Status s = layers ? check_pack("out", out, weight, "weight", false) : layers.status(); !s) {
    return s;
  }
  return (*layers)->dequantize({out, weight, {device.index, stream}});
}

std::int64_t linear_workspace_bytes(const Device& device) {
  const OperationEntry* const entry = dispatch::find_layers(device.kind);
  return entry == nullptr ? 0 : entry->layers->linear_workspace_bytes;
}

std::int64_t linear_workspace_bytes(std::int64_t rows, DType dtype, const Device& device,
                                    const PackedWeight& packed) {
  const OperationEntry* const entry = dispatch::find_layers(device.kind);
  if (entry == nullptr) {
    return 0;
  }
  const bool dequantizes = packed.k > 0 && entry->layers->linear_dequantizes(rows, dtype, packed);
  return entry->layers->linear_workspace_bytes +
         (dequantizes ? packed.n * packed.k * bits_of(dtype) / 8 : 0);
}

std::string linear_kernel(std::int64_t rows, DType dtype, const Device& device,
                          const PackedWeight& packed) {
  const OperationEntry* const entry = dispatch::find_layers(device.kind);
  return entry == nullptr ? std::string() : entry->layers->linear_kernel(rows, dtype, packed);
}

std::string why_no_linear(DType dtype, const Device& device) {
  const OperationEntry* const entry = dispatch::find_layers(device.kind);
  return entry == nullptr ? std::string("this build has no products for ") + to_string(device.kind)
                          : entry->layers->why_no_linear(dtype);
}

Status fill_uniform(const TensorView& out, std::uint64_t seed, float bound, const Device& device,
                    Stream stream) {
  const Result<const LayerOperations*> layers = operations_of("fill_uniform", device, stream);
  if (!layers) {
    return layers.status();
  }
  Status checked =
      model::first_error(check_float("out", out), api::check_memory(api::view_of("out", out)));
  if (!checked) {
    return checked;
  }
  if (!(bound > 0) || bound > 1e4f) {
    return Status::invalid_argument("bound", std::to_string(bound), "above 0, up to 10000");
  }
  const TensorView packed =
      TensorView::contiguous(out.data, out.dtype, out.batch, out.seqlen, out.heads, out.head_dim);
  if (!api::same_place(out, packed) || out.stride_head_dim != 1) {
    return Status::invalid_argument("out", "strides with gaps", "a contiguous tensor");
  }
  return (*layers)->fill_uniform({out, seed, bound, {device.index, stream}});
}

Status advance(const CountView& counts, std::int32_t by, const Device& device, Stream stream) {
  const Result<const LayerOperations*> layers = operations_of("advance", device, stream);
  if (!layers) {
    return layers.status();
  }
  if (counts.size < 0 || (counts.size > 0 && counts.data == nullptr)) {
    return Status::invalid_argument("counts", "null", "an array of " + std::to_string(counts.size));
  }
  return (*layers)->advance({counts, by, {device.index, stream}});
}

}  // namespace rafter
