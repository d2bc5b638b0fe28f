// What append and merge check of a device before anything else.
#pragma once

#include <string>

#include "dispatch/operation_entry.h"

namespace rafter::api {

/// An index that there can be; a CPU is given no stream.
inline Status check_device(const Device& device, Stream stream) {
  const bool cpu = device.kind == Device::Kind::cpu;
  if (device.index < 0 || (cpu && device.index != 0)) {
    return Status::invalid_argument("device.index", std::to_string(device.index),
                                    cpu ? "0" : "0 or more");
  }
  if (cpu && stream.handle != nullptr) {
    return Status::invalid_argument("stream", "a stream", "none (a CPU runs at once)");
  }
  return Status::ok();
}

/// This build has the operation for the device (`entry`), and this machine the device.
inline Status check_operation(const char* name, const OperationEntry* entry, const Device& device) {
  std::string why =
      entry == nullptr ? std::string("this build has no ") + name + " for " + to_string(device.kind)
                       : entry->why_not(device.index);
  return why.empty() ? Status::ok() : Status::unsupported("device", to_string(device.kind), why);
}

}  // namespace rafter::api
