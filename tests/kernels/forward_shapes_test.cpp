// Sizes at the edges: lengths around tile boundaries, every head_dim, every ratio of heads, batch
// and lengths of 0, and random combinations of everything.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "support/every_kernel.h"

namespace rafter::testing {
namespace {

class ForwardShapes : public EveryKernelTest {
 protected:
  /// check_case with the expectation of each case computed once for all kernels.
  void check(const std::string& key, const Case& c, bool problem_dtype_out = false) {
    struct Prepared {
      Values values;
      Expected expected;
    };
    static std::map<std::string, Prepared> cache;
    auto found = cache.find(key);
    if (found == cache.end()) {
      Prepared p;
      p.values = make_values(c);
      p.expected = expect_values(c, p.values);
      found = cache.emplace(key, std::move(p)).first;
    }
    RunOptions run = options();
    run.problem_dtype_out = problem_dtype_out;
    run.threads = problem_dtype_out ? 2 : 1;
    const Output output = run_case(c, found->second.values, run);
    EXPECT_TRUE(close_to(output, found->second.expected, c)) << key;
  }
};

// The boundary set of the case list: lengths around the tiles of any kernel; seqlen_q = seqlen_kv
// and one off either way.
TEST_P(ForwardShapes, LengthsAroundTileBoundaries) {
  for (const DType dtype : taken({DType::f32, DType::bf16})) {
    for (const std::int64_t s :
         {0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257}) {
      for (const std::int64_t more : {-1, 0, 1}) {
        const std::int64_t keys = s + more;
        if (keys < 0) {
          continue;
        }
        Case c{.problem = {.head_dim = 8, .dtype = dtype, .mask = Mask::causal()}};
        c.lengths({s}, {keys});
        check(std::string("edge ") + to_string(dtype) + " " + std::to_string(s) + " " +
                  std::to_string(keys),
              c);
      }
    }
  }
}

TEST_P(ForwardShapes, LongerLengths) {
  for (const std::int64_t s : {704, 1025}) {
    Case c{.problem = {.head_dim = 24, .dtype = DType::bf16, .mask = Mask::causal()}};
    c.lengths({s}, {s});
    check("long " + std::to_string(s), c);
  }
  Case c{.problem = {.heads_q = 2,
                     .heads_kv = 1,
                     .head_dim = 24,
                     .dtype = any_dtype(),
                     .mask = Mask::causal()}};
  c.lengths({3}, {16384});
  check(std::string("long 16384 ") + to_string(any_dtype()), c);
}

// I25: every head_dim and head_dim_v from 1 to 256, no list.
TEST_P(ForwardShapes, EveryHeadDim) {
  for (std::int64_t dim = 1; dim <= 256; ++dim) {
    for (const DType dtype : taken({DType::f32, DType::bf16})) {
      if (dtype == DType::bf16 && dim % 8 != 0 && dim % 5 != 0) {
        continue;
      }
      Case c{.problem = {.head_dim = dim, .head_dim_v = 257 - dim, .dtype = dtype}};
      c.lengths({5}, {37});
      check(std::string("dim ") + to_string(dtype) + " " + std::to_string(dim), c);
    }
  }
}

// I21: any ratio of query heads to KV heads, in decode and in prefill.
TEST_P(ForwardShapes, EveryGroup) {
  std::vector<std::int64_t> groups(16);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    groups[i] = static_cast<std::int64_t>(i) + 1;
  }
  groups.insert(groups.end(), {20, 32, 64, 71, 128});
  for (const std::int64_t group : groups) {
    for (const std::int64_t rows : {1, 7}) {
      Case c{.problem = {.heads_q = 2 * group,
                         .heads_kv = 2,
                         .head_dim = 16,
                         .dtype = DType::bf16,
                         .mask = Mask::causal()}};
      c.lengths({rows}, {70});
      check("group " + std::to_string(group) + " " + std::to_string(rows), c);
    }
  }
}

// I11: no sequences is no work, and no error.
TEST_P(ForwardShapes, BatchOfNone) {
  Case c{.problem = {.head_dim = 16, .dtype = any_dtype()}};
  c.lengths({}, {});
  const Output output = run_case(c, make_values(c), options());
  EXPECT_TRUE(output.o.empty());
  Case packed{.problem = {.head_dim = 16, .dtype = any_dtype(), .layout = Layout::packed}};
  packed.lengths({}, {});
  EXPECT_TRUE(run_case(packed, make_values(packed), options()).o.empty());
}

// I9, I12: no keys at all, no queries at all, and both, in every layout.
TEST_P(ForwardShapes, LengthsOfZero) {
  for (const Layout layout : {Layout::dense, Layout::packed, Layout::paged}) {
    for (const auto& [rows, keys] : {std::pair<std::int64_t, std::int64_t>{3, 0}, {0, 3}, {0, 0}}) {
      Case c{.problem = {.heads_q = 2, .head_dim = 16, .dtype = any_dtype(), .layout = layout}};
      c.problem.page_size = layout == Layout::paged ? 4 : 0;
      c.lengths({rows, rows}, {keys, keys});
      if (!refusal_of(c, kernel()).empty()) {
        continue;
      }
      const Output output = run_case(c, make_values(c), options());
      ASSERT_EQ(output.o.size(), static_cast<std::size_t>(2 * rows * 2 * 16));
      for (const float value : output.o) {
        EXPECT_EQ(value, 0.0F);
      }
      for (const float value : output.lse) {
        EXPECT_EQ(value, -std::numeric_limits<float>::infinity());
      }
    }
  }
}

// I28 (forward): one query, one head; keys from 1 to 65 536.
TEST_P(ForwardShapes, OneQueryOneHead) {
  for (const std::int64_t keys : {1, 128, 65536}) {
    Case c{.problem = {.head_dim = 8, .dtype = DType::bf16}};
    c.lengths({1}, {keys});
    check("one " + std::to_string(keys), c);
  }
}

Case random_case(std::uint32_t seed) {
  std::mt19937 generator(seed);
  const auto pick = [&generator](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(generator);
  };
  Case c;
  c.seed = seed;
  AttentionProblem& p = c.problem;
  const DType dtypes[] = {DType::f32, DType::bf16, DType::f16};
  p.dtype = dtypes[pick(0, 2)];
  p.heads_kv = pick(1, 3);
  p.heads_q = p.heads_kv * pick(1, 4);
  p.head_dim = pick(1, 96);
  p.head_dim_v = pick(1, 96);
  const auto bound = [&pick]() { return pick(0, 2) == 0 ? std::int64_t{-1} : pick(0, 150); };
  p.mask = Mask::window(bound(), bound(),
                        pick(0, 1) == 0 ? MaskAlign::bottom_right : MaskAlign::top_left);
  p.softmax_scale = pick(0, 1) == 0 ? std::optional<float>() : std::optional<float>(0.3F);
  p.softcap = pick(0, 2) == 0 ? 3.0F : 0.0F;
  const Layout layouts[] = {Layout::dense, Layout::packed, Layout::paged};
  p.layout = layouts[pick(0, 2)];
  p.page_size = p.layout == Layout::paged ? pick(1, 70) : 0;
  p.seqused_kv = pick(0, 1) == 0;
  const auto batch = static_cast<std::size_t>(pick(1, 4));
  c.lengths_q.assign(batch, pick(1, 200));
  c.lengths_kv.assign(batch, pick(1, 300));
  for (std::size_t b = 0; b < batch; ++b) {
    if (p.layout == Layout::packed) {
      c.lengths_q[b] = pick(0, 200);
      c.lengths_kv[b] = pick(0, 300);
    } else if (p.seqused_kv) {
      c.lengths_kv[b] = pick(0, 300);
    }
  }
  const Style styles[] = {Style::contiguous,  Style::heads_first, Style::gaps,
                          Style::every_other, Style::backwards,   Style::mixed};
  c.style = styles[pick(0, 5)];
  return c;
}

// Any combination of layout, mask, options, shapes and strides.
TEST_P(ForwardShapes, RandomCombinations) {
  int taken_cases = 0;
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    const Case c = random_case(seed);
    if (refusal_of(c, kernel()).empty()) {
      ++taken_cases;
      check("random " + std::to_string(seed), c, seed % 2 == 0);
    }
  }
  EXPECT_GT(taken_cases, 10) << "so few cases say little";
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, ForwardShapes, ::testing::ValuesIn(cpu_kernels()),
                         kernel_test_name);

}  // namespace
}  // namespace rafter::testing
