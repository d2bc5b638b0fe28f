// The gradients of attention in float64, from the Jacobian of softmax written out: with
// p = softmax of a row and g_j = d_o · v_j,
//   ∂loss/∂logit_j = Σ_k g_k p_k ([j = k] − p_j) + dlse p_j = p_j (g_j − Σ_k p_k g_k + dlse).
// It takes neither o nor lse: both follow from q, k and v. Beside it the naive computation in the
// dtype, whose error the accuracy contract is a multiple of.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "support/oracle.h"

namespace rafter::testing {

/// Gradients of one head: dq [rows, dim], dk [keys, dim], dv [keys, dim_v]; they are added to.
struct HeadGradients {
  double* dq = nullptr;
  double* dk = nullptr;
  double* dv = nullptr;
};

/// Adds the gradients of one row; `size` likewise gets the sums of the absolute values of the
/// terms, which is what rounding errors are relative to.
inline void oracle_backward_row(const OracleHead& head, const OracleOptions& options,
                                std::int64_t row, const double* d_o, double dlse,
                                const HeadGradients& into, const HeadGradients& size) {
  const OracleRow r = oracle_logits(head, options, row);
  if (r.seen.empty()) {
    return;
  }
  double top = r.logits[0];
  for (const double logit : r.logits) {
    top = std::fmax(top, logit);
  }
  std::vector<double> p, g, g_size;
  double sum = 0;
  for (const double logit : r.logits) {
    p.push_back(std::exp(logit - top));
    sum += p.back();
  }
  double mean = 0, mean_size = 0;
  for (std::size_t n = 0; n < p.size(); ++n) {
    p[n] /= sum;
    double dot = 0, dot_size = 0;
    for (std::int64_t d = 0; d < head.dim_v; ++d) {
      const double term = d_o[d] * head.v[r.seen[n] * head.dim_v + d];
      dot += term;
      dot_size += std::fabs(term);
    }
    g.push_back(dot);
    g_size.push_back(dot_size);
    mean += p[n] * dot;
    mean_size += p[n] * dot_size;
  }
  for (std::size_t n = 0; n < p.size(); ++n) {
    const std::int64_t j = r.seen[n];
    const double ds = r.slopes[n] * p[n] * (g[n] - mean + dlse);
    const double ds_size =
        std::fabs(r.slopes[n] * p[n]) * (g_size[n] + mean_size + std::fabs(dlse));
    for (std::int64_t d = 0; d < head.dim; ++d) {
      const double q = head.q[row * head.dim + d];
      const double k = head.k[j * head.dim + d];
      into.dq[row * head.dim + d] += ds * k;
      into.dk[j * head.dim + d] += ds * q;
      size.dq[row * head.dim + d] += ds_size * std::fabs(k);
      size.dk[j * head.dim + d] += ds_size * std::fabs(q);
    }
    for (std::int64_t d = 0; d < head.dim_v; ++d) {
      into.dv[j * head.dim_v + d] += p[n] * d_o[d];
      size.dv[j * head.dim_v + d] += p[n] * std::fabs(d_o[d]);
    }
  }
}

/// Gradients in f32 as the unfused backward pass in the dtype has them, rounded to it only when
/// whole: probabilities, their gradients and those of the scores are kept in the dtype, sums in
/// f32, over keys and rows in ascending or descending order.
template <typename Round>
void naive_backward_head(const OracleHead& head, const OracleOptions& options, const double* d_o,
                         const double* o, const double* dlse, bool descending, Round round,
                         float* dq, float* dk, float* dv) {
  for (std::int64_t i = 0; i < head.rows; ++i) {
    const std::int64_t row = descending ? head.rows - 1 - i : i;
    std::vector<std::int64_t> seen;
    std::vector<float> p, slopes;
    float top = -std::numeric_limits<float>::infinity();
    for (std::int64_t j = 0; j < head.keys; ++j) {
      const std::int64_t key = descending ? head.keys - 1 - j : j;
      if (!oracle_sees(options, row, key, head.rows, head.keys)) {
        continue;
      }
      float dot = 0;
      for (std::int64_t d = 0; d < head.dim; ++d) {
        dot += static_cast<float>(head.q[row * head.dim + d]) *
               static_cast<float>(head.k[key * head.dim + d]);
      }
      float score = round(dot * static_cast<float>(options.scale));
      float slope = static_cast<float>(options.scale);
      if (options.softcap != 0) {
        const auto cap = static_cast<float>(options.softcap);
        const float ratio = std::tanh(score / cap);
        score = cap * ratio;
        slope *= 1 - ratio * ratio;
      }
      seen.push_back(key);
      p.push_back(score);
      slopes.push_back(slope);
      top = std::fmax(top, score);
    }
    float sum = 0;
    for (float& value : p) {
      value = std::exp(value - top);
      sum += value;
    }
    float delta = dlse == nullptr ? 0 : -static_cast<float>(dlse[row]);
    for (std::int64_t d = 0; d < head.dim_v; ++d) {
      delta += static_cast<float>(d_o[row * head.dim_v + d] * o[row * head.dim_v + d]);
    }
    for (std::size_t n = 0; n < seen.size(); ++n) {
      const float weight = round(p[n] / sum);
      float dp = 0;
      for (std::int64_t d = 0; d < head.dim_v; ++d) {
        const auto grad = static_cast<float>(d_o[row * head.dim_v + d]);
        dp += grad * static_cast<float>(head.v[seen[n] * head.dim_v + d]);
        dv[seen[n] * head.dim_v + d] += weight * grad;
      }
      const float ds = round(slopes[n] * weight * (round(dp) - delta));
      for (std::int64_t d = 0; d < head.dim; ++d) {
        dq[row * head.dim + d] += ds * static_cast<float>(head.k[seen[n] * head.dim + d]);
        dk[seen[n] * head.dim + d] += ds * static_cast<float>(head.q[row * head.dim + d]);
      }
    }
  }
}

}  // namespace rafter::testing
