// Decode for sm_90a: few queries against many keys, O = softmax(softmax_scale · QKᵀ + mask) V with
// the keys of a sequence split into parts that are merged in the same launch.
//   Q, O [batch, heads_q, seqlen_q, D], bf16 or f16   lse [batch, heads_q, seqlen_q]
//   K, V [batch, heads_kv, seqlen_kv, D], dense, packed or in pages; 16 bits, up to 8 query heads a
//   KV head (others: decode_sm90_columns.cuh)
// A unit of work is one part of the keys of a sequence for one KV head and up to 64 query rows
// (position × head of the group). A CTA has a share of units that follow each other. Warps, by
// their work:
//   attend   decode_sm90_attend.cuh
//   finish   decode_sm90_finish.cuh; one of them finds the units
//   load     decode_sm90_load.cuh
#pragma once

#include "hw/cuda/early.cuh"
#include "hw/cuda/early.h"
#include "kernels/cuda/decode_sm90_attend.cuh"
#include "kernels/cuda/decode_sm90_finish.cuh"
#include "kernels/cuda/decode_sm90_load.cuh"

namespace rafter::cuda {

template <DType kDType, int kRow>
__global__ void __launch_bounds__(
    tiles::kSm90DecodeRows[0][kRow].threads(tiles::kDecodeMostLoadWarps), 1)
    decode_sm90_kernel(const __grid_constant__ DecodeParams params,
                       const __grid_constant__ DecodeMaps maps) {
  let_next_grid_begin();
  wait_for_earlier_grids();
  using Shared = DecodeShared<kRow>;
  using Load = DecodeLoad<Shared>;
  constexpr tiles::Sm90DecodeRow kShape = Shared::kShape;
  static_assert(kShape.shared_bytes(kShape.tile_rows()) + sizeof(DecodeControl) <= 227 * 1024);
  extern __shared__ unsigned char raw[];
  __shared__ DecodeControl control;
  const int warp = static_cast<int>(threadIdx.x / 32);
  DecodeUnitFinder<0, kRow> finder{params};
  if (warp == kShape.warps) {
    finder.begin();
  } else if (threadIdx.x == 0) {
    for (int i = 0; i < tiles::kDecodeUnitRing; ++i) {
      barrier_init(shared_address(&control.unit_full[i]), 1);
      barrier_init(shared_address(&control.unit_empty[i]), blockDim.x / 32);
    }
    for (int i = 0; i < kShape.slots; ++i) {
      barrier_init(shared_address(&control.slot_full[i]), Load::arrivals(params));
      barrier_init(shared_address(&control.slot_empty[i]), kShape.warps);
    }
    barrier_init(shared_address(&control.written), kShape.warps);
    barrier_init(shared_address(&control.taken), tiles::kDecodeFinishWarps);
    barrier_init_fence();
  }
  __syncthreads();
  constexpr std::uint32_t kAlign = tiles::Sm90DecodeRow::kAlign;
  const std::uint32_t start = shared_address(raw);
  const Shared shared{{raw + ((start + kAlign - 1) / kAlign * kAlign - start), control}};
  if (warp < kShape.warps) {
    DecodeAttend<kDType, kRow>{params, shared}.run();
  } else if (warp < kShape.warps + tiles::kDecodeFinishWarps) {
    DecodeFinish<kDType, kRow>{params, shared}.run(finder);
  } else {
    Load{params, shared}.run(maps.k, maps.v);
  }
}

template <DType kDType, int kRow>
Status launch_decode_sm90(const DecodeParams& params, const DecodeMaps& maps, bool, unsigned blocks,
                          void* stream) {
  constexpr tiles::Sm90DecodeRow kShape = tiles::kSm90DecodeRows[0][kRow];
  const int load_warps = decode_load_warps(params);
  void* arguments[] = {const_cast<DecodeParams*>(&params), const_cast<DecodeMaps*>(&maps)};
  return launch_early(
      reinterpret_cast<const void*>(&decode_sm90_kernel<kDType, kRow>),
      {.blocks = blocks,
       .threads = static_cast<unsigned>(kShape.threads(load_warps)),
       .shared_bytes = static_cast<unsigned>(kShape.shared_bytes(params.partial_rows)),
       .stream = stream},
      arguments);
}

}  // namespace rafter::cuda
