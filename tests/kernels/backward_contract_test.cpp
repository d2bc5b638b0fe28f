// The numerics contract of the backward pass, on every CPU kernel that runs it: rows and keys
// without partners, what lies outside the valid region, determinism, independence from batch,
// threads and layout; and the oracle itself against differences of the loss.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <thread>
#include <utility>

#include "support/backward_case.h"
#include "support/every_kernel.h"
#include "support/oracle.h"
#include "support/oracle_backward.h"

namespace rafter::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class BackwardContract : public EveryKernelTest {
 protected:
  /// Of these dtypes, those that the kernel is for; never none of f32 and bf16.
  std::vector<DType> taken(std::initializer_list<DType> dtypes) const {
    return backward_dtypes(kernel(), dtypes);
  }
  DType any_dtype() const { return taken({DType::f32, DType::bf16}).at(0); }
};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

Case ragged(DType dtype, bool packed = true) {
  Case c{.problem = {.heads_q = 4,
                     .heads_kv = 2,
                     .head_dim = 40,
                     .dtype = dtype,
                     .mask = Mask::causal(),
                     .layout = packed ? Layout::packed : Layout::dense,
                     .seqused_kv = !packed}};
  return packed ? c.lengths({33, 1, 150, 0, 12}, {33, 130, 220, 7, 0})
                : c.lengths({97, 97, 97}, {65, 0, 130});
}

std::vector<float> part(const std::vector<float>& v, std::int64_t first, std::int64_t count) {
  return v.empty() ? v : std::vector<float>(v.begin() + first, v.begin() + first + count);
}

/// Rows before sequence b.
struct Before {
  std::int64_t q = 0, kv = 0;
};
Before before(const Case& c, std::size_t b) {
  Before sum;
  for (std::size_t i = 0; i < b; ++i) {
    sum.q += c.lengths_q[i];
    sum.kv += c.lengths_kv[i];
  }
  return sum;
}

/// What belongs to sequence b alone (head_dim_v = head_dim in these tests).
BackwardValues slice(const Case& c, const BackwardValues& all, std::size_t b) {
  const AttentionProblem& p = c.problem;
  const Before first = before(c, b);
  const std::int64_t q = p.heads_q * p.head_dim, kv = p.heads_kv * p.head_dim;
  const auto rows = [&](const std::vector<float>& v, std::int64_t width) {
    return part(v, first.q * width, c.lengths_q[b] * width);
  };
  const auto keys = [&](const std::vector<float>& v) {
    return part(v, first.kv * kv, c.lengths_kv[b] * kv);
  };
  return {.in = {rows(all.in.q, q), keys(all.in.k), keys(all.in.v)},
          .o = rows(all.o, q),
          .d_o = rows(all.d_o, q),
          .lse = rows(all.lse, p.heads_q),
          .dlse = rows(all.dlse, p.heads_q)};
}
Gradients slice(const Case& c, const Gradients& all, std::size_t b) {
  const AttentionProblem& p = c.problem;
  const Before first = before(c, b);
  const std::int64_t q = p.heads_q * p.head_dim, kv = p.heads_kv * p.head_dim;
  return {part(all.dq, first.q * q, c.lengths_q[b] * q),
          part(all.dk, first.kv * kv, c.lengths_kv[b] * kv),
          part(all.dv, first.kv * kv, c.lengths_kv[b] * kv)};
}

// The oracle that everything else is held against: its gradient is that of the loss.
TEST(BackwardOracle, IsTheDerivativeOfTheLoss) {
  constexpr std::int64_t kSeqlenQ = 5, kSeqlenKv = 6, kDim = 3;
  std::mt19937 generator(1);
  std::normal_distribution<double> normal;
  const auto draw = [&](std::int64_t n) {
    std::vector<double> values(at(n));
    std::generate(values.begin(), values.end(), [&] { return normal(generator); });
    return values;
  };
  std::vector<double> q = draw(kSeqlenQ * kDim), k = draw(kSeqlenKv * kDim),
                      v = draw(kSeqlenKv * kDim);
  const std::vector<double> d_o = draw(kSeqlenQ * kDim), dlse = draw(kSeqlenQ);
  for (const double softcap : {0.0, 0.7}) {
    const OracleOptions options{.scale = 0.6, .softcap = softcap, .has_right = true, .right = 0};
    const OracleHead head{kSeqlenQ, kSeqlenKv, kDim, kDim, q.data(), k.data(), v.data()};
    std::vector<double> dq(q.size()), dk(k.size()), dv(v.size());
    std::vector<double> sizes[3] = {dq, dk, dv};
    const auto loss = [&] {
      double sum = 0;
      for (std::int64_t i = 0; i < kSeqlenQ; ++i) {
        double o[kDim];
        sum += dlse[at(i)] * oracle_row(head, options, i, o);
        for (std::int64_t d = 0; d < kDim; ++d) {
          sum += o[d] * d_o[at(i * kDim + d)];
        }
      }
      return sum;
    };
    for (std::int64_t i = 0; i < kSeqlenQ; ++i) {
      oracle_backward_row(head, options, i, d_o.data() + i * kDim, dlse[at(i)],
                          {dq.data(), dk.data(), dv.data()},
                          {sizes[0].data(), sizes[1].data(), sizes[2].data()});
    }
    const std::pair<std::vector<double>*, const std::vector<double>*> tensors[] = {
        {&q, &dq}, {&k, &dk}, {&v, &dv}};
    for (const auto& [values, gradient] : tensors) {
      for (std::size_t i = 0; i < values->size(); ++i) {
        constexpr double kStep = 1e-5;
        const double middle = (*values)[i];
        (*values)[i] = middle + kStep;
        const double up = loss();
        (*values)[i] = middle - kStep;
        const double down = loss();
        (*values)[i] = middle;
        EXPECT_NEAR((*gradient)[i], (up - down) / (2 * kStep), 1e-8);
      }
    }
  }
}

/// Logits of about −120, as exp(−lse) overflows then, and their gradients; no kernel changes them.
const std::pair<BackwardValues, ExpectedGradients>& far_below_zero(const Case& c) {
  static std::map<std::tuple<std::int64_t, std::int64_t, DType>,
                  std::pair<BackwardValues, ExpectedGradients>>
      cache;
  const std::tuple key(c.lengths_q[0], c.lengths_kv[0], c.problem.dtype);
  if (const auto found = cache.find(key); found != cache.end()) {
    return found->second;
  }
  BackwardValues values = make_backward_values(c, false);
  for (std::size_t i = 0; i < values.in.q.size(); ++i) {
    values.in.q[i] = i % 64 == 0 ? 1.0F : values.in.q[i] / 16;
  }
  for (std::size_t i = 0; i < values.in.k.size(); ++i) {
    values.in.k[i] = i % 64 == 0 ? -120.0F * 8 : values.in.k[i] / 16;
  }
  for (std::vector<float>* tensor : {&values.in.q, &values.in.k}) {
    for (float& x : *tensor) {
      x = round_to(c.problem.dtype, x);
    }
  }
  set_output(c, values);
  ExpectedGradients expected = expect_gradients(c, values);
  return cache.emplace(key, std::pair(std::move(values), std::move(expected))).first->second;
}

// N1, N2: logits so far below 0 that exp(−lse) overflows; partial tiles, one query, many.
TEST_P(BackwardContract, VeryNegativeLseOnPartialTiles) {
  struct Shape {
    std::int64_t rows, keys;
    Mask mask;
  };
  for (const Shape& shape : {Shape{1, 97, {}}, Shape{1, 128, {}}, Shape{192, 192, Mask::causal()},
                             Shape{131, 70, Mask::causal()}, Shape{704, 704, Mask::causal()}}) {
    for (const DType dtype : taken({DType::f32, DType::bf16})) {
      if (shape.rows == 704 && dtype != DType::bf16) {
        continue;  // long enough once
      }
      Case c{.problem = {.head_dim = 64, .dtype = dtype, .mask = shape.mask}};
      c.lengths({shape.rows}, {shape.keys});
      const auto& [values, expected] = far_below_zero(c);
      EXPECT_TRUE(close_to(run_backward(c, values, options()), expected, c)) << shape.rows;
    }
  }
}

// I9, N18: a row that sees no key, and a key that no row sees, have gradient 0 exactly.
TEST_P(BackwardContract, RowsAndKeysWithoutPartnersHaveGradientZero) {
  Case c{
      .problem = {.heads_q = 2, .head_dim = 16, .dtype = any_dtype(), .mask = Mask::window(5, 3)}};
  c.lengths({140}, {40});  // rows 0 … 96 see nothing
  const Gradients rows = run_backward(c, make_backward_values(c, true), options());
  for (std::size_t i = 0; i < 140 * 2 * 16; ++i) {
    const bool empty = i / 32 < 97;
    ASSERT_EQ(rows.dq[i] == 0.0F, empty) << "row " << i / 32;
  }
  c.problem.mask = Mask::window(5, 3, MaskAlign::top_left);
  c.lengths({40}, {340});  // keys 43 … see no row
  const Gradients keys = run_backward(c, make_backward_values(c, true), options());
  for (std::size_t i = 43 * 32; i < keys.dk.size(); ++i) {
    ASSERT_EQ(keys.dk[i], 0.0F) << "key " << i / 32;
    ASSERT_EQ(keys.dv[i], 0.0F) << "key " << i / 32;
  }
  // sequences without queries, and one without keys
  c.problem = {
      .heads_q = 4, .heads_kv = 1, .head_dim = 16, .dtype = any_dtype(), .layout = Layout::packed};
  c.lengths({0, 40, 30, 0}, {90, 60, 0, 7});
  const Gradients packed = run_backward(c, make_backward_values(c, true), options());
  const auto zeros = [](const std::vector<float>& v, std::int64_t width, std::int64_t first,
                        std::int64_t count) {
    const auto from = v.begin() + first * width;
    return std::all_of(from, from + count * width, [](float x) { return x == 0.0F; });
  };
  for (const std::vector<float>* one : {&packed.dk, &packed.dv}) {
    EXPECT_TRUE(zeros(*one, 16, 0, 90) && zeros(*one, 16, 150, 7));
    EXPECT_FALSE(zeros(*one, 16, 90, 60));
  }
  EXPECT_TRUE(zeros(packed.dq, 4 * 16, 40, 30));
  EXPECT_FALSE(zeros(packed.dq, 4 * 16, 0, 40));
}

// N14, N15: padding, keys past seqused and workspaces in NaN or zero, the same bits.
TEST_P(BackwardContract, WhatLiesOutsideTheValidRegionChangesNoBit) {
  for (const bool packed : {true, false}) {
    for (const DType dtype : taken({DType::f32, DType::bf16})) {
      Case c = ragged(dtype, packed);
      c.style = Style::gaps;
      const BackwardValues values = make_backward_values(c, true);
      RunOptions run = options();
      run.fill = Fill::zero;
      const Gradients clean = run_backward(c, values, run);
      run.fill = Fill::nan;
      EXPECT_TRUE(same_bits(clean, run_backward(c, values, run)));
    }
  }
}

// 0 · NaN is NaN: a NaN in a row or key reaches those that see it and no other.
TEST_P(BackwardContract, ANaNReachesExactlyWhatSeesIt) {
  constexpr std::int64_t kDim = 24, kLength = 150, kAt = 70;
  Case c{.problem = {.head_dim = kDim, .dtype = any_dtype(), .mask = Mask::causal()}};
  c.lengths({kLength}, {kLength});
  const BackwardValues values = make_backward_values(c, false);
  const Gradients clean = run_backward(c, values, options());
  enum Poisoned { kInQ, kInDo, kInK, kInV };
  for (const Poisoned where : {kInQ, kInDo, kInK, kInV}) {
    BackwardValues poisoned = values;
    std::vector<float>* const tensors[] = {&poisoned.in.q, &poisoned.d_o, &poisoned.in.k,
                                           &poisoned.in.v};
    (*tensors[where])[at(kAt * kDim + 3)] = kNaN;
    const Gradients g = run_backward(c, poisoned, options());
    const auto has_nan = [&](const std::vector<float>& v, std::int64_t row) {
      return std::any_of(v.begin() + row * kDim, v.begin() + (row + 1) * kDim,
                         [](float x) { return std::isnan(x); });
    };
    // What is not NaN is what it was, to the bit; but for the kernel that takes float64 loops then.
    const bool loops = kernel() == "backward_unfused_onednn";
    const auto keeps = [&](const std::vector<float>& now, const std::vector<float>& before) {
      return loops || std::equal(now.begin(), now.end(), before.begin(),
                                 [](float x, float y) { return std::isnan(x) || x == y; });
    };
    EXPECT_TRUE(keeps(g.dq, clean.dq)) << where;
    EXPECT_TRUE(keeps(g.dk, clean.dk)) << where;
    EXPECT_TRUE(keeps(g.dv, clean.dv)) << where;
    for (std::int64_t i = 0; i < kLength; ++i) {
      const bool in_row = where == kInQ || where == kInDo;
      // a poisoned row gives every key up to it NaN; a poisoned key every row from it on, which in
      // turn gives its own gradient alone
      EXPECT_EQ(has_nan(g.dq, i), in_row ? i == kAt : i >= kAt) << where << " dq row " << i;
      EXPECT_EQ(has_nan(g.dk, i), in_row ? i <= kAt : i == kAt) << where << " dk row " << i;
      EXPECT_EQ(has_nan(g.dv, i), where == kInV ? false
                                  : in_row      ? i <= kAt
                                                : i == kAt)
          << where << " dv row " << i;
    }
  }
}

// D2, D6, N14: repeats and thread counts change no bit; the workspace comes poisoned each time.
TEST_P(BackwardContract, RepeatsAndThreadsChangeNoBit) {
  for (const DType dtype : taken({DType::f32, DType::bf16})) {
    Case c = ragged(dtype);
    const BackwardValues values = make_backward_values(c, true);
    RunOptions run = options();
    const Gradients one = run_backward(c, values, run);
    for (const int threads : {1, 2, 3, 4, 4}) {
      run.threads = threads;
      EXPECT_TRUE(same_bits(one, run_backward(c, values, run))) << threads << " threads";
    }
  }
}

// D2: 200 runs by one to four threads, while others keep half of the cores busy: the same bits.
TEST_P(BackwardContract, ManyRunsBesideBusyThreadsAreBitwiseEqual) {
  const std::vector<std::string> planned = cpu_kernels(Pass::backward);
  if (kernel() == "backward_reference" || kernel() == "backward_unfused_onednn" ||
      std::find(planned.begin(), planned.end(), kernel()) == planned.end()) {
    GTEST_SKIP() << "would take long; RepeatsAndThreadsChangeNoBit holds it to six";
  }
  Case c{.problem = {.head_dim = 64, .dtype = any_dtype(), .mask = Mask::causal()}};
  c.lengths({110}, {290});  // several tiles of rows and blocks of keys
  const BackwardValues values = make_backward_values(c, true);
  RunOptions run = options();
  const Gradients first = run_backward(c, values, run);
  std::atomic<bool> done = false;
  std::vector<std::thread> busy((std::thread::hardware_concurrency() + 1) / 2);
  for (std::thread& one : busy) {
    one = std::thread([&done] {
      while (!done.load(std::memory_order_relaxed)) {
        std::this_thread::yield();
      }
    });
  }
  for (int i = 1; i < 200; ++i) {
    run.threads = 1 + i % 4;
    EXPECT_TRUE(same_bits(first, run_backward(c, values, run))) << "run " << i;
  }
  done = true;
  for (std::thread& one : busy) {
    one.join();
  }
}

// No scratch grows with the scores: eight times the length takes no more than eight times the room.
TEST_P(BackwardContract, TheWorkspaceGrowsWithTheLengthAlone) {
  if (kernel() == "backward_unfused_onednn") {
    GTEST_SKIP() << "it stores the scores";
  }
  const auto bytes = [&](std::int64_t seqlen) {
    return workspace_of({.heads_q = 2,
                         .seqlen_q = seqlen,
                         .seqlen_kv = seqlen,
                         .head_dim = 64,
                         .dtype = any_dtype()},
                        kernel());
  };
  EXPECT_LE(bytes(1 << 17), 8 * bytes(1 << 14));
}

// D4: a sequence alone, among others packed, and padded with longer ones: the same bits.
TEST_P(BackwardContract, NeighboursAndLayoutChangeNoBit) {
  for (const DType dtype : taken({DType::f32, DType::bf16})) {
    const Case packed = ragged(dtype);
    const BackwardValues values = make_backward_values(packed, true);
    RunOptions run = options();
    run.threads = 2;
    const Gradients all = run_backward(packed, values, run);
    for (const std::size_t b : {0U, 2U}) {
      Case alone = packed;
      alone.problem.layout = Layout::dense;
      alone.lengths({packed.lengths_q[b]}, {packed.lengths_kv[b]});
      const BackwardValues mine = slice(packed, values, b);
      EXPECT_TRUE(same_bits(slice(packed, all, b), run_backward(alone, mine, options())));
      alone.problem.seqused_kv = true;  // keys of a longer capacity
      EXPECT_TRUE(same_bits(slice(packed, all, b), run_backward(alone, mine, options())));
    }
  }
}

// I1, I17, packed QKV views: the same values through any strides give the same bits.
TEST_P(BackwardContract, StridesChangeNoBit) {
  for (const DType dtype : taken({DType::f32, DType::bf16})) {
    Case c{.problem = {.heads_q = 4,
                       .heads_kv = 2,
                       .head_dim = 40,
                       .head_dim_v = 24,
                       .dtype = dtype,
                       .mask = Mask::window(70, 9)}};
    c.lengths({70, 70}, {120, 120});
    const BackwardValues values = make_backward_values(c, false);
    const Gradients reference = run_backward(c, values, options());
    for (const Style style :
         {Style::heads_first, Style::gaps, Style::every_other, Style::backwards, Style::mixed}) {
      c.style = style;
      EXPECT_TRUE(same_bits(reference, run_backward(c, values, options())))
          << "style " << static_cast<int>(style);
    }
    c.style = Style::contiguous;
    RunOptions run = options();
    run.problem_dtype_out = true;
    Gradients rounded = reference;
    for (std::vector<float>* tensor : {&rounded.dq, &rounded.dk, &rounded.dv}) {
      for (float& x : *tensor) {
        x = round_to(dtype, x);
      }
    }
    EXPECT_TRUE(same_bits(rounded, run_backward(c, values, run)));
  }
}

// o and d_o may be f32 whatever the dtype of q, k and v.
TEST_P(BackwardContract, OutputsInF32GiveTheSameBits) {
  for (const DType dtype : taken({DType::f32, DType::bf16})) {
    const Case c = ragged(dtype);
    const BackwardValues values = make_backward_values(c, true);
    RunOptions run = options();
    const Gradients expected = run_backward(c, values, run);
    run.f32_o = true;
    EXPECT_TRUE(same_bits(expected, run_backward(c, values, run)));
  }
}

TEST_P(BackwardContract, HeadDimStrideIsHonouredOrRefused) {
  const std::vector<std::string> planned = cpu_kernels(Pass::backward);
  if (std::find(planned.begin(), planned.end(), kernel()) == planned.end()) {
    GTEST_SKIP() << "the plan refuses it, and " << kernel() << " has none";
  }
  Case c{.problem = {.heads_q = 2, .head_dim = 20, .dtype = any_dtype(), .mask = Mask::causal()}};
  c.lengths({40}, {50});
  const BackwardValues values = make_backward_values(c, false);
  const Gradients reference = run_backward(c, values, options());
  c.style = Style::strided_head_dim;
  Gradients gradients;
  const Status status = try_backward(c, values, options(), gradients);
  if (status) {
    EXPECT_TRUE(same_bits(reference, gradients));
  } else {
    EXPECT_EQ(status.parameter(), "q.stride_head_dim");
  }
}

// I28: the gradient of a sum or mean is one value with strides of 0; one query, one head.
TEST_P(BackwardContract, AnExpandedGradientEqualsAWrittenOne) {
  if (any_dtype() != DType::f32) {
    GTEST_SKIP() << kernel() << " does not take f32";
  }
  Case c{.problem = {.head_dim = 8}};
  c.lengths({1}, {128});
  BackwardValues values = make_backward_values(c, false);
  std::fill(values.d_o.begin(), values.d_o.end(), 1.0F);
  const Gradients written = run_backward(c, values, options());
  EXPECT_TRUE(close_to(written, expect_gradients(c, values), c));

  const Result<Plan> planned = plan({.seqlen_q = 1, .seqlen_kv = 128, .head_dim = 8}, Device::cpu(),
                                    {.pass = Pass::backward, .kernel = kernel(), .threads = 1});
  ASSERT_TRUE(planned) << planned.status().message();
  const auto view = [](std::vector<float>& v) {
    return TensorView::contiguous(v.data(), DType::f32, 1, static_cast<std::int64_t>(v.size()) / 8,
                                  1, 8);
  };
  TensorView d_o = view(values.d_o);
  d_o.stride_batch = d_o.stride_seqlen = d_o.stride_heads = 0;
  GuardedBuffer workspace(static_cast<std::size_t>(planned->workspace_bytes()), Fill::nan);
  Gradients expanded = written;
  const Status status =
      planned->backward({.q = view(values.in.q),
                         .k = view(values.in.k),
                         .v = view(values.in.v),
                         .o = view(values.o),
                         .lse = LseView::contiguous(values.lse.data(), 1, 1, 1),
                         .d_o = d_o},
                        {view(expanded.dq), view(expanded.dk), view(expanded.dv)},
                        {workspace.data(), static_cast<std::int64_t>(workspace.bytes())});
  ASSERT_TRUE(status) << status.message();
  EXPECT_TRUE(same_bits(written, expanded));
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, BackwardContract, ::testing::ValuesIn(backward_kernels()),
                         kernel_test_name);

}  // namespace
}  // namespace rafter::testing
