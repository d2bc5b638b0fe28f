// The CUDA runtime behind plain types, for code that may not see its headers: memory, streams,
// events, graphs, and what a device says of itself. Everything acts on the current device.
#pragma once

#include <cstdint>
#include <string>

#include "rafter/status.h"

namespace rafter::cuda {

/// Device memory; the contents are anything. Errors: device_error with what was asked for.
Result<void*> allocate(std::int64_t bytes);
void release(void* memory);
/// Each waits until it is done.
Status copy_to_device(void* to, const void* from, std::int64_t bytes);
Status copy_to_host(void* to, const void* from, std::int64_t bytes);
Status fill_bytes(void* memory, unsigned char byte, std::int64_t bytes);

/// Streams (cudaStream_t) that do not wait for the default stream.
Result<void*> make_stream();
void release_stream(void* stream);
Status synchronize(void* stream);

/// Events (cudaEvent_t) that keep the time.
Result<void*> make_event();
void release_event(void* event);
Status record(void* event, void* stream);
/// Seconds from one recorded event to another; waits for the second.
Result<double> seconds_between(void* start, void* stop);

/// What is queued on the stream between the two becomes a graph, ready to run (cudaGraphExec_t).
/// True also where CUDA does not say.
bool is_capturing(void* stream);
Status begin_capture(void* stream);
/// `kernels` takes how many of its nodes are kernels.
Result<void*> end_capture(void* stream, std::int64_t* kernels);
void release_graph(void* graph);
Status launch_graph(void* graph, void* stream);

struct DeviceProperties {
  std::string name;  // "NVIDIA H200"
  std::string uuid;
  int driver = 0, runtime = 0;  // 13000 for 13.0
  std::int64_t sm_count = 0, l2_bytes = 0, shared_bytes_per_sm = 0;
  std::int64_t total_bytes = 0, free_bytes = 0;
  double clock_hz = 0;  // highest of the SMs
};
Result<DeviceProperties> properties();

}  // namespace rafter::cuda
