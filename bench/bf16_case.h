// What the benches of the bf16 schedules measure on: eight heads of random rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "dispatch/kernel_entry.h"
#include "rafter/tensor.h"

namespace rafter::bench {

using Bits = std::vector<std::uint16_t>;

constexpr std::int64_t kHeads = 8;

struct Shape {
  std::int64_t seqlen, head_dim;
  bool causal;

  std::int64_t elements() const { return seqlen * kHeads * head_dim; }
  /// FLOP of one matrix product over the scores that are seen, in all heads.
  double product_flops() const {
    return static_cast<double>(head_dim * kHeads) * static_cast<double>(seqlen) *
           static_cast<double>(causal ? seqlen + 1 : 2 * seqlen);
  }
  KernelProblem problem(int threads) const {
    return {.attention = {.heads_q = kHeads,
                          .heads_kv = kHeads,
                          .seqlen_q = seqlen,
                          .seqlen_kv = seqlen,
                          .head_dim = head_dim,
                          .head_dim_v = head_dim,
                          .dtype = DType::bf16,
                          .mask = causal ? Mask::causal() : Mask::none(),
                          .softmax_scale = 1 / std::sqrt(static_cast<float>(head_dim))},
            .threads = threads};
  }
  TensorView view(Bits& x) const {
    return TensorView::contiguous(x.data(), DType::bf16, 1, seqlen, kHeads, head_dim);
  }
};

inline Bits random_bf16(std::int64_t elements, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Bits out(static_cast<std::size_t>(elements));
  std::generate(out.begin(), out.end(), [&] { return f32_to_bf16(normal(generator)); });
  return out;
}

}  // namespace rafter::bench
