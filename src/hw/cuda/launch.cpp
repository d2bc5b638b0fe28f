#include "hw/cuda/launch.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <map>
#include <mutex>

#include "hw/cuda/cluster.h"
#include "hw/cuda/early.h"

namespace rafter::cuda {
namespace {

Status to_status(cudaError_t code, const char* what) { return status_of(code, what); }

Result<int> attribute(cudaDeviceAttr which, const char* name, int device) {
  int value = 0;
  if (Status status = to_status(cudaDeviceGetAttribute(&value, which, device), name); !status) {
    return status;
  }
  return value;
}

}  // namespace

Status status_of(int cuda_error, const char* what) {
  const auto code = static_cast<cudaError_t>(cuda_error);
  if (code == cudaSuccess) {
    return Status::ok();
  }
  (void)cudaGetLastError();  // the failure is reported here, not to the next caller
  return Status::device_error(
      what, fmt::format("{} ({})", cudaGetErrorName(code), cudaGetErrorString(code)));
}

DeviceScope::DeviceScope(int index) {
  status_ = to_status(cudaGetDevice(&before_), "current device");
  if (status_ && before_ != index) {
    status_ = to_status(cudaSetDevice(index), "device");
    changed_ = status_.is_ok();
  }
}

DeviceScope::~DeviceScope() {
  if (changed_) {
    (void)cudaSetDevice(before_);
  }
}

namespace {

Status launch_with(const void* kernel, const LaunchShape& shape, void** arguments, bool early,
                   unsigned in_cluster = 0) {
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
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (early) {
    cudaLaunchAttribute& overlaps = attributes[count++];
    overlaps.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlaps.val.programmaticStreamSerializationAllowed = 1;
  }
  if (in_cluster > 0) {
    cudaLaunchAttribute& cluster = attributes[count++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = in_cluster;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(shape.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  return to_status(cudaLaunchKernelExC(&config, kernel, arguments), "launch");
}

}  // namespace

Status launch(const void* kernel, const LaunchShape& shape, void** arguments) {
  return launch_with(kernel, shape, arguments, false);
}

Status launch_early(const void* kernel, const LaunchShape& shape, void** arguments) {
  return launch_with(kernel, shape, arguments, true);
}

Status launch_in_clusters(const void* kernel, const LaunchShape& shape, unsigned cluster,
                          void** arguments) {
  return launch_with(kernel, shape, arguments, true, cluster);
}

Status clear(void* data, std::int64_t bytes, void* stream) {
  return to_status(
      cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(stream)),
      "clearing the workspace");
}

Result<int> sm_count() {
  int device = 0;
  if (Status status = to_status(cudaGetDevice(&device), "current device"); !status) {
    return status;
  }
  return attribute(cudaDevAttrMultiProcessorCount, "sm count", device);
}

Result<std::int64_t> memory_bytes(int index) {
  static std::mutex mutex;
  static std::map<int, std::int64_t> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(index); found != known.end()) {
    return found->second;
  }
  cudaDeviceProp properties;
  if (Status status = to_status(cudaGetDeviceProperties(&properties, index), "device memory");
      !status) {
    return status;
  }
  return known[index] = static_cast<std::int64_t>(properties.totalGlobalMem);
}

std::string why_no_device(int index) {
  int count = 0;
  if (const cudaError_t code = cudaGetDeviceCount(&count); code != cudaSuccess || count == 0) {
    const char* text = code != cudaSuccess ? cudaGetErrorString(code) : "none is visible";
    (void)cudaGetLastError();  // the failure is reported here, not to the next caller
    return fmt::format("no CUDA device ({})", text);
  }
  if (index < 0 || index >= count) {
    return fmt::format("no CUDA device {} (there {} {})", index, count == 1 ? "is" : "are", count);
  }
  return {};
}

std::string why_not_sm90(int index) {
  if (std::string reason = why_no_device(index); !reason.empty()) {
    return reason;
  }
  const Result<int> major =
      attribute(cudaDevAttrComputeCapabilityMajor, "compute capability", index);
  const Result<int> minor =
      attribute(cudaDevAttrComputeCapabilityMinor, "compute capability", index);
  if (!major || !minor) {
    return (!major ? major : minor).status().message();
  }
  if (*major != 9 || *minor != 0) {
    return fmt::format("the device is of compute capability {}.{}, not 9.0", *major, *minor);
  }
  return {};
}

}  // namespace rafter::cuda
