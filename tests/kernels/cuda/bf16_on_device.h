// Tensors of bf16 in device memory, too large for float64: two kernels' results beside each other.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "rafter/measure.h"
#include "rafter/tensor.h"

namespace rafter::testing {

/// Every byte is 0xff, a NaN.
inline DeviceMemory poisoned_memory(std::int64_t bytes) {
  Result<DeviceMemory> made = DeviceMemory::allocate(Device::cuda(), bytes);
  EXPECT_TRUE(made.is_ok()) << made.status().message();
  EXPECT_TRUE(made && made->fill(0xff).is_ok());
  return made ? *made : DeviceMemory{};
}

inline std::vector<std::uint16_t> bits_of_memory(const DeviceMemory& memory) {
  std::vector<std::uint16_t> bits(static_cast<std::size_t>(memory.bytes() / 2));
  EXPECT_TRUE(memory.download(bits.data(), memory.bytes()).is_ok());
  return bits;
}

/// ‖a − b‖ / ‖b‖; infinite where either is NaN.
inline double relative_difference(const std::vector<std::uint16_t>& a,
                                  const std::vector<std::uint16_t>& b) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double x = bf16_to_f32(a[i]), y = bf16_to_f32(b[i]);
    error += (x - y) * (x - y);
    norm += y * y;
  }
  return std::isfinite(error) && norm > 0 ? std::sqrt(error / norm) : HUGE_VAL;
}

}  // namespace rafter::testing
