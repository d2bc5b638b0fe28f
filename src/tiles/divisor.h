// Division by a number that a launch knows, in a multiplication: on a GPU a tenth of the clocks.
#pragma once

#include <cstdint>

namespace rafter::tiles {

/// n / d for 0 ≤ n < 2^31 and 1 ≤ d < 2^31. Source: Granlund & Montgomery 1994, Division by
/// invariant integers using multiplication. With 2^(s−1) < d ≤ 2^s and m = ⌈2^(31+s) / d⌉, which is
/// below 2^32, m · d exceeds 2^(31+s) by less than d ≤ 2^s, so n · m / 2^(31+s) exceeds n / d by
/// less than n / 2^31 / d < 1 / d: too little to reach the next whole number.
struct Divisor {
  std::uint32_t multiplier = std::uint32_t{1} << 31;
  int shift = 0;

  constexpr int quotient(int n) const {
    const std::uint64_t product = std::uint64_t{static_cast<std::uint32_t>(n) * 2u} * multiplier;
    return static_cast<int>(static_cast<std::uint32_t>(product >> 32) >> shift);
  }
};

constexpr Divisor divisor_of(std::int64_t d) {
  Divisor divisor;
  while ((std::int64_t{1} << divisor.shift) < d) {
    ++divisor.shift;
  }
  const std::uint64_t power = std::uint64_t{1} << (31 + divisor.shift);
  const auto by = static_cast<std::uint64_t>(d);
  divisor.multiplier = static_cast<std::uint32_t>((power + by - 1) / by);
  return divisor;
}

}  // namespace rafter::tiles
