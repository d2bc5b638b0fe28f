// What the pipelines whose scores land share on CUDA devices: the kernels beside the matrix
// products, and what a launch passes to them.
#pragma once

#include <cstdint>

#include "kernels/cuda/forward_sm90.h"
#include "tiles/score_waves.h"

namespace rafter::cuda {

/// Lengths, mask and the order of (sequence, head) pairs, as kernels read them.
struct ScoreProblem {
  DeviceIndices cu_seqlens_q, cu_seqlens_kv, seqused_kv;
  std::int64_t batch = 1, heads_q = 1, group = 1;
  bool batch_fastest = false;
  int seqlen_q = 0, seqlen_kv = 0;          // capacities
  int window_left = -1, window_right = -1;  // at most kMaxLength
  bool top_left = false;
  float cap = 0;           // softcap; 0: off
  float cap_exponent = 0;  // 2 · log2(e) / softcap
};

/// The pairs and query rows whose scores a buffer holds: element (i, r, key) is the score of row
/// first_row + r of pair first_pair + i, [pairs, rows, row_stride].
struct ScoreWave {
  void* scores = nullptr;
  std::int64_t row_stride = 0, pair_stride = 0;
  std::int64_t first_pair = 0, pairs = 0;
  int first_row = 0, rows = 0;
};

struct LseTarget {
  float* data = nullptr;  // null: not wanted
  std::int64_t stride_batch = 0, stride_heads = 0, stride_seqlen = 0;
};

/// Probabilities in place of the scores of a wave, and lse. Row blocks of `row_block` query rows
/// have zeros over the keys that any of their rows sees, from the multiple of 8 below the first;
/// whole: over all seqlen_kv keys. `widest` bounds the keys of one block.
template <DType kDType>
Status launch_softmax(const ScoreProblem& problem, const ScoreWave& wave, const LseTarget& lse,
                      int row_block, bool whole, std::int64_t widest, void* stream);

enum class RowsOf : std::uint8_t { queries, keys };

/// Rows of a tensor to padded ones, [pairs, capacity, head_dim]: rows beyond a sequence are 0.
/// 16-bit elements, strides multiples of 8.
struct GatherRows {
  const void* source = nullptr;
  std::int64_t stride_batch = 0, stride_seqlen = 0, stride_heads = 0;
  void* target = nullptr;
  int head_dim = 0;
  RowsOf rows_of = RowsOf::queries;
  std::int64_t first_pair = 0, pairs = 0;
};
Status launch_gather(const ScoreProblem& problem, const GatherRows& gather, void* stream);

/// The way back: rows [first_row, first_row + rows) of [pairs, rows, head_dim] to those of o that
/// sequences own; a null source stands for zeros. Elements of `element_bytes`.
struct ScatterRows {
  const void* source = nullptr;
  void* target = nullptr;
  std::int64_t stride_batch = 0, stride_seqlen = 0, stride_heads = 0;
  int head_dim = 0, element_bytes = 2;
  std::int64_t first_pair = 0, pairs = 0;
  int first_row = 0, rows = 0;
};
Status launch_scatter(const ScoreProblem& problem, const ScatterRows& scatter, void* stream);

/// O = softmax(S) V of a wave: what half_fused_sm90.cuh does in one pass over the scores.
struct HalfFusedParams {
  CUtensorMap s;  // (key, row, 1, pair of the wave), boxes of 64 keys × 64 rows
  CUtensorMap v;  // (head_dim_v, key, head, batch), boxes of 64 columns × 64 keys
  ScoreProblem problem;
  ScoreWave wave;
  LseTarget lse;
  void* o = nullptr;
  std::int64_t o_stride_batch = 0, o_stride_seqlen = 0, o_stride_heads = 0;
  bool o_is_f32 = false;
  bool v_by_pair = false;  // v was gathered: its batch coordinate is the pair of the wave
  int s_pair_step = 1;
  int v_batch_step = 1, v_heads_step = 1;
  int head_dim_v = 0;
};
template <DType kDType>
Status launch_half_fused(const HalfFusedParams& params, void* stream);

}  // namespace rafter::cuda
