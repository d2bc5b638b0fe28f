// y = x weightᵀ + bias for one or two rows x: what a decode step multiplies with.
// x [m, k], weight [n, k], y [m, n] in bf16 or f16 (y also in f32), sums in f32.
// The wall is bandwidth: 2 m FLOP for each weight of two bytes. One CTA owns four rows of the
// weight and all of k: a thread takes eight elements of each row every 2048, two such steps at a
// time, so that eight loads of 16 bytes are in flight; x comes from the L2. Where the weight is
// settled the first of them do not wait for the kernel before. Sums of lanes and warps are added in
// a fixed order: the bits are the same with every run.
#include <cstdint>

#include "hw/cuda/early.cuh"
#include "hw/cuda/early.h"
#include "kernels/cuda/layers.h"
#include "kernels/cuda/rows.cuh"

namespace rafter::cuda {
namespace {

constexpr int kVectorThreads = 256;
constexpr int kWeightRows = 4;  // of a CTA
constexpr int kSteps = 2;       // loads of a weight row in flight, of a thread

/// Weights are read once: not kept in the L1.
__device__ uint4 load_once(const std::uint16_t* from) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

template <int kRows>
__global__ void __launch_bounds__(kVectorThreads)
    vector_rows(const __grid_constant__ VectorRowsParams p) {
  __shared__ float sums[kVectorThreads / 32][kRows * kWeightRows];
  const std::int64_t n0 = std::int64_t{blockIdx.x} * kWeightRows;
  const int thread = static_cast<int>(threadIdx.x);
  const auto* const x = static_cast<const std::uint16_t*>(p.x);
  const std::uint16_t* weight[kWeightRows];
#pragma unroll
  for (int r = 0; r < kWeightRows; ++r) {  // past the end: the last row again, its sums unused
    const std::int64_t row = n0 + r < p.n ? n0 + r : p.n - 1;
    weight[r] = static_cast<const std::uint16_t*>(p.weight) + row * p.k;
  }
  float sum[kRows][kWeightRows] = {};
  let_next_grid_begin();
  if (!p.weight_is_settled) {
    wait_for_earlier_grids();
  }
  bool waited = false;
  for (int first = thread * kRowWidth; first < p.k; first += kSteps * kVectorThreads * kRowWidth) {
    Raw<false> w[kSteps][kWeightRows];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = first + s * kVectorThreads * kRowWidth;
#pragma unroll
      for (int r = 0; r < kWeightRows; ++r) {
        if (at < p.k) {
          w[s][r].words[0] = load_once(weight[r] + at);
        }
      }
    }
    if (!waited) {  // a thread that has nothing to load waits below
      wait_for_earlier_grids();
      waited = true;
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = first + s * kVectorThreads * kRowWidth;
      if (at >= p.k) {
        break;
      }
      float of_x[kRows][kRowWidth];
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        Raw<false> raw;
        raw.words[0] = m < p.m ? *reinterpret_cast<const uint4*>(x + m * p.x_stride + at) : uint4{};
        unpack(p.dtype, raw, of_x[m]);
      }
#pragma unroll
      for (int r = 0; r < kWeightRows; ++r) {
        float of_w[kRowWidth];
        unpack(p.dtype, w[s][r], of_w);
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
#pragma unroll
          for (int i = 0; i < kRowWidth; ++i) {
            sum[m][r] = fmaf(of_w[i], of_x[m][i], sum[m][r]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int r = 0; r < kWeightRows; ++r) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], step);
      }
      if (thread % 32 == 0) {
        sums[thread / 32][m * kWeightRows + r] = sum[m][r];
      }
    }
  }
  __syncthreads();
  wait_for_earlier_grids();
  const int m = thread / kWeightRows;
  const std::int64_t row = n0 + thread % kWeightRows;
  if (thread >= kRows * kWeightRows || m >= p.m || row >= p.n) {
    return;
  }
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < kVectorThreads / 32; ++warp) {
    total += sums[warp][thread];
  }
  Rows y;
  y.data = p.y;
  y.dtype = p.y_is_f32 ? DType::f32 : p.dtype;
  if (p.bias != nullptr) {
    Rows bias;
    bias.data = const_cast<void*>(p.bias);
    bias.dtype = p.dtype;
    total += element(bias, row);
  }
  store_element(y, m * p.y_stride + row, total);
}

}  // namespace

Status launch_vector_rows(const VectorRowsParams& params, void* stream) {
  static_assert(kMostVectorRows == 2);
  VectorRowsParams given = params;
  void* arguments[] = {&given};
  const void* const kernel = params.m == 1 ? reinterpret_cast<const void*>(&vector_rows<1>)
                                           : reinterpret_cast<const void*>(&vector_rows<2>);
  const std::int64_t blocks = (params.n + kWeightRows - 1) / kWeightRows;
  return launch_early(
      kernel,
      {.blocks = static_cast<unsigned>(blocks), .threads = kVectorThreads, .stream = stream},
      arguments);
}

}  // namespace rafter::cuda
