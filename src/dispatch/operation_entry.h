// What an operation beside attention itself (append, merge) tells the API. One file
// <name>_operation.cpp of a kernel folder defines one function that returns its entries; CMake
// lists the files, nothing else does.
#pragma once

#include <span>
#include <string>

#include "rafter/cache.h"
#include "rafter/layers.h"

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

/// Where the operations of layers.h run.
struct LayerPlace {
  int device_index = 0;
  Stream stream = {};
};
struct RmsNormCall {
  const RmsNormInputs& in;
  const RmsNormOutputs& out;
  LayerPlace place;
};
struct PointwiseCall {
  Pointwise function;
  const TensorView& a;
  const TensorView& b;
  const TensorView& out;
  LayerPlace place;
};
struct RopeCall {
  const TensorView& x;
  const IndexView& positions;
  const Rope& rope;
  const TensorView& out;
  LayerPlace place;
};
struct GatherCall {
  const TensorView& table;
  const IndexView& rows;
  const TensorView& out;
  LayerPlace place;
};
struct LinearCall {
  const LinearInputs& in;
  const TensorView& out;
  Workspace workspace;
  LayerPlace place;
};
struct LinearChainCall {
  std::span<const Link> links;
  float eps;
  Workspace workspace;
  LayerPlace place;
};
struct PackCall {  // quantize: from view to packed; dequantize: the other way
  const TensorView& view;
  const PackedWeight& packed;
  LayerPlace place;
};
struct FillUniformCall {
  const TensorView& out;
  std::uint64_t seed;
  float bound;
  LayerPlace place;
};
struct AdvanceCall {
  const CountView& counts;
  std::int32_t by;
  LayerPlace place;
};

/// The operations of layers.h, all of them.
struct LayerOperations {
  Status (*rmsnorm)(const RmsNormCall&);
  Status (*pointwise)(const PointwiseCall&);
  Status (*rope)(const RopeCall&);
  Status (*gather)(const GatherCall&);
  Status (*linear)(const LinearCall&);
  Status (*quantize)(const PackCall&);
  Status (*dequantize)(const PackCall&);
  Status (*fill_uniform)(const FillUniformCall&);
  Status (*advance)(const AdvanceCall&);
  std::int64_t linear_workspace_bytes;
  /// packed.data is null for a weight of x's dtype.
  const char* (*linear_kernel)(std::int64_t rows, DType dtype, const PackedWeight& packed);
  /// Whether linear() dequantises a packed weight into the workspace, behind its own.
  bool (*linear_dequantizes)(std::int64_t rows, DType dtype, const PackedWeight& packed);
  /// Empty, or why it does not multiply this dtype.
  std::string (*why_no_linear)(DType dtype);
  /// Null: no chain runs here.
  Status (*linear_chain)(const LinearChainCall&) = nullptr;
  std::string (*why_no_linear_chain)(std::span<const Link> links) = nullptr;
  std::int64_t (*linear_chain_workspace_bytes)(std::span<const Link> links) = nullptr;
};

/// One operation on one kind of device: one of the functions, or those of layers.h.
struct OperationEntry {
  Device::Kind device;
  /// Empty, or why this machine's device of that index cannot run it.
  std::string (*why_not)(int device_index);
  Status (*append)(const AppendCall&) = nullptr;
  Status (*merge)(const MergeCall&) = nullptr;
  const LayerOperations* layers = nullptr;
};

using OperationsFunction = std::span<const OperationEntry> (*)();

}  // namespace rafter
