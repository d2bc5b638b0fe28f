#include "torch_memory.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace rafter::python {
namespace {

/// Functions and objects of PyTorch, looked up once and owned.
struct Torch {
  nb::handle tensor, dtypes[3], on_cpu, on_cuda, current_device, take, give_back;

  explicit Torch(const nb::object& found) {
    tensor = nb::object(found[0]).release();
    for (std::size_t i = 0; i < std::size(dtypes); ++i) {
      dtypes[i] = nb::object(found[1][i]).release();
    }
    on_cpu = nb::object(found[2]).release();
    on_cuda = nb::object(found[3]).release();
    current_device = nb::object(found[4]).release();
    take = nb::object(found[5]).release();
    give_back = nb::object(found[6]).release();
  }
};

/// Null where the place's array is no torch.Tensor itself.
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

/// Whether the place's device is PyTorch's current one, where PyTorch allocates.
bool is_current(const Torch& torch, const Place& place) {
  if (!place.is_current) {
    place.is_current = nb::cast<int>(torch.current_device()) == place.device.index;
  }
  return *place.is_current;
}

/// What PyTorch is asked with, kept from call to call: one model asks for the same.
class Layout {
 public:
  /// (shape, strides, dtype)
  nb::handle arguments(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
                       nb::handle dtype) {
    if (!std::ranges::equal(shape, shape_) || !std::ranges::equal(strides, strides_)) {
      arguments_ = nb::make_tuple(tuple_of(shape), tuple_of(strides), dtype);
      shape_.assign(shape.begin(), shape.end());
      strides_.assign(strides.begin(), strides.end());
    }
    return arguments_;
  }

 private:
  std::vector<std::int64_t> shape_, strides_;
  nb::object arguments_;
};

}  // namespace

nb::object torch_empty(const Place& place, std::span<const std::int64_t> shape,
                       std::span<const std::int64_t> strides, TorchDtype dtype, ArrayView& view) {
  const Torch* torch = torch_of(place);
  if (torch == nullptr || !place.is_current.value_or(true)) {
    return {};
  }
  static Layout* const layouts = new Layout[std::size(torch->dtypes)];  // not freed, as above
  const auto i = static_cast<std::size_t>(dtype);
  const nb::handle make = place.is_cuda() ? torch->on_cuda : torch->on_cpu;
  const nb::object asked = nb::borrow(layouts[i].arguments(shape, strides, torch->dtypes[i]));
  nb::object made = nb::steal(PyObject_Call(make.ptr(), asked.ptr(), nullptr));
  if (!made.is_valid()) {
    throw nb::python_error();
  }
  nb::dlpack::dltensor what;
  if (!place.is_cuda()) {
    return made;
  }
  if (!lend(made, place, true, what)) {
    return {};
  }
  view.take({}, what);
  place.is_current = view.device.index == place.device.index;  // it tells sooner than PyTorch does
  return *place.is_current ? made : nb::object();
}

TorchBytes::TorchBytes(const Place& place, std::int64_t bytes) {
  const Torch* torch = place.is_cuda() ? torch_of(place) : nullptr;
  if (torch != nullptr && is_current(*torch, place)) {
    address_ = torch->take(bytes, reinterpret_cast<std::uintptr_t>(place.stream.handle));
    give_back_ = torch->give_back;
  }
}

TorchBytes::~TorchBytes() {
  if (address_.is_valid()) {  // an exception may be under way: one of this is only reported
    const nb::object done =
        nb::steal(PyObject_CallFunctionObjArgs(give_back_.ptr(), address_.ptr(), nullptr));
    if (!done.is_valid()) {
      PyErr_WriteUnraisable(give_back_.ptr());
    }
  }
}

void* TorchBytes::data() const {
  return address_.is_valid() ? reinterpret_cast<void*>(nb::cast<std::uintptr_t>(address_))
                             : nullptr;
}

}  // namespace rafter::python
