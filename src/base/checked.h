// Integer arithmetic on sizes that says when it does not fit 64 bits.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace rafter::base {

/// Product of non-negative sizes; nothing when it exceeds 2^63 − 1. A zero factor gives 0 whatever
/// the others are.
constexpr std::optional<std::int64_t> checked_product(std::initializer_list<std::int64_t> factors) {
  std::int64_t product = 1;
  for (const std::int64_t factor : factors) {
    if (factor == 0) {
      return 0;
    }
  }
  for (const std::int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) {
      return std::nullopt;
    }
  }
  return product;
}

constexpr std::optional<std::int64_t> checked_sum(std::initializer_list<std::int64_t> terms) {
  std::int64_t sum = 0;
  for (const std::int64_t term : terms) {
    if (__builtin_add_overflow(sum, term, &sum)) {
      return std::nullopt;
    }
  }
  return sum;
}

/// `value` rounded up to a multiple of `step`.
constexpr std::int64_t round_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}
constexpr std::int64_t div_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step;
}

}  // namespace rafter::base
