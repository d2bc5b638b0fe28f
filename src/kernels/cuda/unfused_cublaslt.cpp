// Forward attention as three kernels on CUDA devices: S = softmax_scale · QKᵀ, P = softmax(S) in
// place, O = PV. The honest baseline: cuBLASLt products, S and P in memory in the problem's dtype.
// Q, O [batch, seqlen_q, heads_q, head_dim]   K, V [batch, seqlen_kv, heads_kv, head_dim]; bf16 or
// f16 in, that or f32 out; accumulators, softmax and sums f32.
//   scores   one batched product per run of heads (or sequences) a constant stride apart; under a
//            mask, blocks of 1024 query rows over the keys that those see
//   softmax  scores.cu: a row is read once and written once
//   output   the products' way back
// Memory is bounded: (sequence, head) pairs go through the workspace in waves. Where lengths are on
// the device (packed, seqused_kv) each sequence is first padded with zeros to its capacity.
#include <array>
#include <span>

#include "kernels/cuda/scores_common.h"

namespace rafter {
namespace {

Status forward(const ForwardCall& forward_call) {
  const cuda::DeviceScope device(forward_call.problem.device_index);
  if (!device.status()) {
    return device.status();
  }
  cuda::ScoreCall call(forward_call, Pipeline::unfused);
  if (Status status = call.check_tensors(); !status) {
    return status;
  }
  return call.for_each_wave([&call](const cuda::ScoreWave& wave) {
    Status status = call.softmax(wave);
    return status ? call.multiply_values(wave) : status;
  });
}

}  // namespace

std::span<const KernelEntry> entries_unfused_cublaslt() {
  static const std::array<KernelEntry, 1> kEntries = {
      cuda::scores_entry("unfused_cublaslt", Pipeline::unfused, forward)};
  return kEntries;
}

}  // namespace rafter
