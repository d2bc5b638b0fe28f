// Decode: few queries against many keys. What the tests of every kernel do not reach: keys in many
// parts, int8 keys and values, page sizes, forced splits.
#include <gtest/gtest.h>

#include <limits>

#include "support/every_kernel.h"
#include "tiles/decode_simd.h"

namespace rafter::testing {
namespace {

/// A kernel that splits keys, by the registry's word.
std::vector<std::string> decode_kernels() {
  std::vector<std::string> names;
  for (const std::string& name : cpu_kernels()) {
    if (name.starts_with("decode_")) {
      names.push_back(name);
    }
  }
  return names;
}

constexpr std::int64_t kChunk = tiles::kDecodeChunk;

struct KvDType {
  DType dtype, kv;
};
constexpr KvDType kDTypes[] = {{DType::f32, DType::f32},
                               {DType::bf16, DType::bf16},
                               {DType::f16, DType::f16},
                               {DType::bf16, DType::int8},
                               {DType::f32, DType::int8}};

Case decode_case(KvDType dtypes, std::int64_t group, std::int64_t head_dim) {
  Case c{.problem = {.heads_q = 2 * group,
                     .heads_kv = 2,
                     .head_dim = head_dim,
                     .dtype = dtypes.dtype,
                     .kv_dtype = dtypes.kv}};
  c.style = Style::mixed;
  return c;
}

/// Sequence b alone of a dense batch of one query each.
Values only(const Case& c, const Values& all, std::size_t b) {
  const AttentionProblem& p = c.problem;
  std::int64_t keys = 0;
  for (std::size_t i = 0; i < b; ++i) {
    keys += c.lengths_kv[i];
  }
  const auto part = [](const std::vector<float>& v, std::int64_t first, std::int64_t count) {
    return v.empty() ? v : std::vector<float>(v.begin() + first, v.begin() + first + count);
  };
  const std::int64_t row_q = p.heads_q * p.head_dim;
  const std::int64_t row_kv = p.heads_kv * p.head_dim;
  const std::int64_t count = c.lengths_kv[b];
  return {part(all.q, static_cast<std::int64_t>(b) * row_q, row_q),
          part(all.k, keys * row_kv, count * row_kv), part(all.v, keys * row_kv, count * row_kv),
          part(all.k_scale, keys * p.heads_kv, count * p.heads_kv),
          part(all.v_scale, keys * p.heads_kv, count * p.heads_kv)};
}

Output only(const Case& c, const Output& all, std::size_t b) {
  const auto rows = static_cast<std::ptrdiff_t>(c.problem.heads_q);
  const std::ptrdiff_t width = rows * c.problem.head_dim;
  const auto at = static_cast<std::ptrdiff_t>(b);
  return {{all.o.begin() + at * width, all.o.begin() + (at + 1) * width},
          {all.lse.begin() + at * rows, all.lse.begin() + (at + 1) * rows}};
}

class Decode : public EveryKernelTest {
 protected:
  /// Of kDTypes, those that the kernel is for: bf16 with both caches at least.
  std::vector<KvDType> dtypes() const {
    std::vector<KvDType> out;
    for (const KvDType& d : kDTypes) {
      if (!taken({d.dtype}).empty()) {
        out.push_back(d);
      }
    }
    EXPECT_GE(out.size(), 2U);
    return out;
  }
};

TEST_P(Decode, MatchesFloat64OverDtypesGroupsAndLengths) {
  const std::int64_t groups[] = {1, 2, 3, 4, 5, 8};
  std::size_t next = 0;
  for (const KvDType& dtypes : this->dtypes()) {
    for (const std::int64_t head_dim : {64, 40, 128, 1}) {
      Case c = decode_case(dtypes, groups[next++ % std::size(groups)], head_dim);
      c.problem.seqused_kv = true;
      c.lengths({1, 1, 1, 1, 1, 1, 1}, {0, 1, 63, 65, kChunk - 1, kChunk, kChunk + 1});
      SCOPED_TRACE(::testing::Message()
                   << to_string(dtypes.dtype) << " " << to_string(dtypes.kv) << " group "
                   << c.problem.heads_q / 2 << " head_dim " << head_dim);
      check_case(c, {.kernel = kernel(), .threads = 2});
    }
  }
}

TEST_P(Decode, MatchesFloat64OverManyPartsAndMasks) {
  const Mask masks[] = {Mask::none(), Mask::causal(), Mask::window(700, 0), Mask::window(30, 5)};
  for (const KvDType& dtypes : this->dtypes()) {
    for (const Mask& mask : masks) {
      Case c = decode_case(dtypes, 3, 24);
      c.problem.head_dim_v = 40;
      c.problem.mask = mask;
      c.problem.softcap = mask.is_none() ? 5.0f : 0.0f;
      c.problem.seqused_kv = true;
      c.lengths({5, 5, 5}, {3 * kChunk + 17, 2, 1100});
      check_case(c, {.kernel = kernel(), .threads = 3});
    }
  }
}

TEST_P(Decode, SplitsLargeGroupsIntoBlocksOfRows) {
  Case c = decode_case({DType::bf16, DType::bf16}, 71, 16);
  c.problem.mask = Mask::causal();
  c.lengths({4}, {600});
  check_case(c, {.kernel = kernel(), .threads = 2});
}

TEST_P(Decode, BitsDependOnNeitherThreadsNorNeighboursNorPages) {
  for (const KvDType& dtypes : {kDTypes[1], kDTypes[3]}) {
    Case c = decode_case(dtypes, 4, 32);
    c.problem.seqused_kv = true;
    c.lengths({1, 1, 1}, {3 * kChunk + 5, 7, kChunk + 1});
    const Values values = make_values(c);
    const Output expected = run_case(c, values, {.kernel = kernel(), .threads = 1});
    for (const int threads : {2, 3, 4}) {
      EXPECT_TRUE(
          same_bits(run_case(c, values, {.kernel = kernel(), .threads = threads}), expected));
    }
    for (std::size_t b = 0; b < c.lengths_kv.size(); ++b) {
      Case alone = c;
      alone.lengths({1}, {c.lengths_kv[b]});
      EXPECT_TRUE(same_bits(run_case(alone, only(c, values, b), {.kernel = kernel()}),
                            only(c, expected, b)))
          << "sequence " << b;
    }
    for (const std::int64_t page_size : {1, 3, 16, 64, 256}) {
      Case paged = c;
      paged.problem.layout = Layout::paged;
      paged.problem.page_size = page_size;
      for (const Fill fill : {Fill::nan, Fill::zero}) {
        EXPECT_TRUE(
            same_bits(run_case(paged, values, {.kernel = kernel(), .fill = fill}), expected))
            << "pages of " << page_size;
      }
    }
    Case packed = c;
    packed.problem.layout = Layout::packed;
    packed.problem.seqused_kv = false;
    EXPECT_TRUE(same_bits(run_case(packed, values, {.kernel = kernel(), .threads = 2}), expected));
  }
}

TEST_P(Decode, HonoursForcedSplits) {
  Case c = decode_case({any_dtype(), any_dtype()}, 2, 32);
  c.problem.seqused_kv = true;
  c.lengths({1, 1, 1}, {1700, 3, 0});
  const Values values = make_values(c);
  const Expected expected = expect_values(c, values);
  for (const std::int64_t splits : {1, 2, 7, 64, 5000}) {
    const Output output = run_case(c, values, {.kernel = kernel(), .threads = 2, .splits = splits});
    EXPECT_TRUE(close_to(output, expected, c)) << splits << " splits";
  }
}

TEST_P(Decode, AValueThatARowDoesNotSeeMayBeNan) {
  Case c = decode_case({any_dtype(), any_dtype()}, 2, 16);
  c.problem.mask = Mask::causal();
  c.lengths({2}, {kChunk + 2});
  Values values = make_values(c);
  const Output clean = run_case(c, values, {.kernel = kernel()});
  const std::size_t row = values.v.size() - 2 * 16;  // the last key, which row 0 does not see
  std::fill(values.v.begin() + static_cast<std::ptrdiff_t>(row), values.v.end(),
            std::numeric_limits<float>::quiet_NaN());
  const Output output = run_case(c, values, {.kernel = kernel()});
  const std::size_t width = static_cast<std::size_t>(c.problem.heads_q) * 16;
  for (std::size_t i = 0; i < width; ++i) {
    EXPECT_EQ(output.o[i], clean.o[i]);
    EXPECT_TRUE(std::isnan(output.o[width + i]));
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, Decode, ::testing::ValuesIn(decode_kernels()),
                         kernel_test_name);

/// Kernels that take int8 keys and values, decode or not.
class Int8Cache : public EveryKernelTest {};

TEST_P(Int8Cache, MatchesFloat64InEveryLayout) {
  for (const Layout layout : {Layout::dense, Layout::packed, Layout::paged}) {
    Case c = decode_case({DType::bf16, DType::int8}, 2, 40);
    c.problem.mask = Mask::causal();
    c.problem.layout = layout;
    c.problem.page_size = layout == Layout::paged ? 7 : 0;
    c.problem.seqused_kv = layout != Layout::packed;
    c.lengths({3, 3}, {70, 33});
    RAFTER_SKIP_IF_REFUSED(c, kernel());
    check_case(c, options());
  }
}

/// The same of e4m3, and of factors that a head's tokens share.
class ScaledCache : public EveryKernelTest {};

TEST_P(ScaledCache, MatchesFloat64WithFactorsOfTokensOfHeadsAndWithout) {
  std::size_t taken = 0;
  for (const KvDType dtypes :
       {KvDType{DType::bf16, DType::e4m3}, KvDType{DType::f16, DType::e4m3},
        KvDType{DType::f32, DType::e4m3}, KvDType{DType::bf16, DType::int8}}) {
    for (const Scales scales : {Scales::per_token, Scales::per_head, Scales::none}) {
      Case c = decode_case(dtypes, 3, 40);
      c.scales = scales;
      c.problem.layout = scales == Scales::per_head ? Layout::paged : Layout::dense;
      c.problem.page_size = scales == Scales::per_head ? 5 : 0;
      c.problem.seqused_kv = true;
      c.lengths({2, 2, 2}, {70, 0, 33});
      if ((dtypes.kv == DType::int8 && scales == Scales::none) ||
          !refusal_of(c, kernel()).empty()) {
        continue;
      }
      ++taken;
      SCOPED_TRACE(::testing::Message() << to_string(dtypes.dtype) << " " << to_string(dtypes.kv)
                                        << " scales " << static_cast<int>(scales));
      check_case(c, options());
    }
  }
  if (taken == 0) {
    GTEST_SKIP() << kernel() << " takes no cache with factors";
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, ScaledCache, ::testing::ValuesIn(cpu_kernels()),
                         kernel_test_name);

/// Kernels that take a tree of new tokens.
class TreeMask : public EveryKernelTest {};

TEST_P(TreeMask, MatchesFloat64OverLengthsAndLayouts) {
  for (const Layout layout : {Layout::dense, Layout::paged}) {
    for (const std::int64_t tokens : {1, 7, 64}) {
      Case c = decode_case({any_dtype(), any_dtype()}, 2, 24);
      c.problem.tree_mask = true;
      c.problem.seqused_kv = true;
      c.problem.layout = layout;
      c.problem.page_size = layout == Layout::paged ? 16 : 0;
      // no key, fewer keys than new tokens, those alone, some before them
      c.lengths({tokens, tokens, tokens, tokens}, {0, tokens / 2, tokens, kChunk + tokens + 3});
      RAFTER_SKIP_IF_REFUSED(c, kernel());
      check_case(c, options());
    }
  }
}

TEST_P(TreeMask, OfATriangleIsCausal) {
  Case c = decode_case({any_dtype(), any_dtype()}, 3, 16);
  c.lengths({9, 9}, {200, 200});
  Case causal = c;
  causal.problem.mask = Mask::causal();
  c.problem.tree_mask = true;
  RAFTER_SKIP_IF_REFUSED(c, kernel());
  Values values = make_values(c);
  for (std::size_t i = 0; i < values.tree_mask.size(); ++i) {
    values.tree_mask[i] = (std::uint64_t{2} << i % 9) - 1;
  }
  EXPECT_TRUE(same_bits(run_case(c, values, options()), run_case(causal, values, options())));
}

TEST_P(TreeMask, KeysBesideTheBitsMayBeNan) {
  Case c = decode_case({any_dtype(), any_dtype()}, 1, 16);
  c.problem.tree_mask = true;
  c.lengths({3}, {5});
  RAFTER_SKIP_IF_REFUSED(c, kernel());
  Values values = make_values(c);
  values.tree_mask = {0b001, 0b011, 0b101};  // the second token is seen by the second query alone
  const Output clean = run_case(c, values, options());
  const std::int64_t width = c.problem.heads_kv * 16;
  for (std::vector<float>* rows : {&values.k, &values.v}) {
    std::fill_n(rows->begin() + 3 * width, width, std::numeric_limits<float>::quiet_NaN());
  }
  const Output output = run_case(c, values, options());
  const auto row = static_cast<std::size_t>(c.problem.heads_q * 16);
  for (std::size_t i = 0; i < row; ++i) {
    EXPECT_EQ(output.o[i], clean.o[i]);
    EXPECT_TRUE(std::isnan(output.o[row + i]));
    EXPECT_EQ(output.o[2 * row + i], clean.o[2 * row + i]);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, TreeMask, ::testing::ValuesIn(cpu_kernels()),
                         kernel_test_name);

INSTANTIATE_TEST_SUITE_P(EveryKernel, Int8Cache, ::testing::ValuesIn(cpu_kernels()),
                         kernel_test_name);

TEST(DecodePlan, ChoosesToSplitKeysForOneQueryAndNotForAPrefill) {
  AttentionProblem p{.heads_q = 32,
                     .heads_kv = 8,
                     .seqlen_q = 1,
                     .seqlen_kv = 8192,
                     .head_dim = 128,
                     .dtype = DType::bf16};
  const Result<Plan> decode = plan(p, Device::cpu());
  ASSERT_TRUE(decode) << decode.status().message();
  EXPECT_EQ(decode->pipeline(), Pipeline::split_kv) << decode->explain();
  p.seqlen_q = 8192;
  const Result<Plan> prefill = plan(p, Device::cpu());
  ASSERT_TRUE(prefill) << prefill.status().message();
  EXPECT_EQ(prefill->pipeline(), Pipeline::fused) << prefill->explain();
}

TEST(DecodePlan, CostIsThatOfTheDecodeModel) {
  for (const DType kv : {DType::bf16, DType::int8}) {
    AttentionProblem p{.batch = 3,
                       .heads_q = 32,
                       .heads_kv = 8,
                       .seqlen_q = 1,
                       .seqlen_kv = 8192,
                       .head_dim = 128,
                       .dtype = DType::bf16,
                       .kv_dtype = kv,
                       .layout = Layout::paged,
                       .page_size = 16,
                       .num_pages = 3 * 512};
    const Result<Plan> made = plan(p, Device::cpu(), {.pipeline = Pipeline::split_kv});
    ASSERT_TRUE(made) << made.status().message();
    const Result<Cost> cost = decode_cost({.batch = 3,
                                           .heads_q = 32,
                                           .heads_kv = 8,
                                           .seqlen_kv = 8192,
                                           .head_dim = 128,
                                           .dtype = DType::bf16,
                                           .kv_dtype = kv,
                                           .page_size = 16,
                                           .splits = 8192 / kChunk});
    ASSERT_TRUE(cost) << cost.status().message();
    EXPECT_EQ(made->cost().bytes, cost->bytes);
    EXPECT_EQ(made->cost().kv_bytes, cost->kv_bytes);
    EXPECT_EQ(made->cost().flops, cost->flops);
    EXPECT_EQ(made->cost().launches, 1);  // parts are merged where they are computed
  }
}

TEST(DecodePlan, RefusesByName) {
  AttentionProblem p{.heads_q = 2,
                     .seqlen_q = 1,
                     .seqlen_kv = 8,
                     .head_dim = 16,
                     .dtype = DType::bf16,
                     .kv_dtype = DType::e4m3};
  const Result<Plan> e4m3 = plan(p, Device::cpu());
  EXPECT_EQ(e4m3.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(e4m3.status().message().find("kv_dtype e4m3 is not among bf16, int8"),
            std::string::npos)
      << e4m3.status().message();
  p.kv_dtype = DType::i32;
  EXPECT_EQ(plan(p, Device::cpu()).status().parameter(), "kv_dtype");
}

TEST(DecodePlan, RefusesTreesOfTokensByName) {
  AttentionProblem p{.heads_q = 2, .seqlen_q = 65, .seqlen_kv = 80, .tree_mask = true};
  const PlanOptions reference{.kernel = "forward_reference"};
  const auto refused = [&] { return plan(p, Device::cpu(), reference).status(); };
  EXPECT_EQ(refused().parameter(), "seqlen_q");
  p.seqlen_q = 64;
  EXPECT_TRUE(refused()) << refused().message();
  p.mask = Mask::causal();
  EXPECT_EQ(refused().parameter(), "mask");
  p.mask = Mask::none();
  p.layout = Layout::packed;
  EXPECT_EQ(refused().parameter(), "tree_mask");
  p.layout = Layout::dense;
  EXPECT_EQ(plan(p, Device::cpu(), {.pass = Pass::backward}).status().parameter(), "tree_mask");
}

TEST(DecodePlan, ChecksTheWordsOfATreeAndTheCountsOfPages) {
  AttentionProblem p{.heads_q = 1, .seqlen_q = 1, .seqlen_kv = 2, .head_dim = 4, .tree_mask = true};
  const PlanOptions reference{.kernel = "forward_reference"};
  const Result<Plan> made = plan(p, Device::cpu(), reference);
  ASSERT_TRUE(made) << made.status().message();
  alignas(64) float q[4] = {}, o[4] = {}, kv[8] = {};
  alignas(64) std::byte workspace[4096];
  const std::uint64_t words[2] = {1, 1};
  std::int32_t counts[2] = {7, 7};
  ForwardInputs in{.q = TensorView::contiguous(q, DType::f32, 1, 1, 1, 4),
                   .k = TensorView::contiguous(kv, DType::f32, 1, 2, 1, 4),
                   .v = TensorView::contiguous(kv, DType::f32, 1, 2, 1, 4)};
  ForwardOutputs out{.o = TensorView::contiguous(o, DType::f32, 1, 1, 1, 4)};
  const auto run = [&](const Plan& plan) { return plan.forward(in, out, {workspace, 4096}); };
  EXPECT_EQ(run(*made).parameter(), "tree_mask.batch");
  in.tree_mask = BitsView::contiguous(words, 1, 2);
  EXPECT_EQ(run(*made).parameter(), "tree_mask.seqlen");
  in.tree_mask = BitsView::contiguous(nullptr, 1, 1);
  EXPECT_EQ(run(*made).parameter(), "tree_mask");
  in.tree_mask.data = words;
  EXPECT_TRUE(run(*made)) << run(*made).message();
  out.bad_pages = {counts, 1};
  EXPECT_EQ(run(*made).parameter(), "bad_pages");

  p.tree_mask = false;
  p.layout = Layout::paged;
  p.page_size = 2;
  p.num_pages = 1;
  const Result<Plan> paged = plan(p, Device::cpu(), reference);
  ASSERT_TRUE(paged) << paged.status().message();
  EXPECT_EQ(run(*paged).parameter(), "tree_mask");
  in.tree_mask = {};
  std::int32_t page = 0;
  in.page_table = {&page, DType::i32, 1, 1};
  out.bad_pages.size = 2;
  EXPECT_EQ(run(*paged).parameter(), "bad_pages.size");
  out.bad_pages.size = 1;
  EXPECT_TRUE(run(*paged)) << run(*paged).message();
  EXPECT_EQ(counts[0], 0);
  EXPECT_EQ(counts[1], 7);
}

TEST(DecodePlan, WantsScalesWhereTheCacheHasThem) {
  AttentionProblem p{.heads_q = 1,
                     .seqlen_q = 1,
                     .seqlen_kv = 2,
                     .head_dim = 4,
                     .dtype = DType::f32,
                     .kv_dtype = DType::int8};
  const Result<Plan> made = plan(p, Device::cpu(), {.kernel = "forward_reference"});
  ASSERT_TRUE(made) << made.status().message();
  alignas(64) float q[4] = {}, o[4] = {}, scale[2] = {};
  alignas(64) std::int8_t kv[8] = {};
  alignas(64) std::byte workspace[4096];
  ASSERT_LE(made->workspace_bytes(), 4096);
  ForwardInputs in{.q = TensorView::contiguous(q, DType::f32, 1, 1, 1, 4),
                   .k = TensorView::contiguous(kv, DType::int8, 1, 2, 1, 4),
                   .v = TensorView::contiguous(kv, DType::int8, 1, 2, 1, 4)};
  const ForwardOutputs out{.o = TensorView::contiguous(o, DType::f32, 1, 1, 1, 4)};
  const auto run = [&] { return made->forward(in, out, {workspace, 4096}); };
  EXPECT_EQ(run().parameter(), "k_scale");
  in.k_scale = TensorView::contiguous(scale, DType::f32, 1, 2, 1, 1);
  EXPECT_EQ(run().parameter(), "v_scale");
  in.v_scale = TensorView::contiguous(scale, DType::f32, 1, 1, 1, 1);
  EXPECT_EQ(run().parameter(), "v_scale.seqlen");
  in.v_scale = in.k_scale;
  EXPECT_TRUE(run()) << run().message();
  in.v_scale.dtype = DType::f16;
  EXPECT_EQ(run().parameter(), "v_scale.dtype");
  in.v_scale = {};
  in.k.dtype = DType::f32;
  EXPECT_EQ(run().parameter(), "k.dtype");

  p.kv_dtype = {};
  const Result<Plan> plain = plan(p, Device::cpu(), {.kernel = "forward_reference"});
  ASSERT_TRUE(plain);
  alignas(64) float k[8] = {};
  in.k = in.v = TensorView::contiguous(k, DType::f32, 1, 2, 1, 4);
  EXPECT_EQ(plain->forward(in, out, {workspace, 4096}).parameter(), "k_scale");
}

}  // namespace
}  // namespace rafter::testing
