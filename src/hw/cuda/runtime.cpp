#include "hw/cuda/runtime.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <vector>

#include "hw/cuda/launch.h"

namespace rafter::cuda {
namespace {

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

Status copy(void* to, const void* from, std::int64_t bytes, cudaMemcpyKind kind) {
  return bytes == 0 ? Status::ok()
                    : status_of(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), kind),
                                "copy of device memory");
}

}  // namespace

Result<void*> allocate(std::int64_t bytes) {
  void* memory = nullptr;
  // A graph that another thread captures meanwhile is none of this memory's business.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t code = cudaMalloc(&memory, static_cast<std::size_t>(bytes > 0 ? bytes : 1));
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  if (code != cudaSuccess) {
    return status_of(code, fmt::format("{} bytes of device memory", bytes).c_str());
  }
  return memory;
}

void release(void* memory) { (void)cudaFree(memory); }

// A copy from pageable memory returns once it is staged, and streams of make_stream() do not wait
// for what the default stream still has to do: a kernel there could read what was before.
Status copy_to_device(void* to, const void* from, std::int64_t bytes) {
  const Status staged = copy(to, from, bytes, cudaMemcpyHostToDevice);
  return staged ? synchronize(nullptr) : staged;
}

Status copy_to_host(void* to, const void* from, std::int64_t bytes) {
  return copy(to, from, bytes, cudaMemcpyDeviceToHost);
}

Status fill_bytes(void* memory, unsigned char byte, std::int64_t bytes) {
  if (bytes == 0) {
    return Status::ok();
  }
  if (Status status = status_of(cudaMemset(memory, byte, static_cast<std::size_t>(bytes)),
                                "fill of device memory");
      !status) {
    return status;
  }
  return status_of(cudaDeviceSynchronize(), "fill of device memory");
}

Result<void*> make_stream() {
  cudaStream_t stream = nullptr;
  if (Status status =
          status_of(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      !status) {
    return status;
  }
  return static_cast<void*>(stream);
}

void release_stream(void* stream) { (void)cudaStreamDestroy(stream_of(stream)); }

Status synchronize(void* stream) {
  return status_of(cudaStreamSynchronize(stream_of(stream)), "work on the stream");
}

Result<void*> make_event() {
  cudaEvent_t event = nullptr;
  if (Status status = status_of(cudaEventCreate(&event), "event"); !status) {
    return status;
  }
  return static_cast<void*>(event);
}

void release_event(void* event) { (void)cudaEventDestroy(event_of(event)); }

Status record(void* event, void* stream) {
  return status_of(cudaEventRecord(event_of(event), stream_of(stream)), "event");
}

Result<double> seconds_between(void* start, void* stop) {
  if (Status status = status_of(cudaEventSynchronize(event_of(stop)), "work on the stream");
      !status) {
    return status;
  }
  float milliseconds = 0;
  if (Status status =
          status_of(cudaEventElapsedTime(&milliseconds, event_of(start), event_of(stop)), "event");
      !status) {
    return status;
  }
  return static_cast<double>(milliseconds) * 1e-3;
}

bool is_capturing(void* stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) {
    return false;  // CUDA captures every other one
  }
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream_of(stream), &status) != cudaSuccess) {
    (void)cudaGetLastError();  // said by the result
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

Status begin_capture(void* stream) {
  return status_of(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal),
                   "capture of a graph");
}

namespace {

Result<std::int64_t> count_kernels(cudaGraph_t graph) {
  std::size_t count = 0;
  if (Status s = status_of(cudaGraphGetNodes(graph, nullptr, &count), "graph"); !s) {
    return s;
  }
  std::vector<cudaGraphNode_t> nodes(count);
  if (Status s = status_of(cudaGraphGetNodes(graph, nodes.data(), &count), "graph"); !s) {
    return s;
  }
  std::int64_t kernels = 0;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    if (Status s = status_of(cudaGraphNodeGetType(node, &type), "graph"); !s) {
      return s;
    }
    kernels += type == cudaGraphNodeTypeKernel ? 1 : 0;
  }
  return kernels;
}

}  // namespace

Result<void*> end_capture(void* stream, std::int64_t* kernels) {
  cudaGraph_t graph = nullptr;
  if (Status status =
          status_of(cudaStreamEndCapture(stream_of(stream), &graph), "capture of a graph");
      !status) {
    return status;
  }
  const Result<std::int64_t> counted = count_kernels(graph);
  *kernels = counted ? *counted : 0;
  cudaGraphExec_t ready = nullptr;
  const Status made =
      !counted ? counted.status() : status_of(cudaGraphInstantiate(&ready, graph, 0), "graph");
  (void)cudaGraphDestroy(graph);
  if (!made) {
    return made;
  }
  return static_cast<void*>(ready);
}

void release_graph(void* graph) { (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

Status launch_graph(void* graph, void* stream) {
  return status_of(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)),
                   "graph");
}

Result<DeviceProperties> properties() {
  int device = 0;
  cudaDeviceProp p{};
  DeviceProperties made;
  std::size_t free_bytes = 0, total_bytes = 0;
  int clock_khz = 0;
  for (const cudaError_t code :
       {cudaGetDevice(&device), cudaGetDeviceProperties(&p, device),
        cudaDriverGetVersion(&made.driver), cudaRuntimeGetVersion(&made.runtime),
        cudaMemGetInfo(&free_bytes, &total_bytes),
        cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device)}) {
    if (Status status = status_of(code, "properties of the device"); !status) {
      return status;
    }
  }
  made.name = p.name;
  for (const char byte : p.uuid.bytes) {
    made.uuid += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  made.sm_count = p.multiProcessorCount;
  made.l2_bytes = p.l2CacheSize;
  made.shared_bytes_per_sm = static_cast<std::int64_t>(p.sharedMemPerMultiprocessor);
  made.total_bytes = static_cast<std::int64_t>(total_bytes);
  made.free_bytes = static_cast<std::int64_t>(free_bytes);
  made.clock_hz = 1e3 * clock_khz;
  return made;
}

}  // namespace rafter::cuda
