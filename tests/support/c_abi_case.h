// A small problem through the C ABI, with the memory of its run.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "rafter/rafter.h"

namespace rafter::c_abi_case {

inline constexpr std::int64_t kBatch = 2, kHeads = 4, kHeadsKv = 2, kSeqlen = 33, kDim = 16;

/// Causal, groups of two heads, f32.
inline rafter_problem causal_problem() {
  rafter_problem problem{};
  problem.size = sizeof(problem);
  problem.batch = kBatch;
  problem.heads_q = kHeads;
  problem.heads_kv = kHeadsKv;
  problem.seqlen_q = problem.seqlen_kv = kSeqlen;
  problem.head_dim = kDim;
  problem.dtype = RAFTER_F32;
  problem.mask = RAFTER_MASK_CAUSAL;
  return problem;
}

struct alignas(64) Line {
  std::byte bytes[64];
};

/// Values, outputs and arguments of one run.
struct Call {
  std::vector<float> q, k, v, o, lse;
  std::vector<Line> workspace;
  rafter_forward_args args{};

  explicit Call(std::int64_t workspace_bytes) {
    q = wave(kBatch * kSeqlen * kHeads * kDim, 0.37f);
    k = wave(kBatch * kSeqlen * kHeadsKv * kDim, 0.61f);
    v = wave(kBatch * kSeqlen * kHeadsKv * kDim, 0.83f);
    o.resize(q.size(), std::nanf(""));
    lse.resize(static_cast<std::size_t>(kBatch * kHeads * kSeqlen), std::nanf(""));
    workspace.resize(static_cast<std::size_t>(workspace_bytes / 64 + 1));
    args.size = sizeof(args);
    args.q = rafter_contiguous(q.data(), RAFTER_F32, kBatch, kSeqlen, kHeads, kDim);
    args.k = rafter_contiguous(k.data(), RAFTER_F32, kBatch, kSeqlen, kHeadsKv, kDim);
    args.v = rafter_contiguous(v.data(), RAFTER_F32, kBatch, kSeqlen, kHeadsKv, kDim);
    args.o = rafter_contiguous(o.data(), RAFTER_F32, kBatch, kSeqlen, kHeads, kDim);
    args.lse = rafter_contiguous_lse(lse.data(), kBatch, kHeads, kSeqlen);
    args.workspace = workspace.data();
    args.workspace_bytes = workspace_bytes;
  }
  static std::vector<float> wave(std::int64_t n, float step) {
    std::vector<float> values(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = std::sin(step * static_cast<float>(i));
    }
    return values;
  }
};

class CAbi : public ::testing::Test {
 protected:
  ~CAbi() override { rafter_plan_destroy(plan_); }
  void make(const rafter_problem& problem, const rafter_plan_options* options = nullptr) {
    rafter_plan_destroy(plan_);
    ASSERT_EQ(rafter_plan_create(&problem, options, &plan_), RAFTER_OK) << rafter_error_message();
  }
  /// That planning fails with this code, on this parameter.
  void expect_refused(const rafter_problem& problem, rafter_status code, const char* parameter,
                      const rafter_plan_options* options = nullptr) {
    rafter_plan* plan = plan_;
    EXPECT_EQ(rafter_plan_create(&problem, options, &plan), code) << rafter_error_message();
    EXPECT_STREQ(rafter_error_parameter(), parameter) << rafter_error_message();
    EXPECT_EQ(plan, nullptr);
  }
  rafter_plan* plan_ = nullptr;
};

inline bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace rafter::c_abi_case
