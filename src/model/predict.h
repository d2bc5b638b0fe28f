// What predictions of kernels and of whole models share.
#pragma once

#include <string>

#include "rafter/roofline.h"

namespace rafter::model {

std::string verdict_words(VerdictWords words, Wall wall, bool near_ridge, bool ambiguous);

/// Whether an intensity lies within a factor dead_band of the ridge; never with a band of 1.
bool within_band(double intensity, double ridge, double dead_band);

/// Seconds of launching, NaN where the device has no figure; the reason when not counted or NaN.
struct Dispatch {
  double seconds = 0;
  std::string reason;
};
Dispatch dispatch_cost(double launches, const DeviceSpec& device, const Convention& convention);

/// Seconds that QKᵀ takes beyond its bytes at `bytes_per_s` where scores land: a library's product
/// with a short k reaches only bandwidth_scores_bytes_per_s. 0 where the device lacks the figure.
double landing_seconds(const Cost& cost, const DeviceSpec& device, double bytes_per_s);

/// Seconds of a kernel that does both products of attention and the softmax between them, at the
/// rate that the device was measured to do all three on operands in place, or at that of products
/// where it is less; 0 where it lacks the figure, and for others.
double fused_seconds(const Cost& cost, const DeviceSpec& device, double peak_flop_per_s);

}  // namespace rafter::model
