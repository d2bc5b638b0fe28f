// What the fused forward on vector units hands to the code of one instruction set.
#pragma once

#include <cstdint>

#include "dispatch/kernel_entry.h"
#include "kernels/cpu/forward_tasks.h"
#include "tiles/forward_simd.h"

namespace rafter::forward_simd {

/// Tiles that lie packed for all tasks, in the workspace; null where tasks pack alone.
struct PackedTiles {
  float* k = nullptr;              // [tiles][layout.k_floats()]
  float* v = nullptr;              // [tiles][layout.v_floats()]
  std::uint8_t* finite = nullptr;  // [tiles]: no inf, no NaN in V
};

/// One run, the same for all its tasks.
struct Run {
  const ForwardCall& call;
  tiles::SimdLayout layout;
  cpu::TaskShape shape;
  PackedTiles packed;
};

/// The code of one instruction set for a dtype.
struct Functions {
  /// Packs the tile of `keys` as packed tile `tile`.
  void (*pack)(const Run& run, const cpu::Task& keys, std::int64_t head_kv, std::int64_t tile);
  /// Computes one task of KV head `head_kv`, part `head_chunk` of its group, whose sequence's first
  /// packed tile is `tile`. scratch has layout.floats floats, 64-byte aligned.
  void (*task)(const Run& run, const cpu::Task& task, std::int64_t head_kv, std::int64_t head_chunk,
               std::int64_t tile, float* scratch);
};

}  // namespace rafter::forward_simd
