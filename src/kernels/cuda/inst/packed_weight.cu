// A weight into 8 or 4 bits an element, and back: src/base/packed_weight.h has the layout and the
// rule. Not part of a decode step; a prefill dequantises each matrix once a step.
#include <algorithm>

#include "base/packed_weight.h"
#include "hw/cuda/launch.h"
#include "kernels/cuda/packed_rows.h"
#include "kernels/cuda/rows.cuh"

namespace rafter::cuda {
namespace {

constexpr int kThreads = 256;

/// One warp a scale.
__global__ void __launch_bounds__(kThreads) find_scales(const __grid_constant__ PackParams p) {
  const std::int64_t groups = p.shape.k / p.shape.scale_cols();
  const std::int64_t index = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (index >= p.shape.n * groups) {
    return;
  }
  const std::int64_t row = index / groups, first = index % groups * p.shape.scale_cols();
  std::uint32_t largest = 0;
  for (std::int64_t i = lane; i < p.shape.scale_cols(); i += 32) {
    largest =
        max(largest, base::magnitude_bits(element(p.matrix, p.matrix.at(0, row, 0) + first + i)));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane != 0) {
    return;
  }
  const float scale = base::scale_of(p.shape.dtype, largest);
  auto* const at = static_cast<std::uint8_t*>(p.packed) + base::scale_offset(p.shape, row, first);
  if (p.shape.is_int4()) {
    *reinterpret_cast<std::uint16_t*>(at) = f32_to_bf16(scale);
  } else {
    *reinterpret_cast<float*>(at) = scale;
  }
}

__device__ std::int64_t chunk_of_thread() {
  return std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
}

/// Calls body(upper, block, row, first column, scale) for each run of kRowWidth elements of a
/// chunk.
template <DType kDType, typename Body>
__device__ void for_each_run(const PackParams& p, const base::ChunkPlace& place, Body body) {
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
    for (int block = 0; block < (kDType == DType::int4 ? 2 : 1); ++block) {
      const std::int64_t row = place.row + 8 * upper, col = place.col + block * base::kBlockCols;
      body(upper, block, row, col,
           base::load_scale(p.shape, static_cast<const std::uint8_t*>(p.packed), row, col));
    }
  }
}

/// One thread a chunk, whose scales are there.
template <DType kDType>
__global__ void __launch_bounds__(kThreads) pack(const __grid_constant__ PackParams p) {
  const std::int64_t chunk = chunk_of_thread();
  if (chunk >= p.shape.chunks()) {
    return;
  }
  const base::ChunkPlace place = base::place_of_chunk(p.shape, chunk);
  std::uint32_t words[4] = {};
  const auto put = [&](int upper, int block, std::int64_t row, std::int64_t col, float scale) {
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      const float value = element(p.matrix, p.matrix.at(0, row, 0) + col + i);
      base::put_code(kDType, upper, block * kRowWidth + i,
                     base::encode(kDType, base::quotient_of(value, scale)), words);
    }
  };
  for_each_run<kDType>(p, place, put);
  *reinterpret_cast<uint4*>(static_cast<std::uint8_t*>(p.packed) + place.offset) =
      uint4{words[0], words[1], words[2], words[3]};
}

template <DType kDType>
__global__ void __launch_bounds__(kThreads) unpack_chunks(const __grid_constant__ PackParams p) {
  const std::int64_t chunk = chunk_of_thread();
  if (chunk >= p.shape.chunks()) {
    return;
  }
  const base::ChunkPlace place = base::place_of_chunk(p.shape, chunk);
  const uint4 raw =
      *reinterpret_cast<const uint4*>(static_cast<const std::uint8_t*>(p.packed) + place.offset);
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  const auto store = [&](int upper, int block, std::int64_t row, std::int64_t col, float scale) {
    float values[kRowWidth];
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      values[i] = base::code_value(kDType, upper, block * kRowWidth + i, words) * scale;
    }
    store_eight(p.matrix, p.matrix.at(0, row, 0) + col, kRowWidth, values);
  };
  for_each_run<kDType>(p, place, store);
}

Status launch_over(const void* kernel, const PackParams& params, std::int64_t items, void* stream) {
  PackParams given = params;
  void* arguments[] = {&given};
  return launch(kernel,
                {.blocks = static_cast<unsigned>((items + kThreads - 1) / kThreads),
                 .threads = kThreads,
                 .stream = stream},
                arguments);
}

}  // namespace

/// The kernel of a packed dtype.
#define RAFTER_OF_DTYPE(name, dtype)                                            \
  ((dtype) == DType::int4   ? reinterpret_cast<const void*>(&name<DType::int4>) \
   : (dtype) == DType::int8 ? reinterpret_cast<const void*>(&name<DType::int8>) \
                            : reinterpret_cast<const void*>(&name<DType::e4m3>))

Status launch_quantize(const PackParams& params, void* stream) {
  const std::int64_t scales = params.shape.n * (params.shape.k / params.shape.scale_cols());
  Status found =
      launch_over(reinterpret_cast<const void*>(&find_scales), params, scales * 32, stream);
  return found ? launch_over(RAFTER_OF_DTYPE(pack, params.shape.dtype), params,
                             params.shape.chunks(), stream)
               : found;
}

Status launch_dequantize(const PackParams& params, void* stream) {
  return launch_over(RAFTER_OF_DTYPE(unpack_chunks, params.shape.dtype), params,
                     params.shape.chunks(), stream);
}
#undef RAFTER_OF_DTYPE

}  // namespace rafter::cuda
