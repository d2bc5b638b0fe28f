// The packing and schedule of forward_amx_bf16 on emulated tiles, so that they are under test on
// machines without AMX. The arithmetic of the real instructions is tested where they are, as every
// kernel's is.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/amx_emulated.h"

namespace rafter::testing {
namespace {

struct Shape {
  std::int64_t heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, head_dim_v;
  Mask mask = {};
  float softcap = 0;
};

struct Tensors {
  std::vector<std::uint16_t> q, k, v;
  std::vector<float> o, lse;
};

Tensors random_tensors(const Shape& s) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::int64_t elements) {
    std::vector<std::uint16_t> out(static_cast<std::size_t>(elements));
    for (std::uint16_t& x : out) {
      x = f32_to_bf16(normal(generator));
    }
    return out;
  };
  const auto outputs = static_cast<std::size_t>(s.seqlen_q * s.heads_q);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  return {fill(s.seqlen_q * s.heads_q * s.head_dim), fill(s.seqlen_kv * s.heads_kv * s.head_dim),
          fill(s.seqlen_kv * s.heads_kv * s.head_dim_v),
          std::vector<float>(outputs * static_cast<std::size_t>(s.head_dim_v), nan),
          std::vector<float>(outputs, nan)};
}

AttentionProblem problem_of(const Shape& s) {
  return {.heads_q = s.heads_q,
          .heads_kv = s.heads_kv,
          .seqlen_q = s.seqlen_q,
          .seqlen_kv = s.seqlen_kv,
          .head_dim = s.head_dim,
          .head_dim_v = s.head_dim_v,
          .dtype = DType::bf16,
          .mask = s.mask,
          .softmax_scale = 1 / std::sqrt(static_cast<float>(s.head_dim)),
          .softcap = s.softcap};
}

void run_emulated(const Shape& s, Tensors& t, int threads) {
  const KernelProblem problem = {.attention = problem_of(s), .threads = threads};
  const tiles::AmxLayout layout =
      tiles::amx_layout(s.head_dim, s.head_dim_v, s.heads_q / s.heads_kv, s.seqlen_q, s.heads_kv,
                        threads * cpu::kTasksPerThread);
  const cpu::TaskShape shape = {layout.positions, layout.heads, layout.head_chunks, layout.bytes};
  // a workspace of NaN: what lies outside the valid region must not matter
  std::vector<std::byte> memory(static_cast<std::size_t>(cpu::tasks_workspace(problem, shape)) + 64,
                                std::byte{0xff});
  void* aligned = memory.data();
  std::size_t space = memory.size();
  std::align(64, memory.size() - 64, aligned, space);
  const ForwardInputs in = {
      TensorView::contiguous(t.q.data(), DType::bf16, 1, s.seqlen_q, s.heads_q, s.head_dim),
      TensorView::contiguous(t.k.data(), DType::bf16, 1, s.seqlen_kv, s.heads_kv, s.head_dim),
      TensorView::contiguous(t.v.data(), DType::bf16, 1, s.seqlen_kv, s.heads_kv, s.head_dim_v)};
  const ForwardOutputs out = {
      TensorView::contiguous(t.o.data(), DType::f32, 1, s.seqlen_q, s.heads_q, s.head_dim_v),
      LseView::contiguous(t.lse.data(), 1, s.heads_q, s.seqlen_q)};
  const ForwardCall call = {.problem = problem,
                            .in = in,
                            .out = out,
                            .workspace = {aligned, static_cast<std::int64_t>(memory.size()) - 64}};
  const forward_amx::Run run = {call, layout, shape};
  cpu::run_tasks<cpu::NoScope>(
      call, shape,
      [&](const cpu::Task& task, std::int64_t head_kv, std::int64_t chunk, std::byte* scratch) {
        forward_amx::run_task<EmulatedAmx>(run, task, head_kv, chunk, scratch);
      });
}

/// Checks every row against float64 loops. P is rounded to bf16, by at most 2^-8 of each weight, so
/// |error| ≤ 2^-8 Σ p |v|; f32 adds parts in 10^5.
void expect_float64(const Shape& s, const Tensors& t) {
  const std::int64_t group = s.heads_q / s.heads_kv;
  for (std::int64_t h = 0; h < s.heads_q; ++h) {
    for (std::int64_t i = 0; i < s.seqlen_q; ++i) {
      const KeyRange keys = visible_keys(s.mask, i, s.seqlen_q, s.seqlen_kv);
      std::vector<double> p;
      double sum = 0;
      for (std::int64_t j = keys.first; j < keys.last; ++j) {
        double score = 0;
        for (std::int64_t d = 0; d < s.head_dim; ++d) {
          const auto at_q = static_cast<std::size_t>((i * s.heads_q + h) * s.head_dim + d);
          const auto at_k = static_cast<std::size_t>((j * s.heads_kv + h / group) * s.head_dim + d);
          score += double{bf16_to_f32(t.q[at_q])} * double{bf16_to_f32(t.k[at_k])};
        }
        score /= std::sqrt(static_cast<double>(s.head_dim));
        score = s.softcap > 0 ? s.softcap * std::tanh(score / s.softcap) : score;
        p.push_back(std::exp(score));
        sum += p.back();
      }
      const float lse = t.lse[static_cast<std::size_t>(h * s.seqlen_q + i)];
      if (p.empty()) {
        EXPECT_EQ(lse, -std::numeric_limits<float>::infinity()) << "head " << h << " row " << i;
      } else {
        EXPECT_NEAR(lse, std::log(sum), 2e-5) << "head " << h << " row " << i;
      }
      for (std::int64_t d = 0; d < s.head_dim_v; ++d) {
        double o = 0, size = 0;
        for (std::size_t j = 0; j < p.size(); ++j) {
          const std::int64_t key = keys.first + static_cast<std::int64_t>(j);
          const auto at =
              static_cast<std::size_t>((key * s.heads_kv + h / group) * s.head_dim_v + d);
          o += p[j] / sum * double{bf16_to_f32(t.v[at])};
          size += p[j] / sum * std::fabs(double{bf16_to_f32(t.v[at])});
        }
        const float got = t.o[static_cast<std::size_t>((i * s.heads_q + h) * s.head_dim_v + d)];
        ASSERT_NEAR(got, o, (0x1p-8 + 2e-5) * size)
            << "head " << h << " row " << i << " column " << d;
      }
    }
  }
}

TEST(ForwardAmxEmulated, MatchesFloat64WithinTheRoundingOfP) {
  const std::vector<Shape> shapes = {
      {1, 1, 1, 1, 1, 1},
      {2, 1, 33, 40, 17, 40, Mask::causal()},
      {2, 2, 65, 32, 20, 24, Mask::causal()},  // the first 33 rows see nothing
      {3, 1, 129, 300, 16, 16, Mask::window(32, 64)},
      {2, 2, 50, 260, 16, 33, Mask::window(5, -1), 5.0f},
      {1, 1, 40, 150, 128, 96, Mask::causal(MaskAlign::top_left)},
      {71, 1, 3, 140, 32, 32, Mask::causal()},
      {300, 1, 2, 31, 8, 8},  // a group in two parts
      {1, 1, 5, 0, 8, 8},
      {1, 1, 3, 129, 256, 256},
  };
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    SCOPED_TRACE("shape " + std::to_string(i));
    Tensors t = random_tensors(shapes[i]);
    run_emulated(shapes[i], t, 1);
    expect_float64(shapes[i], t);
  }
}

TEST(ForwardAmxEmulated, BitsDoNotDependOnTheNumberOfThreads) {
  const Shape shape = {4, 2, 150, 200, 32, 32, Mask::causal()};
  Tensors one = random_tensors(shape);
  Tensors many = one;
  run_emulated(shape, one, 1);
  run_emulated(shape, many, 5);
  EXPECT_EQ(one.o, many.o);
  EXPECT_EQ(one.lse, many.lse);
}

TEST(ForwardAmxEmulated, AValueThatIsNotFiniteReachesOnlyTheRowsThatSeeIt) {
  const Shape shape = {1, 1, 100, 100, 16, 16, Mask::causal()};
  Tensors clean = random_tensors(shape);
  Tensors poisoned = clean;
  constexpr std::int64_t kKey = 60, kColumn = 5;
  poisoned.v[kKey * 16 + kColumn] = 0x7fc0;  // NaN
  run_emulated(shape, clean, 1);
  run_emulated(shape, poisoned, 1);
  for (std::int64_t i = 0; i < 100; ++i) {
    for (std::int64_t d = 0; d < 16; ++d) {
      const auto at = static_cast<std::size_t>(i * 16 + d);
      if (i >= kKey && d == kColumn) {
        EXPECT_TRUE(std::isnan(poisoned.o[at])) << "row " << i;
      } else {
        EXPECT_EQ(poisoned.o[at], clean.o[at]) << "row " << i << " column " << d;
      }
    }
  }
}

}  // namespace
}  // namespace rafter::testing
