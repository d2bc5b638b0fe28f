// Test parameters: every CPU kernel that this machine has.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "rafter/kernels.h"
#include "support/attention_case.h"

namespace rafter::testing {

/// A claim about every CPU kernel of this build that the machine has; the parameter is its name.
class EveryKernelTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::string kernel() const { return GetParam(); }
  RunOptions options() const { return {.kernel = kernel()}; }
  /// Of these dtypes, those that the kernel is for; never none of f32 and bf16.
  std::vector<DType> taken(std::initializer_list<DType> dtypes) const {
    std::vector<DType> out;
    for (const KernelInfo& info : list_kernels()) {
      for (const DType dtype : dtypes) {
        if (info.name == kernel() &&
            std::find(info.dtypes.begin(), info.dtypes.end(), dtype) != info.dtypes.end()) {
          out.push_back(dtype);
        }
      }
    }
    return out;
  }
  /// f32, or bf16 where the kernel is not for f32.
  DType any_dtype() const { return taken({DType::f32, DType::bf16}).at(0); }
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
