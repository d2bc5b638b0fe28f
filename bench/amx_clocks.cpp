// What the AMX units of this machine give, and the fused forward beside it. A virtual machine may
// hide that its CPUs are hyperthreads: two on one core share one tile unit, and which two do
// changes while a program runs. So every call of the forward stands between two short runs of its
// own QKᵀ product on every thread; calls in which all of them ran at the rate of a unit alone are
// summed up apart. One JSON line per figure. usage: rafter_amx_clocks [THREADS [SECONDS]]
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bf16_case.h"
#include "hw/cpu/amx.h"
#include "kernels/cpu/forward_bf16_run.h"

#if RAFTER_HAS_AMX_CODE
#include <immintrin.h>

// as in kernels/cpu/forward_amx_bf16.cpp
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,bmi,bmi2")
#include "kernels/cpu/forward_amx_machine-inl.h"

namespace rafter::forward_amx {
namespace {

constexpr forward_bf16::Functions kShipped = forward_bf16::kFunctions<Amx>;

/// Tile products that QKᵀ of 32 keys by 32 queries takes at head_dim 128.
constexpr std::int64_t kScoreDots = 16;

/// QKᵀ of `blocks` blocks; a: 8 KB of keys, b: 16 KB of queries, c: 4 KB.
[[gnu::noinline]] void score_blocks(const std::uint16_t* a, const std::uint16_t* b, float* c,
                                    std::int64_t blocks) {
  constexpr std::int64_t kSteps = 4;
  for (std::int64_t i = 0; i < blocks; ++i) {
    const forward_bf16::Product product = {a,      b, b + kSteps * forward_bf16::kTileElements,
                                           kSteps, c, c + 2 * forward_bf16::kTileSums};
    Amx::product<false>(product, [] {});
  }
}

/// `rounds` times four products of tiles that lie in registers.
[[gnu::noinline]] void dots(std::int64_t rounds) {
  for (std::int64_t i = 0; i < rounds; ++i) {
    hw::amx::dot_bf16<0, 4, 6>();
    hw::amx::dot_bf16<1, 4, 7>();
    hw::amx::dot_bf16<2, 5, 6>();
    hw::amx::dot_bf16<3, 5, 7>();
  }
}

}  // namespace
}  // namespace rafter::forward_amx
#pragma GCC pop_options
#pragma GCC diagnostic pop

namespace {

using namespace rafter;
using namespace rafter::bench;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) {
    return std::nan("");
  }
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1))];
}

/// Seconds of a tile product within QKᵀ, of the slowest of so many threads now.
double probe(int threads) {
  double slowest = 0;
#pragma omp parallel num_threads(threads) reduction(max : slowest)
  {
    alignas(64) static thread_local std::uint16_t a[8 * 512], b[8 * 512];
    alignas(64) static thread_local float c[4 * 256];
    const hw::amx::TileScope scope;
    constexpr std::int64_t kBlocks = 64;
    forward_amx::score_blocks(a, b, c, 8);
    const double start = seconds_now();
    forward_amx::score_blocks(a, b, c, kBlocks);
    slowest = (seconds_now() - start) / static_cast<double>(kBlocks * forward_amx::kScoreDots);
  }
  return slowest;
}

/// Tile products from registers on 1 to `threads` threads at once: in all, as multiples of the most
/// that one thread reached in any slice of a millisecond.
void count_units(int threads, double seconds) {
  std::vector<double> rates;
  double most = 0;
  for (int n = 1; n <= threads; n *= 2) {
    double all = 0;
#pragma omp parallel num_threads(n) reduction(+ : all) reduction(max : most)
    {
      const hw::amx::TileScope scope;
      constexpr std::int64_t kRounds = 20000;
      std::int64_t slices = 0;
      const double start = seconds_now();
      double now = start;
      while (now - start < seconds) {
        forward_amx::dots(kRounds);
        const double end = seconds_now();
        most = std::max(most, static_cast<double>(4 * kRounds) / (end - now));
        now = end;
        ++slices;
      }
      all = static_cast<double>(slices * 4 * kRounds) / (now - start);
    }
    rates.push_back(all);
  }
  for (std::size_t i = 0; i < rates.size(); ++i) {
    std::printf(
        "{\"record\":\"amx_units\",\"threads\":%d,\"units\":%.4g,\"flop_per_s\":%.5g,"
        "\"unit_flop_per_s\":%.5g}\n",
        1 << i, rates[i] / most, rates[i] * 16384, most * 16384);
  }
}

/// The forward of 8 heads between probes, for so many seconds.
void measure(const Shape& shape, int threads, double seconds, double unit_s) {
  const std::int64_t n = shape.seqlen, elements = shape.elements();
  const KernelProblem problem = shape.problem(threads);
  Bits q = random_bf16(elements, 1), k = random_bf16(elements, 2), v = random_bf16(elements, 3);
  Bits o(static_cast<std::size_t>(elements));
  std::vector<float> lse(static_cast<std::size_t>(n * kHeads));
  const std::int64_t bytes = forward_bf16::workspace(problem);
  std::vector<std::byte> memory(static_cast<std::size_t>(bytes) + 64);
  void* at = memory.data();
  std::size_t space = memory.size();
  std::align(64, static_cast<std::size_t>(bytes), at, space);
  const ForwardInputs in = {shape.view(q), shape.view(k), shape.view(v)};
  const ForwardOutputs out = {shape.view(o), LseView::contiguous(lse.data(), 1, kHeads, n)};
  const ForwardCall call = {problem, in, out, {at, bytes}};
  std::vector<double> all, alone;
  const double end = seconds_now() + seconds;
  double before = probe(threads);
  while (all.empty() || seconds_now() < end) {
    const double start = seconds_now();
    if (!forward_bf16::forward<hw::amx::TileScope>(call, forward_amx::kShipped)) {
      std::exit(1);
    }
    all.push_back(seconds_now() - start);
    const double after = probe(threads);
    constexpr double kAlone = 1.3;  // shared units take two to three times as long
    if (std::max(before, after) < kAlone * unit_s) {
      alone.push_back(all.back());
    }
    before = after;
  }
  const double flops = 2 * shape.product_flops();
  const auto rate = [&](const std::vector<double>& times) {
    return times.empty() ? std::string("null") : std::to_string(flops / quantile(times, 0.5));
  };
  std::printf(
      "{\"record\":\"amx_forward\",\"case\":{\"seqlen\":%lld,\"head_dim\":%lld,\"heads\":%lld,"
      "\"causal\":%d,\"threads\":%d},\"n\":%zu,\"n_alone\":%zu,\"flop_per_s\":%s,"
      "\"alone_flop_per_s\":%s,\"best_flop_per_s\":%.6g}\n",
      static_cast<long long>(n), static_cast<long long>(shape.head_dim),
      static_cast<long long>(kHeads), shape.causal ? 1 : 0, threads, all.size(), alone.size(),
      rate(all).c_str(), rate(alone).c_str(), flops / quantile(all, 0));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1.0;
  if (threads < 1 || !(seconds > 0)) {
    std::fprintf(stderr, "usage: rafter_amx_clocks [THREADS [SECONDS]]\n");
    return 2;
  }
  if (const std::string refusal = hw::amx::request(); !refusal.empty()) {
    std::fprintf(stderr, "rafter_amx_clocks: %s\n", refusal.c_str());
    return 77;
  }
  count_units(omp_get_max_threads(), seconds / 4);
  std::vector<double> probes;
  const double end = seconds_now() + seconds / 2;
  while (seconds_now() < end) {
    probes.push_back(probe(1));
  }
  const double unit_s = quantile(probes, 0.01);
  std::printf(
      "{\"record\":\"amx_probe\",\"least_s\":%.4g,\"median_s\":%.4g,\"p90_s\":%.4g,\"n\":%zu}\n",
      unit_s, quantile(probes, 0.5), quantile(probes, 0.9), probes.size());
  for (const Shape& shape :
       {Shape{4096, 128, false}, Shape{4096, 128, true}, Shape{4096, 64, false},
        Shape{4096, 256, false}, Shape{512, 128, false}, Shape{1024, 128, false}}) {
    measure(shape, threads, seconds, unit_s);
  }
  return 0;
}
#else
int main() {
  std::fprintf(stderr, "rafter_amx_clocks: %s\n", rafter::hw::amx::request().c_str());
  return 77;
}
#endif
