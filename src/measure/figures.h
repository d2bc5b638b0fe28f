// Samples as figures of a device document.
#pragma once

#include <span>
#include <string>

#include "rafter/measure.h"

namespace rafter::measure {

/// A figure whose value is the quantile `at` of the samples and whose range is their 10th to 90th
/// percentile. `how` says what was done; `where` by whom ("4 threads"), or is empty. Errors: as
/// statistics().
Result<Figure> measured_figure(std::span<const double> samples, const char* unit, double at,
                               const std::string& how, const std::string& where);

/// Writes what is missing and noisy into the notes, and sets noisy and distrust.
void conclude(Probe& probe);

}  // namespace rafter::measure
