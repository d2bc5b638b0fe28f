// Every figure of the two published derivations comes out of the public API.
#include <gtest/gtest.h>

#include "golden/golden_rules.h"

namespace rafter::golden {
namespace {

const std::vector<Rule>& rules() {
  static const std::vector<Rule> all = [] {
    std::vector<Rule> list = attention_rules();
    for (const auto& more : {model_rules(), other_rules()}) {
      list.insert(list.end(), more.begin(), more.end());
    }
    return list;
  }();
  return all;
}

class EveryGoldenEntry : public testing::TestWithParam<Entry> {};

TEST_P(EveryGoldenEntry, ComesOutOfTheApi) { expect_answer(GetParam(), rules()); }

INSTANTIATE_TEST_SUITE_P(Golden, EveryGoldenEntry, testing::ValuesIn(load_entries<Entry>()),
                         case_name<Entry>);

TEST(GoldenRules, EachIsUsedAndNoEntryIsMissing) { expect_rules_and_entries_complete(rules()); }

}  // namespace
}  // namespace rafter::golden
