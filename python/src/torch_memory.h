// Tensors of PyTorch without its dispatcher and its parsing of arguments, which take longer than
// the allocation.
#pragma once

#include <cstdint>
#include <span>

#include "arrays.h"

namespace rafter::python {

/// The dtypes that quick_torch() in rafter/_arrays.py lists, in that order.
enum class TorchDtype : std::uint8_t { f32, f16, bf16 };

/// An uninitialised tensor on the device of the place and of its library's current stream, with
/// strides in elements; an invalid object where the place's array is no plain tensor, its device is
/// not PyTorch's current one, or this PyTorch has no such function. On a GPU `view` becomes what
/// it is.
nb::object torch_empty(const Place& place, std::span<const std::int64_t> shape,
                       std::span<const std::int64_t> strides, TorchDtype dtype, ArrayView& view);

/// Memory of PyTorch's allocator for work on the stream of the place, which goes back behind that
/// work. Has no data where torch_empty would have no tensor, and in host memory.
class TorchBytes {
 public:
  TorchBytes(const Place& place, std::int64_t bytes);
  ~TorchBytes();
  TorchBytes(const TorchBytes&) = delete;
  TorchBytes& operator=(const TorchBytes&) = delete;
  void* data() const;

 private:
  nb::object address_;    // the integer that PyTorch gave, or none
  nb::handle give_back_;  // the function that takes it
};

}  // namespace rafter::python
