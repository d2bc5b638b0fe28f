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

/// The most threads of a CTA. Small ones: all SMs load where there are few tokens, and where there
/// are many a CTA waits for little before it stores. Of 4096 tokens rope_append took 59 µs with 192
/// threads and takes 54 with 64.
inline constexpr unsigned kTokenThreads = 64;

/// How `wanted` threads of each token are cut into CTAs.
struct TokenShape {
  unsigned blocks = 1, threads = 32;  // of a token; of a CTA
};
inline TokenShape token_shape(unsigned wanted) {
  TokenShape shape;
  shape.blocks = (wanted + kTokenThreads - 1) / kTokenThreads;
  shape.threads = ((wanted + shape.blocks - 1) / shape.blocks + 31) / 32 * 32;
  return shape;
}

}  // namespace rafter::cuda
