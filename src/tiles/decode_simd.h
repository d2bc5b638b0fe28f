// How decode cuts keys and query rows. Nothing here depends on threads, on the batch or on the
// instruction set, so neither do the bits of a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tiles/key_range.h"

namespace rafter::tiles {

/// Keys of a part. A part's partial result is 1.6% of its keys' bytes (bf16, group 4).
inline constexpr std::int64_t kDecodeChunk = 512;
/// Keys of one pass of scores, softmax and values, for each head of an item in turn: those of eight
/// heads of 128 bf16 elements, and the next tile's, take half a megabyte of the L2.
inline constexpr std::int64_t kDecodeTile = 64;
/// Query rows (a position and a head of the group each) of one KV head of an item, at most; and of
/// all its heads together, which an item holds at once.
inline constexpr std::int64_t kDecodeRows = 64;
/// New tokens of a sequence whose keys are split without being asked; more of them fill the
/// threads.
inline constexpr std::int64_t kDecodeQueries = 64;

/// The parts of the keys of one sequence: chunks of kDecodeChunk, or as many parts as were asked
/// for, equal to a key, none of them empty.
struct KeyParts {
  std::int64_t seqlen_kv = 0;
  std::int64_t forced = 0;  // 0: by kDecodeChunk

  constexpr std::int64_t count() const {
    return forced > 0 ? std::clamp<std::int64_t>(forced, 1, std::max<std::int64_t>(1, seqlen_kv))
                      : std::max<std::int64_t>(1, (seqlen_kv + kDecodeChunk - 1) / kDecodeChunk);
  }
  constexpr Range part(std::int64_t i) const {
    if (forced == 0) {
      return {i * kDecodeChunk, std::min((i + 1) * kDecodeChunk, seqlen_kv)};
    }
    const std::int64_t each = seqlen_kv / count();
    const std::int64_t rest = seqlen_kv % count();
    return {i * each + std::min(i, rest), (i + 1) * each + std::min(i + 1, rest)};
  }
};
static_assert(KeyParts{0, 0}.count() == 1 && KeyParts{0, 0}.part(0).size() == 0);
static_assert(KeyParts{513, 0}.count() == 2 && KeyParts{513, 0}.part(1).size() == 1);
static_assert(KeyParts{10, 4}.part(1).first == 3 && KeyParts{10, 4}.part(3).last == 10);

/// Whether tiles multiply keys and values of `bytes` an element: whole rows of 64 bytes.
constexpr bool decode_fits_tiles(std::int64_t bytes, std::int64_t head_dim,
                                 std::int64_t head_dim_v) {
  return head_dim * bytes % 64 == 0 && head_dim_v * bytes % 64 == 0;
}

/// Where an item's parts lie in a thread's scratch, in floats.
struct DecodeLayout {
  std::int64_t rows = 0;                          // query rows of a head, padded to blocks of four
  std::int64_t heads = 0;                         // KV heads of an item, at most
  std::int64_t depth = 0;                         // head_dim, padded to a step
  std::int64_t columns = 0;                       // head_dim_v, padded to a step
  std::int64_t head = 0;                          // floats of a head, one after the other
  std::int64_t q = 0, o = 0, state = 0;           // offsets in a head
  std::int64_t scores = 0, keys = 0, scales = 0;  // offsets, once
  // of a kernel on tiles: queries of a head; rows of keys or values, sums of keys, weights, sums of
  // values
  std::int64_t tile_q = 0, tile_row = 0;  // tile_row: floats of a query row there
  std::int64_t tile_rows = 0, tile_sums = 0, tile_weights = 0, tile_values = 0;
  std::int64_t floats = 0;  // in all
};

/// `step` is the number of elements that the kernel loads at once; `tiles`: it multiplies on tiles.
constexpr DecodeLayout decode_layout(std::int64_t step, std::int64_t head_dim,
                                     std::int64_t head_dim_v, std::int64_t query_rows,
                                     std::int64_t heads_kv, bool tiles) {
  const auto up = [](std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; };
  DecodeLayout out;
  out.rows = up(std::clamp<std::int64_t>(query_rows, 1, kDecodeRows), 4);
  out.heads = std::clamp<std::int64_t>(kDecodeRows / out.rows, 1, heads_kv);
  out.depth = up(head_dim, step);
  out.columns = up(head_dim_v, step);
  std::int64_t at = 0;
  const auto take = [&](std::int64_t floats) {
    const std::int64_t offset = at;
    at += up(floats, 16);
    return offset;
  };
  out.q = take(out.rows * out.depth);
  out.o = take(out.rows * out.columns);
  out.state = take(2 * out.rows);  // running maximum and sum of each row
  if (tiles) {
    out.tile_row = out.depth + 4;  // of four rows: head_dim / 4 · 16 words, and 12 factors
    out.tile_q = take(out.rows * out.tile_row);
  }
  out.head = at;
  at *= out.heads;
  out.scores = take(4 * kDecodeTile);
  out.keys = take(8 * kDecodeTile);                // offsets of K and V rows of two tiles, int64
  out.scales = take(out.heads * 2 * kDecodeTile);  // of K and V
  if (tiles) {
    out.tile_rows = take(kDecodeTile * std::max(out.depth, out.columns) / 2);  // of 2 bytes
    out.tile_sums = take(2 * kDecodeTile * 16);              // of four rows and of the next four
    out.tile_weights = take(2 * 4 * 256);                    // two digits of four tiles of 16 keys
    out.tile_values = take(up(out.columns, 64) / 32 * 256);  // a tile for 32 columns
  }
  out.floats = up(at + 16, 1024) + 16;  // threads apart by more than a page
  return out;
}
// a thread's scratch, at its most
static_assert(decode_layout(32, 256, 256, kDecodeRows, 1, true).floats * 4 < 1 << 19);
static_assert(decode_layout(32, 256, 256, 1, 1024, true).floats * 4 < 1 << 19);

}  // namespace rafter::tiles
