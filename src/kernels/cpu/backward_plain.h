// The backward pass of one KV head in float64 by plain loops over visible pairs: what the reference
// is, and what kernels of matrix products do where 0 · NaN would carry a NaN to rows and keys that
// do not see each other. No instruction set.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "base/element.h"
#include "dispatch/kernel_entry.h"
#include "kernels/cpu/sequence.h"

namespace rafter::cpu::plain {

using Vector = std::array<double, 256>;  // head_dim and head_dim_v are at most 256

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

inline void load_row(const TensorView& view, std::int64_t offset, std::int64_t dim, Vector& into) {
  for (std::int64_t d = 0; d < dim; ++d) {
    into[index(d)] = base::load_element(view, offset + d * view.stride_head_dim);
  }
}

inline void store_row(const TensorView& view, std::int64_t offset, std::int64_t dim,
                      const double* from) {
  for (std::int64_t d = 0; d < dim; ++d) {
    base::store_element(view, offset + d * view.stride_head_dim, from[d]);
  }
}

inline double dot(const Vector& a, const TensorView& view, std::int64_t offset, std::int64_t dim) {
  double sum = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    sum += a[index(d)] * base::load_element(view, offset + d * view.stride_head_dim);
  }
  return sum;
}

/// One query row: writes its dq, adds to dk [keys, head_dim] and dv [keys, head_dim_v].
inline void backward_row(const BackwardCall& call, const Sequence& s, std::int64_t head_q,
                         std::int64_t row, double* dk, double* dv) {
  const AttentionProblem& p = call.problem.attention;
  const BackwardInputs& in = call.in;
  const std::int64_t head_kv = head_q / (p.heads_q / p.heads_kv);
  const tiles::Range keys = mask_window(p.mask, s).row(row);
  const double scale = *p.softmax_scale;
  const double softcap = p.softcap;
  const auto row_in = [&](const TensorView& view) {
    return offset_of(view, s.q_batch, s.q_row + row, head_q);
  };
  Vector dq = {};
  if (keys.size() > 0) {
    Vector q, d_o;
    load_row(in.q, row_in(in.q), p.head_dim, q);
    load_row(in.d_o, row_in(in.d_o), p.head_dim_v, d_o);
    double delta = dot(d_o, in.o, row_in(in.o), p.head_dim_v);
    if (in.dlse.data != nullptr) {
      delta -= *lse_of(in.dlse, s.q_batch, head_q, s.q_row + row);
    }
    const double lse = *lse_of(in.lse, s.q_batch, head_q, s.q_row + row);
    for (std::int64_t j = keys.first; j < keys.last; ++j) {
      const std::int64_t k_row = offset_of(in.k, s.kv_batch, s.kv_row + j, head_kv);
      const std::int64_t v_row = offset_of(in.v, s.kv_batch, s.kv_row + j, head_kv);
      double score = scale * dot(q, in.k, k_row, p.head_dim);
      double slope = scale;
      if (softcap > 0) {
        const double capped = std::tanh(score / softcap);
        score = softcap * capped;
        slope *= 1 - capped * capped;
      }
      const double weight = std::exp(score - lse);
      const double ds = slope * weight * (dot(d_o, in.v, v_row, p.head_dim_v) - delta);
      for (std::int64_t d = 0; d < p.head_dim; ++d) {
        dq[index(d)] += ds * base::load_element(in.k, k_row + d * in.k.stride_head_dim);
        dk[j * p.head_dim + d] += ds * q[index(d)];
      }
      for (std::int64_t d = 0; d < p.head_dim_v; ++d) {
        dv[j * p.head_dim_v + d] += weight * d_o[index(d)];
      }
    }
  }
  store_row(call.out.dq, row_in(call.out.dq), p.head_dim, dq.data());
}

/// All of one KV head of a sequence. scratch: backward_doubles().
inline void backward_head(const BackwardCall& call, const Sequence& s, std::int64_t head_kv,
                          double* scratch) {
  const AttentionProblem& p = call.problem.attention;
  double* const dk = scratch;
  double* const dv = dk + s.seqlen_kv * p.head_dim;
  std::fill(dk, dv + s.seqlen_kv * p.head_dim_v, 0.0);
  const std::int64_t group = p.heads_q / p.heads_kv;
  for (std::int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
    for (std::int64_t row = 0; row < s.seqlen_q; ++row) {
      backward_row(call, s, head, row, dk, dv);
    }
  }
  for (std::int64_t j = 0; j < s.seqlen_kv; ++j) {
    const auto row_in = [&](const TensorView& view) {
      return offset_of(view, s.kv_batch, s.kv_row + j, head_kv);
    };
    store_row(call.out.dk, row_in(call.out.dk), p.head_dim, dk + j * p.head_dim);
    store_row(call.out.dv, row_in(call.out.dv), p.head_dim_v, dv + j * p.head_dim_v);
  }
}

/// Of f64 scratch for backward_head.
inline std::int64_t backward_doubles(const AttentionProblem& p) {
  return p.seqlen_kv * (p.head_dim + p.head_dim_v);
}

}  // namespace rafter::cpu::plain
