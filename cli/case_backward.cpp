#include "cli/case_backward.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>

#include "cli/array.h"
#include "cli/case_memory.h"

namespace rafter::cli {
namespace {

/// Pairs of a query and a key times head_dim, of all heads.
constexpr std::int64_t kMostWork = 300'000;

/// Gradients in f32 and, of each, the sum of the absolute values of its terms.
struct Sums {
  CaseGradients values, sizes;
  float largest_score = 0;

  explicit Sums(const AttentionCase& c, const AttentionProblem& p) {
    for (CaseGradients* g : {&values, &sizes}) {
      g->dq.resize(at(total(c.lengths_q) * p.heads_q * p.head_dim));
      g->dk.resize(at(total(c.lengths_kv) * p.heads_kv * p.head_dim));
      g->dv.resize(at(total(c.lengths_kv) * p.heads_kv * p.head_dim_v));
    }
  }
};

/// A row of a head: where it and the keys of its sequence stand in the tensors of values.
struct Row {
  std::int64_t query;      // (row of all · heads_q + head)
  std::int64_t first_key;  // row of all of the sequence's first key
  std::int64_t head_kv;
  KeyRange keys;
};

float dot(const float* a, const float* b, std::int64_t dim) {
  float sum = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    sum += a[d] * b[d];
  }
  return sum;
}

float dot_of_sizes(const float* a, const float* b, std::int64_t dim) {
  float sum = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    sum += std::fabs(a[d] * b[d]);
  }
  return sum;
}

/// into += factor · from; sizes likewise, where `size` is what the factor is a difference of.
void add(float factor, float size, const float* from, std::int64_t dim, float* into, float* sizes) {
  for (std::int64_t d = 0; d < dim; ++d) {
    into[d] += factor * from[d];
    sizes[d] += size * std::fabs(from[d]);
  }
}

/// One row of the unfused backward: S, P, dP and dS rounded to the dtype, sums in f32.
void add_row(const AttentionProblem& p, const BackwardValues& values, const Row& row,
             bool backwards, Sums& sums) {
  const float scale = p.softmax_scale.value_or(1.0F / std::sqrt(static_cast<float>(p.head_dim)));
  const std::int64_t count = std::max<std::int64_t>(0, row.keys.last - row.keys.first);
  const float* const q = values.in.q.data() + row.query * p.head_dim;
  const float* const d_o = values.d_o.data() + row.query * p.head_dim_v;
  const float lse = values.lse[at(row.query)];
  const float* const o = values.o.data() + row.query * p.head_dim_v;
  const float dlse = values.dlse[at(row.query)];
  const float delta = dot(d_o, o, p.head_dim_v) - dlse;
  const float delta_size = dot_of_sizes(d_o, o, p.head_dim_v) + std::fabs(dlse);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t j = backwards ? row.keys.last - 1 - i : row.keys.first + i;
    const std::int64_t key = (row.first_key + j) * p.heads_kv + row.head_kv;
    const float* const k = values.in.k.data() + key * p.head_dim;
    const float* const v = values.in.v.data() + key * p.head_dim_v;
    float score = rounded(dot(q, k, p.head_dim) * scale, p.dtype);
    float slope = scale;
    if (p.softcap > 0) {
      const float ratio = std::tanh(score / p.softcap);
      score = p.softcap * ratio;
      slope *= 1 - ratio * ratio;
    }
    sums.largest_score = std::max(sums.largest_score, std::fabs(score));
    const float weight = rounded(std::exp(score - lse), p.dtype);
    const float dp = rounded(dot(d_o, v, p.head_dim_v), p.dtype);
    const float ds = rounded(slope * weight * (dp - delta), p.dtype);
    const float ds_size =
        std::fabs(slope * weight) * (dot_of_sizes(d_o, v, p.head_dim_v) + delta_size);
    add(weight, weight, d_o, p.head_dim_v, sums.values.dv.data() + key * p.head_dim_v,
        sums.sizes.dv.data() + key * p.head_dim_v);
    add(ds, ds_size, q, p.head_dim, sums.values.dk.data() + key * p.head_dim,
        sums.sizes.dk.data() + key * p.head_dim);
    add(ds, ds_size, k, p.head_dim, sums.values.dq.data() + row.query * p.head_dim,
        sums.sizes.dq.data() + row.query * p.head_dim);
  }
}

Sums unfused(const AttentionCase& c, const AttentionProblem& p, const BackwardValues& values,
             bool backwards) {
  Sums sums(c, p);
  std::int64_t first_query = 0, first_key = 0;
  for (std::size_t b = 0; b < c.lengths_q.size(); ++b) {
    const std::int64_t rows = c.lengths_q[b];
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t row = backwards ? rows - 1 - i : i;
      const KeyRange keys = visible_keys(p.mask, row, rows, c.lengths_kv[b]);
      for (std::int64_t head = 0; head < p.heads_q; ++head) {
        add_row(p, values,
                {.query = (first_query + row) * p.heads_q + head,
                 .first_key = first_key,
                 .head_kv = head / (p.heads_q / p.heads_kv),
                 .keys = keys},
                backwards, sums);
      }
    }
    first_query += rows;
    first_key += c.lengths_kv[b];
  }
  return sums;
}

/// backward_reference on one sequence at a time, in the plainest layout.
Result<CaseGradients> reference_of(const AttentionCase& c, const AttentionProblem& sized,
                                   const BackwardValues& values) {
  CaseGradients g = Sums(c, sized).values;
  std::int64_t q_row = 0, k_row = 0;
  for (std::size_t b = 0; b < c.lengths_q.size(); ++b) {
    const AttentionProblem p = alone(sized, c.lengths_q[b], c.lengths_kv[b]);
    const Result<Plan> planned =
        plan(p, Device::cpu(), {.pass = Pass::backward, .kernel = "backward_reference"});
    if (!planned) {
      return planned.status();
    }
    const auto queries = [&](const std::vector<float>& all, std::int64_t dim) {
      return TensorView::contiguous(all.data() + q_row * p.heads_q * dim, DType::f32, 1, p.seqlen_q,
                                    p.heads_q, dim);
    };
    const auto keys = [&](const std::vector<float>& all, std::int64_t dim) {
      return TensorView::contiguous(all.data() + k_row * p.heads_kv * dim, DType::f32, 1,
                                    p.seqlen_kv, p.heads_kv, dim);
    };
    const auto rows = [&](const std::vector<float>& all) {  // [seqlen_q, heads_q] in memory
      return LseView{const_cast<float*>(all.data()) + q_row * p.heads_q,
                     1,
                     p.heads_q,
                     p.seqlen_q,
                     0,
                     1,
                     p.heads_q};
    };
    const Result<Array> workspace =
        allocate_array(DType::int8, {planned->workspace_bytes()}, "workspace");
    if (!workspace) {
      return workspace.status();
    }
    const Status done = planned->backward({.q = queries(values.in.q, p.head_dim),
                                           .k = keys(values.in.k, p.head_dim),
                                           .v = keys(values.in.v, p.head_dim_v),
                                           .o = queries(values.o, p.head_dim_v),
                                           .lse = rows(values.lse),
                                           .d_o = queries(values.d_o, p.head_dim_v),
                                           .dlse = rows(values.dlse)},
                                          {.dq = queries(g.dq, p.head_dim),
                                           .dk = keys(g.dk, p.head_dim),
                                           .dv = keys(g.dv, p.head_dim_v)},
                                          {workspace->data.get(), planned->workspace_bytes()});
    if (!done) {
      return done;
    }
    q_row += p.seqlen_q;
    k_row += p.seqlen_kv;
  }
  return g;
}

std::array<Compared, 3> compared(const AttentionCase& c) {
  const AttentionProblem p = sized_problem(c, DType::f32);
  return {{{"dq", c.lengths_q, p.heads_q, p.head_dim},
           {"dk", c.lengths_kv, p.heads_kv, p.head_dim},
           {"dv", c.lengths_kv, p.heads_kv, p.head_dim_v}}};
}

}  // namespace

bool runs_backward(const AttentionCase& c) {
  const AttentionProblem& p = c.problem;
  std::int64_t pairs = 0;
  for (std::size_t b = 0; b < c.lengths_q.size(); ++b) {
    pairs += c.lengths_q[b] * c.lengths_kv[b];
  }
  // What a NaN reaches, the tests say: kernels of matrix products carry it where the mask cuts.
  return p.layout != Layout::paged && !p.kv_dtype && !p.tree_mask && c.splits == 0 &&
         c.fill != Fill::nan_row && pairs * p.heads_q * p.head_dim <= kMostWork;
}

Result<BackwardValues> make_backward_values(const AttentionCase& c, DType dtype) {
  BackwardValues values;
  values.in = make_values(c, dtype);
  const Result<CaseOutput> output = reference_output(c, dtype, values.in);
  if (!output) {
    return output.status();
  }
  values.o = output->o;
  values.lse = output->lse;
  std::mt19937 generator(20261130);
  std::normal_distribution<float> normal;
  for (float& x : values.o) {
    x = rounded(x, dtype);
    values.d_o.push_back(rounded(normal(generator), dtype));
  }
  for (std::size_t i = 0; i < values.lse.size(); ++i) {
    values.dlse.push_back(normal(generator));
  }
  return values;
}

Result<GradientExpectation> expectation_of(const AttentionCase& c, DType dtype,
                                           const BackwardValues& values) {
  const AttentionProblem p = sized_problem(c, dtype);
  Result<CaseGradients> reference = reference_of(c, p, values);
  if (!reference) {
    return reference.status();
  }
  GradientExpectation expected;
  expected.reference = *std::move(reference);
  constexpr double kUlp = 0x1p-23;
  const double half_ulp = dtype == DType::bf16 ? 0x1p-9 : dtype == DType::f16 ? 0x1p-12 : 0;
  for (const bool backwards : {false, true}) {
    const Sums sums = unfused(c, p, values, backwards);
    const auto widen = [&](std::vector<float> CaseGradients::*g, double& bound) {
      // exp turns an ulp of the largest score into a relative error of P
      bound = std::max(bound, 1.5 * largest_error(sums.values.*g, expected.reference.*g) +
                                  (4 + sums.largest_score) * kUlp * largest(sums.sizes.*g) +
                                  half_ulp * largest(expected.reference.*g));
    };
    widen(&CaseGradients::dq, expected.dq_bound);
    widen(&CaseGradients::dk, expected.dk_bound);
    widen(&CaseGradients::dv, expected.dv_bound);
  }
  return expected;
}

Result<CaseGradients> run_backward(const AttentionCase& c, DType dtype,
                                   const BackwardValues& values, const CaseRun& run) {
  const AttentionProblem p = sized_problem(c, dtype);
  const Result<Plan> planned =
      plan(p, run.device, {.pass = Pass::backward, .kernel = run.kernel, .threads = run.threads});
  if (!planned) {
    return planned.status();
  }
  const Map map = map_of(c, p);
  const bool packed = p.layout == Layout::packed;
  const std::int64_t batch = packed ? 1 : p.batch;
  const std::int64_t rows_q = packed ? p.total_q : p.seqlen_q;
  const std::int64_t rows_kv = packed ? p.total_kv : p.seqlen_kv;
  const auto query = [&](std::int64_t b, std::int64_t row) { return map.query(b, row); };
  const auto key = [&](std::int64_t b, std::int64_t row) { return map.key(b, row); };
  const auto queries = [&](DType type, std::int64_t dim) {
    return place(c.strides, type, {batch, rows_q, p.heads_q, dim}, run.poison);
  };
  const auto keys = [&](DType type, std::int64_t dim) {
    return place(c.strides, type, {batch, rows_kv, p.heads_kv, dim}, run.poison);
  };
  const auto rows = [&] {  // lse [batch, heads, seqlen] lies as a tensor of one dimension per head
    return place(c.strides == Strides::contiguous ? Strides::heads_first : c.strides, DType::f32,
                 {batch, rows_q, p.heads_q, 1}, run.poison);
  };
  Placed q = queries(dtype, p.head_dim), k = keys(dtype, p.head_dim), v = keys(dtype, p.head_dim_v);
  Placed o = queries(dtype, p.head_dim_v), d_o = queries(dtype, p.head_dim_v);
  Placed lse = rows(), dlse = rows();
  Placed dq = queries(DType::f32, p.head_dim), dk = keys(DType::f32, p.head_dim),
         dv = keys(DType::f32, p.head_dim_v);
  const auto write = [](Placed& to, const std::vector<float>& from) {
    return [&to, &from](std::size_t i, std::int64_t b, std::int64_t row, std::int64_t head,
                        std::int64_t dim) {
      store(to.element(b, row, head, dim), to.view.dtype, from[i]);
    };
  };
  each_element(c.lengths_q, p.heads_q, p.head_dim, query, write(q, values.in.q));
  each_element(c.lengths_kv, p.heads_kv, p.head_dim, key, write(k, values.in.k));
  each_element(c.lengths_kv, p.heads_kv, p.head_dim_v, key, write(v, values.in.v));
  each_element(c.lengths_q, p.heads_q, p.head_dim_v, query, write(o, values.o));
  each_element(c.lengths_q, p.heads_q, p.head_dim_v, query, write(d_o, values.d_o));
  each_element(c.lengths_q, p.heads_q, 1, query, write(lse, values.lse));
  each_element(c.lengths_q, p.heads_q, 1, query, write(dlse, values.dlse));

  Stage stage(run.device);
  const auto lse_view = [&stage](const Placed& placed) {
    const TensorView l = stage.view(placed);
    return LseView{static_cast<float*>(l.data),
                   l.batch,
                   l.heads,
                   l.seqlen,
                   l.stride_batch,
                   l.stride_heads,
                   l.stride_seqlen};
  };
  const auto indices = [&stage](bool wanted, const std::vector<std::int64_t>& from) {
    return wanted ? IndexView{stage.lend(from.data(), from.size() * sizeof from[0]), DType::i64,
                              static_cast<std::int64_t>(from.size()), 0}
                  : IndexView{};
  };
  const Result<Array> room = allocate_array(DType::int8, {planned->workspace_bytes()}, "workspace");
  if (!room) {
    return room.status();
  }
  std::memset(room->data.get(), run.poison, at(planned->workspace_bytes()));
  const BackwardInputs in{.q = stage.view(q),
                          .k = stage.view(k),
                          .v = stage.view(v),
                          .o = stage.view(o),
                          .lse = lse_view(lse),
                          .d_o = stage.view(d_o),
                          .dlse = lse_view(dlse),
                          .cu_seqlens_q = indices(packed, map.start_q),
                          .cu_seqlens_kv = indices(packed, map.start_kv),
                          .seqused_kv = indices(p.seqused_kv, c.lengths_kv)};
  const BackwardOutputs out{stage.view(dq), stage.view(dk), stage.view(dv)};
  void* const workspace = stage.lend(room->data.get(), at(planned->workspace_bytes()));
  if (!stage.status()) {
    return stage.status();
  }
  if (Status done = planned->backward(in, out, {workspace, planned->workspace_bytes()}); !done) {
    return done;
  }
  CaseGradients g;
  const auto fetch = [&](const char* name, Placed& from, const std::vector<std::int64_t>& lengths,
                         auto where, std::vector<float>& into) -> Status {
    if (Status fetched = stage.fetch(from); !fetched) {
      return fetched;
    }
    return take(from, lengths, from.view.heads, from.view.head_dim, where, run.poison, into)
               ? Status::ok()
               : Status::device_error(name, "memory outside its valid region was written");
  };
  Status status = fetch("dq", dq, c.lengths_q, query, g.dq);
  status = status ? fetch("dk", dk, c.lengths_kv, key, g.dk) : status;
  status = status ? fetch("dv", dv, c.lengths_kv, key, g.dv) : status;
  if (!status) {
    return status;
  }
  return g;
}

std::string difference(const AttentionCase& c, const CaseGradients& gradients,
                       const GradientExpectation& expected) {
  const std::array<Compared, 3> of = compared(c);
  std::string worst = compare(of[0], gradients.dq, expected.reference.dq, expected.dq_bound);
  worst = worst.empty() ? compare(of[1], gradients.dk, expected.reference.dk, expected.dk_bound)
                        : worst;
  return worst.empty() ? compare(of[2], gradients.dv, expected.reference.dv, expected.dv_bound)
                       : worst;
}

std::string bit_difference(const AttentionCase& c, const CaseGradients& a, const CaseGradients& b) {
  const std::array<Compared, 3> of = compared(c);
  std::string first = first_difference(of[0], a.dq, b.dq);
  first = first.empty() ? first_difference(of[1], a.dk, b.dk) : first;
  return first.empty() ? first_difference(of[2], a.dv, b.dv) : first;
}

}  // namespace rafter::cli
