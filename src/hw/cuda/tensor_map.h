// Tensor maps: what the copy engine must know of a tensor. Made on the host, passed to kernels by
// value.
#pragma once

#include <cuda.h>

#include "rafter/tensor.h"

namespace rafter::cuda {

/// A map of a tensor of 16- or 8-bit elements with dimensions (head_dim, seqlen, heads, batch),
/// innermost first, and boxes of 128 bytes × box_rows rows under the 128-byte swizzle. A dimension
/// of stride 0 becomes one of size 1: read it at coordinate 0 (`heads_step`, `batch_step` are then
/// 0, else 1).
struct TensorMap {
  CUtensorMap map;
  int heads_step = 1;
  int batch_step = 1;
};

/// Fills `result`. Errors: invalid_argument names the tensor and what the copy engine cannot read:
/// a base that is not 16-byte aligned, strides that are negative or no multiple of 16 bytes;
/// device_error when there is no driver.
Status make_tensor_map(const char* name, const TensorView& tensor, int box_rows, TensorMap& result);

}  // namespace rafter::cuda
