// Hardware counters of the current device by CUPTI. The library is opened at the first use: a build
// with CUDA loads on a machine without it.
#pragma once

#include <functional>

#include "rafter/status.h"

namespace rafter::cuda {

/// Bytes that crossed the boundary of a device's memory.
struct DramBytes {
  double read = 0, written = 0;
};

/// What `work` moves, which queues on streams of the current device; nothing else may run there.
/// It is done once, in one pass of the counters. Lines that are dirty in the L2 at its end are not
/// yet written. Errors: those of the work; device_error says which step CUPTI refused, and what to
/// do where it is a permission.
Result<DramBytes> count_dram_bytes(const std::function<Status()>& work);

}  // namespace rafter::cuda
