// Forward attention on AMX: O = softmax(softmax_scale · QKᵀ + mask) V, fused; bf16 in, bf16 or f32
// out, f32 sums and softmax, P rounded to bf16.
// Q, O [batch, heads_q, seqlen_q, head_dim]   K, V [batch, heads_kv, seqlen_kv, head_dim]
// One task owns up to 256 queries of a group and walks the keys 128 at a time: K and Vᵀ of the tile
// are packed into tiles once, then for every 32 queries
//   Sᵀ = K Qᵀ on tiles | softcap, mask, maximum, exp2, sum on AVX-512 | Oᵀ += Vᵀ Pᵀ on tiles
// Tiles of keys start at multiples of 128 and every lane stands for itself, so the bits of a row
// depend on its own sequence alone. Limits: bf16, head_dim contiguous; keys are not split.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "base/checked.h"
#include "hw/cpu/amx.h"
#include "kernels/cpu/forward_tasks.h"
#include "tiles/forward_amx.h"

#if RAFTER_HAS_AMX_CODE
#include <immintrin.h>

// All headers stand above: what is compiled below may use AVX-512, and nothing of it is inline code
// that another file could be handed.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,bmi,bmi2")
#include "kernels/cpu/forward_amx_task.h"

namespace rafter::forward_amx {
namespace {

/// AVX-512 vectors and AMX tiles.
struct Amx {
  using F = __m512;
  using I = __m512i;
  using K = __mmask16;

  static F load(const float* from) { return _mm512_load_ps(from); }
  static void store(float* to, F v) { _mm512_store_ps(to, v); }
  static I load_i(const std::int32_t* from) { return _mm512_load_si512(from); }
  static F set(float v) { return _mm512_set1_ps(v); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static K greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static K equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static bool any(K k) { return k != 0; }
  static F select(K k, F yes, F no) { return _mm512_mask_blend_ps(k, no, yes); }
  static K within(I first, I last, std::int32_t key) {
    const I index = _mm512_set1_epi32(key);
    return _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask(first, index), last, index);
  }

  /// 2^x, relative error 3e-6; exactly 1 at 0 and 0 at −∞ (VREDUCEPS of an infinity is 0, and
  /// VSCALEFPS by −∞ gives 0); NaN stays NaN. Coefficients: Remez on [0, 1], the constant held
  /// at 1.
  static F exp2(F x) {
    constexpr int kFractionAboveFloor = 0x09;
    const F r = _mm512_reduce_ps(x, kFractionAboveFloor);
    F p = set(0x1.b7f730p-7f);
    p = fma(p, r, set(0x1.abf868p-5f));
    p = fma(p, r, set(0x1.ee2450p-3f));
    p = fma(p, r, set(0x1.62d6c6p-1f));
    p = fma(p, r, set(1.0f));
    return _mm512_scalef_ps(p, x);
  }

  /// Two rows as pairs of bf16, rounded to nearest.
  static void store_pair(std::uint32_t* to, F even, F odd) {
    const I half = _mm512_set1_epi32(0x8000);
    const I low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const I high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    constexpr int kAndOr = 0xEA;  // (a & b) | c
    _mm512_store_si512(
        to, _mm512_ternarylogic_epi32(high, _mm512_set1_epi32(static_cast<int>(0xffff0000u)), low,
                                      kAndOr));
  }

  static __mmask32 first_lanes(std::int64_t count) {
    return count >= 32 ? ~__mmask32{0}
                       : static_cast<__mmask32>((1u << std::max<std::int64_t>(count, 0)) - 1u);
  }
  /// row[c … c + 31] where below `end`, else zeros; row may be null.
  static void copy_row(std::uint16_t* to, const std::uint16_t* row, std::int64_t c,
                       std::int64_t end) {
    _mm512_store_si512(to, row == nullptr
                               ? _mm512_setzero_si512()
                               : _mm512_maskz_loadu_epi16(first_lanes(end - c), row + c));
  }
  static bool finite(__m256i v) {
    const __m256i exponent = _mm256_set1_epi16(0x7f80);
    return _mm256_cmpeq_epi16_mask(_mm256_and_si256(v, exponent), exponent) == 0;
  }
  /// Pairs (even[i], odd[i]) of elements c … c + 15 below `end`, else zeros; rows may be null.
  /// False when one is not finite.
  static bool interleave(std::uint32_t* to, const std::uint16_t* even, const std::uint16_t* odd,
                         std::int64_t c, std::int64_t end) {
    const auto mask = static_cast<__mmask16>(first_lanes(std::min<std::int64_t>(end - c, 16)));
    const __m256i low =
        even == nullptr ? _mm256_setzero_si256() : _mm256_maskz_loadu_epi16(mask, even + c);
    const __m256i high =
        odd == nullptr ? _mm256_setzero_si256() : _mm256_maskz_loadu_epi16(mask, odd + c);
    _mm512_store_si512(to, _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
    return finite(low) && finite(high);
  }

  /// 16 × 16 words; strides in words.
  static void transpose(const std::uint32_t* from, std::int64_t from_stride, std::uint32_t* to,
                        std::int64_t to_stride) {
    I r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      r[i] = _mm512_load_si512(from + i * from_stride);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    constexpr int kEven = 0x88, kOdd = 0xdd;  // 128-bit parts 0 and 2, or 1 and 3, of each operand
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const I a = _mm512_shuffle_i32x4(r[i], r[4 + i], kEven);
      const I b = _mm512_shuffle_i32x4(r[i], r[4 + i], kOdd);
      const I e = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], kEven);
      const I f = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], kOdd);
      _mm512_store_si512(to + i * to_stride, _mm512_shuffle_i32x4(a, e, kEven));
      _mm512_store_si512(to + (4 + i) * to_stride, _mm512_shuffle_i32x4(b, f, kEven));
      _mm512_store_si512(to + (8 + i) * to_stride, _mm512_shuffle_i32x4(a, e, kOdd));
      _mm512_store_si512(to + (12 + i) * to_stride, _mm512_shuffle_i32x4(b, f, kOdd));
    }
  }

  static void store_f32(float* to, F v, std::int64_t count) {
    _mm512_mask_storeu_ps(to, static_cast<K>(first_lanes(count)), v);
  }
  /// Round to nearest even; NaN stays NaN.
  static void store_bf16(std::uint16_t* to, F v, std::int64_t count) {
    const I bits = _mm512_castps_si512(v);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const I quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const K is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const I result = _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16);
    _mm256_mask_storeu_epi16(to, static_cast<K>(first_lanes(count)), _mm512_cvtepi32_epi16(result));
  }

  template <int kTile>
  static void tile_load(const void* from, std::int64_t stride) {
    hw::amx::load<kTile>(from, stride);
  }
  template <int kTile>
  static void tile_store(void* to, std::int64_t stride) {
    hw::amx::store<kTile>(to, stride);
  }
  template <int kTile>
  static void tile_zero() {
    hw::amx::zero<kTile>();
  }
  template <int kC, int kA, int kB>
  static void tile_dot() {
    hw::amx::dot_bf16<kC, kA, kB>();
  }
};

void run_amx_task(const Run& run, const cpu::Task& task, std::int64_t head_kv,
                  std::int64_t head_chunk, std::byte* scratch) {
  run_task<Amx>(run, task, head_kv, head_chunk, scratch);
}

}  // namespace
}  // namespace rafter::forward_amx
#pragma GCC pop_options
#pragma GCC diagnostic pop

namespace rafter {
namespace forward_amx {
namespace {

Acceptance machine_has() {
  static const std::string reason = [] {
    const std::string refusal = hw::amx::request();
    if (!refusal.empty()) {
      return refusal;
    }
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    return std::string(avx512 ? "" : "this CPU has no AVX-512 (F, VL, DQ, BW)");
  }();
  return reason.empty() ? Acceptance::accept() : Acceptance::refuse(reason);
}

Acceptance accepts(const KernelProblem& problem) {
  const DType dtype = problem.attention.dtype;
  if (dtype != DType::bf16) {
    return Acceptance::refuse(std::string(to_string(dtype)) + " is not bf16");
  }
  return Acceptance::accept();
}

tiles::AmxLayout layout_of(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  return tiles::amx_layout(p.head_dim, p.head_dim_v, p.heads_q / p.heads_kv, p.seqlen_q,
                           p.batch * p.heads_kv, problem.threads * cpu::kTasksPerThread);
}

cpu::TaskShape shape_of(const tiles::AmxLayout& layout) {
  return {layout.positions, layout.heads, layout.head_chunks, layout.bytes};
}

std::int64_t workspace(const KernelProblem& problem) {
  return cpu::tasks_workspace(problem, shape_of(layout_of(problem)));
}

double seconds(const KernelProblem& problem, const DeviceSpec& spec) {
  return predicted_seconds(problem, Pipeline::fused, spec,
                           {.compute = 0.15, .bandwidth = 0.8, .fixed_seconds = 4e-6});
}

Status forward(const ForwardCall& call) {
  const tiles::AmxLayout layout = layout_of(call.problem);
  const Run run = {call, layout, shape_of(layout)};
  cpu::run_tasks<hw::amx::TileScope>(
      call, run.shape,
      [&](const cpu::Task& task, std::int64_t head_kv, std::int64_t head_chunk,
          std::byte* scratch) { run_amx_task(run, task, head_kv, head_chunk, scratch); });
  return Status::ok();
}

}  // namespace
}  // namespace forward_amx

std::span<const KernelEntry> entries_forward_amx_bf16() {
  static const std::array<KernelEntry, 1> kEntries = {KernelEntry{
      .name = "forward_amx_bf16",
      .device = Device::Kind::cpu,
      .pipeline = Pipeline::fused,
      .instruction_set = "amx",
      .dtypes = {DType::bf16},
      .accepts_text = "bf16, every layout, mask, softcap and group; head_dim contiguous",
      .machine_has = forward_amx::machine_has,
      .accepts = forward_amx::accepts,
      .seconds = forward_amx::seconds,
      .workspace = forward_amx::workspace,
      .forward = forward_amx::forward}};
  return kEntries;
}

}  // namespace rafter
#else
namespace rafter {
std::span<const KernelEntry> entries_forward_amx_bf16() { return {}; }
}  // namespace rafter
#endif
