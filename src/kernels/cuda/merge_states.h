// Merge of attention states: what the host gives the kernel.
#pragma once

#include "kernels/cuda/rows.h"
#include "rafter/cache.h"

namespace rafter::cuda {

/// o [batch, seqlen, heads, head_dim] and lse [batch, heads, seqlen] of a state.
struct MergeState {
  Rows o;
  float* lse = nullptr;
  std::int64_t lse_stride_batch = 0, lse_stride_heads = 0, lse_stride_seqlen = 0;
};

/// Passed by value: up to 32 KiB of a kernel's parameters.
template <int kCapacity>
struct MergeParams {
  MergeState states[kCapacity];
  MergeState out;
  int count = 0;
  int head_dim = 0, heads = 0, seqlen = 0;
  int lane_bits = 0;
  std::int64_t rows = 0;  // below 2^31
};

inline constexpr int kFewStates = 8;
inline constexpr int kManyStates = static_cast<int>(kMostMergedStates);

template <int kCapacity>
Status launch_merge(const MergeParams<kCapacity>& params, void* stream);

}  // namespace rafter::cuda
