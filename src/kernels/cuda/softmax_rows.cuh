// Softmax over rows of scores in memory.
//   scores [pairs, rows, row_stride] of 16-bit elements → probabilities, in place; lse
// A row belongs to a warp or to a CTA. It is read once, 16 bytes a thread at a time, all of them
// before the first use, and written once; only keys that the row sees are read. Between the two lie
// maximum, exponentials and sum, some 10 instructions an element where the memory leaves 26 (132
// SMs × 128 lanes × 1.7 GHz at 1.07 T elements/s): exponentials are taken once while registers
// hold them, and one barrier joins maxima and sums of a row.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/scores.cuh"

namespace rafter::cuda {

inline constexpr int kWidth = 8;  // elements of a 16-byte access

struct SoftmaxShape {
  int threads;       // of a row: 32 or a CTA's
  int vectors;       // 16-byte accesses of a thread
  int ctas;          // per SM
  bool hold = true;  // exponentials stay in registers; else they are taken again

  constexpr int keys() const { return threads * vectors * kWidth; }
  constexpr int cta_threads() const { return threads == 32 ? 128 : threads; }
  constexpr int groups() const { return cta_threads() / threads; }
};

struct SoftmaxWork {
  ScoreProblem problem;
  ScoreWave wave;
  LseTarget lse;
  int row_block = 0;  // rows that have zeros over each other's keys
  bool whole = false;
};

/// A row of a wave: where it is, what it sees, what its block covers from a multiple of 8 on.
struct ScoreRow {
  unsigned char* scores = nullptr;
  float* lse = nullptr;  // null: not wanted, or no row of the sequence
  ScoreMask::Range keys, block;
};

__device__ inline ScoreRow find_row(const SoftmaxWork& work, std::int64_t index) {
  const ScoreWave& wave = work.wave;
  const std::int64_t pair = index / wave.rows;
  const int local = static_cast<int>(index - pair * wave.rows);
  const tiles::PairOrder::Pair place = pair_at(work.problem, wave.first_pair + pair);
  const ScoreSequence sequence = sequence_of(work.problem, place.batch);
  const ScoreMask mask = mask_of(work.problem, sequence);
  const int row = wave.first_row + local;
  ScoreRow found;
  if (row < sequence.seqlen_q) {
    found.keys = mask.row(row);
    found.lse = lse_at(work.lse, sequence, place.head, row);
  }
  if (work.whole) {
    found.block = {0, work.problem.seqlen_kv};
  } else {
    const int first = wave.first_row + local / work.row_block * work.row_block;
    found.block = mask.hull(first, min(first + work.row_block, wave.first_row + wave.rows));
  }
  found.block.first = found.block.first / kWidth * kWidth;
  found.scores = static_cast<unsigned char*>(wave.scores) +
                 2 * (pair * wave.pair_stride + local * wave.row_stride);
  return found;
}

/// Scores from `key` on, −∞ where the row does not see the key; nothing is read when it sees none.
template <DType kDType>
__device__ inline uint4 load_scores(const ScoreRow& row, int key) {
  constexpr std::uint32_t kNone = minus_infinities<kDType>();
  uint4 v{kNone, kNone, kNone, kNone};
  if (key < row.keys.last && key + kWidth > row.keys.first) {
    v = __ldcs(reinterpret_cast<const uint4*>(row.scores + 2 * std::int64_t{key}));
  }
  return v;
}

/// −∞ where the row does not see the keys from `key` on.
template <DType kDType>
__device__ inline void hide(const ScoreRow& row, int key, uint4& v) {
  if (key >= row.keys.first && key + kWidth <= row.keys.last) {
    return;
  }
  std::uint32_t* const pairs = &v.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int low = key + 2 * i, high = low + 1;
    const std::uint32_t keep = (low >= row.keys.first && low < row.keys.last ? 0xffffu : 0u) |
                               (high >= row.keys.first && high < row.keys.last ? 0xffff0000u : 0);
    pairs[i] = (pairs[i] & keep) | (minus_infinities<kDType>() & ~keep);
  }
}

/// Of packed scores; softcap is monotone.
template <DType kDType>
__device__ inline float max_of(const ScoreProblem& problem, std::uint32_t highest) {
  const float2 two = unpack<kDType>(highest);
  const float top = fmaxf(two.x, two.y);
  return problem.cap > 0 && top != -INFINITY ? capped(problem, top) : top;
}

/// Scores of a vector, capped; −∞ marks a key that is not seen, and stays.
template <DType kDType>
__device__ inline void scores_of(const ScoreProblem& problem, const uint4& v, float* s) {
  const std::uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack<kDType>(pairs[i]);
    s[2 * i] = two.x;
    s[2 * i + 1] = two.y;
  }
  if (problem.cap > 0) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      s[i] = s[i] == -INFINITY ? s[i] : capped(problem, s[i]);
    }
  }
}

template <DType kDType>
__device__ inline void store_weights(const ScoreRow& row, int key, const float* p) {
  if (key < row.block.last) {
    *reinterpret_cast<uint4*>(row.scores + 2 * std::int64_t{key}) =
        uint4{pack<kDType>(p[0], p[1]), pack<kDType>(p[2], p[3]), pack<kDType>(p[4], p[5]),
              pack<kDType>(p[6], p[7])};
  }
}

/// Maximum and sum of exp(score − finite_top(maximum)).
struct RowPart {
  float top, sum;
};

template <typename Op>
__device__ inline float over_lanes(float value, int lanes, Op op) {
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) {
    value = op(value, __shfl_xor_sync(~0u, value, apart));
  }
  return value;
}
__device__ inline float lane_max(float value, int lanes = 32) {
  return over_lanes(value, lanes, [](float a, float b) { return fmaxf(a, b); });
}
__device__ inline float lane_sum(float value, int lanes = 32) {
  return over_lanes(value, lanes, [](float a, float b) { return a + b; });
}

/// Joins the parts of a row's warps, a power of two, in one order; every thread gets the result.
template <int kWarps>
__device__ inline RowPart join(RowPart part, RowPart* parts) {
  if constexpr (kWarps > 1) {
    if (threadIdx.x % 32 == 0) {
      parts[threadIdx.x / 32] = part;
    }
    __syncthreads();
    const RowPart one = parts[threadIdx.x % kWarps];
    const float top = lane_max(one.top, kWarps);
    return {top, lane_sum(one.sum * weight(one.top, finite_top(top)), kWarps)};
  } else {
    return part;
  }
}

__device__ inline void store_row_lse(const ScoreRow& row, const RowPart& all, int thread) {
  if (thread == 0 && row.lse != nullptr) {
    *row.lse = lse_of(row.keys.size(), all.top, all.sum);
  }
}

/// nvcc names no structure among a kernel's template arguments: the members of a SoftmaxShape.
template <DType kDType, int kThreads, int kVectors, int kCtas, bool kHold>
__global__ void __launch_bounds__((SoftmaxShape{kThreads, kVectors, kCtas, kHold}.cta_threads()),
                                  kCtas)
    softmax_rows_kernel(const __grid_constant__ SoftmaxWork work) {
  constexpr SoftmaxShape kShape{kThreads, kVectors, kCtas, kHold};
  constexpr int kStep = kThreads * kWidth;
  __shared__ RowPart parts[kShape.cta_threads() / 32];
  const ScoreProblem& problem = work.problem;
  const std::int64_t index =
      std::int64_t{blockIdx.x} * kShape.groups() + threadIdx.x / kShape.threads;
  if (index >= work.wave.pairs * work.wave.rows) {
    return;  // a warp of its own: with more than one a row there is no such CTA
  }
  const ScoreRow row = find_row(work, index);
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int first = row.block.first + thread * kWidth;
  // Vectors beyond the block, the same for all threads of a row, are instructions alone.
  const auto within = [&](int i) { return i == 0 || i * kStep < row.block.size(); };
  uint4 v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    v[i] = load_scores<kDType>(row, first + i * kStep);
  }
  if (row.keys.first > row.block.first || row.keys.last < row.block.first + kShape.keys()) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (within(i)) {
        hide<kDType>(row, first + i * kStep, v[i]);
      }
    }
  }
  std::uint32_t highest = minus_infinities<kDType>();
#pragma unroll
  for (const uint4& four : v) {
    highest =
        pairwise_max<kDType>(highest, pairwise_max<kDType>(pairwise_max<kDType>(four.x, four.y),
                                                           pairwise_max<kDType>(four.z, four.w)));
  }
  const float top = lane_max(max_of<kDType>(problem, highest)), finite = finite_top(top);
  float e[kHold ? kVectors * kWidth : kWidth];  // exponentials: of all vectors, or of one
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (!within(i)) {
      continue;
    }
    float* const weights = e + (kHold ? i * kWidth : 0);
    scores_of<kDType>(problem, v[i], weights);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      weights[j] = weight(weights[j], finite);
      sum += weights[j];
    }
  }
  const RowPart all = join<kThreads / 32>({top, lane_sum(sum)}, parts);
  const float joint = finite_top(all.top);
  const float inverse = inverse_of(row.keys.size(), all.sum);
  const float factor = kHold ? weight(top, joint) * inverse : inverse;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (!within(i)) {
      continue;
    }
    float p[kWidth];
    if constexpr (!kHold) {
      scores_of<kDType>(problem, v[i], p);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      p[j] = (kHold ? e[i * kWidth + j] : weight(p[j], joint)) * factor;
    }
    store_weights<kDType>(row, first + i * kStep, p);
  }
  store_row_lse(row, all, thread);
}

/// Rows of any length, a CTA each; they are read twice.
template <DType kDType, int kThreads>
__global__ void __launch_bounds__(kThreads)
    softmax_long_rows_kernel(const __grid_constant__ SoftmaxWork work) {
  constexpr int kStep = kThreads * kWidth;
  __shared__ RowPart parts[kThreads / 32];
  const ScoreRow row = find_row(work, blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int first = row.block.first + thread * kWidth;
  const auto scores_at = [&](int key, float* s) {
    uint4 v = load_scores<kDType>(row, key);
    hide<kDType>(row, key, v);
    scores_of<kDType>(work.problem, v, s);
  };
  RowPart part{-INFINITY, 0};
  for (int key = first; key < row.keys.last; key += kStep) {
    float s[kWidth];
    scores_at(key, s);
    float top = part.top;
#pragma unroll
    for (const float score : s) {
      top = fmaxf(top, score);
    }
    part.sum *= weight(part.top, finite_top(top));
    part.top = top;
#pragma unroll
    for (const float score : s) {
      part.sum += weight(score, finite_top(top));
    }
  }
  const float top = lane_max(part.top);
  const float sum = lane_sum(part.sum * weight(part.top, finite_top(top)));
  const RowPart all = join<kThreads / 32>({top, sum}, parts);
  const float joint = finite_top(all.top), inverse = inverse_of(row.keys.size(), all.sum);
  for (int key = first; key < row.block.last; key += kStep) {
    float p[kWidth];
    scores_at(key, p);
#pragma unroll
    for (float& score : p) {
      score = weight(score, joint) * inverse;
    }
    store_weights<kDType>(row, key, p);
  }
  store_row_lse(row, all, thread);
}

template <DType kDType, SoftmaxShape kShape>
Status launch_rows(SoftmaxWork& work, void* stream) {
  const std::int64_t rows = work.wave.pairs * work.wave.rows;
  void* arguments[] = {&work};
  return launch(
      reinterpret_cast<const void*>(
          &softmax_rows_kernel<kDType, kShape.threads, kShape.vectors, kShape.ctas, kShape.hold>),
      {.blocks = static_cast<unsigned>((rows + kShape.groups() - 1) / kShape.groups()),
       .threads = static_cast<unsigned>(kShape.cta_threads()),
       .stream = stream},
      arguments);
}

template <DType kDType>
Status launch_long_rows(SoftmaxWork& work, void* stream) {
  constexpr int kThreads = 512;
  void* arguments[] = {&work};
  return launch(reinterpret_cast<const void*>(&softmax_long_rows_kernel<kDType, kThreads>),
                {.blocks = static_cast<unsigned>(work.wave.pairs * work.wave.rows),
                 .threads = kThreads,
                 .stream = stream},
                arguments);
}

template <DType kDType>
Status launch_softmax(const ScoreProblem& problem, const ScoreWave& wave, const LseTarget& lse,
                      int row_block, bool whole, std::int64_t widest, void* stream) {
  struct Row {
    std::int64_t keys;
    Status (*launch)(SoftmaxWork&, void*);
  };
  constexpr Row kRows[] = {{256, launch_rows<kDType, SoftmaxShape{32, 1, 12}>},
                           {512, launch_rows<kDType, SoftmaxShape{32, 2, 10}>},
                           {1024, launch_rows<kDType, SoftmaxShape{32, 4, 7}>},
                           {2048, launch_rows<kDType, SoftmaxShape{32, 8, 4}>},
                           {4096, launch_rows<kDType, SoftmaxShape{128, 4, 7}>},
                           {8192, launch_rows<kDType, SoftmaxShape{256, 4, 3}>},
                           {16384, launch_rows<kDType, SoftmaxShape{256, 8, 3, false}>},
                           {32768, launch_rows<kDType, SoftmaxShape{512, 8, 2, false}>}};
  SoftmaxWork work{problem, wave, lse, row_block, whole};
  for (const Row& row : kRows) {
    if (widest <= row.keys) {
      return row.launch(work, stream);
    }
  }
  return launch_long_rows<kDType>(work, stream);
}

}  // namespace rafter::cuda
