// What an operation beside attention itself (append, merge) tells the API. One file
// <name>_operation.cpp of a kernel folder defines one function that returns its entries; CMake
// lists the files, nothing else does.
#pragma once

#include <span>
#include <string>

#include "rafter/cache.h"

namespace rafter {

/// Checked arguments.
struct AppendCall {
  const AppendInputs& in;
  const AppendOutputs& out;
  int device_index = 0;
  Stream stream = {};
};
struct MergeCall {
  std::span<const AttentionState> states;
  const AttentionState& out;
  int device_index = 0;
  Stream stream = {};
};

/// One operation on one kind of device: one of the functions.
struct OperationEntry {
  Device::Kind device;
  /// Empty, or why this machine's device of that index cannot run it.
  std::string (*why_not)(int device_index);
  Status (*append)(const AppendCall&) = nullptr;
  Status (*merge)(const MergeCall&) = nullptr;
};

using OperationsFunction = std::span<const OperationEntry> (*)();

}  // namespace rafter
