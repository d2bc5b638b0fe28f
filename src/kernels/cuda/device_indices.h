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

/// An integer that is still on its way: whatever computes with it waits for it, and a sign that is
/// extended is enough. −1 where it was not wanted.
struct AskedIndex {
  std::uint32_t low = ~0u, high = ~0u;

  /// In [0, 2^31), else −1.
  __device__ int value(const DeviceIndices& indices) const {
    return indices.wide && high != 0 ? -1 : static_cast<int>(low);
  }
};
__device__ inline AskedIndex ask_index(const DeviceIndices& indices, std::int64_t i, bool wanted) {
  AskedIndex asked;
  const char* const at = static_cast<const char*>(indices.data) + i * (indices.wide ? 8 : 4);
  asm volatile(
      "{\n.reg .pred wanted, wide;\nsetp.ne.u32 wanted, %3, 0;\nsetp.ne.u32 wide, %4, 0;\n"
      "@wanted ld.global.u32 %0, [%2];\n@wide ld.global.u32 %1, [%2 + 4];\n}"
      : "+r"(asked.low), "+r"(asked.high)
      : "l"(at), "r"(wanted ? 1u : 0u), "r"(wanted && indices.wide ? 1u : 0u)
      : "memory");
  return asked;
}

/// Brings an index into the L2.
__device__ inline void prefetch_index(const DeviceIndices& indices, std::int64_t i) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(indices.data) +
                                                i * (indices.wide ? 8 : 4)));
}

/// What is longer than the capacity would lie outside the tensor.
__device__ inline int clamped_length(std::int64_t length, int capacity) {
  return static_cast<int>(length < 0          ? 0
                          : length < capacity ? length
                                              : static_cast<std::int64_t>(capacity));
}
#endif

}  // namespace rafter::cuda
