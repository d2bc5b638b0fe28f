#include "arrays.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "errors.h"

namespace rafter::python {
namespace {

std::string list_of(const std::array<std::int64_t, 4>& sizes, int rank) {
  std::string out = "[";
  for (int i = 0; i < rank; ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(sizes[static_cast<std::size_t>(i)]);
  }
  return out + "]";
}

std::optional<DType> dtype_of(nb::dlpack::dtype given) {
  using Code = nb::dlpack::dtype_code;
  const std::tuple<Code, int, DType> known[] = {
      {Code::Float, 32, DType::f32},       {Code::Float, 16, DType::f16},
      {Code::Bfloat, 16, DType::bf16},     {Code::Float8_E4M3FN, 8, DType::e4m3},
      {Code::Float8_E5M2, 8, DType::e5m2}, {Code::Int, 8, DType::int8}};
  for (const auto& [code, bits, dtype] : known) {
    if (given.code == static_cast<std::uint8_t>(code) && given.bits == bits && given.lanes == 1) {
      return dtype;
    }
  }
  return std::nullopt;
}

std::string dtype_text(nb::dlpack::dtype given) {
  const char* names[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  if (given.code >= std::size(names)) {
    return "dtype code " + std::to_string(given.code) + ", bits " + std::to_string(given.bits);
  }
  const std::string kind = names[given.code];
  return kind == "bool" ? kind : kind + std::to_string(given.bits);
}

/// Managed memory is reached from both sides and runs on the GPU.
bool is_cuda(int device_type) {
  return device_type == nb::device::cuda::value || device_type == nb::device::cuda_managed::value;
}

Device device_of(const std::string& name, nb::dlpack::device given) {
  if (is_cuda(given.device_type)) {
    return Device::cuda(given.device_id);
  }
  if (given.device_type != nb::device::cpu::value &&
      given.device_type != nb::device::cuda_host::value) {
    raise_invalid(name, "an array on DLPack device type " + std::to_string(given.device_type),
                  "arrays in host memory or on a CUDA device");
  }
  return Device::cpu();
}

[[noreturn]] void raise_no_array(const std::string& name, nb::handle object) {
  raise_invalid(name, nb::cast<std::string>(nb::str(object.type().attr("__name__"))),
                "an array (DLPack or a buffer) of a dtype that they can name");
}

/// A library refused to export one of its arrays, with a Python error set.
[[noreturn]] void raise_not_exported(const std::string& name) {
  nb::python_error error;
  const std::string why = nb::cast<std::string>(nb::str(error.value()));
  raise_invalid(name,
                "an array that its library does not export (" + why.substr(0, why.find('\n')) + ")",
                "an array in host memory or on a CUDA device");
}

/// The module of the package that knows the libraries of arrays.
nb::handle libraries() {
  static const nb::handle kModule = nb::module_::import_("rafter._arrays").release();
  return kModule;
}

/// What a library that cannot name a dtype calls it, for arrays that it exports as plain integers.
std::optional<nb::dlpack::dtype> dtype_named(nb::handle name) {
  using Code = nb::dlpack::dtype_code;
  if (name.is_none()) {
    return std::nullopt;
  }
  const std::string text = nb::cast<std::string>(name);
  const std::tuple<const char*, Code, std::uint8_t> known[] = {
      {"bfloat16", Code::Bfloat, 16},
      {"float8_e4m3fn", Code::Float8_E4M3FN, 8},
      {"float8_e5m2", Code::Float8_E5M2, 8}};
  for (const auto& [known_name, code, bits] : known) {
    if (text == known_name) {
      return nb::dlpack::dtype{static_cast<std::uint8_t>(code), bits, 1};
    }
  }
  return std::nullopt;
}

bool requires_grad(nb::handle object) {
  static const nb::handle kName = PyUnicode_InternFromString("requires_grad");
  return nb::getattr(object, kName, nb::none()).is(nb::handle(Py_True));
}

nb::handle without_gradient(const std::string& name, nb::handle object) {
  if (requires_grad(object)) {
    raise_invalid(name, "a tensor that requires grad",
                  "tensors without gradient (detach() them; rafter.torch has gradients)");
  }
  return object;
}

/// The interface of an object's type; that of the call's first array is looked up once, and that of
/// the last type which had one is remembered.
const ExchangeApi* api_of(nb::handle object, const Place& place) {
  PyTypeObject* const type = Py_TYPE(object.ptr());
  if (type == reinterpret_cast<PyTypeObject*>(place.api_type.ptr())) {
    return place.api;
  }
  static nb::handle last;  // owned, so that no other type comes to lie there
  static const ExchangeApi* last_api = nullptr;
  if (type == reinterpret_cast<PyTypeObject*>(last.ptr())) {
    return last_api;
  }
  const ExchangeApi* api = exchange_api_of(object.type());
  if (api != nullptr) {
    last.dec_ref();
    last = object.type().inc_ref();
    last_api = api;
  }
  return api;
}

}  // namespace

std::string text(const Device& device) {
  return device.kind == Device::Kind::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

nb::object tuple_of(std::span<const std::int64_t> values) {
  nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(values[i]));
  }
  return tuple;
}

void ArrayView::take(const std::string& name, const nb::dlpack::dltensor& tensor) {
  device = device_of(name, tensor.device);
  data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  dtype = tensor.dtype;
  if (tensor.ndim > 4) {
    raise_invalid(name, std::to_string(tensor.ndim) + " dims", "4 or fewer");
  }
  rank = tensor.ndim;
  std::int64_t contiguous = 1;
  bool is_empty = false;
  for (int i = 0; i < rank; ++i) {
    shape[static_cast<std::size_t>(i)] = tensor.shape[i];
    is_empty = is_empty || tensor.shape[i] == 0;
  }
  for (int i = rank; i-- > 0;) {
    const auto at = static_cast<std::size_t>(i);
    // Where a stride is never taken, libraries export what they like.
    const bool is_taken = tensor.strides != nullptr && !is_empty && shape[at] != 1;
    stride[at] = is_taken ? tensor.strides[i] : contiguous;
    contiguous *= std::max<std::int64_t>(shape[at], 1);
  }
}

void Array::read(const std::string& name, nb::handle object, const Place& place, Access access) {
  if (access == Access::read && object.is(place.array) && place.first.dtype.bits != 0) {
    static_cast<ArrayView&>(*this) = place.first;
    return;
  }
  const ExchangeApi* api = api_of(object, place);
  if (api == nullptr) {
    import(name, object, place, access);
    return;
  }
  if (access == Access::read && api->borrowed_of != nullptr) {
    nb::dlpack::dltensor tensor;
    if (api->borrowed_of(object.ptr(), &tensor) != 0) {
      raise_not_exported(name);
    }
    take(name, tensor);
    return;
  }
  ManagedTensor* managed = nullptr;
  if (api->managed_of(object.ptr(), &managed) != 0) {
    raise_not_exported(name);
  }
  managed_.reset(managed);
  if (access == Access::write && (managed->flags & kDlpackReadOnly) != 0) {
    raise_invalid(name, "a read-only array", "an array that can be written");
  }
  take(name, managed->tensor);
}

void Array::import(const std::string& name, nb::handle object, const Place& place, Access access) {
  if (object.is_none()) {
    raise_no_array(name, object);
  }
  const nb::object exported =
      libraries().attr("exported")(object, reinterpret_cast<std::uintptr_t>(place.stream.handle));
  const nb::object source = exported[0];
  if (access == Access::write) {
    nb::ndarray<> writable;
    if (!nb::try_cast(source, writable)) {
      nb::ndarray<nb::ro> readable;
      if (!nb::try_cast(source, readable)) {
        raise_no_array(name, object);
      }
      raise_invalid(name, "a read-only array", "an array that can be written");
    }
    imported_ = nb::ndarray<nb::ro>(writable);
  } else if (!nb::try_cast(source, imported_)) {
    raise_no_array(name, object);
  }
  if (imported_.ndim() > 4) {
    raise_invalid(name, std::to_string(imported_.ndim()) + " dims", "4 or fewer");
  }
  nb::dlpack::dltensor tensor;
  tensor.data = const_cast<void*>(imported_.data());
  tensor.device = {imported_.device_type(), imported_.device_id()};
  tensor.ndim = static_cast<std::int32_t>(imported_.ndim());
  tensor.dtype = dtype_named(exported[1]).value_or(imported_.dtype());
  std::array<std::int64_t, 4> sizes{}, steps{};
  for (std::size_t i = 0; i < imported_.ndim(); ++i) {
    sizes[i] = static_cast<std::int64_t>(imported_.shape(i));
    steps[i] = imported_.stride(i);
  }
  tensor.shape = sizes.data();
  tensor.strides = steps.data();
  take(name, tensor);
}

Array::Array(const std::string& name, nb::handle object, const Place& place, Access access) {
  read(name, object, place, access);
  if (device.kind != place.device.kind || device.index != place.device.index) {
    raise_invalid(name, "an array on " + text(device),
                  text(place.device) + ", where the first array is");
  }
}

std::int64_t ArrayView::size() const {
  std::int64_t size = 1;
  for (int i = 0; i < rank; ++i) {
    size *= shape[static_cast<std::size_t>(i)];
  }
  return size;
}

void Place::set_current_stream() {
  if (api->current_stream(nb::device::cuda::value, device.index, &stream.handle) != 0) {
    throw nb::python_error();
  }
}

bool lend(nb::handle array, const Place& place, bool may_require_grad, nb::dlpack::dltensor& out) {
  if (!array.type().is(place.api_type) || place.api->borrowed_of == nullptr ||
      (!may_require_grad && requires_grad(array))) {
    return false;
  }
  if (place.api->borrowed_of(array.ptr(), &out) != 0) {
    PyErr_Clear();
    return false;
  }
  return is_cuda(out.device.device_type) && out.ndim <= 4;
}

Place place_of(const std::string& name, nb::handle array, nb::handle stream) {
  Place place;
  place.array = array;
  place.api = api_of(array, place);
  place.api_type = array.type();
  if (!stream.is_none()) {
    place.stream.handle = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(stream));
  }
  Array first;
  if (place.api != nullptr) {
    first.read(name, array, place, Array::Access::read);
    place.device = first.device;
    if (place.api->borrowed_of != nullptr) {
      place.first = first;
    }
    if (place.is_cuda() && stream.is_none()) {
      place.set_current_stream();
    }
    return place;
  }
  const nb::object device = libraries().attr("device_of")(array);  // None: no DLPack
  if (device.is_none()) {
    return place;
  }
  place.device =
      device_of(name, {nb::cast<std::int32_t>(device[0]), nb::cast<std::int32_t>(device[1])});
  if (place.is_cuda() && stream.is_none()) {
    place.stream.handle = reinterpret_cast<void*>(
        nb::cast<std::uintptr_t>(libraries().attr("current_stream")(array)));
  }
  return place;
}

Tensor::Tensor(std::string name_, nb::handle object, const Place& place, Array::Access access,
               bool grad)
    : name(std::move(name_)),
      array(name, grad ? object : without_gradient(name, object), place, access) {
  const std::optional<DType> known = dtype_of(array.dtype);
  if (!known) {
    raise_invalid(name + ".dtype", dtype_text(array.dtype), "float32, float16, bfloat16");
  }
  dtype = *known;
}

void Tensor::swap_heads() {
  std::swap(array.shape[1], array.shape[2]);
  std::swap(array.stride[1], array.stride[2]);
}

TensorView Tensor::view(bool packed) const {
  const auto& [data, shape, stride, rank] =
      std::tie(array.data, array.shape, array.stride, array.rank);
  if ((rank != 4 && rank != 3) || (packed && rank == 4)) {
    raise_invalid(name, rank < 3 ? std::to_string(rank) + " dims" : "shape " + list_of(shape, rank),
                  packed ? "[total, heads, head_dim] (with cu_seqlens)"
                         : "4: [batch, seqlen, heads, head_dim], or 3");
  }
  TensorView view{.data = data, .dtype = dtype};
  if (rank == 4) {
    std::tie(view.batch, view.seqlen, view.heads, view.head_dim) =
        std::tie(shape[0], shape[1], shape[2], shape[3]);
    std::tie(view.stride_batch, view.stride_seqlen, view.stride_heads, view.stride_head_dim) =
        std::tie(stride[0], stride[1], stride[2], stride[3]);
    return view;
  }
  std::tie(packed ? view.seqlen : view.batch, view.heads, view.head_dim) =
      std::tie(shape[0], shape[1], shape[2]);
  std::tie(packed ? view.stride_seqlen : view.stride_batch, view.stride_heads,
           view.stride_head_dim) = std::tie(stride[0], stride[1], stride[2]);
  (packed ? view.batch : view.seqlen) = 1;
  (packed ? view.stride_batch : view.stride_seqlen) = shape[0] * stride[0];
  return view;
}

LseView Tensor::lse(bool packed) const {
  const auto& [shape, stride, rank] = std::tie(array.shape, array.stride, array.rank);
  if (dtype != DType::f32) {
    raise_invalid(name + ".dtype", to_string(dtype), "float32");
  }
  if (rank != 2 && (rank != 3 || packed)) {
    raise_invalid(name, "shape " + list_of(shape, rank),
                  packed ? "[heads, total]" : "[batch, heads, seqlen]");
  }
  LseView view{.data = static_cast<float*>(array.data)};
  if (rank == 3) {
    return {view.data, shape[0], shape[1], shape[2], stride[0], stride[1], stride[2]};
  }
  if (packed) {
    return {view.data, 1, shape[0], shape[1], shape[0] * stride[0], stride[0], stride[1]};
  }
  return {view.data, shape[0], shape[1], 1, stride[0], stride[1], 1};
}

TensorView Tensor::scale(const TensorView& keys) const {
  const auto& [shape, stride, rank] = std::tie(array.shape, array.stride, array.rank);
  TensorView view{.data = array.data,
                  .dtype = dtype,
                  .batch = keys.batch,
                  .seqlen = keys.seqlen,
                  .heads = keys.heads,
                  .head_dim = 1};
  if (rank == 1) {  // [heads]
    view.heads = shape[0];
    view.stride_heads = stride[0];
  } else if (rank == 2 && keys.batch == 1) {  // packed [total, heads]
    std::tie(view.seqlen, view.heads) = std::tie(shape[0], shape[1]);
    std::tie(view.stride_seqlen, view.stride_heads) = std::tie(stride[0], stride[1]);
    view.stride_batch = shape[0] * stride[0];
  } else if (rank == 3) {
    std::tie(view.batch, view.seqlen, view.heads) = std::tie(shape[0], shape[1], shape[2]);
    std::tie(view.stride_batch, view.stride_seqlen, view.stride_heads) =
        std::tie(stride[0], stride[1], stride[2]);
  } else {
    raise_invalid(name, "shape " + list_of(shape, rank),
                  "a scale per key and head (the shape of the keys without head_dim), or per head: "
                  "[heads_kv]");
  }
  return view;
}

Indices::Indices(const char* name, nb::handle object, int rank, const Place& place) {
  if (object.is_none()) {
    return;
  }
  array = Array(name, object, place, Array::Access::read);
  const nb::dlpack::dtype given = array.dtype;
  const bool is_int = given.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int);
  if (!is_int || given.lanes != 1 || (given.bits != 32 && given.bits != 64)) {
    raise_invalid(std::string(name) + ".dtype", dtype_text(given), "int32, int64");
  }
  if (array.rank != rank) {
    raise_invalid(name, std::to_string(array.rank) + " dims",
                  rank == 1 ? "1" : "2: [batch, pages per sequence]");
  }
  std::int64_t contiguous = 1;
  for (int i = rank; i-- > 0;) {
    const auto at = static_cast<std::size_t>(i);
    if (array.shape[at] > 1 && array.stride[at] != contiguous) {
      raise_invalid(name, "an array with gaps or of another order", "a contiguous array");
    }
    contiguous *= array.shape[at];
  }
  view = {.data = array.data,
          .dtype = given.bits == 64 ? DType::i64 : DType::i32,
          .size = array.size(),
          .cols = rank == 2 ? array.shape[1] : 0};
}

Bits::Bits(const char* name, nb::handle object, const Place& place) {
  if (object.is_none()) {
    return;
  }
  array = Array(name, object, place, Array::Access::read);
  const nb::dlpack::dtype given = array.dtype;
  const bool is_int = given.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int) ||
                      given.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt);
  if (!is_int || given.lanes != 1 || given.bits != 64) {
    raise_invalid(std::string(name) + ".dtype", dtype_text(given), "int64, uint64");
  }
  if (array.rank != 2 || (array.shape[1] > 1 && array.stride[1] != 1)) {
    raise_invalid(name,
                  "shape " + list_of(array.shape, array.rank) + ", strides " +
                      list_of(array.stride, array.rank),
                  "[batch, seqlen_q], the words of a sequence side by side");
  }
  view = {.data = static_cast<const std::uint64_t*>(array.data),
          .batch = array.shape[0],
          .seqlen = array.shape[1],
          .stride_batch = array.stride[0]};
}

Counts::Counts(const char* name, nb::handle object, const Place& place) {
  if (object.is_none()) {
    return;
  }
  array = Array(name, object, place, Array::Access::write);
  const nb::dlpack::dtype given = array.dtype;
  if (given.code != static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int) || given.bits != 32 ||
      given.lanes != 1) {
    raise_invalid(std::string(name) + ".dtype", dtype_text(given), "int32");
  }
  if (array.rank != 1 || (array.shape[0] > 1 && array.stride[0] != 1)) {
    raise_invalid(name,
                  "shape " + list_of(array.shape, array.rank) + ", strides " +
                      list_of(array.stride, array.rank),
                  "[batch], contiguous");
  }
  view = {static_cast<std::int32_t*>(array.data), array.shape[0]};
}

std::int64_t Indices::longest(std::int64_t most) const {
  std::int64_t longest = 0;
  for (std::int64_t i = 1; i < view.size; ++i) {
    std::int64_t length = 0;
    if (!__builtin_sub_overflow(view[i], view[i - 1], &length)) {
      longest = std::max(longest, std::min(length, most));
    }
  }
  return longest;
}

}  // namespace rafter::python
