#include "support/attention_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "dispatch/registry.h"
#include "support/oracle.h"
#include "support/placed.h"

namespace rafter::testing {
AttentionProblem sized_problem(const Case& c) {
  AttentionProblem p = c.problem;
  p.batch = static_cast<std::int64_t>(c.lengths_q.size());
  p.seqlen_q = max_of(c.lengths_q);
  p.seqlen_kv = max_of(c.lengths_kv);
  if (p.layout == Layout::packed) {
    p.seqlen_q += 2;  // capacities that no sequence fills, totals with rows at the end
    p.seqlen_kv += 3;
    p.total_q = sum_of(c.lengths_q) + 3;
    p.total_kv = sum_of(c.lengths_kv) + 2 + (p.seqused_kv ? p.batch : 0);
  } else if (p.seqused_kv) {
    p.seqlen_kv += 3;
  }
  if (p.layout == Layout::paged) {
    std::int64_t pages = 0;
    for (const std::int64_t length : c.lengths_kv) {
      pages += (length + p.page_size - 1) / p.page_size;
    }
    p.num_pages = pages + c.spare_pages + 2;  // page 0 and the last are nobody's
  }
  return p;
}

namespace {

/// One row of k or v: as it is, or as int8 or e4m3 multiples of its scale.
void write_row(const TensorView& t, std::int64_t batch, std::int64_t row, std::int64_t head,
               const float* values, const float* scale) {
  for (std::int64_t d = 0; d < t.head_dim; ++d) {
    if (t.dtype == DType::int8) {
      const auto whole = static_cast<std::int8_t>(std::lround(values[d] / *scale));
      std::memcpy(element_at(t, batch, row, head, d), &whole, 1);
    } else if (t.dtype == DType::e4m3) {
      const std::uint8_t bits = f32_to_e4m3(values[d] / *scale);
      std::memcpy(element_at(t, batch, row, head, d), &bits, 1);
    } else {
      write(t, batch, row, head, d, values[d]);
    }
  }
}

/// Everything a run of a case needs, in memory.
struct Scene {
  AttentionProblem problem;
  Placed q, k, v, o, k_scale, v_scale;
  GuardedBuffer lse_buffer;
  LseView lse;
  Indices cu_q, cu_kv, used, pages;
  bool with_scales = false;
  std::vector<std::uint64_t> tree_words;
  std::vector<std::int32_t> bad_pages;
  std::vector<std::int64_t> q_starts, kv_starts;  // packed: first rows
  std::vector<std::int64_t> page_ids;             // paged: [batch, cols]
  std::int64_t page_cols = 0;

  ForwardInputs inputs() const {
    ForwardInputs in{q.view, k.view, v.view, cu_q.view, cu_kv.view, used.view, pages.view};
    if (with_scales) {
      in.k_scale = k_scale.view;
      in.v_scale = v_scale.view;
    }
    if (!tree_words.empty()) {
      in.tree_mask = BitsView::contiguous(tree_words.data(), problem.batch, problem.seqlen_q);
    }
    return in;
  }
  ForwardOutputs outputs() {
    ForwardOutputs out{o.view, lse};
    if (problem.layout == Layout::paged) {
      out.bad_pages = {bad_pages.data(), static_cast<std::int64_t>(bad_pages.size())};
    }
    return out;
  }
  std::vector<Region> regions() {
    std::vector<Region> all = {{tree_words.data(), tree_words.size() * sizeof(tree_words[0])},
                               {bad_pages.data(), bad_pages.size() * sizeof(bad_pages[0])}};
    for (GuardedBuffer* buffer :
         {&q.buffer, &k.buffer, &v.buffer, &o.buffer, &k_scale.buffer, &v_scale.buffer, &lse_buffer,
          &cu_q.buffer, &cu_kv.buffer, &used.buffer, &pages.buffer}) {
      all.push_back(buffer->region());
    }
    return all;
  }
};

void number_pages(const Case& c, Scene& scene) {
  const AttentionProblem& p = scene.problem;
  scene.page_cols = (p.seqlen_kv + p.page_size - 1) / p.page_size + 1;
  scene.page_ids.assign(index(p.batch * scene.page_cols), -1);
  std::vector<std::int64_t> free(index(std::max<std::int64_t>(0, p.num_pages - 2)));
  std::iota(free.begin(), free.end(), std::int64_t{1});
  std::shuffle(free.begin(), free.end(), std::mt19937(c.seed));
  std::size_t next = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t i = 0; i * p.page_size < c.lengths_kv[index(b)]; ++i) {
      scene.page_ids[index(b * scene.page_cols + i)] = free[next++];
    }
  }
}

struct Place {
  std::int64_t batch, row;
};
Place place_of_q(const Scene& scene, std::int64_t b, std::int64_t i) {
  return scene.problem.layout == Layout::packed ? Place{0, scene.q_starts[index(b)] + i}
                                                : Place{b, i};
}
Place place_of_kv(const Scene& scene, std::int64_t b, std::int64_t j) {
  switch (scene.problem.layout) {
    case Layout::packed:
      return {0, scene.kv_starts[index(b)] + j};
    case Layout::paged:
      return {scene.page_ids[index(b * scene.page_cols + j / scene.problem.page_size)],
              j % scene.problem.page_size};
    default:
      return {b, j};
  }
}

void write_values(const Case& c, const Values& values, Scene& scene) {
  const AttentionProblem& p = scene.problem;
  const std::int64_t heads_kv = scene.k.view.heads;
  const bool scaled = !values.k_scale.empty();
  std::size_t q_at = 0, k_at = 0, v_at = 0, row_at = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t i = 0; i < c.lengths_q[index(b)]; ++i) {
      const Place at = place_of_q(scene, b, i);
      for (std::int64_t h = 0; h < p.heads_q; ++h) {
        for (std::int64_t d = 0; d < p.head_dim; ++d) {
          write(scene.q.view, at.batch, at.row, h, d, values.q[q_at++]);
        }
      }
    }
    for (std::int64_t j = 0; j < c.lengths_kv[index(b)]; ++j) {
      const Place at = place_of_kv(scene, b, j);
      for (std::int64_t h = 0; h < heads_kv; ++h, ++row_at) {
        const float* const k_scale = scaled ? &values.k_scale[row_at] : nullptr;
        const float* const v_scale = scaled ? &values.v_scale[row_at] : nullptr;
        write_row(scene.k.view, at.batch, at.row, h, &values.k[k_at], k_scale);
        write_row(scene.v.view, at.batch, at.row, h, &values.v[v_at], v_scale);
        k_at += index(p.head_dim);
        v_at += index(scene.v.view.head_dim);
        if (scene.with_scales) {
          write(scene.k_scale.view, at.batch, at.row, h, 0, *k_scale);
          write(scene.v_scale.view, at.batch, at.row, h, 0, *v_scale);
        }
      }
    }
  }
}

/// Factors of k or v: of each row, or one of each head in strides of 0.
Placed place_scales(const Case& c, Style style, const TensorView& rows, Fill fill) {
  const bool per_head = c.scales == Scales::per_head;
  Placed scales = place(style, DType::f32, per_head ? 1 : rows.batch, per_head ? 1 : rows.seqlen,
                        rows.heads, 1, fill);
  if (per_head) {
    scales.view.batch = rows.batch;
    scales.view.seqlen = rows.seqlen;
    scales.view.stride_batch = scales.view.stride_seqlen = 0;
  }
  return scales;
}

Scene make_scene(const Case& c, const Values& values, const RunOptions& options) {
  Scene scene;
  AttentionProblem& p = scene.problem;
  p = sized_problem(c);
  const auto [heads_kv, dim_v] = dims_of(p);
  if (p.layout == Layout::packed) {
    scene.q_starts = scene.kv_starts = {0};
    for (std::int64_t b = 0; b < p.batch; ++b) {
      scene.q_starts.push_back(scene.q_starts.back() + c.lengths_q[index(b)]);
      scene.kv_starts.push_back(scene.kv_starts.back() + c.lengths_kv[index(b)] +
                                (p.seqused_kv ? b % 2 : 0));
    }
    scene.cu_q = make_indices(scene.q_starts, options.index_dtype);
    scene.cu_kv = make_indices(scene.kv_starts, options.index_dtype);
  }
  if (p.layout == Layout::paged) {
    number_pages(c, scene);
  }
  if (p.seqused_kv) {
    scene.used = make_indices(c.lengths_kv, options.index_dtype);
  }
  const bool packed = p.layout == Layout::packed;
  const bool paged = p.layout == Layout::paged;
  const std::int64_t q_batch = packed ? 1 : p.batch;
  const std::int64_t q_rows = packed ? p.total_q : p.seqlen_q;
  const std::int64_t kv_batch = packed ? 1 : (paged ? p.num_pages : p.batch);
  const std::int64_t kv_rows = packed ? p.total_kv : (paged ? p.page_size : p.seqlen_kv);
  const Fill fill = options.fill;
  scene.q = place(nth_style(c.style, 0), p.dtype, q_batch, q_rows, p.heads_q, p.head_dim, fill);
  const DType kv = p.kv_dtype.value_or(p.dtype);
  scene.k = place(nth_style(c.style, 1), kv, kv_batch, kv_rows, heads_kv, p.head_dim, fill);
  scene.v = place(nth_style(c.style, 2), kv, kv_batch, kv_rows, heads_kv, dim_v, fill);
  scene.with_scales = is_scaled(kv) && c.scales != Scales::none;
  scene.k_scale = place_scales(c, nth_style(c.style, 1), scene.k.view, fill);
  scene.v_scale = place_scales(c, nth_style(c.style, 2), scene.v.view, fill);
  if (p.tree_mask) {
    scene.tree_words = values.tree_mask;
  }
  scene.o = place(nth_style(c.style, 3), options.problem_dtype_out ? p.dtype : DType::f32, q_batch,
                  q_rows, p.heads_q, dim_v, fill);
  if (options.with_lse) {
    // Padded: heads q_rows + 3 apart.
    const std::int64_t stride = q_rows + 3;
    scene.lse_buffer =
        GuardedBuffer(index(std::max<std::int64_t>(1, q_batch * p.heads_q * stride)) * 4, fill);
    scene.lse = {static_cast<float*>(scene.lse_buffer.data()),
                 q_batch,
                 p.heads_q,
                 q_rows,
                 p.heads_q * stride,
                 stride,
                 1};
  }
  write_values(c, values, scene);
  if (p.layout == Layout::paged) {
    scene.bad_pages.assign(index(p.batch), -1);
    for (const WrongPage& wrong : options.wrong_pages) {
      scene.page_ids[index(wrong.sequence * scene.page_cols + wrong.column)] = wrong.page;
    }
    scene.pages = make_indices(scene.page_ids, options.index_dtype, scene.page_cols);
  }
  return scene;
}

/// Bytes of an output that belong to no row of a sequence must keep their fill.
std::vector<unsigned char> bytes_outside(const Case& c, Scene& scene) {
  std::vector<unsigned char> copy(scene.o.buffer.bytes());
  std::memcpy(copy.data(), scene.o.buffer.data(), copy.size());
  const TensorView& o = scene.o.view;
  for (std::int64_t b = 0; b < scene.problem.batch; ++b) {
    for (std::int64_t i = 0; i < c.lengths_q[index(b)]; ++i) {
      const Place at = place_of_q(scene, b, i);
      for (std::int64_t h = 0; h < o.heads; ++h) {
        for (std::int64_t d = 0; d < o.head_dim; ++d) {
          const std::byte* const element = element_at(o, at.batch, at.row, h, d);
          const auto offset = element - static_cast<std::byte*>(scene.o.buffer.data());
          std::memset(copy.data() + offset, 0, static_cast<std::size_t>(bits_of(o.dtype) / 8));
        }
      }
    }
  }
  return copy;
}

Output read_output(const Case& c, const Scene& scene) {
  Output output;
  const TensorView& o = scene.o.view;
  for (std::int64_t b = 0; b < scene.problem.batch; ++b) {
    for (std::int64_t i = 0; i < c.lengths_q[index(b)]; ++i) {
      const Place at = place_of_q(scene, b, i);
      for (std::int64_t h = 0; h < o.heads; ++h) {
        for (std::int64_t d = 0; d < o.head_dim; ++d) {
          output.o.push_back(read(o, at.batch, at.row, h, d));
        }
        if (scene.lse.data != nullptr) {
          output.lse.push_back(scene.lse.data[at.batch * scene.lse.stride_batch +
                                              h * scene.lse.stride_heads + at.row]);
        }
      }
    }
  }
  output.bad_pages = scene.bad_pages;
  return output;
}

}  // namespace

OracleOptions oracle_options(const AttentionProblem& p) {
  OracleOptions options;
  options.scale = p.softmax_scale ? static_cast<double>(*p.softmax_scale)
                                  : static_cast<double>(static_cast<float>(
                                        1.0 / std::sqrt(static_cast<double>(p.head_dim))));
  options.softcap = static_cast<double>(p.softcap);
  options.has_left = p.mask.window_left >= 0;
  options.has_right = p.mask.window_right >= 0;
  options.left = p.mask.window_left;
  options.right = p.mask.window_right;
  options.top_left = p.mask.align == MaskAlign::top_left;
  return options;
}

Dims dims_of(const AttentionProblem& p) {
  return {p.heads_kv == 0 ? p.heads_q : p.heads_kv, p.head_dim_v == 0 ? p.head_dim : p.head_dim_v};
}

std::vector<double> head_of(const std::vector<float>& values, std::int64_t first, std::int64_t rows,
                            std::int64_t heads, std::int64_t head, std::int64_t dim) {
  std::vector<double> out;
  out.reserve(index(rows * dim));
  for (std::int64_t i = first; i < first + rows; ++i) {
    for (std::int64_t d = 0; d < dim; ++d) {
      out.push_back(static_cast<double>(values[index((i * heads + head) * dim + d)]));
    }
  }
  return out;
}

void for_each_head(const Case& c, const Values& values,
                   const std::function<void(const CaseHead&, const OracleHead&)>& body) {
  const AttentionProblem& p = c.problem;
  const auto [heads_kv, dim_v] = dims_of(p);
  CaseHead at;
  for (std::size_t b = 0; b < c.lengths_q.size(); ++b) {
    at.rows = c.lengths_q[b];
    at.keys = c.lengths_kv[b];
    for (at.h = 0; at.h < p.heads_q; ++at.h) {
      at.h_kv = at.h * heads_kv / p.heads_q;
      const auto q = head_of(values.q, at.q_first, at.rows, p.heads_q, at.h, p.head_dim);
      const auto k = head_of(values.k, at.kv_first, at.keys, heads_kv, at.h_kv, p.head_dim);
      const auto v = head_of(values.v, at.kv_first, at.keys, heads_kv, at.h_kv, dim_v);
      body(at, {at.rows, at.keys, p.head_dim, dim_v, q.data(), k.data(), v.data()});
    }
    at.q_first += at.rows;
    at.kv_first += at.keys;
  }
}

Status try_case(const Case& c, const Values& values, const RunOptions& options, Output& output) {
  Scene scene = make_scene(c, values, options);
  const Result<Plan> planned =
      plan(scene.problem, options.device,
           {.kernel = options.kernel, .threads = options.threads, .splits = options.splits});
  if (!planned) {
    return planned.status();
  }
  EXPECT_EQ(planned->kernel(), options.kernel);
  GuardedBuffer workspace(static_cast<std::size_t>(planned->workspace_bytes()), options.fill);
  const std::vector<unsigned char> before = bytes_outside(c, scene);
  const Workspace lent{workspace.data(), static_cast<std::int64_t>(workspace.bytes())};
  std::vector<Region> regions = scene.regions();
  regions.push_back(workspace.region());
  const Status status =
      options.forward ? options.forward(*planned, scene.inputs(), scene.outputs(), lent, regions)
                      : planned->forward(scene.inputs(), scene.outputs(), lent);
  EXPECT_TRUE(scene.o.buffer.intact()) << "o was written outside its buffer";
  EXPECT_TRUE(before == bytes_outside(c, scene)) << "o was written outside its rows";
  EXPECT_TRUE(!options.with_lse || scene.lse_buffer.intact()) << "lse was written outside";
  EXPECT_TRUE(workspace.intact()) << "the workspace was left";
  if (status) {
    output = read_output(c, scene);
  }
  return status;
}

Output run_case(const Case& c, const Values& values, const RunOptions& options) {
  Output output;
  const Status status = try_case(c, values, options, output);
  EXPECT_TRUE(status.is_ok()) << options.kernel << ": " << status.message();
  return output;
}

Expected expect_values(const Case& c, const Values& values) {
  const AttentionProblem& p = c.problem;
  const std::int64_t dim_v = dims_of(p).dim_v;
  const auto round = [&p](float x) { return round_to(p.dtype, x); };
  Expected expected;
  const std::int64_t total_q = sum_of(c.lengths_q);
  expected.o.resize(index(total_q * p.heads_q * dim_v));
  expected.lse.resize(index(total_q * p.heads_q));
  for_each_head(c, values, [&](const CaseHead& at, const OracleHead& head) {
    OracleOptions options = oracle_options(p);
    options.tree = p.tree_mask ? values.tree_mask.data() + at.q_first : nullptr;
    double error_o = 0, error_lse = 0, logit = 0;
#pragma omp parallel for num_threads(2) schedule(dynamic, 1) \
    reduction(max                                            \
              : error_o, error_lse, logit) if (at.rows * at.keys > 20000)
    for (std::int64_t i = 0; i < at.rows; ++i) {
      const std::int64_t row = (at.q_first + i) * p.heads_q + at.h;
      double* const o = expected.o.data() + row * dim_v;
      const double lse = oracle_row(head, options, i, o);
      expected.lse[index(row)] = lse;
      logit = std::fmax(logit, oracle_largest_logit(head, options, i));
      // The naive result depends on the order of its sums: the worse of two orders counts.
      for (const bool backwards : {false, true}) {
        std::vector<double> naive(index(dim_v));
        const double naive_lse = naive_row(head, options, i, backwards, round, naive.data());
        for (std::int64_t d = 0; d < dim_v; ++d) {
          error_o = std::fmax(error_o, std::fabs(naive[index(d)] - o[d]));
        }
        if (std::isfinite(lse)) {
          error_lse = std::fmax(error_lse, std::fabs(naive_lse - lse));
        }
      }
    }
    expected.largest_logit = std::fmax(expected.largest_logit, logit);
    expected.naive_error_o = std::fmax(expected.naive_error_o, error_o);
    expected.naive_error_lse = std::fmax(expected.naive_error_lse, error_lse);
  });
  return expected;
}

namespace {

struct Worst {
  double error = -1;
  std::size_t at = 0;
};

/// Compares one array; `name` and the shape of a row are for the message.
::testing::AssertionResult compare(const char* name, const std::vector<float>& got,
                                   const std::vector<double>& want, double bound,
                                   const std::string& derivation, std::int64_t heads,
                                   std::int64_t dim) {
  if (got.size() != want.size()) {
    return ::testing::AssertionFailure()
           << name << " has " << got.size() << " elements, " << want.size() << " expected";
  }
  const auto where = [&](std::size_t i) {
    const auto n = static_cast<std::int64_t>(i);
    return "[row " + std::to_string(n / (heads * dim)) + ", head " +
           std::to_string(n / dim % heads) + ", dim " + std::to_string(n % dim) + "]";
  };
  Worst worst;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto value = static_cast<double>(got[i]);
    const bool same_kind = std::isnan(value) == std::isnan(want[i]) &&
                           (!(std::isinf(value) || std::isinf(want[i])) || value == want[i]);
    if (!same_kind) {
      return ::testing::AssertionFailure()
             << name << where(i) << " is " << value << ", " << want[i] << " expected";
    }
    if (std::isfinite(value) && std::fabs(value - want[i]) > worst.error) {
      worst = {std::fabs(value - want[i]), i};
    }
  }
  if (worst.error > bound) {
    return ::testing::AssertionFailure()
           << name << where(worst.at) << " is " << got[worst.at] << ", " << want[worst.at]
           << " expected: error " << worst.error << " above " << bound << " = " << derivation;
  }
  return ::testing::AssertionSuccess();
}

double largest(const std::vector<double>& values) {
  double top = 0;
  for (const double value : values) {
    top = std::isfinite(value) ? std::fmax(top, std::fabs(value)) : top;
  }
  return top;
}

}  // namespace

::testing::AssertionResult close_to(const Output& output, const Expected& expected, const Case& c) {
  const AttentionProblem& p = c.problem;
  const std::int64_t dim_v = dims_of(p).dim_v;
  constexpr double kUlp32 = 0x1p-23;
  // Half an ulp of the dtype: what one more or one less rounding of the result changes.
  const double half_ulp = p.dtype == DType::bf16 ? 0x1p-9 : p.dtype == DType::f16 ? 0x1p-12 : 0;
  const double o_size = largest(expected.o);
  // 4 ulp of o in f32, and 1 ulp of the largest logit, which exp turns into a relative error of o.
  const double o_bound = 1.5 * expected.naive_error_o +
                         (4 * kUlp32 + half_ulp + kUlp32 * expected.largest_logit) * o_size;
  const ::testing::AssertionResult o = compare(
      "o", output.o, expected.o, o_bound,
      "1.5 * naive " + std::to_string(expected.naive_error_o) + " + ulps", p.heads_q, dim_v);
  if (!o || output.lse.empty()) {
    return o;
  }
  const double lse_size = std::fmax(1.0, largest(expected.lse));
  const double lse_bound = 1.5 * expected.naive_error_lse + 4 * kUlp32 * lse_size;
  return compare("lse", output.lse, expected.lse, lse_bound,
                 "1.5 * naive " + std::to_string(expected.naive_error_lse) + " + ulps", p.heads_q,
                 1);
}

::testing::AssertionResult same_bits(const Output& a, const Output& b) {
  const std::pair<const std::vector<float>*, const std::vector<float>*> arrays[] = {
      {&a.o, &b.o}, {&a.lse, &b.lse}};
  for (const auto& [x, y] : arrays) {
    if (x->size() != y->size()) {
      return ::testing::AssertionFailure() << x->size() << " and " << y->size() << " elements";
    }
    for (std::size_t i = 0; i < x->size(); ++i) {
      if (std::memcmp(&(*x)[i], &(*y)[i], sizeof(float)) != 0) {
        return ::testing::AssertionFailure()
               << (x == &a.o ? "o" : "lse") << "[" << i << "]: " << (*x)[i] << " and " << (*y)[i];
      }
    }
  }
  return ::testing::AssertionSuccess();
}

void check_case(const Case& c, const RunOptions& options) {
  const Values values = make_values(c);
  const Output output = run_case(c, values, options);
  EXPECT_TRUE(close_to(output, expect_values(c, values), c));
}

std::vector<std::string> cpu_kernels(Pass pass) {
  std::vector<std::string> names;
  for (const dispatch::Registered& kernel : dispatch::kernels()) {
    if (kernel.entry->device == Device::Kind::cpu && kernel.entry->pass() == pass &&
        kernel.machine.yes) {
      names.emplace_back(kernel.entry->name);
    }
  }
  return names;
}

std::string refusal_of(const Case& c, const std::string& kernel, const Device& device) {
  const Result<Plan> planned = plan(sized_problem(c), device, {.kernel = kernel});
  return planned ? std::string() : planned.status().message();
}

}  // namespace rafter::testing
