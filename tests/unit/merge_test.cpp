// merge(): exact algebra of attention states.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "rafter/attention.h"

namespace rafter {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A state of [batch, seqlen, heads, dim] with values of its own.
struct State {
  std::int64_t batch = 1, seqlen = 1, heads = 1, dim = 1;
  std::vector<float> o, lse;

  State(std::int64_t batch_, std::int64_t seqlen_, std::int64_t heads_, std::int64_t dim_)
      : batch(batch_), seqlen(seqlen_), heads(heads_), dim(dim_) {
    o.resize(static_cast<std::size_t>(batch * seqlen * heads * dim));
    lse.resize(static_cast<std::size_t>(batch * seqlen * heads), -kInfinity);
  }
  static State random(std::uint32_t seed, double spread = 3) {
    State s(2, 3, 2, 5);
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal;
    for (float& x : s.o) {
      x = static_cast<float>(normal(generator));
    }
    for (float& x : s.lse) {
      x = static_cast<float>(spread * normal(generator));
    }
    return s;
  }
  AttentionState view() {
    return {TensorView::contiguous(o.data(), DType::f32, batch, seqlen, heads, dim),
            LseView::contiguous(lse.data(), batch, heads, seqlen)};
  }
  State empty_like() const { return State(batch, seqlen, heads, dim); }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Row index of lse [batch, heads, seqlen] for a row of o [batch, seqlen, heads].
std::size_t lse_index(const State& s, std::size_t o_row) {
  const auto heads = static_cast<std::size_t>(s.heads);
  const auto seqlen = static_cast<std::size_t>(s.seqlen);
  const std::size_t h = o_row % heads;
  const std::size_t i = o_row / heads % seqlen;
  const std::size_t b = o_row / heads / seqlen;
  return (b * heads + h) * seqlen + i;
}

TEST(Merge, WeighsByTheExponentialOfLse) {
  State a = State::random(1), b = State::random(2), c = State::random(3), out = a.empty_like();
  const AttentionState states[] = {a.view(), b.view(), c.view()};
  ASSERT_TRUE(merge(states, out.view()));
  for (std::size_t row = 0; row < out.lse.size(); ++row) {
    const std::size_t l = lse_index(out, row);
    const long double w[] = {std::exp(static_cast<long double>(a.lse[l])),
                             std::exp(static_cast<long double>(b.lse[l])),
                             std::exp(static_cast<long double>(c.lse[l]))};
    const long double sum = w[0] + w[1] + w[2];
    EXPECT_NEAR(out.lse[l], static_cast<double>(std::log(sum)), 1e-6);
    for (std::size_t d = 0; d < 5; ++d) {
      const std::size_t e = row * 5 + d;
      const long double want =
          (w[0] * static_cast<long double>(a.o[e]) + w[1] * static_cast<long double>(b.o[e]) +
           w[2] * static_cast<long double>(c.o[e])) /
          sum;
      EXPECT_NEAR(out.o[e], static_cast<double>(want), 1e-6);
    }
  }
}

// N5: empty with empty is empty; empty with X is X to the bit, whatever lies in the empty one's o.
TEST(Merge, EmptyStatesChangeNoBit) {
  State x = State::random(4), out = x.empty_like();
  State empty = x.empty_like(), garbage = x.empty_like();
  std::fill(garbage.o.begin(), garbage.o.end(), std::numeric_limits<float>::quiet_NaN());
  {
    const AttentionState states[] = {empty.view(), garbage.view()};
    std::fill(out.o.begin(), out.o.end(), 7.0F);
    ASSERT_TRUE(merge(states, out.view()));
    EXPECT_TRUE(same(out.o, empty.o));
    EXPECT_TRUE(same(out.lse, empty.lse));
  }
  for (const int position : {0, 1, 2, 3}) {
    std::vector<AttentionState> states = {empty.view(), garbage.view(), empty.view()};
    states.insert(states.begin() + position, x.view());
    ASSERT_TRUE(merge(states, out.view()));
    EXPECT_TRUE(same(out.o, x.o)) << position;
    EXPECT_TRUE(same(out.lse, x.lse)) << position;
  }
  const AttentionState alone[] = {x.view()};
  ASSERT_TRUE(merge(alone, out.view()));
  EXPECT_TRUE(same(out.o, x.o));
}

TEST(Merge, InPlaceEqualsApart) {
  for (const std::size_t target : {0U, 1U}) {
    State a = State::random(5), b = State::random(6), out = a.empty_like();
    const AttentionState states[] = {a.view(), b.view()};
    ASSERT_TRUE(merge(states, out.view()));
    ASSERT_TRUE(merge(states, states[target]));
    EXPECT_TRUE(same(target == 0 ? a.o : b.o, out.o));
    EXPECT_TRUE(same(target == 0 ? a.lse : b.lse, out.lse));
  }
}

TEST(Merge, OrderDoesNotShow) {
  State a = State::random(7), b = State::random(8), c = State::random(9);
  State out = a.empty_like(), other = a.empty_like();
  const AttentionState forward[] = {a.view(), b.view(), c.view()};
  const AttentionState permuted[] = {c.view(), a.view(), b.view()};
  ASSERT_TRUE(merge(forward, out.view()));
  ASSERT_TRUE(merge(permuted, other.view()));
  for (std::size_t i = 0; i < out.o.size(); ++i) {
    EXPECT_NEAR(out.o[i], other.o[i], 1.2e-7 * std::fabs(static_cast<double>(out.o[i])));
  }
  for (std::size_t i = 0; i < out.lse.size(); ++i) {
    EXPECT_FLOAT_EQ(out.lse[i], other.lse[i]);
  }
}

TEST(Merge, FarApartStaysFinite) {
  State a = State::random(10, 0), b = State::random(11, 0), out = a.empty_like();
  for (const float apart : {200.0F, -200.0F, 3e38F}) {
    std::fill(a.lse.begin(), a.lse.end(), apart);
    std::fill(b.lse.begin(), b.lse.end(), -apart / 2);
    const AttentionState states[] = {a.view(), b.view()};
    ASSERT_TRUE(merge(states, out.view()));
    const State& winner = apart > 0 ? a : b;
    EXPECT_TRUE(same(out.o, winner.o));
    EXPECT_TRUE(same(out.lse, winner.lse));
  }
}

TEST(Merge, NaNIsNotHidden) {
  State a = State::random(12), b = State::random(13), out = a.empty_like();
  a.lse[0] = std::numeric_limits<float>::quiet_NaN();
  const AttentionState states[] = {a.view(), b.view()};
  ASSERT_TRUE(merge(states, out.view()));
  EXPECT_TRUE(std::isnan(out.lse[0]));
  EXPECT_TRUE(std::isnan(out.o[0]));
  EXPECT_TRUE(std::isfinite(out.lse[1]));
}

TEST(Merge, StridesAndSixteenBitsAreHonoured) {
  State a = State::random(14), b = State::random(15), out = a.empty_like();
  const AttentionState states[] = {a.view(), b.view()};
  ASSERT_TRUE(merge(states, out.view()));
  // The same values with head_dim stride 2, heads first, lse in reverse.
  std::vector<float> o(2 * a.o.size(), -1), lse(a.lse.size());
  TensorView o_view = TensorView::heads_first(o.data(), DType::f32, 2, 2, 3, 5);
  o_view.stride_head_dim = 2;
  o_view.stride_seqlen *= 2;
  o_view.stride_heads *= 2;
  o_view.stride_batch *= 2;
  LseView lse_view = LseView::contiguous(lse.data() + lse.size() - 1, 2, 2, 3);
  lse_view.stride_batch = -lse_view.stride_batch;
  lse_view.stride_heads = -lse_view.stride_heads;
  lse_view.stride_seqlen = -1;
  ASSERT_TRUE(merge(states, {o_view, lse_view}));
  for (std::size_t i = 0; i < lse.size(); ++i) {
    EXPECT_EQ(lse[lse.size() - 1 - i], out.lse[i]);
  }
  for (std::int64_t b_ = 0; b_ < 2; ++b_) {
    for (std::int64_t i = 0; i < 3; ++i) {
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t d = 0; d < 5; ++d) {
          EXPECT_EQ(o[static_cast<std::size_t>(((b_ * 2 + h) * 3 + i) * 10 + 2 * d)],
                    out.o[static_cast<std::size_t>(((b_ * 3 + i) * 2 + h) * 5 + d)]);
        }
      }
    }
  }
  for (std::size_t i = 1; i < o.size(); i += 2) {
    EXPECT_EQ(o[i], -1) << "written between elements";
  }
  std::vector<std::uint16_t> half(a.o.size()), half_out(a.o.size());
  for (std::size_t i = 0; i < half.size(); ++i) {
    half[i] = f32_to_bf16(a.o[i]);
  }
  AttentionState state = a.view();
  state.o = TensorView::contiguous(half.data(), DType::bf16, 2, 3, 2, 5);
  AttentionState into = out.view();
  into.o = TensorView::contiguous(half_out.data(), DType::bf16, 2, 3, 2, 5);
  const AttentionState one[] = {state};
  ASSERT_TRUE(merge(one, into));
  EXPECT_EQ(half, half_out);
}

TEST(Merge, RefusesByName) {
  State a = State::random(16), out = a.empty_like();
  EXPECT_EQ(merge({}, out.view()).message(), "states: none given; one state or more allowed");
  AttentionState state = a.view();
  state.o.head_dim = 4;
  EXPECT_EQ(merge(std::vector{a.view(), state}, out.view()).message(),
            "states[1].o.head_dim: 4 given; 5 (as out has) allowed");
  state = a.view();
  state.o.dtype = DType::bf16;
  EXPECT_EQ(merge(std::vector{state}, out.view()).message(),
            "states[0].o.dtype: bf16 given; f32 (as out has) allowed");
  state = a.view();
  state.lse.data = nullptr;
  EXPECT_EQ(merge(std::vector{state}, out.view()).message(),
            "states[0].lse: null given; a pointer to its elements allowed");
  AttentionState into = out.view();
  into.o.stride_batch = 0;
  EXPECT_EQ(merge(std::vector{a.view()}, into).parameter(), "out.o.stride_batch");
  into = a.view();
  into.o.data = a.o.data() + 1;  // shifted over its own input
  EXPECT_EQ(merge(std::vector{a.view()}, into).parameter(), "out.o");
  into = out.view();
  into.o.dtype = DType::int8;
  EXPECT_EQ(merge(std::vector{a.view()}, into).parameter(), "out.o.dtype");
}

}  // namespace
}  // namespace rafter
