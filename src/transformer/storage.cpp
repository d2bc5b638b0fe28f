#include "transformer/storage.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace rafter::transformer {

Result<Storage> Storage::allocate(const Device& device, std::int64_t bytes) {
  Storage made;
  made.bytes_ = bytes;
  if (device.kind == Device::Kind::cuda) {
    Result<DeviceMemory> memory = DeviceMemory::allocate(device, bytes);
    if (!memory) {
      return memory.status();
    }
    made.device_ = *std::move(memory);
    return made;
  }
  constexpr std::align_val_t kAlign{64};
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(1, bytes));
  auto* const memory = static_cast<std::byte*>(::operator new(size, kAlign, std::nothrow));
  if (memory == nullptr) {
    return Status::device_error(fmt::format("{} bytes of memory", bytes), "there is not as much");
  }
  made.host_ = {memory, [](std::byte* owned) { ::operator delete (owned, std::align_val_t{64}); }};
  return made;
}

Status Storage::upload(const void* from, std::int64_t bytes) const {
  if (device_) {
    return device_->upload(from, bytes);
  }
  if (bytes > 0) {
    std::memcpy(host_.get(), from, static_cast<std::size_t>(bytes));
  }
  return Status::ok();
}

Status Storage::download(void* to, std::int64_t bytes) const {
  if (device_) {
    return device_->download(to, bytes);
  }
  if (bytes > 0) {
    std::memcpy(to, host_.get(), static_cast<std::size_t>(bytes));
  }
  return Status::ok();
}

}  // namespace rafter::transformer
