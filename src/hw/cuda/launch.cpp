#include "hw/cuda/launch.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

namespace rafter::cuda {
namespace {

Status to_status(cudaError_t code, const char* what) {
  if (code == cudaSuccess) {
    return Status::ok();
  }
  return Status::device_error(
      what, fmt::format("{} ({})", cudaGetErrorName(code), cudaGetErrorString(code)));
}

Result<int> attribute(cudaDeviceAttr which, const char* name) {
  int device = 0;
  int value = 0;
  if (Status status = to_status(cudaGetDevice(&device), "current device"); !status) {
    return status;
  }
  if (Status status = to_status(cudaDeviceGetAttribute(&value, which, device), name); !status) {
    return status;
  }
  return value;
}

}  // namespace

Status launch(const void* kernel, const LaunchShape& shape, void** arguments) {
  if (shape.blocks == 0) {
    return Status::ok();
  }
  if (shape.shared_bytes > 48 * 1024) {  // more than that must be asked for
    Status status =
        to_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(shape.shared_bytes)),
                  "shared memory of a kernel");
    if (!status) {
      return status;
    }
  }
  return to_status(cudaLaunchKernel(kernel, dim3(shape.blocks), dim3(shape.threads), arguments,
                                    shape.shared_bytes, static_cast<cudaStream_t>(shape.stream)),
                   "launch");
}

Status clear(void* data, std::int64_t bytes, void* stream) {
  return to_status(
      cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(stream)),
      "clearing the workspace");
}

Result<int> sm_count() { return attribute(cudaDevAttrMultiProcessorCount, "sm count"); }

std::string why_not_sm90() {
  int count = 0;
  if (const cudaError_t code = cudaGetDeviceCount(&count); code != cudaSuccess || count == 0) {
    const char* text = code != cudaSuccess ? cudaGetErrorString(code) : "none is visible";
    (void)cudaGetLastError();  // the failure is reported here, not to the next caller
    return fmt::format("no CUDA device ({})", text);
  }
  const Result<int> major = attribute(cudaDevAttrComputeCapabilityMajor, "compute capability");
  const Result<int> minor = attribute(cudaDevAttrComputeCapabilityMinor, "compute capability");
  if (!major || !minor) {
    return (!major ? major : minor).status().message();
  }
  if (*major != 9 || *minor != 0) {
    return fmt::format("the device is of compute capability {}.{}, not 9.0", *major, *minor);
  }
  return {};
}

}  // namespace rafter::cuda
