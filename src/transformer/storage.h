// Memory of a model where its device reaches it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>

#include "rafter/device.h"
#include "rafter/measure.h"
#include "rafter/status.h"

namespace rafter::transformer {

/// Bytes on a device; copies share them.
class Storage {
 public:
  Storage() = default;
  /// The contents are anything. Errors: device_error with what was asked for.
  static Result<Storage> allocate(const Device& device, std::int64_t bytes);

  void* data() const { return device_ ? device_->data() : host_.get(); }
  std::int64_t bytes() const { return bytes_; }
  explicit operator bool() const { return data() != nullptr; }
  /// Each waits until it is done.
  Status upload(const void* from, std::int64_t bytes) const;
  Status download(void* to, std::int64_t bytes) const;

 private:
  std::shared_ptr<std::byte> host_;
  std::optional<DeviceMemory> device_;
  std::int64_t bytes_ = 0;
};

}  // namespace rafter::transformer
