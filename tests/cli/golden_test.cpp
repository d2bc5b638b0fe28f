// Every figure of the two published derivations comes out of the command line.
#include <gtest/gtest.h>

#include "cli/golden_rules.h"

namespace rafter::test {
namespace {

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

class EveryGoldenEntry : public testing::TestWithParam<Entry> {};

TEST_P(EveryGoldenEntry, ComesOutOfTheCommandLine) { golden::expect_answer(GetParam(), rules()); }

INSTANTIATE_TEST_SUITE_P(Golden, EveryGoldenEntry, testing::ValuesIn(golden::load_entries<Entry>()),
                         golden::case_name<Entry>);

TEST(GoldenRules, EachIsUsedAndNoEntryIsMissing) {
  golden::expect_rules_and_entries_complete(rules());
}

}  // namespace
}  // namespace rafter::test
