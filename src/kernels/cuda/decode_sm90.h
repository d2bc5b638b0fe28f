// Host side of the decode kernel for sm_90a: what a launch passes, and its instantiations.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstdint>

#include "hw/cuda/launch.h"
#include "kernels/cuda/device_indices.h"
#include "rafter/tensor.h"
#include "tiles/divisor.h"
#include "tiles/sm90_decode.h"

namespace rafter::cuda {

/// q, K or V: a dense or packed tensor, or pages of a cache. Strides count bytes.
struct DecodeCache {
  const unsigned char* data = nullptr;
  std::int64_t stride_batch = 0;  // of a sequence, or of a page
  std::int64_t stride_seqlen = 0, stride_heads = 0;
  const float* scale = nullptr;  // 8-bit: factors of the rows, or null; strides in elements
  std::int64_t scale_batch = 0, scale_seqlen = 0, scale_heads = 0;
  int chunks = 0;                       // of 16 bytes in a row, rounded up
  int row_bytes = 0;                    // of a row
  bool aligned = false;                 // rows begin and end at multiples of 16 bytes
  int step_batch = 0, step_seqlen = 0;  // strides in units of row_unit (aligned)
  // Coordinates of the copy engine step by these from a head, sequence or page to the next.
  int heads_step = 1, outer_step = 1;
};

/// Everything the kernel reads. Strides count elements where not said otherwise.
struct DecodeParams {
  DecodeCache q;  // [batch, seqlen_q, heads_q, head_dim], 16-bit
  DecodeCache k, v;
  void* o = nullptr;  // [batch, seqlen_q, heads_q, head_dim_v]
  std::int64_t o_batch = 0, o_seqlen = 0, o_heads = 0;
  bool o_is_f32 = false;
  bool o_in_fours = false;  // o may be written four elements at a time
  float* lse = nullptr;     // [batch, heads_q, seqlen_q] or null
  std::int64_t lse_batch = 0, lse_heads = 0, lse_seqlen = 0;
  DeviceIndices cu_seqlens_q, cu_seqlens_kv, seqused_kv;
  DeviceIndices page_table;  // paged
  std::int64_t page_table_batch = 0;
  int page_size = 0, num_pages = 0;  // page_size 0: not paged
  tiles::Divisor by_page;            // of page_size
  // Where rows of K and V lie in units of so many bytes, a power of 2, so that 32 bits say it.
  int row_unit = 16;
  std::int32_t* bad_pages = nullptr;
  const std::uint64_t* tree_mask = nullptr;
  std::int64_t tree_mask_batch = 0;
  bool by_box = false;  // K and V by the copy engine, through the maps of the launch
  int box_log2 = 0;     // of the rows of a box
  int batch = 0, heads_kv = 0, group = 1;
  int seqlen_q = 0, seqlen_kv = 0;  // capacities
  int head_dim_v = 0;
  int row_blocks = 1;                       // of query rows, at most
  int window_left = -1, window_right = -1;  // at most kMaxLength
  bool top_left = false;
  tiles::Sm90DecodeParts parts = {};
  // Of a head, what is assumed while its length is on its way.
  int likely_parts = 1;
  tiles::Divisor by_likely_parts;
  int max_parts = 1;
  // Units of a CTA where lengths are no data, or heads where it has whole ones; the first
  // `longer_shares` CTAs have one more.
  int share = 0, longer_shares = 0;
  tiles::Sm90DecodeCut same_cut = {};  // of every sequence, where lengths are no data
  // Partial results of part s of (sequence, KV head, row block), where the CTA that has part 0
  // lacks it: slot ((b · heads_kv + head) · row_blocks + block) · max_parts + s.
  float* partial_o = nullptr;       // [slot, partial_rows, head_dim_v rounded up to 4]
  float2* partial_state = nullptr;  // [slot, partial_rows]: maximum (of log2 scores), sum
  // [slot, finishing warp]: `launch_id` once that warp's share of the partial result is written
  std::uint64_t* arrived = nullptr;
  std::uint64_t launch_id = 0;  // differs from whatever the workspace may hold
  int partial_rows = 0;
  // Where warps have columns of O: [slot, block of 8 rows, piece of 16 columns, lane],
  // [slot, block, pair of rows] (maxima, sums) and [slot, warp with columns].
  float4* partial_columns = nullptr;
  float4* partial_states = nullptr;
  int head_ctas = 1;  // in clusters: CTAs of a head, a power of 2
  int blocks = 1;     // of 8 query rows in a row block at most: 1, 2, 4 or 8
  // score_log2 = scale_log2 · q·k, or with softcap its tanh; p = 2^(score_log2 − max).
  float scale_log2 = 0;
  float transform_cap = 0;    // softcap · log2(e); 0: no softcap
  float transform_scale = 0;  // with softcap: 2 · log2(e) · softmax_scale / softcap
};

/// Warps that load K and V: one asks the copy engine for boxes, or four where they are small, as
/// requests of a warp follow one another; or four copy themselves.
constexpr int decode_load_warps(const DecodeParams& params) {
  return params.by_box && params.box_log2 >= 6 ? 1 : tiles::kDecodeMostLoadWarps;
}

/// What a launch passes beside, for the copy engine.
struct DecodeMaps {
  CUtensorMap k, v;
};

/// Queues the kernel of one dtype of q and tuning row, with 16-bit caches of few query heads a KV
/// head. Defined in decode_sm90.cuh, instantiated in inst/.
template <DType kDType, int kRow>
Status launch_decode_sm90(const DecodeParams& params, const DecodeMaps& maps, bool e4m3,
                          unsigned blocks, void* stream);

/// The same where warps have columns of O: for an element width of the cache (0: 16-bit, 1: 8-bit);
/// `e4m3` tells such caches from int8. Defined in decode_sm90_columns.cuh.
template <DType kDType, int kWidth, int kRow>
Status launch_decode_sm90_columns(const DecodeParams& params, const DecodeMaps& maps, bool e4m3,
                                  unsigned blocks, void* stream);

}  // namespace rafter::cuda
