// The order in which query tiles are taken: longest first, and the heads whose K and V fit the L2
// cache together.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rafter::tiles {

/// One query tile: query rows [block · tile_q, …) of head `head`, where heads count over the whole
/// batch (batch · heads_q) or over one sequence.
struct QueryTile {
  int head = 0;
  int block = 0;
};

/// Heads are taken in sections; inside a section the last block of every head comes first (under a
/// causal mask it is the longest), then the block before it.
/// 32-bit: whoever launches makes sure that heads · blocks is below 2^31.
struct TileOrder {
  int heads = 0;
  int blocks = 0;   // query tiles of one head
  int section = 1;  // heads in flight together, at most `heads`

  constexpr int tiles() const { return heads * blocks; }
  constexpr QueryTile at(int tile) const {
    const int index = tile / (section * blocks);
    const int rest = tile - index * section * blocks;
    const int wide = section < heads - index * section ? section : heads - index * section;
    return {index * section + rest % wide, blocks - 1 - rest / wide};
  }
};

/// How many query heads may share the cache: a multiple of `group` (heads that share K and V), at
/// least one group, at most all.
constexpr std::int64_t heads_in_cache(std::int64_t heads, std::int64_t group,
                                      std::int64_t kv_bytes_per_head, std::int64_t cache_bytes) {
  const std::int64_t groups =
      std::max<std::int64_t>(1, kv_bytes_per_head > 0 ? cache_bytes / kv_bytes_per_head : heads);
  return std::max<std::int64_t>(1, std::min(heads, groups * group));
}

/// How many query heads, in whole groups, give every one of `workers` a query tile at once: where
/// all tiles are equally long, more heads in flight would only ask for the keys of more of them at
/// the same time.
constexpr std::int64_t heads_in_flight(std::int64_t group, std::int64_t blocks,
                                       std::int64_t workers) {
  const std::int64_t tiles_of_group = std::max<std::int64_t>(1, group * blocks);
  return (workers + tiles_of_group - 1) / tiles_of_group * group;
}

}  // namespace rafter::tiles
