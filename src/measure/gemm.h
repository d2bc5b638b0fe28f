// The library GEMM on every core at once.
#pragma once

#include <cstdint>

#include "measure/free_run.h"
#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter::measure {

/// FLOP/s of n³ products on random data, every thread multiplying by itself for `time_s`. Errors:
/// as time_gemm().
Result<FreeRun> gemm_rates(std::int64_t n, DType dtype, int threads, double time_s);

}  // namespace rafter::measure
