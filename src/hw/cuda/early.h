// Launches that overlap with the kernel ahead of them: programmatic dependent launch.
#pragma once

#include "hw/cuda/launch.h"

namespace rafter::cuda {

/// As launch(), but the kernel may begin before the one ahead of it on the stream has ended; in a
/// graph the edge between the two says so. It calls wait_for_earlier_grids() (early.cuh).
Status launch_early(const void* kernel, const LaunchShape& shape, void** arguments);

}  // namespace rafter::cuda
