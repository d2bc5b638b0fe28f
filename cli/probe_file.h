// This machine's probe file, and how a spec's figures are shown. Shared by probe and report.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/files.h"
#include "cli/output.h"
#include "rafter/measure.h"

namespace rafter::cli {

/// The file that a probe goes to, its folder made when that is missing: opened before measuring, so
/// that a place that cannot be written is refused at once.
OutputFile open_probe_file(const std::string& path);
/// One row per figure; the table has value and spread with their units, JSON and CSV SI values.
Json figure_rows(const DeviceSpec& spec, Format format);
/// (high − low) / high of a measured figure; 0 of others.
double figure_spread(const Figure& figure);

/// This machine as measured figures compare with it.
struct ThisMachine {
  Device device;  // what runs on it
  DeviceSpec spec;
  std::string source;  // "probe file PATH of DATE", or "probed just now"
  bool fresh = false;  // probed just now
  std::vector<std::string> noisy;
  std::string distrust;
  std::vector<MissingFigure> missing;
  std::vector<SweepPoint> sweep;
};
/// What --device cpu|cuda|FILE.json of bench and report says: which device, and its ceilings. The
/// spec of the file, whose kind is the device; else the device's probe file, when it was made on
/// this CPU with as many threads, or on this GPU, within the last day; else a quick probe, which is
/// not kept. Ends the command with no_hardware where the device is not here.
ThisMachine this_machine(const std::string& device, int threads, bool reprobe,
                         std::string_view verb);

}  // namespace rafter::cli
