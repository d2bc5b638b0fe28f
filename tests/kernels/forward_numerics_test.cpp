// Accuracy and extreme values on every CPU kernel: published error bounds, options that must change
// the result, logits far from zero, merged parts.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "support/every_kernel.h"

namespace rafter::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class ForwardNumerics : public EveryKernelTest {};

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::fmax(largest, std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return largest;
}

// N24: the error is at most 1.5 times the naive one, for lengths to 32k and logits of σ 1 to 30.
TEST_P(ForwardNumerics, ErrorIsWithinTheContract) {
  struct Prepared {
    Values values;
    Expected expected;
  };
  static std::map<std::string, Prepared> cache;
  for (const DType dtype : taken({DType::f32, DType::bf16, DType::f16})) {
    for (const std::int64_t keys : {128, 2048, 32768}) {
      for (const double sigma : {1.0, 5.0, 30.0}) {
        Case c{.problem = {.heads_q = 2, .heads_kv = 1, .head_dim = 64, .dtype = dtype},
               .sigma_q = sigma};
        c.lengths({keys > 10000 ? 4 : 16}, {keys});
        const std::string key = std::string(to_string(dtype)) + " " + std::to_string(keys) + " " +
                                std::to_string(sigma);
        if (cache.count(key) == 0) {
          Prepared p;
          p.values = make_values(c);
          p.expected = expect_values(c, p.values);
          cache[key] = std::move(p);
        }
        const Prepared& p = cache[key];
        EXPECT_TRUE(close_to(run_case(c, p.values, options()), p.expected, c)) << key;
      }
    }
  }
}

// N29: softcap changes the result, and to the right one.
TEST_P(ForwardNumerics, SoftcapIsApplied) {
  for (const DType dtype : taken({DType::f32, DType::bf16})) {
    Case c{.problem = {.head_dim = 64, .dtype = dtype}, .sigma_q = 10};
    c.lengths({40}, {150});
    const Values values = make_values(c);
    std::vector<Output> outputs;
    for (const float softcap : {0.0F, 5.0F, 50.0F}) {
      c.problem.softcap = softcap;
      outputs.push_back(run_case(c, values, options()));
      EXPECT_TRUE(close_to(outputs.back(), expect_values(c, values), c)) << softcap;
    }
    EXPECT_GT(largest_difference(outputs[0].o, outputs[1].o), 1);
    EXPECT_GT(largest_difference(outputs[1].o, outputs[2].o), 0.1);
    EXPECT_GT(largest_difference(outputs[0].lse, outputs[2].lse), 1);
  }
}

// N30: nothing of an earlier call with the same shapes survives: scale, softcap, window and
// alignment are the call's own.
TEST_P(ForwardNumerics, OptionsOfAnEarlierCallDoNotStick) {
  Case c{.problem = {.head_dim = 32, .dtype = DType::bf16}};
  c.lengths({60}, {80});
  const Values values = make_values(c);
  const auto check = [&](const char* what) {
    const Output output = run_case(c, values, options());
    EXPECT_TRUE(close_to(output, expect_values(c, values), c)) << what;
    return output;
  };
  const Output plain = check("default scale");
  c.problem.softmax_scale = 3 / std::sqrt(32.0F);
  const Output scaled = check("three times the scale");
  c.problem.softcap = 2;
  const Output capped = check("softcap");
  c.problem.mask = Mask::causal();
  const Output causal = check("causal");
  c.problem.mask = Mask::causal(MaskAlign::top_left);
  const Output top_left = check("top-left");
  c.problem.mask = Mask::window(7, 3);
  const Output window = check("window");
  c.problem = {.head_dim = 32, .dtype = DType::bf16};
  EXPECT_TRUE(same_bits(plain, check("default again")));
  const Output* outputs[] = {&plain, &scaled, &capped, &causal, &top_left, &window};
  for (std::size_t i = 0; i + 1 < std::size(outputs); ++i) {
    EXPECT_GT(largest_difference(outputs[i]->o, outputs[i + 1]->o), 0.05) << i;
  }
}

// N1's logits in the forward: all about −120, all −46 340, and one of 10⁴ in the last key.
TEST_P(ForwardNumerics, LogitsFarFromZero) {
  for (const DType dtype : taken({DType::f32, DType::bf16, DType::f16})) {
    for (const float logit : {-120.0F, -46340.0F, 46340.0F}) {
      for (const std::int64_t s : {64, 192, 320}) {
        Case c{.problem = {.head_dim = 64, .dtype = dtype, .mask = Mask::causal()},
               .sigma_q = 0.05,
               .sigma_k = 0.05};
        c.lengths({s}, {s});
        c.problem.softmax_scale = 1;
        Values values = make_values(c);
        for (std::size_t i = 0; i < values.q.size(); i += 64) {
          values.q[i] = round_to(dtype, std::sqrt(std::fabs(logit)));
          values.k[i] = round_to(dtype, std::copysign(std::sqrt(std::fabs(logit)), logit));
        }
        EXPECT_TRUE(close_to(run_case(c, values, options()), expect_values(c, values), c))
            << to_string(dtype) << " " << logit << " " << s;
      }
    }
  }
}

TEST_P(ForwardNumerics, AnOutlierInTheLastKey) {
  for (const DType dtype : taken({DType::f32, DType::bf16, DType::f16})) {
    for (const std::int64_t keys : {65, 513, 1500}) {
      Case c{.problem = {.head_dim = 16, .dtype = dtype}};
      c.problem.softmax_scale = 1;
      c.lengths({5}, {keys});
      Values values = make_values(c);
      for (std::size_t i = 0; i < 5; ++i) {
        values.q[i * 16] = 100;
      }
      values.k[static_cast<std::size_t>((keys - 1) * 16)] = 100;
      EXPECT_TRUE(close_to(run_case(c, values, options()), expect_values(c, values), c))
          << to_string(dtype) << " " << keys;
    }
  }
}

// Scores that overflow to −infinity weigh nothing beside finite ones; a row of them alone has no
// softmax and gives NaN, or what a row without keys gives, rather than an invented value.
TEST_P(ForwardNumerics, ScoresOfMinusInfinity) {
  Case c{.problem = {.head_dim = 4, .dtype = any_dtype(), .softmax_scale = 1.0F}};
  c.lengths({2}, {700});
  Values values = make_values(c);
  for (float& q : values.q) {
    q = 1;
  }
  for (std::size_t j = 0; j < 700; j += 2) {
    values.k[j * 4] = -kInfinity;
  }
  const Output some = run_case(c, values, options());
  EXPECT_TRUE(close_to(some, expect_values(c, values), c));
  for (std::size_t j = 1; j < 700; j += 2) {
    values.k[j * 4] = -kInfinity;
  }
  const Output none = run_case(c, values, options());
  for (std::size_t i = 0; i < none.o.size(); ++i) {
    EXPECT_TRUE(std::isnan(none.o[i]) || none.o[i] == 0) << none.o[i];
  }
  for (const float lse : none.lse) {
    EXPECT_TRUE(std::isnan(lse) || lse == -kInfinity) << lse;
  }
}

// N7: lse is the natural logarithm, so that parts over a prefix and a suffix merge into the whole.
TEST_P(ForwardNumerics, PrefixAndSuffixMergeIntoTheWhole) {
  constexpr std::int64_t kPrefix = 4096, kSuffix = 32, kRows = 6, kHeads = 2, kDim = 32;
  Case whole{.problem = {.heads_q = kHeads, .head_dim = kDim}};
  whole.lengths({kRows}, {kPrefix + kSuffix});
  RAFTER_SKIP_IF_REFUSED(whole, kernel());
  const Values values = make_values(whole);
  const Output expected = run_case(whole, values, options());

  const auto cut = static_cast<std::ptrdiff_t>(kPrefix * kHeads * kDim);
  Case prefix = whole;
  prefix.lengths({kRows}, {kPrefix});
  Case suffix = whole;
  suffix.lengths({kRows}, {kSuffix});
  const Values first{values.q,
                     {values.k.begin(), values.k.begin() + cut},
                     {values.v.begin(), values.v.begin() + cut}};
  const Values second{
      values.q, {values.k.begin() + cut, values.k.end()}, {values.v.begin() + cut, values.v.end()}};
  Output a = run_case(prefix, first, options());
  Output b = run_case(suffix, second, options());
  // Outputs are [rows, heads, dim] and [rows, heads].
  const auto state = [](Output& output) {
    return AttentionState{
        TensorView::contiguous(output.o.data(), DType::f32, 1, kRows, kHeads, kDim),
        LseView{output.lse.data(), 1, kHeads, kRows, kRows * kHeads, 1, kHeads}};
  };
  const AttentionState states[] = {state(a), state(b)};
  ASSERT_TRUE(merge(states, states[0]));
  EXPECT_LE(largest_difference(a.o, expected.o), 1e-6);
  EXPECT_LE(largest_difference(a.lse, expected.lse), 2e-6);
}

// N27: fixed inputs against figures computed once in float64 by a script; whatever instruction set
// runs them, they stay.
TEST_P(ForwardNumerics, FixedInputsGiveTheRecordedFigures) {
  constexpr std::int64_t kRows = 4, kKeys = 9, kDim = 6;
  Case c{.problem = {.head_dim = kDim, .mask = Mask::causal()}};
  c.lengths({kRows}, {kKeys});
  RAFTER_SKIP_IF_REFUSED(c, kernel());
  const auto fill = [](std::int64_t count, std::int64_t step) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < count; ++i) {
      values.push_back(static_cast<float>((i * step) % 31 - 15) / 8);
    }
    return values;
  };
  const Values values{fill(kRows * kDim, 7), fill(kKeys * kDim, 11), fill(kKeys * kDim, 5)};
  const Output output = run_case(c, values, options());
  constexpr double kOutput[] = {
      1.33893868,  -1.56882789, -0.943827894, -0.318827894, 0.306172106, 0.931172106,
      0.303930956, -1.31345005, -0.764157047, -0.139157047, 0.485842953, 1.11084295,
      1.35407938,  -1.24702574, -1.06877418,  -0.443774182, 0.181225818, 0.806225818,
      1.3618979,   -1.19905102, -1.01886693,  -0.393866932, 0.231133068, 0.856133068};
  constexpr double kLse[] = {2.72661524, 2.91480954, 2.3090417, 2.83433705};
  ASSERT_EQ(output.o.size(), std::size(kOutput));
  for (std::size_t i = 0; i < output.o.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(output.o[i]), kOutput[i], 1e-6) << i;
  }
  for (std::size_t i = 0; i < output.lse.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(output.lse[i]), kLse[i], 2e-6) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, ForwardNumerics, ::testing::ValuesIn(cpu_kernels()),
                         kernel_test_name);

}  // namespace
}  // namespace rafter::testing
