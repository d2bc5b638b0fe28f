// A call's lengths and mask as CUDA kernels read them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/scores.h"
#include "rafter/attention.h"

namespace rafter::cuda {

/// Inputs are ForwardInputs or BackwardInputs.
template <typename Inputs>
ScoreProblem score_problem(const AttentionProblem& p, const Inputs& in) {
  const auto window = [](std::int64_t w) {
    return static_cast<int>(std::min(w, kMaxLength));  // wider sees no more
  };
  const auto indices = [](const IndexView& view) {
    return DeviceIndices{view.data, view.dtype == DType::i64};
  };
  constexpr float kTwoLog2E = 2 * 1.44269504088896341f;
  return {.cu_seqlens_q = indices(in.cu_seqlens_q),
          .cu_seqlens_kv = indices(in.cu_seqlens_kv),
          .seqused_kv = indices(in.seqused_kv),
          .batch = p.batch,
          .heads_q = p.heads_q,
          .group = p.heads_q / p.heads_kv,
          .batch_fastest = false,
          .seqlen_q = static_cast<int>(p.seqlen_q),
          .seqlen_kv = static_cast<int>(p.seqlen_kv),
          .window_left = window(p.mask.window_left),
          .window_right = window(p.mask.window_right),
          .top_left = p.mask.align == MaskAlign::top_left,
          .cap = p.softcap,
          .cap_exponent = p.softcap > 0 ? kTwoLog2E / p.softcap : 0};
}

}  // namespace rafter::cuda
