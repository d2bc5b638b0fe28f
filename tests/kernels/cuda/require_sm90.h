// What every test of kernels for sm_90 begins with.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "hw/cuda/launch.h"
#include "support/must.h"

#define RAFTER_SKIP_WITHOUT_SM90()                                                 \
  if (const std::string reason = rafter::cuda::why_not_sm90(0); !reason.empty()) { \
    GTEST_SKIP() << "no sm_90 device: " << reason;                                 \
  }
