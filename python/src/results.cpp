#include "results.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "errors.h"
#include "torch_memory.h"

namespace rafter::python {
namespace {

constexpr std::size_t kAlignment = 64;

void* allocate_host(std::int64_t bytes) {
  const std::size_t rounded = (static_cast<std::size_t>(bytes) / kAlignment + 1) * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, rounded);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

DeviceMemory allocate_device(const Device& device, std::int64_t bytes) {
  return value_or_raise(DeviceMemory::allocate(device, bytes));
}

const char* name_of(DType dtype) {
  return dtype == DType::f32 ? "float32" : dtype == DType::f16 ? "float16" : "bfloat16";
}

nb::dlpack::dtype dlpack_dtype(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  const Code code = dtype == DType::bf16 ? Code::Bfloat : Code::Float;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits_of(dtype)), 1};
}

/// Contiguous memory of our own, for libraries whose arrays cannot be written from outside.
nb::object own_array(const Device& device, std::span<const std::int64_t> shape, DType dtype,
                     ResultArray::Fill fill) {
  std::int64_t bytes = bits_of(dtype) / 8;
  std::vector<std::size_t> sizes;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) {
      throw std::bad_alloc();
    }
    sizes.push_back(static_cast<std::size_t>(size));
  }
  const auto array = [&](void* memory, int device_type, const nb::capsule& owner) {
    return nb::cast(nb::ndarray<nb::array_api>(memory, sizes.size(), sizes.data(), owner, nullptr,
                                               dlpack_dtype(dtype), device_type, device.index));
  };
  if (device.kind == Device::Kind::cpu) {
    void* memory = allocate_host(bytes);
    if (fill == ResultArray::Fill::zero) {
      std::memset(memory, 0, static_cast<std::size_t>(bytes));
    }
    return array(memory, nb::device::cpu::value,
                 nb::capsule(memory, [](void* p) noexcept { std::free(p); }));
  }
  auto memory = std::make_unique<DeviceMemory>(allocate_device(device, bytes));
  void* data = memory->data();
  if (fill == ResultArray::Fill::zero) {
    raise(memory->fill(0));
  }
  const nb::capsule owner(memory.release(),
                          [](void* p) noexcept { delete static_cast<DeviceMemory*>(p); });
  return array(data, nb::device::cuda::value, owner);
}

/// Carries the message of a library's allocator out of it.
void keep_error(void* context, const char* kind, const char* message) {
  *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
}

ManagedTensor* allocate_managed(const Place& place, std::int64_t bytes) {
  std::int64_t shape[] = {bytes};
  nb::dlpack::dltensor prototype;
  prototype.device = {nb::device::cuda::value, place.device.index};
  prototype.ndim = 1;
  prototype.dtype = {static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt), 8, 1};
  prototype.shape = shape;
  ManagedTensor* managed = nullptr;
  std::string error;
  if (place.api->allocate(&prototype, &managed, &error, &keep_error) != 0) {
    raise(Status::device_error("workspace of " + std::to_string(bytes) + " bytes", error));
  }
  return managed;
}

/// torch_empty of a contiguous [batch, seqlen, heads, head_dim] or less, seen with heads first or
/// as it is.
nb::object quick_empty(const Place& place, std::span<const std::int64_t> shape, DType dtype,
                       bool heads_first, ArrayView& view) {
  std::array<std::int64_t, 4> sizes{}, strides{};
  std::int64_t contiguous = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    sizes[i] = shape[i];
    strides[i] = contiguous;
    contiguous *= std::max<std::int64_t>(shape[i], 1);
  }
  if (heads_first) {
    std::swap(sizes[1], sizes[2]);
    std::swap(strides[1], strides[2]);
  }
  const TorchDtype torch_dtype = dtype == DType::f32   ? TorchDtype::f32
                                 : dtype == DType::f16 ? TorchDtype::f16
                                                       : TorchDtype::bf16;
  return torch_empty(place, {sizes.data(), shape.size()}, {strides.data(), shape.size()},
                     torch_dtype, view);
}

}  // namespace

ResultArray::ResultArray(const char* name, nb::handle out, const Place& place,
                         std::span<const std::int64_t> shape, DType dtype, Fill fill,
                         bool heads_first) {
  const bool made = out.is_none();
  if (made) {
    make(place, shape, dtype, fill, heads_first);
  } else {
    array_ = nb::borrow(out);
  }
  if (tensor_.array.dtype.bits == 0) {
    // What was made here can be written and wants no gradient: no need to ask, which takes longer.
    tensor_ = Tensor(name, array_, place, made ? Array::Access::read : Array::Access::write, made);
  } else {
    tensor_.name = name;
    tensor_.dtype = dtype;
  }
  if (heads_first) {
    tensor_.swap_heads();
  }
}

void ResultArray::make(const Place& place, std::span<const std::int64_t> shape, DType dtype,
                       Fill fill, bool heads_first) {
  if (fill == Fill::none) {
    array_ = quick_empty(place, shape, dtype, heads_first, tensor_.array);
    if (array_.is_valid()) {
      return;
    }
  }
  static const nb::handle kEmpty =
      nb::object(nb::module_::import_("rafter._arrays").attr("empty")).release();
  array_ = kEmpty(place.array, tuple_of(shape), name_of(dtype), fill == Fill::zero);
  if (array_.is_none()) {
    array_ = own_array(place.device, shape, dtype, fill);
    adopt_ = true;
  } else if (heads_first) {
    array_ = array_.attr("transpose")(1, 2);  // only rafter.torch asks for it
  }
}

nb::object ResultArray::finish(const Place& place) const {
  if (!adopt_) {
    return array_;
  }
  if (place.is_cuda()) {  // whoever takes our memory knows no stream of ours
    Status done;
    {
      nb::gil_scoped_release released;
      done = synchronize(place.device, place.stream);
    }
    raise(done);
  }
  return nb::module_::import_("rafter._arrays").attr("adopted")(array_, place.array);
}

void Scratch::Delete::operator()(void* memory) const { std::free(memory); }

Scratch::Scratch(const Place& place, std::int64_t bytes) : workspace_{nullptr, bytes} {
  if (bytes == 0) {
    return;
  }
  if (!place.is_cuda()) {
    host_.reset(allocate_host(bytes));
    workspace_.data = host_.get();
    return;
  }
  kept_.emplace(place, bytes);
  workspace_.data = kept_->data();
  if (workspace_.data != nullptr) {
    return;
  }
  torch_.emplace(place, bytes);
  workspace_.data = torch_->data();
  if (workspace_.data != nullptr) {
    return;
  }
  if (place.api != nullptr) {
    managed_.reset(allocate_managed(place, bytes));
    workspace_.data = static_cast<char*>(managed_->tensor.data) + managed_->tensor.byte_offset;
  } else {
    array_ = nb::module_::import_("rafter._arrays").attr("empty_bytes")(place.array, bytes);
    if (array_.is_none()) {
      device_ = allocate_device(place.device, bytes);
      workspace_.data = device_->data();
    } else {
      workspace_.data = Array("workspace", array_, place, Array::Access::write).data;
    }
  }
}

}  // namespace rafter::python
