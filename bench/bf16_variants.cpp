// Variants of the fused bf16 forward's schedule on this machine, by turns in one run: softmax
// between the products or before them, prefetch or not, keys between two visits of O, queries of a
// task, packing once or by each task. One JSON line per shape and variant. None of them changes a
// bit of a result; what the kernels use is Schedule{} and Bf16Blocking{}. usage:
// rafter_bf16_variants [THREADS [SECONDS]]
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "hw/cpu/amx.h"
#include "kernels/cpu/forward_bf16_run.h"
#include "rafter/measure.h"

#if RAFTER_HAS_AMX_CODE
#include <immintrin.h>

// as in kernels/cpu/forward_amx_bf16.cpp
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,bmi,bmi2")
#include "kernels/cpu/forward_amx_machine-inl.h"

namespace rafter::forward_amx {
namespace {
template <forward_bf16::Schedule kSchedule>
constexpr forward_bf16::Functions kAmx = forward_bf16::kFunctions<Amx, kSchedule>;
constexpr forward_bf16::Functions kBoth = kAmx<{}>;
constexpr forward_bf16::Functions kApart = kAmx<{.interleave = false}>;
constexpr forward_bf16::Functions kNoPrefetch = kAmx<{.prefetch = false}>;
}  // namespace
}  // namespace rafter::forward_amx
#pragma GCC pop_options
#pragma GCC diagnostic pop

namespace {

using namespace rafter;

struct Variant {
  const char* name;
  forward_bf16::Functions functions;
  tiles::Bf16Blocking blocking;
};

const std::vector<Variant>& variants() {
  using namespace forward_amx;
  static const std::vector<Variant> kVariants = {
      {"as shipped", kBoth, {}},
      {"softmax before products", kApart, {}},
      {"no prefetch", kNoPrefetch, {}},
      {"128 keys", kBoth, {.chunk = 128}},
      {"256 keys", kBoth, {.chunk = 256}},
      {"128 queries", kBoth, {.lanes = 128}},
      {"256 queries", kBoth, {.lanes = 256}},
      {"256 queries, 256 keys", kBoth, {.lanes = 256, .chunk = 256}},
      {"every task packs", kBoth, {.least_saved = std::int64_t{1} << 50}},
      {"softmax before products, 128 keys, every task packs",  // nearest to the first version
       kApart,
       {.least_saved = std::int64_t{1} << 50}},
  };
  return kVariants;
}

std::vector<std::uint16_t> random_bf16(std::int64_t elements, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> out(static_cast<std::size_t>(elements));
  std::generate(out.begin(), out.end(), [&] { return f32_to_bf16(normal(generator)); });
  return out;
}

struct Shape {
  std::int64_t seqlen, head_dim;
  bool causal;
};

int measure(const Shape& shape, int threads, double seconds) {
  constexpr std::int64_t kHeads = 8;
  const std::int64_t n = shape.seqlen, d = shape.head_dim;
  const KernelProblem problem = {
      .attention = {.heads_q = kHeads,
                    .heads_kv = kHeads,
                    .seqlen_q = n,
                    .seqlen_kv = n,
                    .head_dim = d,
                    .head_dim_v = d,
                    .dtype = DType::bf16,
                    .mask = shape.causal ? Mask::causal() : Mask::none(),
                    .softmax_scale = 1 / std::sqrt(static_cast<float>(d))},
      .threads = threads};
  std::vector<std::uint16_t> q = random_bf16(n * kHeads * d, 1), k = random_bf16(n * kHeads * d, 2),
                             v = random_bf16(n * kHeads * d, 3), o(q.size());
  const auto view = [&](std::vector<std::uint16_t>& x) {
    return TensorView::contiguous(x.data(), DType::bf16, 1, n, kHeads, d);
  };
  const ForwardInputs in = {view(q), view(k), view(v)};
  const ForwardOutputs out = {view(o)};
  std::vector<Work> work;
  std::int64_t bytes = 0;
  for (const Variant& variant : variants()) {
    bytes = std::max(bytes, forward_bf16::workspace(problem, variant.blocking));
  }
  constexpr std::size_t kPage = std::size_t{2} << 20;
  void* const memory =
      std::aligned_alloc(kPage, (static_cast<std::size_t>(bytes) + kPage - 1) / kPage * kPage);
  std::vector<std::uint16_t> first;
  for (const Variant& variant : variants()) {
    work.emplace_back([&]() {
      const ForwardCall call = {problem, in, out, {memory, bytes}};
      return forward_bf16::forward<hw::amx::TileScope>(call, variant.functions, variant.blocking);
    });
    if (Status status = work.back()(); !status) {
      std::fprintf(stderr, "%s: %s\n", variant.name, status.message().c_str());
      return 1;
    }
    if (first.empty()) {
      first = o;
    } else if (first != o) {
      std::fprintf(stderr, "%s: other bits than %s\n", variant.name, variants()[0].name);
      return 1;
    }
  }
  const Result<std::vector<Timing>> times =
      time_alternating(work, {.min_time_s = seconds / 2, .max_time_s = seconds});
  std::free(memory);
  if (!times) {
    std::fprintf(stderr, "%s\n", times.status().message().c_str());
    return 1;
  }
  const double pairs = static_cast<double>(n) * static_cast<double>(shape.causal ? n + 1 : 2 * n);
  for (std::size_t i = 0; i < times->size(); ++i) {
    const Statistics& s = (*times)[i].seconds;
    std::printf(
        "{\"record\":\"bf16_variants\",\"variant\":\"%s\",\"case\":{\"seqlen\":%lld,\"head_dim\":"
        "%lld,\"heads\":%lld,\"causal\":%d,\"threads\":%d},\"median_s\":%.9g,\"p10_s\":%.9g,"
        "\"p90_s\":%.9g,\"n\":%lld,\"flop_per_s\":%.6g}\n",
        variants()[i].name, static_cast<long long>(n), static_cast<long long>(d),
        static_cast<long long>(kHeads), shape.causal ? 1 : 0, threads, s.median, s.p10, s.p90,
        static_cast<long long>(s.n), 2.0 * static_cast<double>(d * kHeads) * pairs / s.median);
  }
  std::fflush(stdout);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1.0;
  if (threads < 1 || !(seconds > 0)) {
    std::fprintf(stderr, "usage: rafter_bf16_variants [THREADS [SECONDS]]\n");
    return 2;
  }
  if (const std::string refusal = hw::amx::request(); !refusal.empty()) {
    std::fprintf(stderr, "rafter_bf16_variants: %s\n", refusal.c_str());
    return 77;
  }
  const Shape shapes[] = {{4096, 128, false}, {4096, 128, true}, {4096, 64, false},
                          {1024, 128, false}, {512, 128, false}, {64, 128, false}};
  for (const Shape& shape : shapes) {
    if (const int failed = measure(shape, threads, seconds); failed != 0) {
      return failed;
    }
  }
  return 0;
}
#else
int main() {
  std::fprintf(stderr, "rafter_bf16_variants: %s\n", rafter::hw::amx::request().c_str());
  return 77;
}
#endif
