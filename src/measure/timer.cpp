#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>

#include "rafter/measure.h"

namespace rafter {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Reads a buffer of its own from end to end: evicts without leaving dirty lines, whose write-back
// would compete with the next sample.
class CacheFlush {
 public:
  explicit CacheFlush(double bytes) : lines_(static_cast<std::size_t>(bytes / 8), 1) {}
  void run() {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < lines_.size(); i += 8) {
      sum += lines_[i];
    }
    sink_.store(sum, std::memory_order_relaxed);
  }

 private:
  std::vector<std::uint64_t> lines_;
  std::atomic<std::uint64_t> sink_ = 0;
};

// Samples of one candidate, and whether they suffice.
class Sampler {
 public:
  Sampler(const TimedWork& work, const StopRule& rule) : work_(work), rule_(rule) {}

  // One untimed call; then, where a call is short, as many a sample as reach min_sample_s.
  Status warm_up() {
    for (;;) {
      const Result<double> timed = work_(calls_);
      if (!timed) {
        return timed.status();
      }
      const double spent = *timed;
      if (rule_.flush_bytes > 0 || spent >= rule_.min_sample_s ||
          calls_ >= (std::int64_t{1} << 30)) {
        return Status::ok();
      }
      const double factor = spent > 0 ? 1.2 * rule_.min_sample_s / spent : 16;
      calls_ = std::max(calls_ + 1, static_cast<std::int64_t>(static_cast<double>(calls_) *
                                                              std::min(16.0, factor)));
    }
  }

  Status sample() {
    const Result<double> timed = work_(calls_);
    if (!timed) {
      return timed.status();
    }
    const double spent = *timed;
    total_s_ += spent;
    samples_.push_back(spent / static_cast<double>(calls_));
    return Status::ok();
  }

  // Asked after each sample; remembers how the deviation moves.
  bool done() {
    const auto n = static_cast<std::int64_t>(samples_.size());
    if (total_s_ >= rule_.max_time_s && n >= 1) {
      stop_ = Stop::time_up;
      return true;
    }
    if (n < rule_.min_samples || total_s_ < rule_.min_time_s) {
      return false;
    }
    std::vector<double> sorted = samples_;
    std::sort(sorted.begin(), sorted.end());
    const double median = quantile(sorted, 0.5);
    const double deviation =
        median > 0 ? (quantile(sorted, 0.75) - quantile(sorted, 0.25)) / 1.349 / median : 0;
    deviations_.push_back(deviation);
    if (deviation < rule_.relative_deviation) {
      stop_ = Stop::precise;
      return true;
    }
    if (deviations_.size() >= kSettledWindow) {
      const auto [low, high] =
          std::minmax_element(deviations_.end() - kSettledWindow, deviations_.end());
      if (*high - *low < kSettledRange * *high) {
        stop_ = Stop::settled;
        return true;
      }
    }
    return false;
  }

  bool out_of_time() const { return total_s_ >= rule_.max_time_s; }

  Result<Timing> result() const {
    Result<Statistics> stats = statistics(samples_);
    if (!stats) {
      return stats.status();
    }
    return Timing{*stats, calls_, stop_};
  }

 private:
  // The deviation has settled when it stayed within a tenth of itself over so many samples.
  static constexpr std::ptrdiff_t kSettledWindow = 16;
  static constexpr double kSettledRange = 0.1;

  const TimedWork& work_;
  const StopRule& rule_;
  std::int64_t calls_ = 1;
  double total_s_ = 0;
  std::vector<double> samples_, deviations_;
  Stop stop_ = Stop::time_up;
};

}  // namespace

const char* to_string(Stop stop) {
  switch (stop) {
    case Stop::precise:
      return "precise";
    case Stop::settled:
      return "settled";
    case Stop::time_up:
      return "time up";
  }
  return "unknown";
}

Result<std::vector<Timing>> time_alternating(std::span<const Work> candidates,
                                             const StopRule& rule) {
  CacheFlush flush(rule.flush_bytes);
  std::vector<TimedWork> timed;
  timed.reserve(candidates.size());
  for (const Work& work : candidates) {
    timed.emplace_back([&work, &flush, &rule](std::int64_t calls) -> Result<double> {
      if (rule.flush_bytes > 0) {
        flush.run();
      }
      const Clock::time_point start = Clock::now();
      for (std::int64_t i = 0; i < calls; ++i) {
        if (Status status = work(); !status) {
          return status;
        }
      }
      return seconds_since(start);
    });
  }
  return time_alternating(std::span<const TimedWork>(timed), rule);
}

Result<std::vector<Timing>> time_alternating(std::span<const TimedWork> candidates,
                                             const StopRule& rule) {
  std::vector<Sampler> samplers;
  samplers.reserve(candidates.size());
  for (const TimedWork& work : candidates) {
    samplers.emplace_back(work, rule);
    if (Status status = samplers.back().warm_up(); !status) {
      return status;
    }
  }
  std::vector<bool> done(candidates.size(), false);
  while (std::find(done.begin(), done.end(), false) != done.end()) {
    for (std::size_t i = 0; i < samplers.size(); ++i) {
      if (done[i] && samplers[i].out_of_time()) {
        continue;
      }
      if (Status status = samplers[i].sample(); !status) {
        return status;
      }
      done[i] = done[i] || samplers[i].done();
    }
  }
  std::vector<Timing> timings;
  for (const Sampler& sampler : samplers) {
    Result<Timing> timing = sampler.result();
    if (!timing) {
      return timing.status();
    }
    timings.push_back(*timing);
  }
  return timings;
}

Result<Timing> time_calls(const Work& work, const StopRule& rule) {
  Result<std::vector<Timing>> timings = time_alternating(std::span<const Work>(&work, 1), rule);
  if (!timings) {
    return timings.status();
  }
  return timings->front();
}

}  // namespace rafter
