// How decode cuts keys and query rows. Nothing here depends on threads, on the batch or on the
// instruction set, so neither do the bits of a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tiles/key_range.h"

namespace rafter::tiles {

/// Keys of a part, and of one pass of softmax within a longer part. The scores of four query rows
/// take 8 KiB of the L1; a part's partial result is 1.6% of its keys' bytes (bf16, group 4).
inline constexpr std::int64_t kDecodeChunk = 512;
/// Keys whose rows stay in the L1 while the query rows of an item meet them.
inline constexpr std::int64_t kDecodeTile = 64;
/// Query rows (a position and a head of the group each) of one item, at most.
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

/// Where an item's parts lie in a thread's scratch, in floats.
struct DecodeLayout {
  std::int64_t rows = 0;     // query rows of an item, padded to blocks of four
  std::int64_t depth = 0;    // head_dim, padded to a step
  std::int64_t columns = 0;  // head_dim_v, padded to a step
  std::int64_t q = 0, o = 0, scores = 0, state = 0, keys = 0;  // offsets
  std::int64_t floats = 0;                                     // in all
};

/// `step` is the number of elements that the kernel loads at once.
constexpr DecodeLayout decode_layout(std::int64_t step, std::int64_t head_dim,
                                     std::int64_t head_dim_v, std::int64_t query_rows) {
  const auto up = [](std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; };
  DecodeLayout out;
  out.rows = up(std::clamp<std::int64_t>(query_rows, 1, kDecodeRows), 4);
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
  out.scores = take(out.rows * kDecodeChunk);
  out.state = take(2 * out.rows);       // running maximum and sum of each row
  out.keys = take(6 * kDecodeChunk);    // offsets of K and V rows (2 × int64), two scales
  out.floats = up(at + 16, 1024) + 16;  // threads apart by more than a page
  return out;
}

}  // namespace rafter::tiles
