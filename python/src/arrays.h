// Arrays of Python as the library's views: any object with DLPack or a buffer, without a copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <string>

#include "rafter/attention.h"

namespace rafter::python {

namespace nb = nanobind;

/// Raises the exception that a failed Status stands for: ValueError, NotImplementedError or
/// RuntimeError. Does nothing with one that is ok.
void raise(const Status& status);
template <typename T>
T value_or_raise(Result<T> result) {
  raise(result.status());
  return std::move(result).value();
}
[[noreturn]] void raise_invalid(std::string parameter, std::string given, std::string allowed);

/// A tensor argument: keeps the array alive and knows its name for errors.
struct Tensor {
  std::string name;
  nb::ndarray<nb::ro> array;
  DType dtype = DType::f32;
  int rank = 0;
  std::array<std::int64_t, 4> shape{}, stride{};  // the first `rank` of them; strides in elements

  /// `writable` asks for memory that may be written; `bits16_are_bf16` is for arrays whose library
  /// cannot name bf16 and which come as uint16.
  Tensor(std::string name, nb::handle array, bool writable, bool bits16_are_bf16);

  /// As [batch, seqlen, heads, head_dim]. A tensor of three dims is [total, heads, head_dim] with
  /// `packed`, else [batch, heads, head_dim] with one row per sequence.
  TensorView view(bool packed) const;
  /// lse [batch, heads, seqlen]; of two dims [heads, total] with `packed`, else [batch, heads].
  LseView lse(bool packed) const;
};

/// An index argument: lengths, offsets or a page table. None gives an empty view.
struct Indices {
  nb::ndarray<nb::ro> array;
  IndexView view = {};

  Indices(const char* name, nb::handle array, int rank);
  /// The largest difference between neighbours, within [0, most]: the longest of packed sequences.
  std::int64_t longest(std::int64_t most) const;
};

}  // namespace rafter::python
