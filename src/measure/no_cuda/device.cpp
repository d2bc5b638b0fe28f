// The CUDA half of measure.h in a build without CUDA: every entry says so.
#include "rafter/measure.h"

namespace rafter {
namespace {

constexpr const char* kNoCuda = "this build has no CUDA";

Status no_cuda() { return Status::device_error("device", kNoCuda); }

}  // namespace

struct DeviceClock::State {};

std::string why_no_cuda(int) { return kNoCuda; }
std::string cuda_uuid(int) { return {}; }
Status synchronize(const Device&, Stream) { return no_cuda(); }
bool is_capturing(Stream) { return true; }

Result<DeviceMemory> DeviceMemory::allocate(const Device&, std::int64_t) { return no_cuda(); }
Status DeviceMemory::upload(const void*, std::int64_t) const { return no_cuda(); }
Status DeviceMemory::download(void*, std::int64_t) const { return no_cuda(); }
Status DeviceMemory::fill(unsigned char) const { return no_cuda(); }
Status DeviceMemory::fill_random(DType, std::uint32_t) const { return no_cuda(); }

Result<DeviceClock> DeviceClock::make(const Device&) { return no_cuda(); }
Stream DeviceClock::stream() const { return {}; }
Status DeviceClock::synchronize() const { return no_cuda(); }
TimedWork DeviceClock::timed(Work, Queueing, double) const {
  return [](std::int64_t) -> Result<double> { return no_cuda(); };
}
Result<CountedBytes> DeviceClock::count(const Work&, double) const { return no_cuda(); }

Result<DeviceGraph> DeviceGraph::capture(const Device&, Stream, const Work&) { return no_cuda(); }
Status DeviceGraph::launch(Stream) const { return no_cuda(); }

Result<Probe> probe_cuda(const Device&, const ProbeOptions&) { return no_cuda(); }

}  // namespace rafter
