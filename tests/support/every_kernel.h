// Test parameters: every CPU kernel that this machine has.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "support/attention_case.h"

namespace rafter::testing {

/// A claim about every CPU kernel of this build that the machine has; the parameter is its name.
class EveryKernelTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::string kernel() const { return GetParam(); }
  RunOptions options() const { return {.kernel = kernel()}; }
};

inline std::string kernel_test_name(const ::testing::TestParamInfo<std::string>& info) {
  return info.param;
}

}  // namespace rafter::testing

/// A kernel may refuse what a case asks for, by name; then the case is skipped visibly.
#define RAFTER_SKIP_IF_REFUSED(c, kernel)                                                       \
  if (const std::string refusal = ::rafter::testing::refusal_of(c, kernel); !refusal.empty()) { \
    EXPECT_NE(refusal.find(kernel), std::string::npos) << refusal;                              \
    GTEST_SKIP() << refusal;                                                                    \
  }
