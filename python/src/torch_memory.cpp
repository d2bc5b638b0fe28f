#include "torch_memory.h"

namespace rafter::python {
namespace {

/// Functions and objects of PyTorch, looked up once; all invalid where it lacks one.
struct Torch {
  nb::object tensor, dtypes, on_cpu, on_cuda, current_device;

  explicit Torch(const nb::object& found) {
    if (!found.is_none()) {
      tensor = found[0];
      dtypes = found[1];
      on_cpu = found[2];
      on_cuda = found[3];
      current_device = found[4];
    }
  }
};

/// Null for arrays that are no torch.Tensor itself.
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
  return place.api_type.ptr() == torch->tensor.ptr() ? torch : nullptr;
}

nb::object tuple_of(std::span<const std::int64_t> values) {
  nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(values[i]));
  }
  return tuple;
}

}  // namespace

nb::object torch_empty(const Place& place, std::span<const std::int64_t> shape,
                       std::span<const std::int64_t> strides, TorchDtype dtype) {
  const Torch* torch = torch_of(place);
  if (torch == nullptr) {
    return {};
  }
  if (place.is_cuda() && nb::cast<int>(torch->current_device()) != place.device.index) {
    return {};
  }
  return (place.is_cuda() ? torch->on_cuda : torch->on_cpu)(
      tuple_of(shape), tuple_of(strides), torch->dtypes[static_cast<std::size_t>(dtype)]);
}

}  // namespace rafter::python
