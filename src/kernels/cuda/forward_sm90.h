// Host side of the fused forward kernel for sm_90a: what a launch passes, and its instantiations.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "hw/cuda/launch.h"
#include "kernels/cuda/device_indices.h"
#include "rafter/tensor.h"
#include "tiles/sm90_forward.h"

namespace rafter::cuda {

/// Which sequences a launch computes: those of the other kind have no query tiles in it.
enum class SequenceKind { all, not_short, is_short };  // is_sm90_forward_short()

/// Everything the kernel reads besides tensors. Strides count elements.
struct ForwardParams {
  CUtensorMap q, k, v, o_map;  // (head_dim, seqlen, heads, batch); o_map when o_by_copy
  void* o = nullptr;           // [batch, seqlen_q, heads_q, head_dim_v]
  float* lse = nullptr;        // [batch, heads_q, seqlen_q] or null
  std::int64_t o_stride_batch = 0, o_stride_seqlen = 0, o_stride_heads = 0;
  std::int64_t lse_stride_batch = 0, lse_stride_heads = 0, lse_stride_seqlen = 0;
  DeviceIndices cu_seqlens_q, cu_seqlens_kv, seqused_kv;
  unsigned* counter = nullptr;  // 0 before the launch; null: tiles are dealt in turn
  int batch = 0, heads_q = 0, group = 1;
  int seqlen_q = 0, seqlen_kv = 0;          // capacities
  int section = 1;                          // heads in flight together
  int window_left = -1, window_right = -1;  // at most kMaxLength
  int head_dim_v = 0;
  int q_batch_step = 1, k_batch_step = 1, v_batch_step = 1;
  int q_heads_step = 1, k_heads_step = 1, v_heads_step = 1;
  bool top_left = false;
  bool o_by_copy = false;  // the copy engine can write o, rows beyond seqlen_q left out
  int o_batch_step = 1, o_heads_step = 1;
  bool o_is_f32 = false;
  bool o_in_pairs = true;  // o may be written two elements at a time
  // score_log2 = softmax_scale · log2(e) · q·k, or with softcap its tanh; p = 2^(score_log2 − max).
  float scale_log2 = 0;       // of raw scores; 1 when `transform`
  bool transform = false;     // softcap, or a scale that is not positive: applied before the mask
  float transform_scale = 0;  // factor of raw scores; with softcap: 2·log2(e)·softmax_scale/softcap
  float transform_cap = 0;    // softcap · log2(e); 0: no softcap
  // Not all: two launches share the batch. The second, launched early, may run beside the first and
  // ends after it.
  SequenceKind takes = SequenceKind::all;
  bool is_first = false, is_second = false;
};

/// Queues the kernel of tuning row kRow. Defined in forward_sm90.cuh, instantiated in inst/.
template <DType kDType, int kRow>
Status launch_forward_sm90(const ForwardParams& params, unsigned blocks, void* stream);

}  // namespace rafter::cuda
