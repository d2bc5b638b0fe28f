// Bandwidth over a sweep of working sets, and the levels read from it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "rafter/measure.h"

namespace rafter::measure {

struct SweepOptions {
  int threads = 1;
  std::vector<double> sizes;  // working set of each thread, bytes, ascending
  double sample_s = 1e-3;     // a sample repeats its pass until it lasts so long
  double limit_s = 0.1;       // of one size and kind, however few samples that gives
  std::size_t samples = 10;   // of each size and kind
};

/// Working sets from 4 KiB up by factors of √2 (quick: 2) to `largest` bytes over all threads.
std::vector<double> sweep_sizes(double largest, int threads, bool quick);
Result<std::vector<SweepPoint>> run_sweep(const SweepOptions& options);

/// A level of the memory hierarchy as the sweep shows it.
struct Level {
  std::string name;                       // "l1", "l2", "l3", "memory"
  double bytes_per_thread = 0;            // largest working set on the plateau
  std::vector<double> read, write, copy;  // all samples on the plateau, B/s
};

/// The plateaus of the read rate, named by the working set at which they end: up to 128 KiB a
/// thread is l1, up to 3 MiB l2, above it l3; the last plateau, if it holds the largest working
/// set, is memory. Of two with one name the smaller working sets keep it.
std::vector<Level> levels_of(const std::vector<SweepPoint>& sweep, const PlateauRule& rule);

}  // namespace rafter::measure
