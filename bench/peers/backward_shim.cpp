// backward_sm90 behind one C function, so that torch_sdpa_backward.py can run it beside PyTorch's
// kernels on the same tensors. Layout [batch, seqlen, heads, head_dim], or packed with cu_seqlens.
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "dispatch/kernel_entry.h"

namespace rafter {
std::span<const KernelEntry> entries_backward_sm90();
}

using namespace rafter;

struct RafterBackwardCase {
  std::int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim;
  std::int64_t total;                      // packed: rows of q and of k; else 0
  std::int64_t window_left, window_right;  // −1: unbounded
  std::int32_t is_f16;                     // else bf16
};

namespace {

KernelProblem problem_of(const RafterBackwardCase& c) {
  KernelProblem problem;
  problem.attention = {.batch = c.batch,
                       .heads_q = c.heads_q,
                       .heads_kv = c.heads_kv,
                       .seqlen_q = c.seqlen_q,
                       .seqlen_kv = c.seqlen_kv,
                       .head_dim = c.head_dim,
                       .head_dim_v = c.head_dim,
                       .dtype = c.is_f16 != 0 ? DType::f16 : DType::bf16,
                       .mask = Mask::window(c.window_left, c.window_right),
                       .softmax_scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim)),
                       .layout = c.total > 0 ? Layout::packed : Layout::dense,
                       .total_q = c.total,
                       .total_kv = c.total};
  return problem;
}

}  // namespace

/// Bytes of workspace; −1 when the case is refused.
extern "C" std::int64_t rafter_backward_workspace(const RafterBackwardCase* c) {
  const KernelEntry& entry = entries_backward_sm90()[0];
  const KernelProblem problem = problem_of(*c);
  const Acceptance accepted = entry.accepts(problem);
  if (!accepted.yes) {
    std::fprintf(stderr, "%s\n", accepted.reason.c_str());
  }
  return accepted.yes ? entry.workspace(problem) : -1;
}

/// tensors: q, k, v, o, d_o, dq, dk, dv.
extern "C" int rafter_backward(const RafterBackwardCase* c, void* const* tensors, float* lse,
                               const std::int32_t* cu_seqlens, void* workspace,
                               std::int64_t workspace_bytes, void* stream) {
  const KernelProblem problem = problem_of(*c);
  const AttentionProblem& p = problem.attention;
  const bool packed = c->total > 0;
  const std::int64_t batch = packed ? 1 : c->batch;
  const auto queries = [&](int i) {
    return TensorView::contiguous(tensors[i], p.dtype, batch, packed ? c->total : c->seqlen_q,
                                  c->heads_q, c->head_dim);
  };
  const auto keys = [&](int i) {
    return TensorView::contiguous(tensors[i], p.dtype, batch, packed ? c->total : c->seqlen_kv,
                                  c->heads_kv, c->head_dim);
  };
  BackwardInputs in{
      .q = queries(0),
      .k = keys(1),
      .v = keys(2),
      .o = queries(3),
      .lse = LseView::contiguous(lse, batch, c->heads_q, packed ? c->total : c->seqlen_q),
      .d_o = queries(4)};
  if (packed) {
    in.cu_seqlens_q = in.cu_seqlens_kv = {cu_seqlens, DType::i32, c->batch + 1, 0};
  }
  const BackwardOutputs out{queries(5), keys(6), keys(7)};
  const Status status = entries_backward_sm90()[0].backward(
      {problem, in, out, {workspace, workspace_bytes}, {stream}});
  if (!status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
  }
  return status ? 0 : 1;
}
