#include "torch_memory.h"

#include <iterator>

namespace rafter::python {
namespace {

/// Functions and objects of PyTorch, looked up once and owned.
struct Torch {
  nb::handle tensor, dtypes[4], on_cpu, on_cuda, current_device;

  explicit Torch(const nb::object& found) {
    tensor = nb::object(found[0]).release();
    for (std::size_t i = 0; i < std::size(dtypes); ++i) {
      dtypes[i] = nb::object(found[1][i]).release();
    }
    on_cpu = nb::object(found[2]).release();
    on_cuda = nb::object(found[3]).release();
    current_device = nb::object(found[4]).release();
  }
};

/// Null for arrays that are no torch.Tensor itself, and where PyTorch's current device is another.
const Torch* torch_of(const Place& place) {
  static const Torch* torch = nullptr;  // not freed: the interpreter is gone by then
  if (place.api == nullptr) {
    return nullptr;
  }
  if (torch == nullptr) {
    const nb::object found =
        nb::module_::import_("rafter._arrays").attr("quick_torch")(place.array);
    if (found.is_none()) {
      return nullptr;
    }
    torch = new Torch(found);
  }
  if (place.api_type.ptr() != torch->tensor.ptr()) {
    return nullptr;
  }
  const bool here =
      !place.is_cuda() || nb::cast<int>(torch->current_device()) == place.device.index;
  return here ? torch : nullptr;
}

}  // namespace

nb::object torch_empty(const Place& place, std::span<const std::int64_t> shape,
                       std::span<const std::int64_t> strides, TorchDtype dtype) {
  const Torch* torch = torch_of(place);
  if (torch == nullptr) {
    return {};
  }
  return (place.is_cuda() ? torch->on_cuda : torch->on_cpu)(
      tuple_of(shape), tuple_of(strides), torch->dtypes[static_cast<std::size_t>(dtype)]);
}

}  // namespace rafter::python
