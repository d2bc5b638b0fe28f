// What the probes of a CPU and of a CUDA device share: taking figures down, and the parts of a run.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rafter/measure.h"

namespace rafter::measure {

/// Samples of one figure; its value is their quantile `at`: 0.9 for a rate's ceiling, 0.5 for a
/// cost.
struct Samples {
  std::string key;
  std::span<const double> values;
  const char* unit;
  double at;
  std::string how;
};

/// What a probe carries from step to step.
struct Prober {
  const ProbeOptions& options;
  std::string where;  // who measures ("4 threads"), or empty
  Probe probe;

  void step(std::string_view what) const;
  void missing(std::string key, std::string reason);
  void put(const std::string& key, double value, const char* unit, FigureKind kind,
           std::string source);
  Status measured(const Samples& samples);
  /// In this order; the first error wins.
  Status measured(std::initializer_list<Samples> all);
};

/// The rates of a run's first seconds after a pause, and of its second half, which a machine that
/// lowers its clock under load decides; five at least.
struct BurstAndRest {
  std::vector<double> burst, sustained;
};
BurstAndRest parts_of(std::span<const double> rates, std::span<const double> starts, double burst_s,
                      double run_s);

}  // namespace rafter::measure
