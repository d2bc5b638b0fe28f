// Softmax over rows of scores in memory, and the copies around it.
//   scores [pairs, rows, row_stride] of 16-bit elements → probabilities, in place; lse
// A row belongs to one warp (up to 1024 keys), to four (4096) or to a CTA of sixteen (32768): it is
// read once, 16 bytes a thread at a time, kept packed in registers for maximum, sum and result, and
// written once. Longer rows are read twice. Only keys that the row sees are read.
#include <cuda_runtime_api.h>

#include "kernels/cuda/scores.cuh"

namespace rafter::cuda {
namespace {

constexpr int kWidth = 8;  // elements of a 16-byte access

/// Eight elements.
struct Vector {
  std::uint32_t pairs[4];
};

/// A row of a wave: where it is, what it sees, what its block covers.
struct Row {
  std::int64_t head = 0;
  ScoreSequence sequence{};
  int row = 0;  // in its sequence
  ScoreMask::Range keys, block;
  unsigned char* scores = nullptr;
};

__device__ Row find_row(const ScoreProblem& problem, const ScoreWave& wave, int row_block,
                        bool whole, std::int64_t index) {
  const std::int64_t pair = index / wave.rows;
  const int local = static_cast<int>(index - pair * wave.rows);
  const tiles::PairOrder::Pair place = pair_at(problem, wave.first_pair + pair);
  Row row;
  row.head = place.head;
  row.sequence = sequence_of(problem, place.batch);
  row.row = wave.first_row + local;
  const ScoreMask mask = mask_of(problem, row.sequence);
  if (row.row < row.sequence.seqlen_q) {
    row.keys = mask.row(row.row);
  }
  if (whole) {
    row.block = {0, problem.seqlen_kv};
  } else {
    const int first = wave.first_row + local / row_block * row_block;
    row.block = mask.hull(first, min(first + row_block, wave.first_row + wave.rows));
  }
  row.block.first = row.block.first / kWidth * kWidth;
  row.scores = static_cast<unsigned char*>(wave.scores) +
               2 * (pair * wave.pair_stride + local * wave.row_stride);
  return row;
}

/// Scores from `key` on, −∞ where the row does not see the key; nothing is read when it sees none.
template <DType kDType>
__device__ Vector load(const Row& row, int key) {
  Vector v;
  if (key >= row.keys.last || key + kWidth <= row.keys.first) {
#pragma unroll
    for (std::uint32_t& pair : v.pairs) {
      pair = minus_infinities<kDType>();
    }
    return v;
  }
  const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(row.scores + 2 * std::int64_t{key}));
  v = {{bits.x, bits.y, bits.z, bits.w}};
  if (key < row.keys.first || key + kWidth > row.keys.last) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int low = key + 2 * i, high = low + 1;
      const std::uint32_t keep = (low >= row.keys.first && low < row.keys.last ? 0xffffu : 0u) |
                                 (high >= row.keys.first && high < row.keys.last ? 0xffff0000u : 0);
      v.pairs[i] = (v.pairs[i] & keep) | (minus_infinities<kDType>() & ~keep);
    }
  }
  return v;
}

template <DType kDType>
__device__ float2 scores_of(const ScoreProblem& problem, std::uint32_t pair) {
  float2 s = unpack<kDType>(pair);
  if (problem.cap > 0) {  // −∞ marks a key that is not seen, and stays
    s.x = s.x == -INFINITY ? s.x : capped(problem, s.x);
    s.y = s.y == -INFINITY ? s.y : capped(problem, s.y);
  }
  return s;
}

template <DType kDType>
__device__ float max_of(const ScoreProblem& problem, const Vector& v, float top) {
#pragma unroll
  for (const std::uint32_t pair : v.pairs) {
    const float2 s = scores_of<kDType>(problem, pair);
    top = fmaxf(top, fmaxf(s.x, s.y));
  }
  return top;
}

template <DType kDType>
__device__ float sum_of(const ScoreProblem& problem, const Vector& v, float top) {
  float sum = 0;
#pragma unroll
  for (const std::uint32_t pair : v.pairs) {
    const float2 s = scores_of<kDType>(problem, pair);
    sum += weight(s.x, top) + weight(s.y, top);
  }
  return sum;
}

template <DType kDType>
__device__ void store(const ScoreProblem& problem, const Row& row, int key, const Vector& v,
                      float top, float inverse) {
  std::uint32_t p[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 s = scores_of<kDType>(problem, v.pairs[i]);
    p[i] = pack<kDType>(weight(s.x, top) * inverse, weight(s.y, top) * inverse);
  }
  __stcs(reinterpret_cast<uint4*>(row.scores + 2 * std::int64_t{key}),
         uint4{p[0], p[1], p[2], p[3]});
}

struct Maximum {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

/// Over the threads of a row, in an order of their own; every thread gets the result. `parts` has
/// one element a warp. Every thread of the CTA comes here.
template <int kWarps, typename Op>
__device__ float reduce(float value, Op op, float* parts) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = op(value, __shfl_xor_sync(~0u, value, lanes));
  }
  if constexpr (kWarps > 1) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (threadIdx.x % 32 == 0) {
      parts[warp] = value;
    }
    __syncthreads();
    const int first = warp / kWarps * kWarps;
    value = parts[first];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
      value = op(value, parts[first + i]);
    }
    __syncthreads();  // before parts are written again
  }
  return value;
}

constexpr int threads_of(int warps) { return warps > 8 ? 32 * warps : 256; }

/// kWarps warps a row, kVectors accesses a thread; kLong: rows of any length.
template <DType kDType, int kWarps, int kVectors, bool kLong>
__global__ void __launch_bounds__(threads_of(kWarps))
    softmax_rows_kernel(ScoreProblem problem, ScoreWave wave, LseTarget lse, int row_block,
                        bool whole) {
  constexpr int kThreads = 32 * kWarps;  // of a row
  constexpr int kStep = kThreads * kWidth;
  __shared__ float parts[threads_of(kWarps) / 32];
  const std::int64_t rows = wave.pairs * wave.rows;
  const std::int64_t index =
      std::int64_t{blockIdx.x} * (threads_of(kWarps) / kThreads) + threadIdx.x / kThreads;
  const bool active = index < rows;
  Row row;  // one without keys and block, where there is none
  if (active) {
    row = find_row(problem, wave, row_block, whole, index);
  }
  const int first = row.block.first + static_cast<int>(threadIdx.x % kThreads) * kWidth;
  const int seen = row.keys.size();
  float top = -INFINITY, sum = 0;
  if constexpr (!kLong) {
    Vector v[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i] = load<kDType>(row, first + i * kStep);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      top = max_of<kDType>(problem, v[i], top);
    }
    const float maximum = reduce<kWarps>(top, Maximum{}, parts);
    top = finite_top(maximum);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      sum += sum_of<kDType>(problem, v[i], top);
    }
    sum = reduce<kWarps>(sum, Sum{}, parts);
    const float inverse = inverse_of(seen, sum);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * kStep < row.block.last) {
        store<kDType>(problem, row, first + i * kStep, v[i], top, inverse);
      }
    }
    top = maximum;
  } else {
    for (int key = first; key < row.keys.last; key += kStep) {
      const Vector v = load<kDType>(row, key);
      const float next = max_of<kDType>(problem, v, top);
      sum = sum * weight(top, finite_top(next)) + sum_of<kDType>(problem, v, finite_top(next));
      top = next;
    }
    const float maximum = reduce<kWarps>(top, Maximum{}, parts);
    const float finite = finite_top(maximum);
    sum = reduce<kWarps>(sum * weight(top, finite), Sum{}, parts);
    const float inverse = inverse_of(seen, sum);
    for (int key = first; key < row.block.last; key += kStep) {
      store<kDType>(problem, row, key, load<kDType>(row, key), finite, inverse);
    }
    top = maximum;
  }
  if (active && threadIdx.x % kThreads == 0 && row.row < row.sequence.seqlen_q) {
    store_lse(lse, row.sequence, row.head, row.row, lse_of(seen, top, sum));
  }
}

template <DType kDType, int kWarps, int kVectors, bool kLong = false>
Status launch_rows(const ScoreProblem& problem, const ScoreWave& wave, const LseTarget& lse,
                   int row_block, bool whole, void* stream) {
  constexpr int kRows = threads_of(kWarps) / (32 * kWarps);
  const std::int64_t rows = wave.pairs * wave.rows;
  void* arguments[] = {const_cast<ScoreProblem*>(&problem), const_cast<ScoreWave*>(&wave),
                       const_cast<LseTarget*>(&lse), &row_block, &whole};
  return launch(
      reinterpret_cast<const void*>(&softmax_rows_kernel<kDType, kWarps, kVectors, kLong>),
      {.blocks = static_cast<unsigned>((rows + kRows - 1) / kRows),
       .threads = static_cast<unsigned>(threads_of(kWarps)),
       .stream = stream},
      arguments);
}

// ---- copies

__global__ void __launch_bounds__(256) gather_rows_kernel(ScoreProblem problem, GatherRows gather) {
  const bool queries = gather.rows_of == RowsOf::queries;
  const int capacity = queries ? problem.seqlen_q : problem.seqlen_kv;
  const int chunks = gather.head_dim / kWidth;
  const std::int64_t all = gather.pairs * capacity * chunks;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < all; i += step) {
    const int chunk = static_cast<int>(i % chunks);
    const int row = static_cast<int>(i / chunks % capacity);
    const tiles::PairOrder::Pair place =
        pair_at(problem, gather.first_pair + i / chunks / capacity);
    const ScoreSequence s = sequence_of(problem, place.batch);
    uint4 bits{0, 0, 0, 0};
    if (row < (queries ? s.seqlen_q : s.seqlen_kv)) {
      const std::int64_t head = queries ? place.head : place.head / problem.group;
      const std::int64_t at = s.batch * gather.stride_batch + head * gather.stride_heads +
                              ((queries ? s.row_q : s.row_kv) + row) * gather.stride_seqlen;
      bits = reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(gather.source) +
                                            at)[chunk];
    }
    static_cast<uint4*>(gather.target)[i] = bits;
  }
}

__global__ void __launch_bounds__(256)
    scatter_rows_kernel(ScoreProblem problem, ScatterRows scatter) {
  const int chunks = scatter.head_dim * scatter.element_bytes / 16;
  const std::int64_t all = scatter.pairs * scatter.rows * chunks;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < all; i += step) {
    const int chunk = static_cast<int>(i % chunks);
    const int row = scatter.first_row + static_cast<int>(i / chunks % scatter.rows);
    const tiles::PairOrder::Pair place =
        pair_at(problem, scatter.first_pair + i / chunks / scatter.rows);
    const ScoreSequence s = sequence_of(problem, place.batch);
    if (row >= s.seqlen_q) {
      continue;
    }
    const std::int64_t at = s.batch * scatter.stride_batch + place.head * scatter.stride_heads +
                            (s.row_q + row) * scatter.stride_seqlen;
    auto* const target = static_cast<unsigned char*>(scatter.target) + at * scatter.element_bytes;
    reinterpret_cast<uint4*>(target)[chunk] = scatter.source == nullptr
                                                  ? uint4{0, 0, 0, 0}
                                                  : static_cast<const uint4*>(scatter.source)[i];
  }
}

/// CTAs of 256 threads for so many independent elements, a few rounds each when there are many.
unsigned copy_blocks(std::int64_t elements) {
  constexpr std::int64_t kMost = 132 * 8 * 4;
  const std::int64_t wanted = (elements + 255) / 256;
  return static_cast<unsigned>(wanted < kMost ? wanted : kMost);
}

}  // namespace

template <DType kDType>
Status launch_softmax(const ScoreProblem& problem, const ScoreWave& wave, const LseTarget& lse,
                      int row_block, bool whole, std::int64_t widest, void* stream) {
  using Launch =
      Status (*)(const ScoreProblem&, const ScoreWave&, const LseTarget&, int, bool, void*);
  struct Shape {
    std::int64_t keys;
    Launch launch;
  };
  constexpr Shape kShapes[] = {
      {256, launch_rows<kDType, 1, 1>},    {512, launch_rows<kDType, 1, 2>},
      {1024, launch_rows<kDType, 1, 4>},   {2048, launch_rows<kDType, 4, 2>},
      {4096, launch_rows<kDType, 4, 4>},   {8192, launch_rows<kDType, 16, 2>},
      {16384, launch_rows<kDType, 16, 4>}, {32768, launch_rows<kDType, 16, 8>}};
  for (const Shape& shape : kShapes) {
    if (widest <= shape.keys) {
      return shape.launch(problem, wave, lse, row_block, whole, stream);
    }
  }
  return launch_rows<kDType, 16, 1, true>(problem, wave, lse, row_block, whole, stream);
}
template Status launch_softmax<DType::bf16>(const ScoreProblem&, const ScoreWave&, const LseTarget&,
                                            int, bool, std::int64_t, void*);
template Status launch_softmax<DType::f16>(const ScoreProblem&, const ScoreWave&, const LseTarget&,
                                           int, bool, std::int64_t, void*);

Status launch_gather(const ScoreProblem& problem, const GatherRows& gather, void* stream) {
  const std::int64_t rows =
      gather.rows_of == RowsOf::queries ? problem.seqlen_q : problem.seqlen_kv;
  void* arguments[] = {const_cast<ScoreProblem*>(&problem), const_cast<GatherRows*>(&gather)};
  return launch(reinterpret_cast<const void*>(&gather_rows_kernel),
                {.blocks = copy_blocks(gather.pairs * rows * (gather.head_dim / kWidth)),
                 .threads = 256,
                 .stream = stream},
                arguments);
}

Status launch_scatter(const ScoreProblem& problem, const ScatterRows& scatter, void* stream) {
  const std::int64_t chunks = std::int64_t{scatter.head_dim} * scatter.element_bytes / 16;
  void* arguments[] = {const_cast<ScoreProblem*>(&problem), const_cast<ScatterRows*>(&scatter)};
  return launch(reinterpret_cast<const void*>(&scatter_rows_kernel),
                {.blocks = copy_blocks(scatter.pairs * scatter.rows * chunks),
                 .threads = 256,
                 .stream = stream},
                arguments);
}

}  // namespace rafter::cuda
