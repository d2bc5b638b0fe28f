#include "arrays.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>

namespace rafter::python {
namespace {

std::string text(const std::array<std::int64_t, 4>& sizes, int rank) {
  std::string out = "[";
  for (int i = 0; i < rank; ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(sizes[static_cast<std::size_t>(i)]);
  }
  return out + "]";
}

std::optional<DType> dtype_of(nb::dlpack::dtype given, bool bits16_are_bf16) {
  using Code = nb::dlpack::dtype_code;
  if (given.lanes != 1) {
    return std::nullopt;
  }
  const auto is = [&](Code code, int bits) {
    return given.code == static_cast<std::uint8_t>(code) && given.bits == bits;
  };
  if (is(Code::Float, 32)) {
    return DType::f32;
  }
  if (is(Code::Float, 16)) {
    return DType::f16;
  }
  if (is(Code::Bfloat, 16) || (bits16_are_bf16 && is(Code::UInt, 16))) {
    return DType::bf16;
  }
  if (is(Code::Float8_E4M3FN, 8)) {
    return DType::e4m3;
  }
  if (is(Code::Float8_E5M2, 8)) {
    return DType::e5m2;
  }
  if (is(Code::Int, 8)) {
    return DType::int8;
  }
  return std::nullopt;
}

std::string dtype_text(nb::dlpack::dtype given) {
  const char* names[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string kind = given.code < std::size(names)
                               ? names[given.code]
                               : "dtype code " + std::to_string(given.code) + ", bits ";
  return kind == "bool" ? kind : kind + std::to_string(given.bits);
}

/// The array behind an object; a ValueError names the argument where there is none.
nb::ndarray<nb::ro> import(const std::string& name, nb::handle object, bool writable) {
  const auto type_name = [&] {
    return nb::cast<std::string>(nb::str(object.type().attr("__name__")));
  };
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(object, array)) {
    raise_invalid(name, type_name(), "an array (DLPack or a buffer) of a dtype that they can name");
  }
  if (writable) {
    nb::ndarray<> mutable_array;
    if (!nb::try_cast(object, mutable_array)) {
      raise_invalid(name, "a read-only array", "an array that can be written");
    }
  }
  if (array.device_type() == nb::device::cuda::value) {
    raise(Status::unsupported(name, "a CUDA array",
                              "the Python package runs arrays in host memory; the C++ and C APIs "
                              "run on GPUs"));
  }
  if (array.device_type() != nb::device::cpu::value &&
      array.device_type() != nb::device::cuda_host::value) {
    raise_invalid(name, "an array on DLPack device type " + std::to_string(array.device_type()),
                  "arrays in host memory");
  }
  return array;
}

}  // namespace

void raise_invalid(std::string parameter, std::string given, std::string allowed) {
  throw nb::value_error(
      Status::invalid_argument(std::move(parameter), std::move(given), std::move(allowed))
          .message()
          .c_str());
}

void raise(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return;
    case StatusCode::kInvalidArgument:
      throw nb::value_error(status.message().c_str());
    case StatusCode::kUnsupported:
      PyErr_SetString(PyExc_NotImplementedError, status.message().c_str());
      throw nb::python_error();
    case StatusCode::kIoError:
      PyErr_SetString(PyExc_OSError, status.message().c_str());
      throw nb::python_error();
    case StatusCode::kDeviceError:
      break;
  }
  PyErr_SetString(PyExc_RuntimeError, status.message().c_str());
  throw nb::python_error();
}

Tensor::Tensor(std::string name_, nb::handle object, bool writable, bool bits16_are_bf16)
    : name(std::move(name_)), array(import(name, object, writable)) {
  const std::optional<DType> known = dtype_of(array.dtype(), bits16_are_bf16);
  if (!known) {
    raise_invalid(name + ".dtype", dtype_text(array.dtype()), "float32, float16, bfloat16");
  }
  dtype = *known;
  if (array.ndim() < 2 || array.ndim() > 4) {
    raise_invalid(name, std::to_string(array.ndim()) + " dims",
                  "4: [batch, seqlen, heads, head_dim], or 3");
  }
  rank = static_cast<int>(array.ndim());
  for (std::size_t i = 0; i < array.ndim(); ++i) {
    shape[i] = static_cast<std::int64_t>(array.shape(i));
    stride[i] = array.stride(i);
  }
  // Where a stride is never taken, libraries export what they like.
  std::int64_t contiguous = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.size() == 0 || shape[i] == 1) {
      stride[i] = contiguous;
    }
    contiguous *= std::max<std::int64_t>(shape[i], 1);
  }
}

TensorView Tensor::view(bool packed) const {
  if (rank != 4 && rank != 3) {
    raise_invalid(name, "shape " + text(shape, rank),
                  packed ? "[total, heads, head_dim]" : "[batch, seqlen, heads, head_dim]");
  }
  if (packed && rank == 4) {
    raise_invalid(name, "shape " + text(shape, rank), "[total, heads, head_dim] (with cu_seqlens)");
  }
  TensorView view{.data = const_cast<void*>(array.data()), .dtype = dtype};
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
  if (dtype != DType::f32) {
    raise_invalid(name + ".dtype", to_string(dtype), "float32");
  }
  if (rank == 4 || (packed && rank != 2)) {
    raise_invalid(name, "shape " + text(shape, rank),
                  packed ? "[heads, total]" : "[batch, heads, seqlen]");
  }
  LseView view{.data = static_cast<float*>(const_cast<void*>(array.data()))};
  if (rank == 3) {
    return {view.data, shape[0], shape[1], shape[2], stride[0], stride[1], stride[2]};
  }
  if (packed) {
    return {view.data, 1, shape[0], shape[1], shape[0] * stride[0], stride[0], stride[1]};
  }
  return {view.data, shape[0], shape[1], 1, stride[0], stride[1], 1};
}

Indices::Indices(const char* name, nb::handle object, int rank) {
  if (object.is_none()) {
    return;
  }
  array = import(name, object, false);
  const nb::dlpack::dtype given = array.dtype();
  const bool is_int = given.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int);
  if (!is_int || given.lanes != 1 || (given.bits != 32 && given.bits != 64)) {
    raise_invalid(std::string(name) + ".dtype", dtype_text(given), "int32, int64");
  }
  if (static_cast<int>(array.ndim()) != rank) {
    raise_invalid(name, std::to_string(array.ndim()) + " dims",
                  rank == 1 ? "1" : "2: [batch, pages per sequence]");
  }
  std::int64_t contiguous = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) > 1 && array.stride(i) != contiguous) {
      raise_invalid(name, "an array with gaps or of another order", "a contiguous array");
    }
    contiguous *= static_cast<std::int64_t>(array.shape(i));
  }
  view = {.data = array.data(),
          .dtype = given.bits == 64 ? DType::i64 : DType::i32,
          .size = static_cast<std::int64_t>(array.size()),
          .cols = rank == 2 ? static_cast<std::int64_t>(array.shape(1)) : 0};
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
