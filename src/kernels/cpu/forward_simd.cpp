// Forward attention on vector units: O = softmax(softmax_scale · QKᵀ + mask) V, fused; f32, bf16 or
// f16 in, that or f32 out, f32 inside. One source, three instruction sets: AVX-512, AVX2, portable.
// Q, O [batch, heads_q, seqlen_q, head_dim]   K, V [batch, heads_kv, seqlen_kv, head_dim]
// One task owns some queries of all heads of a group (queries in lanes, panels of 24 or 48) and
// walks the keys in tiles of 128 or 64: K and V of the tile as f32 in the L2, then panel by panel
//   Sᵀ = K Qᵀ | softcap, mask | maximum, exp2, sum: vertical | Oᵀ = Oᵀ · alpha + Vᵀ Pᵀ
// Tiles start at multiples of their size and every lane stands for itself, so the bits of a row
// depend on its own sequence alone. Limits: head_dim contiguous; keys are not split.
#include <array>
#include <string>

#include "hw/cpu/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/forward_simd.cpp"
#include "hwy/foreach_target.h"
// after foreach_target, which compiles it once per instruction set
#include "kernels/cpu/forward_simd_kernel-inl.h"

#if HWY_ONCE
#include "base/checked.h"
#include "hwy/targets.h"
#include "kernels/cpu/forward_tasks.h"
#include "kernels/cpu/packed_waves.h"
#include "kernels/cpu/simd_sets.h"

namespace rafter {
namespace forward_simd {
namespace {

Acceptance accepts(const KernelProblem& problem) {
  return cpu::accepts_float(problem.attention.dtype);
}

tiles::SimdLayout layout_of(const KernelProblem& problem, const tiles::SimdBlocking& blocking) {
  const AttentionProblem& p = problem.attention;
  return tiles::simd_layout(
      blocking,
      {.head_dim = p.head_dim,
       .head_dim_v = p.head_dim_v,
       .group = p.heads_q / p.heads_kv,
       .batch = p.batch,
       .heads_kv = p.heads_kv,
       .seqlen_q = p.seqlen_q,
       .seqlen_kv = p.seqlen_kv,
       .threads = problem.threads,
       .tasks_wanted = problem.threads * cpu::kTasksPerThread},
      cpu::most_blocks(p, tiles::simd_tile_kv(blocking, p.head_dim, p.head_dim_v)));
}

cpu::TaskShape shape_of(const tiles::SimdLayout& layout) {
  return {layout.positions, layout.heads, layout.head_chunks,
          layout.floats * static_cast<std::int64_t>(sizeof(float))};
}

cpu::PackShape pack_shape_of(const tiles::SimdLayout& layout) {
  return {layout.tile_kv, layout.tile_kv, layout.packed_tiles};
}

/// Bytes of the workspace up to the packed tiles, up to what waves write down, and in all.
struct Places {
  std::int64_t k = 0, v = 0, finite = 0, lists = 0, bytes = 0;

  Places(const KernelProblem& problem, const tiles::SimdLayout& layout) {
    constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
    const cpu::TaskShape shape = shape_of(layout);
    if (layout.packed_tiles == 0) {
      bytes = cpu::tasks_workspace(problem, shape);
      return;
    }
    k = problem.threads * shape.scratch_bytes;
    v = k + layout.packed_tiles * layout.k_floats() * kFloat;
    finite = v + layout.packed_tiles * layout.v_floats() * kFloat;
    lists = finite + base::round_up(layout.packed_tiles, 64);
    bytes = lists + cpu::lists_bytes(problem.attention, shape, pack_shape_of(layout));
  }
};

/// One instruction set: its blocking, its code, and what it reaches of a machine.
template <typename Set>
struct Entry {
  static std::int64_t workspace(const KernelProblem& problem) {
    return Places(problem, layout_of(problem, Set::kBlocking)).bytes;
  }
  static Status forward(const ForwardCall& call) {
    const tiles::SimdLayout layout = layout_of(call.problem, Set::kBlocking);
    const Places places(call.problem, layout);
    auto* const memory = static_cast<std::byte*>(call.workspace.data);
    const Run run = {
        call,
        layout,
        shape_of(layout),
        {reinterpret_cast<float*>(memory + places.k), reinterpret_cast<float*>(memory + places.v),
         reinterpret_cast<std::uint8_t*>(memory + places.finite)}};
    const Functions functions = Set::functions(call.problem.attention.dtype);
    if (layout.packed_tiles == 0) {
      cpu::run_tasks<cpu::NoScope>(call, run.shape,
                                   [&](const cpu::Task& task, std::int64_t head_kv,
                                       std::int64_t head_chunk, std::byte* scratch) {
                                     functions.task(run, task, head_kv, head_chunk, 0,
                                                    reinterpret_cast<float*>(scratch));
                                   });
      return Status::ok();
    }
    cpu::run_waves<cpu::NoScope>(
        call, run.shape, pack_shape_of(layout),
        cpu::lists_at(memory + places.lists, call.problem.attention, run.shape),
        [&](const cpu::Task& keys, std::int64_t head_kv, std::int64_t tile) {
          functions.pack(run, keys, head_kv, tile);
        },
        [&](const cpu::Task& task, std::int64_t head_kv, std::int64_t head_chunk, std::int64_t tile,
            std::byte* scratch) {
          functions.task(run, task, head_kv, head_chunk, tile, reinterpret_cast<float*>(scratch));
        });
    return Status::ok();
  }
  static Reach reach(const KernelProblem& problem, const DeviceSpec& spec) {
    return cpu::simd_reach(problem, spec, Set::kBlocking, Set::kMeasured);
  }
  static KernelEntry entry() {
    return {.name = Set::kName,
            .device = Device::Kind::cpu,
            .pipeline = Pipeline::fused,
            .instruction_set = Set::kInstructionSet,
            .dtypes = {DType::f32, DType::bf16, DType::f16},
            .accepts_text = "every layout, mask, softcap and group; head_dim contiguous",
            .machine_has = cpu::machine_has<Set>,
            .accepts = accepts,
            .reach = reach,
            .workspace = workspace,
            .forward = forward};
  }
};

struct Portable : cpu::PortableSet {
  static constexpr std::string_view kName = "forward_simd_portable";
  static constexpr tiles::SimdBlocking kBlocking = HWY_NAMESPACE::kBlocking;
  static constexpr double kMeasured = 0.8;  // of these vectors' f32 peak
  static Functions functions(DType dtype) { return HWY_STATIC_DISPATCH(functions_of)(dtype); }
};

#if HWY_TARGETS & HWY_AVX2
struct Avx2 : cpu::Avx2Set {
  static constexpr std::string_view kName = "forward_simd_avx2";
  static constexpr tiles::SimdBlocking kBlocking = tiles::kSimdAvx2;
  static constexpr double kMeasured = 0.8;  // of these vectors' f32 peak
  static Functions functions(DType dtype) { return N_AVX2::functions_of(dtype); }
};
#endif

#if HWY_TARGETS & HWY_AVX3
struct Avx512 : cpu::Avx512Set {
  static constexpr std::string_view kName = "forward_simd_avx512";
  static constexpr tiles::SimdBlocking kBlocking = tiles::kSimdAvx512;
  static constexpr double kMeasured = 0.7;  // of these vectors' f32 peak
  static Functions functions(DType dtype) { return N_AVX3::functions_of(dtype); }
};
#endif

}  // namespace
}  // namespace forward_simd

std::span<const KernelEntry> entries_forward_simd() {
  static const std::array kEntries = {
    forward_simd::Entry<forward_simd::Portable>::entry(),
#if HWY_TARGETS & HWY_AVX2
    forward_simd::Entry<forward_simd::Avx2>::entry(),
#endif
#if HWY_TARGETS & HWY_AVX3
    forward_simd::Entry<forward_simd::Avx512>::entry(),
#endif
  };
  return kEntries;
}

}  // namespace rafter
#endif  // HWY_ONCE
