// Uniform values by index: a hash that every device computes alike.
#pragma once

#include <cstdint>

namespace rafter::tiles {

/// splitmix64 (Steele, Lea, Flood 2014) of a seed and an index.
constexpr std::uint64_t hash_of(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z = seed * 0xd1342543de82ef95u + (index + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/// An odd multiple of 2^-24 in (−1, 1): exact in f32, and symmetric around 0, which it never is.
constexpr float uniform_of(std::uint64_t seed, std::uint64_t index) {
  const auto bits = static_cast<std::int32_t>(hash_of(seed, index) >> 40);  // 24 of them
  return static_cast<float>(2 * bits + 1 - (1 << 24)) * 0x1p-24f;
}

}  // namespace rafter::tiles
