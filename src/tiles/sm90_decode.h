// How decode on sm_90a cuts keys and query rows. Nothing here depends on the batch, so that the
// bits of a sequence do not either.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tiles/key_range.h"

namespace rafter::tiles {

/// A warp takes 16 keys at a time through a ring of its own, and 8 query rows.
inline constexpr int kDecodeBlockKeys = 16;
inline constexpr int kDecodeBlockRows = 8;
inline constexpr int kDecodeFinishWarps = 4;  // take the results of the others
/// Units of work that are known, and how many ahead of the one that is finished: more than a ring
/// holds stages, or those who attend and those who finish would wait for each other.
inline constexpr int kDecodeUnitRing = 16, kDecodeUnitsAhead = 9;
/// Parts into which the keys of one sequence are cut for all its heads together, where it is long
/// enough: one for nearly each of the 132 SMs of an H100 or H200, in whole parts of 8 or 16 heads.
inline constexpr int kDecodeParts = 128;
/// Keys of a part beyond which there are more parts, so that a long sequence among short ones
/// spreads.
inline constexpr int kDecodeMaxKeys = 2048;

/// One instantiation: widths of the rows of K and V in shared memory, warps, and depth of the
/// rings.
struct Sm90DecodeRow {
  int head_dim;       // of K and V; what is narrower is filled with zeros
  int element_bytes;  // of K and V
  int warps;          // that attend, each to its own keys (or, with many query rows, its own rows)
  int stages;         // blocks of K, and of V, that a warp holds

  /// Keys that the warps take together.
  constexpr int tile_keys() const { return warps * kDecodeBlockKeys; }
  /// Query rows at most: then all warps take the same keys.
  constexpr int tile_rows() const { return warps * kDecodeBlockRows; }
  constexpr int threads() const { return 32 * (warps + kDecodeFinishWarps); }
  constexpr int row_bytes() const { return head_dim * element_bytes; }
  constexpr int block_bytes() const { return kDecodeBlockKeys * row_bytes(); }
  /// Beside each block: the factors of its 16 rows (8-bit caches), and beside those of K a word
  /// that says which rows are there (pages).
  constexpr int scale_bytes() const { return element_bytes == 1 ? kDecodeBlockKeys * 4 : 0; }
  static constexpr int kPresentBytes = 4;
  constexpr int query_bytes() const { return kDecodeBlockRows * head_dim * 2; }
  constexpr int ring_bytes() const {
    return warps * stages * (2 * block_bytes() + query_bytes() + 2 * scale_bytes() + kPresentBytes);
  }
  /// Results of the warps for their rows, f32, then (maximum, sum) of each.
  constexpr int exchange_bytes() const {
    return tile_rows() * (head_dim + 2) * static_cast<int>(sizeof(float));
  }
  static constexpr int kAlign = 128;
  constexpr int shared_bytes() const {
    return (ring_bytes() + kAlign - 1) / kAlign * kAlign + exchange_bytes() + kAlign;
  }
};

inline constexpr int kSm90DecodeRowCount = 3;
inline constexpr Sm90DecodeRow kSm90DecodeRows[2][kSm90DecodeRowCount] = {
    // 16-bit caches: 128 KiB in flight on an SM, which has one CTA
    {{64, 2, 8, 4}, {128, 2, 8, 2}, {256, 2, 4, 2}},
    // 8-bit caches
    {{64, 1, 8, 6}, {128, 1, 8, 3}, {256, 1, 4, 3}},
};
constexpr bool sm90_decode_rows_fit() {
  for (const auto& rows : kSm90DecodeRows) {
    for (const Sm90DecodeRow& row : rows) {
      if (row.stages + 1 > kDecodeUnitsAhead ||
          row.shared_bytes() + 1280 > 227 * 1024) {  // and what is static
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

/// Parts of `tiles` key tiles of a sequence, one unit of work each for every KV head and block of
/// query rows; at least 1, of two tiles or more. `forced` > 0 asks for so many, of which none is
/// empty.
constexpr int sm90_decode_parts(int tiles, int tile_keys, int least, int forced) {
  const int most = kDecodeMaxKeys / tile_keys;  // tiles
  const int wanted = forced > 0 ? forced : std::max(least, (tiles + most - 1) / most);
  return std::max(1, std::min(forced > 0 ? tiles : (tiles + 1) / 2, wanted));
}
/// Parts that fill the SMs when one sequence is alone.
constexpr int sm90_decode_least_parts(std::int64_t heads_kv) {
  return static_cast<int>(std::max<std::int64_t>(1, kDecodeParts / heads_kv));
}

/// How the keys and query rows of one sequence are cut: a unit for each KV head, part of the keys
/// and block of query rows, in this order. Part p has the tiles first_tile + p, + p + parts, ….
struct Sm90DecodeCut {
  int first_key = 0, end_key = 0;  // what any row sees
  int first_tile = 0, end_tile = 0;
  int parts = 1, row_blocks = 0;
  int row_warps_log2 = 0;  // warps that take the same keys: 2^row_warps_log2

  constexpr int units(int heads_kv) const { return heads_kv * parts * row_blocks; }
};
constexpr Sm90DecodeCut sm90_decode_cut(Sm90DecodeRow row, const BasicMaskWindow<int>& mask,
                                        int seqlen_q, int group, int least, int forced) {
  Sm90DecodeCut cut;
  const BasicRange<int> keys = mask.hull(0, seqlen_q);
  if (keys.size() > 0) {
    cut.first_key = keys.first;
    cut.end_key = keys.last;
    cut.first_tile = keys.first / row.tile_keys();
    cut.end_tile = (keys.last + row.tile_keys() - 1) / row.tile_keys();
  }
  cut.parts = sm90_decode_parts(cut.end_tile - cut.first_tile, row.tile_keys(), least, forced);
  const int rows = seqlen_q * group;
  cut.row_blocks = (rows + row.tile_rows() - 1) / row.tile_rows();
  while (kDecodeBlockRows << cut.row_warps_log2 < std::min(rows, row.tile_rows())) {
    ++cut.row_warps_log2;
  }
  return cut;
}

}  // namespace rafter::tiles
