#include "tiles/sm90_decode_cluster.h"

#include <gtest/gtest.h>

namespace rafter::tiles {
namespace {

constexpr std::int64_t kMega = 1'000'000;

TEST(Sm90DecodeCluster, IsAsLargeAsLetsAllHeadsRunAtOnce) {
  EXPECT_EQ(sm90_decode_cluster(8, 16, 34 * kMega), 8);
  EXPECT_EQ(sm90_decode_cluster(15, 16, 34 * kMega), 8);
  EXPECT_EQ(sm90_decode_cluster(16, 16, 34 * kMega), 4);
  EXPECT_EQ(sm90_decode_cluster(32, 16, 34 * kMega), 2);
  EXPECT_EQ(sm90_decode_cluster(66, 16, 34 * kMega), 2);
  EXPECT_EQ(sm90_decode_cluster(67, 16, 34 * kMega), 1);
  EXPECT_EQ(sm90_decode_cluster(132, 16, 34 * kMega), 1);
  EXPECT_EQ(sm90_decode_cluster(133, 16, 34 * kMega), 0);
}

TEST(Sm90DecodeCluster, HasSeveralHeadsAsFarAsAllRunAtOnce) {
  EXPECT_EQ(sm90_decode_launched_cluster(8, 8), 8u);
  EXPECT_EQ(sm90_decode_launched_cluster(16, 4), 8u);
  EXPECT_EQ(sm90_decode_launched_cluster(32, 2), 8u);
  EXPECT_EQ(sm90_decode_launched_cluster(60, 2), 8u) << "15 of 8";
  EXPECT_EQ(sm90_decode_launched_cluster(64, 2), 2u) << "16 of 8 or 32 of 4 are too many";
  EXPECT_EQ(sm90_decode_launched_cluster(30, 2), 4u) << "60 CTAs";
  EXPECT_EQ(sm90_decode_launched_cluster(33, 2), 2u);
  EXPECT_EQ(sm90_decode_launched_cluster(17, 4), 4u);
}

TEST(Sm90DecodeCluster, LeavesHeadsToCtasWhereAllHaveAsMany) {
  EXPECT_EQ(sm90_decode_heads(133), 0);
  EXPECT_EQ(sm90_decode_heads(256), 2);
  EXPECT_EQ(sm90_decode_heads(264), 2);
  EXPECT_EQ(sm90_decode_heads(265), 0);
  EXPECT_EQ(sm90_decode_heads(1024), 8);
  EXPECT_EQ(sm90_decode_head_tiles(kSm90DecodeRows[0][0]), 5);
  EXPECT_EQ(sm90_decode_head_tiles(kSm90DecodeRows[0][1]), 3);
  EXPECT_LE(sm90_decode_heads_bytes(kSm90DecodeRows[0][1]), kDecodeClusterMostBytes);
}

TEST(Sm90DecodeCluster, HasNoMoreCtasThanPartsButTwo) {
  EXPECT_EQ(sm90_decode_cluster(8, 7, kMega), 4);
  EXPECT_EQ(sm90_decode_cluster(8, 2, kMega), 2);
  EXPECT_EQ(sm90_decode_cluster(8, 1, kMega), 2);
}

TEST(Sm90DecodeCluster, LeavesManyBytesOrPartsOfFewHeadsToAllSms) {
  EXPECT_EQ(sm90_decode_cluster(1, 8, 2 * kMega), 8);
  EXPECT_EQ(sm90_decode_cluster(1, 8, 8 * kMega), 0);
  EXPECT_EQ(sm90_decode_cluster(1, 40, kMega), 0);
  EXPECT_EQ(sm90_decode_cluster(4, 9, 17 * kMega), 8);
  EXPECT_EQ(sm90_decode_cluster(4, 33, 17 * kMega), 0);
  EXPECT_EQ(sm90_decode_cluster(8, 16, 1000 * kMega), 8);
}

TEST(Sm90DecodeCluster, LeavesManyBytesOfEightBitsToAllSms) {
  EXPECT_EQ(sm90_decode_cluster(8, 16, 17 * kMega, kDecodeClusterRates[1]), 8);
  EXPECT_EQ(sm90_decode_cluster(8, 16, 34 * kMega, kDecodeClusterRates[1]), 0);
  EXPECT_EQ(sm90_decode_cluster(64, 16, 134 * kMega, kDecodeClusterRates[1]), 0);
}

TEST(Sm90DecodeCluster, SharedMemoryHoldsWhatTheLargestIsSent) {
  const Sm90DecodeRow& row = kSm90DecodeRows[0][1];
  EXPECT_EQ(sm90_decode_cluster_bytes(row, 16, 4, 8) - sm90_decode_cluster_bytes(row, 0, 4, 8),
            16 * 4 * (16 * 4 + 8));
  EXPECT_LE(sm90_decode_cluster_bytes(row, 16, 8, 2) + sm90_decode_cluster_page_bytes(row),
            kDecodeClusterMostBytes);
  EXPECT_LE(sm90_decode_cluster_bytes(row, 64, 4, 8) + sm90_decode_cluster_page_bytes(row),
            kDecodeClusterMostBytes)
      << "131072 keys";
}

TEST(Sm90DecodeCluster, CtasAreSentColumnsOfWarps) {
  const Sm90DecodeRow& row = kSm90DecodeRows[0][1];
  ASSERT_EQ(row.value_warps(), 8);
  for (const int ctas : {2, 4, 8}) {  // 16 rows: their columns, maximum and sum
    EXPECT_EQ(sm90_decode_column_cluster_bytes(row, 16, 2, ctas) -
                  sm90_decode_column_cluster_bytes(row, 0, 2, ctas),
              16 * 16 * (128 / ctas * 4 + 8));
  }
  EXPECT_EQ(sm90_decode_cluster_share(kSm90DecodeRows[0][0].value_warps(), 8), 1) << "of four";
  EXPECT_LE(sm90_decode_column_cluster_bytes(row, 16, 2, 2), kDecodeClusterMostBytes);
}

// So many can be forced of 256 million keys. Their bytes would be negative in 32 bits, less than a
// CTA may have.
TEST(Sm90DecodeCluster, MillionsOfPartsAreMoreThanSharedMemoryHolds) {
  constexpr Sm90DecodeRow row = kSm90DecodeRows[0][1];
  constexpr int parts = 2'000'000;
  constexpr std::int64_t by_keys =
      sm90_decode_cluster_bytes(row, parts, 8, 2) - sm90_decode_cluster_bytes(row, 0, 8, 2);
  EXPECT_EQ(by_keys, std::int64_t{parts} * 8 * (64 * 4 + 8));
  constexpr std::int64_t by_columns = sm90_decode_column_cluster_bytes(row, parts, 2, 2) -
                                      sm90_decode_column_cluster_bytes(row, 0, 2, 2);
  EXPECT_EQ(by_columns, std::int64_t{parts} * 16 * (64 * 4 + 8));
}

}  // namespace
}  // namespace rafter::tiles
