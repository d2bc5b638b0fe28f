// decode_sm90 in clusters: how the host launches it.
#pragma once

#include "kernels/cuda/decode_sm90.h"

namespace rafter::cuda {

/// As launch_decode_sm90(), where each of `heads` (sequence × KV head) has a cluster of so many
/// CTAs: 16-bit caches in aligned rows, not packed, up to 8 query rows, tuning rows 0 and 1.
/// Defined in decode_sm90_cluster.cuh, instantiated in inst/.
template <DType kDType, int kRow>
Status launch_decode_sm90_cluster(const DecodeParams& params, bool e4m3, unsigned heads,
                                  unsigned ctas, void* stream);

/// The same where warps have columns of O, for an element width of the cache (0: 16-bit, 1: 8-bit):
/// up to 16 query rows. Defined in decode_sm90_columns_cluster.cuh.
template <DType kDType, int kWidth, int kRow>
Status launch_decode_sm90_columns_cluster(const DecodeParams& params, bool e4m3, unsigned heads,
                                          unsigned ctas, void* stream);

/// The same where each of so many CTAs has `params.share` whole heads: up to 8 query rows, not in
/// pages; tiles::sm90_decode_head_tiles() or more where it has several. Defined in
/// decode_sm90_heads.cuh.
template <DType kDType, int kRow>
Status launch_decode_sm90_heads(const DecodeParams& params, unsigned ctas, void* stream);

}  // namespace rafter::cuda
