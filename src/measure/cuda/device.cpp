// Memory of CUDA devices and clocks on their streams.
#include <algorithm>
#include <chrono>
#include <utility>

#include "hw/cuda/counters.h"
#include "hw/cuda/launch.h"
#include "hw/cuda/passes.h"
#include "hw/cuda/runtime.h"
#include "rafter/measure.h"

namespace rafter {
namespace {

/// Something of the runtime that is given back on its own device.
using Handle = std::shared_ptr<void>;
Handle own(void* handle, int device, void (*release)(void*)) {
  return {handle, [device, release](void* owned) {
            const cuda::DeviceScope scope(device);
            release(owned);
          }};
}

Status check_bytes(std::int64_t bytes, std::int64_t capacity) {
  return bytes >= 0 && bytes <= capacity
             ? Status::ok()
             : Status::invalid_argument("bytes", std::to_string(bytes),
                                        "0 to " + std::to_string(capacity));
}

}  // namespace

std::string why_no_cuda(int index) { return cuda::why_no_device(index); }

std::string cuda_uuid(int index) {
  const cuda::DeviceScope scope(index);
  const Result<cuda::DeviceProperties> properties =
      scope.status() ? cuda::properties() : Result<cuda::DeviceProperties>(scope.status());
  return properties ? properties->uuid : std::string();
}

Status synchronize(const Device& device, Stream stream) {
  const cuda::DeviceScope scope(device.index);
  return scope.status() ? cuda::synchronize(stream.handle) : scope.status();
}

bool is_capturing(Stream stream) { return cuda::is_capturing(stream.handle); }

Result<DeviceMemory> DeviceMemory::allocate(const Device& device, std::int64_t bytes) {
  const cuda::DeviceScope scope(device.index);
  if (!scope.status()) {
    return scope.status();
  }
  const Result<void*> memory = cuda::allocate(bytes);
  if (!memory) {
    return memory.status();
  }
  DeviceMemory made;
  made.device_ = device;
  made.memory_ = own(*memory, device.index, cuda::release);
  made.bytes_ = bytes;
  return made;
}

Status DeviceMemory::upload(const void* from, std::int64_t bytes) const {
  const cuda::DeviceScope scope(device_.index);
  Status checked = check_bytes(bytes, bytes_);
  return checked ? cuda::copy_to_device(data(), from, bytes) : checked;
}

Status DeviceMemory::download(void* to, std::int64_t bytes) const {
  const cuda::DeviceScope scope(device_.index);
  Status checked = check_bytes(bytes, bytes_);
  return checked ? cuda::copy_to_host(to, data(), bytes) : checked;
}

Status DeviceMemory::fill(unsigned char byte) const {
  const cuda::DeviceScope scope(device_.index);
  return cuda::fill_bytes(data(), byte, bytes_);
}

Status DeviceMemory::fill_random(DType dtype, std::uint32_t seed) const {
  const cuda::DeviceScope scope(device_.index);
  if (Status status =
          cuda::fill_random(data(), bytes_ / (bits_of(dtype) / 8), dtype, seed, nullptr);
      !status) {
    return status;
  }
  return cuda::synchronize(nullptr);
}

struct DeviceClock::State {
  Device device;
  Handle stream, start, stop;
  DeviceMemory flush;  // grows to what a rule asks for

  /// Reads so many bytes, so that the L2 holds nothing else.
  Status read_past_l2(double flush_bytes) {
    const auto bytes = static_cast<std::int64_t>(flush_bytes) / 16 * 16;
    if (flush.bytes() < bytes) {
      Result<DeviceMemory> grown = DeviceMemory::allocate(device, bytes);
      if (!grown) {
        return grown.status();
      }
      flush = *grown;
    }
    return cuda::read_pass(flush.data(), bytes, stream.get());
  }
  /// The start event; before it a flush, and the stream held for as long as queueing takes.
  Status begin(double flush_bytes, double hold_s) {
    if (flush_bytes > 0) {
      if (Status status = read_past_l2(flush_bytes); !status) {
        return status;
      }
      if (Status status = cuda::hold(hold_s, stream.get()); !status) {
        return status;
      }
    }
    return cuda::record(start.get(), stream.get());
  }
  Result<double> end() {
    if (Status status = cuda::record(stop.get(), stream.get()); !status) {
      return status;
    }
    return cuda::seconds_between(start.get(), stop.get());
  }
};

Result<DeviceClock> DeviceClock::make(const Device& device) {
  const cuda::DeviceScope scope(device.index);
  if (!scope.status()) {
    return scope.status();
  }
  DeviceClock clock;
  clock.state_ = std::make_shared<State>();
  clock.state_->device = device;
  const std::pair<Handle*, std::pair<Result<void*>, void (*)(void*)>> parts[] = {
      {&clock.state_->stream, {cuda::make_stream(), cuda::release_stream}},
      {&clock.state_->start, {cuda::make_event(), cuda::release_event}},
      {&clock.state_->stop, {cuda::make_event(), cuda::release_event}}};
  for (const auto& [handle, made] : parts) {
    if (!made.first) {
      return made.first.status();
    }
    *handle = own(*made.first, device.index, made.second);
  }
  return clock;
}

Stream DeviceClock::stream() const { return {state_->stream.get()}; }

Status DeviceClock::synchronize() const {
  const cuda::DeviceScope scope(state_->device.index);
  return cuda::synchronize(state_->stream.get());
}

namespace {

Status queue_calls(const Work& queue, std::int64_t calls) {
  for (std::int64_t i = 0; i < calls; ++i) {
    if (Status status = queue(); !status) {
      return status;
    }
  }
  return Status::ok();
}

/// The calls as a graph. A capture is ended even where a call fails, or the stream stays unusable.
Result<Handle> capture(const Work& queue, std::int64_t calls, void* stream, int device,
                       std::int64_t* kernels = nullptr) {
  if (Status status = cuda::begin_capture(stream); !status) {
    return status;
  }
  const Status queued = queue_calls(queue, calls);
  std::int64_t counted = 0;
  const Result<void*> graph = cuda::end_capture(stream, &counted);
  if (!queued) {
    return queued;
  }
  if (!graph) {
    return graph.status();
  }
  if (kernels != nullptr) {
    *kernels = counted;
  }
  return own(*graph, device, cuda::release_graph);
}

}  // namespace

TimedWork DeviceClock::timed(Work queue, Queueing queueing, double flush_bytes) const {
  struct Captured {
    std::int64_t calls = 0;
    Handle graph;
    double queueing_s = 0;  // on the host, the last time
  };
  return [state = state_, queue = std::move(queue), queueing, flush_bytes,
          captured = std::make_shared<Captured>()](std::int64_t calls) -> Result<double> {
    const cuda::DeviceScope scope(state->device.index);
    if (!scope.status()) {
      return scope.status();
    }
    void* const stream = state->stream.get();
    if (queueing == Queueing::graph && captured->calls != calls) {
      if (captured->calls == 0) {  // whatever the first call makes for itself stays out of it
        if (Status status = queue(); !status) {
          return status;
        }
        if (Status status = cuda::synchronize(stream); !status) {
          return status;
        }
      }
      Result<Handle> graph = capture(queue, calls, stream, state->device.index);
      if (!graph) {
        return graph.status();
      }
      captured->calls = calls;
      captured->graph = *graph;
    }
    constexpr double kHoldFor = 1.5, kLongestHold_s = 20e-3;
    const double hold_s = std::min(kHoldFor * captured->queueing_s, kLongestHold_s);
    if (Status status = state->begin(flush_bytes, hold_s); !status) {
      return status;
    }
    const auto start = std::chrono::steady_clock::now();
    const Status queued = queueing == Queueing::graph
                              ? cuda::launch_graph(captured->graph.get(), stream)
                              : queue_calls(queue, calls);
    if (!queued) {
      return queued;
    }
    captured->queueing_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return state->end();
  };
}

Result<CountedBytes> DeviceClock::count(const Work& queue, double flush_bytes) const {
  const cuda::DeviceScope scope(state_->device.index);
  if (!scope.status()) {
    return scope.status();
  }
  if (flush_bytes > 0) {
    if (Status status = state_->read_past_l2(flush_bytes); !status) {
      return status;
    }
  }
  if (Status status = cuda::synchronize(state_->stream.get()); !status) {
    return status;
  }
  const Result<cuda::DramBytes> counted = cuda::count_dram_bytes(queue);
  return counted ? Result<CountedBytes>(CountedBytes{counted->read, counted->written})
                 : counted.status();
}

Result<DeviceGraph> DeviceGraph::capture(const Device& device, Stream stream, const Work& queue) {
  const cuda::DeviceScope scope(device.index);
  if (!scope.status()) {
    return scope.status();
  }
  DeviceGraph made;
  const Result<Handle> graph =
      rafter::capture(queue, 1, stream.handle, device.index, &made.kernels_);
  if (!graph) {
    return graph.status();
  }
  made.device_ = device;
  made.graph_ = *graph;
  return made;
}

Status DeviceGraph::launch(Stream stream) const {
  const cuda::DeviceScope scope(device_.index);
  return scope.status() ? cuda::launch_graph(graph_.get(), stream.handle) : scope.status();
}

}  // namespace rafter
