// Which decode problems on sm_90a go to clusters: every KV head of a sequence has a cluster of CTAs
// of its own, and all of them run at once. How keys are cut is as everywhere (sm90_decode.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "tiles/sm90_decode.h"

namespace rafter::tiles {

/// Clusters of 8, 4 and 2 CTAs with most of an SM's shared memory that an H200 holds at once: its
/// SMs come in groups of 18, 16 and 10, and a cluster lies within one. Where fewer fit some wait.
/// A CTA alone: a head each.
constexpr int sm90_decode_cluster_size(std::int64_t heads) {
  return heads <= 15 ? 8 : heads <= 30 ? 4 : heads <= 66 ? 2 : heads <= kDecodeSms ? 1 : 0;
}

/// CTAs that are launched as one cluster, where a head has `ctas` of them: several heads share one,
/// as far as they all run at once. CTAs of large clusters lie in all groups of SMs alike; those of
/// small ones fill the largest group first, whose way to the memory they then share.
constexpr unsigned sm90_decode_launched_cluster(unsigned heads, unsigned ctas) {
  const unsigned all = heads * ctas;
  unsigned size = ctas;
  while (ctas > 1 && size < 8 && all % (2 * size) == 0 && all <= 15 * 8) {
    size *= 2;
  }
  return size;
}

/// What an SM of a cluster reads at most, what all SMs read without clusters, and the time that
/// clusters save, less some for each part of a CTA that follows another. Of an element width of the
/// cache, measured: 8-bit keys are held up by arithmetic, in which all SMs share.
struct Sm90DecodeClusterRates {
  double of_sm, of_all, saved, less;
};
inline constexpr Sm90DecodeClusterRates kDecodeClusterRates[2] = {{97e9, 4.2e12, 4.5e-6, 1.1e-6},
                                                                  {19.7e9, 2.6e12, 9e-6, 1.1e-6}};

/// CTAs for each of `heads` (sequence × KV head) with at most so many parts and `bytes` of keys and
/// values in all; 0: shares of units on all SMs are quicker.
constexpr int sm90_decode_cluster(std::int64_t heads, int max_parts, std::int64_t bytes,
                                  const Sm90DecodeClusterRates& rates = kDecodeClusterRates[0]) {
  int ctas = sm90_decode_cluster_size(heads);
  while (ctas > 2 && ctas > max_parts) {
    ctas /= 2;
  }
  if (ctas == 0) {
    return 0;
  }
  const double of_these = rates.of_sm * static_cast<double>(heads * ctas);
  const int following = (max_parts + ctas - 1) / ctas - 1;
  const double saved = rates.saved - rates.less * following;
  const double lost = static_cast<double>(bytes) * (1 / of_these - 1 / rates.of_all);
  return of_these < rates.of_all && lost > saved ? 0 : ctas;
}

/// Shared memory of a CTA: ring and results of its warps, and behind them queries and what the
/// parts have of its columns, of which a caller may force more than 32 bits count.
constexpr std::int64_t sm90_decode_cluster_bytes(const Sm90DecodeRow& row, int max_parts, int rows,
                                                 int ctas) {
  const int part = row.head_dim / ctas * static_cast<int>(sizeof(float)) + 8;
  return row.ring_bytes() + row.exchange_bytes() + kDecodeBlockRows * row.query_pitch() +
         std::int64_t{max_parts} * rows * part + Sm90DecodeRow::kAlign;
}

/// Where there are more heads than SMs: heads of each CTA, where all have as many and warps have
/// keys; 0: heads are cut between CTAs.
constexpr std::int64_t sm90_decode_heads(std::int64_t heads) {
  return sm90_decode_even_share(heads, kDecodeSms);
}
/// Tiles of a head at least, as another follows: its keys are asked for up to slots / 2 tiles
/// ahead, and its queries with them, which there is room for once those of this head were read.
constexpr int sm90_decode_head_tiles(const Sm90DecodeRow& row) { return row.slots / 2 + 1; }
/// Shared memory of such a CTA: ring, results of its warps and behind them queries of each.
constexpr int sm90_decode_heads_bytes(const Sm90DecodeRow& row) {
  return row.ring_bytes() + row.exchange_bytes() +
         row.warps * kDecodeBlockRows * row.query_pitch() + Sm90DecodeRow::kAlign;
}

// Where warps have columns of O.

/// Blocks of 8 query rows at most.
inline constexpr int kDecodeClusterBlocks = 2;
/// Warps whose columns of O a CTA merges, of so many: w, w + ctas, … of its own and others.
constexpr int sm90_decode_cluster_share(int value_warps, int ctas) {
  return std::max(1, value_warps / ctas);
}
/// What such a CTA is sent of each part: their columns, and (maximum, sum) of the rows.
constexpr int sm90_decode_cluster_part_bytes(int value_warps, int blocks, int ctas) {
  return blocks * (sm90_decode_cluster_share(value_warps, ctas) * 512 + 64);
}
/// Shared memory of a CTA: as without clusters, and behind the queries what it is sent.
constexpr std::int64_t sm90_decode_column_cluster_bytes(const Sm90DecodeRow& row, int max_parts,
                                                        int blocks, int ctas) {
  return row.queries_at(blocks) + row.query_bytes(blocks) +
         std::int64_t{max_parts} * sm90_decode_cluster_part_bytes(row.value_warps(), blocks, ctas) +
         Sm90DecodeRow::kAlign;
}
/// What a CTA has beside that of keys in pages: which pages each warp's keys of 2 · slots tiles are
/// in, 8 bytes a key, and where the rows of a tile of K and V are.
constexpr int sm90_decode_cluster_page_bytes(const Sm90DecodeRow& row) {
  return row.warps * (2 * row.slots * kDecodeBlockKeys * 8 + 2 * kDecodeBlockKeys * 4);
}
/// Where warps have columns, pages of longer sequences are shared by all SMs: barriers hold all
/// warps up where one finds its rows.
inline constexpr std::int64_t kDecodeClusterMostPagedKeys = 8192;
/// What a CTA may have beside its barriers.
inline constexpr int kDecodeClusterMostBytes = 225 * 1024;

}  // namespace rafter::tiles
