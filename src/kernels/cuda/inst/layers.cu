// The operations of layers.h on rows: RMSNorm with the residual add, pointwise functions, RoPE in
// place, rows of a table, uniform values. All are bound by bandwidth: every element is read once
// and written once, 16 bytes a lane.
#include <algorithm>
#include <string>
#include <type_traits>

#include "hw/cuda/early.cuh"
#include "hw/cuda/early.h"
#include "kernels/cuda/layers.h"
#include "kernels/cuda/rope.cuh"
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
  const unsigned token = heads == 1 ? index : index / heads;
  const unsigned batch = token < seqlen ? 0 : token / seqlen;
  return {batch, static_cast<int>(token - batch * seqlen), static_cast<int>(index - token * heads)};
}

__device__ Rows weight_rows(const RmsNormParams& p) {
  Rows rows;
  rows.data = const_cast<void*>(p.weight);
  rows.dtype = p.x.dtype;
  rows.in_vectors = p.weight_in_vectors;
  return rows;
}

/// Eight elements of a row of x, and what they are added to.
template <DType kDType>
struct Summands {
  static constexpr bool kWide = kDType == DType::f32;
  Raw<kWide> x, residual;

  __device__ void load(const RmsNormParams& p, const Place& at, int first, int count) {
    x = load_raw<kWide>(p.x, p.x.at(at.batch, at.token, at.head) + first, count);
    if (p.residual.data != nullptr) {
      residual =
          load_raw<kWide>(p.residual, p.residual.at(at.batch, at.token, at.head) + first, count);
    }
  }
  /// x becomes the sum as it is stored, where there is one. Returns the sum of x².
  __device__ float add(const RmsNormParams& p, const Place& at, int first, int count) {
    float sum[kRowWidth];
    unpack(kDType, x, sum);
    if (p.residual.data != nullptr) {
      float y[kRowWidth];
      unpack(kDType, residual, y);
#pragma unroll
      for (int i = 0; i < kRowWidth; ++i) {
        sum[i] += y[i];
      }
      x = pack_eight<kDType>(sum);
      unpack(kDType, x, sum);
      store_raw<kWide>(p.sum, p.sum.at(at.batch, at.token, at.head) + first, count, x);
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      squares = fmaf(sum[i], sum[i], squares);
    }
    return squares;
  }
  __device__ void scale(const RmsNormParams& p, const Place& at, int first, int count,
                        float inverse, const Raw<kWide>& weight) const {
    float s[kRowWidth], w[kRowWidth];
    unpack(kDType, x, s);
    unpack(kDType, weight, w);
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      s[i] *= inverse * w[i];
    }
    store_raw<kWide>(p.y, p.y.at(at.batch, at.token, at.head) + first, count,
                     pack_eight<kDType>(s));
  }
};

/// One CTA a row; each thread holds kVectors times eight elements, all under way before one is
/// used. Sums are of eight elements, then of 32 such that follow each other, then of those in
/// order: the same bits however many threads a row has.
template <DType kDType, int kVectors>
__global__ void __launch_bounds__(512) rmsnorm_block(const __grid_constant__ RmsNormParams p) {
  take_turn();
  __shared__ float of_warp[kVectors * 16];
  const Place at = place_of(p.count, blockIdx.x);
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  Summands<kDType> row[kVectors];
  Raw<kDType == DType::f32> weight[kVectors];
  float squares[kVectors] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = (thread + v * threads) * kRowWidth;
    row[v].load(p, at, first, lane_elements(first, p.count.size));
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = (thread + v * threads) * kRowWidth;
    const int count = lane_elements(first, p.count.size);
    if (count > 0) {
      squares[v] = row[v].add(p, at, first, count);
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = (thread + v * threads) * kRowWidth;
    weight[v] =
        load_raw<kDType == DType::f32>(weight_rows(p), first, lane_elements(first, p.count.size));
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      squares[v] += __shfl_xor_sync(0xffffffffu, squares[v], step);
    }
    if (thread % 32 == 0) {
      of_warp[(thread + v * threads) / 32] = squares[v];
    }
  }
  __syncthreads();
  float sum = 0;
#pragma unroll 4
  for (int i = 0; i < kVectors * threads / 32; ++i) {
    sum += of_warp[i];
  }
  const float inverse = __frsqrt_rn(sum / static_cast<float>(p.count.size) + p.eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = (thread + v * threads) * kRowWidth;
    const int count = lane_elements(first, p.count.size);
    if (count > 0) {
      row[v].scale(p, at, first, count, inverse, weight[v]);
    }
  }
}

/// 2^lane_bits lanes of a warp a row of up to 256 elements.
template <DType kDType>
__global__ void __launch_bounds__(kThreads)
    rmsnorm_lanes(const __grid_constant__ RmsNormParams p, int lane_bits) {
  take_turn();
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t row = thread >> lane_bits;
  const int lanes = 1 << lane_bits;
  const int first = (static_cast<int>(threadIdx.x) & (lanes - 1)) * kRowWidth;
  const int count = row < p.count.rows ? lane_elements(first, p.count.size) : 0;
  const Place at = place_of(p.count, row < p.count.rows ? row : 0);
  Summands<kDType> elements;
  Raw<kDType == DType::f32> weight;
  float squares = 0;
  if (count > 0) {
    weight = load_raw<kDType == DType::f32>(weight_rows(p), first, count);
    elements.load(p, at, first, count);
    squares = elements.add(p, at, first, count);
  }
  for (int step = lanes / 2; step > 0; step /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, step);
  }
  const float inverse = __frsqrt_rn(squares / static_cast<float>(p.count.size) + p.eps);
  if (count > 0) {
    elements.scale(p, at, first, count, inverse, weight);
  }
}

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

/// A thread takes one chunk of eight elements of each tensor, two of the only one.
template <DType kDType, Pointwise kFunction>
__global__ void __launch_bounds__(kThreads)
    pointwise_kernel(const __grid_constant__ PointwiseParams p) {
  take_turn();
  constexpr bool kWide = kDType == DType::f32, kAlone = kFunction == Pointwise::silu;
  constexpr int kChunks = kAlone ? 2 : 1;
  Raw<kWide> raw_a[kChunks], raw_b[kChunks];
  std::int64_t to[kChunks];
  int count[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const std::int64_t item = (std::int64_t{blockIdx.x} * kChunks + c) * kThreads + threadIdx.x;
    const std::int64_t row = quotient(item, p.row_chunks);
    const int first = static_cast<int>(item - row * p.row_chunks) * kRowWidth;
    const Place at = place_of(p.count, row);
    count[c] = item < p.items ? lane_elements(first, p.count.size) : 0;
    to[c] = p.out.at(at.batch, at.token, at.head) + first;
    if (count[c] > 0) {
      raw_a[c] = load_raw<kWide>(p.a, p.a.at(at.batch, at.token, at.head) + first, count[c]);
      if constexpr (!kAlone) {
        raw_b[c] = load_raw<kWide>(p.b, p.b.at(at.batch, at.token, at.head) + first, count[c]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float a[kRowWidth], b[kRowWidth];
    unpack(kDType, raw_a[c], a);
    unpack(kDType, raw_b[c], b);
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      a[i] = apply<kFunction>(a[i], b[i]);
    }
    if (count[c] > 0) {
      store_raw<kWide>(p.out, to[c], count[c], pack_eight<kDType>(a));
    }
  }
}

/// Both halves of two heads of one token: `columns` threads share them, `blocks` CTAs a token.
template <DType kDType>
__global__ void __launch_bounds__(kTokenThreads)
    rope_token(const __grid_constant__ RopeParams p, unsigned columns, unsigned blocks) {
  take_turn();
  const unsigned token = blockIdx.x / blocks, batch = token / p.count.seqlen;
  const unsigned thread = (blockIdx.x - token * blocks) * blockDim.x + threadIdx.x;
  const unsigned group = thread / columns;
  const int head = static_cast<int>(group) * kTokenHeads,
            heads = min(kTokenHeads, p.count.heads - head);
  if (heads <= 0) {
    return;
  }
  const auto i = static_cast<int>(token - batch * p.count.seqlen);
  const int first = static_cast<int>(thread - group * columns) * kRowWidth;
  const int half = p.count.size / 2;
  HalfRows<kDType, kTokenHeads> halves;
  halves.load(p.x, p.x.at(batch, i, head) + first, half, heads);
  const std::int64_t position = index_at(p.positions, i);
  Angles angles;
  if (position >= 0 && position < p.rope.max_position) {
    load_angles(p.rope, position, first, angles);
  } else {
#pragma unroll
    for (int n = 0; n < kRowWidth; ++n) {
      angles.cos[n] = angles.sin[n] = __int_as_float(0x7fffffff);
    }
  }
  halves.turn(angles);
  halves.store(p.out, p.out.at(batch, i, head) + first, half, heads);
}

/// Pairs of any kind, in place: a thread owns one, or an element behind rotary_dim.
__global__ void __launch_bounds__(kThreads) rope_pairs(const __grid_constant__ RopeParams p) {
  take_turn();
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= p.items) {
    return;
  }
  const std::int64_t row = quotient(item, p.row_items);
  const int which = static_cast<int>(item - row * p.row_items);
  const Place at = place_of(p.count, row);
  const std::int64_t from = p.x.at(at.batch, at.token, at.head),
                     to = p.out.at(at.batch, at.token, at.head);
  const int half = p.rope.rotary_dim / 2;
  if (which >= half) {  // behind the pairs
    const int d = which - half + p.rope.rotary_dim;
    store_element(p.out, to + d, element(p.x, from + d));
    return;
  }
  const std::int64_t position = index_at(p.positions, at.token);
  const bool has_angles = position >= 0 && position < p.rope.max_position;
  const float nan = __int_as_float(0x7fffffff);
  const int first = p.rope.interleaved ? 2 * which : which;
  const int second = p.rope.interleaved ? first + 1 : first + half;
  float a = element(p.x, from + first), b = element(p.x, from + second);
  turn_pair(a, b, has_angles ? __ldg(p.rope.cos + position * half + which) : nan,
            has_angles ? __ldg(p.rope.sin + position * half + which) : nan);
  store_element(p.out, to + first, a);
  store_element(p.out, to + second, b);
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherParams p) {
  take_turn();
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t i = quotient(item, p.row_chunks);
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

/// launch(std::integral_constant<DType, …>) of one of the three.
template <typename Launch>
Status with_dtype(DType dtype, Launch launch) {
  switch (dtype) {
    case DType::bf16:
      return launch(std::integral_constant<DType, DType::bf16>{});
    case DType::f16:
      return launch(std::integral_constant<DType, DType::f16>{});
    default:
      return launch(std::integral_constant<DType, DType::f32>{});
  }
}

template <DType kDType>
Status launch_norm(RmsNormParams params, void* stream) {
  constexpr std::int64_t kManyRows = 512;  // more than the SMs hold at once of large CTAs
  void* block_arguments[] = {&params};
  if (params.count.size <= 32 * kRowWidth) {
    int lane_bits = lane_bits_of(params.count.size);
    void* arguments[] = {&params, &lane_bits};
    return launch_items(reinterpret_cast<const void*>(&rmsnorm_lanes<kDType>),
                        params.count.rows << lane_bits, arguments, stream);
  }
  const int chunks = chunks_of(params.count.size);
  const int fewest = chunks <= 512 ? 1 : chunks <= 1024 ? 2 : 4;
  const int vectors = params.count.rows < kManyRows ? fewest : 4;
  const int threads = ((chunks + vectors - 1) / vectors + 31) / 32 * 32;
  const void* const kernel = vectors == 1 ? reinterpret_cast<const void*>(&rmsnorm_block<kDType, 1>)
                             : vectors == 2
                                 ? reinterpret_cast<const void*>(&rmsnorm_block<kDType, 2>)
                                 : reinterpret_cast<const void*>(&rmsnorm_block<kDType, 4>);
  return launch_early(kernel,
                      {.blocks = static_cast<unsigned>(params.count.rows),
                       .threads = static_cast<unsigned>(threads),
                       .stream = stream},
                      block_arguments);
}

template <DType kDType>
const void* pointwise_of(Pointwise function) {
  switch (function) {
    case Pointwise::add:
      return reinterpret_cast<const void*>(&pointwise_kernel<kDType, Pointwise::add>);
    case Pointwise::multiply:
      return reinterpret_cast<const void*>(&pointwise_kernel<kDType, Pointwise::multiply>);
    case Pointwise::silu:
      return reinterpret_cast<const void*>(&pointwise_kernel<kDType, Pointwise::silu>);
    default:
      return reinterpret_cast<const void*>(&pointwise_kernel<kDType, Pointwise::swiglu>);
  }
}

template <DType kDType>
Status launch_rope_token(RopeParams params, void* stream) {
  auto columns = static_cast<unsigned>(params.count.size / 2 / kRowWidth);
  const std::int64_t tokens = params.count.rows / params.count.heads;
  const int groups = (params.count.heads + kTokenHeads - 1) / kTokenHeads;
  TokenShape shape = token_shape(static_cast<unsigned>(groups) * columns);
  void* arguments[] = {&params, &columns, &shape.blocks};
  return launch_early(reinterpret_cast<const void*>(&rope_token<kDType>),
                      {.blocks = static_cast<unsigned>(tokens) * shape.blocks,
                       .threads = shape.threads,
                       .stream = stream},
                      arguments);
}

}  // namespace

Status launch_rmsnorm(const RmsNormParams& params, void* stream) {
  return with_dtype(params.x.dtype, [&](auto dtype) {
    return launch_norm<decltype(dtype)::value>(params, stream);
  });
}

Status launch_pointwise(PointwiseParams params, void* stream) {
  params.row_chunks = std::max(1, chunks_of(params.count.size));
  params.items = params.count.rows * params.row_chunks;
  const auto function = static_cast<Pointwise>(params.function);
  void* arguments[] = {&params};
  return with_dtype(params.a.dtype, [&](auto dtype) {
    const std::int64_t threads =
        function == Pointwise::silu ? (params.items + 1) / 2 : params.items;
    return launch_items(pointwise_of<decltype(dtype)::value>(function), threads, arguments, stream);
  });
}

Status launch_rope(RopeParams params, void* stream) {
  if (halves_pair(params.rope, params.count.size)) {
    return with_dtype(params.x.dtype, [&](auto dtype) {
      return launch_rope_token<decltype(dtype)::value>(params, stream);
    });
  }
  params.row_items = params.count.size - params.rope.rotary_dim / 2;
  params.items = params.count.rows * params.row_items;
  void* arguments[] = {&params};
  return launch_items(reinterpret_cast<const void*>(&rope_pairs), params.items, arguments, stream);
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
