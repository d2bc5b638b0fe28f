// The one way to launch a kernel, and what the host must know of the device.
#pragma once

#include <cstdint>
#include <string>

#include "rafter/status.h"

namespace rafter::cuda {

struct LaunchShape {
  unsigned blocks = 0;
  unsigned threads = 0;
  unsigned shared_bytes = 0;  // dynamic
  void* stream = nullptr;     // cudaStream_t
};

/// Queues kernel(arguments…). `arguments` points to pointers to the arguments, as cudaLaunchKernel
/// takes them. Errors: device_error with the runtime's name and text of the failure.
Status launch(const void* kernel, const LaunchShape& shape, void** arguments);

/// Sets `bytes` of device memory to 0 on the stream.
Status clear(void* data, std::int64_t bytes, void* stream);

/// Makes a device the calling thread's current one for as long as it lives.
class DeviceScope {
 public:
  explicit DeviceScope(int index);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  /// device_error when there is no such device.
  const Status& status() const { return status_; }

 private:
  Status status_;
  int before_ = 0;
  bool changed_ = false;
};

/// Streaming multiprocessors of the current device.
Result<int> sm_count();

/// Memory of a device. Asked of the runtime once a device.
Result<std::int64_t> memory_bytes(int index);

/// "" when there is such a device; else "no CUDA device (…)", "no CUDA device 3 (there are 2)".
std::string why_no_device(int index);
/// "" when that device is of compute capability 9.0, else why it is not: as why_no_device(), or
/// "the device is of compute capability 8.0, not 9.0".
std::string why_not_sm90(int index);

/// The runtime's answer as a Status: device_error for `what`, with its name and text.
Status status_of(int cuda_error, const char* what);

}  // namespace rafter::cuda
