// Decode on vector units and on AMX tiles: few queries against many keys,
// O = softmax(softmax_scale · QKᵀ + mask) V; q in f32, bf16 or f16, K and V in that dtype or in
// int8 with an f32 factor per token and head, f32 inside. One source, three instruction sets:
// AVX-512, AVX2, portable; with AVX-512 also on tiles, for caches in bf16 and int8.
// Q, O [batch, heads_q, seqlen_q, head_dim]   K, V [batch, heads_kv, seqlen_kv, head_dim]
// An item is one part of the keys of a sequence, some KV heads and all query rows (position × head
// of the group) of each, so that a byte of K or V comes from memory once. It walks tiles of 64
// keys, and the heads within each, four rows of queries at a time:
//   scores   head_dim in lanes, or 16 keys a tile of AMX; K as it lies
//   softmax  running maximum, exp2, sum; factors of int8 rows
//   values   O += P V; on AMX with V as it lies
//   merge    the parts of a sequence longer than 512 keys, in their order
// The next tile is prefetched meanwhile. Parts are cut by the sequence's own length, so the bits of
// a row depend on its own sequence alone. Limits: head_dim contiguous; more than 64 new tokens of a
// sequence are not split unless asked for.
#include <array>
#include <string>

#include "hw/cpu/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode_simd.cpp"
#include "hwy/foreach_target.h"
// after foreach_target, which compiles it once per instruction set
#include "kernels/cpu/decode_simd_kernel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {

/// The code of this instruction set for a dtype of K and V, for the entries.
Functions functions(DType kv_dtype) {
  return kv_dtype == DType::f32    ? kFunctions<DType::f32>
         : kv_dtype == DType::bf16 ? kFunctions<DType::bf16>
         : kv_dtype == DType::f16  ? kFunctions<DType::f16>
                                   : kFunctions<DType::int8>;
}

#if HWY_TARGET == HWY_AVX3 && RAFTER_HAS_AMX_CODE
/// The same on AMX: bf16 and int8.
Functions functions_on_amx(DType kv_dtype) {
  return kv_dtype == DType::bf16 ? kFunctions<DType::bf16, Amx> : kFunctions<DType::int8, Amx>;
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "hwy/targets.h"
#include "kernels/cpu/bf16_machines.h"
#include "kernels/cpu/decode_simd_run.h"
#include "kernels/cpu/simd_sets.h"
#include "tiles/forward_simd.h"

namespace rafter {
namespace decode_simd {
namespace {

bool fits_tiles(const AttentionProblem& p) {
  return tiles::decode_fits_tiles(p.kv_dtype.value_or(p.dtype) == DType::int8 ? 1 : 2, p.head_dim,
                                  p.head_dim_v);
}

std::string note(const KernelProblem& problem) {
  return fits_tiles(problem.attention) ? ""
                                       : "tiles want head_dim and head_dim_v in multiples of 32 "
                                         "(int8: 64): these products run on AVX-512";
}

Acceptance accepts(const KernelProblem& problem, const Units& units) {
  const AttentionProblem& p = problem.attention;
  if (Acceptance dtype = cpu::accepts_float(p.dtype); !dtype.yes) {
    return dtype;
  }
  if (units.tiles && p.dtype != DType::bf16) {
    return Acceptance::refuse(std::string(to_string(p.dtype)) + " is not bf16");
  }
  if (!sizes_of(problem, units)) {
    return Acceptance::refuse("the partial results would need 2^60 bytes or more");
  }
  return Acceptance::accept();
}

/// Assumed: 60% of these vectors' f32 rate, of which rows that only fill a register block are lost,
/// and 85% of the bandwidth of main memory. An Emerald Rapids with two threads gave a third of the
/// rate and two thirds to three quarters of what a loop of loads reads
/// (docs/kernels/decode_simd.md). Not lowered before the other pipelines' shares with few rows are
/// measured too: it would lose to them. Tiles came to 75 to 90% of that loop, so they are chosen
/// first.
Reach reach_of(const KernelProblem& problem, const DeviceSpec& spec,
               const tiles::SimdBlocking& blocking, const Units& units) {
  const AttentionProblem& p = problem.attention;
  const std::int64_t rows = std::max<std::int64_t>(1, p.seqlen_q * (p.heads_q / p.heads_kv));
  const double full = static_cast<double>(rows) / static_cast<double>(base::round_up(rows, 4));
  const double share = units.tiles ? 0.63 : 0.6;
  Reach reach = cpu::simd_reach(problem, spec, blocking, share * full);
  reach.bandwidth = units.tiles ? 0.89 : 0.85;
  return reach;
}

/// Of a set with tiles, the permission to use them too.
template <typename Set>
Acceptance machine_has() {
#if RAFTER_HAS_AMX_CODE
  if constexpr (Set::kUnits.tiles) {
    const Acceptance amx = cpu::machine_has_amx();
    return amx.yes && !hw::amx::has_int8() ? Acceptance::refuse("this CPU has no AMX with int8")
                                           : amx;
  }
#endif
  return cpu::machine_has<Set>();
}

/// One instruction set: its vectors, its code, and what it reaches of a machine.
template <typename Set>
struct Entry {
  static Reach reach(const KernelProblem& problem, const DeviceSpec& spec) {
    return reach_of(problem, spec, Set::kBlocking, Set::kUnits);
  }
  static KernelEntry entry() {
    return {
        .name = Set::kName,
        .device = Device::Kind::cpu,
        .pipeline = Pipeline::split_kv,
        .instruction_set = Set::kInstructionSet,
        .dtypes = Set::kUnits.tiles ? std::vector{DType::bf16}
                                    : std::vector{DType::f32, DType::bf16, DType::f16},
        .accepts_text =
            Set::kUnits.tiles
                ? "bf16, k and v also in int8; every layout, mask, softcap and group; head_dim "
                  "contiguous, on tiles in multiples of 32 (int8: 64); splits the keys of up to "
                  "64 new tokens"
                : "every layout, mask, softcap and group; head_dim contiguous; k and v also in "
                  "int8; splits the keys of up to 64 new tokens",
        .machine_has = machine_has<Set>,
        .accepts = [](const KernelProblem& p) { return accepts(p, Set::kUnits); },
        .reach = reach,
        .workspace =
            [](const KernelProblem& p) {
              return sizes_of(p, Set::kUnits).value_or(Sizes{}).total_bytes;
            },
        .forward =
            [](const ForwardCall& call) {
              return forward(call, Set::kUnits, Set::functions(*call.problem.attention.kv_dtype));
            },
        .note = Set::kUnits.tiles ? note : nullptr,
        .kv_dtypes = {DType::int8},
        .splits = parts_of};
  }
};

struct Portable : cpu::PortableSet {
  static constexpr std::string_view kName = "decode_simd_portable";
  static constexpr tiles::SimdBlocking kBlocking = tiles::kSimdPortable;
  static constexpr Units kUnits = {kBlocking.lanes};
  static Functions functions(DType dtype) { return HWY_STATIC_DISPATCH(functions)(dtype); }
};

#if HWY_TARGETS & HWY_AVX2
struct Avx2 : cpu::Avx2Set {
  static constexpr std::string_view kName = "decode_simd_avx2";
  static constexpr tiles::SimdBlocking kBlocking = tiles::kSimdAvx2;
  static constexpr Units kUnits = {kBlocking.lanes};
  static Functions functions(DType dtype) { return N_AVX2::functions(dtype); }
};
#endif

#if HWY_TARGETS & HWY_AVX3
struct Avx512 : cpu::Avx512Set {
  static constexpr std::string_view kName = "decode_simd_avx512";
  static constexpr tiles::SimdBlocking kBlocking = tiles::kSimdAvx512;
  static constexpr Units kUnits = {kBlocking.lanes};
  static Functions functions(DType dtype) { return N_AVX3::functions(dtype); }
};
#if RAFTER_HAS_AMX_CODE
struct Amx : cpu::Avx512Set {
  static constexpr std::string_view kName = "decode_simd_amx";
  static constexpr std::string_view kInstructionSet = "amx";
  static constexpr tiles::SimdBlocking kBlocking = tiles::kSimdAvx512;
  static constexpr Units kUnits = {kBlocking.lanes, true};
  static Functions functions(DType dtype) { return N_AVX3::functions_on_amx(dtype); }
};
#endif
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
#if RAFTER_HAS_AMX_CODE
    decode_simd::Entry<decode_simd::Amx>::entry(),
#endif
#endif
  };
  return kEntries;
}

}  // namespace rafter
#endif  // HWY_ONCE
