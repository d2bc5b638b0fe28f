// Decode on vector units: few queries against many keys, O = softmax(softmax_scale · QKᵀ + mask) V;
// q in f32, bf16 or f16, K and V in that dtype or in int8 with an f32 factor per token and head,
// f32 inside. One source, three instruction sets: AVX-512, AVX2, portable.
// Q, O [batch, heads_q, seqlen_q, head_dim]   K, V [batch, heads_kv, seqlen_kv, head_dim]
// An item is one part of the keys of a sequence, some KV heads and all query rows (position × head
// of the group) of each, so that a byte of K or V comes from memory once:
//   scores   a chunk of 512 keys, four rows of queries at a time: head_dim in lanes, K as it lies
//   softmax  maximum, exp2, sum over the chunk; factors of int8 rows
//   values   O += P V, tiles of 64 keys that stay in the L1; the next tile is prefetched
//   merge    the parts of a sequence longer than one chunk, in their order
// Parts are cut by the sequence's own length, so the bits of a row depend on its own sequence
// alone. Limits: head_dim contiguous; more than 64 new tokens
// of a sequence are not split unless asked for.
#include <array>
#include <string>

#include "hw/cpu/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode_simd.cpp"
#include "hwy/foreach_target.h"
// after foreach_target, which compiles it once per instruction set
#include "kernels/cpu/decode_simd_kernel-inl.h"

#if HWY_ONCE
#include <omp.h>

#include "base/checked.h"
#include "hwy/targets.h"
#include "kernels/cpu/decode_simd_task.h"
#include "kernels/cpu/simd_sets.h"
#include "tiles/forward_simd.h"

namespace rafter {
namespace decode_simd {
namespace {

using base::checked_product;
using base::round_up;

constexpr std::int64_t kAlign = 64;  // bytes

tiles::DecodeLayout layout_of(const AttentionProblem& p, std::int64_t lanes) {
  return tiles::decode_layout(2 * lanes, p.head_dim, p.head_dim_v,
                              p.seqlen_q * (p.heads_q / p.heads_kv));
}

/// Many queries are not split: their partial results would outgrow the keys.
tiles::KeyParts parts_of(std::int64_t seqlen_q, std::int64_t seqlen_kv, std::int64_t splits) {
  return {seqlen_kv, splits == 0 && seqlen_q > tiles::kDecodeQueries ? 1 : splits};
}
std::int64_t parts_of(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  return parts_of(p.seqlen_q, p.seqlen_kv, problem.splits).count();
}

/// Workspace: scratch of each thread, then plans, then partial results.
struct Sizes {
  std::int64_t thread_bytes = 0, plan_bytes = 0;
  std::int64_t partial_rows = 0;
  std::int64_t total_bytes = 0;
};
/// Nothing when they exceed 2^60 bytes.
std::optional<Sizes> sizes_of(const KernelProblem& problem, std::int64_t lanes) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 60;
  const AttentionProblem& p = problem.attention;
  const std::int64_t split_queries =
      problem.splits > 0 ? p.seqlen_q : std::min(p.seqlen_q, tiles::kDecodeQueries);
  const auto rows_per_kv = checked_product({split_queries, p.heads_q});
  if (!rows_per_kv || *rows_per_kv > kLimit || p.batch > kLimit / 1024) {
    return std::nullopt;
  }
  const tiles::DecodeLayout layout = layout_of(p, lanes);
  Sizes sizes;
  sizes.thread_bytes = round_up(layout.floats * static_cast<std::int64_t>(sizeof(float)), kAlign);
  sizes.plan_bytes = round_up((p.batch + 1) * static_cast<std::int64_t>(sizeof(Plan)), kAlign);
  const std::int64_t parts = parts_of(split_queries, p.seqlen_kv, problem.splits).count();
  std::optional<std::int64_t> all_parts = 0;
  if (parts > 1) {
    all_parts = checked_product({p.batch, parts});
    if (all_parts && p.layout == Layout::packed && problem.splits == 0) {
      all_parts = std::min(*all_parts, p.total_kv / tiles::kDecodeChunk + p.batch);
    }
  }
  const auto rows = all_parts ? checked_product({*all_parts, *rows_per_kv}) : std::nullopt;
  const auto partial_bytes =
      rows ? checked_product({*rows, layout.columns + 2, static_cast<std::int64_t>(sizeof(float))})
           : std::nullopt;
  if (!partial_bytes || *partial_bytes > kLimit) {
    return std::nullopt;
  }
  sizes.partial_rows = *rows;
  sizes.total_bytes =
      problem.threads * sizes.thread_bytes + sizes.plan_bytes + round_up(*partial_bytes, kAlign);
  return sizes;
}

/// Writes the plan of every sequence and the totals behind the last.
void write_plans(const ForwardCall& call, Plan* plans, Run& run) {
  const AttentionProblem& p = call.problem.attention;
  Plan next;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    Plan& plan = plans[b];
    plan = next;
    plan.sequence = cpu::sequence_of(p, call.in, b);
    plan.parts = parts_of(plan.sequence.seqlen_q, plan.sequence.seqlen_kv, call.problem.splits);
    plan.row_blocks = base::div_up(plan.sequence.seqlen_q * run.group(), tiles::kDecodeRows);
    const std::int64_t parts = plan.parts.count();
    next.first_item += plan.row_blocks * parts;
    if (parts > 1) {
      next.first_merge += plan.sequence.seqlen_q * p.heads_q;
      next.first_part += parts * plan.sequence.seqlen_q * p.heads_q;
    }
  }
  plans[p.batch] = next;
  // Tokens lie in memory with their heads side by side: an item reads all of them, unless that
  // leaves threads without work. Heads do not meet, so this changes no bit.
  constexpr std::int64_t kItemsPerThread = 4;
  const std::int64_t units = std::max<std::int64_t>(1, next.first_item);
  const std::int64_t ranges = std::clamp<std::int64_t>(
      base::div_up(call.problem.threads * kItemsPerThread, units), 1, p.heads_kv);
  run.heads = base::div_up(p.heads_kv, ranges);
  for (std::int64_t b = 0; b <= p.batch; ++b) {
    plans[b].first_item *= run.head_ranges();
  }
  run.plans = plans;
}

Status forward(const ForwardCall& call, std::int64_t lanes, const Functions& functions) {
  const Sizes sizes = sizes_of(call.problem, lanes).value_or(Sizes{});
  const int threads = call.problem.threads;
  auto* const scratch = static_cast<std::byte*>(call.workspace.data);
  auto* const plans = reinterpret_cast<Plan*>(scratch + threads * sizes.thread_bytes);
  Run run{.call = call, .layout = layout_of(call.problem.attention, lanes)};
  run.partial_o =
      reinterpret_cast<float*>(scratch + threads * sizes.thread_bytes + sizes.plan_bytes);
  run.partial_state = run.partial_o + sizes.partial_rows * run.layout.columns;
  write_plans(call, plans, run);
  const std::int64_t items = run.items();
  const std::int64_t merges = run.merges();
#pragma omp parallel num_threads(static_cast <int>(std::clamp <std::int64_t>(items, 1, threads)))
  {
    auto* const mine =
        reinterpret_cast<float*>(scratch + omp_get_thread_num() * sizes.thread_bytes);
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t item = 0; item < items; ++item) {
      functions.item(run, item, mine);
    }
    // after the barrier of the loop above: all parts are there
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < merges; ++row) {
      functions.merge(run, row);
    }
  }
  return Status::ok();
}

Acceptance accepts(const KernelProblem& problem, std::int64_t lanes) {
  const AttentionProblem& p = problem.attention;
  if (Acceptance dtype = cpu::accepts_float(p.dtype); !dtype.yes) {
    return dtype;
  }
  if (!sizes_of(problem, lanes)) {
    return Acceptance::refuse("the partial results would need 2^60 bytes or more");
  }
  return Acceptance::accept();
}

/// Assumed: 60% of these vectors' f32 rate, of which rows that only fill a register block are lost,
/// and 85% of the bandwidth of main memory. An Emerald Rapids with two threads gave 18 to 29% on
/// AVX-512, 35 to 42% on AVX2, and at most 41% of the bandwidth (docs/kernels/decode_simd.md). Not
/// lowered before the other pipelines' shares with few rows are measured too: it would lose to
/// them.
Reach reach_of(const KernelProblem& problem, const DeviceSpec& spec,
               const tiles::SimdBlocking& blocking) {
  const AttentionProblem& p = problem.attention;
  const std::int64_t rows = std::max<std::int64_t>(1, p.seqlen_q * (p.heads_q / p.heads_kv));
  const double full = static_cast<double>(rows) / static_cast<double>(round_up(rows, 4));
  Reach reach = cpu::simd_reach(problem, spec, blocking, 0.6 * full);
  reach.bandwidth = 0.85;
  return reach;
}

/// One instruction set: its vectors, its code, and what it reaches of a machine.
template <typename Set>
struct Entry {
  static Reach reach(const KernelProblem& problem, const DeviceSpec& spec) {
    return reach_of(problem, spec, Set::kBlocking);
  }
  static KernelEntry entry() {
    return {.name = Set::kName,
            .device = Device::Kind::cpu,
            .pipeline = Pipeline::split_kv,
            .instruction_set = Set::kInstructionSet,
            .dtypes = {DType::f32, DType::bf16, DType::f16},
            .accepts_text =
                "every layout, mask, softcap and group; head_dim contiguous; k and v also in "
                "int8; splits the keys of up to 64 new tokens",
            .machine_has = cpu::machine_has<Set>,
            .accepts = [](const KernelProblem& p) { return accepts(p, Set::kLanes); },
            .reach = reach,
            .workspace =
                [](const KernelProblem& p) {
                  return sizes_of(p, Set::kLanes).value_or(Sizes{}).total_bytes;
                },
            .forward =
                [](const ForwardCall& call) {
                  return forward(call, Set::kLanes,
                                 Set::functions(*call.problem.attention.kv_dtype));
                },
            .kv_dtypes = {DType::int8},
            .splits = parts_of};
  }
};

struct Portable : cpu::PortableSet {
  static constexpr std::string_view kName = "decode_simd_portable";
  static constexpr tiles::SimdBlocking kBlocking = tiles::kSimdPortable;
  static constexpr std::int64_t kLanes = kBlocking.lanes;
  static Functions functions(DType dtype) { return HWY_STATIC_DISPATCH(functions)(dtype); }
};

#if HWY_TARGETS & HWY_AVX2
struct Avx2 : cpu::Avx2Set {
  static constexpr std::string_view kName = "decode_simd_avx2";
  static constexpr tiles::SimdBlocking kBlocking = tiles::kSimdAvx2;
  static constexpr std::int64_t kLanes = kBlocking.lanes;
  static Functions functions(DType dtype) { return N_AVX2::functions(dtype); }
};
#endif

#if HWY_TARGETS & HWY_AVX3
struct Avx512 : cpu::Avx512Set {
  static constexpr std::string_view kName = "decode_simd_avx512";
  static constexpr tiles::SimdBlocking kBlocking = tiles::kSimdAvx512;
  static constexpr std::int64_t kLanes = kBlocking.lanes;
  static Functions functions(DType dtype) { return N_AVX3::functions(dtype); }
};
#endif

}  // namespace
}  // namespace decode_simd

std::span<const KernelEntry> entries_decode_simd() {
  static const std::array kEntries = {
    decode_simd::Entry<decode_simd::Portable>::entry(),
#if HWY_TARGETS & HWY_AVX2
    decode_simd::Entry<decode_simd::Avx2>::entry(),
#endif
#if HWY_TARGETS & HWY_AVX3
    decode_simd::Entry<decode_simd::Avx512>::entry(),
#endif
  };
  return kEntries;
}

}  // namespace rafter
#endif  // HWY_ONCE
