// Causal attention of one head over four tokens, and the kernel that computed it.
#include <rafter/attention.h>

#include <cstddef>
#include <iostream>
#include <vector>

int main() {
  constexpr std::int64_t kSeqlen = 4, kHeadDim = 2;
  const rafter::Result<rafter::Plan> plan = rafter::plan({.seqlen_q = kSeqlen,
                                                          .seqlen_kv = kSeqlen,
                                                          .head_dim = kHeadDim,
                                                          .mask = rafter::Mask::causal()},
                                                         rafter::Device::cpu());
  if (!plan) {
    std::cerr << plan.status().message() << "\n";
    return 1;
  }
  // Equal keys weigh every visible value alike: row i of o is the mean of v[0..i].
  const std::vector<float> q(kSeqlen * kHeadDim, 1.0f), k(kSeqlen * kHeadDim, 1.0f);
  const std::vector<float> v = {0, 10, 1, 11, 2, 12, 3, 13};  // [seqlen_kv, head_dim]
  std::vector<float> o(kSeqlen * kHeadDim);
  struct alignas(64) Line {  // a workspace starts at a multiple of 64 bytes
    std::byte bytes[64];
  };
  std::vector<Line> workspace(static_cast<std::size_t>(plan->workspace_bytes() + 63) / 64);

  const auto view = [&](const std::vector<float>& data) {
    return rafter::TensorView::contiguous(data.data(), rafter::DType::f32, 1, kSeqlen, 1, kHeadDim);
  };
  const rafter::Status done =
      plan->forward({.q = view(q), .k = view(k), .v = view(v)}, {.o = view(o)},
                    {.data = workspace.data(), .bytes = plan->workspace_bytes()});
  if (!done) {
    std::cerr << done.message() << "\n";
    return 1;
  }
  std::cout << "kernel " << plan->kernel() << ", last row " << o[6] << " " << o[7] << "\n";
  return o[6] == 1.5f && o[7] == 11.5f ? 0 : 1;
}
