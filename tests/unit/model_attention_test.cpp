// The closed forms of attention's cost against counts by brute force: pairs by a double loop, bytes
// by listing what is read and written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>

#include "rafter/attention.h"

namespace rafter {
namespace {

using i64 = std::int64_t;

template <typename T>
T must(Result<T> result) {
  EXPECT_TRUE(result) << result.status().message();
  return std::move(result).value();
}

double term(const Cost& cost, const std::string& name) {
  for (const ByteTerm& t : cost.bytes_by_term) {
    if (t.name == name) {
      return t.bytes;
    }
  }
  return 0;
}

/// Whether row i sees key j, from the mask's definition in attention.h.
bool sees(const Mask& mask, i64 i, i64 j, i64 seqlen_q, i64 seqlen_kv) {
  const i64 diagonal = i + (mask.align == MaskAlign::bottom_right ? seqlen_kv - seqlen_q : 0);
  return (mask.window_left < 0 || j >= diagonal - mask.window_left) &&
         (mask.window_right < 0 || j <= diagonal + mask.window_right);
}

struct Counts {
  double pairs = 0, keys = 0;
};
Counts count(const Mask& mask, i64 seqlen_q, i64 seqlen_kv) {
  Counts c;
  std::set<i64> keys;
  for (i64 i = 0; i < seqlen_q; ++i) {
    for (i64 j = 0; j < seqlen_kv; ++j) {
      if (sees(mask, i, j, seqlen_q, seqlen_kv)) {
        c.pairs += 1;
        keys.insert(j);
      }
    }
  }
  c.keys = static_cast<double>(keys.size());
  return c;
}

std::vector<Mask> masks() {
  std::vector<Mask> list = {Mask::none()};
  for (const MaskAlign align : {MaskAlign::bottom_right, MaskAlign::top_left}) {
    for (const i64 left : {-1, 0, 1, 3, 40}) {
      for (const i64 right : {-1, 0, 1, 5, 40}) {
        list.push_back(Mask::window(left, right, align));
      }
    }
  }
  return list;
}

AttentionProblem shape(i64 seqlen_q, i64 seqlen_kv) {
  AttentionProblem p;
  p.batch = 2;
  p.heads_q = 6;
  p.heads_kv = 3;
  p.seqlen_q = seqlen_q;
  p.seqlen_kv = seqlen_kv;
  p.head_dim = 5;
  p.head_dim_v = 7;
  p.dtype = DType::bf16;
  return p;
}

TEST(AttentionCost, CountsVisiblePairsAndSeenKeysOfEveryMask) {
  for (const Mask& mask : masks()) {
    for (const i64 q : {0, 1, 2, 7, 16, 33}) {
      for (const i64 kv : {0, 1, 2, 7, 16, 33}) {
        AttentionProblem p = shape(q, kv);
        p.mask = mask;
        const Counts want = count(mask, q, kv);
        EXPECT_EQ(must(visible_pairs(p)), want.pairs);
        const Cost c = must(attention_cost(p, Pipeline::fused));
        EXPECT_EQ(c.pairs, 2 * 6 * want.pairs);
        EXPECT_EQ(term(c, "k"), 2 * 3 * want.keys * 5 * 2)
            << q << " " << kv << " window " << mask.window_left << " " << mask.window_right;
        EXPECT_EQ(term(c, "v"), 2 * 3 * want.keys * 7 * 2);
      }
    }
  }
}

TEST(AttentionCost, ForwardFlopsAndBytesAreThoseOfAListing) {
  AttentionProblem p = shape(9, 13);
  p.mask = Mask::causal();
  const double rows = 2 * 6 * 9, pairs = 2 * 6 * count(p.mask, 9, 13).pairs;
  const double q = rows * 5 * 2, o = rows * 7 * 2, lse = rows * 4;
  const double k = 2 * 3 * 13 * 5 * 2, v = 2 * 3 * 13 * 7 * 2;
  struct Case {
    Pipeline pipeline;
    double passes, launches;
  };
  for (const auto& [pipeline, passes, launches] :
       {Case{Pipeline::unfused, 4, 3}, Case{Pipeline::half_fused, 2, 2},
        Case{Pipeline::fused, 0, 1}, Case{Pipeline::split_kv, 0, 1}}) {
    const Cost c = must(attention_cost(p, pipeline));
    EXPECT_EQ(c.matmul_flops, 2 * pairs * (5 + 7));
    EXPECT_EQ(c.softmax_flops, 5 * pairs);
    EXPECT_EQ(c.flops, c.matmul_flops + c.softmax_flops);
    EXPECT_EQ(c.exponentials, pairs);
    EXPECT_EQ(c.bytes, q + k + v + o + lse + passes * pairs * 2) << to_string(pipeline);
    EXPECT_EQ(c.launches, launches);
    EXPECT_EQ(c.score_matrix_bytes, rows * 13 * 2);
    EXPECT_EQ(c.footprint_bytes, q + k + v + o + lse + (passes > 0 ? rows * 13 * 2 : 0));
    EXPECT_EQ(c.unfused_bytes, q + k + v + o + lse + 4 * pairs * 2);
    double terms = 0, kernels = 0, flops = 0;
    for (const ByteTerm& t : c.bytes_by_term) {
      terms += t.bytes;
    }
    for (const KernelCost& kernel : c.kernels) {
      kernels += kernel.bytes;
      flops += kernel.matmul_flops + kernel.softmax_flops;
    }
    EXPECT_EQ(terms, c.bytes);
    EXPECT_EQ(kernels, c.bytes);
    EXPECT_EQ(flops, c.flops);
  }
}

TEST(AttentionCost, SplitsWriteAndReadTheirPartials) {
  const AttentionProblem p = shape(1, 64);
  const Cost one = must(attention_cost(p, Pipeline::split_kv));
  const Cost four = must(attention_cost(p, Pipeline::split_kv, Pass::forward, {}, 4));
  const double rows = 2 * 6;
  EXPECT_EQ(four.bytes - one.bytes, 2 * 4 * rows * (7 + 1) * 4);
  EXPECT_EQ(term(four, "partials"), four.bytes - one.bytes);
  EXPECT_EQ(four.launches, 2);
  EXPECT_EQ(four.flops, one.flops);
}

TEST(AttentionCost, BackwardCountsItsProductsAndStreams) {
  const AttentionProblem p = shape(11, 17);
  const double rows = 2 * 6 * 11, pairs = 2 * 6 * 11 * 17;
  const double q = rows * 5 * 2, o = rows * 7 * 2, stat = rows * 4;
  const double k = 2 * 3 * 17 * 5 * 2, v = 2 * 3 * 17 * 7 * 2, scores = pairs * 2;
  // Delta reads O and dO and writes a statistic; dQ, dK, dV are written by every pipeline.
  const double common = o + o + stat + q + k + v;

  const Cost fused = must(attention_cost(p, Pipeline::fused, Pass::backward));
  EXPECT_EQ(fused.matmul_flops, 2 * pairs * (3 * 5 + 2 * 7));  // QKᵀ, dK, dQ; dP, dV
  EXPECT_EQ(fused.softmax_flops, 6 * pairs + 2 * rows * 7);
  EXPECT_EQ(fused.bytes, common + q + k + v + o + 2 * stat);
  EXPECT_EQ(fused.launches, 2);

  const Cost unfused = must(attention_cost(p, Pipeline::unfused, Pass::backward));
  EXPECT_EQ(unfused.matmul_flops, 2 * pairs * (2 * 5 + 2 * 7));
  EXPECT_EQ(unfused.softmax_flops, 3 * pairs + 2 * rows * 7);
  EXPECT_EQ(unfused.bytes, common + q + k + v + 2 * o + stat + 7 * scores);
  EXPECT_EQ(unfused.exponentials, 0);
  EXPECT_EQ(unfused.launches, 6);

  const Cost half = must(attention_cost(p, Pipeline::half_fused, Pass::backward));
  EXPECT_EQ(half.matmul_flops, unfused.matmul_flops);
  EXPECT_EQ(half.bytes, common + q + k + v + 2 * o + 3 * stat + 5 * scores);
  EXPECT_EQ(half.launches, 5);

  const Result<Cost> split = attention_cost(p, Pipeline::split_kv, Pass::backward);
  ASSERT_FALSE(split);
  EXPECT_EQ(split.status().code(), StatusCode::kUnsupported);
}

TEST(AttentionCost, OfKnownLengthsIsTheSumOfTheSequences) {
  AttentionProblem p = shape(0, 0);
  p.batch = 1;
  p.mask = Mask::causal();
  p.layout = Layout::packed;
  const std::vector<SequenceLength> lengths = {{5, 5}, {0, 7}, {9, 3}, {4, 12}};
  double flops = 0, bytes = 0;
  for (const SequenceLength& s : lengths) {
    AttentionProblem one = p;
    one.layout = Layout::dense;
    one.seqlen_q = s.seqlen_q;
    one.seqlen_kv = s.seqlen_kv;
    const Cost c = must(attention_cost(one, Pipeline::unfused));
    flops += c.flops;
    bytes += c.bytes;
  }
  const Cost all = must(attention_cost(p, lengths, Pipeline::unfused));
  EXPECT_EQ(all.flops, flops);
  EXPECT_EQ(all.bytes, bytes + 2 * 4 * 4);  // and each sequence's ends in two i32 arrays
}

TEST(AttentionCost, OfPackedCapacitiesIsTheMostThatTheRowsCanHold) {
  AttentionProblem p = shape(8, 8);
  p.mask = Mask::causal();
  p.layout = Layout::packed;
  p.batch = 5;
  p.total_q = p.total_kv = 20;
  const std::vector<SequenceLength> most = {{8, 8}, {8, 8}, {4, 4}};
  EXPECT_EQ(must(attention_cost(p, Pipeline::fused)).flops,
            must(attention_cost(p, most, Pipeline::fused)).flops);
  // Any other division of the rows costs no more.
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<SequenceLength> other;
    i64 left = 20;
    for (int i = 0; i < 5; ++i) {
      const i64 s = std::uniform_int_distribution<i64>(0, std::min<i64>(8, left))(random);
      other.push_back({s, s});
      left -= s;
    }
    EXPECT_LE(must(attention_cost(p, other, Pipeline::fused)).flops,
              must(attention_cost(p, Pipeline::fused)).flops);
  }
}

TEST(AttentionCost, CountsPageTables) {
  AttentionProblem p = shape(1, 100);
  p.layout = Layout::paged;
  p.page_size = 16;
  p.num_pages = 14;
  const Cost c = must(attention_cost(p, Pipeline::split_kv));
  EXPECT_EQ(term(c, "page_table"), 2 * 7 * 4);
  EXPECT_EQ(term(c, "lengths"), 2 * 4);
}

TEST(AttentionCost, TiledTrafficReadsKeysOncePerTileOfRows) {
  Convention c;
  c.traffic_model = TrafficModel::tiled;
  c.fast_memory_bytes = 128 * 64 * 2;  // 64 rows of 128 bf16 elements
  AttentionProblem p;
  p.seqlen_q = p.seqlen_kv = 1024;
  p.dtype = DType::bf16;
  const Cost once = must(attention_cost(p, Pipeline::fused));
  const Cost tiled = must(attention_cost(p, Pipeline::fused, Pass::forward, c));
  EXPECT_EQ(term(tiled, "k"), 16 * term(once, "k"));
  EXPECT_EQ(term(tiled, "q"), term(once, "q"));
  c.fast_memory_bytes = 1e9;  // everything fits: compulsory
  EXPECT_EQ(must(attention_cost(p, Pipeline::fused, Pass::forward, c)).bytes, once.bytes);
  c.fast_memory_bytes = 0;
  EXPECT_EQ(attention_cost(p, Pipeline::fused, Pass::forward, c).status().parameter(),
            "fast_memory_bytes");
}

TEST(AttentionCost, HalfCausalIsHalfOfTheScoresAndRefusesAWindow) {
  Convention half = Convention::solution();
  AttentionProblem p = shape(64, 64);
  const Cost full = must(attention_cost(p, Pipeline::unfused, Pass::forward, half));
  p.mask = Mask::causal();
  const Cost causal = must(attention_cost(p, Pipeline::unfused, Pass::forward, half));
  EXPECT_EQ(causal.flops, full.flops / 2);
  EXPECT_EQ(term(causal, "scores"), term(full, "scores") / 2);
  EXPECT_EQ(term(causal, "k"), term(full, "k"));
  p.mask = Mask::window(8, 0);
  EXPECT_EQ(attention_cost(p, Pipeline::unfused, Pass::forward, half).status().parameter(),
            "window");
}

/// Keys that some row of a block sees.
double hull(const Mask& mask, i64 first, i64 rows, i64 seqlen_q, i64 seqlen_kv) {
  double keys = 0;
  for (i64 j = 0; j < seqlen_kv; ++j) {
    bool seen = false;
    for (i64 i = first; i < first + rows; ++i) {
      seen = seen || sees(mask, i, j, seqlen_q, seqlen_kv);
    }
    keys += seen ? 1 : 0;
  }
  return keys;
}

TEST(AttentionCost, BlocksOfRowsLandWithTheKeysThatSomeOfThemSees) {
  for (const Mask& mask : masks()) {
    for (const i64 q : {0, 1, 7, 16, 33}) {
      for (const i64 kv : {0, 1, 7, 16, 33}) {
        AttentionProblem p = shape(q, kv);
        p.mask = mask;
        const double pairs = 2 * 6 * count(mask, q, kv).pairs;
        for (const i64 block : {1, 3, 8, 64}) {
          double landed = 0, keys = 0;
          for (i64 row = 0; row < q; row += block) {
            const i64 rows = std::min(block, q - row);
            const double seen = hull(mask, row, rows, q, kv);
            landed += 2 * 6 * static_cast<double>(rows) * seen;
            keys += 2 * 3 * seen;
          }
          if (mask.is_none()) {  // one product of all rows
            keys = q > 0 ? 2 * 3 * static_cast<double>(kv) : 0;
          }
          Convention c;
          ASSERT_TRUE(c.set("score_block_rows", std::to_string(block)));
          const Cost unfused = must(attention_cost(p, Pipeline::unfused, Pass::forward, c));
          EXPECT_EQ(unfused.matmul_flops, 2 * landed * (5 + 7))
              << q << " " << kv << " window " << mask.window_left << " " << mask.window_right
              << " block " << block;
          EXPECT_EQ(term(unfused, "scores"), (3 * landed + pairs) * 2);
          EXPECT_EQ(term(unfused, "k"), keys * 5 * 2);
          EXPECT_EQ(term(unfused, "v"), keys * 7 * 2);
          EXPECT_EQ(unfused.pairs, pairs);
          EXPECT_EQ(unfused.softmax_flops, 5 * pairs);
          const Cost half = must(attention_cost(p, Pipeline::half_fused, Pass::forward, c));
          EXPECT_EQ(half.matmul_flops, 2 * landed * 5 + 2 * pairs * 7);
          EXPECT_EQ(term(half, "scores"), (landed + pairs) * 2);
          const Cost fused = must(attention_cost(p, Pipeline::fused, Pass::forward, c));
          EXPECT_EQ(fused.bytes, must(attention_cost(p, Pipeline::fused)).bytes);
          EXPECT_EQ(fused.flops, pairs * (2 * (5 + 7) + 5));
          const double begun = 2 * 6 * static_cast<double>(q * block);
          EXPECT_DOUBLE_EQ(fused.tile_flops, pairs > 0 ? (landed + begun) * (2 * (5 + 7) + 5) : 0);
          EXPECT_EQ(unfused.tile_flops, unfused.flops);
        }
      }
    }
  }
}

TEST(AttentionCost, BlocksOfAThousandRowsOf32KAreCountedInClosedForm) {
  AttentionProblem p;
  p.seqlen_q = p.seqlen_kv = 32768;
  p.mask = Mask::causal();
  Convention c;
  EXPECT_FALSE(c.set("score_block_rows", "0.5"));
  EXPECT_FALSE(c.set("score_block_rows", "-1"));
  ASSERT_TRUE(c.set("score-block-rows", "1024"));
  EXPECT_EQ(c.name, "exact, score_block_rows=1024");
  const Cost cost = must(attention_cost(p, Pipeline::unfused, Pass::forward, c));
  EXPECT_EQ(cost.matmul_flops, 4 * 128 * (1024.0 * 1024 * 32 * 33 / 2));  // 32 blocks of 1 to 32
}

TEST(AttentionCost, RefusesImpossibleShapesByName) {
  const auto refused = [](auto change) {
    AttentionProblem p = shape(4, 4);
    change(p);
    const Result<Cost> c = attention_cost(p, Pipeline::fused);
    return c ? std::string("accepted") : c.status().parameter();
  };
  constexpr i64 kHuge = std::numeric_limits<i64>::max();
  EXPECT_EQ(refused([](auto& p) { p.seqlen_q = -1; }), "seqlen_q");
  EXPECT_EQ(refused([](auto& p) { p.seqlen_kv = kHuge; }), "seqlen_kv");
  EXPECT_EQ(refused([](auto& p) { p.batch = -2; }), "batch");
  EXPECT_EQ(refused([](auto& p) { p.heads_q = 0; }), "heads_q");
  EXPECT_EQ(refused([](auto& p) { p.heads_kv = 4; }), "heads_kv");
  EXPECT_EQ(refused([](auto& p) { p.heads_kv = -3; }), "heads_kv");
  EXPECT_EQ(refused([](auto& p) { p.head_dim = 0; }), "head_dim");
  EXPECT_EQ(refused([](auto& p) { p.head_dim_v = -1; }), "head_dim_v");
  EXPECT_EQ(refused([](auto& p) { p.dtype = DType::i32; }), "dtype");
  EXPECT_EQ(refused([](auto& p) { p.mask.window_left = -2; }), "window");
  EXPECT_EQ(refused([](auto& p) { p.layout = Layout::paged; }), "page_size");
  EXPECT_EQ(refused([](auto& p) { p.seqlen_q = 0; }), "accepted");
}

TEST(AttentionCost, AWindowAsWideAsTheLargestIntegerIsNoWindow) {
  constexpr i64 kHuge = std::numeric_limits<i64>::max();
  AttentionProblem p = shape(100, 100);
  p.mask = Mask::window(kHuge, kHuge);
  EXPECT_EQ(must(visible_pairs(p)), 100 * 100);
  p.mask = Mask::window(kHuge, 0);
  EXPECT_EQ(must(visible_pairs(p)), 100 * 101 / 2);
}

TEST(DecodeCost, EqualsAttentionOfOneQuery) {
  DecodeProblem d;
  d.batch = 3;
  d.heads_q = 8;
  d.heads_kv = 2;
  d.seqlen_kv = 1000;
  d.head_dim = 64;
  AttentionProblem a;
  a.batch = 3;
  a.heads_q = 8;
  a.heads_kv = 2;
  a.seqlen_q = 1;
  a.seqlen_kv = 1000;
  a.head_dim = 64;
  a.dtype = DType::bf16;
  for (const Pipeline pipeline : {Pipeline::unfused, Pipeline::half_fused, Pipeline::split_kv}) {
    const Cost one = must(decode_cost(d, pipeline));
    const Cost other = must(attention_cost(a, pipeline));
    EXPECT_EQ(one.flops, other.flops);
    EXPECT_EQ(one.bytes, other.bytes);
    EXPECT_EQ(one.unfused_bytes, other.unfused_bytes);
  }
}

TEST(DecodeCost, CountsNarrowCachesWithTheirScales) {
  DecodeProblem d;
  d.heads_q = 8;
  d.heads_kv = 2;
  d.seqlen_kv = 4096;
  d.head_dim = 128;
  d.head_dim_v = 100;
  const double keys = 2.0 * 4096;
  const auto kv = [&](DType dtype) {
    d.kv_dtype = dtype;
    return must(decode_cost(d)).kv_bytes;
  };
  EXPECT_EQ(kv(DType::bf16), keys * (128 + 100) * 2);
  EXPECT_EQ(kv(DType::e4m3), keys * (128 + 100));
  EXPECT_EQ(kv(DType::int8), keys * ((128 + 100) + 2 * 4));  // one f32 scale for each row
  EXPECT_EQ(kv(DType::int4), keys * ((128 + 100) * 0.5 + (4 + 4) * 2));
  d.kv_scale_block = 128;
  EXPECT_EQ(kv(DType::int4), keys * ((128 + 100) * 0.5 + (1 + 1) * 2));
  d.kv_scale_block = 0;
  EXPECT_EQ(kv(DType::int4), keys * (128 + 100) * 0.5);
}

TEST(DecodeCost, FillsTheMachineByKvHeadsAndSplits) {
  const DeviceSpec h100 = *find_device("h100-sxm");
  DecodeProblem d;
  d.batch = 2;
  d.heads_q = 32;
  d.heads_kv = 8;
  d.seqlen_kv = 8192;
  d.splits = 4;
  EXPECT_DOUBLE_EQ(must(sm_fill(d, h100)), 2 * 8 * 4 / 132.0);
  EXPECT_EQ(sm_fill(d, *find_device("device-r")).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(decode_cost(d, Pipeline::fused).status().parameter(), "splits");
  d.splits = 9000;
  EXPECT_EQ(decode_cost(d).status().parameter(), "splits");
}

}  // namespace
}  // namespace rafter
