#include "cli/case_run.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>

#include "cli/array.h"
#include "cli/case_memory.h"
#include "cli/quantise.h"

namespace rafter::cli {
namespace {

// ---- the computation in three steps

/// Choices that the three steps leave open. All give the same result in exact arithmetic; in a
/// small case each is a draw of the rounding error, so the worst of them is taken.
struct Order {
  bool backwards = false;        // sums from the last term to the first
  bool normalised_last = false;  // o divided by the sum, in place of the probabilities
};

/// Calls `visit` on [0, count) in either direction.
template <typename Visit>
void each(std::int64_t count, bool backwards, Visit visit) {
  for (std::int64_t i = 0; i < count; ++i) {
    visit(backwards ? count - 1 - i : i);
  }
}

/// The new tokens that query `row` sees where the case has a tree: itself and every third before.
std::uint64_t tree_word(std::int64_t row) {
  std::uint64_t word = 0;
  for (std::int64_t j = row; j >= 0; j -= 3) {
    word |= std::uint64_t{1} << j;
  }
  return word;
}

/// What a row sees: keys of a range, of those from `first_new` on the ones whose bit is set.
struct Seen {
  KeyRange keys;
  std::int64_t first_new = std::numeric_limits<std::int64_t>::max();
  std::uint64_t word = 0;

  bool operator()(std::int64_t key) const {
    return key < first_new || (word >> (key - first_new) & 1) != 0;
  }
};
Seen seen_of(const AttentionProblem& p, std::int64_t row, std::int64_t seqlen_q,
             std::int64_t seqlen_kv) {
  Seen seen{.keys = visible_keys(p.mask, row, seqlen_q, seqlen_kv)};
  if (p.tree_mask) {
    seen.first_new = seqlen_kv - seqlen_q;
    seen.word = tree_word(row);
  }
  return seen;
}

/// One row by the unfused pipeline: scores and probabilities rounded to the dtype, sums in f32.
float three_steps(const AttentionProblem& p, const CaseValues& values, Order order,
                  std::int64_t q_row, std::int64_t k_row0, std::int64_t head, const Seen& seen,
                  std::vector<float>& o) {
  const KeyRange keys = seen.keys;
  const std::int64_t head_kv = head / (p.heads_q / p.heads_kv);
  const float scale = p.softmax_scale.value_or(1.0F / std::sqrt(static_cast<float>(p.head_dim)));
  const auto k_at = [&](std::int64_t j) { return (k_row0 + j) * p.heads_kv + head_kv; };
  const std::int64_t count = std::max<std::int64_t>(0, keys.last - keys.first);
  std::vector<float> weights(at(count));
  float maximum = -std::numeric_limits<float>::infinity();
  for (std::int64_t j = 0; j < count; ++j) {
    float dot = 0;
    each(p.head_dim, order.backwards, [&](std::int64_t d) {
      dot += values.q[at((q_row * p.heads_q + head) * p.head_dim + d)] *
             values.k[at(k_at(keys.first + j) * p.head_dim + d)];
    });
    float score = rounded(dot * scale, p.dtype);
    if (p.softcap > 0) {
      score = p.softcap * std::tanh(score / p.softcap);
    }
    score = seen(keys.first + j) ? score : -std::numeric_limits<float>::infinity();
    weights[at(j)] = score;
    maximum = std::max(maximum, score);
  }
  float sum = 0;
  each(count, order.backwards, [&](std::int64_t j) {
    weights[at(j)] = std::exp(weights[at(j)] - maximum);
    sum += weights[at(j)];
  });
  std::fill(o.begin(), o.end(), 0.0F);
  const float before = order.normalised_last ? 1 : sum;
  const float after = order.normalised_last && count > 0 ? sum : 1;
  each(count, order.backwards, [&](std::int64_t j) {
    const float probability = rounded(weights[at(j)] / before, p.dtype);
    for (std::int64_t d = 0; d < p.head_dim_v; ++d) {
      o[at(d)] += probability * values.v[at(k_at(keys.first + j) * p.head_dim_v + d)];
    }
  });
  for (float& value : o) {
    value /= after;
  }
  return count == 0 ? maximum : maximum + std::log(sum);
}

CaseOutput three_steps(const AttentionCase& c, const AttentionProblem& p, const CaseValues& values,
                       Order order) {
  CaseOutput output;
  std::vector<float> row_o(at(p.head_dim_v));
  std::int64_t q_row = 0;
  std::int64_t k_row = 0;
  for (std::size_t b = 0; b < c.lengths_q.size(); ++b) {
    for (std::int64_t row = 0; row < c.lengths_q[b]; ++row, ++q_row) {
      const Seen seen = seen_of(p, row, c.lengths_q[b], c.lengths_kv[b]);
      for (std::int64_t head = 0; head < p.heads_q; ++head) {
        output.lse.push_back(three_steps(p, values, order, q_row, k_row, head, seen, row_o));
        output.o.insert(output.o.end(), row_o.begin(), row_o.end());
      }
    }
    k_row += c.lengths_kv[b];
  }
  return output;
}

/// [batch, seqlen_q] of a problem with a tree; else none.
std::vector<std::uint64_t> tree_words(const AttentionProblem& p) {
  std::vector<std::uint64_t> words;
  for (std::int64_t i = 0; p.tree_mask && i < p.batch * p.seqlen_q; ++i) {
    words.push_back(tree_word(i % p.seqlen_q));
  }
  return words;
}
BitsView view_of_words(const AttentionProblem& p, const void* words) {
  return p.tree_mask
             ? BitsView::contiguous(static_cast<const std::uint64_t*>(words), p.batch, p.seqlen_q)
             : BitsView{};
}

bool has_scales(const AttentionProblem& p) {
  return p.kv_dtype == DType::int8 || p.kv_dtype == DType::e4m3;
}

/// forward_reference on one sequence at a time, in the plainest layout. f32 holds the values of
/// every dtype exactly.
Result<CaseOutput> reference_of(const AttentionCase& c, const AttentionProblem& sized,
                                const CaseValues& values) {
  CaseOutput output;
  output.o.resize(at(total(c.lengths_q) * sized.heads_q * sized.head_dim_v));
  std::int64_t q_row = 0;
  std::int64_t k_row = 0;
  for (std::size_t b = 0; b < c.lengths_q.size(); ++b) {
    const AttentionProblem p = alone(sized, c.lengths_q[b], c.lengths_kv[b]);
    const Result<Plan> planned = plan(p, Device::cpu(), {.kernel = "forward_reference"});
    if (!planned) {
      return planned.status();
    }
    const auto view = [&](const std::vector<float>& all, std::int64_t row, std::int64_t rows,
                          std::int64_t heads, std::int64_t dim) {
      return TensorView::contiguous(all.data() + row * heads * dim, DType::f32, 1, rows, heads,
                                    dim);
    };
    std::vector<float> lse(at(p.heads_q * p.seqlen_q));
    const std::vector<std::uint64_t> words = tree_words(p);
    const Result<Array> workspace =
        allocate_array(DType::int8, {planned->workspace_bytes()}, "workspace");
    if (!workspace) {
      return workspace.status();
    }
    const Status done =
        planned->forward({.q = view(values.q, q_row, p.seqlen_q, p.heads_q, p.head_dim),
                          .k = view(values.k, k_row, p.seqlen_kv, p.heads_kv, p.head_dim),
                          .v = view(values.v, k_row, p.seqlen_kv, p.heads_kv, p.head_dim_v),
                          .tree_mask = view_of_words(p, words.data())},
                         {.o = view(output.o, q_row, p.seqlen_q, p.heads_q, p.head_dim_v),
                          .lse = LseView::contiguous(lse.data(), 1, p.heads_q, p.seqlen_q)},
                         {workspace->data.get(), planned->workspace_bytes()});
    if (!done) {
      return done;
    }
    for (std::int64_t row = 0; row < p.seqlen_q; ++row) {
      for (std::int64_t head = 0; head < p.heads_q; ++head) {
        output.lse.push_back(lse[at(head * p.seqlen_q + row)]);
      }
    }
    q_row += p.seqlen_q;
    k_row += p.seqlen_kv;
  }
  return output;
}

std::int64_t head_dim_v(const AttentionCase& c) {
  return c.problem.head_dim_v == 0 ? c.problem.head_dim : c.problem.head_dim_v;
}

Compared o_of(const AttentionCase& c) {
  return {"o", c.lengths_q, c.problem.heads_q, head_dim_v(c)};
}
Compared lse_of(const AttentionCase& c) { return {"lse", c.lengths_q, c.problem.heads_q, 1}; }

}  // namespace

CaseValues make_values(const AttentionCase& c, DType dtype) {
  const AttentionProblem& p = c.problem;
  CaseValues values;
  std::mt19937 generator(20261129);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& into, std::int64_t rows, std::int64_t heads,
                        std::int64_t dim, float factor) {
    into.resize(at(rows * heads * dim));
    for (float& value : into) {
      value = rounded(factor * normal(generator), dtype);
    }
  };
  const std::int64_t rows_q = total(c.lengths_q);
  const std::int64_t rows_kv = total(c.lengths_kv);
  fill(values.q, rows_q, p.heads_q, p.head_dim, c.fill == Fill::peaked ? 8 : 1);
  fill(values.k, rows_kv, p.heads_kv, p.head_dim, 1);
  fill(values.v, rows_kv, p.heads_kv, head_dim_v(c), 1);
  const float root = std::sqrt(static_cast<float>(p.head_dim));
  if (c.fill == Fill::very_negative) {
    for (std::size_t i = 0; i < values.q.size(); i += at(p.head_dim)) {
      values.q[i] = 1;
    }
    for (std::size_t i = 0; i < values.k.size(); i += at(p.head_dim)) {
      values.k[i] = rounded(-120 * root, dtype);
    }
  } else if (c.fill == Fill::late_maximum) {
    for (std::size_t i = 0; i < values.q.size(); i += at(p.head_dim)) {
      values.q[i] = 4;
    }
    for (std::int64_t head = 0; head < p.heads_kv; ++head) {
      values.k[at(((rows_kv - 1) * p.heads_kv + head) * p.head_dim)] = rounded(5 * root, dtype);
    }
  } else if (c.fill == Fill::nan_row) {
    values.q[at(rows_q / 2 * p.heads_q * p.head_dim)] = std::numeric_limits<float>::quiet_NaN();
  }
  if (has_scales(p)) {
    const bool int8 = p.kv_dtype == DType::int8;
    const auto quantise = [int8](std::vector<float>& rows, std::int64_t dim) {
      std::vector<float> scales;
      for (std::size_t first = 0; first < rows.size(); first += at(dim)) {
        const std::span<float> row(rows.data() + first, at(dim));
        // The largest becomes 126.5 of int8's factors, and 405 of e4m3's: its end is 448.
        scales.push_back(int8_scale(row) * (int8 ? 1.0F : 0.3125F));
        const float scale = scales.back();
        for (float& value : row) {
          value = scale * (int8 ? static_cast<float>(to_int8(value, scale))
                                : e4m3_to_f32(f32_to_e4m3(value / scale)));
        }
      }
      return scales;
    };
    values.k_scale = quantise(values.k, p.head_dim);
    values.v_scale = quantise(values.v, head_dim_v(c));
  }
  return values;
}

Result<CaseOutput> reference_output(const AttentionCase& c, DType dtype, const CaseValues& values) {
  return reference_of(c, sized_problem(c, dtype), values);
}

Result<Expectation> expectation_of(const AttentionCase& c, DType dtype, const CaseValues& values) {
  const AttentionProblem p = sized_problem(c, dtype);
  Result<CaseOutput> reference = reference_of(c, p, values);
  if (!reference) {
    return reference.status();
  }
  double error_o = 0;
  double error_lse = 0;
  for (const Order order :
       {Order{false, false}, Order{false, true}, Order{true, false}, Order{true, true}}) {
    const CaseOutput steps = three_steps(c, p, values, order);
    error_o = std::max(error_o, largest_error(steps.o, reference->o));
    error_lse = std::max(error_lse, largest_error(steps.lse, reference->lse));
  }
  constexpr double kFourUlp = 4 * 0x1p-23;
  Expectation expected;
  expected.o_bound = 1.5 * error_o + kFourUlp * largest(reference->o);
  expected.lse_bound = 1.5 * error_lse + kFourUlp * std::max(1.0, largest(reference->lse));
  expected.reference = *std::move(reference);
  return expected;
}

Result<CaseOutput> run_case(const AttentionCase& c, DType dtype, const CaseValues& values,
                            const CaseRun& run) {
  const AttentionProblem p = sized_problem(c, dtype);
  const Result<Plan> planned =
      plan(p, run.device, {.kernel = run.kernel, .threads = run.threads, .splits = c.splits});
  if (!planned) {
    return planned.status();
  }
  const Map map = map_of(c, p);
  const bool packed = p.layout == Layout::packed;
  const bool paged = p.layout == Layout::paged;
  const std::int64_t batch_q = packed ? 1 : p.batch;
  const std::int64_t rows_q = packed ? p.total_q : p.seqlen_q;
  const std::int64_t batch_kv = packed ? 1 : paged ? p.num_pages : p.batch;
  const std::int64_t rows_kv = packed ? p.total_kv : paged ? p.page_size : p.seqlen_kv;
  const auto query = [&](std::int64_t b, std::int64_t row) { return map.query(b, row); };
  const auto key = [&](std::int64_t b, std::int64_t row) { return map.key(b, row); };

  Placed q = place(c.strides, dtype, {batch_q, rows_q, p.heads_q, p.head_dim}, run.poison);
  const DType kv = p.kv_dtype.value_or(dtype);
  Placed k = place(c.strides, kv, {batch_kv, rows_kv, p.heads_kv, p.head_dim}, run.poison);
  Placed v = place(c.strides, kv, {batch_kv, rows_kv, p.heads_kv, p.head_dim_v}, run.poison);
  Placed k_scale = place(c.strides, DType::f32, {batch_kv, rows_kv, p.heads_kv, 1}, run.poison);
  Placed v_scale = place(c.strides, DType::f32, {batch_kv, rows_kv, p.heads_kv, 1}, run.poison);
  Placed o = place(c.strides, DType::f32, {batch_q, rows_q, p.heads_q, p.head_dim_v}, run.poison);
  // lse [batch, heads, seqlen] lies as a tensor of one dimension per head.
  Placed lse = place(c.strides == Strides::contiguous ? Strides::heads_first : c.strides,
                     DType::f32, {batch_q, rows_q, p.heads_q, 1}, run.poison);
  const auto write = [](Placed& to, const std::vector<float>& from) {
    return [&to, &from](std::size_t i, std::int64_t batch, std::int64_t row, std::int64_t head,
                        std::int64_t dim) {
      store(to.element(batch, row, head, dim), to.view.dtype, from[i]);
    };
  };
  each_element(c.lengths_q, p.heads_q, p.head_dim, query, write(q, values.q));
  const auto write_rows = [](Placed& to, const std::vector<float>& from,
                             const std::vector<float>& scales) {
    return [&to, &from, &scales](std::size_t i, std::int64_t batch, std::int64_t row,
                                 std::int64_t head, std::int64_t dim) {
      const float scale = scales.empty() ? 1 : scales[i / at(to.view.head_dim)];
      store(to.element(batch, row, head, dim), to.view.dtype, from[i], scale);
    };
  };
  each_element(c.lengths_kv, p.heads_kv, p.head_dim, key, write_rows(k, values.k, values.k_scale));
  each_element(c.lengths_kv, p.heads_kv, p.head_dim_v, key,
               write_rows(v, values.v, values.v_scale));
  if (has_scales(p)) {
    each_element(c.lengths_kv, p.heads_kv, 1, key, write(k_scale, values.k_scale));
    each_element(c.lengths_kv, p.heads_kv, 1, key, write(v_scale, values.v_scale));
  }

  Stage stage(run.device);
  const auto indices = [&stage](bool wanted, const std::vector<std::int64_t>& from,
                                std::int64_t cols) {
    return wanted ? IndexView{stage.lend(from.data(), from.size() * sizeof from[0]), DType::i64,
                              static_cast<std::int64_t>(from.size()), cols}
                  : IndexView{};
  };
  const Result<Array> room = allocate_array(DType::int8, {planned->workspace_bytes()}, "workspace");
  if (!room) {
    return room.status();
  }
  std::memset(room->data.get(), run.poison, at(planned->workspace_bytes()));
  TensorView l = stage.view(lse);
  const std::vector<std::uint64_t> words = tree_words(p);
  const ForwardInputs in{
      .q = stage.view(q),
      .k = stage.view(k),
      .v = stage.view(v),
      .cu_seqlens_q = indices(packed, map.start_q, 0),
      .cu_seqlens_kv = indices(packed, map.start_kv, 0),
      .seqused_kv = indices(p.seqused_kv, c.lengths_kv, 0),
      .page_table = indices(paged, map.pages, map.columns),
      .k_scale = has_scales(p) ? stage.view(k_scale) : TensorView{},
      .v_scale = has_scales(p) ? stage.view(v_scale) : TensorView{},
      .tree_mask =
          view_of_words(p, words.empty() ? nullptr : stage.lend(words.data(), words.size() * 8))};
  const ForwardOutputs out{.o = stage.view(o),
                           .lse = {static_cast<float*>(l.data), l.batch, l.heads, l.seqlen,
                                   l.stride_batch, l.stride_heads, l.stride_seqlen}};
  void* const workspace = stage.lend(room->data.get(), at(planned->workspace_bytes()));
  if (!stage.status()) {
    return stage.status();
  }
  if (Status done = planned->forward(in, out, {workspace, planned->workspace_bytes()}); !done) {
    return done;
  }
  for (Placed* written : {&o, &lse}) {
    if (Status fetched = stage.fetch(*written); !fetched) {
      return fetched;
    }
  }
  CaseOutput output;
  if (!take(o, c.lengths_q, p.heads_q, p.head_dim_v, query, run.poison, output.o)) {
    return Status::device_error("o", "memory outside its valid region was written");
  }
  if (!take(lse, c.lengths_q, p.heads_q, 1, query, run.poison, output.lse)) {
    return Status::device_error("lse", "memory outside its valid region was written");
  }
  return output;
}

std::string difference(const AttentionCase& c, const CaseOutput& output,
                       const Expectation& expected) {
  const std::string o = compare(o_of(c), output.o, expected.reference.o, expected.o_bound);
  return o.empty() ? compare(lse_of(c), output.lse, expected.reference.lse, expected.lse_bound) : o;
}

std::string bit_difference(const AttentionCase& c, const CaseOutput& a, const CaseOutput& b) {
  const std::string o = first_difference(o_of(c), a.o, b.o);
  return o.empty() ? first_difference(lse_of(c), a.lse, b.lse) : o;
}

}  // namespace rafter::cli
