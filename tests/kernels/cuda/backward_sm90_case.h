// Calls of backward_sm90 on tensors in device memory, for tests that compare its bits.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "base/element.h"
#include "dispatch/kernel_entry.h"
#include "kernels/cuda/device_buffer.h"

namespace rafter {
std::span<const KernelEntry> entries_backward_sm90();
}

namespace rafter::testing {

inline const KernelEntry& entry() { return entries_backward_sm90()[0]; }

#define RAFTER_NEEDS_SM90()            \
  if (!entry().machine_has().yes) {    \
    GTEST_SKIP() << "no sm_90 device"; \
  }

/// A problem of random values on the device.
struct Loaded {
  KernelProblem problem;
  DeviceBuffer q, k, v, o, d_o, lse, dq, dk, dv, workspace;

  Loaded(const AttentionProblem& p, std::uint32_t seed)
      : problem{p, 1, 0},
        q(random(p.batch * p.seqlen_q * p.heads_q * p.head_dim, seed)),
        k(random(p.batch * p.seqlen_kv * p.heads_kv * p.head_dim, seed + 1)),
        v(random(p.batch * p.seqlen_kv * p.heads_kv * p.head_dim, seed + 2)),
        o(random(p.batch * p.seqlen_q * p.heads_q * p.head_dim, seed + 3)),
        d_o(random(p.batch * p.seqlen_q * p.heads_q * p.head_dim, seed + 4)),
        lse(std::vector<float>(static_cast<std::size_t>(p.batch * p.seqlen_q * p.heads_q), 6.0F)),
        dq(q.bytes()),
        dk(k.bytes()),
        dv(v.bytes()),
        workspace(static_cast<std::size_t>(entry().workspace(problem))) {
    // The buffers are poisoned on the default stream, for which streams of a test may not wait.
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  static std::vector<std::uint16_t> random(std::int64_t count, std::uint32_t seed) {
    std::vector<std::uint16_t> bits(static_cast<std::size_t>(count));
    std::uint32_t state = seed * 2654435761U + 1;
    for (std::uint16_t& x : bits) {
      state = state * 1664525U + 1013904223U;
      x = f32_to_bf16(static_cast<float>(state >> 8) / 8388608.0F - 1);
    }
    return bits;
  }
  /// With another dO where one is given.
  void run(cudaStream_t stream, const TensorView& other_d_o = {}) {
    const AttentionProblem& p = problem.attention;
    const auto queries = [&p](const DeviceBuffer& b) {
      return TensorView::contiguous(b.data(), p.dtype, p.batch, p.seqlen_q, p.heads_q, p.head_dim);
    };
    const auto keys = [&p](const DeviceBuffer& b) {
      return TensorView::contiguous(b.data(), p.dtype, p.batch, p.seqlen_kv, p.heads_kv,
                                    p.head_dim);
    };
    const BackwardInputs in{
        .q = queries(q),
        .k = keys(k),
        .v = keys(v),
        .o = queries(o),
        .lse = LseView::contiguous(static_cast<float*>(lse.data()), p.batch, p.heads_q, p.seqlen_q),
        .d_o = other_d_o.data == nullptr ? queries(d_o) : other_d_o};
    const Status status =
        entry().backward({problem,
                          in,
                          {queries(dq), keys(dk), keys(dv)},
                          {workspace.data(), static_cast<std::int64_t>(workspace.bytes())},
                          {stream}});
    EXPECT_TRUE(status.is_ok()) << status.message();
  }
  std::vector<std::uint16_t> bits() const {
    std::vector<std::uint16_t> all;
    for (const DeviceBuffer* one : {&dq, &dk, &dv}) {
      const auto part = one->download<std::uint16_t>();
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }
  void poison() {
    for (DeviceBuffer* one : {&dq, &dk, &dv, &workspace}) {
      one->poison();
    }
  }
};

inline AttentionProblem shape(std::int64_t heads, std::int64_t seqlen, std::int64_t head_dim,
                              const Mask& mask = {}) {
  return {.batch = 1,
          .heads_q = heads,
          .heads_kv = heads,
          .seqlen_q = seqlen,
          .seqlen_kv = seqlen,
          .head_dim = head_dim,
          .head_dim_v = head_dim,
          .dtype = DType::bf16,
          .mask = mask,
          .softmax_scale = 1 / std::sqrt(static_cast<float>(head_dim))};
}

}  // namespace rafter::testing
