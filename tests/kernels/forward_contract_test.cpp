// The numerics contract, clause by clause, on every CPU kernel: empty rows, what lies outside the
// valid region, determinism, independence from batch, threads and layout.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>

#include "support/every_kernel.h"

namespace rafter::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class ForwardContract : public EveryKernelTest {};

Case ragged(Layout layout, DType dtype) {
  Case c{.problem = {.heads_q = 4,
                     .heads_kv = 2,
                     .head_dim = 40,
                     .dtype = dtype,
                     .mask = Mask::causal(),
                     .layout = layout,
                     .page_size = layout == Layout::paged ? 8 : 0,
                     .seqused_kv = layout != Layout::packed}};
  if (layout == Layout::packed) {
    return c.lengths({33, 1, 140, 0, 12}, {33, 130, 140, 7, 12});
  }
  return c.lengths({65, 65, 65}, {65, 13, 300});
}

/// Values of the rows of sequence b alone.
Values slice(const Case& c, const Values& all, std::size_t b) {
  const AttentionProblem& p = c.problem;
  const auto [heads_kv, dim_v] = dims_of(p);
  std::int64_t q = 0, kv = 0;
  for (std::size_t i = 0; i < b; ++i) {
    q += c.lengths_q[i];
    kv += c.lengths_kv[i];
  }
  const auto part = [](const std::vector<float>& v, std::int64_t first, std::int64_t count) {
    return std::vector<float>(v.begin() + first, v.begin() + first + count);
  };
  return {part(all.q, q * p.heads_q * p.head_dim, c.lengths_q[b] * p.heads_q * p.head_dim),
          part(all.k, kv * heads_kv * p.head_dim, c.lengths_kv[b] * heads_kv * p.head_dim),
          part(all.v, kv * heads_kv * dim_v, c.lengths_kv[b] * heads_kv * dim_v)};
}

Output slice(const Case& c, const Output& all, std::size_t b) {
  const AttentionProblem& p = c.problem;
  const std::int64_t dim_v = dims_of(p).dim_v;
  std::int64_t q = 0;
  for (std::size_t i = 0; i < b; ++i) {
    q += c.lengths_q[i];
  }
  const auto part = [](const std::vector<float>& v, std::int64_t first, std::int64_t count) {
    return std::vector<float>(v.begin() + first, v.begin() + first + count);
  };
  return {part(all.o, q * p.heads_q * dim_v, c.lengths_q[b] * p.heads_q * dim_v),
          part(all.lse, q * p.heads_q, c.lengths_q[b] * p.heads_q)};
}

// N4, N14, N18, I14: a row that sees no key gives o = 0 and lse = −inf, exactly.
TEST_P(ForwardContract, ARowThatSeesNoKeyIsZeroWithMinusInfinityLse) {
  struct Shape {
    Mask mask;
    std::int64_t rows, keys, empty;
  };
  const Shape shapes[] = {{Mask::causal(), 65, 32, 33},
                          {Mask::causal(), 300, 150, 150},
                          {Mask::window(32, 64), 129, 17, 48},
                          {Mask::window(32, 64), 129, 64, 1},
                          {Mask::window(0, 0, MaskAlign::top_left), 40, 25, 15}};
  for (const Shape& shape : shapes) {
    for (const DType dtype : taken({DType::f32, DType::bf16, DType::f16})) {
      Case c{.problem = {.heads_q = 2, .head_dim = 32, .dtype = dtype, .mask = shape.mask}};
      c.lengths({shape.rows}, {shape.keys});
      EXPECT_EQ(empty_rows(shape.mask, shape.rows, shape.keys), shape.empty);
      const Output output = run_case(c, make_values(c), options());
      std::int64_t empty = 0;
      for (std::size_t i = 0; i < output.lse.size(); ++i) {
        if (output.lse[i] == -kInfinity) {
          ++empty;
          for (std::size_t d = 0; d < 32; ++d) {
            EXPECT_EQ(output.o[i * 32 + d], 0.0F);
          }
        } else {
          EXPECT_TRUE(std::isfinite(output.lse[i]));
        }
      }
      EXPECT_EQ(empty, 2 * shape.empty);
    }
  }
}

// N15, N16 (on a CPU: workspaces), contract 3: padding, unused pages and workspaces in NaN or zero,
// the same bits.
TEST_P(ForwardContract, WhatLiesOutsideTheValidRegionChangesNoBit) {
  for (const Layout layout : {Layout::dense, Layout::packed, Layout::paged}) {
    for (const DType dtype : taken({DType::f32, DType::bf16, DType::f16})) {
      Case c = ragged(layout, dtype);
      c.style = Style::gaps;
      if (!refusal_of(c, kernel()).empty()) {
        continue;
      }
      const Values values = make_values(c);
      RunOptions run = options();
      run.fill = Fill::zero;
      const Output clean = run_case(c, values, run);
      run.fill = Fill::nan;
      EXPECT_TRUE(same_bits(clean, run_case(c, values, run)));
    }
  }
}

// Keys that no row of the sequence sees may hold anything.
TEST_P(ForwardContract, KeysThatNoRowSeesChangeNoBit) {
  for (const DType dtype : taken({DType::f32, DType::bf16})) {
    Case c{.problem = {.heads_q = 2,
                       .head_dim = 24,
                       .dtype = dtype,
                       .mask = Mask::window(20, 0, MaskAlign::top_left)}};
    c.lengths({70}, {200});
    Values values = make_values(c);
    const Output clean = run_case(c, values, options());
    for (std::size_t i = 70 * 2 * 24; i < values.k.size(); ++i) {  // rows 0…69 see keys 0…69
      values.k[i] = i % 2 == 0 ? kNaN : kInfinity;
      values.v[i] = i % 2 == 0 ? kInfinity : kNaN;
    }
    EXPECT_TRUE(same_bits(clean, run_case(c, values, options())));
  }
}

// The extreme-logit set's "NaN inside the masked area": rows before a poisoned key under a causal
// mask do not see it; those after it do, and must say so.
TEST_P(ForwardContract, ANaNKeyReachesExactlyTheRowsThatSeeIt) {
  constexpr std::int64_t kPoisoned = 90;
  for (const DType dtype : taken({DType::f32, DType::bf16})) {
    for (const bool in_v : {false, true}) {
      Case c{.problem = {.head_dim = 24, .dtype = dtype, .mask = Mask::causal()}};
      c.lengths({150}, {150});
      Values values = make_values(c);
      const Output clean = run_case(c, values, options());
      (in_v ? values.v : values.k)[kPoisoned * 24 + 3] = kNaN;
      const Output output = run_case(c, values, options());
      for (std::int64_t i = 0; i < 150; ++i) {
        for (std::int64_t d = 0; d < 24; ++d) {
          const auto at = static_cast<std::size_t>(i * 24 + d);
          if (i < kPoisoned || (in_v && d != 3)) {
            ASSERT_TRUE(std::isfinite(output.o[at])) << "row " << i << " dim " << d;
          } else {
            ASSERT_TRUE(std::isnan(output.o[at])) << "row " << i << " dim " << d;
          }
          if (i < kPoisoned) {
            ASSERT_NEAR(output.o[at], clean.o[at], 1e-6) << "row " << i << " dim " << d;
          }
        }
        EXPECT_EQ(std::isnan(output.lse[static_cast<std::size_t>(i)]), !in_v && i >= kPoisoned);
      }
    }
  }
}

// N20: a NaN in q makes its row NaN and no other; it is never turned into zeros, by no scale of 0
// either.
TEST_P(ForwardContract, ANaNQueryStaysInItsRow) {
  for (const DType dtype : taken({DType::f32, DType::bf16, DType::f16})) {
    for (const auto& [poison, scale] : {std::pair{kNaN, 0.25f}, {kInfinity, 0.25f}, {kNaN, 0.0f}}) {
      Case c{.problem = {.heads_q = 2, .head_dim = 16, .dtype = dtype, .softmax_scale = scale}};
      c.lengths({40}, {75});
      Values values = make_values(c);
      const Output clean = run_case(c, values, options());
      constexpr std::size_t kRow = 2 * 17 + 1;  // row 17, head 1
      for (std::size_t d = 0; d < 16; ++d) {
        values.q[kRow * 16 + d] = poison;
      }
      const Output output = run_case(c, values, options());
      for (std::size_t i = 0; i < output.lse.size(); ++i) {
        for (std::size_t d = 0; d < 16; ++d) {
          if (i == kRow) {
            EXPECT_TRUE(std::isnan(output.o[i * 16 + d]));
          } else {
            EXPECT_EQ(output.o[i * 16 + d], clean.o[i * 16 + d]);
          }
        }
        EXPECT_EQ(std::isnan(output.lse[i]), i == kRow);
      }
    }
  }
}

// Contract 4: the same inputs give the same bits, run after run.
TEST_P(ForwardContract, RepeatsGiveTheSameBits) {
  const Case c = ragged(Layout::packed, DType::bf16);
  const Values values = make_values(c);
  const Output first = run_case(c, values, options());
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(same_bits(first, run_case(c, values, options())));
  }
}

// D6: the number of threads changes no bit.
TEST_P(ForwardContract, ThreadsChangeNoBit) {
  // Tasks of a large group end at keys that are no multiple of a register block.
  const Case large_group = Case{.problem = {.heads_q = 71,
                                            .heads_kv = 1,
                                            .head_dim = 64,
                                            .dtype = any_dtype(),
                                            .mask = Mask::causal()}}
                               .lengths({67, 67}, {300, 300});
  for (const Case& c :
       {ragged(Layout::packed, DType::f32), ragged(Layout::packed, DType::bf16), large_group}) {
    if (!refusal_of(c, kernel()).empty()) {
      continue;
    }
    const Values values = make_values(c);
    RunOptions run = options();
    run.threads = 1;
    const Output one = run_case(c, values, run);
    for (const int threads : {2, 7, 64}) {
      run.threads = threads;
      EXPECT_TRUE(same_bits(one, run_case(c, values, run))) << threads << " threads";
    }
  }
}

// D4, I8: a sequence alone, among one other, among many of random lengths, packed, padded and
// paged: the same bits.
TEST_P(ForwardContract, NeighboursAndLayoutChangeNoBit) {
  for (const DType dtype : taken({DType::f32, DType::bf16})) {
    Case alone{.problem = {.heads_q = 4,
                           .heads_kv = 2,
                           .head_dim = 40,
                           .dtype = dtype,
                           .mask = Mask::causal()},
               .seed = 7};
    alone.lengths({150}, {333});
    const Values mine = make_values(alone);
    const Output reference = run_case(alone, mine, options());

    Case packed = alone;
    packed.problem.layout = Layout::packed;
    std::mt19937 generator(3);
    for (const int neighbours : {1, 20}) {
      packed.lengths_q = packed.lengths_kv = {};
      for (int i = 0; i < neighbours; ++i) {
        packed.lengths_q.push_back(static_cast<std::int64_t>(generator() % 90));
        packed.lengths_kv.push_back(static_cast<std::int64_t>(generator() % 400));
      }
      packed.lengths_q.push_back(150);
      packed.lengths_kv.push_back(333);
      Values values = make_values(packed);
      std::copy(mine.q.begin(), mine.q.end(), values.q.end() - std::ssize(mine.q));
      std::copy(mine.k.begin(), mine.k.end(), values.k.end() - std::ssize(mine.k));
      std::copy(mine.v.begin(), mine.v.end(), values.v.end() - std::ssize(mine.v));
      const Output output = run_case(packed, values, options());
      const auto last = static_cast<std::size_t>(neighbours);
      EXPECT_TRUE(same_bits(reference, slice(packed, output, last))) << neighbours << " neighbours";
    }

    for (const Layout layout : {Layout::dense, Layout::paged}) {
      Case padded = alone;
      padded.problem.layout = layout;
      padded.problem.page_size = layout == Layout::paged ? 16 : 0;
      padded.problem.seqused_kv = true;
      padded.style = Style::gaps;
      padded.lengths({150, 150}, {333, 700});
      Values values = make_values(padded);
      std::copy(mine.q.begin(), mine.q.end(), values.q.begin());
      std::copy(mine.k.begin(), mine.k.end(), values.k.begin());
      std::copy(mine.v.begin(), mine.v.end(), values.v.begin());
      if (refusal_of(padded, kernel()).empty()) {
        EXPECT_TRUE(same_bits(reference, slice(padded, run_case(padded, values, options()), 0)));
      }
    }
  }
}

// I8: many keys, few queries: sequence b of a batch equals the sequence alone.
TEST_P(ForwardContract, LongKeysInABatchEqualTheSequenceAlone) {
  Case batch{.problem = {.head_dim = 8, .dtype = any_dtype()}};
  batch.lengths({3, 3, 3}, {350000, 350000, 350000});
  const Values values = make_values(batch);
  const Output output = run_case(batch, values, options());
  Case alone = batch;
  alone.lengths({3}, {350000});
  for (const std::size_t b : {0U, 2U}) {
    EXPECT_TRUE(
        same_bits(slice(batch, output, b), run_case(alone, slice(batch, values, b), options())));
  }
}

// I17: the same values through any strides give the same bits.
TEST_P(ForwardContract, StridesChangeNoBit) {
  for (const DType dtype : taken({DType::f32, DType::bf16})) {
    Case c{.problem = {.heads_q = 4,
                       .heads_kv = 2,
                       .head_dim = 40,
                       .head_dim_v = 24,
                       .dtype = dtype,
                       .mask = Mask::window(70, 9)}};
    c.lengths({130, 130}, {190, 190});
    const Values values = make_values(c);
    const Output reference = run_case(c, values, options());
    for (const Style style :
         {Style::heads_first, Style::gaps, Style::every_other, Style::backwards, Style::mixed}) {
      c.style = style;
      EXPECT_TRUE(same_bits(reference, run_case(c, values, options())))
          << "style " << static_cast<int>(style);
    }
  }
}

// I18: a head_dim stride of 2 gives the exact result or a clear error, never a wrong result.
TEST_P(ForwardContract, HeadDimStrideIsHonouredOrRefused) {
  Case c{.problem = {.heads_q = 2, .head_dim = 20, .dtype = any_dtype(), .mask = Mask::causal()}};
  c.lengths({40}, {50});
  const Values values = make_values(c);
  const Output reference = run_case(c, values, options());
  c.style = Style::strided_head_dim;
  Output output;
  const Status status = try_case(c, values, options(), output);
  if (status) {
    EXPECT_TRUE(same_bits(reference, output));
  } else {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.parameter(), "q.stride_head_dim");
  }
}

// Contract 7: a window as wide as the keys is no window, a causal mask is the window (−1, 0).
TEST_P(ForwardContract, WideWindowsAreCausalToTheBit) {
  for (const MaskAlign align : {MaskAlign::bottom_right, MaskAlign::top_left}) {
    Case c{.problem = {.head_dim = 32, .dtype = DType::bf16, .mask = Mask::causal(align)}};
    c.lengths({140}, {180});
    const Values values = make_values(c);
    const Output causal = run_case(c, values, options());
    for (const std::int64_t left : {std::int64_t{-1}, std::int64_t{180}, std::int64_t{5000},
                                    std::numeric_limits<std::int64_t>::max()}) {
      c.problem.mask = Mask::window(left, 0, align);
      EXPECT_TRUE(same_bits(causal, run_case(c, values, options()))) << "left " << left;
    }
    c.problem.mask = Mask::none();
    const Output unmasked = run_case(c, values, options());
    c.problem.mask = Mask::window(std::numeric_limits<std::int64_t>::max(), 180, align);
    EXPECT_TRUE(same_bits(unmasked, run_case(c, values, options())));
  }
}

// Without lse the output is the same, and nothing is written where it would be.
TEST_P(ForwardContract, LseIsOptional) {
  Case c{.problem = {.head_dim = 16, .dtype = any_dtype()}};
  c.lengths({20}, {30});
  const Values values = make_values(c);
  Output with = run_case(c, values, options());
  RunOptions run = options();
  run.with_lse = false;
  with.lse.clear();
  EXPECT_TRUE(same_bits(with, run_case(c, values, run)));
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, ForwardContract, ::testing::ValuesIn(cpu_kernels()),
                         kernel_test_name);

}  // namespace
}  // namespace rafter::testing
