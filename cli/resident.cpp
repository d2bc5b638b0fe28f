#include "cli/resident.h"

#include <fmt/format.h>

#include "cli/failure.h"
#include "cli/qkv.h"
#include "rafter/kernels.h"

namespace rafter::cli {

void require_cuda() {
  std::string reason = "this build has no CUDA kernel";
  for (const KernelInfo& kernel : list_kernels()) {
    if (kernel.device == Device::Kind::cuda) {
      if (kernel.machine_has) {
        return;
      }
      reason = kernel.machine_reason;
    }
  }
  fail(Exit::no_hardware, "--device cuda", reason);
}

Device required_device(const std::string& word) {
  if (word != "cuda") {
    return Device::cpu();
  }
  require_cuda();
  return Device::cuda(0);
}

Result<Resident> Resident::empty(const Device& device, DType dtype, std::vector<std::int64_t> shape,
                                 const std::string& label) {
  Resident made;
  if (device.kind == Device::Kind::cpu) {
    Result<Array> array = allocate_array(dtype, std::move(shape), label);
    if (!array) {
      return array.status();
    }
    made.array_ = *std::move(array);
    return made;
  }
  const Result<std::int64_t> bytes = array_bytes(shape, bits_of(dtype), label);
  if (!bytes) {
    return bytes.status();
  }
  made.array_ = {dtype, std::move(shape), nullptr};
  Result<DeviceMemory> memory = DeviceMemory::allocate(device, made.array_.bytes());
  if (!memory) {
    const Status& status = memory.status();
    return Status(status.code(), fmt::format("{} ({})", label, status.parameter()), status.given(),
                  status.allowed());
  }
  made.memory_ = *std::move(memory);
  return made;
}

Result<Resident> Resident::copy_of(const Device& device, const Array& from) {
  if (device.kind == Device::Kind::cpu) {
    Resident made;
    made.array_ = from;
    return made;
  }
  Result<Resident> made = empty(device, from.dtype, from.shape, "a copy on the device");
  if (!made) {
    return made;
  }
  if (Status status = made->memory_->upload(from.data.get(), from.bytes()); !status) {
    return status;
  }
  return made;
}

Result<Resident> Resident::random(const Device& device, DType dtype,
                                  std::vector<std::int64_t> shape, std::uint32_t seed) {
  Result<Resident> made = empty(device, dtype, std::move(shape), "random data");
  if (!made) {
    return made;
  }
  if (Status status = made->memory_->fill_random(dtype, seed); !status) {
    return status;
  }
  return made;
}

TensorView Resident::view() const {
  TensorView view = view_of(array_);
  view.data = data();
  return view;
}

IndexView Resident::indices() const {
  return {.data = data(),
          .dtype = array_.dtype,
          .size = array_.elements(),
          .cols = array_.shape.size() == 2 ? array_.shape[1] : 0};
}

Result<Array> Resident::fetch() const {
  if (!memory_) {
    return array_;
  }
  Result<Array> array = allocate_array(array_.dtype, array_.shape, "a copy of the device's");
  if (!array) {
    return array;
  }
  if (Status status = memory_->download(array->data.get(), array->bytes()); !status) {
    return status;
  }
  return array;
}

}  // namespace rafter::cli
