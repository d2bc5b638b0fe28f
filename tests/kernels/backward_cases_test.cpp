// Every backward kernel against float64 on a table of cases: masks, groups, head_dims, lengths,
// layouts, dtypes.
#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include "support/backward_case.h"
#include "support/every_kernel.h"

namespace rafter::testing {
namespace {

struct Named {
  const char* name;
  Case c;
  bool dlse = false;
};

Case one(std::int64_t rows, std::int64_t keys, AttentionProblem problem) {
  Case c{.problem = problem};
  return c.lengths({rows}, {keys});
}

/// The tile of the kernels is 96 rows and 24 to 192 keys.
const std::vector<Named>& table() {
  static const std::vector<Named> kTable = {
      {"one_by_one", one(1, 1, {.head_dim = 8})},
      {"one_query", one(1, 97, {.heads_q = 4, .heads_kv = 2, .head_dim = 64}), true},
      {"no_key", one(5, 0, {.head_dim = 8})},
      {"no_query", one(0, 5, {.heads_q = 2, .heads_kv = 1, .head_dim = 8})},
      {"square_95", one(95, 95, {.head_dim = 64})},
      {"square_96", one(96, 96, {.head_dim = 64}), true},
      {"square_97", one(97, 97, {.heads_q = 2, .head_dim = 64, .mask = Mask::causal()})},
      {"causal_193", one(193, 193, {.heads_q = 2, .head_dim = 128, .mask = Mask::causal()}), true},
      {"more_queries", one(300, 20, {.head_dim = 32, .mask = Mask::causal()}), true},
      {"more_keys", one(20, 300, {.head_dim = 32, .mask = Mask::causal()}), true},
      {"top_left", one(130, 65, {.head_dim = 32, .mask = Mask::causal(MaskAlign::top_left)}), true},
      {"top_left_more_keys",
       one(65, 130, {.head_dim = 32, .mask = Mask::causal(MaskAlign::top_left)})},
      {"window_both", one(210, 230, {.head_dim = 24, .mask = Mask::window(40, 9)}), true},
      {"window_left", one(140, 150, {.head_dim = 24, .mask = Mask::window(33, -1)})},
      {"window_right", one(140, 150, {.head_dim = 24, .mask = Mask::window(-1, 33)})},
      {"window_diagonal", one(140, 150, {.head_dim = 24, .mask = Mask::window(0, 0)})},
      {"window_empty_rows", one(129, 17, {.head_dim = 24, .mask = Mask::window(32, 64)}), true},
      {"softcap", one(70, 90, {.head_dim = 40, .mask = Mask::causal(), .softcap = 2.5F}), true},
      {"scale", one(40, 60, {.head_dim = 40, .softmax_scale = -0.25F})},
      {"scale_zero", one(40, 60, {.head_dim = 40, .softmax_scale = 0.0F})},
      {"group_3",
       one(50, 70, {.heads_q = 6, .heads_kv = 2, .head_dim = 40, .mask = Mask::causal()}), true},
      {"group_7", one(9, 60, {.heads_q = 7, .heads_kv = 1, .head_dim = 16})},
      {"head_dim_1", one(30, 40, {.head_dim = 1})},
      {"head_dim_33", one(30, 40, {.head_dim = 33}), true},
      {"head_dim_80", one(30, 40, {.head_dim = 80})},
      {"head_dim_255", one(30, 40, {.head_dim = 255})},
      {"head_dim_256", one(30, 110, {.head_dim = 256, .mask = Mask::causal()})},
      {"head_dim_v_wider", one(37, 70, {.head_dim = 40, .head_dim_v = 136}), true},
      {"head_dim_v_narrower", one(37, 70, {.head_dim = 72, .head_dim_v = 9})},
  };
  return kTable;
}

class BackwardCases : public ::testing::TestWithParam<std::tuple<std::string, std::size_t, DType>> {
};

/// The oracle's answer does not depend on the kernel.
const std::pair<BackwardValues, ExpectedGradients>& expected_of(const Named& named, const Case& c) {
  static std::map<std::string, std::pair<BackwardValues, ExpectedGradients>> cache;
  const std::string key = std::string(named.name) + to_string(c.problem.dtype);
  const auto found = cache.find(key);
  if (found != cache.end()) {
    return found->second;
  }
  BackwardValues values = make_backward_values(c, named.dlse);
  ExpectedGradients expected = expect_gradients(c, values);
  return cache.emplace(key, std::pair(std::move(values), std::move(expected))).first->second;
}

TEST_P(BackwardCases, MatchesFloat64) {
  const auto& [kernel, number, dtype] = GetParam();
  const Named& named = table()[number];
  Case c = named.c;
  c.problem.dtype = dtype;
  if (const std::string refusal = backward_refusal_of(c, kernel); !refusal.empty()) {
    EXPECT_NE(refusal.find(kernel), std::string::npos) << refusal;
    GTEST_SKIP() << refusal;
  }
  const auto& [values, expected] = expected_of(named, c);
  EXPECT_TRUE(close_to(run_backward(c, values, {.kernel = kernel}), expected, c));
}

std::vector<std::size_t> numbers() {
  std::vector<std::size_t> all;
  for (std::size_t i = 0; i < table().size(); ++i) {
    all.push_back(i);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Table, BackwardCases,
                         ::testing::Combine(::testing::ValuesIn(backward_kernels()),
                                            ::testing::ValuesIn(numbers()),
                                            ::testing::Values(DType::f32, DType::bf16, DType::f16)),
                         [](const ::testing::TestParamInfo<BackwardCases::ParamType>& info) {
                           return std::get<0>(info.param) + "_" +
                                  table()[std::get<1>(info.param)].name + "_" +
                                  to_string(std::get<2>(info.param));
                         });

}  // namespace
}  // namespace rafter::testing
