#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "rafter/measure.h"

namespace rafter {
namespace {

// Ranks (0-based) of the distribution-free 95% interval of the median: the widest pair of order
// statistics that leaves out at most 2.5% on each side, the count of samples below the median being
// binomial(n, 1/2). Fewer than 6 samples cannot reach 95%: the whole range is given.
std::pair<std::size_t, std::size_t> median_ranks(std::size_t n) {
  const double count = static_cast<double>(n);
  std::size_t low = 0;  // the largest rank with P(X <= low) at most 2.5%
  if (n > 500) {
    low = static_cast<std::size_t>(std::max(0.0, (count - 1.959964 * std::sqrt(count)) / 2 - 1));
  } else {
    double mass = std::pow(0.5, count);  // P(X = 0)
    double tail = mass;                  // P(X <= next)
    for (std::size_t next = 0; tail <= 0.025;) {
      low = next++;
      mass *= (count - static_cast<double>(next) + 1) / static_cast<double>(next);
      tail += mass;
    }
  }
  return {low, n - 1 - low};
}

/// None is NaN or infinite, and there is one at least.
Statistics statistics_of(std::vector<double> sorted) {
  std::sort(sorted.begin(), sorted.end());
  Statistics s;
  s.n = static_cast<std::int64_t>(sorted.size());
  s.median = quantile(sorted, 0.5);
  s.p10 = quantile(sorted, 0.1);
  s.p90 = quantile(sorted, 0.9);
  s.q1 = quantile(sorted, 0.25);
  s.q3 = quantile(sorted, 0.75);
  s.min = sorted.front();
  s.max = sorted.back();
  const auto [low, high] = median_ranks(sorted.size());
  s.median_low = sorted[low];
  s.median_high = sorted[high];
  s.relative_deviation = s.median > 0 ? (s.q3 - s.q1) / 1.349 / s.median : 0;
  return s;
}

/// device_error unless there are samples, all finite and from `least` up.
Status check_samples(std::span<const double> samples, double least, const char* allowed) {
  if (samples.empty()) {
    return Status::device_error("samples", "none", "at least one is needed");
  }
  for (std::size_t i = 0; i < samples.size(); ++i) {
    if (!std::isfinite(samples[i]) || samples[i] < least) {
      return Status::device_error(
          "samples", std::to_string(samples[i]) + " as sample " + std::to_string(i), allowed);
    }
  }
  return Status::ok();
}

}  // namespace

double quantile(std::span<const double> sorted, double at) {
  if (sorted.empty()) {
    return 0;
  }
  const double position = at * static_cast<double>(sorted.size() - 1);
  const auto index = static_cast<std::size_t>(position);
  if (index + 1 >= sorted.size()) {
    return sorted.back();
  }
  const double fraction = position - static_cast<double>(index);
  return sorted[index] + fraction * (sorted[index + 1] - sorted[index]);
}

Result<Statistics> statistics(std::span<const double> samples) {
  if (Status s = check_samples(samples, 0, "finite values from 0 up are expected"); !s) {
    return s;
  }
  return statistics_of({samples.begin(), samples.end()});
}

Result<Statistics> paired_differences(std::span<const double> from, std::span<const double> less) {
  if (from.size() != less.size()) {
    return Status::device_error("samples",
                                std::to_string(from.size()) + " and " + std::to_string(less.size()),
                                "pairs are needed");
  }
  std::vector<double> differences;
  for (std::size_t i = 0; i < from.size(); ++i) {
    differences.push_back(from[i] - less[i]);
  }
  constexpr double kLeast = std::numeric_limits<double>::lowest();
  if (Status s = check_samples(differences, kLeast, "finite values are expected"); !s) {
    return s;
  }
  return statistics_of(std::move(differences));
}

}  // namespace rafter
