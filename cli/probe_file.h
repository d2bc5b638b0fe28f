// This machine's probe file, and how a spec's figures are shown. Shared by probe and report.
#pragma once

#include <string>

#include "cli/output.h"
#include "rafter/measure.h"

namespace rafter::cli {

/// Writes the spec as a device file, making its folder when that is missing.
void write_probe(const DeviceSpec& spec, const std::string& path);
/// One row per figure; the table has value and spread with their units, JSON and CSV SI values.
Json figure_rows(const DeviceSpec& spec, Format format);
/// (high − low) / high of a measured figure; 0 of others.
double figure_spread(const Figure& figure);

}  // namespace rafter::cli
