#include "measure/prober.h"

#include <utility>

#include "measure/figures.h"

namespace rafter::measure {

void Prober::step(std::string_view what) const {
  if (options.progress) {
    options.progress(what);
  }
}

void Prober::missing(std::string key, std::string reason) {
  probe.missing.push_back({std::move(key), std::move(reason)});
}

void Prober::put(const std::string& key, double value, const char* unit, FigureKind kind,
                 std::string source) {
  Figure figure;
  figure.value = value;
  figure.unit = unit;
  figure.kind = kind;
  figure.source = std::move(source);
  probe.spec.figures[key] = figure;
}

Status Prober::measured(const Samples& samples) {
  const Result<Figure> figure =
      measured_figure(samples.values, samples.unit, samples.at, samples.how, where);
  if (!figure) {
    return figure.status();
  }
  probe.spec.figures[samples.key] = *figure;
  return Status::ok();
}

Status Prober::measured(std::initializer_list<Samples> all) {
  for (const Samples& samples : all) {
    if (Status status = measured(samples); !status) {
      return status;
    }
  }
  return Status::ok();
}

BurstAndRest parts_of(std::span<const double> rates, std::span<const double> starts, double burst_s,
                      double run_s) {
  BurstAndRest parts;
  for (std::size_t i = 0; i < rates.size(); ++i) {
    if (starts[i] < burst_s || parts.burst.size() < 5) {
      parts.burst.push_back(rates[i]);
    }
    if (starts[i] > run_s / 2 || i + 5 >= rates.size()) {
      parts.sustained.push_back(rates[i]);
    }
  }
  return parts;
}

}  // namespace rafter::measure
