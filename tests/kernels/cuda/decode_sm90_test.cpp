// decode_sm90 against float64: dtypes, shapes, layouts, masks, forced splits.
#include <array>

#include "kernels/cuda/decode_sm90_case.h"

namespace rafter::testing {
namespace {

constexpr std::int64_t kTile = 64;  // keys of the kernel's tile, or a multiple or a part of them

struct DTypes {
  DType q, kv;
};
constexpr DTypes kAllDTypes[] = {{DType::bf16, DType::bf16}, {DType::f16, DType::f16},
                                 {DType::bf16, DType::int8}, {DType::f16, DType::int8},
                                 {DType::bf16, DType::e4m3}, {DType::f16, DType::e4m3}};

class DecodeSm90 : public ::testing::TestWithParam<DTypes> {
 protected:
  Case make(std::int64_t group, std::int64_t head_dim, std::int64_t heads_kv = 2) const {
    return decode_sm90_case(GetParam().q, GetParam().kv, group, head_dim, heads_kv);
  }
};

TEST_P(DecodeSm90, MatchesFloat64OverHeadDimsAndGroups) {
  RAFTER_SKIP_WITHOUT_SM90();
  struct Shape {
    std::int64_t group, head_dim, head_dim_v, queries;
  };
  for (const Shape& s :
       {Shape{4, 128, 0, 1}, Shape{1, 64, 0, 1}, Shape{8, 256, 0, 1}, Shape{5, 72, 0, 2},
        Shape{16, 40, 0, 1}, Shape{2, 192, 128, 3}, Shape{1, 8, 256, 1}, Shape{3, 33, 7, 1},
        Shape{1, 1, 1, 1}, Shape{71, 64, 0, 1}, Shape{4, 128, 0, 16}, Shape{7, 96, 160, 9}}) {
    SCOPED_TRACE(::testing::Message() << "group " << s.group << " head_dim " << s.head_dim << " "
                                      << s.head_dim_v << " queries " << s.queries);
    Case c = make(s.group, s.head_dim, s.group == 71 ? 1 : 2);
    c.problem.head_dim_v = s.head_dim_v;
    c.problem.mask = s.queries > 1 ? Mask::causal() : Mask::none();
    c.lengths(each(4, s.queries), {0, 1, 130, 517});
    check_case(c, on_sm90());
  }
}

TEST_P(DecodeSm90, MatchesFloat64OverLengthsAroundTiles) {
  RAFTER_SKIP_WITHOUT_SM90();
  Case c = make(4, 64, 1);
  std::vector<std::int64_t> lengths;
  for (const std::int64_t tiles : {1, 2, 4, 8, 17}) {
    for (const std::int64_t more : {-1, 0, 1}) {
      lengths.push_back(tiles * kTile + more);
    }
  }
  lengths.insert(lengths.end(), {0, 1, 2, 15, 16, 17, 4000});
  c.lengths(each(lengths.size(), 1), lengths);
  check_case(c, on_sm90());
}

TEST_P(DecodeSm90, MatchesFloat64OverPageSizes) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t page_size : {1, 3, 8, 16, 48, 64, 100, 256}) {
    for (const Scales scales : {Scales::per_token, Scales::per_head, Scales::none}) {
      if (scales != Scales::per_token && !is_scaled(GetParam().kv)) {
        continue;
      }
      if (scales == Scales::none && GetParam().kv != DType::e4m3) {
        continue;
      }
      SCOPED_TRACE(::testing::Message()
                   << "pages of " << page_size << ", scales " << static_cast<int>(scales));
      Case c = paged(make(4, 128), page_size);
      c.scales = scales;
      c.lengths(each(4, 1), {1300, 0, 1, 255});
      RunOptions options = on_sm90();
      options.index_dtype = page_size == 16 ? DType::i64 : DType::i32;
      check_case(c, options);
    }
  }
}

TEST_P(DecodeSm90, MatchesFloat64InStridesOffTheirAlignment) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const Style style :
       {Style::gaps, Style::heads_first, Style::every_other, Style::backwards}) {
    SCOPED_TRACE(static_cast<int>(style));
    Case c = make(4, 80);
    c.style = style;
    c.lengths(each(2, 2), {300, 77});
    RunOptions options = on_sm90();
    options.problem_dtype_out = style == Style::gaps;
    options.with_lse = style != Style::every_other;
    check_case(c, options);
  }
}

TEST_P(DecodeSm90, MatchesFloat64UnderMasksAndSoftcap) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const Mask& mask :
       {Mask::causal(), Mask::window(700, 0), Mask::window(30, 5), Mask::window(0, 0),
        Mask::causal(MaskAlign::top_left), Mask::window(5, 70, MaskAlign::top_left)}) {
    SCOPED_TRACE(::testing::Message() << mask.window_left << ", " << mask.window_right);
    Case c = make(3, 64);
    c.problem.mask = mask;
    c.problem.softcap = mask.window_left == 30 ? 5.0f : 0.0f;
    c.lengths(each(4, 5), {1100, 2, 5, 0});
    check_case(c, on_sm90());
    check_case(paged(c, 16), on_sm90());
  }
  for (const float scale : {0.0f, -0.3f}) {
    Case c = make(2, 64);
    c.problem.softmax_scale = scale;
    c.problem.softcap = scale < 0 ? 3.0f : 0.0f;
    c.lengths({1}, {300});
    check_case(c, on_sm90());
  }
}

TEST_P(DecodeSm90, MatchesFloat64OnTrees) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t tokens : {1, 7, 16, 64}) {
    for (const std::int64_t page_size : {0, 16}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, pages of " << page_size);
      Case c = make(2, 64);
      c = page_size > 0 ? paged(c, page_size) : c;
      c.problem.tree_mask = true;
      c.lengths(each(4, tokens), {0, tokens / 2, tokens, 700});
      check_case(c, on_sm90());
    }
  }
}

TEST_P(DecodeSm90, MatchesFloat64Packed) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const bool used : {false, true}) {
    Case c = make(4, 64);
    c.problem.layout = Layout::packed;
    c.problem.seqused_kv = used;
    c.problem.mask = Mask::causal();
    c.lengths({3, 0, 16, 1}, {600, 33, 16, 0});
    check_case(c, on_sm90());
  }
}

/// CTAs take several units, whose query rows are shared among 1, 2, 4 and 8 warps by turns.
TEST_P(DecodeSm90, MatchesFloat64PackedWhereRowCountsAlternate) {
  RAFTER_SKIP_WITHOUT_SM90();
  Case c = make(4, 64);
  c.problem.layout = Layout::packed;
  c.problem.mask = Mask::causal();
  std::vector<std::int64_t> queries, keys;
  for (std::int64_t b = 0; b < 400; ++b) {
    queries.push_back(std::array<std::int64_t, 5>{4, 8, 16, 2, 7}[static_cast<std::size_t>(b % 5)]);
    keys.push_back(16 + b % 40);
  }
  c.lengths(queries, keys);
  check_case(c, on_sm90());
}

TEST_P(DecodeSm90, MatchesFloat64InForcedSplits) {
  RAFTER_SKIP_WITHOUT_SM90();
  Case c = make(4, 64);
  c.problem.mask = Mask::causal();
  c.lengths(each(4, 2), {1700, 3, 0, 129});
  const Values values = make_values(c);
  const Expected expected = expect_values(c, values);
  for (const std::int64_t splits : {1, 2, 7, 128}) {
    for (const Fill fill : {Fill::nan, Fill::zero}) {  // of the workspace as well
      RunOptions options = on_sm90(splits);
      options.fill = fill;
      EXPECT_TRUE(close_to(run_case(c, values, options), expected, c)) << splits << " splits";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, DecodeSm90, ::testing::ValuesIn(kAllDTypes),
                         [](const ::testing::TestParamInfo<DTypes>& info) {
                           return std::string(to_string(info.param.q)) + "_" +
                                  to_string(info.param.kv);
                         });

}  // namespace
}  // namespace rafter::testing
