#include "tiles/sm90_decode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace rafter::tiles {
namespace {

constexpr Sm90DecodeRow kRow = kSm90DecodeRows[0][1];
constexpr int kTile = kRow.tile_keys();

Sm90DecodeCut cut_of(int seqlen_q, int seqlen_kv, int group, int heads_kv, int window_left = -1,
                     int forced = 0) {
  return sm90_decode_cut(kRow, {window_left, 0, seqlen_kv - seqlen_q, seqlen_kv}, seqlen_q, group,
                         sm90_decode_parts(2, heads_kv, forced));
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
  EXPECT_EQ(cut_of(1, 64 * kTile, 4, 8).parts, 8);
  EXPECT_EQ(cut_of(1, 3 * kTile, 4, 8, -1, 128).parts, 3) << "no more than tiles";
}

TEST(Sm90Decode, PartsHaveNoMoreTilesThanOthersCanWaitFor) {
  for (const int heads : {1, 8, 10, 32}) {
    const Sm90DecodeParts parts_of = sm90_decode_parts(2, heads, 0);
    for (const int tiles : {1, 500, 512, 513, 1024, 100000}) {
      const int parts = parts_of.of(tiles);
      EXPECT_LE((tiles + parts - 1) / parts, parts_of.most_tiles) << tiles << " tiles";
      EXPECT_TRUE(parts % parts_of.least == 0 || parts <= parts_of.few)
          << "rounds are as full as with fewer";
    }
  }
}

TEST(Sm90Decode, ShortSequencesOf16BitKeysHaveHalfAsManyParts) {
  const Sm90DecodeParts wide = sm90_decode_parts(2, 8, 0), bytes = sm90_decode_parts(1, 8, 0);
  EXPECT_EQ(wide.of(64), 8) << "8 tiles each";
  EXPECT_EQ(wide.of(65), 16);
  EXPECT_EQ(wide.of(256), 16);
  EXPECT_EQ(wide.of(257), 32);
  EXPECT_EQ(bytes.of(32), 16);
  EXPECT_EQ(bytes.of(512), 16);
  EXPECT_EQ(bytes.of(513), 32);
  EXPECT_EQ(sm90_decode_parts(2, 128, 0).of(8), 1);
}

TEST(Sm90Decode, LikelyPartsAreThoseOfTheShortSequencesOfACapacity) {
  const Sm90DecodeParts wide = sm90_decode_parts(2, 8, 0), bytes = sm90_decode_parts(1, 8, 0);
  EXPECT_EQ(wide.likely(8), wide.of(8));
  EXPECT_EQ(wide.likely(64), 8);
  EXPECT_EQ(wide.likely(1024), 8) << "not 64";
  EXPECT_EQ(bytes.likely(1024), bytes.of(1024)) << "none are short";
  EXPECT_EQ(sm90_decode_parts(2, 8, 5).likely(1024), 5);
}

// What the workspace of a capacity holds is enough for all that is shorter.
TEST(Sm90Decode, LongerSequencesNeverHaveFewerParts) {
  for (const int bytes : {1, 2}) {
    for (const int heads : {1, 2, 8, 10, 33, 132}) {
      const Sm90DecodeParts parts = sm90_decode_parts(bytes, heads, 0);
      for (int tiles = 1; tiles < 2000; ++tiles) {
        ASSERT_LE(parts.of(tiles), parts.of(tiles + 1)) << heads << " heads, " << tiles << " tiles";
      }
    }
  }
}

TEST(Sm90Decode, UnitsBeforeACostAreThoseWhoseMiddleLiesBeforeIt) {
  for (const int seqlen : {0, 1, 500, 4096, 5000}) {
    for (const int forced : {0, 3, 7}) {
      const Sm90DecodeCut cut = cut_of(1, seqlen, 4, 2, -1, forced);
      const int tiles = cut.end_tile - cut.first_tile;
      std::vector<std::int64_t> middles;  // of the units of two heads
      std::int64_t at = 0;
      for (int unit = 0; unit < cut.units(2); ++unit) {
        const int longer = unit % cut.parts < tiles % cut.parts ? 1 : 0;
        const int cost =
            Sm90DecodeCut::kTileCost * (tiles / cut.parts + longer) + Sm90DecodeCut::kUnitCost;
        middles.push_back(at + (cost + 1) / 2);
        at += cost;
      }
      ASSERT_EQ(cut.cost(2), at);
      for (std::int64_t cost = 0; cost <= at; ++cost) {
        EXPECT_EQ(cut.units_before(cost),
                  std::upper_bound(middles.begin(), middles.end(), cost) - middles.begin())
            << seqlen << " keys, cost " << cost;
      }
    }
  }
}

TEST(Sm90Decode, SharesAreEvenWhereFewCtasStayWithoutWork) {
  EXPECT_EQ(sm90_decode_even_share(512, 132), 4) << "128 CTAs";
  EXPECT_EQ(sm90_decode_even_share(16384, 132), 125);
  EXPECT_EQ(sm90_decode_even_share(64, 64), 1);
  EXPECT_EQ(sm90_decode_even_share(150, 132), 0) << "75 CTAs would have all";
  EXPECT_EQ(sm90_decode_even_share(0, 132), 0);
}

TEST(Sm90Decode, WarpsOfTheSameKeysAreAsManyAsTheirRowsNeed) {
  for (const auto& [rows, warps_log2, blocks] : std::vector<std::array<int, 3>>{
           {1, 0, 1}, {8, 0, 1}, {9, 1, 1}, {17, 2, 1}, {33, 3, 1}, {64, 3, 1}, {65, 3, 2}}) {
    const Sm90DecodeCut cut = cut_of(1, 1000, rows, 1);
    EXPECT_EQ(cut.row_warps_log2, warps_log2) << rows << " rows";
    EXPECT_EQ(cut.row_blocks, blocks) << rows << " rows";
  }
}

TEST(Sm90Decode, TheModelSaysWhetherWarpsHaveColumns) {
  EXPECT_FALSE(sm90_decode_by_columns(2, 8));
  EXPECT_TRUE(sm90_decode_by_columns(2, 9));
  EXPECT_TRUE(sm90_decode_by_columns(1, 1));
}

// 132 CTAs: 512 units leave four without work, 480 would leave twelve.
TEST(Sm90Decode, SharesAreEvenWhereFewCtasAreLeftWithoutWork) {
  EXPECT_EQ(sm90_decode_even_share(512, 132), 4);
  EXPECT_EQ(sm90_decode_even_share(480, 132), 0);
  EXPECT_EQ(sm90_decode_even_share(132, 132), 1);
}

}  // namespace
}  // namespace rafter::tiles
