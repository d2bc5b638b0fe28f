// Arrays where a device can reach them: on the CPU the array itself, on a CUDA device a copy in its
// memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/array.h"
#include "rafter/attention.h"
#include "rafter/measure.h"

namespace rafter::cli {

/// --device cpu|cuda. Ends the command with no_hardware where the device is not here.
Device required_device(const std::string& word);
/// Ends the command with no_hardware, and why, where this machine cannot run a CUDA kernel.
void require_cuda();

class Resident {
 public:
  /// Elements are anything. Errors: memory that is not there.
  static Result<Resident> empty(const Device& device, DType dtype, std::vector<std::int64_t> shape,
                                const std::string& label);
  static Result<Resident> copy_of(const Device& device, const Array& from);
  /// CUDA: random values made on the device (f32, bf16, f16).
  static Result<Resident> random(const Device& device, DType dtype, std::vector<std::int64_t> shape,
                                 std::uint32_t seed);

  void* data() const { return memory_ ? memory_->data() : array_.data.get(); }
  std::int64_t bytes() const { return array_.bytes(); }
  /// As view_of() of an array.
  TensorView view() const;
  IndexView indices() const;
  /// The elements on the host; on the CPU the array itself.
  Result<Array> fetch() const;

 private:
  Array array_;  // CUDA: dtype and shape alone
  std::optional<DeviceMemory> memory_;
};

}  // namespace rafter::cli
