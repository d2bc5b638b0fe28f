// The ceilings of this machine's CPU, one by one, into a device document.
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <thread>
#include <utility>
#include <vector>

#include "measure/figures.h"
#include "measure/free_run.h"
#include "measure/gemm.h"
#include "measure/loops.h"
#include "measure/machine.h"
#include "measure/prober.h"
#include "measure/sweep.h"
#include "rafter/measure.h"

namespace rafter {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

struct Prober : measure::Prober {
  int threads;
};

Status describe(Prober& prober) {
  DeviceSpec& spec = prober.probe.spec;
  spec.kind = Device::Kind::cpu;
  spec.name = "this-cpu";
  spec.title = fmt::format("{}, {} core{}", measure::cpu_model(), prober.threads,
                           prober.threads == 1 ? "" : "s");
  for (auto& [key, value] : describe_this_machine()) {
    spec.notes[key] = value;
  }
  spec.notes["threads"] = std::to_string(prober.threads);
  spec.notes["vector_target"] = measure::loop_target();
  prober.put("sm_count", prober.threads, "1", FigureKind::measured,
             "threads of this probe, one a core");
  if (const double bytes = measure::memory_total_bytes(); bytes > 0) {
    prober.put("capacity_bytes", bytes, "B", FigureKind::measured, "MemTotal of /proc/meminfo");
    prober.put("usable_bytes", measure::memory_available_bytes(), "B", FigureKind::measured,
               "MemAvailable of /proc/meminfo at the time of the probe");
  } else {
    prober.missing("capacity_bytes", "/proc/meminfo has no MemTotal");
  }
  return Status::ok();
}

// Core clock from a chain of dependent additions, one clock each on every x86 since 1995.
Status clock(Prober& prober) {
#if defined(__x86_64__)
  prober.step("clock");
  std::vector<double> rates;
  constexpr std::int64_t kRounds = 100000;
  for (int sample = 0; sample < (prober.options.quick ? 100 : 400); ++sample) {
    const Clock::time_point start = Clock::now();
    std::uint64_t x = 1;
    for (std::int64_t i = 0; i < kRounds; ++i) {
      asm volatile(
          "add %0, %0\n\tadd %0, %0\n\tadd %0, %0\n\tadd %0, %0\n\t"
          "add %0, %0\n\tadd %0, %0\n\tadd %0, %0\n\tadd %0, %0"
          : "+r"(x));
    }
    rates.push_back(8.0 * kRounds / seconds_between(start, Clock::now()));
  }
  return prober.measured(
      {"clock_hz", rates, "Hz", 0.9, "chain of dependent additions on one core"});
#else
  prober.missing("clock_hz", "the addition chain is written for x86 only");
  return Status::ok();
#endif
}

// Rate of a register-resident loop on all threads.
template <typename Loop>
std::vector<double> loop_rates(int threads, bool quick, const Loop& loop) {
  return measure::free_run(threads, quick ? 100 : 400, 1e-3, quick ? 0.5 : 2.0,
                           measure::Resource::own,
                           [&loop](int, std::int64_t rounds) {
                             float sink = 0.5F;
                             const double done = loop(100 * rounds, &sink);
                             return sink == sink ? done : 0.0;  // keeps the result alive
                           })
      .rates;
}

Status register_loops(Prober& prober) {
  const bool quick = prober.options.quick;
  prober.step("vector arithmetic");
  const std::vector<double> sums = loop_rates(prober.threads, quick, measure::loop_fma);
  const std::vector<double> exponentials = loop_rates(prober.threads, quick, measure::loop_exp);
  return prober.measured(
      {{"peak_vector_f32_flop_per_s", sums, "FLOP/s", 0.9,
        fmt::format("multiply-adds on registers, {}", measure::loop_target())},
       {"exp_per_s", exponentials, "op/s", 0.9, "f32 exp on registers, degree-5 polynomial"}});
}

// The peak is over the whole run; burst is what the first quarter second after a pause gives,
// sustained what the second half gives: a machine that lowers its clock under load shows it.
Status gemm_peak(Prober& prober, DType dtype) {
  const bool quick = prober.options.quick;
  const std::string name = to_string(dtype);
  prober.step("matrix products, " + name);
  // The size at which the library is quickest: large enough to pack well, small enough to stay
  // near.
  std::int64_t size = 0;
  double best = -1;
  for (std::int64_t n : {256, 512, 1024}) {
    const Result<measure::FreeRun> trial =
        measure::gemm_rates(n, dtype, prober.threads, quick ? 0.1 : 0.4);
    if (!trial) {
      prober.missing(fmt::format("peak_{}_flop_per_s", name), trial.status().message());
      return Status::ok();
    }
    const Result<Statistics> stats = statistics(trial->rates);
    if (stats && stats->p90 > best) {
      best = stats->p90;
      size = n;
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double run_s = quick ? 0.8 : 4.0;
  const Result<measure::FreeRun> run = measure::gemm_rates(size, dtype, prober.threads, run_s);
  if (!run) {
    prober.missing(fmt::format("peak_{}_flop_per_s", name), run.status().message());
    return Status::ok();
  }
  const auto& [burst, sustained] = measure::parts_of(run->rates, run->starts, 0.25, run_s);
  const std::string how =
      fmt::format("oneDNN product {}³ of random {} on every thread", size, name);
  const std::string figure = name + "_flop_per_s";
  return prober.measured(
      {{"peak_" + figure, run->rates, "FLOP/s", 0.9, fmt::format("{}, {:.1f} s", how, run_s)},
       {"burst_" + figure, burst, "FLOP/s", 0.9, how + ", first 0.25 s after a pause"},
       {"sustained_" + figure, sustained, "FLOP/s", 0.5,
        fmt::format("{}, second half of {:.1f} s", how, run_s)}});
}

Status matmul(Prober& prober) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16, DType::int8}) {
    if (Status status = gemm_peak(prober, dtype); !status) {
      return status;
    }
  }
  // A CPU without products of a narrow type widens its operands and multiplies in f32: that is what
  // our kernels do, and what bounds them.
  const Figure* f32 = prober.probe.spec.find("peak_f32_flop_per_s");
  for (DType dtype : {DType::bf16, DType::f16}) {
    const std::string key = fmt::format("peak_{}_flop_per_s", to_string(dtype));
    if (f32 != nullptr && prober.probe.spec.find(key) == nullptr) {
      Figure figure = *f32;
      figure.kind = FigureKind::derived;
      figure.source = fmt::format(
          "no {} products on this machine: operands widen to f32, peak_f32_flop_per_s holds",
          to_string(dtype));
      prober.probe.spec.figures[key] = figure;
    }
  }
  return Status::ok();
}

Status bandwidth(Prober& prober) {
  const bool quick = prober.options.quick;
  prober.step("bandwidth");
  measure::SweepOptions sweep;
  sweep.threads = prober.threads;
  // At least three doublings past any cache that a socket shares with us today (a few hundred MiB),
  // or an eighth of the memory that is free.
  const double free_bytes = measure::memory_available_bytes();
  const double wanted = (quick ? 256.0 : 2048.0) * 1024 * 1024;
  sweep.sizes = measure::sweep_sizes(free_bytes > 0 ? std::min(wanted, free_bytes / 8) : wanted / 4,
                                     prober.threads, quick);
  sweep.sample_s = quick ? 0.2e-3 : 1e-3;
  sweep.samples = quick ? 20 : 40;
  sweep.limit_s = quick ? 0.06 : 0.25;
  Result<std::vector<SweepPoint>> points = measure::run_sweep(sweep);
  if (!points) {
    return points.status();
  }
  prober.probe.sweep = std::move(*points);
  const std::vector<measure::Level> levels = measure::levels_of(prober.probe.sweep, {});
  for (const measure::Level& level : levels) {
    const bool memory = level.name == "memory";
    const std::string prefix = memory ? "bandwidth_" : fmt::format("bandwidth_{}_", level.name);
    const std::string how = fmt::format(" on the {} plateau, up to {:.0f} KiB a thread", level.name,
                                        level.bytes_per_thread / 1024);
    if (Status status = prober.measured(
            {{prefix + (memory ? "read_bytes_per_s" : "bytes_per_s"), level.read, "B/s", 0.9,
              "read" + how},
             {prefix + "write_bytes_per_s", level.write, "B/s", 0.9, "write" + how},
             {prefix + "copy_bytes_per_s", level.copy, "B/s", 0.9, "copy (read + written)" + how}});
        !status) {
      return status;
    }
    if (memory) {  // what the roofline uses: reads, most of what attention moves
      prober.probe.spec.figures["bandwidth_bytes_per_s"] =
          *prober.probe.spec.find("bandwidth_read_bytes_per_s");
    } else {
      prober.put(
          level.name + "_bytes", level.bytes_per_thread, "B", FigureKind::derived,
          fmt::format("largest working set of a core on the {} plateau of the bandwidth sweep",
                      level.name));
    }
  }
  for (const char* name : {"l1", "l2", "l3"}) {
    if (prober.probe.spec.find(std::string(name) + "_bytes") == nullptr) {
      prober.missing("bandwidth_" + std::string(name) + "_bytes_per_s",
                     "the sweep shows no plateau of that size");
    }
  }
  if (prober.probe.spec.find("bandwidth_bytes_per_s") == nullptr) {
    // No level end: the largest working set is the best that can be said.
    const SweepPoint& last = prober.probe.sweep.back();
    if (Status status = prober.measured({"bandwidth_bytes_per_s", last.samples[0], "B/s", 0.9,
                                         "read of the largest working set (no plateau)"});
        !status) {
      return status;
    }
  }
  if (const Figure* l2 = prober.probe.spec.find("l2_bytes")) {
    prober.put("fast_memory_bytes", l2->value, "B", FigureKind::derived,
               "l2_bytes: where the attention tiles of a core stay");
  } else {
    prober.missing("fast_memory_bytes", "l2_bytes is missing");
  }
  return Status::ok();
}

// An empty parallel region: what a "launch" is on a CPU. fork: until the last thread has begun;
// launch: until all have joined, regions back to back; cold: the same after the threads have gone
// to sleep.
Status launches(Prober& prober) {
  prober.step("launch cost");
  const bool quick = prober.options.quick;
  const auto team = static_cast<std::size_t>(prober.threads);
  std::vector<double> fork, full, cold;
  std::vector<Clock::time_point> begun(team);
  for (int i = 0; i < (quick ? 300 : 2000); ++i) {
    const Clock::time_point start = Clock::now();
#pragma omp parallel num_threads(prober.threads)
    begun[static_cast<std::size_t>(omp_get_thread_num())] = Clock::now();
    const Clock::time_point end = Clock::now();
    if (i >= 20) {  // the first regions start the threads
      fork.push_back(seconds_between(start, *std::max_element(begun.begin(), begun.end())));
      full.push_back(seconds_between(start, end));
    }
  }
  for (int i = 0; i < (quick ? 15 : 60); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const Clock::time_point start = Clock::now();
#pragma omp parallel num_threads(prober.threads)
    begun[static_cast<std::size_t>(omp_get_thread_num())] = Clock::now();
    cold.push_back(seconds_between(start, Clock::now()));
  }
  return prober.measured(
      {{"launch_s", full, "s", 0.5, "parallel region, fork to join, back to back"},
       {"launch_fork_s", fork, "s", 0.5, "parallel region, until the last thread has begun"},
       {"launch_cold_s", cold, "s", 0.5, "parallel region, fork to join, after 20 ms of sleep"}});
}

double spread_of(const Figure& figure) {
  return figure.high > 0 ? (figure.high - figure.low) / figure.high : 0;
}

}  // namespace

std::vector<std::string> noisy_figures(const DeviceSpec& spec) {
  std::vector<std::string> noisy;
  for (const auto& [key, figure] : spec.figures) {
    if (figure.kind == FigureKind::measured && spread_of(figure) > kNoisySpread) {
      noisy.push_back(key);
    }
  }
  return noisy;
}

std::string distrust_of(const DeviceSpec& spec) {
  const char* const matmul =
      spec.kind == Device::Kind::cuda ? "peak_bf16_flop_per_s" : "peak_f32_flop_per_s";
  for (const char* key : {"bandwidth_bytes_per_s", matmul}) {
    const Figure* figure = spec.find(key);
    if (figure == nullptr) {
      return fmt::format("{} is missing", key);
    }
    if (figure->kind == FigureKind::measured && spread_of(*figure) > kDistrustSpread) {
      return fmt::format("{} spreads over {:.0f}% of itself (limit {:.0f}%)", key,
                         100 * spread_of(*figure), 100 * kDistrustSpread);
    }
  }
  return {};
}

Result<Probe> probe_cpu(const ProbeOptions& options) {
  if (options.threads < 0) {
    return Status::invalid_argument("threads", std::to_string(options.threads), "0 and more");
  }
  const int threads = options.threads > 0 ? options.threads : omp_get_max_threads();
  Prober prober{{options, fmt::format("{} thread{}", threads, threads == 1 ? "" : "s"), {}},
                threads};
  for (Status (*step)(Prober&) : {describe, clock, register_loops, matmul, bandwidth, launches}) {
    if (Status status = step(prober); !status) {
      return status;
    }
  }
  measure::conclude(prober.probe);
  return std::move(prober.probe);
}

}  // namespace rafter
