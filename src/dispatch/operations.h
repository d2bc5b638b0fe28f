// The operations of this build, by device.
#pragma once

#include "dispatch/operation_entry.h"

namespace rafter::dispatch {

/// The entry that appends on a kind of device; null when this build has none.
const OperationEntry* find_append(Device::Kind device);
/// The same of merge.
const OperationEntry* find_merge(Device::Kind device);
/// The same of layers.h.
const OperationEntry* find_layers(Device::Kind device);

}  // namespace rafter::dispatch
