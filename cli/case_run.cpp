#include "cli/case_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>

#include "cli/array.h"
#include "cli/quantise.h"
#include "rafter/measure.h"

namespace rafter::cli {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

std::int64_t total(const std::vector<std::int64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

float rounded(float value, DType dtype) {
  switch (dtype) {
    case DType::f16:
      return f16_to_f32(f32_to_f16(value));
    case DType::bf16:
      return bf16_to_f32(f32_to_bf16(value));
    default:
      return value;
  }
}

// ---- layouts: where row r of sequence b lies

/// A tensor with memory of its own, every byte of it poison until rows are written.
struct Placed {
  std::vector<std::byte> memory;
  TensorView view;

  std::byte* element(std::int64_t batch, std::int64_t row, std::int64_t head, std::int64_t dim) {
    const std::int64_t offset = batch * view.stride_batch + row * view.stride_seqlen +
                                head * view.stride_heads + dim * view.stride_head_dim;
    return static_cast<std::byte*>(view.data) + offset * (bits_of(view.dtype) / 8);
  }
};

Placed place(Strides strides, DType dtype, std::array<std::int64_t, 4> shape,
             unsigned char poison) {
  const auto [batch, seqlen, heads, head_dim] = shape;
  Placed placed;
  TensorView& t = placed.view;
  t = strides == Strides::heads_first
          ? TensorView::heads_first(nullptr, dtype, batch, heads, seqlen, head_dim)
          : TensorView::contiguous(nullptr, dtype, batch, seqlen, heads, head_dim);
  std::int64_t skew = 0;  // elements off the alignment
  if (strides == Strides::padded) {
    t.stride_heads = head_dim + 3;
    t.stride_seqlen = heads * t.stride_heads + 5;
    t.stride_batch = seqlen * t.stride_seqlen + 7;
    skew = 1;
  }
  constexpr std::int64_t kGuard = 64;  // elements behind and in front
  const std::int64_t elements = std::max(
      {batch * t.stride_batch, heads * t.stride_heads, seqlen * t.stride_seqlen, std::int64_t{1}});
  const std::int64_t bytes = bits_of(dtype) / 8;
  placed.memory.assign(at((elements + skew + 2 * kGuard) * bytes), std::byte{poison});
  t.data = placed.memory.data() + (kGuard + skew) * bytes;
  return placed;
}

void store(std::byte* to, DType dtype, float value, float scale = 1) {
  if (dtype == DType::int8) {
    const std::int8_t whole = to_int8(value, scale);
    std::memcpy(to, &whole, sizeof whole);
    return;
  }
  if (dtype == DType::e4m3) {
    const std::uint8_t bits = f32_to_e4m3(value / scale);
    std::memcpy(to, &bits, sizeof bits);
    return;
  }
  if (dtype == DType::f32) {
    std::memcpy(to, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = dtype == DType::f16 ? f32_to_f16(value) : f32_to_bf16(value);
  std::memcpy(to, &bits, sizeof bits);
}

/// Where the rows of each sequence lie in the tensors of the problem.
struct Map {
  const AttentionProblem& problem;
  std::vector<std::int64_t> start_q, start_kv;  // packed
  std::vector<std::int64_t> pages;              // paged: [batch, columns]
  std::int64_t columns = 0;

  std::pair<std::int64_t, std::int64_t> query(std::int64_t b, std::int64_t row) const {
    return problem.layout == Layout::packed ? std::pair(std::int64_t{0}, start_q[at(b)] + row)
                                            : std::pair(b, row);
  }
  std::pair<std::int64_t, std::int64_t> key(std::int64_t b, std::int64_t row) const {
    switch (problem.layout) {
      case Layout::packed:
        return {0, start_kv[at(b)] + row};
      case Layout::paged:
        return {pages[at(b * columns + row / problem.page_size)], row % problem.page_size};
      default:
        return {b, row};
    }
  }
};

Map map_of(const AttentionCase& c, const AttentionProblem& problem) {
  Map map{.problem = problem, .start_q = {0}, .start_kv = {0}, .pages = {}};
  for (std::size_t b = 0; b < c.lengths_q.size(); ++b) {
    map.start_q.push_back(map.start_q.back() + c.lengths_q[b]);
    map.start_kv.push_back(map.start_kv.back() + c.lengths_kv[b] +
                           (problem.seqused_kv ? kSpareRows : 0));
  }
  if (problem.layout == Layout::paged) {
    map.columns = (problem.seqlen_kv + problem.page_size - 1) / problem.page_size;
    // Descending, so that neighbouring keys are not neighbouring pages; page 0 stays unused.
    for (std::int64_t page = problem.batch * map.columns; page > 0; --page) {
      map.pages.push_back(page);
    }
  }
  return map;
}

/// Visits every element of the valid region in the order of CaseValues.
template <typename Where, typename Visit>
void each_element(const std::vector<std::int64_t>& lengths, std::int64_t heads,
                  std::int64_t head_dim, Where where, Visit visit) {
  std::size_t i = 0;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    for (std::int64_t row = 0; row < lengths[b]; ++row) {
      const auto [batch, seqlen] = where(static_cast<std::int64_t>(b), row);
      for (std::int64_t head = 0; head < heads; ++head) {
        for (std::int64_t dim = 0; dim < head_dim; ++dim) {
          visit(i++, batch, seqlen, head, dim);
        }
      }
    }
  }
}

bool all_poison(const std::vector<std::byte>& memory, unsigned char poison) {
  return std::all_of(memory.begin(), memory.end(),
                     [poison](std::byte b) { return b == std::byte{poison}; });
}

/// Takes the valid elements out of a float tensor; false when any other byte has changed.
template <typename Where>
bool take(Placed& placed, const std::vector<std::int64_t>& lengths, std::int64_t heads,
          std::int64_t head_dim, Where where, unsigned char poison, std::vector<float>& into) {
  into.resize(at(total(lengths) * heads * head_dim));
  each_element(lengths, heads, head_dim, where,
               [&](std::size_t i, std::int64_t batch, std::int64_t row, std::int64_t head,
                   std::int64_t dim) {
                 std::byte* from = placed.element(batch, row, head, dim);
                 std::memcpy(&into[i], from, sizeof(float));
                 std::memset(from, poison, sizeof(float));
               });
  return all_poison(placed.memory, poison);
}

// ---- the device's copy

/// What a run reads and writes, where its device reaches it: on the CPU the memory itself.
class Stage {
 public:
  explicit Stage(const Device& device) : device_(device) {}

  /// Memory that holds a copy of those bytes, or the bytes themselves; null after an error.
  void* lend(const void* from, std::size_t bytes) {
    if (device_.kind == Device::Kind::cpu) {
      return const_cast<void*>(from);
    }
    const auto size = static_cast<std::int64_t>(bytes);
    Result<DeviceMemory> memory = DeviceMemory::allocate(device_, size);
    Status status = memory ? memory->upload(from, size) : memory.status();
    if (!status) {
      status_ = status;
      return nullptr;
    }
    copies_.push_back({from, *std::move(memory)});
    return copies_.back().memory.data();
  }
  TensorView view(const Placed& placed) {
    TensorView view = placed.view;
    const auto offset = static_cast<std::byte*>(view.data) - placed.memory.data();
    auto* const base = static_cast<std::byte*>(lend(placed.memory.data(), placed.memory.size()));
    view.data = base == nullptr ? nullptr : base + offset;
    return view;
  }
  /// What the run has written comes back.
  Status fetch(Placed& placed) const {
    for (const Copy& copy : copies_) {
      if (copy.from == placed.memory.data()) {
        return copy.memory.download(placed.memory.data(), copy.memory.bytes());
      }
    }
    return Status::ok();
  }
  const Status& status() const { return status_; }

 private:
  struct Copy {
    const void* from;
    DeviceMemory memory;
  };
  Device device_;
  Status status_;
  std::vector<Copy> copies_;
};

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
    AttentionProblem p = sized;
    p.dtype = DType::f32;
    p.kv_dtype = {};
    p.layout = Layout::dense;
    p.batch = 1;
    p.seqlen_q = c.lengths_q[b];
    p.seqlen_kv = c.lengths_kv[b];
    p.total_q = p.total_kv = p.page_size = p.num_pages = 0;
    p.seqused_kv = false;
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

double largest_error(const std::vector<float>& got, const std::vector<float>& want) {
  double most = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::isfinite(got[i]) && std::isfinite(want[i])) {
      most = std::max(most, std::fabs(static_cast<double>(got[i]) - static_cast<double>(want[i])));
    }
  }
  return most;
}

double largest(const std::vector<float>& values) {
  double most = 0;
  for (const float value : values) {
    most = std::isfinite(value) ? std::max(most, std::fabs(static_cast<double>(value))) : most;
  }
  return most;
}

/// "o[sequence 1, row 3, head 0, 5]".
std::string place_of(const AttentionCase& c, const char* name, std::size_t index,
                     std::int64_t head_dim) {
  std::int64_t element = static_cast<std::int64_t>(index);
  const std::int64_t dim = element % head_dim;
  element /= head_dim;
  const std::int64_t head = element % c.problem.heads_q;
  std::int64_t row = element / c.problem.heads_q;
  std::size_t b = 0;
  for (; row >= c.lengths_q[b]; ++b) {
    row -= c.lengths_q[b];
  }
  return head_dim == 1
             ? fmt::format("{}[sequence {}, row {}, head {}]", name, b, row, head)
             : fmt::format("{}[sequence {}, row {}, head {}, {}]", name, b, row, head, dim);
}

/// Shape; NaN and infinities in the same places; then the largest error.
std::string compare(const AttentionCase& c, const char* name, std::int64_t head_dim,
                    const std::vector<float>& got, const std::vector<float>& want, double bound) {
  if (got.size() != want.size()) {
    return fmt::format("{} has {} elements, {} expected", name, got.size(), want.size());
  }
  double most = 0;
  std::size_t worst = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const bool special = !std::isfinite(want[i]) || !std::isfinite(got[i]);
    const bool same = std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i];
    if (special && !same) {
      return fmt::format("{} is {}, {} expected", place_of(c, name, i, head_dim), got[i], want[i]);
    }
    const double error = std::fabs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    if (!special && error > most) {
      most = error;
      worst = i;
    }
  }
  return most <= bound
             ? std::string()
             : fmt::format("{} is {:.9g}, {:.9g} expected: error {:.3g}, at most {:.3g} allowed",
                           place_of(c, name, worst, head_dim), got[worst], want[worst], most,
                           bound);
}

std::int64_t head_dim_v(const AttentionCase& c) {
  return c.problem.head_dim_v == 0 ? c.problem.head_dim : c.problem.head_dim_v;
}

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
  const std::string o =
      compare(c, "o", head_dim_v(c), output.o, expected.reference.o, expected.o_bound);
  return o.empty() ? compare(c, "lse", 1, output.lse, expected.reference.lse, expected.lse_bound)
                   : o;
}

std::string bit_difference(const AttentionCase& c, const CaseOutput& a, const CaseOutput& b) {
  const auto first = [&c](const char* name, std::int64_t head_dim, const std::vector<float>& x,
                          const std::vector<float>& y) -> std::string {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (std::bit_cast<std::uint32_t>(x[i]) != std::bit_cast<std::uint32_t>(y[i])) {
        return fmt::format("{} is {:.9g} and {:.9g}", place_of(c, name, i, head_dim), x[i], y[i]);
      }
    }
    return {};
  };
  const std::string o = first("o", head_dim_v(c), a.o, b.o);
  return o.empty() ? first("lse", 1, a.lse, b.lse) : o;
}

}  // namespace rafter::cli
