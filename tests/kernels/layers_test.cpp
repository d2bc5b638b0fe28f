// The operations of layers.h on the CPU against float64, in every dtype, with strides, in place,
// and what they refuse.
#include "rafter/layers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/element.h"
#include "support/must.h"

namespace rafter {
namespace {

using testing::must;

/// A matrix [rows, cols] whose rows lie `stride` elements apart, NaN between them.
class Buffer {
 public:
  Buffer(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t gap = 0)
      : bytes_(static_cast<std::size_t>(rows * (cols + gap) + 1) * 4) {
    view_ = matrix(bytes_.data(), dtype, rows, cols);
    view_.stride_seqlen = cols + gap;
    for (std::int64_t i = 0; i < rows * (cols + gap); ++i) {
      base::store_element(view_, i, std::numeric_limits<double>::quiet_NaN());
    }
  }
  Buffer(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t gap, std::uint64_t seed)
      : Buffer(dtype, rows, cols, gap) {
    std::vector<float> values(static_cast<std::size_t>(rows * cols));
    EXPECT_TRUE(
        fill_uniform(matrix(values.data(), DType::f32, rows, cols), seed, 2.0f, Device::cpu()));
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) {
        base::store_element(view_, i * view_.stride_seqlen + j,
                            values[static_cast<std::size_t>(i * cols + j)]);
      }
    }
  }
  Buffer(Buffer&&) = default;  // the view's memory goes along
  const TensorView& view() const { return view_; }
  double at(std::int64_t row, std::int64_t col) const {
    return base::load_element(view_, row * view_.stride_seqlen + col);
  }
  /// Nothing was written between the rows.
  bool gaps_are_kept() const {
    for (std::int64_t i = 0; i < view_.seqlen; ++i) {
      for (std::int64_t j = view_.head_dim; j < view_.stride_seqlen; ++j) {
        if (!std::isnan(at(i, j))) {
          return false;
        }
      }
    }
    return true;
  }

 private:
  std::vector<std::byte> bytes_;
  TensorView view_;
};

double roundoff(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}
class EveryDtype : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Layers, EveryDtype, ::testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(EveryDtype, RmsNormOfTheRoundedSum) {
  const DType dtype = GetParam();
  const double bound = 4 * roundoff(dtype);
  for (const std::int64_t cols : {1, 7, 64, 130}) {
    const Buffer x(dtype, 3, cols, 2, 1), residual(dtype, 3, cols, 0, 2),
        weight(dtype, 1, cols, 0, 3);
    Buffer y(dtype, 3, cols, 1), sum(dtype, 3, cols, 3);
    must(rmsnorm({.x = x.view(), .residual = residual.view(), .weight = weight.view(), .eps = 0.5f},
                 {.y = y.view(), .sum = sum.view()}, Device::cpu()));
    for (std::int64_t i = 0; i < 3; ++i) {
      double squares = 0;
      for (std::int64_t j = 0; j < cols; ++j) {
        const double exact = x.at(i, j) + residual.at(i, j);
        ASSERT_NEAR(sum.at(i, j), exact, bound * std::abs(exact));
        squares += sum.at(i, j) * sum.at(i, j);
      }
      for (std::int64_t j = 0; j < cols; ++j) {
        const double exact =
            sum.at(i, j) / std::sqrt(squares / static_cast<double>(cols) + 0.5) * weight.at(0, j);
        ASSERT_NEAR(y.at(i, j), exact, bound * std::abs(exact) + 1e-7) << i << " " << j;
      }
    }
    EXPECT_TRUE(y.gaps_are_kept() && sum.gaps_are_kept());
    // In place, without a residual: the same as of the sum.
    must(rmsnorm({.x = sum.view(), .weight = weight.view(), .eps = 0.5f}, {.y = sum.view()},
                 Device::cpu()));
    for (std::int64_t i = 0; i < 3; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) {
        ASSERT_EQ(sum.at(i, j), y.at(i, j));
      }
    }
  }
}

TEST_P(EveryDtype, PointwiseFunctionsRoundOnce) {
  const DType dtype = GetParam();
  const auto silu = [](double a) { return a / (1 + std::exp(-a)); };
  const Buffer a(dtype, 4, 33, 3, 5), b(dtype, 4, 33, 1, 6);
  for (const Pointwise function :
       {Pointwise::add, Pointwise::multiply, Pointwise::silu, Pointwise::swiglu}) {
    Buffer out(dtype, 4, 33, 2);
    const bool one = function == Pointwise::silu;
    must(pointwise(function, a.view(), one ? TensorView{} : b.view(), out.view(), Device::cpu()));
    for (std::int64_t i = 0; i < 4; ++i) {
      for (std::int64_t j = 0; j < 33; ++j) {
        const double x = a.at(i, j), y = b.at(i, j);
        const double exact = function == Pointwise::add        ? x + y
                             : function == Pointwise::multiply ? x * y
                             : one                             ? silu(x)
                                                               : silu(x) * y;
        ASSERT_NEAR(out.at(i, j), exact, 1.01 * roundoff(dtype) * std::abs(exact) + 1e-6)
            << to_string(function);
      }
    }
    EXPECT_TRUE(out.gaps_are_kept());
  }
}

TEST_P(EveryDtype, RopeTurnsPairsByTheirPositions) {
  const DType dtype = GetParam();
  constexpr std::int64_t kTokens = 3, kHeads = 2, kDim = 12, kRotary = 8;
  const std::vector<std::int32_t> positions = {0, 4, 2};
  std::vector<float> cos(5 * kRotary / 2), sin(cos.size());
  for (std::size_t i = 0; i < cos.size(); ++i) {
    const double angle = static_cast<double>(i / 4) * (0.3 + static_cast<double>(i % 4));
    cos[i] = static_cast<float>(std::cos(angle));
    sin[i] = static_cast<float>(std::sin(angle));
  }
  const Buffer x(dtype, kTokens, kHeads * kDim, 5, 9);
  Buffer out(dtype, kTokens, kHeads * kDim, 1);
  for (const auto pairs : {Rope::Pairs::half_split, Rope::Pairs::interleaved}) {
    const Rope tables{.cos = cos.data(),
                      .sin = sin.data(),
                      .max_position = 5,
                      .rotary_dim = kRotary,
                      .pairs = pairs};
    must(rope(heads_of(x.view(), kHeads, kDim), {positions.data(), DType::i32, kTokens}, tables,
              heads_of(out.view(), kHeads, kDim), Device::cpu()));
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        for (std::int64_t p = 0; p < kRotary / 2; ++p) {
          const bool halves = pairs == Rope::Pairs::half_split;
          const std::int64_t first = h * kDim + (halves ? p : 2 * p),
                             second = first + (halves ? kRotary / 2 : 1);
          const auto at = static_cast<std::size_t>(positions[static_cast<std::size_t>(t)] * 4 + p);
          const double a = x.at(t, first), b = x.at(t, second);
          const double bound = 2 * roundoff(dtype) * (std::abs(a) + std::abs(b));
          ASSERT_NEAR(out.at(t, first), a * cos[at] - b * sin[at], bound);
          ASSERT_NEAR(out.at(t, second), b * cos[at] + a * sin[at], bound);
        }
        for (std::int64_t d = kRotary; d < kDim; ++d) {
          ASSERT_EQ(out.at(t, h * kDim + d), x.at(t, h * kDim + d));
        }
      }
    }
    EXPECT_TRUE(out.gaps_are_kept());
  }
  const std::vector<std::int32_t> beyond = {0, 5, 2};
  EXPECT_EQ(rope(heads_of(x.view(), kHeads, kDim), {beyond.data(), DType::i32, kTokens},
                 {.cos = cos.data(), .sin = sin.data(), .max_position = 5, .rotary_dim = kRotary},
                 heads_of(out.view(), kHeads, kDim), Device::cpu())
                .parameter(),
            "positions[1]");
}

TEST_P(EveryDtype, GatherCopiesRowsToTheBit) {
  const DType dtype = GetParam();
  const Buffer table(dtype, 5, 9, 2, 4);
  const std::vector<std::int64_t> rows = {4, 0, 4};
  Buffer out(dtype, 3, 9, 1);
  must(gather(table.view(), {rows.data(), DType::i64, 3}, out.view(), Device::cpu()));
  for (std::int64_t i = 0; i < 3; ++i) {
    for (std::int64_t j = 0; j < 9; ++j) {
      ASSERT_EQ(out.at(i, j), table.at(rows[static_cast<std::size_t>(i)], j));
    }
  }
  EXPECT_TRUE(out.gaps_are_kept());
  const std::vector<std::int64_t> beyond = {0, 5, 1};
  EXPECT_EQ(
      gather(table.view(), {beyond.data(), DType::i64, 3}, out.view(), Device::cpu()).parameter(),
      "rows[1]");
}

TEST_P(EveryDtype, LinearIsTheProductWithTheTransposedWeight) {
  const DType dtype = GetParam();
  if (const std::string why = why_no_linear(dtype, Device::cpu()); !why.empty()) {
    const Buffer x(dtype, 1, 8, 0, 1);
    Buffer out(dtype, 1, 1);
    EXPECT_EQ(
        linear({.x = x.view(), .weight = x.view()}, out.view(), {}, Device::cpu()).parameter(),
        "x.dtype");
    return;
  }
  for (const auto& [m, n, k] : {std::tuple{1, 5, 17}, std::tuple{4, 1, 8}, std::tuple{7, 40, 64},
                                std::tuple{70, 480, 9}}) {  // the last with all threads
    const Buffer x(dtype, m, k, 3, 1), weight(dtype, n, k, 0, 2), bias(dtype, 1, n, 0, 3);
    for (const bool has_bias : {false, true}) {
      Buffer out(dtype, m, n, 2), wide(DType::f32, m, n, 2);
      const LinearInputs in{
          .x = x.view(), .weight = weight.view(), .bias = has_bias ? bias.view() : TensorView{}};
      must(linear(in, out.view(), {}, Device::cpu()));
      if (!has_bias) {
        must(linear(in, wide.view(), {}, Device::cpu()));
      }
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < n; ++j) {
          double exact = has_bias ? bias.at(0, j) : 0, magnitude = std::abs(exact);
          for (std::int64_t d = 0; d < k; ++d) {
            exact += x.at(i, d) * weight.at(j, d);
            magnitude += std::abs(x.at(i, d) * weight.at(j, d));
          }
          const double sums = k * 0x1p-24 * magnitude;
          ASSERT_NEAR(out.at(i, j), exact, sums + 1.01 * roundoff(dtype) * std::abs(exact));
          if (!has_bias) {
            ASSERT_NEAR(wide.at(i, j), exact, sums + 0x1p-24 * std::abs(exact));
          }
        }
      }
      EXPECT_TRUE(out.gaps_are_kept() && wide.gaps_are_kept());
    }
  }
}

/// Of all rows, enough for several threads, or of one by itself.
TEST_P(EveryDtype, ARowHasTheSameBitsForAnyNumberOfRowsAndThreads) {
  const DType dtype = GetParam();
  constexpr std::int64_t kRows = 70, kCols = 600;
  const Buffer a(dtype, kRows, kCols, 3, 1), b(dtype, kRows, kCols, 0, 2),
      weight(dtype, 1, kCols, 0, 3), filled(dtype, kRows, kCols);
  const std::vector<float> tables(kCols, 0.6f);
  const std::vector<std::int32_t> positions(kRows, 1);
  const auto results = [&](std::int64_t first, std::int64_t rows) {
    const auto part = [&](const Buffer& of) {
      TensorView view = of.view();
      view.data =
          static_cast<std::byte*>(view.data) + first * view.stride_seqlen * bits_of(dtype) / 8;
      view.seqlen = rows;
      return view;
    };
    std::vector<Buffer> out;
    for (int i = 0; i < 4; ++i) {
      out.emplace_back(dtype, rows, kCols);
    }
    const Device cpu = Device::cpu();
    must(rmsnorm({.x = part(a), .residual = part(b), .weight = weight.view()},
                 {.y = out[0].view(), .sum = out[1].view()}, cpu));
    must(pointwise(Pointwise::swiglu, part(a), part(b), out[2].view(), cpu));
    must(rope(part(a), {positions.data(), DType::i32, rows},
              {.cos = tables.data(), .sin = tables.data(), .max_position = 2, .rotary_dim = kCols},
              out[3].view(), cpu));
    return out;
  };
  const auto expect_same = [&](const std::vector<Buffer>& some, std::int64_t row,
                               const std::vector<Buffer>& all) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      for (std::int64_t j = 0; j < kCols; ++j) {
        ASSERT_EQ(some[i].at(0, j), all[i].at(row, j)) << "result " << i << " row " << row;
      }
    }
  };
  const int before = omp_get_max_threads();
  omp_set_num_threads(3);
  const std::vector<Buffer> all = results(0, kRows);
  must(fill_uniform(filled.view(), 5, 2.0f, Device::cpu()));
  omp_set_num_threads(1);
  for (std::int64_t row = 0; row < kRows; ++row) {
    expect_same(results(row, 1), row, all);
  }
  const Buffer alone(dtype, kRows, kCols, 0, 5);
  omp_set_num_threads(before);
  for (std::int64_t i = 0; i < kRows * kCols; ++i) {
    ASSERT_EQ(filled.at(0, i), alone.at(0, i)) << i;
  }
}

TEST(Layers, RefuseWhatDoesNotFitByName) {
  const Buffer x(DType::f32, 2, 8, 0, 1), other(DType::f32, 2, 9, 0, 1),
      row(DType::f32, 1, 8, 0, 1);
  const Buffer half(DType::bf16, 2, 8, 0, 1);
  Buffer y(DType::f32, 2, 8);
  const Device cpu = Device::cpu();
  const auto norm = [&](const RmsNormInputs& in, const RmsNormOutputs& out) {
    return rmsnorm(in, out, cpu).parameter();
  };
  EXPECT_EQ(norm({.x = x.view(), .weight = other.view()}, {.y = y.view()}), "weight.seqlen");
  EXPECT_EQ(norm({.x = x.view(), .weight = row.view()}, {.y = half.view()}), "y.dtype");
  EXPECT_EQ(norm({.x = x.view(), .residual = x.view(), .weight = row.view()}, {.y = y.view()}),
            "sum");
  EXPECT_EQ(norm({.x = x.view(), .weight = row.view(), .eps = -1}, {.y = y.view()}), "eps");
  EXPECT_EQ(norm({.x = x.view(), .residual = half.view(), .weight = row.view()},
                 {.y = y.view(), .sum = x.view()}),
            "residual.dtype");
  EXPECT_EQ(pointwise(Pointwise::add, x.view(), {}, y.view(), cpu).parameter(), "b");
  EXPECT_EQ(pointwise(Pointwise::silu, x.view(), x.view(), y.view(), cpu).parameter(), "b");
  const TensorView empty = matrix(nullptr, DType::f32, 0, 8);
  EXPECT_EQ(pointwise(Pointwise::silu, empty, x.view(), empty, cpu).parameter(), "b");
  EXPECT_EQ(pointwise(Pointwise::add, x.view(), other.view(), y.view(), cpu).parameter(),
            "b.head_dim");
  TensorView shifted = x.view();
  shifted.data = static_cast<std::byte*>(shifted.data) + 4;
  shifted.seqlen = 1;
  TensorView first = x.view();
  first.seqlen = 1;
  EXPECT_EQ(pointwise(Pointwise::silu, first, {}, shifted, cpu).parameter(), "out");  // overlaps
  EXPECT_EQ(linear({.x = x.view(), .weight = other.view()}, y.view(), {}, cpu).parameter(),
            "weight.head_dim");
  EXPECT_EQ(linear({.x = x.view(), .weight = row.view()}, y.view(), {}, cpu).parameter(),
            "out.head_dim");
  const TensorView none = columns(x.view(), 0, 0);  // a sum of nothing
  EXPECT_EQ(linear({.x = none, .weight = none}, y.view(), {}, cpu).parameter(), "x.head_dim");
  EXPECT_EQ(fill_uniform(y.view(), 1, 0.0f, cpu).parameter(), "bound");
  EXPECT_EQ(fill_uniform(columns(y.view(), 0, 4), 1, 1.0f, cpu).parameter(), "out");
  EXPECT_EQ(advance({nullptr, 2}, 1, cpu).parameter(), "counts");
  EXPECT_EQ(advance({}, 1, cpu, {&y}).parameter(), "stream");
  std::int32_t counts[] = {5, -1};
  must(advance({counts, 2}, 3, cpu));
  EXPECT_THAT(counts, ::testing::ElementsAre(8, 2));
}

TEST(Layers, EmptyTensorsAreDone) {
  const Buffer none(DType::f32, 0, 8), row(DType::f32, 1, 8, 0, 1);
  const Device cpu = Device::cpu();
  must(rmsnorm({.x = none.view(), .weight = row.view()}, {.y = none.view()}, cpu));
  must(pointwise(Pointwise::add, none.view(), none.view(), none.view(), cpu));
  must(
      linear({.x = none.view(), .weight = row.view()}, matrix(nullptr, DType::f32, 0, 1), {}, cpu));
  must(gather(row.view(), {}, none.view(), cpu));
  must(advance({}, 1, cpu));
}

}  // namespace
}  // namespace rafter
