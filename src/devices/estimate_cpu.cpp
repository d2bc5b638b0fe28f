// What this machine's CPU should reach, from CPUID, its cores and its clock: every figure is
// `assumed`, for use until `rafter probe` has measured them.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <set>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <fmt/format.h>

#include "rafter/device.h"

namespace rafter {
namespace {

struct Features {
  std::string name = "CPU";
  bool fma256 = false, avx512 = false, avx512_fp16 = false;
  bool vnni = false, amx_bf16 = false, amx_int8 = false;
  double leaf_hz = 0;  // the clock that CPUID states, 0 when it does not
};

#if defined(__x86_64__)
Features read_features() {
  Features f;
  unsigned a = 0, b = 0, c = 0, d = 0;
  const auto bit = [](unsigned word, int index) { return ((word >> index) & 1U) != 0; };
  // Whether the operating system saves the registers (XCR0): AVX bits 1-2, AVX-512 5-7, AMX 17-18.
  unsigned xcr0 = 0;
  bool fma = false, avx2 = false;
  if (__get_cpuid(1, &a, &b, &c, &d) != 0) {
    fma = bit(c, 12);
    if (bit(c, 27)) {  // XGETBV may be used
      unsigned high = 0;
      __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    }
  }
  const bool ymm = (xcr0 & 0x6U) == 0x6U, zmm = ymm && (xcr0 & 0xe0U) == 0xe0U;
  const bool tiles = (xcr0 & 0x60000U) == 0x60000U;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) {
    avx2 = bit(b, 5);
    f.avx512 = zmm && bit(b, 16);
    f.vnni = zmm && bit(c, 11);
    f.avx512_fp16 = zmm && bit(d, 23);
    f.amx_bf16 = tiles && bit(d, 22);
    f.amx_int8 = tiles && bit(d, 25);
  }
  f.fma256 = ymm && fma && avx2;
  if (__get_cpuid(0x16, &a, &b, &c, &d) != 0) {
    f.leaf_hz = 1e6 * static_cast<double>(a & 0xffffU);
  }
  std::string brand;
  for (unsigned leaf = 0x80000002U; leaf <= 0x80000004U; ++leaf) {
    unsigned words[4] = {};
    if (__get_cpuid(leaf, &words[0], &words[1], &words[2], &words[3]) != 0) {
      brand.append(reinterpret_cast<const char*>(words), sizeof words);
    }
  }
  brand = brand.c_str();  // up to the first 0
  const std::size_t first = brand.find_first_not_of(' ');
  if (first != std::string::npos) {
    f.name = brand.substr(first, brand.find_last_not_of(' ') - first + 1);
  }
  return f;
}
#else
Features read_features() { return {}; }
#endif

/// "cpu MHz" of /proc/cpuinfo, the largest; 0 when absent.
double listed_hz() {
  std::ifstream file("/proc/cpuinfo");
  double best = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("cpu MHz")) {
      const std::size_t colon = line.find(':');
      if (colon != std::string::npos) {
        best = std::max(best, std::strtod(line.c_str() + colon + 1, nullptr) * 1e6);
      }
    }
  }
  return best;
}

/// Cores that this process may run on: hyper-threads of one core count once.
std::int64_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) {
    return std::max<std::int64_t>(1, sysconf(_SC_NPROCESSORS_ONLN));
  }
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) {
      std::ifstream file(
          fmt::format("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", cpu));
      std::string siblings;
      std::getline(file, siblings);
      cores.insert(siblings.empty() ? fmt::format("cpu{}", cpu) : siblings);
    }
  }
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(cores.size()));
}

double memory_bytes(const char* field) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(field)) {
      return std::strtod(line.c_str() + std::string(field).size() + 1, nullptr) * 1024;
    }
  }
  return 0;
}

}  // namespace

DeviceSpec estimate_this_cpu() {
  const Features f = read_features();
  const auto cores = static_cast<double>(usable_cores());
  const double listed = std::max(f.leaf_hz, listed_hz());
  const double hz = listed > 0 ? listed : 2.5e9;
  DeviceSpec spec;
  spec.name = "this-cpu";
  spec.title = fmt::format("{}, {} cores, estimated", f.name, cores);
  spec.kind = Device::Kind::cpu;
  const auto add = [&](const char* key, double value, const char* unit, std::string source) {
    if (value > 0 && std::isfinite(value)) {
      spec.figures[key] = {.value = value,
                           .unit = unit,
                           .kind = FigureKind::assumed,
                           .source = std::move(source),
                           .low = 0,
                           .high = 0,
                           .samples = 0};
    }
  };
  // FLOP per clock and core: two FMA units of 16, 8 or 4 f32 lanes.
  const double f32 = f.avx512 ? 64 : f.fma256 ? 32 : 16;
  const char* lanes = f.avx512   ? "two 512-bit FMA units"
                      : f.fma256 ? "two 256-bit FMA units"
                                 : "two 128-bit FMA units";
  // AMX: a 16x16x32 bf16 (16x16x64 int8) tile product every 16 clocks. VDPBF16PS is no faster than
  // widening: one every second clock on an Emerald Rapids (bench/results, amx_clocks).
  const double bf16 = f.amx_bf16 ? 1024 : f32;
  const double int8 = f.amx_int8 ? 2048 : f.vnni ? 4 * f32 : f32;
  const auto rate = [&](double per_clock) { return per_clock * cores * hz; };
  const auto says = [&](double per_clock, const char* how) {
    return fmt::format("{} cores x {:.0f} FLOP per clock ({}) x clock_hz", cores, per_clock, how);
  };
  add("peak_f32_flop_per_s", rate(f32), "FLOP/s", says(f32, lanes));
  add("peak_vector_f32_flop_per_s", rate(f32), "FLOP/s", says(f32, lanes));
  add("peak_bf16_flop_per_s", rate(bf16), "FLOP/s",
      says(bf16, f.amx_bf16 ? "AMX" : "widened to f32"));
  add("peak_f16_flop_per_s", rate(f.avx512_fp16 ? 2 * f32 : f32), "FLOP/s",
      says(f.avx512_fp16 ? 2 * f32 : f32, f.avx512_fp16 ? "AVX-512 FP16" : "widened to f32"));
  add("peak_int8_flop_per_s", rate(int8), "FLOP/s",
      says(int8, f.amx_int8 ? "AMX"
                 : f.vnni   ? "VNNI"
                            : "widened to f32"));
  add("exp_per_s", rate(f32 / 16), "op/s",
      "f32 FMA lanes / 8: range reduction and a polynomial take about 8 instructions");
  add("bandwidth_bytes_per_s", std::min(12e9 * cores, 90e9), "B/s",
      "12 GB/s a core up to 90 GB/s, as measured on a two- and a sixteen-core Xeon with AMX");
  add("capacity_bytes", memory_bytes("MemTotal"), "B", "/proc/meminfo MemTotal");
  add("usable_bytes", memory_bytes("MemAvailable"), "B", "/proc/meminfo MemAvailable");
  add("sm_count", cores, "1", "cores that this process may run on");
  const auto l2 = static_cast<double>(sysconf(_SC_LEVEL2_CACHE_SIZE));
  add("l1_bytes", static_cast<double>(sysconf(_SC_LEVEL1_DCACHE_SIZE)), "B", "sysconf");
  add("fast_memory_bytes", l2, "B", "sysconf: level-2 cache of one core");
  add("l2_bytes", l2, "B", "sysconf: level-2 cache of one core");
  add("launch_s", 5e-6, "s", "one OpenMP parallel region, assumed");
  add("clock_hz", hz, "Hz",
      listed > 0 ? "the larger of CPUID leaf 0x16 and /proc/cpuinfo" : "no clock is listed here");
  return spec;
}

}  // namespace rafter
