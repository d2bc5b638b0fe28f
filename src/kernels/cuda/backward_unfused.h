// The kernels beside the matrix products of the backward pass whose scores land, and what a launch
// passes to them. Scores are [pairs, seqlen_q, row_stride] of 16-bit elements for all pairs.
#pragma once

#include <cstdint>

#include "kernels/cuda/rows.h"
#include "kernels/cuda/scores.h"

namespace rafter::cuda {

/// delta = rowsum(dO ∘ O) − dlse of every row, 0 beyond a sequence; where asked, dO in 16 bits.
struct DeltaRows {
  Rows o, d_o;
  LseTarget dlse;            // data null: none
  float* delta = nullptr;    // [pairs, seqlen_q]
  void* d_o_copy = nullptr;  // [pairs, seqlen_q, head_dim_v] of the problem's dtype, 0 beyond a
                             // sequence; null: not wanted
  int head_dim_v = 0;
};
template <DType kDType>
Status launch_delta(const ScoreProblem& problem, const DeltaRows& rows, void* stream);

/// The matrices of all pairs. A row has zeros where it sees no key, over the blocks of `tile` keys
/// that any row of its block of `tile` rows sees; tile 0: over all keys.
struct ScoreGradients {
  void* p = nullptr;   // S, then P
  void* ds = nullptr;  // dP, then dS
  std::int64_t row_stride = 0;
  int tile = 0;
  LseTarget lse;                 // read
  const float* delta = nullptr;  // [pairs, seqlen_q]
};
/// P = exp(S − lse) in place.
template <DType kDType>
Status launch_weights(const ScoreProblem& problem, const ScoreGradients& scores, void* stream);
/// dS = P ∘ (dP − delta) in place of dP.
template <DType kDType>
Status launch_score_gradients(const ScoreProblem& problem, const ScoreGradients& scores,
                              void* stream);

/// A gradient's rows that sequences own: the sum over the pairs of its head, in their order.
struct GradientRows {
  const float* sums = nullptr;  // [pairs, capacity, head_dim], heads side by side; null: zeros
  Rows target;
  int head_dim = 0;
  RowsOf rows_of = RowsOf::queries;  // keys: heads_kv heads, each the sum of its group
  int first_row = 0, rows = 0;       // of every sequence
};
Status launch_store_gradient(const ScoreProblem& problem, const GradientRows& gradient,
                             void* stream);

}  // namespace rafter::cuda
