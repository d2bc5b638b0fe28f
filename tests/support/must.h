// What a call of the library gives, a failure of the test where it gives an error.
#pragma once

#include <gtest/gtest.h>

#include <utility>

#include "rafter/status.h"

namespace rafter::testing {

inline void must(const Status& status) { EXPECT_TRUE(status) << status.message(); }

template <typename T>
T must(Result<T> result) {
  EXPECT_TRUE(result) << result.status().message();
  return std::move(result).value();
}

}  // namespace rafter::testing
