// The kernels beside the matrix products of the backward pass whose scores land. Those over scores
// take 1024 keys of a row a warp, 16 bytes a thread at a time, all of a thread's loads before the
// first use.
#include <cuda_runtime_api.h>

#include "kernels/cuda/backward_unfused.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scores.cuh"

namespace rafter::cuda {
namespace {

constexpr int kWidth = 8;                       // elements of a 16-byte access
constexpr int kVectors = 4;                     // accesses of a thread and matrix
constexpr int kChunk = 32 * kWidth * kVectors;  // keys of a warp
constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    delta_kernel(const __grid_constant__ ScoreProblem problem,
                 const __grid_constant__ DeltaRows rows, DType dtype, int lane_bits) {
  const int lanes = 1 << lane_bits, lane = static_cast<int>(threadIdx.x) % lanes;
  const std::int64_t index = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) >> lane_bits;
  const std::int64_t pair = index / problem.seqlen_q;
  const int row = static_cast<int>(index - pair * problem.seqlen_q);
  const bool active = pair < problem.batch * problem.heads_q;
  const int first = lane * kWidth, count = lane_elements(first, rows.head_dim_v);
  tiles::PairOrder::Pair place{};
  ScoreSequence s{};
  float o[kWidth] = {}, d_o[kWidth] = {};
  if (active) {
    place = pair_at(problem, pair);
    s = sequence_of(problem, place.batch);
    if (row < s.seqlen_q) {
      load_eight(rows.o, rows.o.at(s.batch, s.row_q + row, place.head) + first, count, o);
      load_eight(rows.d_o, rows.d_o.at(s.batch, s.row_q + row, place.head) + first, count, d_o);
    }
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    sum = fmaf(o[i], d_o[i], sum);
  }
  for (int apart = lanes / 2; apart > 0; apart /= 2) {
    sum += __shfl_xor_sync(~0u, sum, apart);
  }
  if (!active) {
    return;
  }
  if (rows.d_o_copy != nullptr && count > 0) {  // head_dim_v is a multiple of eight
    static_cast<uint4*>(rows.d_o_copy)[(index * rows.head_dim_v + first) / kWidth] =
        uint4{pack_pair(dtype, d_o[0], d_o[1]), pack_pair(dtype, d_o[2], d_o[3]),
              pack_pair(dtype, d_o[4], d_o[5]), pack_pair(dtype, d_o[6], d_o[7])};
  }
  if (lane == 0) {
    const float* const dlse = row < s.seqlen_q ? lse_at(rows.dlse, s, place.head, row) : nullptr;
    rows.delta[index] = dlse == nullptr ? sum : sum - *dlse;
  }
}

/// The keys of a row that a warp takes.
struct RowChunk {
  bool any = false;  // false: nothing to write
  ScoreMask::Range keys, block;
  int first = 0;                       // key of this thread's first access
  std::int64_t row_index = 0, at = 0;  // of pairs · seqlen_q rows; element of the row's first key
  float lse = 0;
};

__device__ RowChunk chunk_of(const ScoreProblem& problem, const ScoreGradients& scores) {
  const int chunks = (problem.seqlen_kv + kChunk - 1) / kChunk;
  const std::int64_t index = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  RowChunk found;
  found.row_index = index / chunks;
  const int begin = static_cast<int>(index - found.row_index * chunks) * kChunk;
  const std::int64_t pair = found.row_index / problem.seqlen_q;
  if (pair >= problem.batch * problem.heads_q) {
    return found;
  }
  const int row = static_cast<int>(found.row_index - pair * problem.seqlen_q);
  const tiles::PairOrder::Pair place = pair_at(problem, pair);
  const ScoreSequence s = sequence_of(problem, place.batch);
  const ScoreMask mask = mask_of(problem, s);
  if (row < s.seqlen_q) {
    found.keys = mask.row(row);
  }
  found.block = {0, problem.seqlen_kv};
  if (scores.tile > 0) {
    const int tile = scores.tile, first = row / tile * tile;
    const ScoreMask::Range hull = mask.hull(first, min(first + tile, problem.seqlen_q));
    found.block = {hull.first / tile * tile,
                   min((hull.last + tile - 1) / tile * tile, problem.seqlen_kv)};
  }
  found.any = begin < found.block.last && begin + kChunk > found.block.first;
  found.first = begin + static_cast<int>(threadIdx.x % 32) * kWidth;
  found.at = found.row_index * scores.row_stride;
  if (found.any && found.keys.size() > 0 && scores.lse.data != nullptr) {
    found.lse = *lse_at(scores.lse, s, place.head, row);
  }
  return found;
}

__device__ bool sees_any(const RowChunk& row, int key) {
  return key < row.keys.last && key + kWidth > row.keys.first;
}

__device__ uint4* vector_at(void* matrix, const RowChunk& row, int key) {
  return reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(matrix) + row.at + key);
}

/// Of each vector of a chunk, what f makes of it; f is called with zeros where no key is seen.
template <DType kDType, typename Load, typename Change>
__device__ void change_chunk(void* matrix, const RowChunk& row, const Load& load,
                             const Change& change) {
  if (!row.any) {
    return;
  }
  decltype(load(0)) loaded[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int key = row.first + i * 32 * kWidth;
    loaded[i] = {};
    if (sees_any(row, key)) {
      loaded[i] = load(key);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int key = row.first + i * 32 * kWidth;
    if (key < row.block.first || key >= row.block.last) {
      continue;
    }
    std::uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int low = key + 2 * j, high = low + 1;
      const float2 two = change(loaded[i], j);
      pairs[j] = pack<kDType>(low >= row.keys.first && low < row.keys.last ? two.x : 0.0f,
                              high >= row.keys.first && high < row.keys.last ? two.y : 0.0f);
    }
    *vector_at(matrix, row, key) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}

__device__ std::uint32_t pair_of(const uint4& vector, int j) {
  return j == 0 ? vector.x : j == 1 ? vector.y : j == 2 ? vector.z : vector.w;
}

template <DType kDType>
__global__ void __launch_bounds__(kThreads)
    weights_kernel(const __grid_constant__ ScoreProblem problem,
                   const __grid_constant__ ScoreGradients scores) {
  const RowChunk row = chunk_of(problem, scores);
  change_chunk<kDType>(
      scores.p, row, [&](int key) { return *vector_at(scores.p, row, key); },
      [&](const uint4& vector, int j) {
        const float2 s = unpack<kDType>(pair_of(vector, j));
        return float2{weight(s.x, row.lse), weight(s.y, row.lse)};
      });
}

struct TwoVectors {
  uint4 p, dp;
};

template <DType kDType>
__global__ void __launch_bounds__(kThreads)
    score_gradients_kernel(const __grid_constant__ ScoreProblem problem,
                           const __grid_constant__ ScoreGradients scores) {
  const RowChunk row = chunk_of(problem, scores);
  const float delta = row.any ? scores.delta[row.row_index] : 0;
  change_chunk<kDType>(
      scores.ds, row,
      [&](int key) {
        return TwoVectors{*vector_at(scores.p, row, key), *vector_at(scores.ds, row, key)};
      },
      [&](const TwoVectors& two, int j) {
        const float2 p = unpack<kDType>(pair_of(two.p, j)), dp = unpack<kDType>(pair_of(two.dp, j));
        return float2{p.x * (dp.x - delta), p.y * (dp.y - delta)};
      });
}

Status launch_over_chunks(const void* kernel, const ScoreProblem& problem,
                          const ScoreGradients& scores, void* stream) {
  const std::int64_t chunks = (problem.seqlen_kv + kChunk - 1) / kChunk;
  const std::int64_t warps = problem.batch * problem.heads_q * problem.seqlen_q * chunks;
  if (warps == 0) {
    return Status::ok();
  }
  void* arguments[] = {const_cast<ScoreProblem*>(&problem), const_cast<ScoreGradients*>(&scores)};
  constexpr int kWarps = kThreads / 32;
  return launch(kernel,
                {.blocks = static_cast<unsigned>((warps + kWarps - 1) / kWarps),
                 .threads = kThreads,
                 .stream = stream},
                arguments);
}

__global__ void __launch_bounds__(kThreads)
    store_gradient_kernel(const __grid_constant__ ScoreProblem problem,
                          const __grid_constant__ GradientRows gradient) {
  const bool queries = gradient.rows_of == RowsOf::queries;
  const std::int64_t group = queries ? 1 : problem.group, heads = problem.heads_q / group;
  const std::int64_t capacity = queries ? problem.seqlen_q : problem.seqlen_kv;
  const int lanes = gradient.head_dim / kWidth;
  const std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t in_all = index / lanes, pair = in_all / gradient.rows;
  const std::int64_t b = pair / heads, head = pair - b * heads;
  if (b >= problem.batch) {
    return;
  }
  const int row = gradient.first_row + static_cast<int>(in_all - pair * gradient.rows);
  const ScoreSequence s = sequence_of(problem, b);
  if (row >= (queries ? s.seqlen_q : s.seqlen_kv)) {
    return;
  }
  const int first = static_cast<int>(index - in_all * lanes) * kWidth;
  float sum[kWidth] = {};
  for (std::int64_t i = 0; gradient.sums != nullptr && i < group; ++i) {
    const std::int64_t source = (b * problem.heads_q + head * group + i) * capacity + row;
    const auto* const from =
        reinterpret_cast<const float4*>(gradient.sums + source * gradient.head_dim + first);
    const float4 low = from[0], high = from[1];
    const float part[kWidth] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sum[j] += part[j];
    }
  }
  store_eight(gradient.target,
              gradient.target.at(s.batch, (queries ? s.row_q : s.row_kv) + row, head) + first,
              kWidth, sum);
}

}  // namespace

template <DType kDType>
Status launch_delta(const ScoreProblem& problem, const DeltaRows& rows, void* stream) {
  DType dtype = kDType;
  int lane_bits = lane_bits_of(rows.head_dim_v);
  const std::int64_t threads = (problem.batch * problem.heads_q * problem.seqlen_q) << lane_bits;
  if (threads == 0) {
    return Status::ok();
  }
  void* arguments[] = {const_cast<ScoreProblem*>(&problem), const_cast<DeltaRows*>(&rows), &dtype,
                       &lane_bits};
  return launch(reinterpret_cast<const void*>(&delta_kernel),
                {.blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads),
                 .threads = kThreads,
                 .stream = stream},
                arguments);
}

template <DType kDType>
Status launch_weights(const ScoreProblem& problem, const ScoreGradients& scores, void* stream) {
  return launch_over_chunks(reinterpret_cast<const void*>(&weights_kernel<kDType>), problem, scores,
                            stream);
}

template <DType kDType>
Status launch_score_gradients(const ScoreProblem& problem, const ScoreGradients& scores,
                              void* stream) {
  return launch_over_chunks(reinterpret_cast<const void*>(&score_gradients_kernel<kDType>), problem,
                            scores, stream);
}

Status launch_store_gradient(const ScoreProblem& problem, const GradientRows& gradient,
                             void* stream) {
  const std::int64_t heads =
      gradient.rows_of == RowsOf::queries ? problem.heads_q : problem.heads_q / problem.group;
  const std::int64_t threads = problem.batch * heads * gradient.rows * (gradient.head_dim / kWidth);
  if (threads == 0) {
    return Status::ok();
  }
  void* arguments[] = {const_cast<ScoreProblem*>(&problem), const_cast<GradientRows*>(&gradient)};
  return launch(reinterpret_cast<const void*>(&store_gradient_kernel),
                {.blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads),
                 .threads = kThreads,
                 .stream = stream},
                arguments);
}

#define RAFTER_INSTANTIATE(dtype)                                                           \
  template Status launch_delta<dtype>(const ScoreProblem&, const DeltaRows&, void*);        \
  template Status launch_weights<dtype>(const ScoreProblem&, const ScoreGradients&, void*); \
  template Status launch_score_gradients<dtype>(const ScoreProblem&, const ScoreGradients&, void*);
RAFTER_INSTANTIATE(DType::bf16)
RAFTER_INSTANTIATE(DType::f16)
#undef RAFTER_INSTANTIATE

}  // namespace rafter::cuda
