// forward_sm90 behind one C function, so that torch_sdpa.py can run it beside PyTorch's kernels on
// the same tensors. Layout [batch, seqlen, heads, head_dim], or packed with cu_seqlens.
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "dispatch/kernel_entry.h"

namespace rafter {
std::span<const KernelEntry> entries_forward_sm90();
}

using namespace rafter;

struct RafterForwardCase {
  std::int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim;
  std::int64_t total;   // packed: rows of q and of k; else 0
  std::int32_t causal;  // 0 or 1
  std::int32_t is_f16;  // else bf16
};

extern "C" int rafter_forward(const RafterForwardCase* c, void* q, void* k, void* v, void* o,
                              float* lse, const std::int32_t* cu_seqlens, void* workspace,
                              std::int64_t workspace_bytes, void* stream) {
  const DType dtype = c->is_f16 != 0 ? DType::f16 : DType::bf16;
  const bool packed = cu_seqlens != nullptr;
  KernelProblem problem;
  problem.attention = {.batch = c->batch,
                       .heads_q = c->heads_q,
                       .heads_kv = c->heads_kv,
                       .seqlen_q = c->seqlen_q,
                       .seqlen_kv = c->seqlen_kv,
                       .head_dim = c->head_dim,
                       .head_dim_v = c->head_dim,
                       .dtype = dtype,
                       .mask = c->causal != 0 ? Mask::causal() : Mask::none(),
                       .softmax_scale = 1.0f / std::sqrt(static_cast<float>(c->head_dim)),
                       .layout = packed ? Layout::packed : Layout::dense,
                       .total_q = c->total,
                       .total_kv = c->total};
  const std::int64_t batch = packed ? 1 : c->batch;
  const std::int64_t rows_q = packed ? c->total : c->seqlen_q;
  const std::int64_t rows_kv = packed ? c->total : c->seqlen_kv;
  const auto view = [&](void* data, std::int64_t rows, std::int64_t heads) {
    return TensorView::contiguous(data, dtype, batch, rows, heads, c->head_dim);
  };
  ForwardInputs in{view(q, rows_q, c->heads_q), view(k, rows_kv, c->heads_kv),
                   view(v, rows_kv, c->heads_kv)};
  if (packed) {
    in.cu_seqlens_q = in.cu_seqlens_kv = {cu_seqlens, DType::i32, c->batch + 1, 0};
  }
  const ForwardOutputs out{view(o, rows_q, c->heads_q),
                           LseView::contiguous(lse, batch, c->heads_q, rows_q)};
  const KernelEntry& entry = entries_forward_sm90()[0];
  const Acceptance accepted = entry.accepts(problem);
  const Status status =
      !accepted.yes ? Status::unsupported("forward_sm90", accepted.reason, "another case")
      : workspace_bytes < entry.workspace(problem)
          ? Status::invalid_argument("workspace_bytes", std::to_string(workspace_bytes),
                                     std::to_string(entry.workspace(problem)))
          : entry.forward({problem, in, out, {workspace, workspace_bytes}, {stream}});
  if (!status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
  }
  return status ? 0 : 1;
}
