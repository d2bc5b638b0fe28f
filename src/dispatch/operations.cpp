#include "dispatch/operations.h"

namespace rafter {

#define RAFTER_OPERATION(stem) std::span<const OperationEntry> operations_##stem();
#define RAFTER_KERNEL(stem)
#include "kernel_list.inc"
#undef RAFTER_OPERATION

namespace dispatch {
namespace {

template <typename Function>
const OperationEntry* find(Device::Kind device, Function OperationEntry::*operation) {
  const OperationsFunction lists[] = {
#define RAFTER_OPERATION(stem) operations_##stem,
#include "kernel_list.inc"
#undef RAFTER_OPERATION
  };
  for (const OperationsFunction list : lists) {
    for (const OperationEntry& entry : list()) {
      if (entry.device == device && entry.*operation != nullptr) {
        return &entry;
      }
    }
  }
  return nullptr;
}

}  // namespace

#undef RAFTER_KERNEL

const OperationEntry* find_append(Device::Kind device) {
  return find(device, &OperationEntry::append);
}
const OperationEntry* find_merge(Device::Kind device) {
  return find(device, &OperationEntry::merge);
}
const OperationEntry* find_layers(Device::Kind device) {
  return find(device, &OperationEntry::layers);
}

}  // namespace dispatch
}  // namespace rafter
