// The operations of layers.h on rows: RMSNorm with the residual add, pointwise functions, RoPE in
// place, rows of a table, uniform values. All are bound by bandwidth: every element is read once
// and written once, 16 bytes a lane.
#include <algorithm>
#include <string>

#include "hw/cuda/early.cuh"
#include "hw/cuda/early.h"
#include "kernels/cuda/layers.h"
#include "kernels/cuda/rows.cuh"
#include "rafter/layers.h"
#include "tiles/uniform.h"

namespace rafter::cuda {
namespace {

constexpr int kThreads = 256;

/// First in every kernel: the next one may be launched, and this one begins when what came before
/// is done.
__device__ void take_turn() {
  let_next_grid_begin();
  wait_for_earlier_grids();
}

struct Place {
  std::int64_t batch;
  int token, head;
};
/// Fewer than 2^31 rows: divisions of 32 bits.
__device__ Place place_of(const RowCount& count, std::int64_t row) {
  const auto index = static_cast<unsigned>(row), heads = static_cast<unsigned>(count.heads),
             seqlen = static_cast<unsigned>(count.seqlen);
  const unsigned token = index / heads, batch = token / seqlen;
  return {batch, static_cast<int>(token - batch * seqlen), static_cast<int>(index - token * heads)};
}

__device__ Rows weight_rows(const RmsNormParams& p) {
  Rows rows;
  rows.data = const_cast<void*>(p.weight);
  rows.dtype = p.x.dtype;
  rows.in_vectors = p.weight_in_vectors;
  return rows;
}

/// s of eight elements: x, or the stored sum. Returns the sum of their squares.
template <bool kWide>
__device__ float take_up(const RmsNormParams& p, const Place& at, int first, int count,
                         float (&x)[kRowWidth]) {
  const Raw<kWide> raw = load_raw<kWide>(p.x, p.x.at(at.batch, at.token, at.head) + first, count);
  if (p.residual.data == nullptr) {
    unpack(p.x.dtype, raw, x);
  } else {
    const Raw<kWide> other =
        load_raw<kWide>(p.residual, p.residual.at(at.batch, at.token, at.head) + first, count);
    float y[kRowWidth];
    unpack(p.x.dtype, raw, x);
    unpack(p.x.dtype, other, y);
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      x[i] += y[i];
    }
    if constexpr (!kWide) {  // as it is stored
      Raw<kWide> rounded;
      rounded.words[0] = uint4{pack_pair(p.x.dtype, x[0], x[1]), pack_pair(p.x.dtype, x[2], x[3]),
                               pack_pair(p.x.dtype, x[4], x[5]), pack_pair(p.x.dtype, x[6], x[7])};
      unpack(p.x.dtype, rounded, x);
    }
    store_eight(p.sum, p.sum.at(at.batch, at.token, at.head) + first, count, x);
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kRowWidth; ++i) {
    squares = fmaf(x[i], x[i], squares);
  }
  return squares;
}

template <bool kWide>
__device__ void give_back(const RmsNormParams& p, const Place& at, int first, int count,
                          float inverse, const Raw<kWide>& weight, float (&x)[kRowWidth]) {
  float w[kRowWidth];
  unpack(p.x.dtype, weight, w);
#pragma unroll
  for (int i = 0; i < kRowWidth; ++i) {
    x[i] *= inverse * w[i];
  }
  store_eight(p.y, p.y.at(at.batch, at.token, at.head) + first, count, x);
}

/// One CTA a row; each thread holds kVectors times eight elements.
template <bool kWide, int kVectors>
__global__ void __launch_bounds__(512) rmsnorm_block(const __grid_constant__ RmsNormParams p) {
  take_turn();
  __shared__ float of_warp[16];
  const Place at = place_of(p.count, blockIdx.x);
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  float x[kVectors][kRowWidth];
  Raw<kWide> weight[kVectors];
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = (thread + v * threads) * kRowWidth;
    const int count = lane_elements(first, p.count.size);
    if (count > 0) {
      weight[v] = load_raw<kWide>(weight_rows(p), first, count);
      squares += take_up<kWide>(p, at, first, count, x[v]);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, step);
  }
  if (thread % 32 == 0) {
    of_warp[thread / 32] = squares;
  }
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < threads / 32; ++i) {
    sum += of_warp[i];
  }
  const float inverse = __frsqrt_rn(sum / static_cast<float>(p.count.size) + p.eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = (thread + v * threads) * kRowWidth;
    const int count = lane_elements(first, p.count.size);
    if (count > 0) {
      give_back<kWide>(p, at, first, count, inverse, weight[v], x[v]);
    }
  }
}

/// 2^lane_bits lanes of a warp a row of up to 256 elements.
template <bool kWide>
__global__ void __launch_bounds__(kThreads)
    rmsnorm_lanes(const __grid_constant__ RmsNormParams p, int lane_bits) {
  take_turn();
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t row = thread >> lane_bits;
  const int lanes = 1 << lane_bits;
  const int first = (static_cast<int>(threadIdx.x) & (lanes - 1)) * kRowWidth;
  const int count = row < p.count.rows ? lane_elements(first, p.count.size) : 0;
  const Place at = place_of(p.count, row < p.count.rows ? row : 0);
  float x[kRowWidth] = {};
  Raw<kWide> weight;
  float squares = 0;
  if (count > 0) {
    weight = load_raw<kWide>(weight_rows(p), first, count);
    squares = take_up<kWide>(p, at, first, count, x);
  }
  for (int step = lanes / 2; step > 0; step /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, step);
  }
  const float inverse = __frsqrt_rn(squares / static_cast<float>(p.count.size) + p.eps);
  if (count > 0) {
    give_back<kWide>(p, at, first, count, inverse, weight, x);
  }
}

/// Two ulp of f32 away at most; 1 + exp(−x) beyond 2^126 gives 0, which the limit is.
__device__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

template <Pointwise kFunction>
__device__ float apply(float a, float b) {
  switch (kFunction) {
    case Pointwise::add:
      return a + b;
    case Pointwise::multiply:
      return a * b;
    case Pointwise::silu:
      return silu(a);
    default:
      return silu(a) * b;
  }
}

template <bool kWide, Pointwise kFunction>
__global__ void __launch_bounds__(kThreads)
    pointwise_kernel(const __grid_constant__ PointwiseParams p) {
  take_turn();
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= p.items) {
    return;
  }
  // Fewer than 2^32 rows and 2^32 chunks: a division of 32 bits where that is enough.
  const std::int64_t row = p.items >> 32 == 0
                               ? static_cast<unsigned>(item) / static_cast<unsigned>(p.row_chunks)
                               : item / p.row_chunks;
  const int first = static_cast<int>(item - row * p.row_chunks) * kRowWidth;
  const int count = lane_elements(first, p.count.size);
  const Place at = place_of(p.count, row);
  const Raw<kWide> raw_a = load_raw<kWide>(p.a, p.a.at(at.batch, at.token, at.head) + first, count);
  Raw<kWide> raw_b = {};
  if constexpr (kFunction != Pointwise::silu) {
    raw_b = load_raw<kWide>(p.b, p.b.at(at.batch, at.token, at.head) + first, count);
  }
  float a[kRowWidth], b[kRowWidth];
  unpack(p.a.dtype, raw_a, a);
  unpack(p.a.dtype, raw_b, b);
#pragma unroll
  for (int i = 0; i < kRowWidth; ++i) {
    a[i] = apply<kFunction>(a[i], b[i]);
  }
  store_eight(p.out, p.out.at(at.batch, at.token, at.head) + first, count, a);
}

/// A thread owns whole pairs, so that rows turn in place: eight of them where the halves of a row
/// are multiples of eight (kVectors), else one, or one element behind rotary_dim.
template <bool kWide, bool kVectors>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ RopeParams p) {
  take_turn();
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= p.items) {
    return;
  }
  const std::int64_t row = item / p.row_items;
  const int which = static_cast<int>(item - row * p.row_items);
  const Place at = place_of(p.count, row);
  const std::int64_t from = p.x.at(at.batch, at.token, at.head),
                     to = p.out.at(at.batch, at.token, at.head);
  const std::int64_t position = index_at(p.positions, at.token);
  const bool has_angles = position >= 0 && position < p.max_position;
  const int half = p.rotary_dim / 2;
  const float nan = __int_as_float(0x7fffffff);
  const auto turn = [&](int angle, float& a, float& b) {
    const float cos = has_angles ? __ldg(p.cos + position * half + angle) : nan;
    const float sin = has_angles ? __ldg(p.sin + position * half + angle) : nan;
    const float x = a, y = b;  // rounded one by one, as append and the CPU do
    a = __fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin));
    b = __fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin));
  };
  if constexpr (kVectors) {
    const int first = which * kRowWidth;
    float a[kRowWidth], b[kRowWidth];
    load_eight(p.x, from + first, kRowWidth, a);
    load_eight(p.x, from + first + half, kRowWidth, b);
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      turn(first + i, a[i], b[i]);
    }
    store_eight(p.out, to + first, kRowWidth, a);
    store_eight(p.out, to + first + half, kRowWidth, b);
    return;
  }
  if (which >= half) {  // behind the pairs
    const int d = which - half + p.rotary_dim;
    store_element(p.out, to + d, element(p.x, from + d));
    return;
  }
  const int first = p.interleaved ? 2 * which : which;
  const int second = p.interleaved ? first + 1 : first + half;
  float a = element(p.x, from + first), b = element(p.x, from + second);
  turn(which, a, b);
  store_element(p.out, to + first, a);
  store_element(p.out, to + second, b);
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherParams p) {
  take_turn();
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t i = item / p.row_chunks;
  if (i >= p.count) {
    return;
  }
  const int first = static_cast<int>(item - i * p.row_chunks) * kRowWidth;
  const int count = lane_elements(first, p.size);
  const std::int64_t row = index_at(p.rows, i);
  Raw<kWide> raw;
  if (row >= 0 && row < p.table_rows) {
    raw = load_raw<kWide>(p.table, p.table.at(0, row, 0) + first, count);
  } else {  // all bits set: a NaN in every dtype
#pragma unroll
    for (int w = 0; w < (kWide ? 2 : 1); ++w) {
      raw.words[w] = uint4{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu};
    }
  }
  store_raw<kWide>(p.out, p.out.at(0, i, 0) + first, count, raw);
}

__global__ void __launch_bounds__(kThreads)
    fill_kernel(Rows out, std::int64_t count, std::uint64_t seed, float bound) {
  take_turn();
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kRowWidth;
  if (first >= count) {
    return;
  }
  float x[kRowWidth];
#pragma unroll
  for (int i = 0; i < kRowWidth; ++i) {
    x[i] = bound * tiles::uniform_of(seed, static_cast<std::uint64_t>(first + i));
  }
  store_eight(out, first, static_cast<int>(count - first < kRowWidth ? count - first : kRowWidth),
              x);
}

__global__ void __launch_bounds__(kThreads)
    advance_kernel(std::int32_t* counts, std::int64_t size, std::int32_t by) {
  take_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < size) {
    counts[i] += by;
  }
}

/// A thread for each item. Errors: more CTAs than a grid holds.
Status launch_items(const void* kernel, std::int64_t items, void** arguments, void* stream) {
  const std::int64_t blocks = (items + kThreads - 1) / kThreads;
  if (blocks >= (std::int64_t{1} << 31)) {
    return Status::unsupported("rows", std::to_string(items) + " pieces", "fewer than 2^39");
  }
  return launch_early(
      kernel, {.blocks = static_cast<unsigned>(blocks), .threads = kThreads, .stream = stream},
      arguments);
}

int chunks_of(int size) { return (size + kRowWidth - 1) / kRowWidth; }

template <bool kWide>
Status launch_norm(RmsNormParams params, void* stream) {
  void* block_arguments[] = {&params};
  if (params.count.size <= 32 * kRowWidth) {
    int lane_bits = lane_bits_of(params.count.size);
    void* arguments[] = {&params, &lane_bits};
    return launch_items(reinterpret_cast<const void*>(&rmsnorm_lanes<kWide>),
                        params.count.rows << lane_bits, arguments, stream);
  }
  const int chunks = chunks_of(params.count.size);
  const int vectors = chunks <= 512 ? 1 : chunks <= 1024 ? 2 : 4;
  const int threads = ((chunks + vectors - 1) / vectors + 31) / 32 * 32;
  const void* const kernel = vectors == 1 ? reinterpret_cast<const void*>(&rmsnorm_block<kWide, 1>)
                             : vectors == 2
                                 ? reinterpret_cast<const void*>(&rmsnorm_block<kWide, 2>)
                                 : reinterpret_cast<const void*>(&rmsnorm_block<kWide, 4>);
  return launch_early(kernel,
                      {.blocks = static_cast<unsigned>(params.count.rows),
                       .threads = static_cast<unsigned>(threads),
                       .stream = stream},
                      block_arguments);
}

template <bool kWide>
const void* pointwise_of(int function) {
  switch (static_cast<Pointwise>(function)) {
    case Pointwise::add:
      return reinterpret_cast<const void*>(&pointwise_kernel<kWide, Pointwise::add>);
    case Pointwise::multiply:
      return reinterpret_cast<const void*>(&pointwise_kernel<kWide, Pointwise::multiply>);
    case Pointwise::silu:
      return reinterpret_cast<const void*>(&pointwise_kernel<kWide, Pointwise::silu>);
    default:
      return reinterpret_cast<const void*>(&pointwise_kernel<kWide, Pointwise::swiglu>);
  }
}

}  // namespace

Status launch_rmsnorm(const RmsNormParams& params, void* stream) {
  return params.x.dtype == DType::f32 ? launch_norm<true>(params, stream)
                                      : launch_norm<false>(params, stream);
}

Status launch_pointwise(PointwiseParams params, void* stream) {
  params.row_chunks = std::max(1, chunks_of(params.count.size));
  params.items = params.count.rows * params.row_chunks;
  void* arguments[] = {&params};
  return launch_items(params.a.dtype == DType::f32 ? pointwise_of<true>(params.function)
                                                   : pointwise_of<false>(params.function),
                      params.items, arguments, stream);
}

Status launch_rope(RopeParams params, void* stream) {
  const int half = params.rotary_dim / 2;
  const bool vectors =
      !params.interleaved && params.rotary_dim == params.count.size && half % kRowWidth == 0;
  params.row_items = vectors ? half / kRowWidth : half + params.count.size - params.rotary_dim;
  params.items = params.count.rows * params.row_items;
  void* arguments[] = {&params};
  const bool wide = params.x.dtype == DType::f32;
  const void* const kernel = wide      ? vectors
                                             ? reinterpret_cast<const void*>(&rope_kernel<true, true>)
                                             : reinterpret_cast<const void*>(&rope_kernel<true, false>)
                                  : vectors ? reinterpret_cast<const void*>(&rope_kernel<false, true>)
                                       : reinterpret_cast<const void*>(&rope_kernel<false, false>);
  return launch_items(kernel, params.items, arguments, stream);
}

Status launch_gather(GatherParams params, void* stream) {
  params.row_chunks = std::max(1, chunks_of(params.size));
  void* arguments[] = {&params};
  return launch_items(params.table.dtype == DType::f32
                          ? reinterpret_cast<const void*>(&gather_kernel<true>)
                          : reinterpret_cast<const void*>(&gather_kernel<false>),
                      params.count * params.row_chunks, arguments, stream);
}

Status launch_fill_uniform(void* data, DType dtype, std::int64_t count, std::uint64_t seed,
                           float bound, void* stream) {
  Rows out;
  out.data = data;
  out.dtype = dtype;
  out.in_vectors = reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  void* arguments[] = {&out, &count, &seed, &bound};
  return launch_items(reinterpret_cast<const void*>(&fill_kernel),
                      (count + kRowWidth - 1) / kRowWidth, arguments, stream);
}

Status launch_advance(std::int32_t* counts, std::int64_t size, std::int32_t by, void* stream) {
  void* arguments[] = {&counts, &size, &by};
  return launch_items(reinterpret_cast<const void*>(&advance_kernel), size, arguments, stream);
}

}  // namespace rafter::cuda
