// What the fused forward on vector units hands to the code of one instruction set.
#pragma once

#include <cstdint>

#include "dispatch/kernel_entry.h"
#include "kernels/cpu/forward_tasks.h"
#include "tiles/forward_simd.h"

namespace rafter::forward_simd {

/// One run, the same for all its tasks.
struct Run {
  const ForwardCall& call;
  tiles::SimdLayout layout;
  cpu::TaskShape shape;
};

/// Computes one task of KV head `head_kv`, part `head_chunk` of its group. scratch has
/// layout.floats floats, 64-byte aligned.
using TaskFunction = void (*)(const Run& run, const cpu::Task& task, std::int64_t head_kv,
                              std::int64_t head_chunk, float* scratch);

}  // namespace rafter::forward_simd
