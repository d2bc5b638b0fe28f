// The rules that turn an entry of golden.json into commands and keys of their answers.
#pragma once

#include <cmath>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cli/golden_entry.h"

namespace rafter::test {

using golden::Answer;
using GoldenRule = golden::RuleOf<Entry>;

std::vector<GoldenRule> attention_rules();
std::vector<GoldenRule> model_rules();
std::vector<GoldenRule> other_rules();

/// A number of an answer; ends the test when it is not one.
inline double figure(const Json& document, const char* key) {
  if (!document.contains(key) || !document.at(key).is_number()) {
    throw std::runtime_error(std::string("no number under ") + key + " in " + document.dump());
  }
  return document.at(key).get<double>();
}

/// Answers with that key of a document.
inline GoldenRule number_of(std::string ids, const Json& (*document)(const Entry&),
                            const char* key) {
  return {std::move(ids), [=](const Entry& e) -> Answer { return figure(document(e), key); }};
}

inline Flags with(Flags flags, const Flags& changes) {
  for (const auto& [flag, value] : changes) {
    flags[flag] = value;
  }
  return flags;
}
inline Flags without(Flags flags, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    flags.erase(name);
  }
  return flags;
}

inline bool increasing(const std::vector<double>& list) {
  for (std::size_t i = 1; i < list.size(); ++i) {
    if (!(list[i] > list[i - 1])) {
      return false;
    }
  }
  return true;
}
/// Equal up to the rounding of a few operations.
inline bool close(double a, double b) { return std::abs(a - b) <= 1e-12 * std::abs(b); }

}  // namespace rafter::test
