// Tensors of PyTorch without its dispatcher and its parsing of arguments, which take longer than
// the allocation.
#pragma once

#include <cstdint>
#include <span>

#include "arrays.h"

namespace rafter::python {

/// The dtypes that quick_torch() in rafter/_arrays.py lists, in that order.
enum class TorchDtype : std::uint8_t { f32, f16, bf16, uint8 };

/// An uninitialised tensor on the device of the place and of its library's current stream, with
/// strides in elements; an invalid object where the place's array is no plain tensor, its device is
/// not PyTorch's current one, or this PyTorch has no such function.
nb::object torch_empty(const Place& place, std::span<const std::int64_t> shape,
                       std::span<const std::int64_t> strides, TorchDtype dtype);

}  // namespace rafter::python
