// Cases of decode_sm90 in host memory, run on the device through the public API.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/cuda/mirror.h"
#include "kernels/cuda/require_sm90.h"
#include "support/attention_case.h"
#include "support/placed.h"

namespace rafter::testing {

inline RunOptions on_sm90(std::int64_t splits = 0) {
  return {.kernel = "decode_sm90",
          .splits = splits,
          .device = Device::cuda(),
          .forward = mirrored_forward};
}

/// One query of every head, group · heads_kv of them, unless the caller says more.
inline Case decode_sm90_case(DType dtype, DType kv, std::int64_t group, std::int64_t head_dim,
                             std::int64_t heads_kv = 2) {
  Case c{.problem = {.heads_q = heads_kv * group,
                     .heads_kv = heads_kv,
                     .head_dim = head_dim,
                     .dtype = dtype,
                     .kv_dtype = kv,
                     .seqused_kv = true}};
  return c;
}

/// `count` sequences of so many queries each.
inline std::vector<std::int64_t> each(std::size_t count, std::int64_t queries) {
  return std::vector<std::int64_t>(count, queries);
}

inline Case paged(Case c, std::int64_t page_size) {
  c.problem.layout = Layout::paged;
  c.problem.page_size = page_size;
  return c;
}

/// Sequence b alone of a batch with the same number of queries each: its values.
inline Values values_of(const Case& c, const Values& all, std::size_t b) {
  const AttentionProblem& p = c.problem;
  std::int64_t keys = 0, queries = 0;
  for (std::size_t i = 0; i < b; ++i) {
    keys += c.lengths_kv[i];
    queries += c.lengths_q[i];
  }
  const auto part = [](const auto& v, std::int64_t first, std::int64_t count) {
    return v.empty() ? v : std::decay_t<decltype(v)>(v.begin() + first, v.begin() + first + count);
  };
  const std::int64_t dim_v = p.head_dim_v == 0 ? p.head_dim : p.head_dim_v;
  const std::int64_t row_q = p.heads_q * p.head_dim;
  const std::int64_t row_k = p.heads_kv * p.head_dim, row_v = p.heads_kv * dim_v;
  const std::int64_t rows = c.lengths_q[b], count = c.lengths_kv[b];
  return {part(all.q, queries * row_q, rows * row_q),
          part(all.k, keys * row_k, count * row_k),
          part(all.v, keys * row_v, count * row_v),
          part(all.k_scale, keys * p.heads_kv, count * p.heads_kv),
          part(all.v_scale, keys * p.heads_kv, count * p.heads_kv),
          part(all.tree_mask, queries, rows)};
}

/// The same of results.
inline Output output_of(const Case& c, const Output& all, std::size_t b) {
  const AttentionProblem& p = c.problem;
  std::int64_t queries = 0;
  for (std::size_t i = 0; i < b; ++i) {
    queries += c.lengths_q[i];
  }
  const std::int64_t dim_v = p.head_dim_v == 0 ? p.head_dim : p.head_dim_v;
  const auto part = [&](const std::vector<float>& v, std::int64_t row) {
    return std::vector<float>(v.begin() + queries * row,
                              v.begin() + (queries + c.lengths_q[b]) * row);
  };
  return {part(all.o, p.heads_q * dim_v), part(all.lse, p.heads_q)};
}

}  // namespace rafter::testing
