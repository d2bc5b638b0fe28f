// decode_sm90 in clusters, which it takes for one sequence or few heads of one length, against the
// same sequences in a batch whose lengths only the device knows, where units go round all SMs.
#include "kernels/cuda/decode_sm90_launch.h"

namespace rafter::testing {
namespace {

/// CTAs of a cluster of the launch that a plan queues; 1: its CTAs have whole heads, 0: shares of
/// parts.
unsigned launched_cluster(const AttentionProblem& problem) {
  constexpr unsigned kUnknown = ~0u;
  const DecodeLaunch launch = launch_of(problem);
  return launch.way == "clusters" || launch.way == "columns in clusters" ? launch.cluster
         : launch.way == "heads"                                         ? 1
         : launch.way == "units" || launch.way == "columns"              ? 0
                                                                         : kUnknown;
}

TEST(DecodeSm90Cluster, EveryHeadHasOneWhereAllRunAtOnce) {
  RAFTER_SKIP_WITHOUT_SM90();
  const AttentionProblem one{.batch = 1,
                             .heads_q = 32,
                             .heads_kv = 8,
                             .seqlen_q = 1,
                             .seqlen_kv = 8192,
                             .head_dim = 128,
                             .dtype = DType::bf16};
  struct Expected {
    const char* what;
    unsigned ctas;
    void (*change)(AttentionProblem&);
  };
  constexpr auto kNothing = [](AttentionProblem&) {};
  for (const Expected& e : {
           Expected{"one sequence", 8, kNothing},
           Expected{"its length on the device", 8,
                    [](AttentionProblem& p) { p.seqused_kv = true; }},
           Expected{"f16, head_dim 64", 8,
                    [](AttentionProblem& p) {
                      p.dtype = DType::f16;
                      p.head_dim = 64;
                    }},
           Expected{"keys for fewer, four heads a cluster", 8,
                    [](AttentionProblem& p) { p.seqlen_kv = 512; }},
           Expected{"16 heads, two a cluster", 8, [](AttentionProblem& p) { p.batch = 2; }},
           Expected{"64 heads", 2,
                    [](AttentionProblem& p) {
                      p.batch = 8;
                      p.seqlen_kv = 1024;
                    }},
           Expected{"67 heads, a CTA each", 1,
                    [](AttentionProblem& p) {
                      p.heads_q = p.heads_kv = 1;
                      p.batch = 67;
                    }},
           Expected{"132 heads, a CTA each", 1,
                    [](AttentionProblem& p) {
                      p.heads_q = p.heads_kv = 1;
                      p.batch = 132;
                    }},
           Expected{"133 heads", 0,
                    [](AttentionProblem& p) {
                      p.heads_q = p.heads_kv = 1;
                      p.batch = 133;
                    }},
           Expected{"256 heads, two of a CTA", 1, [](AttentionProblem& p) { p.batch = 32; }},
           Expected{"the same of two tiles", 0,
                    [](AttentionProblem& p) {
                      p.batch = 32;
                      p.seqlen_kv = 256;
                    }},
           Expected{"the same of lengths on the device", 0,
                    [](AttentionProblem& p) {
                      p.batch = 32;
                      p.seqused_kv = true;
                    }},
           Expected{"16 x 8 heads, a CTA each", 1, [](AttentionProblem& p) { p.batch = 16; }},
           Expected{"the same with columns", 0,
                    [](AttentionProblem& p) {
                      p.batch = 16;
                      p.heads_q = 8 * 12;
                    }},
           Expected{"columns", 8, [](AttentionProblem& p) { p.heads_q = 8 * 12; }},
           Expected{"columns of 16 rows", 8,
                    [](AttentionProblem& p) {
                      p.heads_q = 8 * 16;
                      p.dtype = DType::f16;
                    }},
           Expected{"pages", 8,
                    [](AttentionProblem& p) {
                      p.layout = Layout::paged;
                      p.page_size = 16;
                      p.num_pages = 600;
                    }},
           Expected{"many keys in pages", 8,
                    [](AttentionProblem& p) {
                      p.layout = Layout::paged;
                      p.seqlen_kv = 131072;
                      p.page_size = 1;
                      p.num_pages = 140000;
                    }},
           Expected{"columns of many keys in pages", 0,
                    [](AttentionProblem& p) {
                      p.heads_q = 8 * 12;
                      p.layout = Layout::paged;
                      p.seqlen_kv = 32768;
                      p.page_size = 64;
                      p.num_pages = 600;
                    }},
           Expected{"too many heads", 0, [](AttentionProblem& p) { p.batch = 17; }},
           Expected{"too many rows", 0, [](AttentionProblem& p) { p.seqlen_q = 3; }},
           Expected{"lengths that differ", 0,
                    [](AttentionProblem& p) {
                      p.batch = 2;
                      p.seqused_kv = true;
                    }},
           Expected{"8 bits", 8, [](AttentionProblem& p) { p.kv_dtype = DType::int8; }},
           Expected{"many keys of 8 bits", 0,
                    [](AttentionProblem& p) {
                      p.kv_dtype = DType::e4m3;
                      p.seqlen_kv = 131072;
                    }},
           Expected{"head_dim 256", 0, [](AttentionProblem& p) { p.head_dim = 256; }},
           Expected{"packed", 0,
                    [](AttentionProblem& p) {
                      p.layout = Layout::packed;
                      p.total_q = 1;
                      p.total_kv = 8192;
                    }},
       }) {
    AttentionProblem p = one;
    e.change(p);
    EXPECT_EQ(launched_cluster(p), e.ctas) << e.what;
  }
}

struct DTypes {
  DType q, kv;
  Scales scales = Scales::per_token;
};
const std::vector<DTypes> kSixteenBits = {{DType::bf16, DType::bf16}, {DType::f16, DType::f16}};
const std::vector<DTypes> kEightBits = {{DType::bf16, DType::int8},
                                        {DType::f16, DType::e4m3},
                                        {DType::bf16, DType::e4m3, Scales::none},
                                        {DType::f16, DType::int8, Scales::per_head}};

/// Of `queries` rows for `group` query heads of a KV head. Some dimension fills no panel.
void expect_bits_of_a_batch(const std::vector<DTypes>& dtypes, std::int64_t queries,
                            std::int64_t group) {
  const std::vector<std::int64_t> cuts = dtypes[0].kv == dtypes[0].q
                                             ? std::vector<std::int64_t>{0, 1, 7, 40}
                                             : std::vector<std::int64_t>{0, 7};
  for (const DTypes& dtype : dtypes) {
    for (const std::int64_t head_dim : {64, 128, dtype.q == dtype.kv ? 72 : 96}) {
      for (const Mask& mask : {Mask::none(), Mask::window(700, 0)}) {
        Case c = decode_sm90_case(dtype.q, dtype.kv, group, head_dim);
        c.scales = dtype.scales;
        c.problem.mask = mask;
        c.problem.softcap = head_dim % 64 != 0 ? 5.0f : 0.0f;
        c.lengths(each(4, queries), {3000, 2, 0, 700});
        const Values values = make_values(c);
        for (const std::int64_t splits : cuts) {
          const Output expected = run_case(c, values, on_sm90(splits));
          ASSERT_FALSE(expected.o.empty());
          for (std::size_t b = 0; b < c.lengths_kv.size(); ++b) {
            SCOPED_TRACE(::testing::Message()
                         << to_string(dtype.q) << " " << to_string(dtype.kv) << " head_dim "
                         << head_dim << " window " << mask.window_left << " splits " << splits
                         << ", sequence " << b);
            Case alone = c;
            alone.lengths({queries}, {c.lengths_kv[b]});
            const Values mine = values_of(c, values, b);
            const Output output = output_of(c, expected, b);
            EXPECT_TRUE(same_bits(run_case(alone, mine, on_sm90(splits)), output));
            for (const std::int64_t page_size : {16, 3}) {
              EXPECT_TRUE(
                  same_bits(run_case(paged(alone, page_size), mine, on_sm90(splits)), output));
            }
            if (c.lengths_kv[b] > 0) {
              alone.problem.seqused_kv = false;
              EXPECT_TRUE(same_bits(run_case(alone, mine, on_sm90(splits)), output));
            }
          }
        }
      }
    }
  }
}

TEST(DecodeSm90Cluster, BitsOfOneSequenceAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  expect_bits_of_a_batch(kSixteenBits, 2, 4);
}

TEST(DecodeSm90Cluster, BitsOfOneSequenceOfEightBitsAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  expect_bits_of_a_batch(kEightBits, 2, 4);
  expect_bits_of_a_batch({kEightBits[0], kEightBits[1]}, 1, 12);
}

TEST(DecodeSm90Cluster, BitsOfOneSequenceOfManyHeadsAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  expect_bits_of_a_batch(kSixteenBits, 1, 12);
}

/// Parts of many tiles (narrow rows: few bytes, so that heads have clusters all the same), and rows
/// of V elsewhere than those of K.
TEST(DecodeSm90Cluster, BitsOfLongPartsAndOtherRowsOfVInPagesAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  struct Shape {
    DType kv;
    std::int64_t head_dim, head_dim_v, keys, splits;
  };
  for (const Shape& s : {Shape{DType::bf16, 16, 16, 8000, 1}, Shape{DType::bf16, 16, 16, 8100, 2},
                         Shape{DType::int8, 16, 16, 8000, 1}, Shape{DType::bf16, 64, 128, 1500, 0},
                         Shape{DType::int8, 32, 128, 1500, 0}}) {
    Case c = decode_sm90_case(DType::bf16, s.kv, 4, s.head_dim);
    c.problem.head_dim_v = s.head_dim_v;
    c.lengths(each(2, 1), {s.keys, 5});
    const Values values = make_values(c);
    const Output batch = run_case(c, values, on_sm90(s.splits));
    ASSERT_FALSE(batch.o.empty());
    Case alone = c;
    alone.lengths({1}, {s.keys});
    for (const std::int64_t page_size : {1, 16, 24, 48, 256}) {
      EXPECT_TRUE(
          same_bits(run_case(paged(alone, page_size), values_of(c, values, 0), on_sm90(s.splits)),
                    output_of(c, batch, 0)))
          << to_string(s.kv) << ", " << s.keys << " keys in pages of " << page_size;
    }
  }
}

TEST(DecodeSm90Cluster, BitsOfSequencesOfOneLengthAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t group : {5, 16}) {
    for (const std::size_t batch : {4, 11, 24, 50}) {  // clusters of 8, 4, 2 and 1
      Case c = decode_sm90_case(DType::bf16, DType::bf16, group, 128);
      c.lengths(each(batch, 1), std::vector<std::int64_t>(batch, 1200));
      const Values values = make_values(c);
      const Output expected = run_case(c, values, on_sm90());
      ASSERT_FALSE(expected.o.empty());
      c.problem.seqused_kv = false;
      EXPECT_TRUE(same_bits(run_case(c, values, on_sm90()), expected))
          << batch << " sequences of " << group << " heads";
    }
  }
}

/// 388 heads, three of a CTA but for the last, which has one.
TEST(DecodeSm90Cluster, BitsOfHeadsThatFollowEachOtherAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  struct Shape {
    DType dtype;
    std::int64_t head_dim, queries, keys, splits;  // 3 and 5 tiles: the fewest
  };
  for (const Shape& s : {Shape{DType::bf16, 128, 1, 300, 0}, Shape{DType::bf16, 128, 2, 400, 3},
                         Shape{DType::f16, 128, 1, 400, 1}, Shape{DType::f16, 64, 2, 600, 0},
                         Shape{DType::bf16, 40, 1, 650, 4}}) {
    Case c = decode_sm90_case(s.dtype, s.dtype, 4, s.head_dim);
    c.lengths(each(194, s.queries), std::vector<std::int64_t>(194, s.keys));
    const Values values = make_values(c);
    for (const Mask& mask : {Mask::none(), Mask::window(290, 0)}) {
      c.problem.mask = mask;
      c.problem.seqused_kv = true;
      const Output expected = run_case(c, values, on_sm90(s.splits));
      ASSERT_FALSE(expected.o.empty());
      c.problem.seqused_kv = false;
      EXPECT_TRUE(same_bits(run_case(c, values, on_sm90(s.splits)), expected))
          << "head_dim " << s.head_dim << ", " << s.keys << " keys, window " << mask.window_left;
    }
  }
}

/// The same with tanh, and with windows that leave a head tiles enough: 5 of rows up to 64 wide, 3
/// of wider ones.
TEST(DecodeSm90Cluster, BitsOfHeadsThatFollowEachOtherUnderWindowsAndSoftcap) {
  RAFTER_SKIP_WITHOUT_SM90();
  struct Shape {
    DType dtype;
    std::int64_t head_dim, queries, keys, window, splits;
    float softcap;
  };
  for (const Shape& s :
       {Shape{DType::f16, 40, 1, 700, 560, 0, 0}, Shape{DType::bf16, 64, 2, 645, 500, 0, 5},
        Shape{DType::bf16, 16, 1, 650, -1, 3, 5}, Shape{DType::f16, 72, 2, 400, 250, 0, 5}}) {
    SCOPED_TRACE(::testing::Message() << "head_dim " << s.head_dim << ", " << s.keys
                                      << " keys, window " << s.window << ", softcap " << s.softcap);
    Case c = decode_sm90_case(s.dtype, s.dtype, 4, s.head_dim);
    c.problem.mask = s.window < 0 ? Mask::none() : Mask::window(s.window, 0);
    c.problem.softcap = s.softcap;
    c.lengths(each(128, s.queries), std::vector<std::int64_t>(128, s.keys));
    const Values values = make_values(c);
    EXPECT_EQ(launch_of(c, s.splits).way, "units");
    const Output expected = run_case(c, values, on_sm90(s.splits));
    ASSERT_FALSE(expected.o.empty());
    c.problem.seqused_kv = false;
    EXPECT_EQ(launch_of(c, s.splits).way, "heads");
    EXPECT_TRUE(same_bits(run_case(c, values, on_sm90(s.splits)), expected));
  }
}

}  // namespace
}  // namespace rafter::testing
