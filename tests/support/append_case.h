// One append into a cache, in memory of the host, and what float64 says of it: shared by the tests
// of the CPU and of CUDA.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "rafter/cache.h"
#include "support/placed.h"

namespace rafter::testing {

struct AppendCase {
  std::string name = {};
  DType dtype = DType::f32;
  std::int64_t seqlen = 1;                 // new tokens
  std::vector<std::int64_t> lengths = {};  // before
  std::int64_t heads = 2, head_dim = 16, head_dim_v = 16;
  std::int64_t capacity = 24;  // dense: rows; paged: rounded down to whole pages
  std::int64_t page_size = 0;  // 0: dense
  DType cache = DType::f32;    // int8, e4m3, or else as dtype
  bool given_factors = false;  // of int8 and e4m3; else computed
  bool no_factors = false;     // e4m3
  std::int64_t rotary_dim = 0;
  Rope::Pairs pairs = Rope::Pairs::half_split;
  std::int64_t max_position = 64;
  std::int64_t heads_q = 0;
  Style style = Style::contiguous;
  std::vector<std::int64_t> fresh = {};  // seqused_new
  DType index_dtype = DType::i32;
};

inline std::vector<AppendCase> append_cases() {
  std::vector<AppendCase> cases;
  const auto add = [&](std::string name, AppendCase c) {
    c.name = std::move(name);
    cases.push_back(std::move(c));
  };
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::string of = to_string(dtype);
    add(of + " dense", {.dtype = dtype, .seqlen = 3, .lengths = {0, 7, 21}});
    add(of + " pages of 5, i64, gaps", {.dtype = dtype,
                                        .seqlen = 7,
                                        .lengths = {4, 0, 13},
                                        .head_dim = 40,
                                        .head_dim_v = 24,
                                        .page_size = 5,
                                        .style = Style::mixed,
                                        .index_dtype = DType::i64});
    add(of + ", rope of halves", {.dtype = dtype,
                                  .seqlen = 5,
                                  .lengths = {0, 11, 40},
                                  .heads = 3,
                                  .head_dim = 64,
                                  .head_dim_v = 64,
                                  .capacity = 80,
                                  .page_size = 5,
                                  .rotary_dim = 64,
                                  .heads_q = 9,
                                  .style = Style::mixed});
    for (const DType cache : {DType::int8, DType::e4m3}) {
      add(of + " into " + to_string(cache) + ", factors computed", {.dtype = dtype,
                                                                    .seqlen = 2,
                                                                    .lengths = {0, 9},
                                                                    .head_dim = 64,
                                                                    .page_size = 1,
                                                                    .cache = cache,
                                                                    .rotary_dim = 64});
      add(of + " into " + to_string(cache) + ", factors given", {.dtype = dtype,
                                                                 .seqlen = 2,
                                                                 .lengths = {0, 9},
                                                                 .head_dim_v = 7,
                                                                 .cache = cache,
                                                                 .given_factors = true});
    }
  }
  add("e4m3 without factors",
      {.seqlen = 2, .lengths = {3}, .cache = DType::e4m3, .no_factors = true});
  add("rope of a part, pairs apart", {.seqlen = 5,
                                      .lengths = {0, 3},
                                      .head_dim = 24,
                                      .rotary_dim = 10,
                                      .heads_q = 4,
                                      .style = Style::mixed});
  add("rope of all, neighbours", {.dtype = DType::bf16,
                                  .seqlen = 5,
                                  .lengths = {11, 3},
                                  .head_dim = 128,
                                  .head_dim_v = 256,
                                  .page_size = 3,
                                  .rotary_dim = 128,
                                  .pairs = Rope::Pairs::interleaved,
                                  .heads_q = 5});
  add("rope of halves, many tokens", {.dtype = DType::bf16,
                                      .seqlen = 300,
                                      .lengths = {0, 3},
                                      .head_dim = 32,
                                      .head_dim_v = 32,
                                      .capacity = 304,
                                      .rotary_dim = 32,
                                      .max_position = 304,
                                      .heads_q = 5});
  add("some new rows are not there", {.dtype = DType::bf16,
                                      .seqlen = 4,
                                      .lengths = {2, 2, 2},
                                      .page_size = 4,
                                      .fresh = {4, 0, 1}});
  add("no sequence", {.lengths = {}});
  add("no new token", {.seqlen = 0, .lengths = {1}});
  return cases;
}

/// Tokens, pages, positions and sequences that 16 bits do not count, in each way rows are taken.
inline std::vector<AppendCase> append_cases_beyond_16_bits() {
  constexpr std::int64_t kMany = 70'000;
  const AppendCase one{.dtype = DType::bf16,
                       .seqlen = kMany,
                       .lengths = {5},
                       .heads = 1,
                       .head_dim = 8,
                       .head_dim_v = 8,
                       .capacity = kMany + 3,  // the last two are dropped
                       .page_size = 1};
  std::vector<AppendCase> cases(4, one);
  cases[0].name = "copied into pages";
  cases[0].index_dtype = DType::i64;
  cases[1].name = "halves turned";
  cases[1].head_dim = cases[1].head_dim_v = cases[1].rotary_dim = 16;
  cases[1].max_position = kMany + 5;
  cases[1].heads_q = 1;
  cases[2].name = "neighbours turned, into int8";
  cases[2].cache = DType::int8;
  cases[2].rotary_dim = 8;
  cases[2].pairs = Rope::Pairs::interleaved;
  cases[2].max_position = kMany + 5;
  cases[3].name = "one token of each sequence";
  cases[3].seqlen = 1;
  cases[3].lengths.assign(kMany, 1);
  cases[3].lengths.back() = 0;
  cases[3].capacity = 2;
  cases[3].page_size = 0;
  return cases;
}

/// The memory of a case, poisoned where nothing is said, and its oracle.
class AppendScene {
 public:
  explicit AppendScene(const AppendCase& c) : case_(c) {
    const std::int64_t batch = size_of(c.lengths);
    paged_ = c.page_size > 0;
    cols_ = paged_ ? c.capacity / c.page_size : 0;
    const std::int64_t places = paged_ ? batch * cols_ + 3 : batch;
    const std::int64_t rows = paged_ ? c.page_size : c.capacity;
    const DType cache = quantised() ? c.cache : c.dtype;
    std::mt19937 random(5);
    k_ = place(nth_style(c.style, 0), c.dtype, batch, c.seqlen, c.heads, c.head_dim, Fill::nan);
    v_ = place(nth_style(c.style, 1), c.dtype, batch, c.seqlen, c.heads, c.head_dim_v, Fill::nan);
    fill(k_.view, random);
    fill(v_.view, random);
    k_cache_ = place(nth_style(c.style, 2), cache, places, rows, c.heads, c.head_dim, Fill::nan);
    v_cache_ = place(nth_style(c.style, 1), cache, places, rows, c.heads, c.head_dim_v, Fill::nan);
    k_scale_ = place(nth_style(c.style, 1), DType::f32, places, rows, c.heads, 1, Fill::nan);
    v_scale_ = place(nth_style(c.style, 0), DType::f32, places, rows, c.heads, 1, Fill::nan);
    k_given_ = place(Style::gaps, DType::f32, 1, 1, c.heads, 1, Fill::nan);
    v_given_ = place(Style::gaps, DType::f32, 1, 1, c.heads, 1, Fill::nan);
    for (std::int64_t h = 0; h < c.heads; ++h) {
      write(k_given_.view, 0, 0, h, 0, 0.01f * static_cast<float>(h + 2));
      write(v_given_.view, 0, 0, h, 0, 0.02f * static_cast<float>(h + 1));
    }
    if (c.heads_q > 0) {
      q_ = place(nth_style(c.style, 2), c.dtype, batch, c.seqlen, c.heads_q, c.head_dim, Fill::nan);
      q_out_ =
          place(nth_style(c.style, 0), c.dtype, batch, c.seqlen, c.heads_q, c.head_dim, Fill::nan);
      fill(q_.view, random);
    }
    lengths_ = make_indices(c.lengths, c.index_dtype);
    fresh_ = make_indices(c.fresh, c.index_dtype);
    number_pages(random);
    dropped_.assign(index(batch), -1);
    cos_.resize(index(c.max_position * (c.rotary_dim / 2)));
    sin_.resize(cos_.size());
    for (std::size_t i = 0; i < cos_.size(); ++i) {
      const double angle = 0.37 * static_cast<double>(i);
      cos_[i] = static_cast<float>(std::cos(angle));
      sin_[i] = static_cast<float>(std::sin(angle));
    }
  }

  AppendInputs inputs() const {
    AppendInputs in{.k = k_.view, .v = v_.view, .seqused_kv = lengths_.view};
    if (!case_.fresh.empty()) {
      in.seqused_new = fresh_.view;
    }
    if (paged_) {
      in.page_table = pages_.view;
    }
    if (case_.rotary_dim > 0) {
      in.rope = {cos_.data(), sin_.data(), case_.max_position, case_.rotary_dim, case_.pairs};
      in.q = q_.view;
    }
    if (quantised() && case_.given_factors) {
      in.k_scale = k_given_.view;
      in.v_scale = v_given_.view;
    }
    return in;
  }
  AppendOutputs outputs() {
    AppendOutputs out{.k_cache = k_cache_.view, .v_cache = v_cache_.view};
    if (quantised() && !case_.given_factors && !case_.no_factors) {
      out.k_scale = k_scale_.view;
      out.v_scale = v_scale_.view;
    }
    if (case_.rotary_dim > 0) {
      out.q = q_out_.view;
    }
    out.dropped = {dropped_.data(), size_of(case_.lengths)};
    return out;
  }
  const std::vector<std::int32_t>& dropped() const { return dropped_; }
  /// All that inputs() and outputs() point to.
  std::vector<Region> regions() {
    std::vector<Region> all = {{dropped_.data(), dropped_.size() * sizeof(std::int32_t)},
                               {cos_.data(), cos_.size() * sizeof(float)},
                               {sin_.data(), sin_.size() * sizeof(float)}};
    for (Placed* placed : {&k_, &v_, &q_, &q_out_, &k_cache_, &v_cache_, &k_scale_, &v_scale_,
                           &k_given_, &v_given_}) {
      all.push_back(placed->buffer.region());
    }
    for (Indices* indices : {&lengths_, &fresh_, &pages_}) {
      all.push_back(indices->buffer.region());
    }
    return all;
  }
  /// All outputs have the same bits.
  ::testing::AssertionResult same_bits(AppendScene& other) {
    if (dropped_ != other.dropped_) {
      return ::testing::AssertionFailure() << "other counts";
    }
    const std::pair<const char*, Placed AppendScene::*> outputs[] = {
        {"q", &AppendScene::q_out_},
        {"k_cache", &AppendScene::k_cache_},
        {"v_cache", &AppendScene::v_cache_},
        {"k_scale", &AppendScene::k_scale_},
        {"v_scale", &AppendScene::v_scale_}};
    for (const auto& [name, output] : outputs) {
      GuardedBuffer& a = (this->*output).buffer;
      GuardedBuffer& b = (other.*output).buffer;
      if (a.bytes() != b.bytes() ||
          (a.bytes() > 0 && std::memcmp(a.data(), b.data(), a.bytes()) != 0)) {
        return ::testing::AssertionFailure() << name << " differs";
      }
    }
    return ::testing::AssertionSuccess();
  }
  void break_page(std::int64_t b, std::int64_t column, std::int64_t page) {
    page_ids_[index(b * cols_ + column)] = page;
    pages_ = make_indices(page_ids_, case_.index_dtype, cols_);
  }
  void set_k(std::int64_t d, float value) { write(k_.view, 0, 0, 0, d, value); }

  /// The caches, their factors, the queries and the counts are what float64 says, and nothing else
  /// was written.
  void check() const {
    std::vector<char> written_k(k_cache_.buffer.bytes()), written_v(v_cache_.buffer.bytes());
    for (std::int64_t b = 0; b < size_of(case_.lengths); ++b) {
      std::int32_t lost = 0;
      for (std::int64_t i = 0; i < rows_of(b); ++i) {
        const std::int64_t position = case_.lengths[index(b)] + i;
        const auto [batch, row] = place_of(b, position);
        if (batch < 0) {
          ++lost;
          continue;
        }
        for (std::int64_t h = 0; h < case_.heads; ++h) {
          check_row(k_.view, k_cache_, k_scale_, k_given_, b, i, batch, row, h, position,
                    written_k);
          check_row(v_.view, v_cache_, v_scale_, v_given_, b, i, batch, row, h, -1, written_v);
        }
      }
      EXPECT_EQ(dropped_[index(b)], lost) << "sequence " << b;
    }
    check_rest(k_cache_, written_k);
    check_rest(v_cache_, written_v);
    if (case_.heads_q > 0) {
      check_queries(q_out_.view);
    }
  }

  void check_queries(const TensorView& q) const {
    for (std::int64_t b = 0; b < size_of(case_.lengths); ++b) {
      for (std::int64_t i = 0; i < rows_of(b); ++i) {
        for (std::int64_t h = 0; h < case_.heads_q; ++h) {
          const std::vector<double> want = turned(original_q(b, i, h), case_.lengths[index(b)] + i);
          for (std::int64_t d = 0; d < case_.head_dim; ++d) {
            expect_near(static_cast<double>(read(q, b, i, h, d)), want[index(d)], d);
          }
        }
      }
    }
  }

 private:
  static std::int64_t size_of(const std::vector<std::int64_t>& v) {
    return static_cast<std::int64_t>(v.size());
  }
  bool quantised() const { return case_.cache == DType::int8 || case_.cache == DType::e4m3; }

  void fill(const TensorView& t, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (std::int64_t b = 0; b < t.batch; ++b) {
      for (std::int64_t i = 0; i < t.seqlen; ++i) {
        for (std::int64_t h = 0; h < t.heads; ++h) {
          for (std::int64_t d = 0; d < t.head_dim; ++d) {
            write(t, b, i, h, d, normal(random));
            if (case_.heads_q > 0 && &t == &q_.view) {
              q_values_.push_back(static_cast<double>(read(t, b, i, h, d)));
            }
          }
        }
      }
    }
  }
  void number_pages(std::mt19937& random) {
    const std::int64_t count = size_of(case_.lengths) * cols_;
    page_ids_.resize(index(count));
    std::iota(page_ids_.begin(), page_ids_.end(), std::int64_t{1});
    std::shuffle(page_ids_.begin(), page_ids_.end(), random);
    pages_ = make_indices(page_ids_, case_.index_dtype, cols_);
  }
  std::int64_t rows_of(std::int64_t b) const {
    return case_.fresh.empty() ? case_.seqlen : case_.fresh[index(b)];
  }
  /// [batch or page, row] of a position; −1 where there is none.
  std::pair<std::int64_t, std::int64_t> place_of(std::int64_t b, std::int64_t position) const {
    if (case_.rotary_dim > 0 && position >= case_.max_position) {
      return {-1, 0};
    }
    if (!paged_) {
      return {position < case_.capacity ? b : -1, position};
    }
    if (position / case_.page_size >= cols_) {
      return {-1, 0};
    }
    const std::int64_t page = page_ids_[index(b * cols_ + position / case_.page_size)];
    return {page >= 0 && page < k_cache_.view.batch ? page : -1, position % case_.page_size};
  }
  std::vector<double> original_q(std::int64_t b, std::int64_t i, std::int64_t h) const {
    const auto first =
        q_values_.begin() +
        static_cast<std::ptrdiff_t>(((b * case_.seqlen + i) * case_.heads_q + h) * case_.head_dim);
    return {first, first + static_cast<std::ptrdiff_t>(case_.head_dim)};
  }
  /// A row after RoPE; position < 0: as it is.
  std::vector<double> turned(std::vector<double> row, std::int64_t position) const {
    const std::int64_t half = case_.rotary_dim / 2;
    for (std::int64_t i = 0; position >= 0 && i < half; ++i) {
      const bool apart = case_.pairs == Rope::Pairs::half_split;
      double& x = row[index(apart ? i : 2 * i)];
      double& y = row[index(apart ? i + half : 2 * i + 1)];
      const auto cos = static_cast<double>(cos_[index(position * half + i)]);
      const auto sin = static_cast<double>(sin_[index(position * half + i)]);
      const double before = x;
      x = x * cos - y * sin;
      y = y * cos + before * sin;
    }
    return row;
  }
  /// Within half an ulp of the dtype, and a few of f32 for what was computed in it.
  void expect_near(double got, double want, std::int64_t d) const {
    const double half = case_.dtype == DType::bf16  ? 0x1p-8
                        : case_.dtype == DType::f16 ? 0x1p-11
                                                    : 0x1p-24;
    EXPECT_NEAR(got, want, half * std::fabs(want) + 4 * 0x1p-22) << "element " << d;
  }

  void check_row(const TensorView& source, const Placed& cache, const Placed& scales,
                 const Placed& given, std::int64_t b, std::int64_t i, std::int64_t batch,
                 std::int64_t row, std::int64_t h, std::int64_t position,
                 std::vector<char>& written) const {
    const TensorView& t = cache.view;
    std::vector<double> want(index(t.head_dim));
    double largest = 0;
    for (std::int64_t d = 0; d < t.head_dim; ++d) {
      want[index(d)] = static_cast<double>(read(source, b, i, h, d));
    }
    want = turned(std::move(want), position);
    for (const double x : want) {
      largest = std::fmax(largest, std::fabs(x));
    }
    double factor = 1;
    if (quantised() && case_.given_factors) {
      factor = static_cast<double>(read(given.view, 0, 0, h, 0));
    } else if (quantised() && !case_.no_factors) {
      factor = static_cast<double>(read(scales.view, batch, row, h, 0));
      const double right = largest / (t.dtype == DType::int8 ? 127 : 448);
      EXPECT_NEAR(factor, right, 4 * 0x1p-24 * right);
    }
    for (std::int64_t d = 0; d < t.head_dim; ++d) {
      const std::byte* const at = element_at(t, batch, row, h, d);
      const auto bytes = static_cast<std::size_t>(bits_of(t.dtype) / 8);
      std::fill_n(written.begin() + (at - data_of(cache)), bytes, 1);
      if (!quantised()) {
        expect_near(static_cast<double>(read(t, batch, row, h, d)), want[index(d)], d);
        continue;
      }
      // A multiple of the factor next to the value: half a step, a little more where f32 moved it
      // over the middle. What saturates is at the end of the range.
      const double reach = (t.dtype == DType::int8 ? 127 : 448) * factor;
      const double target = std::clamp(want[index(d)], -reach, reach);
      std::uint8_t bits = 0;
      std::memcpy(&bits, at, 1);
      const double got =
          factor * (t.dtype == DType::int8 ? static_cast<double>(static_cast<std::int8_t>(bits))
                                           : static_cast<double>(e4m3_to_f32(bits)));
      const double step =
          t.dtype == DType::int8 ? factor : std::fmax(factor * 0x1p-9, std::fabs(target) * 0x1p-3);
      EXPECT_NEAR(got, target, step * (0.5 + 1e-4)) << "element " << d;
    }
  }
  static const std::byte* data_of(const Placed& p) {
    return static_cast<const std::byte*>(const_cast<Placed&>(p).buffer.data());
  }
  void check_rest(const Placed& cache, const std::vector<char>& written) const {
    EXPECT_TRUE(cache.buffer.intact());
    std::int64_t foreign = 0;
    for (std::size_t i = 0; i < written.size(); ++i) {
      foreign += written[i] == 0 && data_of(cache)[i] != std::byte{0xff} ? 1 : 0;
    }
    EXPECT_EQ(foreign, 0) << "bytes of nobody were written";
  }

  AppendCase case_;
  bool paged_ = false;
  std::int64_t cols_ = 0;
  Placed k_, v_, q_, q_out_, k_cache_, v_cache_, k_scale_, v_scale_, k_given_, v_given_;
  Indices lengths_, fresh_, pages_;
  std::vector<std::int64_t> page_ids_;
  std::vector<std::int32_t> dropped_;
  std::vector<float> cos_, sin_;
  std::vector<double> q_values_;
};

}  // namespace rafter::testing
