// Host side of the fused backward kernel for sm_90a: what its launches pass, and their
// instantiations.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/scores.h"
#include "tiles/sm90_backward.h"

namespace rafter::cuda {

/// A tensor that threads read or write element by element. Strides count elements.
struct PlainTensor {
  void* data = nullptr;  // [batch, seqlen, heads, head_dim]
  std::int64_t stride_batch = 0, stride_seqlen = 0, stride_heads = 0;
  bool is_f32 = false;   // else of the problem's dtype
  bool aligned = false;  // rows begin at, and are of, multiples of 16 bytes
};

/// Elements of rows that the copy engine can read: the next multiple of 16 bytes.
constexpr std::int64_t whole_chunks(std::int64_t head_dim) { return (head_dim + 7) / 8 * 8; }

/// Everything the three kernels read besides tensors of the copy engine.
struct BackwardParams {
  CUtensorMap q, k, v, d_o;  // (head_dim, seqlen, heads, batch)
  int q_batch_step = 1, k_batch_step = 1, v_batch_step = 1, d_o_batch_step = 1;
  int q_heads_step = 1, k_heads_step = 1, v_heads_step = 1, d_o_heads_step = 1;
  ScoreProblem problem;
  int head_dim = 0, head_dim_v = 0;
  int section = 1;          // KV heads in flight together
  float softmax_scale = 0;  // of dQ and dK
  bool softcap = false;
  float scale_log2 = 0;       // of raw scores; with softcap, softcap · log2(e) of their tanh
  float transform_scale = 0;  // with softcap: 2·log2(e)·softmax_scale/softcap
  PlainTensor dq, dk, dv;
  // Workspace. A row pair of a slot: lse in log2 units (+∞ where nothing is seen), then delta.
  unsigned* counter = nullptr;  // the next item; 0 before the launch
  unsigned* turns = nullptr;    // [slots, heads_q]: KV tiles that have added to dQ; 0 before
  float* rows = nullptr;        // [slots, heads_q, 2, tile_q]
  float* dq_sums = nullptr;     // [slots, heads_q, parts, 64 × 64]
  std::int64_t slots = 0;
};

/// What the first kernel reads and, besides params.rows, may write.
struct BackwardRowInputs {
  PlainTensor o, d_o;
  LseTarget lse, dlse;       // dlse.data may be null
  void* d_o_copy = nullptr;  // [rows, heads_q, whole_chunks(head_dim_v)] of the problem's dtype,
                             // where the copy engine cannot read d_o itself; else null
};

/// Rows of 16-bit elements to [batch, seqlen, heads, whole_chunks(head_dim)], zeros behind each.
struct WidenParams {
  PlainTensor from;
  void* to = nullptr;
  std::int64_t batch = 0, seqlen = 0, heads = 0;
  int head_dim = 0;
};
Status launch_widen_rows(WidenParams params, void* stream);

/// delta = rowsum(dO ∘ O) − dlse and lse in log2 units, of every slot.
template <DType kDType>
Status launch_backward_rows(const BackwardParams& params, const BackwardRowInputs& in, int row,
                            void* stream);
/// dK, dV, and the sums of dQ. Defined in backward_sm90.cuh, instantiated in inst/.
template <DType kDType, int kRow>
Status launch_backward_sm90(const BackwardParams& params, unsigned blocks, void* stream);
/// dQ = softmax_scale · its sums, in its own layout and dtype.
template <DType kDType>
Status launch_backward_dq(const BackwardParams& params, int row, void* stream);

}  // namespace rafter::cuda
