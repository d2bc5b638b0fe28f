// decode_sm90 behind two C functions, so that torch_decode.py can run it beside PyTorch's kernels
// on the same tensors. One query token of each sequence; caches [batch, seqlen_kv, heads_kv,
// head_dim] or [pages, page_size, heads_kv, head_dim].
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "dispatch/kernel_entry.h"

namespace rafter {
std::span<const KernelEntry> entries_decode_sm90();
}

using namespace rafter;

struct RafterDecodeCase {
  std::int64_t batch, heads_q, heads_kv, seqlen_kv, head_dim;
  std::int64_t page_size, num_pages, table_cols;  // 0: dense
  std::int32_t kv_bits;                           // 16: bf16; 8: e4m3 without factors
};

namespace {

KernelProblem problem_of(const RafterDecodeCase& c, bool lengths) {
  KernelProblem problem;
  problem.attention = {.batch = c.batch,
                       .heads_q = c.heads_q,
                       .heads_kv = c.heads_kv,
                       .seqlen_q = 1,
                       .seqlen_kv = c.seqlen_kv,
                       .head_dim = c.head_dim,
                       .head_dim_v = c.head_dim,
                       .dtype = DType::bf16,
                       .kv_dtype = c.kv_bits == 8 ? DType::e4m3 : DType::bf16,
                       .softmax_scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim)),
                       .layout = c.page_size > 0 ? Layout::paged : Layout::dense,
                       .page_size = c.page_size,
                       .num_pages = c.num_pages,
                       .seqused_kv = lengths};
  return problem;
}

}  // namespace

/// Bytes of workspace, or −1 where the kernel refuses.
extern "C" std::int64_t rafter_decode_workspace(const RafterDecodeCase* c, int lengths) {
  const KernelProblem problem = problem_of(*c, lengths != 0);
  const KernelEntry& entry = entries_decode_sm90()[0];
  const Acceptance accepted = entry.accepts(problem);
  if (!accepted.yes) {
    std::fprintf(stderr, "decode_sm90 refuses: %s\n", accepted.reason.c_str());
    return -1;
  }
  return entry.workspace(problem);
}

extern "C" int rafter_decode(const RafterDecodeCase* c, void* q, void* k, void* v, void* o,
                             const std::int32_t* lengths, const std::int32_t* page_table,
                             void* workspace, std::int64_t workspace_bytes, void* stream) {
  const KernelProblem problem = problem_of(*c, lengths != nullptr);
  const AttentionProblem& p = problem.attention;
  const bool paged = p.layout == Layout::paged;
  const auto cache = [&](void* data) {
    return TensorView::contiguous(data, *p.kv_dtype, paged ? p.num_pages : p.batch,
                                  paged ? p.page_size : p.seqlen_kv, p.heads_kv, p.head_dim);
  };
  const auto row = [&](void* data) {
    return TensorView::contiguous(data, DType::bf16, p.batch, 1, p.heads_q, p.head_dim);
  };
  ForwardInputs in{row(q), cache(k), cache(v)};
  if (lengths != nullptr) {
    in.seqused_kv = {lengths, DType::i32, p.batch, 0};
  }
  if (paged) {
    in.page_table = {page_table, DType::i32, p.batch * c->table_cols, c->table_cols};
  }
  const ForwardOutputs out{row(o)};
  const Status status =
      entries_decode_sm90()[0].forward({problem, in, out, {workspace, workspace_bytes}, {stream}});
  if (!status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
  }
  return status ? 0 : 1;
}

/// One launch after the other, each over caches of its own: as many layers of a model.
extern "C" int rafter_decode_layers(const RafterDecodeCase* c, std::int64_t layers, void* q,
                                    void* k, void* v, void* o, const std::int32_t* lengths,
                                    void* workspace, std::int64_t workspace_bytes, void* stream) {
  const std::int64_t bytes =
      c->batch * c->seqlen_kv * c->heads_kv * c->head_dim * (c->kv_bits == 8 ? 1 : 2);
  int failed = 0;
  for (std::int64_t layer = 0; layer < layers && failed == 0; ++layer) {
    const auto of_layer = [&](void* data) { return static_cast<std::byte*>(data) + layer * bytes; };
    failed = rafter_decode(c, q, of_layer(k), of_layer(v), o, lengths, nullptr, workspace,
                           workspace_bytes, stream);
  }
  return failed;
}
