// decode_sm90 against float64 where its warps have columns of O for the sake of the group: more
// than 8 query heads share a KV head of a 16-bit cache, whose rows are 2, 4 or 8 blocks of 8.
#include "kernels/cuda/decode_sm90_case.h"

namespace rafter::testing {
namespace {

constexpr DType kDTypes[] = {DType::bf16, DType::f16};

Case packed(Case c) {
  c.problem.layout = Layout::packed;
  return c;
}

/// Lengths 0, within a tile, around its end, and of several parts.
const std::vector<std::int64_t> kLengths = {0, 1, 15, 130, 517, 2100};

/// In every layout and cut, each sequence in a batch and some alone, which may have clusters.
void check_layouts(const Case& c) {
  const Values values = make_values(c);
  const Expected expected = expect_values(c, values);
  for (const std::int64_t splits : {0, 3, 128}) {  // of 128 most are empty
    SCOPED_TRACE(::testing::Message() << splits << " splits");
    const RunOptions options = on_sm90(splits);  // NaN around the tensors and in the workspace
    EXPECT_TRUE(close_to(run_case(c, values, options), expected, c)) << "dense";
    EXPECT_TRUE(close_to(run_case(packed(c), values, options), expected, c)) << "packed";
    for (const std::int64_t page_size : {1, 16, 128}) {
      EXPECT_TRUE(close_to(run_case(paged(c, page_size), values, options), expected, c))
          << "pages of " << page_size;
    }
  }
  for (const std::size_t b : {std::size_t{0}, std::size_t{3}, kLengths.size() - 1}) {
    SCOPED_TRACE(::testing::Message() << "sequence " << b << " alone");
    Case alone = c;
    alone.lengths({c.lengths_q[b]}, {c.lengths_kv[b]});
    const Values mine = values_of(c, values, b);
    const Expected of_it = expect_values(alone, mine);
    EXPECT_TRUE(close_to(run_case(alone, mine, on_sm90()), of_it, alone)) << "dense";
    EXPECT_TRUE(close_to(run_case(paged(alone, 16), mine, on_sm90()), of_it, alone)) << "paged";
  }
}

class DecodeSm90Columns : public ::testing::TestWithParam<std::int64_t> {};  // head_dim

TEST_P(DecodeSm90Columns, MatchFloat64InTwoFourAndEightBlocksOfRows) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const DType dtype : kDTypes) {
    for (const std::int64_t queries : {1, 2, 4}) {  // 12, 24, 48 rows
      SCOPED_TRACE(::testing::Message() << to_string(dtype) << ", queries " << queries);
      Case c = decode_sm90_case(dtype, dtype, 12, GetParam());
      c.problem.mask = queries > 1 ? Mask::causal() : Mask::none();
      c.problem.softcap = queries == 2 ? 5.0f : 0.0f;
      c.lengths(each(kLengths.size(), queries), kLengths);
      check_layouts(c);
    }
  }
}

TEST_P(DecodeSm90Columns, MatchFloat64OnTrees) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const DType dtype : kDTypes) {
    for (const std::int64_t tokens : {1, 2, 5, 16}) {  // 9 to 144 rows: up to three blocks of 64
      for (const std::int64_t page_size : {0, 1, 16}) {
        SCOPED_TRACE(::testing::Message()
                     << to_string(dtype) << ", " << tokens << " tokens, pages of " << page_size);
        Case c = decode_sm90_case(dtype, dtype, 9, GetParam());
        c = page_size > 0 ? paged(c, page_size) : c;
        c.problem.tree_mask = true;
        c.lengths(each(4, tokens), {0, tokens / 2, tokens, 700});
        check_case(c, on_sm90());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, DecodeSm90Columns, ::testing::Values(64, 128, 256, 200),
                         [](const ::testing::TestParamInfo<std::int64_t>& info) {
                           return std::to_string(info.param);
                         });

TEST(DecodeSm90ColumnsOf, SequencesWithoutKeysAreEmptyRows) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t head_dim : {64, 128, 256}) {
    for (const std::size_t batch : {1, 5}) {
      for (const std::int64_t page_size : {0, 16}) {
        Case c = decode_sm90_case(DType::bf16, DType::bf16, 12, head_dim);
        c = page_size > 0 ? paged(c, page_size) : c;
        c.lengths(each(batch, 2), std::vector<std::int64_t>(batch, 0));
        check_case(c, on_sm90());
      }
    }
  }
}

}  // namespace
}  // namespace rafter::testing
