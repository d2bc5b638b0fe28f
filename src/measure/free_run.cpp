#include "measure/free_run.h"

#include <omp.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>

namespace rafter::measure {
namespace {

double now(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Sample {
  double start, end, rate;
  bool clean;
};

Sample take(const Rounds& work, int thread, std::int64_t rounds) {
  const double cpu_start = now(CLOCK_THREAD_CPUTIME_ID);
  Sample sample{};
  sample.start = now(CLOCK_MONOTONIC);
  const double units = work(thread, rounds);
  sample.end = now(CLOCK_MONOTONIC);
  const double cpu = now(CLOCK_THREAD_CPUTIME_ID) - cpu_start;
  const double wall = sample.end - sample.start;
  sample.rate = wall > 0 ? units / wall : 0;
  sample.clean = wall > 0 && cpu >= 0.95 * wall;
  return sample;
}

constexpr std::size_t kEnough = 5;

// Rounds that last sample_s: doubled until the shortest of three tries does (one try, where that is
// twice as long).
std::int64_t rounds_for(const Rounds& work, int thread, double sample_s) {
  for (std::int64_t rounds = 1;; rounds *= 2) {
    double shortest = 1e300;
    for (int i = 0; i < 3; ++i) {
      const Sample sample = take(work, thread, rounds);
      shortest = std::min(shortest, sample.end - sample.start);
      if (shortest < sample_s || shortest > 2 * sample_s) {
        break;
      }
    }
    if (shortest >= sample_s || rounds >= (std::int64_t{1} << 40)) {
      return rounds;
    }
  }
}

// What a thread did per second within [start, end]; negative when a disturbed sample reaches into
// it or its samples cover less than 90% of it.
double rate_within(const std::vector<Sample>& samples, double start, double end) {
  double covered = 0, units = 0;
  auto sample = std::lower_bound(samples.begin(), samples.end(), start,
                                 [](const Sample& s, double t) { return s.end <= t; });
  for (; sample != samples.end() && sample->start < end; ++sample) {
    if (!sample->clean) {
      return -1;
    }
    const double overlap = std::min(end, sample->end) - std::max(start, sample->start);
    covered += overlap;
    units += overlap * sample->rate;
  }
  return covered >= 0.9 * (end - start) ? units / covered : -1;
}

using ThreadSamples = std::vector<std::vector<Sample>>;

// As many sums as the thread with the fewest samples has; the others' are taken evenly spaced, so
// that the sums stay spread over the whole run.
FreeRun sum_by_index(const ThreadSamples& all, bool only_clean) {
  std::vector<std::vector<Sample>> kept(all.size());
  std::size_t count = std::numeric_limits<std::size_t>::max();
  for (std::size_t t = 0; t < all.size(); ++t) {
    std::copy_if(all[t].begin(), all[t].end(), std::back_inserter(kept[t]),
                 [&](const Sample& sample) { return sample.clean || !only_clean; });
    count = std::min(count, kept[t].size());
  }
  FreeRun run;
  for (std::size_t i = 0; i < count; ++i) {
    double total = 0;
    for (const std::vector<Sample>& samples : kept) {
      total += samples[i * samples.size() / count].rate;
    }
    run.rates.push_back(total);
    run.starts.push_back(kept[0][i * kept[0].size() / count].start - all[0][0].start);
  }
  return run;
}

FreeRun sum_by_time(const ThreadSamples& all) {
  FreeRun run;
  for (const Sample& sample : all[0]) {
    double total = sample.rate;
    bool clean = sample.clean;
    for (std::size_t t = 1; t < all.size() && clean; ++t) {
      const double rate = rate_within(all[t], sample.start, sample.end);
      clean = rate >= 0;
      total += rate;
    }
    if (clean) {
      run.rates.push_back(total);
      run.starts.push_back(sample.start - all[0][0].start);
    }
  }
  return run;
}

}  // namespace

FreeRun free_run(int threads, std::size_t samples, double sample_s, double limit_s,
                 Resource resource, const Rounds& work) {
  ThreadSamples all(static_cast<std::size_t>(threads));
  std::atomic<int> unfinished = threads;
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
    std::vector<Sample>& mine = all[static_cast<std::size_t>(thread)];
    const std::int64_t rounds = rounds_for(work, thread, sample_s);
    const double begin = now(CLOCK_MONOTONIC);
    std::size_t clean = 0;
    bool finished = false;
    while (unfinished.load(std::memory_order_relaxed) > 0) {
      mine.push_back(take(work, thread, rounds));
      clean += mine.back().clean ? 1 : 0;
      const bool late = mine.size() >= kEnough && mine.back().end - begin > limit_s;
      if (!finished && (clean >= samples || late)) {
        finished = true;
        --unfinished;
      }
    }
  }
  FreeRun run = resource == Resource::own ? sum_by_index(all, true) : sum_by_time(all);
  const auto kept = static_cast<std::int64_t>(run.rates.size());
  if (run.rates.size() < std::min(kEnough, samples)) {
    run = sum_by_index(all, false);
    run.disturbed = true;
  }
  run.discarded = static_cast<std::int64_t>(all[0].size()) - kept;
  return run;
}

}  // namespace rafter::measure
