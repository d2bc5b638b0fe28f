// The one way to launch a kernel, and what the host must know of the device.
#pragma once

#include <cstdint>

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

/// Streaming multiprocessors of the current device.
Result<int> sm_count();

/// "" when the current device is of compute capability 9.0, else why it is not: "no CUDA device
/// (…)", "the device is of compute capability 8.0, not 9.0".
std::string why_not_sm90();

}  // namespace rafter::cuda
