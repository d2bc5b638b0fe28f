// Rows of a KV cache in int8: one f32 factor for each.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "rafter/tensor.h"

namespace rafter::cli {

/// What a row's elements are whole multiples of: the largest of them becomes 126 or 127. It has the
/// eight significant bits of bf16, so that the multiples are exact in f32.
inline float int8_scale(std::span<const float> row) {
  float largest = 0;
  for (const float value : row) {
    largest = std::max(largest, std::fabs(value));
  }
  return bf16_to_f32(f32_to_bf16(largest > 0 ? largest / 126.5F : 1.0F));
}

inline std::int8_t to_int8(float value, float scale) {
  return static_cast<std::int8_t>(std::lround(std::clamp(value / scale, -127.0F, 127.0F)));
}

}  // namespace rafter::cli
