// Variants of the fused bf16 kernels' schedules on this machine, by turns in one run. Forward:
// softmax between the products or before them, prefetch or not, keys between two visits of O,
// queries of a task, packing once or by each task. Backward: the same of exponentials, keys of a
// task, rows of a tile. One JSON line per shape and variant. None of them changes a bit of a
// result; what the kernels use is Schedule{} and the blockings' defaults. usage:
// rafter_bf16_variants [THREADS [SECONDS [forward | backward]]]
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "bf16_case.h"
#include "hw/cpu/amx.h"
#include "kernels/cpu/backward_bf16_run.h"
#include "kernels/cpu/forward_bf16_run.h"
#include "rafter/measure.h"

#if RAFTER_HAS_AMX_CODE
#include <immintrin.h>

// as in kernels/cpu/forward_amx_bf16.cpp
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,bmi,bmi2")
#include "kernels/cpu/backward_bf16_task.h"
#include "kernels/cpu/forward_amx_machine-inl.h"

namespace rafter::forward_amx {
namespace {
template <forward_bf16::Schedule kSchedule>
constexpr forward_bf16::Functions kAmx = forward_bf16::kFunctions<Amx, kSchedule>;
constexpr forward_bf16::Functions kBoth = kAmx<{}>;
constexpr forward_bf16::Functions kApart = kAmx<{.interleave = false}>;
constexpr forward_bf16::Functions kNoPrefetch = kAmx<{.prefetch = false}>;
constexpr forward_bf16::Functions kWhole = kAmx<{.most_parts = 1}>;
template <backward_bf16::Schedule kSchedule>
constexpr backward_bf16::Functions kBackward = backward_bf16::kFunctions<Amx, kSchedule>;
constexpr backward_bf16::Functions kBackwardBoth = kBackward<{}>;
constexpr backward_bf16::Functions kBackwardApart = kBackward<{.interleave = false}>;
}  // namespace
}  // namespace rafter::forward_amx
#pragma GCC pop_options
#pragma GCC diagnostic pop

namespace {

using namespace rafter;
using namespace rafter::bench;

/// One problem's tensors, contiguous, and a workspace large enough for every variant.
struct Scene {
  KernelProblem problem;
  Bits q, k, v, o, d_o, dq, dk, dv;
  std::vector<float> lse;
  Workspace workspace = {};

  TensorView view(Bits& x) const {
    const AttentionProblem& p = problem.attention;
    return TensorView::contiguous(x.data(), DType::bf16, 1, p.seqlen_q, p.heads_q, p.head_dim);
  }
  LseView lse_view() {
    const AttentionProblem& p = problem.attention;
    return LseView::contiguous(lse.data(), 1, p.heads_q, p.seqlen_q);
  }
};

struct Variant {
  std::string name;
  std::function<std::int64_t(const KernelProblem&)> workspace;
  std::function<Status(Scene&)> run;
};

Variant of_forward(const char* name, const forward_bf16::Functions& functions,
                   const tiles::Bf16Blocking& blocking) {
  return {name, [=](const KernelProblem& p) { return forward_bf16::workspace(p, blocking); },
          [=](Scene& s) {
            const ForwardInputs in = {s.view(s.q), s.view(s.k), s.view(s.v)};
            const ForwardOutputs out = {s.view(s.o), s.lse_view()};
            const ForwardCall call = {s.problem, in, out, s.workspace};
            return forward_bf16::forward<hw::amx::TileScope>(call, functions, blocking);
          }};
}

Variant of_backward(const char* name, const backward_bf16::Functions& functions,
                    const tiles::Bf16BackwardBlocking& blocking) {
  return {name, [=](const KernelProblem& p) { return backward_bf16::workspace(p, blocking); },
          [=](Scene& s) {
            const BackwardInputs in = {.q = s.view(s.q),
                                       .k = s.view(s.k),
                                       .v = s.view(s.v),
                                       .o = s.view(s.o),
                                       .lse = s.lse_view(),
                                       .d_o = s.view(s.d_o)};
            const BackwardOutputs out = {s.view(s.dq), s.view(s.dk), s.view(s.dv)};
            const BackwardCall call = {s.problem, in, out, s.workspace};
            return backward_bf16::backward<hw::amx::TileScope>(call, functions, blocking);
          }};
}

std::vector<Variant> forward_variants() {
  using namespace forward_amx;
  constexpr std::int64_t kNever = std::int64_t{1} << 50;
  return {
      of_forward("as shipped", kBoth, {}),
      of_forward("softmax before products", kApart, {}),
      of_forward("no prefetch", kNoPrefetch, {}),
      of_forward("columns as a whole", kWhole, {}),
      of_forward("128 keys", kBoth, {.chunk = 128}),
      of_forward("256 keys", kBoth, {.chunk = 256}),
      of_forward("128 queries", kBoth, {.lanes = 128}),
      of_forward("256 queries", kBoth, {.lanes = 256}),
      of_forward("256 queries, 256 keys", kBoth, {.lanes = 256, .chunk = 256}),
      of_forward("every task packs", kBoth, {.least_saved = kNever}),
      of_forward("softmax before products, 128 keys, every task packs",  // nearest to the first
                 kApart, {.least_saved = kNever}),
  };
}

std::vector<Variant> backward_variants() {
  using namespace forward_amx;
  return {
      of_backward("as shipped", kBackwardBoth, {}),
      of_backward("exponentials before products", kBackwardApart, {}),
      of_backward("128 keys", kBackwardBoth, {.keys = 128}),
      of_backward("128 rows", kBackwardBoth, {.tile_q = 128}),
      of_backward("512 rows", kBackwardBoth, {.tile_q = 512}),
      of_backward("128 keys, 512 rows", kBackwardBoth, {.keys = 128, .tile_q = 512}),
      of_backward("512 keys, 128 rows", kBackwardBoth, {.keys = 512, .tile_q = 128}),
  };
}

int measure(const std::vector<Variant>& variants, bool backward, const Shape& shape, int threads,
            double seconds) {
  const std::int64_t n = shape.seqlen, elements = shape.elements();
  Scene scene = {.problem = shape.problem(threads),
                 .q = random_bf16(elements, 1),
                 .k = random_bf16(elements, 2),
                 .v = random_bf16(elements, 3),
                 .o = Bits(static_cast<std::size_t>(elements)),
                 .d_o = random_bf16(elements, 4),
                 .dq = Bits(static_cast<std::size_t>(elements)),
                 .dk = Bits(static_cast<std::size_t>(elements)),
                 .dv = Bits(static_cast<std::size_t>(elements)),
                 .lse = std::vector<float>(static_cast<std::size_t>(n * kHeads))};
  const Variant forward = forward_variants()[0];
  std::int64_t bytes = forward.workspace(scene.problem);
  for (const Variant& variant : variants) {
    bytes = std::max(bytes, variant.workspace(scene.problem));
  }
  constexpr std::size_t kPage = std::size_t{2} << 20;
  void* const memory =
      std::aligned_alloc(kPage, (static_cast<std::size_t>(bytes) + kPage - 1) / kPage * kPage);
  scene.workspace = {memory, bytes};
  std::vector<Work> work;
  std::vector<Bits> first;
  if (Status status = forward.run(scene); !status) {  // o and lse of the backward
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  for (const Variant& variant : variants) {
    work.emplace_back([&]() { return variant.run(scene); });
    if (Status status = work.back()(); !status) {
      std::fprintf(stderr, "%s: %s\n", variant.name.c_str(), status.message().c_str());
      return 1;
    }
    const std::vector<Bits> bits = {scene.o, scene.dq, scene.dk, scene.dv};
    if (first.empty()) {
      first = bits;
    } else if (first != bits) {
      std::fprintf(stderr, "%s: other bits than %s\n", variant.name.c_str(),
                   variants[0].name.c_str());
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
  for (std::size_t i = 0; i < times->size(); ++i) {
    const Statistics& s = (*times)[i].seconds;
    std::printf(
        "{\"record\":\"bf16%s_variants\",\"variant\":\"%s\",\"case\":{\"seqlen\":%lld,\"head_dim\":"
        "%lld,\"heads\":%lld,\"causal\":%d,\"threads\":%d},\"median_s\":%.9g,\"p10_s\":%.9g,"
        "\"p90_s\":%.9g,\"n\":%lld,\"flop_per_s\":%.6g}\n",
        backward ? "_backward" : "", variants[i].name.c_str(), static_cast<long long>(n),
        static_cast<long long>(shape.head_dim), static_cast<long long>(kHeads),
        shape.causal ? 1 : 0, threads, s.median, s.p10, s.p90, static_cast<long long>(s.n),
        (backward ? 5.0 : 2.0) * shape.product_flops() / s.median);
  }
  std::fflush(stdout);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1.0;
  const std::string pass = argc > 3 ? argv[3] : "forward";
  const bool backward = pass == "backward";
  if (threads < 1 || !(seconds > 0) || (!backward && pass != "forward")) {
    std::fprintf(stderr, "usage: rafter_bf16_variants [THREADS [SECONDS [forward | backward]]]\n");
    return 2;
  }
  if (const std::string refusal = hw::amx::request(); !refusal.empty()) {
    std::fprintf(stderr, "rafter_bf16_variants: %s\n", refusal.c_str());
    return 77;
  }
  const std::vector<Variant> variants = backward ? backward_variants() : forward_variants();
  const Shape shapes[] = {{4096, 128, false}, {4096, 128, true}, {4096, 64, false},
                          {1024, 128, false}, {512, 128, false}, {64, 128, false}};
  for (const Shape& shape : shapes) {
    if (const int failed = measure(variants, backward, shape, threads, seconds); failed != 0) {
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
