// One element of a tensor of f32, f16, bf16, int8 or e4m3 as a double, by its offset in elements.
#pragma once

#include <cstdint>

#include "rafter/tensor.h"

namespace rafter::base {

inline double load_element(const TensorView& t, std::int64_t offset) {
  switch (t.dtype) {
    case DType::f16:
      return f16_to_f32(static_cast<const std::uint16_t*>(t.data)[offset]);
    case DType::bf16:
      return bf16_to_f32(static_cast<const std::uint16_t*>(t.data)[offset]);
    case DType::int8:
      return static_cast<const std::int8_t*>(t.data)[offset];
    case DType::e4m3:
      return e4m3_to_f32(static_cast<const std::uint8_t*>(t.data)[offset]);
    default:
      return static_cast<const float*>(t.data)[offset];
  }
}

/// Rounds to f32 first, then to the tensor's dtype.
inline void store_element(const TensorView& t, std::int64_t offset, double value) {
  const auto rounded = static_cast<float>(value);
  switch (t.dtype) {
    case DType::f16:
      static_cast<std::uint16_t*>(t.data)[offset] = f32_to_f16(rounded);
      break;
    case DType::bf16:
      static_cast<std::uint16_t*>(t.data)[offset] = f32_to_bf16(rounded);
      break;
    default:
      static_cast<float*>(t.data)[offset] = rounded;
  }
}

}  // namespace rafter::base
