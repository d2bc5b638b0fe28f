// Launches in clusters: CTAs that run at once on SMs beside each other.
#pragma once

#include "hw/cuda/launch.h"

namespace rafter::cuda {

/// As launch_early() (early.h), in clusters of so many blocks, which divide shape.blocks; up to 8
/// are to be had on every sm_90 device.
Status launch_in_clusters(const void* kernel, const LaunchShape& shape, unsigned cluster,
                          void** arguments);

}  // namespace rafter::cuda
