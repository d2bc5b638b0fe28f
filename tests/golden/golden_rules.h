// The rules that turn an entry of golden.json into calls of the public API.
#pragma once

#include <functional>
#include <regex>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "golden/golden_entry.h"

namespace rafter::golden {

using Answer = std::variant<double, bool, std::string>;

/// Answers the entries whose id matches the regular expression (whole id). The first rule that
/// matches is the entry's.
struct Rule {
  Rule(const char* pattern, std::function<Answer(const Entry&)> function)
      : ids(pattern), regex(pattern), answer(std::move(function)) {}
  std::string ids;
  std::regex regex;
  std::function<Answer(const Entry&)> answer;
};

std::vector<Rule> attention_rules();
std::vector<Rule> model_rules();
std::vector<Rule> other_rules();

/// The value of a Result; a failed one ends the test with its message.
template <typename T>
T must(Result<T> result) {
  if (!result) {
    throw std::runtime_error(result.status().message());
  }
  return std::move(result).value();
}

}  // namespace rafter::golden
