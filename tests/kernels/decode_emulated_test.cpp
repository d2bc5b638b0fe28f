// decode_simd_amx on emulated tiles: packing, order of keys and the use of tiles are under test
// where AMX is not. Vectors are those of AVX2 and of AVX-512. The arithmetic of the real tiles is
// tested where they are, as every kernel's is.
#include <gtest/gtest.h>

#include "hw/cpu/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/decode_emulated_test.cpp"
#include "hwy/foreach_target.h"
// after foreach_target, which compiles it once per instruction set
#include "kernels/cpu/decode_simd_kernel-inl.h"

#if (HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3) && RAFTER_HAS_AMX_CODE
HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

/// The tile unit as the manual defines it: TDPBF16PS as two chains of fused multiply-adds, then
/// their sum; TDPBSSD and TDPBUSD in int32.
struct EmulatedTiles {
  static constexpr bool kTiles = true;
  struct Tile {
    int rows = 0, row_bytes = 0;
    alignas(64) unsigned char bytes[16][64] = {};
  };
  static Tile& tile(int index) {
    static thread_local Tile tiles[8];
    return tiles[index];
  }
  template <DType kKv>
  struct Scope {
    Scope() {
      const std::array<hw::amx::TileShape, 8> shapes = tile_shapes<kKv>();
      for (int i = 0; i < 8; ++i) {
        tile(i).rows = shapes[static_cast<std::size_t>(i)].rows;
        tile(i).row_bytes = shapes[static_cast<std::size_t>(i)].row_bytes;
      }
    }
    ~Scope() {
      for (int i = 0; i < 8; ++i) {
        tile(i) = {};
      }
    }
  };
  template <int kTile_>
  static void zero() {
    std::memset(tile(kTile_).bytes, 0, sizeof(Tile::bytes));
  }
  template <int kTile_>
  static void load(const void* from, std::int64_t stride) {
    Tile& t = tile(kTile_);
    zero<kTile_>();
    for (int row = 0; row < t.rows; ++row) {
      std::memcpy(t.bytes[row], static_cast<const char*>(from) + row * stride,
                  static_cast<std::size_t>(t.row_bytes));
    }
  }
  template <int kTile_>
  static void load_past_l1(const void* from, std::int64_t stride) {
    load<kTile_>(from, stride);
  }
  template <int kTile_>
  static void store(void* to, std::int64_t stride) {
    const Tile& t = tile(kTile_);
    for (int row = 0; row < t.rows; ++row) {
      std::memcpy(static_cast<char*>(to) + row * stride, t.bytes[row],
                  static_cast<std::size_t>(t.row_bytes));
    }
  }
  template <DType kKv, int kC, int kA, int kB>
  static void dot() {
    each_sum<kC, kA, kB>(kKv == DType::int8 ? dot_bytes<std::int8_t> : dot_bf16);
  }
  template <int kC, int kA, int kB>
  static void dot_unsigned() {
    each_sum<kC, kA, kB>(dot_bytes<std::uint8_t>);
  }

 private:
  using Dot = void (*)(Tile& c, const Tile& a, const Tile& b, int m, int n);
  template <int kC, int kA, int kB>
  static void each_sum(Dot dot) {
    Tile &c = tile(kC), &a = tile(kA), &b = tile(kB);
    ASSERT_EQ(c.rows, a.rows);
    ASSERT_EQ(c.row_bytes, b.row_bytes);
    ASSERT_EQ(4 * b.rows, a.row_bytes);
    for (int m = 0; m < c.rows; ++m) {
      for (int n = 0; n < c.row_bytes / 4; ++n) {
        dot(c, a, b, m, n);
      }
    }
  }
  template <typename T>
  static T at(const Tile& t, int row, int column) {
    T out;
    std::memcpy(&out, t.bytes[row] + column * static_cast<int>(sizeof(T)), sizeof(T));
    return out;
  }
  static void dot_bf16(Tile& c, const Tile& a, const Tile& b, int m, int n) {
    float sum[2] = {};
    for (int k = 0; k < a.row_bytes / 4; ++k) {
      for (int i = 0; i < 2; ++i) {
        sum[i] = std::fma(bf16_to_f32(at<std::uint16_t>(a, m, 2 * k + i)),
                          bf16_to_f32(at<std::uint16_t>(b, k, 2 * n + i)), sum[i]);
      }
    }
    const float total = at<float>(c, m, n) + (sum[0] + sum[1]);
    std::memcpy(c.bytes[m] + 4 * n, &total, 4);
  }
  template <typename A>
  static void dot_bytes(Tile& c, const Tile& a, const Tile& b, int m, int n) {
    auto total = at<std::int32_t>(c, m, n);
    for (int k = 0; k < a.row_bytes; ++k) {
      total += at<A>(a, m, k) * at<std::int8_t>(b, k / 4, 4 * n + k % 4);
    }
    std::memcpy(c.bytes[m] + 4 * n, &total, 4);
  }
};

}  // namespace

Functions functions_on_emulated_tiles(DType kv_dtype) {
  return kv_dtype == DType::bf16 ? kFunctions<DType::bf16, EmulatedTiles>
                                 : kFunctions<DType::int8, EmulatedTiles>;
}

}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE && (HWY_TARGETS & HWY_AVX2) && (HWY_TARGETS & HWY_AVX3) && RAFTER_HAS_AMX_CODE
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "hwy/targets.h"
#include "kernels/cpu/decode_simd_run.h"
#include "support/attention_case.h"

namespace rafter::testing {
namespace {

/// The run of a plan, on emulated tiles, with a workspace of NaN.
Forward on_tiles(bool avx512, std::int64_t splits) {
  return [avx512, splits](const Plan& plan, const ForwardInputs& in, const ForwardOutputs& out,
                          const auto&...) {
    const decode_simd::Units units = {(avx512 ? tiles::kSimdAvx512 : tiles::kSimdAvx2).lanes, true};
    const KernelProblem problem = {plan.problem(), plan.threads(), splits};
    const std::int64_t bytes = decode_simd::sizes_of(problem, units)->total_bytes;
    std::vector<std::byte> memory(static_cast<std::size_t>(bytes) + 64, std::byte{0xff});
    void* aligned = memory.data();
    std::size_t space = memory.size();
    std::align(64, static_cast<std::size_t>(bytes), aligned, space);
    const DType kv_dtype = *problem.attention.kv_dtype;
    return decode_simd::forward({problem, in, out, {aligned, bytes}}, units,
                                avx512
                                    ? decode_simd::N_AVX3::functions_on_emulated_tiles(kv_dtype)
                                    : decode_simd::N_AVX2::functions_on_emulated_tiles(kv_dtype));
  };
}

/// By dtype of the cache and whether vectors are those of AVX-512.
class DecodeOnEmulatedTiles : public ::testing::TestWithParam<std::tuple<DType, bool>> {
 protected:
  void SetUp() override {
    if ((hwy::SupportedTargets() & (avx512() ? HWY_AVX3 : HWY_AVX2)) == 0) {
      GTEST_SKIP() << "this CPU has no " << (avx512() ? "AVX-512" : "AVX2");
    }
  }
  static DType kv_dtype() { return std::get<0>(GetParam()); }
  static bool avx512() { return std::get<1>(GetParam()); }
  Case decode_case(std::int64_t group, std::int64_t head_dim) const {
    Case c{.problem = {.heads_q = 2 * group,
                       .heads_kv = 2,
                       .head_dim = head_dim,
                       .dtype = DType::bf16,
                       .kv_dtype = kv_dtype()}};
    c.style = Style::mixed;
    c.problem.seqused_kv = true;
    return c;
  }
  RunOptions options(int threads = 1, std::int64_t splits = 0) const {
    return {
        .kernel = "forward_reference", .threads = threads, .forward = on_tiles(avx512(), splits)};
  }
};

TEST_P(DecodeOnEmulatedTiles, MatchesFloat64OverGroupsAndLengths) {
  for (const std::int64_t group : {1, 2, 3, 4, 5}) {
    Case c = decode_case(group, group == 4 ? 128 : group == 2 ? 40 : 64);  // 40: on vectors
    c.problem.head_dim_v = group == 3 ? 96 : 0;
    c.lengths({1, 1, 1, 1, 1}, {0, 63, 64, 65, 2 * tiles::kDecodeChunk + 70});
    SCOPED_TRACE(::testing::Message() << "group " << group);
    check_case(c, options(2));
  }
}

TEST_P(DecodeOnEmulatedTiles, MatchesFloat64OverMasksAndSoftcap) {
  for (const Mask& mask : {Mask::none(), Mask::causal(), Mask::window(100, 0)}) {
    Case c = decode_case(2, 64);
    c.problem.mask = mask;
    c.problem.softcap = mask.is_none() ? 5.0f : 0.0f;
    c.lengths({5, 5}, {2, 700});
    check_case(c, options());
  }
}

TEST_P(DecodeOnEmulatedTiles, BitsDependOnNeitherThreadsNorPages) {
  Case c = decode_case(4, 64);
  c.lengths({1, 1}, {tiles::kDecodeChunk + 133, 64});
  const Values values = make_values(c);
  const Output expected = run_case(c, values, options());
  EXPECT_TRUE(same_bits(run_case(c, values, options(3)), expected));
  for (const std::int64_t page_size : {1, 3, 16, 256}) {
    Case paged = c;
    paged.problem.layout = Layout::paged;
    paged.problem.page_size = page_size;
    EXPECT_TRUE(same_bits(run_case(paged, values, options()), expected))
        << "pages of " << page_size;
  }
}

TEST_P(DecodeOnEmulatedTiles, InfinityAndNanStayWithTheRowsThatSeeThem) {
  Case c = decode_case(1, 64);
  c.problem.mask = Mask::causal();
  c.lengths({2}, {129});  // the last key is seen by the second row alone
  Values values = make_values(c);
  const Output clean = run_case(c, values, options());
  const std::size_t width = 2 * 64;
  if (kv_dtype() == DType::bf16) {
    values.v[5 * width] = std::numeric_limits<float>::infinity();
  }
  values.q[width + 3] = std::numeric_limits<float>::quiet_NaN();  // the second row's
  const Output output = run_case(c, values, options());
  for (std::size_t i = 0; i < 64; ++i) {
    if (kv_dtype() == DType::bf16 && i == 0) {
      EXPECT_EQ(output.o[i], std::numeric_limits<float>::infinity());
    } else {
      EXPECT_EQ(output.o[i], clean.o[i]);
    }
    EXPECT_TRUE(std::isnan(output.o[width + i]));
  }
}

TEST_P(DecodeOnEmulatedTiles, NegativeFactorsOfValuesGoThroughVectors) {
  if (kv_dtype() != DType::int8) {
    GTEST_SKIP() << "only int8 has factors";
  }
  Case c = decode_case(4, 64);
  c.lengths({1}, {192});
  Values values = make_values(c);
  for (const std::size_t factor : {std::size_t{6}, std::size_t{140}, std::size_t{261}}) {
    values.v_scale[factor] = -values.v_scale[factor];  // of two heads a token
  }
  const Output output = run_case(c, values, options());
  EXPECT_TRUE(close_to(output, expect_values(c, values), c));
}

INSTANTIATE_TEST_SUITE_P(Caches, DecodeOnEmulatedTiles,
                         ::testing::Combine(::testing::Values(DType::bf16, DType::int8),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(to_string(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "_avx512" : "_avx2");
                         });

}  // namespace
}  // namespace rafter::testing
#endif
