// Every figure of the two published derivations comes out of the command line: golden.json's
// `computed`, and the printed `value` within its rounding where the two agree.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <regex>
#include <set>

#include "cli/golden_rules.h"

namespace rafter::test {
namespace {

constexpr double kTolerance = 1e-9;

const std::vector<GoldenRule>& rules() {
  static const std::vector<GoldenRule> all = [] {
    std::vector<GoldenRule> list = attention_rules();
    for (const auto& more : {model_rules(), other_rules()}) {
      list.insert(list.end(), more.begin(), more.end());
    }
    return list;
  }();
  return all;
}

const GoldenRule* rule_for(const std::string& id) {
  for (const GoldenRule& rule : rules()) {
    if (std::regex_match(id, std::regex(rule.ids))) {
      return &rule;
    }
  }
  return nullptr;
}

class EveryGoldenEntry : public testing::TestWithParam<Entry> {};

TEST_P(EveryGoldenEntry, ComesOutOfTheCommandLine) {
  const Entry& entry = GetParam();
  const GoldenRule* rule = rule_for(entry.id());
  ASSERT_NE(rule, nullptr) << "no rule maps " << entry.id();
  Answer answer;
  ASSERT_NO_THROW(answer = rule->answer(entry)) << entry.id();
  const Json& computed = entry.field("computed");
  if (computed.is_boolean()) {
    ASSERT_TRUE(std::holds_alternative<bool>(answer));
    EXPECT_EQ(std::get<bool>(answer), computed.get<bool>());
    return;
  }
  if (computed.is_string()) {
    ASSERT_TRUE(std::holds_alternative<std::string>(answer));
    EXPECT_EQ(std::get<std::string>(answer), computed.get<std::string>());
    return;
  }
  ASSERT_TRUE(std::holds_alternative<double>(answer));
  const double got = std::get<double>(answer);
  const double wanted = computed.get<double>();
  EXPECT_NEAR(got, wanted, kTolerance * std::abs(wanted));
  if (entry.field("agrees").get<bool>()) {
    const double printed = entry.field("value").get<double>();
    const double rounding = entry.field("rel_tol").get<double>() + kTolerance;
    EXPECT_NEAR(got, printed, rounding * std::abs(printed));
  }
}

std::string case_name(const testing::TestParamInfo<Entry>& info) {
  std::string name = info.param.id();
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Golden, EveryGoldenEntry, testing::ValuesIn(load_entries()), case_name);

TEST(GoldenRules, EachIsUsedAndNoEntryIsMissing) {
  const std::vector<Entry> entries = load_entries();
  EXPECT_EQ(entries.size(), 328U);
  std::set<const GoldenRule*> used;
  for (const Entry& entry : entries) {
    const GoldenRule* rule = rule_for(entry.id());
    EXPECT_NE(rule, nullptr) << entry.id();
    used.insert(rule);
  }
  for (const GoldenRule& rule : rules()) {
    EXPECT_TRUE(used.contains(&rule)) << "no entry left for the rule of " << rule.ids;
  }
}

}  // namespace
}  // namespace rafter::test
