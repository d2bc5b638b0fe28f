// The tables of RoPE as kernels take them.
#pragma once

#include <cstdint>

#include "rafter/cache.h"

namespace rafter::cuda {

struct RopeTables {
  const float* cos = nullptr;
  const float* sin = nullptr;
  std::int64_t max_position = 0;
  int rotary_dim = 0;
  bool interleaved = false;
  bool in_vectors = false;  // four angles are aligned together
};

inline RopeTables rope_tables(const Rope& rope) {
  constexpr std::uintptr_t kAligned = 16;
  return {.cos = rope.cos,
          .sin = rope.sin,
          .max_position = rope.max_position,
          .rotary_dim = static_cast<int>(rope.rotary_dim),
          .interleaved = rope.pairs == Rope::Pairs::interleaved,
          .in_vectors = reinterpret_cast<std::uintptr_t>(rope.cos) % kAligned == 0 &&
                        reinterpret_cast<std::uintptr_t>(rope.sin) % kAligned == 0};
}

/// Heads of a token that a thread turns by the angles it has loaded.
inline constexpr int kTokenHeads = 2;

/// How `wanted` threads of each token are cut into CTAs: small ones where there are few tokens, so
/// that all SMs load.
struct TokenShape {
  unsigned blocks = 1, threads = 32;  // of a token; of a CTA
};
inline TokenShape token_shape(std::int64_t tokens, unsigned wanted) {
  constexpr std::int64_t kManyTokens = 512;
  const unsigned most = tokens < kManyTokens ? 64 : 256;
  TokenShape shape;
  shape.blocks = (wanted + most - 1) / most;
  shape.threads = ((wanted + shape.blocks - 1) / shape.blocks + 31) / 32 * 32;
  return shape;
}

}  // namespace rafter::cuda
