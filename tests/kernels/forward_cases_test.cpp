// Every CPU kernel against the float64 oracle, over a table of cases. Case ids (N4, I14, …) are
// those of tests/cases.md.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>

#include "support/attention_case.h"
#include "support/every_kernel.h"

namespace rafter::testing {
namespace {

struct Named {
  std::string name;
  Case c;
};

AttentionProblem heads(DType dtype, std::int64_t heads_q, std::int64_t heads_kv,
                       std::int64_t head_dim, Mask mask = {}) {
  return {
      .heads_q = heads_q, .heads_kv = heads_kv, .head_dim = head_dim, .dtype = dtype, .mask = mask};
}

Case make(AttentionProblem problem, std::vector<std::int64_t> q, std::vector<std::int64_t> kv,
          Style style = Style::contiguous) {
  Case c{.problem = problem, .style = style};
  return c.lengths(std::move(q), std::move(kv));
}

AttentionProblem with(AttentionProblem problem, Layout layout, bool seqused = false,
                      std::int64_t page_size = 0) {
  problem.layout = layout;
  problem.seqused_kv = seqused;
  problem.page_size = page_size;
  return problem;
}

std::vector<Named> dense_cases() {
  const Mask causal = Mask::causal();
  const Mask top_left = Mask::causal(MaskAlign::top_left);
  std::vector<Named> cases;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const std::string t = std::string(to_string(dtype)) + "_";
    cases.push_back({t + "square", make(heads(dtype, 2, 2, 64), {257}, {257})});
    cases.push_back({t + "causal", make(heads(dtype, 2, 1, 64, causal), {300}, {300})});
    cases.push_back({t + "causal_long_kv", make(heads(dtype, 2, 1, 32, causal), {70}, {1025})});
    // N4, I14: more queries than keys, aligned bottom-right: the first rows see nothing
    cases.push_back({t + "causal_short_kv", make(heads(dtype, 2, 2, 32, causal), {65}, {32})});
    cases.push_back({t + "top_left", make(heads(dtype, 2, 1, 40, top_left), {65}, {130})});
    cases.push_back({t + "top_left_short_kv", make(heads(dtype, 1, 1, 40, top_left), {130}, {65})});
    cases.push_back(
        {t + "window", make(heads(dtype, 2, 1, 64, Mask::window(100, 20)), {600}, {640})});
    cases.push_back(
        {t + "window_left_only", make(heads(dtype, 1, 1, 48, Mask::window(33, -1)), {140}, {150})});
    // I14: 48 of 129 rows see nothing
    cases.push_back(
        {t + "window_129_17", make(heads(dtype, 1, 1, 64, Mask::window(32, 64)), {129}, {17})});
    cases.push_back({t + "batch_gqa_mixed_strides",
                     make(heads(dtype, 6, 2, 72, causal), {130, 130}, {190, 190}, Style::mixed)});
    cases.push_back({t + "gaps", make(heads(dtype, 4, 2, 24), {33, 33}, {65, 65}, Style::gaps)});
    Case wide = make(heads(dtype, 3, 1, 24), {45}, {77});
    wide.problem.head_dim_v = 136;
    cases.push_back({t + "wide_v", wide});
    Case narrow = make(heads(dtype, 3, 3, 192, causal), {45}, {77}, Style::heads_first);
    narrow.problem.head_dim_v = 128;
    cases.push_back({t + "narrow_v", narrow});
    Case capped = make(heads(dtype, 2, 1, 64, causal), {129}, {129});
    capped.problem.softcap = 5;
    capped.sigma_q = 5;
    cases.push_back({t + "softcap", capped});
    Case scaled = make(heads(dtype, 2, 2, 80), {31}, {520});
    scaled.problem.softmax_scale = 0.5F;
    cases.push_back({t + "scale", scaled});
    // E: one long decode row and one tall block
    cases.push_back({t + "decode", make(heads(dtype, 8, 2, 128), {1, 1}, {1500, 1500})});
  }
  return cases;
}

std::vector<Named> length_cases() {
  const Mask causal = Mask::causal();
  std::vector<Named> cases;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::string t = std::string(to_string(dtype)) + "_";
    const std::vector<std::int64_t> q = {5, 0, 129, 1, 64};
    const std::vector<std::int64_t> kv = {70, 33, 128, 0, 63};
    cases.push_back(
        {t + "packed", make(with(heads(dtype, 4, 2, 64, causal), Layout::packed), q, kv)});
    cases.push_back(
        {t + "packed_gaps", make(with(heads(dtype, 2, 1, 33, Mask::window(20, 3)), Layout::packed),
                                 q, kv, Style::gaps)});
    cases.push_back(
        {t + "packed_seqused", make(with(heads(dtype, 2, 1, 64), Layout::packed, true), q, kv)});
    cases.push_back({t + "seqused", make(with(heads(dtype, 2, 1, 64, causal), Layout::dense, true),
                                         {65, 65, 65}, {130, 0, 65})});
    // N4: 65 queries, 32 keys in pages of 16, 32 heads: 33 empty rows
    cases.push_back(
        {t + "paged_causal_short_kv",
         make(with(heads(dtype, 32, 32, 16, causal), Layout::paged, true, 16), {65}, {32})});
    for (const std::int64_t page : {1, 4, 64, 256}) {
      cases.push_back({t + "paged_" + std::to_string(page),
                       make(with(heads(dtype, 4, 2, 64, causal), Layout::paged, true, page),
                            {17, 17, 17}, {200, 13, 0})});
    }
    // I9: empty segments at both ends and between; the lengths of the report by eight
    cases.push_back({t + "empty_segments", make(with(heads(dtype, 4, 1, 128), Layout::packed),
                                                {0, 151, 105, 0}, {317, 218, 105, 384})});
    // I12: decode with lengths 0, 17, 0, 64
    cases.push_back(
        {t + "decode_empty_lengths",
         make(with(heads(dtype, 8, 2, 64), Layout::dense, true), {1, 1, 1, 1}, {0, 17, 0, 64})});
  }
  return cases;
}

const std::map<std::string, Case>& all_cases() {
  static const std::map<std::string, Case> kCases = [] {
    std::map<std::string, Case> cases;
    for (const std::vector<Named>& list : {dense_cases(), length_cases()}) {
      for (const Named& named : list) {
        cases[named.name] = named.c;
      }
    }
    return cases;
  }();
  return kCases;
}

std::vector<std::string> case_names() {
  std::vector<std::string> names;
  for (const auto& [name, c] : all_cases()) {
    names.push_back(name);
  }
  return names;
}

/// Values and expectation of a case, computed once for all kernels.
struct Prepared {
  Values values;
  Expected expected;
};
const Prepared& prepared(const std::string& name) {
  static std::map<std::string, Prepared> cache;
  const auto found = cache.find(name);
  if (found != cache.end()) {
    return found->second;
  }
  const Case& c = all_cases().at(name);
  Prepared p;
  p.values = make_values(c);
  p.expected = expect_values(c, p.values);
  return cache.emplace(name, std::move(p)).first->second;
}

class ForwardCases : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(ForwardCases, MatchesFloat64) {
  const auto& [kernel, name] = GetParam();
  const Case& c = all_cases().at(name);
  RAFTER_SKIP_IF_REFUSED(c, kernel);
  const Prepared& p = prepared(name);
  const Output in_f32 = run_case(c, p.values, {.kernel = kernel});
  EXPECT_TRUE(close_to(in_f32, p.expected, c));
  const Output in_dtype = run_case(
      c, p.values,
      {.kernel = kernel, .threads = 2, .index_dtype = DType::i64, .problem_dtype_out = true});
  EXPECT_TRUE(close_to(in_dtype, p.expected, c));
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, ForwardCases,
                         ::testing::Combine(::testing::ValuesIn(cpu_kernels()),
                                            ::testing::ValuesIn(case_names())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param);
                         });

}  // namespace
}  // namespace rafter::testing
