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
  __device__ std::int64_t whole(const DeviceIndices& indices) const {
    return indices.wide ? static_cast<std::int64_t>(std::uint64_t{high} << 32 | low)
                        : static_cast<std::int32_t>(low);
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

/// Copies index i, low word first, to 8 bytes of shared memory, which stay as they are where it is
/// not wanted. Part of this thread's group of copies.
__device__ inline void copy_index_async(std::uint32_t destination, const char* indices, int i,
                                        bool wide, bool wanted) {
  asm volatile(
      "{\n.reg .pred narrow, wide;\nsetp.ne.u32 narrow, %2, 0;\nsetp.ne.u32 wide, %3, 0;\n"
      "@narrow cp.async.ca.shared.global [%0], [%1], 4;\n"
      "@wide cp.async.ca.shared.global [%0], [%1], 8;\n}" ::"r"(destination),
      "l"(indices + std::int64_t{i} * (wide ? 8 : 4)), "r"(wanted && !wide ? 1u : 0u),
      "r"(wanted && wide ? 1u : 0u)
      : "memory");
}

/// What is longer than the capacity would lie outside the tensor.
__device__ inline int clamped_length(std::int64_t length, int capacity) {
  return static_cast<int>(length < 0          ? 0
                          : length < capacity ? length
                                              : static_cast<std::int64_t>(capacity));
}
#endif

}  // namespace rafter::cuda
