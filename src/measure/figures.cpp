#include "measure/figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace rafter::measure {

Result<Figure> measured_figure(std::span<const double> samples, const char* unit, double at,
                               const std::string& how, const std::string& where) {
  const Result<Statistics> stats = statistics(samples);
  if (!stats) {
    return stats.status();
  }
  std::vector<double> sorted(samples.begin(), samples.end());
  std::sort(sorted.begin(), sorted.end());
  Figure figure;
  figure.value = quantile(sorted, at);
  figure.unit = unit;
  figure.kind = FigureKind::measured;
  figure.source =
      fmt::format("{}; {} of {} samples{}{}", how, at == 0.5 ? "median" : "90th percentile",
                  stats->n, where.empty() ? "" : ", ", where);
  figure.low = stats->p10;
  figure.high = stats->p90;
  figure.samples = stats->n;
  return figure;
}

void conclude(Probe& probe) {
  for (const MissingFigure& missing : probe.missing) {
    probe.spec.notes["missing_" + missing.key] = missing.reason;
  }
  probe.noisy = noisy_figures(probe.spec);
  std::string names;
  for (const std::string& key : probe.noisy) {
    names += (names.empty() ? "" : ", ") + key;
  }
  if (!names.empty()) {
    probe.spec.notes["noisy"] = names;
  }
  probe.distrust = distrust_of(probe.spec);
}

}  // namespace rafter::measure
