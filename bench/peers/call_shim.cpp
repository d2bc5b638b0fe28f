// How long a call of Plan::forward takes the host, for python_call.py to set Python's beside it.
#include <chrono>
#include <cstdint>
#include <cstdio>

#include "rafter/attention.h"

using namespace rafter;

struct RafterCallCase {
  std::int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim;
  std::int32_t causal;  // 0 or 1
};

/// Seconds of one call, the mean of `calls` that are queued on `stream` one after another; below 0
/// when the plan or a call fails, which is then written to stderr. bf16, contiguous; o and the
/// workspace (1 MiB) are reused.
extern "C" double rafter_seconds_per_call(const RafterCallCase* c, void* q, void* k, void* v,
                                          void* o, void* workspace, void* stream, int calls) {
  const AttentionProblem problem{.batch = c->batch,
                                 .heads_q = c->heads_q,
                                 .heads_kv = c->heads_kv,
                                 .seqlen_q = c->seqlen_q,
                                 .seqlen_kv = c->seqlen_kv,
                                 .head_dim = c->head_dim,
                                 .dtype = DType::bf16,
                                 .mask = c->causal != 0 ? Mask::causal() : Mask::none()};
  const Result<Plan> made = plan(problem, Device::cuda());
  if (!made) {
    std::fprintf(stderr, "%s\n", made.status().message().c_str());
    return -1;
  }
  const auto view = [&](void* data, std::int64_t rows, std::int64_t heads) {
    return TensorView::contiguous(data, DType::bf16, c->batch, rows, heads, c->head_dim);
  };
  const ForwardInputs in{view(q, c->seqlen_q, c->heads_q), view(k, c->seqlen_kv, c->heads_kv),
                         view(v, c->seqlen_kv, c->heads_kv)};
  const ForwardOutputs out{view(o, c->seqlen_q, c->heads_q), {}};
  const auto started = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) {
    if (const Status status = made->forward(in, out, {workspace, 1 << 20}, {stream}); !status) {
      std::fprintf(stderr, "%s\n", status.message().c_str());
      return -1;
    }
  }
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - started;
  return spent.count() / calls;
}
