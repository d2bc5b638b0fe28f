// decode_sm90 on trees of proposed tokens where no units go round: in clusters (one sequence, or a
// few of one length) and where whole heads follow each other.
#include "kernels/cuda/decode_sm90_launch.h"

namespace rafter::testing {
namespace {

struct Tree {
  DType q, kv;
  std::int64_t queries, group, head_dim;
};

/// Query rows of a KV head: up to 8 where warps have keys.
constexpr Tree kTreesByKeys[] = {{DType::bf16, DType::bf16, 4, 2, 128},
                                 {DType::f16, DType::f16, 8, 1, 64},
                                 {DType::bf16, DType::bf16, 2, 4, 64},
                                 {DType::f16, DType::f16, 2, 3, 72},
                                 {DType::bf16, DType::bf16, 1, 8, 128}};
/// One block of 8 rows, or two; of a 16-bit cache one token alone has so many.
constexpr Tree kTreesByColumns[] = {
    {DType::bf16, DType::e4m3, 4, 4, 128}, {DType::f16, DType::e4m3, 2, 4, 64},
    {DType::bf16, DType::e4m3, 16, 1, 64}, {DType::f16, DType::int8, 5, 3, 128},
    {DType::bf16, DType::int8, 4, 2, 96},  {DType::bf16, DType::bf16, 1, 12, 64}};

/// One sequence of 2 KV heads. Its tokens are the only keys, or more than those; they lie across
/// the end of a tile of 128 keys, and within a block of 16 behind several parts. Of 8-bit caches
/// all have clusters too.
void check_in_clusters(const Tree& tree, const char* way) {
  Case c = decode_sm90_case(tree.q, tree.kv, tree.group, tree.head_dim);
  c.problem.tree_mask = true;
  for (const std::int64_t keys :
       {std::int64_t{0}, tree.queries / 2, tree.queries, std::int64_t{130}, std::int64_t{1301}}) {
    c.lengths({tree.queries}, {keys});
    const Values values = make_values(c);
    const Expected expected = expect_values(c, values);
    for (const std::int64_t page_size : {0, 16, 24, 1}) {
      for (const bool used : {true, false}) {
        if (!used && keys < 130) {
          continue;
        }
        SCOPED_TRACE(::testing::Message()
                     << to_string(tree.q) << " " << to_string(tree.kv) << ", " << tree.queries
                     << " tokens of " << tree.group << " heads, head_dim " << tree.head_dim << ", "
                     << keys << " keys, pages of " << page_size
                     << (used ? ", its length on the device" : ""));
        Case here = page_size > 0 ? paged(c, page_size) : c;
        here.problem.seqused_kv = used;
        EXPECT_EQ(launch_of(here).way, way);
        EXPECT_TRUE(close_to(run_case(here, values, on_sm90()), expected, here));
      }
    }
  }
}

TEST(DecodeSm90Tree, MatchesFloat64InClusters) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const Tree& tree : kTreesByKeys) {
    check_in_clusters(tree, "clusters");
  }
}

TEST(DecodeSm90Tree, MatchesFloat64InClustersOfColumns) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const Tree& tree : kTreesByColumns) {
    check_in_clusters(tree, "columns in clusters");
  }
}

/// Each sequence has its own words. Units, which the same lengths on the device go to, are compared
/// with float64 elsewhere (DecodeSm90, DecodeSm90Columns).
TEST(DecodeSm90Tree, BitsOfSequencesOfOneLengthAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  struct Shape {
    DType q, kv;
    std::size_t batch;
    std::int64_t queries, group, head_dim, keys;
    float softcap;
    const char *way, *batch_way;
  };
  for (const Shape& s : {
           Shape{DType::bf16, DType::bf16, 4, 4, 2, 128, 700, 0, "clusters", "units"},
           Shape{DType::f16, DType::f16, 24, 8, 1, 64, 300, 5, "clusters", "units"},
           Shape{DType::bf16, DType::bf16, 40, 2, 2, 64, 300, 0, "clusters", "units"},
           Shape{DType::bf16, DType::e4m3, 4, 4, 4, 128, 700, 0, "columns in clusters", "columns"},
           Shape{DType::f16, DType::e4m3, 11, 4, 2, 64, 700, 5, "columns in clusters", "columns"},
           // 388 heads, three of a CTA: 5 and 3 tiles are the fewest
           Shape{DType::bf16, DType::bf16, 194, 4, 2, 16, 600, 0, "heads", "units"},
           Shape{DType::f16, DType::f16, 194, 8, 1, 40, 580, 0, "heads", "units"},
           Shape{DType::bf16, DType::bf16, 194, 2, 4, 72, 300, 0, "heads", "units"},
           Shape{DType::f16, DType::f16, 194, 3, 2, 72, 257, 5, "heads", "units"},
       }) {
    Case c = decode_sm90_case(s.q, s.kv, s.group, s.head_dim);
    c.problem.tree_mask = true;
    c.problem.softcap = s.softcap;
    c.lengths(each(s.batch, s.queries), std::vector<std::int64_t>(s.batch, s.keys));
    const Values values = make_values(c);
    EXPECT_EQ(launch_of(c).way, s.batch_way);
    const Output expected = run_case(c, values, on_sm90());
    ASSERT_FALSE(expected.o.empty());
    for (const std::int64_t page_size : {0, 16, 24}) {
      if (page_size > 0 && s.batch > 66) {
        continue;  // whole heads are dense
      }
      SCOPED_TRACE(::testing::Message()
                   << s.batch << " sequences of " << s.queries << " tokens and " << s.group
                   << " heads, head_dim " << s.head_dim << ", pages of " << page_size);
      Case same = page_size > 0 ? paged(c, page_size) : c;
      same.problem.seqused_kv = false;
      EXPECT_EQ(launch_of(same).way, s.way);
      EXPECT_TRUE(same_bits(run_case(same, values, on_sm90()), expected));
    }
  }
}

}  // namespace
}  // namespace rafter::testing
