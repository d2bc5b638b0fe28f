// Lengths, offsets and page tables as kernels read them.
#pragma once

#include <cstdint>

#include "rafter/tensor.h"

namespace rafter::cuda {

/// Integers in device memory; null: not given.
struct DeviceIndices {
  const void* data = nullptr;
  bool wide = false;  // i64, else i32
};

inline DeviceIndices device_indices(const IndexView& view) {
  return {view.data, view.dtype == DType::i64};
}

/// Lengths and windows stay below this, so that sums of three fit 32 bits.
inline constexpr std::int64_t kMaxLength = std::int64_t{1} << 29;

#ifdef __CUDACC__
__device__ inline std::int64_t index_at(const DeviceIndices& indices, std::int64_t i) {
  return indices.wide ? static_cast<const std::int64_t*>(indices.data)[i]
                      : static_cast<const std::int32_t*>(indices.data)[i];
}

/// What is longer than the capacity would lie outside the tensor.
__device__ inline int clamped_length(std::int64_t length, int capacity) {
  return static_cast<int>(length < 0          ? 0
                          : length < capacity ? length
                                              : static_cast<std::int64_t>(capacity));
}
#endif

}  // namespace rafter::cuda
