#include "tiles/sm90_decode.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <vector>

namespace rafter::tiles {
namespace {

constexpr Sm90DecodeRow kRow = kSm90DecodeRows[0][1];
constexpr int kTile = kRow.tile_keys();

Sm90DecodeCut cut_of(int seqlen_q, int seqlen_kv, int group, int heads_kv, int window_left = -1,
                     int forced = 0) {
  return sm90_decode_cut(kRow, {window_left, 0, seqlen_kv - seqlen_q, seqlen_kv}, seqlen_q, group,
                         sm90_decode_least_parts(heads_kv), forced);
}

TEST(Sm90Decode, PartsHaveEveryTileOnceAndNoneIsEmpty) {
  for (const int seqlen : {1, 128, 129, 500, 4096, 131072}) {
    for (const int forced : {0, 1, 3, 128}) {
      for (const int window : {-1, 0, 700}) {
        const Sm90DecodeCut cut = cut_of(1, seqlen, 4, 8, window, forced);
        EXPECT_LE(cut.first_tile * kTile, cut.first_key);
        EXPECT_GE(cut.end_tile * kTile, cut.end_key);
        std::vector<int> taken(static_cast<std::size_t>(cut.end_tile));
        for (int part = 0; part < cut.parts; ++part) {
          EXPECT_LT(cut.first_tile + part, cut.end_tile) << "an empty part, seqlen " << seqlen;
          for (int tile = cut.first_tile + part; tile < cut.end_tile; tile += cut.parts) {
            ++taken[static_cast<std::size_t>(tile)];
          }
        }
        for (int tile = 0; tile < cut.end_tile; ++tile) {
          EXPECT_EQ(taken[static_cast<std::size_t>(tile)], tile < cut.first_tile ? 0 : 1);
        }
      }
    }
  }
}

TEST(Sm90Decode, ASequenceWithoutKeysOrQueriesHasNoTilesOrUnits) {
  const Sm90DecodeCut no_keys = cut_of(1, 0, 4, 8);
  EXPECT_EQ(no_keys.first_tile, no_keys.end_tile);
  EXPECT_EQ(no_keys.units(8), 8) << "its zeros are written all the same";
  EXPECT_EQ(cut_of(0, 100, 4, 8).units(8), 0);
}

TEST(Sm90Decode, PartsFillTheSmsToNineTenthsWithinEightRounds) {
  for (int heads = 1; heads <= 1024; ++heads) {
    const int parts = sm90_decode_least_parts(heads);
    const int units = heads * parts;
    const int rounds = (units + kDecodeSms - 1) / kDecodeSms;
    EXPECT_TRUE(rounds >= 8 || 10 * units >= 9 * rounds * kDecodeSms) << heads << " heads";
  }
  EXPECT_EQ(sm90_decode_least_parts(1), 132);
  EXPECT_EQ(sm90_decode_least_parts(8), 16);
  EXPECT_EQ(sm90_decode_least_parts(10), 13) << "12 would leave 12 of 132 idle";
  EXPECT_EQ(sm90_decode_least_parts(128), 1);
}

TEST(Sm90Decode, PartsHaveTwoTilesOnAverageUnlessForced) {
  EXPECT_EQ(cut_of(1, 2 * kTile, 4, 8).parts, 1);
  EXPECT_EQ(cut_of(1, 3 * kTile, 4, 8).parts, 2);
  EXPECT_EQ(cut_of(1, 64 * kTile, 4, 8).parts, 16);
  EXPECT_EQ(cut_of(1, 3 * kTile, 4, 8, -1, 128).parts, 3) << "no more than tiles";
}

TEST(Sm90Decode, WarpsOfTheSameKeysAreAsManyAsTheirRowsNeed) {
  for (const auto& [rows, warps_log2, blocks] : std::vector<std::array<int, 3>>{
           {1, 0, 1}, {8, 0, 1}, {9, 1, 1}, {17, 2, 1}, {33, 3, 1}, {64, 3, 1}, {65, 3, 2}}) {
    const Sm90DecodeCut cut = cut_of(1, 1000, rows, 1);
    EXPECT_EQ(cut.row_warps_log2, warps_log2) << rows << " rows";
    EXPECT_EQ(cut.row_blocks, blocks) << rows << " rows";
  }
}

}  // namespace
}  // namespace rafter::tiles
