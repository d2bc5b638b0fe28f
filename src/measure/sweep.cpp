#include "measure/sweep.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "measure/free_run.h"
#include "measure/loops.h"

namespace rafter {
namespace {

double median_of(std::span<const double> values) {
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  return quantile(sorted, 0.5);
}

bool level_within(std::span<const double> run, double tolerance) {
  const double middle = median_of(run);
  return std::all_of(run.begin(), run.end(),
                     [&](double rate) { return std::abs(rate - middle) <= tolerance * middle; });
}

}  // namespace

std::vector<Plateau> find_plateaus(std::span<const double> rates, const PlateauRule& rule) {
  std::vector<Plateau> plateaus;
  std::size_t first = 0;
  while (first + rule.min_points <= rates.size()) {
    std::size_t count = rule.min_points;
    if (!level_within(rates.subspan(first, count), rule.tolerance)) {
      ++first;
      continue;
    }
    while (first + count < rates.size() &&
           level_within(rates.subspan(first, count + 1), rule.tolerance)) {
      ++count;
    }
    const double rate = median_of(rates.subspan(first, count));
    const std::size_t last = first + count - 1;
    if (!plateaus.empty() && rate > (1 - rule.step) * plateaus.back().rate) {
      plateaus.back().last = last;
    } else {
      plateaus.push_back({first, last, rate});
    }
    first = last + 1;
  }
  // The largest sizes are few: two that agree are enough to call them a level.
  const std::size_t n = rates.size();
  if (n >= 2 && (plateaus.empty() || plateaus.back().last + 2 < n) &&
      level_within(rates.subspan(n - 2), rule.tolerance)) {
    plateaus.push_back({n - 2, n - 1, median_of(rates.subspan(n - 2))});
  }
  return plateaus;
}

namespace measure {
namespace {

struct FreeDeleter {
  void operator()(float* p) const { std::free(p); }
};
// Caches of one core end here: no core today has more than 128 KiB of L1 or 3 MiB of L2 to itself.
constexpr double kLargestL1 = 128.0 * 1024, kLargestPrivate = 3.0 * 1024 * 1024;

using Buffer = std::unique_ptr<float[], FreeDeleter>;

enum Kind : std::size_t { kRead, kWrite, kCopy };

// One pass of one thread over its working set.
void pass(Kind kind, float* buffer, std::size_t floats, volatile float* sink) {
  switch (kind) {
    case kRead:
      *sink = loop_read(buffer, floats);
      break;
    case kWrite:
      loop_write(buffer, floats, 1.0F);
      break;
    case kCopy:  // half is the source and half the target: the working set stays the same
      loop_copy(buffer, buffer + floats / 2, floats / 2);
      break;
  }
}

std::size_t floats_of(double bytes) {
  const std::size_t step = 2 * kLoopFloats;  // both halves of a copy are whole steps
  return std::max<std::size_t>(1, static_cast<std::size_t>(bytes / 4) / step) * step;
}

}  // namespace

std::vector<double> sweep_sizes(double largest, int threads, bool quick) {
  std::vector<double> sizes;
  const double ratio = quick ? 2.0 : std::sqrt(2.0);
  for (int i = 0;; ++i) {
    const double bytes = 4096.0 * std::pow(ratio, i);
    if (bytes > 1.001 * largest / threads) {
      return sizes;
    }
    sizes.push_back(4.0 * static_cast<double>(floats_of(bytes)));
  }
}

Result<std::vector<SweepPoint>> run_sweep(const SweepOptions& options) {
  const std::size_t largest = floats_of(options.sizes.back());
  std::vector<Buffer> buffers;
  for (int i = 0; i < options.threads; ++i) {
    buffers.emplace_back(
        static_cast<float*>(std::aligned_alloc(4096, (largest * 4 + 4095) / 4096 * 4096)));
    if (!buffers.back()) {
      return Status::device_error("memory",
                                  std::to_string(largest * 4) + " bytes a thread refused");
    }
  }
#pragma omp parallel num_threads(options.threads)
  {  // each thread touches its own pages first
    loop_write(buffers[static_cast<std::size_t>(omp_get_thread_num())].get(), largest, 1.0F);
  }
  std::vector<SweepPoint> sweep;
  for (double size : options.sizes) {
    SweepPoint point;
    point.bytes_per_thread = size;
    Statistics* stats[] = {&point.read, &point.write, &point.copy};
    const std::size_t floats = floats_of(size);
    for (Kind kind : {kRead, kWrite, kCopy}) {
      const FreeRun run = free_run(
          options.threads, options.samples, options.sample_s, options.limit_s,
          size <= kLargestPrivate ? Resource::own : Resource::shared,
          [&](int thread, std::int64_t passes) {
            volatile float sink = 0;
            for (std::int64_t i = 0; i < passes; ++i) {
              pass(kind, buffers[static_cast<std::size_t>(thread)].get(), floats, &sink);
            }
            return static_cast<double>(floats * sizeof(float)) * static_cast<double>(passes);
          });
      point.samples[kind] = run.rates;
      Result<Statistics> result = statistics(run.rates);
      if (!result) {
        return result.status();
      }
      *stats[kind] = *result;
    }
    sweep.push_back(std::move(point));
  }
  return sweep;
}

std::vector<Level> levels_of(const std::vector<SweepPoint>& sweep, const PlateauRule& rule) {
  std::vector<double> rates;
  for (const SweepPoint& point : sweep) {
    rates.push_back(point.read.p90);
  }
  std::vector<Level> levels;
  for (const Plateau& plateau : find_plateaus(rates, rule)) {
    Level level;
    level.bytes_per_thread = sweep[plateau.last].bytes_per_thread;
    level.name = plateau.last + 1 == sweep.size()            ? "memory"
                 : level.bytes_per_thread <= kLargestL1      ? "l1"
                 : level.bytes_per_thread <= kLargestPrivate ? "l2"
                                                             : "l3";
    if (!levels.empty() && levels.back().name == level.name) {
      continue;
    }
    std::vector<double>* all[] = {&level.read, &level.write, &level.copy};
    for (std::size_t i = plateau.first; i <= plateau.last; ++i) {
      for (Kind kind : {kRead, kWrite, kCopy}) {
        all[kind]->insert(all[kind]->end(), sweep[i].samples[kind].begin(),
                          sweep[i].samples[kind].end());
      }
    }
    levels.push_back(std::move(level));
  }
  return levels;
}

}  // namespace measure
}  // namespace rafter
