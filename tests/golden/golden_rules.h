// The rules that turn an entry of golden.json into calls of the public API.
#pragma once

#include <vector>

#include "golden/golden_entry.h"

namespace rafter::golden {

using Rule = RuleOf<Entry>;

std::vector<Rule> attention_rules();
std::vector<Rule> model_rules();
std::vector<Rule> other_rules();

}  // namespace rafter::golden
