// How decode on sm_90a cuts keys and query rows. Nothing here depends on the batch, so that the
// bits of a sequence do not either.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tiles/key_range.h"

namespace rafter::tiles {

/// A warp takes 16 keys at a time, and 8 query rows.
inline constexpr int kDecodeBlockKeys = 16;
inline constexpr int kDecodeBlockRows = 8;
inline constexpr int kDecodeFinishWarps = 4;  // take the results of the others
/// Warps that load K and V at most: four copy 16 bytes a lane or ask for small boxes, one asks for
/// large ones.
inline constexpr int kDecodeMostLoadWarps = 4;
/// K and V lie in shared memory in panels of 128 bytes of each row, as the copy engine's widest
/// swizzle has them.
inline constexpr int kDecodePanelBytes = 128;
/// Fewest rows of a box of the copy engine: what the swizzle repeats after.
inline constexpr int kDecodeBoxRows = 8;
/// Units of work that a CTA knows, and how many ahead of the one that is finished.
inline constexpr int kDecodeUnitRing = 8, kDecodeUnitsAhead = 3;
/// Where warps have columns of O: columns of an instruction, and units whose queries lie in shared
/// memory.
inline constexpr int kDecodeColumns = 16, kDecodeQueryBuffers = 2;

/// One instantiation: widths of the rows of K and V in shared memory, warps, and depth of the ring.
struct Sm90DecodeRow {
  int head_dim;       // of K and V; what is narrower is filled with zeros
  int element_bytes;  // of K and V
  int warps;          // that attend, each to its own keys (or, with many query rows, its own rows)
  int slots;          // of the ring
  int most_blocks;    // of 8 query rows
  static constexpr int kAlign = 1024;

  /// Keys that the warps take together.
  constexpr int tile_keys() const { return warps * kDecodeBlockKeys; }
  /// Query rows at most.
  constexpr int tile_rows() const { return most_blocks * kDecodeBlockRows; }
  constexpr int threads(int load_warps) const {
    return 32 * (warps + kDecodeFinishWarps + load_warps);
  }
  constexpr int panels() const { return std::max(1, head_dim * element_bytes / kDecodePanelBytes); }
  constexpr int panel_bytes() const { return tile_keys() * kDecodePanelBytes; }
  /// From one query row to the next in a slot: eight rows of one column meet eight banks.
  constexpr int query_pitch() const { return 2 * head_dim + 16; }
  /// A slot holds a tile of K or V, or, where warps have keys, the queries of a unit.
  constexpr int slot_bytes() const { return panels() * panel_bytes(); }
  /// Beside each slot: the factors of its rows (8-bit caches), and a word for the 16 keys of each
  /// warp that says which are there (pages).
  constexpr int scale_bytes() const { return element_bytes == 1 ? tile_keys() * 4 : 0; }
  constexpr int present_bytes() const { return warps * 4; }
  constexpr int ring_bytes() const {
    return slots * (slot_bytes() + scale_bytes() + present_bytes());
  }
  /// Results of so many rows, f32, then (maximum, sum) of each.
  constexpr int results_bytes(int rows) const {
    return rows * (head_dim + 2) * static_cast<int>(sizeof(float));
  }
  constexpr int exchange_bytes() const { return results_bytes(tile_rows()); }  // of the warps
  /// With what follows from the parts of a head so far, of `rows` query rows.
  constexpr int shared_bytes(int rows) const {
    return ring_bytes() + exchange_bytes() + results_bytes(rows) + kAlign;
  }

  // Where warps have columns of O (decode_sm90_columns.cuh). Sizes of what follows the ring depend
  // on the blocks of 8 query rows of a launch.

  /// Beside those that attend there are two warpgroups, of which some warps end at once: registers
  /// go from warpgroup to warpgroup.
  constexpr int column_threads() const { return 32 * (warps + 8); }
  constexpr int column_registers() const { return warps == 8 ? 176 : 232; }
  constexpr int other_registers() const { return warps == 8 ? 80 : 136; }
  /// Blocks of query rows at least: 16-bit caches come here with more than 8 rows.
  constexpr int least_column_blocks() const { return element_bytes == 1 ? 1 : 2; }
  /// Warps that have columns, and pieces of 16 of them that each has.
  constexpr int value_warps() const { return std::min(warps, head_dim / kDecodeColumns); }
  constexpr int pieces() const { return head_dim / kDecodeColumns / value_warps(); }
  /// Operands of the product with V, of so many products: 256 bytes for 16 keys and 8 rows.
  constexpr int products() const { return element_bytes == 1 ? 2 : 1; }
  constexpr int weights_bytes(int blocks) const { return products() * blocks * warps * 256; }
  /// A number of each row and warp.
  constexpr int numbers_bytes(int blocks) const {
    return blocks * kDecodeBlockRows * warps * static_cast<int>(sizeof(float));
  }
  constexpr int query_bytes(int blocks) const { return blocks * kDecodeBlockRows * query_pitch(); }
  /// What a warp has of a part, four numbers a lane; and (maximum, sum) of its rows.
  constexpr int column_bytes(int blocks) const { return blocks * value_warps() * pieces() * 512; }
  constexpr int state_bytes(int blocks) const { return blocks * value_warps() * 64; }
  /// Behind the ring: operands, maxima of tiles, sums, running maxima, then queries.
  constexpr int queries_at(int blocks) const {
    return ring_bytes() + weights_bytes(blocks) + 3 * numbers_bytes(blocks);
  }
  /// With queries of two units, and what follows from the parts of a head so far.
  constexpr int column_shared_bytes(int blocks) const {
    return queries_at(blocks) + kDecodeQueryBuffers * query_bytes(blocks) + column_bytes(blocks) +
           state_bytes(blocks) + kAlign;
  }
};

inline constexpr int kSm90DecodeRowCount = 3;
inline constexpr Sm90DecodeRow kSm90DecodeRows[2][kSm90DecodeRowCount] = {
    // 128 KiB in flight on an SM, which has one CTA; beyond that fences and instructions wait
    // longer
    {{64, 2, 8, 8, 8}, {128, 2, 8, 4, 8}, {256, 2, 4, 4, 4}},
    // 8-bit caches
    {{64, 1, 8, 8, 4}, {128, 1, 8, 8, 4}, {256, 1, 4, 8, 4}},
};
inline constexpr int kDecodeMostSlots = 8;
constexpr bool sm90_decode_rows_fit() {
  constexpr int kMost = 226 * 1024;
  for (const auto& rows : kSm90DecodeRows) {
    for (const Sm90DecodeRow& row : rows) {
      if (row.slots > kDecodeMostSlots || row.column_shared_bytes(row.most_blocks) > kMost) {
        return false;
      }
      if (row.element_bytes == 2 && (row.shared_bytes(row.tile_rows()) > kMost ||
                                     row.query_bytes(row.most_blocks) > row.slot_bytes())) {
        return false;
      }
    }
  }
  return true;
}
static_assert(sm90_decode_rows_fit());

/// Tuning row of a problem; −1 beyond 256.
constexpr int sm90_decode_row_for(std::int64_t head_dim, std::int64_t head_dim_v) {
  const std::int64_t widest = std::max(head_dim, head_dim_v);
  return widest <= 64 ? 0 : widest <= 128 ? 1 : widest <= 256 ? 2 : -1;
}

/// Warps of 16-bit caches have keys and all columns of O where a KV head has few query heads, else
/// columns and all keys, as those of 8-bit caches. Which is a matter of the model, not of lengths:
/// it decides bits.
constexpr bool sm90_decode_by_columns(int element_bytes, std::int64_t group) {
  return element_bytes == 1 || group > kDecodeBlockRows;
}

/// SMs of an H100 or H200. Not asked of the device: how a sequence is cut decides its bits.
inline constexpr int kDecodeSms = 132;
/// Parts of the keys of each head with which one sequence alone keeps the SMs busy: the fewest
/// whose rounds are full to nine tenths, or what eight rounds have.
constexpr int sm90_decode_least_parts(std::int64_t heads_kv) {
  std::int64_t parts = std::max<std::int64_t>(1, kDecodeSms / heads_kv);
  const auto rounds = [&] { return (heads_kv * parts + kDecodeSms - 1) / kDecodeSms; };
  while (10 * heads_kv * parts < 9 * kDecodeSms * rounds() && rounds() < 8) {
    ++parts;
  }
  return static_cast<int>(parts);
}
/// How many parts the keys of each head have: what all sequences of a problem have in common.
struct Sm90DecodeParts {
  int forced = 0;              // > 0: so many, of which none is empty
  int least = 1;               // as long sequences have, or a multiple
  int few = 1, few_tiles = 0;  // as short ones have, up to so many tiles each
  int most_tiles = 1;          // of a part: no CTA has more than others by more

  /// Of `tiles` key tiles of a sequence, one unit of work each for every KV head and block of query
  /// rows; at least 1, of two tiles on average or more. Never fewer than of fewer tiles.
  constexpr int of(int tiles) const {
    if (forced > 0) {
      return std::max(1, std::min(tiles, forced));
    }
    const int most = most_tiles * least;
    const int parts = tiles <= few_tiles * few ? few : (tiles + most - 1) / most * least;
    return std::max(1, std::min((tiles + 1) / 2, parts));
  }
  /// Of a capacity of so many: rather those of short sequences, which have the least time to spare.
  constexpr int likely(int tiles) const {
    return of(few_tiles > 0 ? std::min(tiles, few_tiles * few) : tiles);
  }
};
/// Half of the SMs read 16-bit keys as fast as all, and parts that follow each other in a CTA take
/// time; but where CTAs have shares of sequences of other lengths too, long parts make them uneven.
/// 8-bit keys are held up by arithmetic, in which all SMs share.
constexpr Sm90DecodeParts sm90_decode_parts(int element_bytes, std::int64_t heads_kv, int forced) {
  const int least = sm90_decode_least_parts(heads_kv);
  if (element_bytes == 1) {
    return {.forced = forced, .least = least, .most_tiles = 32};
  }
  return {.forced = forced,
          .least = least,
          .few = std::max(1, least / 2),
          .few_tiles = 8,
          .most_tiles = 16};
}

/// How the keys and query rows of one sequence are cut: a unit for each KV head, part of the keys
/// and block of query rows, in this order. Part p has the tiles first_tile + p, + p + parts, ….
struct Sm90DecodeCut {
  int first_key = 0, end_key = 0;  // what any row sees
  int first_tile = 0, end_tile = 0;
  int parts = 1, row_blocks = 0;
  int row_warps_log2 = 0;  // warps that take the same keys: 2^row_warps_log2

  constexpr int units(int heads_kv) const { return heads_kv * parts * row_blocks; }

  // What units cost, in quarters of a tile: their tiles, and something for each.
  static constexpr int kTileCost = 4, kUnitCost = 1;
  constexpr int least_tiles() const { return (end_tile - first_tile) / parts; }  // of a part
  /// Parts from the first on that have one tile more.
  constexpr int longer_parts() const { return (end_tile - first_tile) % parts; }
  constexpr std::int64_t block_cost() const {  // of one head and row block
    return kTileCost * static_cast<std::int64_t>(end_tile - first_tile) + kUnitCost * parts;
  }
  constexpr std::int64_t cost(int heads_kv) const { return block_cost() * heads_kv * row_blocks; }
  /// Units of the sequence whose middle lies before `cost`, which is at most that of all.
  constexpr std::int64_t units_before(std::int64_t cost) const {
    const std::int64_t block = cost / block_cost();
    const std::int64_t rest = cost - block * block_cost();
    const int less = kTileCost * least_tiles() + kUnitCost, more = less + kTileCost;
    const std::int64_t longer = std::int64_t{longer_parts()} * more;
    return block * parts + (rest <= longer ? (rest + more / 2) / more
                                           : longer_parts() + (rest - longer + less / 2) / less);
  }
};
/// Rounds of `units` over `ctas` that follow each other on a CTA, when all have as many: rather a
/// few CTAs without work than heads cut between two. 0: too many would have none.
constexpr std::int64_t sm90_decode_even_share(std::int64_t units, std::int64_t ctas) {
  const std::int64_t share = (units + ctas - 1) / ctas;
  return 25 * units >= 24 * share * ctas ? share : 0;
}
constexpr Sm90DecodeCut sm90_decode_cut(Sm90DecodeRow row, const BasicMaskWindow<int>& mask,
                                        int seqlen_q, int group, Sm90DecodeParts parts) {
  Sm90DecodeCut cut;
  const BasicRange<int> keys = mask.hull(0, seqlen_q);
  if (keys.size() > 0) {
    cut.first_key = keys.first;
    cut.end_key = keys.last;
    cut.first_tile = keys.first / row.tile_keys();
    cut.end_tile = (keys.last + row.tile_keys() - 1) / row.tile_keys();
  }
  cut.parts = parts.of(cut.end_tile - cut.first_tile);
  const int rows = seqlen_q * group;
  cut.row_blocks = (rows + row.tile_rows() - 1) / row.tile_rows();
  while (kDecodeBlockRows << cut.row_warps_log2 < std::min(rows, row.tile_rows())) {
    ++cut.row_warps_log2;
  }
  return cut;
}

}  // namespace rafter::tiles
