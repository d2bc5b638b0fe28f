// The ceilings of a CUDA device, one by one, into a device document.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <tuple>
#include <utility>

#include "hw/cuda/attention_rate.h"
#include "hw/cuda/blas.h"
#include "hw/cuda/launch.h"
#include "hw/cuda/passes.h"
#include "hw/cuda/runtime.h"
#include "measure/figures.h"
#include "measure/prober.h"
#include "rafter/measure.h"

namespace rafter {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Prober : measure::Prober {
  Device device;
  DeviceClock clock;
  cuda::DeviceProperties properties;

  // Seconds of a call, `samples` times.
  Result<std::vector<double>> times(const TimedWork& work, std::int64_t calls, int samples) const {
    std::vector<double> seconds;
    for (int i = -1; i < samples; ++i) {  // the first is not counted
      const Result<double> one = work(calls);
      if (!one) {
        return one.status();
      }
      if (i >= 0) {
        seconds.push_back(*one / static_cast<double>(calls));
      }
    }
    return seconds;
  }
};

Status describe(Prober& prober) {
  const cuda::DeviceProperties& p = prober.properties;
  DeviceSpec& spec = prober.probe.spec;
  spec.kind = Device::Kind::cuda;
  spec.name = "this-gpu";
  spec.title = fmt::format("{}, {} SMs", p.name, p.sm_count);
  for (auto& [key, value] : describe_this_machine()) {
    spec.notes[key] = value;
  }
  spec.notes["gpu"] = p.name;
  spec.notes["gpu_uuid"] = p.uuid;
  spec.notes["driver"] = fmt::format("CUDA {}.{}", p.driver / 1000, p.driver % 1000 / 10);
  spec.notes["runtime"] = fmt::format("CUDA {}.{}", p.runtime / 1000, p.runtime % 1000 / 10);
  const std::tuple<const char*, double, const char*> figures[] = {
      {"sm_count", static_cast<double>(p.sm_count), "1"},
      {"capacity_bytes", static_cast<double>(p.total_bytes), "B"},
      {"usable_bytes", static_cast<double>(p.free_bytes), "B"},
      {"l2_bytes", static_cast<double>(p.l2_bytes), "B"},
      {"fast_memory_bytes", static_cast<double>(p.shared_bytes_per_sm), "B"},
      {"clock_hz", p.clock_hz, "Hz"}};
  for (const auto& [key, value, unit] : figures) {
    if (value > 0) {
      prober.put(key, value, unit, FigureKind::measured,
                 "the CUDA runtime at the time of the probe");
    } else {
      prober.missing(key, "the CUDA runtime does not say");
    }
  }
  return Status::ok();
}

// Read, write and copy over working sets from a part of the L2 to many times it. Copy counts both
// ways. The last working set is main memory; the largest rate of those that fit half the L2 is it.
Status bandwidth(Prober& prober) {
  prober.step("bandwidth");
  const double most = prober.options.quick ? 1e9 : 4e9;
  const std::int64_t largest = static_cast<std::int64_t>(std::min(
                                   most, 0.2 * static_cast<double>(prober.properties.free_bytes))) /
                               4096 * 4096;
  Result<DeviceMemory> from = DeviceMemory::allocate(prober.device, largest);
  Result<DeviceMemory> to = DeviceMemory::allocate(prober.device, largest);
  if (!from || !to) {
    return from ? to.status() : from.status();
  }
  if (Status status = from->fill_random(DType::f32, 1); !status) {
    return status;
  }
  void* const stream = prober.clock.stream().handle;
  const int samples = prober.options.quick ? 20 : 60;
  std::vector<double> level[3];
  for (std::int64_t bytes = std::int64_t{4} << 20;; bytes = std::min(2 * bytes, largest)) {
    const std::int64_t half = bytes / 2 / 16 * 16;  // copy reads one half and writes the other
    const std::pair<Work, double> passes[] = {
        {[&] { return cuda::read_pass(from->data(), bytes, stream); }, static_cast<double>(bytes)},
        {[&] { return cuda::write_pass(to->data(), bytes, stream); }, static_cast<double>(bytes)},
        {[&] { return cuda::copy_pass(to->data(), from->data(), half, stream); },
         static_cast<double>(2 * half)}};
    SweepPoint point;
    point.bytes_per_thread = static_cast<double>(bytes);
    Statistics* const kinds[] = {&point.read, &point.write, &point.copy};
    for (std::size_t kind = 0; kind < 3; ++kind) {
      const std::int64_t calls = std::clamp<std::int64_t>((std::int64_t{1} << 30) / bytes, 1, 64);
      const Result<std::vector<double>> seconds =
          prober.times(prober.clock.timed(passes[kind].first, Queueing::graph), calls, samples);
      if (!seconds) {
        return seconds.status();
      }
      for (const double one : *seconds) {
        point.samples[kind].push_back(passes[kind].second / one);
      }
      const Result<Statistics> stats = statistics(point.samples[kind]);
      if (!stats) {
        return stats.status();
      }
      *kinds[kind] = *stats;
      if (bytes <= prober.properties.l2_bytes / 2 &&
          (level[kind].empty() ||
           stats->median > *std::max_element(level[kind].begin(), level[kind].end()))) {
        level[kind] = point.samples[kind];
      }
    }
    prober.probe.sweep.push_back(std::move(point));
    if (bytes >= largest) {
      break;
    }
  }
  const SweepPoint& memory = prober.probe.sweep.back();
  constexpr const char* kWays[] = {"read", "write", "copy"};
  for (std::size_t kind = 0; kind < 3; ++kind) {
    const std::string how = fmt::format("{} of {} bytes, back to back in a graph", kWays[kind],
                                        static_cast<std::int64_t>(memory.bytes_per_thread));
    if (Status status =
            prober.measured({{fmt::format("bandwidth_{}_bytes_per_s", kWays[kind]),
                              memory.samples[kind], "B/s", 0.9, how},
                             {fmt::format("bandwidth_l2_{}_bytes_per_s", kWays[kind]), level[kind],
                              "B/s", 0.9, fmt::format("{} within half the L2", kWays[kind])}});
        !status) {
      return status;
    }
  }
  DeviceSpec& spec = prober.probe.spec;
  spec.figures["bandwidth_bytes_per_s"] = spec.figures["bandwidth_copy_bytes_per_s"];
  spec.figures["bandwidth_l2_bytes_per_s"] = spec.figures["bandwidth_l2_read_bytes_per_s"];
  return Status::ok();
}

// One kernel for `run_s` seconds: FLOP/s of groups of some milliseconds each, with the seconds from
// the start at which each began.
struct RateRun {
  std::vector<double> rates, starts;
};

Result<RateRun> run_rate(const Prober& prober, const Work& one, double flops, double run_s) {
  const TimedWork timed = prober.clock.timed(one, Queueing::stream);
  const Result<double> first = timed(1);  // makes the handle
  const Result<double> second = first ? timed(1) : first;
  if (!second) {
    return second.status();
  }
  constexpr double kGroup_s = 5e-3;
  const auto calls = static_cast<std::int64_t>(std::clamp(kGroup_s / *second, 1.0, 1000.0));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the clock recovers
  RateRun run;
  const Clock::time_point start = Clock::now();
  while (seconds_since(start) < run_s) {
    run.starts.push_back(seconds_since(start));
    const Result<double> seconds = timed(calls);
    if (!seconds) {
      return seconds.status();
    }
    run.rates.push_back(flops * static_cast<double>(calls) / *seconds);
  }
  return run;
}

/// The rates of a run's first 0.1 s, and of its second half, which the power limit decides.
measure::BurstAndRest parts_of(const RateRun& run, double run_s) {
  return measure::parts_of(run.rates, run.starts, 0.1, run_s);
}

Result<RateRun> run_gemm(const Prober& prober, const cuda::Matmul& product, const DeviceMemory& a,
                         const DeviceMemory& b, const DeviceMemory& c, const DeviceMemory& space,
                         double run_s) {
  const Work one = [&] {
    return cuda::matmul(product, a.data(), b.data(), c.data(), space.data(),
                        prober.clock.stream().handle);
  };
  const double flops = 2 * static_cast<double>(product.m * product.n) *
                       static_cast<double>(product.k * product.batch);
  return run_rate(prober, one, flops, run_s);
}

Status gemm_peak(Prober& prober, const char* name, DType dtype, bool tf32) {
  prober.step(fmt::format("matrix products, {}", name));
  const std::int64_t n = dtype == DType::f32 ? 4096 : 8192;
  const std::int64_t operand = n * n * bits_of(dtype) / 8;
  Result<DeviceMemory> a = DeviceMemory::allocate(prober.device, operand);
  Result<DeviceMemory> b = DeviceMemory::allocate(prober.device, operand);
  Result<DeviceMemory> c = DeviceMemory::allocate(prober.device, 4 * n * n);
  Result<DeviceMemory> space = DeviceMemory::allocate(prober.device, cuda::kMatmulWorkspaceBytes);
  for (const Result<DeviceMemory>* memory : {&a, &b, &c, &space}) {
    if (!*memory) {
      return memory->status();
    }
  }
  for (const auto& [memory, seed] : {std::pair(&*a, 1U), std::pair(&*b, 2U)}) {
    if (Status status = memory->fill_random(dtype, seed); !status) {
      return status;
    }
  }
  const cuda::Matmul product{.dtype = dtype,
                             .tf32 = tf32,
                             .b_transposed = true,
                             .m = n,
                             .n = n,
                             .k = n,
                             .lda = n,
                             .ldb = n,
                             .ldc = n};
  const double run_s = prober.options.quick ? 0.6 : 3;
  const Result<RateRun> run = run_gemm(prober, product, *a, *b, *c, *space, run_s);
  if (!run) {
    prober.missing(fmt::format("peak_{}_flop_per_s", name), run.status().message());
    return Status::ok();
  }
  const auto& [burst, sustained] = parts_of(*run, run_s);
  const std::string how = fmt::format("cuBLASLt product {}³ of random {}", n, name);
  const std::string figure = fmt::format("{}_flop_per_s", name);
  return prober.measured(
      {{"peak_" + figure, burst, "FLOP/s", 0.9, how + ", first 0.1 s after a pause: the burst"},
       {"burst_" + figure, burst, "FLOP/s", 0.9, how + ", first 0.1 s after a pause"},
       {"sustained_" + figure, sustained, "FLOP/s", 0.5,
        fmt::format("{}, second half of {:.1f} s", how, run_s)}});
}

Status matmul(Prober& prober) {
  if (std::string reason = cuda::why_no_cublaslt(); !reason.empty()) {
    prober.missing("peak_bf16_flop_per_s", reason);
    return Status::ok();
  }
  const std::tuple<const char*, DType, bool> products[] = {
      {"bf16", DType::bf16, false}, {"f16", DType::f16, false}, {"e4m3", DType::e4m3, false},
      {"int8", DType::int8, false}, {"tf32", DType::f32, true}, {"f32", DType::f32, false}};
  for (const auto& [name, dtype, tf32] : products) {
    if (Status status = gemm_peak(prober, name, dtype, tf32); !status) {
      return status;
    }
  }
  return Status::ok();
}

/// What QKᵀ of a head_dim of 128 reaches of the memory: 16 products of 1024 rows with 16384 keys,
/// whose results are nine tenths of the bytes. The library writes them slower than a copy does.
Status scores_bandwidth(Prober& prober) {
  constexpr const char* kFigure = "bandwidth_scores_bytes_per_s";
  if (std::string reason = cuda::why_no_cublaslt(); !reason.empty()) {
    prober.missing(kFigure, reason);
    return Status::ok();
  }
  prober.step("products whose results land");
  constexpr std::int64_t kRows = 1024, kKeys = 16384, kDim = 128, kBatch = 16;
  constexpr std::int64_t kOperandA = 2 * kBatch * kRows * kDim,
                         kOperandB = 2 * kBatch * kKeys * kDim,
                         kResult = 2 * kBatch * kRows * kKeys;
  Result<DeviceMemory> a = DeviceMemory::allocate(prober.device, kOperandA);
  Result<DeviceMemory> b = DeviceMemory::allocate(prober.device, kOperandB);
  Result<DeviceMemory> c = DeviceMemory::allocate(prober.device, kResult);
  Result<DeviceMemory> space = DeviceMemory::allocate(prober.device, cuda::kMatmulWorkspaceBytes);
  for (const Result<DeviceMemory>* memory : {&a, &b, &c, &space}) {
    if (!*memory) {
      prober.missing(kFigure, memory->status().message());
      return Status::ok();
    }
  }
  for (const auto& [memory, seed] : {std::pair(&*a, 1U), std::pair(&*b, 2U)}) {
    if (Status status = memory->fill_random(DType::bf16, seed); !status) {
      return status;
    }
  }
  const cuda::Matmul product{.dtype = DType::bf16,
                             .b_transposed = true,
                             .m = kRows,
                             .n = kKeys,
                             .k = kDim,
                             .batch = kBatch,
                             .lda = kDim,
                             .ldb = kDim,
                             .ldc = kKeys,
                             .stride_a = kRows * kDim,
                             .stride_b = kKeys * kDim,
                             .stride_c = kRows * kKeys};
  const Result<RateRun> run = run_gemm(prober, product, *a, *b, *c, *space, 0.2);
  if (!run) {
    prober.missing(kFigure, run.status().message());
    return Status::ok();
  }
  constexpr double kFlops = 2.0 * kBatch * kRows * kKeys * kDim;
  std::vector<double> rates;
  for (const double rate : run->rates) {
    rates.push_back(rate / kFlops * (kOperandA + kOperandB + kResult));
  }
  return prober.measured({kFigure, rates, "B/s", 0.9,
                          fmt::format("cuBLASLt, {} products of random bf16, {} x {} x {}", kBatch,
                                      kRows, kKeys, kDim)});
}

/// Both products of attention with the softmax between them, on operands in shared memory.
Status attention(Prober& prober) {
  for (const auto& [name, dtype] : {std::pair("bf16", DType::bf16), std::pair("f16", DType::f16)}) {
    const std::string figure = fmt::format("attention_{}_flop_per_s", name);
    if (std::string reason = cuda::why_not_sm90(prober.device.index); !reason.empty()) {
      prober.missing(figure, reason);
      continue;
    }
    prober.step(fmt::format("attention's products, {}", name));
    Result<DeviceMemory> sink = DeviceMemory::allocate(prober.device, 4);
    if (!sink) {
      return sink.status();
    }
    constexpr int kRounds = 1000;
    constexpr double kFlops = 4 * 128 + 5;  // of a score
    double scores = 0;
    const Work one = [&, type = dtype]() -> Status {
      const Result<double> done =
          cuda::attention_pass(type, kRounds, sink->data(), prober.clock.stream().handle);
      scores = done ? *done : 0;
      return done.status();
    };
    if (Status status = one(); !status) {
      prober.missing(figure, status.message());
      continue;
    }
    const double run_s = prober.options.quick ? 0.6 : 3;
    const Result<RateRun> run = run_rate(prober, one, kFlops * scores, run_s);
    if (!run) {
      prober.missing(figure, run.status().message());
      continue;
    }
    const auto& [burst, sustained] = parts_of(*run, run_s);
    const std::string how = fmt::format(
        "QKᵀ, softmax and PV of random {}, head_dim 128, operands in shared memory", name);
    if (Status status =
            prober.measured({{figure, burst, "FLOP/s", 0.9, how + ", first 0.1 s after a pause"},
                             {"sustained_" + figure, sustained, "FLOP/s", 0.5,
                              fmt::format("{}, second half of {:.1f} s", how, run_s)}});
        !status) {
      return status;
    }
  }
  return Status::ok();
}

/// What all SMs do on registers, `each` operations of the figure's for one of the pass's.
Status registers_rate(Prober& prober, const char* key, const char* unit, const char* how,
                      Result<double> (*pass)(std::int64_t, void*, void*), double each) {
  prober.step(how);
  Result<DeviceMemory> sink = DeviceMemory::allocate(prober.device, 4);
  if (!sink) {
    return sink.status();
  }
  double count = 0;
  const Work work = [&]() -> Status {
    const Result<double> done = pass(2000, sink->data(), prober.clock.stream().handle);
    count = done ? each * *done : 0;
    return done ? Status::ok() : done.status();
  };
  const Result<std::vector<double>> seconds =
      prober.times(prober.clock.timed(work, Queueing::stream), 4, prober.options.quick ? 20 : 60);
  if (!seconds) {
    return seconds.status();
  }
  std::vector<double> rates;
  for (const double one : *seconds) {
    rates.push_back(count / one);
  }
  return prober.measured({key, rates, unit, 0.9, how});
}

Status exponentials(Prober& prober) {
  return registers_rate(prober, "exp_per_s", "op/s", "ex2.approx on registers, all SMs",
                        cuda::exp_pass, 1);
}

Status vector_arithmetic(Prober& prober) {
  return registers_rate(prober, "peak_vector_f32_flop_per_s", "FLOP/s",
                        "f32 multiply-adds on registers, all SMs", cuda::multiply_add_pass, 2);
}

// An empty kernel of one warp, three ways; and a graph as a + b · N.
Status launches(Prober& prober) {
  prober.step("launch cost");
  void* const stream = prober.clock.stream().handle;
  const Work empty = [stream] { return cuda::empty_launch(stream); };
  const int samples = prober.options.quick ? 50 : 300;
  const TimedWork queued = prober.clock.timed(empty, Queueing::stream);
  const Result<std::vector<double>> back_to_back = prober.times(queued, 200, samples);
  if (!back_to_back) {
    return back_to_back.status();
  }
  // launch to sync, as the host sees it
  std::vector<double> synced, submit, node;
  for (int i = -20; i < samples; ++i) {
    const Clock::time_point start = Clock::now();
    if (Status status = empty(); !status) {
      return status;
    }
    if (Status status = prober.clock.synchronize(); !status) {
      return status;
    }
    if (i >= 0) {
      synced.push_back(seconds_since(start));
    }
  }
  constexpr std::int64_t kFew = 20, kMany = 420;
  const TimedWork few = prober.clock.timed(empty, Queueing::graph);
  const TimedWork many = prober.clock.timed(empty, Queueing::graph);
  for (int i = -5; i < samples; ++i) {
    const Result<double> a = few(kFew);
    const Result<double> b = a ? many(kMany) : a;
    if (!b) {
      return b.status();
    }
    if (i >= 0) {
      const double slope = (*b - *a) / static_cast<double>(kMany - kFew);
      node.push_back(std::max(slope, 0.0));
      submit.push_back(std::max(*a - slope * static_cast<double>(kFew), 0.0));
    }
  }
  return prober.measured(
      {{"launch_s", *back_to_back, "s", 0.5,
        "an empty kernel, 200 launches back to back on a stream"},
       {"launch_sync_s", synced, "s", 0.5,
        "an empty kernel and the wait for it, on the host's clock"},
       {"graph_launch_s", node, "s", 0.5, "an empty kernel as a graph node: b of a + b · N"},
       {"graph_submit_s", submit, "s", 0.5,
        "a graph of empty kernels: a of a + b · N, between events"}});
}

}  // namespace

Result<Probe> probe_cuda(const Device& device, const ProbeOptions& options) {
  if (std::string reason = why_no_cuda(device.index); !reason.empty()) {
    return Status::device_error("device", reason);
  }
  const cuda::DeviceScope scope(device.index);
  Result<DeviceClock> clock = DeviceClock::make(device);
  Result<cuda::DeviceProperties> properties = cuda::properties();
  if (!clock || !properties) {
    return clock ? properties.status() : clock.status();
  }
  Prober prober{{options, {}, {}}, device, *clock, *properties};
  for (Status (*step)(Prober&) : {describe, bandwidth, matmul, attention, scores_bandwidth,
                                  vector_arithmetic, exponentials, launches}) {
    if (Status status = step(prober); !status) {
      return status;
    }
  }
  measure::conclude(prober.probe);
  return std::move(prober.probe);
}

}  // namespace rafter
