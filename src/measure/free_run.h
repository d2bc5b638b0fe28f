// Rates of work that every thread does by itself, without barriers between samples: on a shared
// machine a barrier turns one lost time slice into a lost sample of all threads.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace rafter::measure {

/// Does `rounds` rounds of work on one thread and returns how many units that was.
using Rounds = std::function<double(int thread, std::int64_t rounds)>;

struct FreeRun {
  std::vector<double> rates;   // units per second of all threads together, in the order of time
  std::vector<double> starts;  // seconds from the first sample's start to theirs
  std::int64_t discarded = 0;  // samples during which some thread did not have its core
  bool disturbed = false;      // too few clean samples: `rates` holds the disturbed ones as well
};

/// What the threads compete for: nothing (registers, private caches), or a shared level of memory.
enum class Resource : std::uint8_t { own, shared };

/// Every thread samples its own rate, each sample lasting `sample_s` or more, until there are
/// `samples` of each or `limit_s` is over (though never fewer than five), and keeps working until
/// the last thread is done. A sample counts when its thread was on its core for 95% of it (thread
/// CPU time over wall time). The rate of all threads is, for an own resource, the sum of each
/// thread's counting samples, paired in the order of time; for a shared one, a counting sample of
/// the first thread plus what the others did in the same interval, all of it in samples that count.
FreeRun free_run(int threads, std::size_t samples, double sample_s, double limit_s,
                 Resource resource, const Rounds& work);

}  // namespace rafter::measure
