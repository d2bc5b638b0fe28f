// decode_sm90 where warps have columns of O: as decode_sm90.cuh, but K and V are read from shared
// memory once, however many query rows there are, and no results of warps meet. Each tile costs two
// barriers of the warps instead. For 8-bit caches, which widen no key twice, and where more than 8
// query heads share a KV head. Warps, by their work:
//   attend   decode_sm90_columns_attend.cuh; what becomes of parts: decode_sm90_columns_finish.cuh
//   find     one warp: units for all; announces parts to other CTAs
//   load     decode_sm90_load.cuh
#pragma once

#include "hw/cuda/early.cuh"
#include "hw/cuda/early.h"
#include "kernels/cuda/decode_sm90_columns_attend.cuh"
#include "kernels/cuda/decode_sm90_columns_finish.cuh"
#include "kernels/cuda/decode_sm90_load.cuh"

namespace rafter::cuda {

template <DType kDType, int kWidth, int kRow>
__global__ void __launch_bounds__(tiles::kSm90DecodeRows[kWidth][kRow].column_threads(), 1)
    decode_sm90_columns_kernel(const __grid_constant__ DecodeParams params,
                               const __grid_constant__ DecodeMaps maps, bool e4m3) {
  let_next_grid_begin();
  wait_for_earlier_grids();
  using Shared = DecodeColumns<kWidth, kRow>;
  using Load = DecodeLoad<Shared>;
  constexpr tiles::Sm90DecodeRow kShape = Shared::kShape;
  static_assert(kShape.column_shared_bytes(kShape.most_blocks) + sizeof(DecodeControl) <=
                227 * 1024);
  extern __shared__ unsigned char raw[];
  __shared__ DecodeControl control;
  constexpr std::uint32_t kAlign = tiles::Sm90DecodeRow::kAlign;
  const std::uint32_t start = shared_address(raw);
  const Shared shared{{raw + ((start + kAlign - 1) / kAlign * kAlign - start), control}};
  const int warp = static_cast<int>(threadIdx.x / 32);
  DecodeUnitFinder<kWidth, kRow> finder{params};
  if (warp == kShape.warps) {
    finder.begin();
  } else if (threadIdx.x == 0) {
    for (int i = 0; i < tiles::kDecodeUnitRing; ++i) {
      barrier_init(shared_address(&control.unit_full[i]), 1);
      barrier_init(shared_address(&control.unit_empty[i]), kShape.warps + 1 + Load::warps(params));
    }
    for (int i = 0; i < kShape.slots; ++i) {
      barrier_init(shared_address(&control.slot_full[i]), Load::arrivals(params));
      barrier_init(shared_address(&control.slot_empty[i]), kShape.warps);
    }
    for (int i = 0; i < tiles::kDecodeQueryBuffers; ++i) {
      barrier_init(shared_address(&control.query_full[i]), 1);
      barrier_init(shared_address(&control.query_empty[i]), kShape.warps);
    }
    barrier_init(shared_address(&control.left), kShape.value_warps());
    barrier_init_fence();
  } else if (warp < kShape.warps) {
    Load::clear_queries(params, shared);
  }
  __syncthreads();
  if (warp < kShape.warps) {
    take_registers<kShape.column_registers()>();
    if (params.blocks == 2) {
      DecodeColumnsAttend<kDType, kWidth, kRow, 2>{{params, e4m3, shared}}.run();
    } else if (params.blocks == 4) {
      DecodeColumnsAttend<kDType, kWidth, kRow, 4>{{params, e4m3, shared}}.run();
    } else if constexpr (kShape.most_blocks == 8) {
      DecodeColumnsAttend<kDType, kWidth, kRow, 8>{{params, e4m3, shared}}.run();
    } else if constexpr (kShape.least_column_blocks() == 1) {
      DecodeColumnsAttend<kDType, kWidth, kRow, 1>{{params, e4m3, shared}}.run();
    }
    return;
  }
  give_registers_back<kShape.other_registers()>();
  if (warp == kShape.warps) {
    DecodeFind<kWidth, kRow>{params, control}.run(finder);
  } else if (warp <= kShape.warps + Load::warps(params)) {
    Load{params, shared}.run(maps.k, maps.v);
  }
}

template <DType kDType, int kWidth, int kRow>
Status launch_decode_sm90_columns(const DecodeParams& params, const DecodeMaps& maps, bool e4m3,
                                  unsigned blocks, void* stream) {
  constexpr tiles::Sm90DecodeRow kShape = tiles::kSm90DecodeRows[kWidth][kRow];
  void* arguments[] = {const_cast<DecodeParams*>(&params), const_cast<DecodeMaps*>(&maps), &e4m3};
  return launch_early(
      reinterpret_cast<const void*>(&decode_sm90_columns_kernel<kDType, kWidth, kRow>),
      {.blocks = blocks,
       .threads = kShape.column_threads(),
       .shared_bytes = static_cast<unsigned>(kShape.column_shared_bytes(params.blocks)),
       .stream = stream},
      arguments);
}

}  // namespace rafter::cuda
