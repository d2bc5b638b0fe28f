// What the schedule of the fused forward on vector units hands to the code of one instruction set.
#pragma once

#include <cstdint>

#include "dispatch/kernel_entry.h"
#include "tiles/forward_simd.h"

namespace rafter::forward_simd {

/// One run, the same for all its tasks.
struct Run {
  const ForwardCall& call;
  tiles::SimdLayout layout;
};

/// Queries [first, last) of one sequence; heads come on top. `work` orders tasks, longest first.
struct Task {
  std::int64_t sequence = 0;
  std::int64_t first = 0, last = 0;
  std::int64_t work = 0;  // queries · keys, about
};

/// Computes one task of KV head `head_kv`, part `head_chunk` of its group. scratch has
/// layout.floats floats, 64-byte aligned.
using TaskFunction = void (*)(const Run& run, const Task& task, std::int64_t head_kv,
                              std::int64_t head_chunk, float* scratch);

}  // namespace rafter::forward_simd
