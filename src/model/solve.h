// Smallest argument at which a monotone condition holds.
#pragma once

#include <cstdint>
#include <optional>

namespace rafter::model {

/// Smallest real x in [low, high] with holds(x), to the last bits; unset when holds(high) fails.
template <typename Holds>
std::optional<double> smallest_real(const Holds& holds, double low, double high) {
  if (!holds(high)) {
    return std::nullopt;
  }
  if (holds(low)) {
    return low;
  }
  for (int step = 0; step < 200; ++step) {  // each halves the bracket; 53 bits and the exponent
    const double middle = low + (high - low) / 2;
    if (middle <= low || middle >= high) {
      break;
    }
    (holds(middle) ? high : low) = middle;
  }
  return high;
}

/// Largest whole x in [0, high] with holds(x), where holds is true up to a point; −1 when holds(0)
/// fails.
template <typename Holds>
std::int64_t largest_whole(const Holds& holds, std::int64_t high) {
  if (!holds(0)) {
    return -1;
  }
  std::int64_t low = 0;
  while (low < high) {
    const std::int64_t middle = low + (high - low + 1) / 2;
    if (holds(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace rafter::model
