// What the tests against golden.json share, through the API and through the command line: the
// fields of an entry, the rules that answer entries, and what an answer is held to.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace rafter::golden {

using Json = nlohmann::ordered_json;

/// An entry as the file has it. Nothing here knows an entry's answer.
class EntryFields {
 public:
  explicit EntryFields(Json entry) : entry_(std::move(entry)) {}

  std::string id() const { return entry_.at("id").get<std::string>(); }
  const Json& field(const char* name) const { return entry_.at(name); }
  bool has(const char* input) const { return entry_.at("inputs").contains(input); }
  const Json& input(const char* name) const { return entry_.at("inputs").at(name); }
  double number(const char* name) const { return input(name).get<double>(); }
  double number_or(const char* name, double fallback) const {
    return has(name) ? number(name) : fallback;
  }
  std::int64_t whole_or(const char* name, std::int64_t fallback) const {
    return has(name) ? input(name).get<std::int64_t>() : fallback;
  }
  std::vector<double> values() const { return input("values").get<std::vector<double>>(); }

  /// x- entries give one source's counting on the other's device: the softmax says whose it is.
  bool counts_as_solution() const {
    return id().starts_with("s-") ||
           (id().starts_with("x-") && number_or("softmax_flops_per_element", 0) > 0);
  }

 private:
  Json entry_;
};

/// How a failing test names its entry.
template <std::derived_from<EntryFields> Entry>
void PrintTo(const Entry& entry, std::ostream* out) {
  *out << entry.id();
}

/// All entries of tests/golden/golden.json.
template <typename Entry>
std::vector<Entry> load_entries() {
  std::ifstream file(std::string(RAFTER_SOURCE_DIR) + "/tests/golden/golden.json");
  const Json document = Json::parse(file);
  std::vector<Entry> entries;
  for (const Json& each : document) {
    entries.emplace_back(each);
  }
  return entries;
}

template <typename Entry>
std::string case_name(const ::testing::TestParamInfo<Entry>& info) {
  std::string name = info.param.id();
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

using Answer = std::variant<double, bool, std::string>;

/// Answers the entries whose id matches the regular expression (whole id).
template <typename Entry>
struct RuleOf {
  RuleOf(std::string pattern, std::function<Answer(const Entry&)> function)
      : ids(std::move(pattern)), regex(ids), answer(std::move(function)) {}
  std::string ids;
  std::regex regex;
  std::function<Answer(const Entry&)> answer;
};

/// The first rule that matches is the entry's; null: none does.
template <typename Entry>
const RuleOf<Entry>* rule_for(const Entry& entry, const std::vector<RuleOf<Entry>>& rules) {
  const auto found = std::find_if(rules.begin(), rules.end(), [&](const RuleOf<Entry>& rule) {
    return std::regex_match(entry.id(), rule.regex);
  });
  return found == rules.end() ? nullptr : &*found;
}

/// The answer is the entry's `computed`, and the printed `value` within its rounding where the two
/// agree.
template <typename Entry>
void expect_answer(const Entry& entry, const std::vector<RuleOf<Entry>>& rules) {
  constexpr double kTolerance = 1e-9;
  const RuleOf<Entry>* rule = rule_for(entry, rules);
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
  if (entry.field("agrees").template get<bool>()) {
    const double printed = entry.field("value").template get<double>();
    const double rounding = entry.field("rel_tol").template get<double>() + kTolerance;
    EXPECT_NEAR(got, printed, rounding * std::abs(printed));
  }
}

template <typename Entry>
void expect_rules_and_entries_complete(const std::vector<RuleOf<Entry>>& rules) {
  const std::vector<Entry> entries = load_entries<Entry>();
  EXPECT_EQ(entries.size(), 328U);
  std::set<const RuleOf<Entry>*> used;
  for (const Entry& entry : entries) {
    const RuleOf<Entry>* rule = rule_for(entry, rules);
    EXPECT_NE(rule, nullptr) << "no rule maps " << entry.id();
    used.insert(rule);
  }
  for (const RuleOf<Entry>& rule : rules) {
    EXPECT_TRUE(used.contains(&rule)) << "no entry left for the rule of " << rule.ids;
  }
}

}  // namespace rafter::golden
