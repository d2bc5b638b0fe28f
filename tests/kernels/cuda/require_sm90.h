// What every test of kernels for sm_90 begins with.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "hw/cuda/launch.h"
#include "rafter/status.h"

#define RAFTER_SKIP_WITHOUT_SM90()                                                 \
  if (const std::string reason = rafter::cuda::why_not_sm90(0); !reason.empty()) { \
    GTEST_SKIP() << "no sm_90 device: " << reason;                                 \
  }

namespace rafter::testing {

inline void must(const Status& status) { ASSERT_TRUE(status) << status.message(); }

}  // namespace rafter::testing
