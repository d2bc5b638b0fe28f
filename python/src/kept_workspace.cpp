#include "kept_workspace.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "rafter/measure.h"

namespace rafter::python {
namespace {

// Of each stream: what decoding needs and forward passes do; 16 MiB at most stay allocated.
constexpr std::int64_t kBytes = std::int64_t{1} << 20;
constexpr std::size_t kMostStreams = 16;
// CUDA's name for a stream that each thread has one of.
void* const kStreamPerThread = reinterpret_cast<void*>(2);

}  // namespace

struct KeptWorkspace::Entry {
  int device_index;
  void* stream;
  DeviceMemory memory;
  bool taken;
};

KeptWorkspace::Entry* KeptWorkspace::take(const Place& place) {
  // Not freed: the interpreter is gone by then.
  static auto* const entries = new std::vector<std::unique_ptr<Entry>>;
  const auto found = std::ranges::find_if(*entries, [&](const auto& entry) {
    return entry->stream == place.stream.handle && entry->device_index == place.device.index;
  });
  if (found != entries->end()) {
    Entry& entry = **found;
    return entry.taken ? nullptr : &entry;
  }
  if (entries->size() == kMostStreams) {
    return nullptr;
  }
  Result<DeviceMemory> memory = DeviceMemory::allocate(place.device, kBytes);
  if (!memory) {
    return nullptr;  // the library's allocator may have some left, or says that there is none
  }
  entries->push_back(std::make_unique<Entry>(
      Entry{place.device.index, place.stream.handle, *std::move(memory), false}));
  return entries->back().get();
}

KeptWorkspace::KeptWorkspace(const Place& place, std::int64_t bytes) {
  if (bytes > kBytes || place.stream.handle == kStreamPerThread || is_capturing(place.stream)) {
    return;
  }
  entry_ = take(place);
  if (entry_ != nullptr) {
    entry_->taken = true;
  }
}

KeptWorkspace::~KeptWorkspace() {
  if (entry_ != nullptr) {
    entry_->taken = false;
  }
}

void* KeptWorkspace::data() const { return entry_ == nullptr ? nullptr : entry_->memory.data(); }

}  // namespace rafter::python
