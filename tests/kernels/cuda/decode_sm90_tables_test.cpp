// decode_sm90 and what page tables may say: pages that do not exist, ids past 65,535, tables of
// several sequences in clusters.
#include <limits>

#include "kernels/cuda/decode_sm90_launch.h"

namespace rafter::testing {
namespace {

struct Kind {
  DType q, kv;
  std::int64_t group, head_dim;
  Scales scales = Scales::per_token;
};
/// Where warps have columns of O: 8-bit caches, and more than 8 query heads a KV head.
constexpr Kind kByColumns[] = {{DType::bf16, DType::bf16, 12, 64},
                               {DType::f16, DType::f16, 16, 128},
                               {DType::bf16, DType::int8, 4, 128},
                               {DType::f16, DType::e4m3, 4, 64},
                               {DType::bf16, DType::e4m3, 12, 128},
                               {DType::f16, DType::int8, 2, 64, Scales::per_head},
                               {DType::bf16, DType::e4m3, 4, 128, Scales::none}};

Case case_of(const Kind& kind, std::int64_t page_size) {
  Case c = paged(decode_sm90_case(kind.q, kind.kv, kind.group, kind.head_dim), page_size);
  c.scales = kind.scales;
  return c;
}

/// Keys [first, last) of sequence b were in pages that do not exist.
void drop_keys(Case& c, Values& values, std::size_t b, std::int64_t first, std::int64_t last) {
  const std::int64_t row = c.problem.heads_kv * c.problem.head_dim;
  std::int64_t before = 0;
  for (std::size_t i = 0; i < b; ++i) {
    before += c.lengths_kv[i];
  }
  for (std::vector<float>* rows : {&values.k, &values.v}) {
    rows->erase(rows->begin() + (before + first) * row, rows->begin() + (before + last) * row);
  }
  c.lengths_kv[b] -= last - first;
}

/// Alone (a cluster) or with another (units; boxes of the copy engine where pages hold whole ones).
void check_missing_pages(const Kind& kind, std::int64_t page_size, bool alone) {
  Case c = case_of(kind, page_size);
  constexpr std::int64_t kKeys = 1000, kOther = 333;
  c.lengths(each(alone ? 1 : 2, 1), {kKeys});
  if (!alone) {
    c.lengths_kv.push_back(kOther);
  }
  const DecodeLaunch launch = launch_of(c);
  EXPECT_EQ(launch.way, alone ? "columns in clusters" : "columns");
  if (!alone) {
    EXPECT_EQ(launch.params.by_box, page_size % 8 == 0);
  }
  Values values = make_values(c);
  const std::int64_t pages = (kKeys + page_size - 1) / page_size;
  RunOptions options = on_sm90();
  options.index_dtype = page_size == 16 ? DType::i64 : DType::i32;
  // The first id beyond, or one whose lower half is a page.
  const std::int64_t beyond =
      options.index_dtype == DType::i64 ? (std::int64_t{1} << 32) + 1 : sized_problem(c).num_pages;
  options.wrong_pages = {{0, 2, -1}, {0, 3, beyond}, {0, pages - 1, 1 << 30}};
  std::vector<std::int32_t> counts = {3};
  if (!alone) {
    options.wrong_pages.push_back({1, 0, -7});
    counts.push_back(1);
  }
  const Output output = run_case(c, values, options);
  EXPECT_EQ(output.bad_pages, counts);
  if (!alone) {
    drop_keys(c, values, 1, 0, page_size);
  }
  drop_keys(c, values, 0, (pages - 1) * page_size, kKeys);
  drop_keys(c, values, 0, 2 * page_size, 4 * page_size);
  EXPECT_TRUE(close_to(output, expect_values(c, values), c));
}

/// All of a sequence: empty rows. None of another: nothing counted.
void check_no_pages(const Kind& kind, std::int64_t page_size, bool alone) {
  Case c = case_of(kind, page_size);
  c.lengths(each(alone ? 1 : 2, 1), {3 * page_size});
  std::vector<std::int32_t> counts = {3};
  if (!alone) {
    c.lengths_kv.push_back(1);
    counts.push_back(0);
  }
  EXPECT_EQ(launch_of(c).way, alone ? "columns in clusters" : "columns");
  RunOptions options = on_sm90();
  options.wrong_pages = {{0, 0, -1}, {0, 1, -7}, {0, 2, 1 << 30}};
  const Output output = run_case(c, make_values(c), options);
  ASSERT_FALSE(output.o.empty());
  EXPECT_EQ(output.bad_pages, counts);
  const std::int64_t heads = c.problem.heads_q;
  for (std::int64_t i = 0; i < heads * c.problem.head_dim; ++i) {
    ASSERT_EQ(output.o[index(i)], 0.0f) << "o[" << i << "]";
  }
  for (std::int64_t h = 0; h < heads; ++h) {
    ASSERT_EQ(output.lse[index(h)], -std::numeric_limits<float>::infinity()) << "lse[" << h << "]";
  }
}

TEST(DecodeSm90Tables, MissingPagesAreNotSeenAndCountedWhereWarpsHaveColumns) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const Kind& kind : kByColumns) {
    for (const std::int64_t page_size : {1, 8, 12, 16, 64}) {
      for (const bool alone : {true, false}) {
        SCOPED_TRACE(::testing::Message()
                     << to_string(kind.q) << " " << to_string(kind.kv) << ", " << kind.group
                     << " heads, scales " << static_cast<int>(kind.scales) << ", pages of "
                     << page_size << (alone ? ", alone" : ""));
        check_missing_pages(kind, page_size, alone);
        check_no_pages(kind, page_size, alone);
      }
    }
  }
}

/// Every sequence of a cluster's batch has a row of the table; two say something wrong. Beyond 66
/// heads, where warps have keys, clusters of one CTA.
TEST(DecodeSm90Tables, BitsOfSequencesOfOneLengthInClustersAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  struct Shape {
    Kind kind;
    std::size_t batch;
    int head_ctas;
  };
  constexpr Kind kKeys = {DType::bf16, DType::bf16, 5, 64};
  constexpr Kind kColumns = {DType::f16, DType::f16, 16, 64};
  constexpr Kind kBytes = {DType::bf16, DType::e4m3, 4, 64};
  for (const Shape& s :
       {Shape{{DType::f16, DType::f16, 4, 128}, 4, 4}, Shape{kKeys, 11, 4}, Shape{kKeys, 24, 2},
        Shape{kKeys, 35, 1}, Shape{{DType::f16, DType::f16, 4, 128}, 40, 1}, Shape{kColumns, 4, 4},
        Shape{kColumns, 24, 2}, Shape{kBytes, 4, 4}, Shape{kBytes, 24, 2}}) {
    const bool columns = s.kind.group > 8 || s.kind.kv != s.kind.q;
    Case dense = decode_sm90_case(s.kind.q, s.kind.kv, s.kind.group, s.kind.head_dim);
    dense.lengths(each(s.batch, 1), std::vector<std::int64_t>(s.batch, 700));
    const Values values = make_values(dense);
    for (const std::int64_t page_size : {16, 24}) {
      SCOPED_TRACE(::testing::Message() << s.batch << " sequences of " << s.kind.group << " heads, "
                                        << to_string(s.kind.kv) << ", pages of " << page_size);
      Case c = paged(dense, page_size);
      RunOptions options = on_sm90();
      const auto last = static_cast<std::int64_t>(s.batch) - 1;
      options.wrong_pages = {{0, 3, -1}, {last, 0, 1 << 30}, {last, 5, -1}};
      std::vector<std::int32_t> counts(s.batch, 0);
      counts.front() = 1;
      counts.back() = 2;
      EXPECT_EQ(launch_of(c).way, columns ? "columns" : "units");
      const Output expected = run_case(c, values, options);
      ASSERT_FALSE(expected.o.empty());
      EXPECT_EQ(expected.bad_pages, counts);
      c.problem.seqused_kv = false;
      const DecodeLaunch launch = launch_of(c);
      EXPECT_EQ(launch.way, columns ? "columns in clusters" : "clusters");
      EXPECT_EQ(launch.params.head_ctas, s.head_ctas);
      const Output output = run_case(c, values, options);
      EXPECT_TRUE(same_bits(output, expected));
      EXPECT_EQ(output.bad_pages, counts);
    }
  }
}

/// Some 18% of the pages of the longer sequence have such ids.
TEST(DecodeSm90Tables, PageIdsPast65535InBoxesClustersAndColumns) {
  RAFTER_SKIP_WITHOUT_SM90();
  constexpr Kind kKeys = {DType::bf16, DType::bf16, 2, 8},
                 kColumns = {DType::f16, DType::f16, 12, 8},
                 kBytes = {DType::bf16, DType::int8, 4, 16};
  struct Shape {
    Kind kind;
    std::int64_t page_size;
    std::vector<std::int64_t> keys;
    const char* way;
  };
  for (const Shape& s :
       {Shape{kKeys, 64, {20000, 500}, "units"}, Shape{kColumns, 64, {20000, 500}, "columns"},
        Shape{kBytes, 64, {20000, 500}, "columns"}, Shape{kKeys, 16, {8000}, "clusters"},
        Shape{kKeys, 24, {8000}, "clusters"}, Shape{kColumns, 16, {8000}, "columns in clusters"},
        Shape{kBytes, 16, {8000}, "columns in clusters"}}) {
    SCOPED_TRACE(::testing::Message()
                 << s.way << ", " << to_string(s.kind.kv) << " in pages of " << s.page_size);
    Case c =
        paged(decode_sm90_case(s.kind.q, s.kind.kv, s.kind.group, s.kind.head_dim, 1), s.page_size);
    c.spare_pages = 80000;
    c.lengths(each(s.keys.size(), 1), s.keys);
    const DecodeLaunch launch = launch_of(c);
    EXPECT_EQ(launch.way, s.way);
    EXPECT_EQ(launch.params.by_box, s.keys.size() > 1);
    check_case(c, on_sm90());
  }
}

}  // namespace
}  // namespace rafter::testing
