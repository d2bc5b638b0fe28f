// Backward attention on vector units, fused: scores are computed again from Q, K and lse; f32, bf16
// or f16 in, that or f32 out, f32 inside. One source, three instruction sets: AVX-512, AVX2,
// portable.
// Q, O, dO, dQ [batch, heads_q, seqlen_q, head_dim]   K, V, dK, dV [batch, heads_kv, seqlen_kv, …]
// Before all: delta = rowsum(dO ∘ O) − dlse of each row. Then one task per block of keys of a KV
// head (keys in lanes, panels of 24 or 48), over the heads of the group and their rows in tiles of
// 96, panel by panel
//   S = Q Kᵀ | dP = dO Vᵀ | P = exp2(S − lse), dS = P ∘ (dP − delta) | dVᵀ += dOᵀ P | dKᵀ += Qᵀ dS
// and for all panels at once dQ += dS K, in turn: block after block of keys. Blocks and tiles start
// at multiples of their size, which follows from the head dimensions alone; so the bits of a
// gradient depend on its own sequence alone. Limits: head_dim contiguous; dense and packed.
#include <array>
#include <string>

#include "hw/cpu/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/backward_simd.cpp"
#include "hwy/foreach_target.h"
// after foreach_target, which compiles it once per instruction set
#include "kernels/cpu/backward_simd_kernel-inl.h"

#if HWY_ONCE
#include "hwy/targets.h"
#include "kernels/cpu/simd_sets.h"

namespace rafter {
namespace backward_simd {
namespace {

Acceptance accepts(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  if (Acceptance dtype = cpu::accepts_float(p.dtype); !dtype.yes) {
    return dtype;
  }
  constexpr std::int64_t kWidestRow = (256 + 16) * sizeof(float);
  const std::int64_t batch = p.layout == Layout::packed ? 1 : p.batch;
  const std::int64_t rows = p.layout == Layout::packed ? p.total_q : p.seqlen_q;
  const auto bytes = base::checked_product({batch, rows, p.heads_q, kWidestRow});
  constexpr std::int64_t kLimit = std::int64_t{1} << 60;
  if (!bytes || *bytes > kLimit) {
    return Acceptance::refuse("dq in f32 would need 2^60 bytes or more");
  }
  return Acceptance::accept();
}

/// One instruction set: its blocking, its code, and what it reaches of a machine.
template <typename Set>
struct Entry {
  static tiles::SimdBackwardLayout layout_of(const KernelProblem& problem) {
    return tiles::simd_backward_layout(Set::kBlocking, problem.attention.head_dim,
                                       problem.attention.head_dim_v);
  }
  static std::int64_t workspace(const KernelProblem& problem) {
    return places_of(problem, layout_of(problem)).total;
  }
  static Status backward(const BackwardCall& call) {
    run_backward(Run(call, layout_of(call.problem)), Set::functions());
    return Status::ok();
  }
  static Reach reach(const KernelProblem& problem, const DeviceSpec& spec) {
    constexpr double kMeasured = 0.8;
    return cpu::simd_reach(problem, spec, Set::kBlocking.products, kMeasured);
  }
  static KernelEntry entry() {
    return {.name = Set::kName,
            .device = Device::Kind::cpu,
            .pipeline = Pipeline::fused,
            .instruction_set = Set::kInstructionSet,
            .dtypes = {DType::f32, DType::bf16, DType::f16},
            .accepts_text = "dense and packed, every mask, softcap and group; head_dim contiguous",
            .machine_has = cpu::machine_has<Set>,
            .accepts = accepts,
            .reach = reach,
            .workspace = workspace,
            .backward = backward};
  }
};

struct Portable : cpu::PortableSet {
  static constexpr std::string_view kName = "backward_simd_portable";
  static constexpr tiles::SimdBackwardBlocking kBlocking = HWY_NAMESPACE::kBackward;
  static Functions functions() { return HWY_STATIC_DISPATCH(functions)(); }
};

#if HWY_TARGETS & HWY_AVX2
struct Avx2 : cpu::Avx2Set {
  static constexpr std::string_view kName = "backward_simd_avx2";
  static constexpr tiles::SimdBackwardBlocking kBlocking = tiles::kBackwardAvx2;
  static Functions functions() { return N_AVX2::functions(); }
};
#endif

#if HWY_TARGETS & HWY_AVX3
struct Avx512 : cpu::Avx512Set {
  static constexpr std::string_view kName = "backward_simd_avx512";
  static constexpr tiles::SimdBackwardBlocking kBlocking = tiles::kBackwardAvx512;
  static Functions functions() { return N_AVX3::functions(); }
};
#endif

}  // namespace
}  // namespace backward_simd

std::span<const KernelEntry> entries_backward_simd() {
  static const std::array kEntries = {
    backward_simd::Entry<backward_simd::Portable>::entry(),
#if HWY_TARGETS & HWY_AVX2
    backward_simd::Entry<backward_simd::Avx2>::entry(),
#endif
#if HWY_TARGETS & HWY_AVX3
    backward_simd::Entry<backward_simd::Avx512>::entry(),
#endif
  };
  return kEntries;
}

}  // namespace rafter
#endif  // HWY_ONCE
