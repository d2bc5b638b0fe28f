// Forward attention as two kernels on CUDA devices: S = softmax_scale · QKᵀ in memory by cuBLASLt,
// then softmax fused into PV (half_fused_sm90.cuh): the scores land once and are read once, the
// probabilities never land. Shapes, dtypes, waves and padding are those of unfused_cublaslt.
#include <array>
#include <span>

#include "hw/cuda/tensor_map.h"
#include "kernels/cuda/scores_common.h"
#include "tiles/sm90_half_fused.h"

namespace rafter {
namespace {

Status set_values(const cuda::ScoreCall& call, cuda::HalfFusedParams& params) {
  params.v_by_pair = call.sizes().gathered;
  const TensorView v = params.v_by_pair ? call.gathered_values() : call.call().in.v;
  cuda::TensorMap map{};
  const int row = tiles::sm90_half_fused_row_for(v.head_dim);
  Status status = cuda::make_tensor_map("v", v, tiles::kSm90HalfFusedRows[row].tile_kv, map);
  params.v = map.map;
  params.v_batch_step = map.batch_step;
  params.v_heads_step = map.heads_step;
  return status;
}

/// The wave's scores as the copy engine sees them: what lies beyond its rows and keys is zero.
Status set_scores(const cuda::ScoreCall& call, const cuda::ScoreWave& wave,
                  cuda::HalfFusedParams& params) {
  const AttentionProblem& p = call.call().problem.attention;
  TensorView s =
      TensorView::contiguous(wave.scores, p.dtype, wave.pairs, wave.rows, 1, p.seqlen_kv);
  s.stride_seqlen = s.stride_heads = wave.row_stride;
  s.stride_batch = wave.pair_stride;
  cuda::TensorMap map{};
  Status status = cuda::make_tensor_map("scores", s, 64, map);
  params.s = map.map;
  params.s_pair_step = map.batch_step;
  params.wave = wave;
  return status;
}

Status forward(const ForwardCall& forward_call) {
  const cuda::DeviceScope device(forward_call.problem.device_index);
  if (!device.status()) {
    return device.status();
  }
  cuda::ScoreCall call(forward_call, Pipeline::half_fused);
  if (Status status = call.check_tensors(); !status) {
    return status;
  }
  const TensorView& o = forward_call.out.o;
  cuda::HalfFusedParams params{};
  params.problem = call.problem();
  params.lse = call.lse();
  params.o = o.data;
  params.o_stride_batch = o.stride_batch;
  params.o_stride_seqlen = o.stride_seqlen;
  params.o_stride_heads = o.stride_heads;
  params.o_is_f32 = o.dtype == DType::f32;
  params.head_dim_v = static_cast<int>(o.head_dim);
  if (Status status = set_values(call, params); !status) {
    return status;
  }
  const bool f16 = forward_call.problem.attention.dtype == DType::f16;
  return call.for_each_wave([&](const cuda::ScoreWave& wave) {
    if (Status status = set_scores(call, wave, params); !status) {
      return status;
    }
    return f16 ? cuda::launch_half_fused<DType::f16>(params, forward_call.stream.handle)
               : cuda::launch_half_fused<DType::bf16>(params, forward_call.stream.handle);
  });
}

}  // namespace

std::span<const KernelEntry> entries_half_fused_sm90() {
  static const std::array<KernelEntry, 1> kEntries = {
      cuda::scores_entry("half_fused_sm90", Pipeline::half_fused, forward)};
  return kEntries;
}

}  // namespace rafter
