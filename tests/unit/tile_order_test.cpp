#include "tiles/tile_order.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace rafter::tiles {
namespace {

TEST(TileOrder, TakesEveryTileOfEveryHeadOnceWhateverTheSection) {
  for (const int heads : {1, 6, 33}) {
    for (const int blocks : {1, 4, 7}) {
      for (const int section : {1, 2, 6, 33}) {
        const TileOrder order{heads, blocks, std::min(section, heads)};
        std::set<std::pair<int, int>> seen;
        for (int tile = 0; tile < order.tiles(); ++tile) {
          const QueryTile place = order.at(tile);
          ASSERT_GE(place.head, 0);
          ASSERT_LT(place.head, heads);
          ASSERT_GE(place.block, 0);
          ASSERT_LT(place.block, blocks);
          EXPECT_TRUE(seen.emplace(place.head, place.block).second) << "tile " << tile;
        }
        EXPECT_EQ(seen.size(), static_cast<std::size_t>(heads) * blocks);
      }
    }
  }
}

TEST(TileOrder, HeadsInFlightOccupyEveryWorkerWithTheFewestWholeGroups) {
  EXPECT_EQ(heads_in_flight(1, 4, 132), 33);
  EXPECT_EQ(heads_in_flight(1, 8, 132), 17);
  EXPECT_EQ(heads_in_flight(4, 8, 132), 20);
  EXPECT_EQ(heads_in_flight(8, 1024, 132), 8) << "one group at least";
  EXPECT_EQ(heads_in_flight(2, 0, 132), 264) << "no queries: no division by their tiles";
  for (const int group : {1, 3, 8}) {
    for (const int blocks : {1, 5, 64}) {
      const std::int64_t heads = heads_in_flight(group, blocks, 132);
      EXPECT_EQ(heads % group, 0);
      EXPECT_GE(heads * blocks, 132);
      EXPECT_LT((heads - group) * blocks, 132);
    }
  }
}

TEST(TileOrder, HeadsInCacheAreWholeGroupsThatFit) {
  EXPECT_EQ(heads_in_cache(64, 4, 1 << 20, 8 << 20), 32);
  EXPECT_EQ(heads_in_cache(16, 4, 1 << 20, 8 << 20), 16) << "all of them fit";
  EXPECT_EQ(heads_in_cache(64, 4, 64 << 20, 8 << 20), 4) << "one group at least";
}

}  // namespace
}  // namespace rafter::tiles
