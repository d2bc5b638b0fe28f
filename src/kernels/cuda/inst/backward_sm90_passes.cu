// The passes before and after the fused backward kernel for sm_90a, a CTA per query tile and head.
//   rows: lse in log2 units and delta = rowsum(dO ∘ O) − dlse; where asked, a copy of dO in 16 bits
//   dq:   the sums of dQ, as accumulators lie, to rows of dQ
// And, where head dimensions are no multiples of 8, copies that the copy engine can read.
#include <cuda_runtime_api.h>

#include "kernels/cuda/backward_sm90.h"
#include "kernels/cuda/scores.cuh"

namespace rafter::cuda {
namespace {

/// The query tile of a slot and a head; first_row ≥ seqlen_q: none.
struct SlotTile {
  ScoreSequence sequence;
  int head, first_row;
  std::int64_t index;  // slot · heads_q + head
};

__device__ SlotTile tile_of(const BackwardParams& params, unsigned index, int tile_q) {
  const ScoreProblem& p = params.problem;
  const unsigned heads = static_cast<unsigned>(p.heads_q), slot = index / heads;
  std::int64_t b = 0;
  std::int64_t first = 0;
  if (p.cu_seqlens_q.data == nullptr) {
    const unsigned blocks = static_cast<unsigned>((p.seqlen_q + tile_q - 1) / tile_q);
    b = slot / blocks;
    first = b * blocks;
  } else {
    std::int64_t end = p.batch;  // the last sequence whose first slot is not behind this one
    while (end - b > 1) {
      const std::int64_t middle = (b + end) / 2;
      const std::int64_t row = index_at(p.cu_seqlens_q, middle);
      (tiles::first_slot(true, middle, row, 0, tile_q) <= slot ? b : end) = middle;
    }
    first = tiles::first_slot(true, b, index_at(p.cu_seqlens_q, b), 0, tile_q);
  }
  return {sequence_of(p, b), static_cast<int>(index - slot * heads),
          static_cast<int>((slot - first) * tile_q), index};
}

__device__ std::int64_t offset_in(const PlainTensor& t, const ScoreSequence& s, int row, int head) {
  return s.batch * t.stride_batch + (s.row_q + row) * t.stride_seqlen + head * t.stride_heads;
}

/// Eight elements as floats.
struct Eight {
  float x[8];
};

template <DType kDType>
__device__ Eight unpack_eight(const uint4& bits) {
  const std::uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
  Eight out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack<kDType>(pairs[i]);
    out.x[2 * i] = two.x;
    out.x[2 * i + 1] = two.y;
  }
  return out;
}

template <DType kDType>
__device__ uint4 pack_eight(const Eight& eight) {
  return {pack<kDType>(eight.x[0], eight.x[1]), pack<kDType>(eight.x[2], eight.x[3]),
          pack<kDType>(eight.x[4], eight.x[5]), pack<kDType>(eight.x[6], eight.x[7])};
}

/// The first `count` of eight elements of any tensor, then zeros.
template <DType kDType>
__device__ Eight load_eight(const PlainTensor& t, std::int64_t at, int count) {
  Eight out;
  if (t.is_f32) {
    const float* const from = static_cast<const float*>(t.data) + at;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out.x[i] = i < count ? from[i] : 0.0f;
    }
    return out;
  }
  const std::uint16_t* const from = static_cast<const std::uint16_t*>(t.data) + at;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const std::uint32_t low = i < count ? from[i] : 0u, high = i + 1 < count ? from[i + 1] : 0u;
    const float2 two = unpack<kDType>(low | high << 16);
    out.x[i] = two.x;
    out.x[i + 1] = two.y;
  }
  return out;
}

__device__ float dot(const Eight& a, const Eight& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum = fmaf(a.x[i], b.x[i], sum);
  }
  return sum;
}

/// kLanes lanes a row, eight elements each; kRows rows a thread, whose loads are in flight
/// together. kPlain: o and d_o are of 16 bits, and read 16 bytes at a time; nothing is copied. (In
/// one body with the rest it has registers for a third of the threads.)
template <DType kDType, int kLanes, bool kPlain>
__global__ void __launch_bounds__(256, 4)
    backward_rows_kernel(const __grid_constant__ BackwardParams params,
                         const __grid_constant__ BackwardRowInputs in, int tile_q) {
  constexpr int kStep = 256 / kLanes, kRows = kPlain ? 4 : 1;
  const ScoreProblem& p = params.problem;
  const SlotTile tile = tile_of(params, blockIdx.x, tile_q);
  const int column = 8 * (static_cast<int>(threadIdx.x) % kLanes);
  const bool in_row = column < params.head_dim_v;
  float* const rows = params.rows + tile.index * 2 * tile_q;
  const auto at = [&tile](const LseTarget& l, int row) {
    return l.data[tile.sequence.batch * l.stride_batch + tile.head * l.stride_heads +
                  (tile.sequence.row_q + row) * l.stride_seqlen];
  };
  const auto bits_at = [](const PlainTensor& t, std::int64_t element) {
    return *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(t.data) + element);
  };
  for (int first = static_cast<int>(threadIdx.x) / kLanes; first < tile_q; first += kRows * kStep) {
    const auto row_of = [&](int i) { return tile.first_row + first + i * kStep; };
    const auto owned = [&](int i) {
      return first + i * kStep < tile_q && row_of(i) < tile.sequence.seqlen_q;
    };
    float delta[kRows], lse[kRows], dlse[kRows];  // asked for first: they take as long as O
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool asked = column == 0 && owned(i);
      lse[i] = asked ? at(in.lse, row_of(i)) : -INFINITY;
      dlse[i] = asked && in.dlse.data != nullptr ? at(in.dlse, row_of(i)) : 0.0f;
    }
    if constexpr (kPlain) {
      const std::int64_t o_at = offset_in(in.o, tile.sequence, row_of(0), tile.head) + column;
      const std::int64_t d_o_at = offset_in(in.d_o, tile.sequence, row_of(0), tile.head) + column;
      uint4 o[kRows], d_o[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        o[i] = d_o[i] = {0, 0, 0, 0};
        if (owned(i) && in_row) {
          o[i] = bits_at(in.o, o_at + i * kStep * in.o.stride_seqlen);
          d_o[i] = bits_at(in.d_o, d_o_at + i * kStep * in.d_o.stride_seqlen);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        delta[i] = dot(unpack_eight<kDType>(o[i]), unpack_eight<kDType>(d_o[i]));
      }
    } else {
      delta[0] = 0;
      if (owned(0) && in_row) {
        const int row = row_of(0), count = min(8, params.head_dim_v - column);
        const uint4 rounded = pack_eight<kDType>(load_eight<kDType>(
            in.d_o, offset_in(in.d_o, tile.sequence, row, tile.head) + column, count));
        if (in.d_o_copy != nullptr) {
          const std::int64_t to = tile.sequence.batch * p.seqlen_q + tile.sequence.row_q + row;
          *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(in.d_o_copy) +
                                    (to * p.heads_q + tile.head) * whole_chunks(params.head_dim_v) +
                                    column) = rounded;
        }
        // With dO as the products will see it.
        delta[0] = dot(load_eight<kDType>(
                           in.o, offset_in(in.o, tile.sequence, row, tile.head) + column, count),
                       unpack_eight<kDType>(rounded));
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        delta[i] += __shfl_xor_sync(~0u, delta[i], lanes);
      }
      if (column == 0 && first + i * kStep < tile_q) {
        // P = 2^(score − ∞) is 0
        rows[first + i * kStep] = lse[i] == -INFINITY ? INFINITY : lse[i] * kLog2E;
        rows[tile_q + first + i * kStep] = delta[i] - dlse[i];
      }
    }
  }
}

/// The first `count` of eight elements of a row of dQ.
template <DType kDType>
__device__ void store_eight(const PlainTensor& t, std::int64_t at, const Eight& eight, int count) {
  const float(&x)[8] = eight.x;
  if (t.is_f32) {
    float* const to = static_cast<float*>(t.data) + at;
    if (t.aligned) {
      reinterpret_cast<float4*>(to)[0] = {x[0], x[1], x[2], x[3]};
      reinterpret_cast<float4*>(to)[1] = {x[4], x[5], x[6], x[7]};
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) {
        to[i] = x[i];
      }
    }
    return;
  }
  std::uint16_t* const to = static_cast<std::uint16_t*>(t.data) + at;
  const uint4 bits = pack_eight<kDType>(eight);
  if (t.aligned) {
    *reinterpret_cast<uint4*>(to) = bits;
    return;
  }
  const std::uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) {
      to[i] = static_cast<std::uint16_t>(pairs[i / 2] >> (i % 2 * 16));
    }
  }
}

template <DType kDType>
__global__ void __launch_bounds__(128)
    backward_dq_kernel(const __grid_constant__ BackwardParams params,
                       tiles::Sm90BackwardRow shape) {
  constexpr int kPart = tiles::Sm90BackwardRow::kPart, kStride = kPart + 4;
  __shared__ float4 staged[kPart * kStride / 4];
  float* const tile_rows = reinterpret_cast<float*>(staged);
  const int part = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.parts()));
  const SlotTile tile =
      tile_of(params, blockIdx.x / static_cast<unsigned>(shape.parts()), shape.tile_q);
  const int first_row = tile.first_row + shape.part_row(part);
  const int first_column = shape.part_column(part);
  if (first_row >= tile.sequence.seqlen_q || first_column >= params.head_dim) {
    return;
  }
  const int end = min(tile.first_row + shape.tile_q, tile.sequence.seqlen_q);
  const bool any = mask_of(params.problem, tile.sequence).hull(tile.first_row, end).size() > 0;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  const float4* const sums =
      reinterpret_cast<const float4*>(params.dq_sums) +
      (tile.index * shape.parts() + part) * (tiles::Sm90BackwardRow::kPartFloats / 4);
#pragma unroll
  for (int i = 0; i < kPart / 8; ++i) {
    // no key is seen: nothing was added
    const float4 four = any ? sums[i * 128 + thread] : float4{0, 0, 0, 0};
    const int column = 8 * i + 2 * (lane % 4);
    *reinterpret_cast<float2*>(tile_rows + row * kStride + column) = {
        four.x * params.softmax_scale, four.y * params.softmax_scale};
    *reinterpret_cast<float2*>(tile_rows + (row + 8) * kStride + column) = {
        four.z * params.softmax_scale, four.w * params.softmax_scale};
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPart * kPart / 8 / 128; ++i) {
    const int chunk = i * 128 + thread;
    const int r = chunk / 8, column = chunk % 8 * 8;
    if (first_row + r >= tile.sequence.seqlen_q || first_column + column >= params.head_dim) {
      continue;
    }
    Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      x.x[e] = tile_rows[r * kStride + column + e];
    }
    store_eight<kDType>(
        params.dq,
        offset_in(params.dq, tile.sequence, first_row + r, tile.head) + first_column + column, x,
        min(8, params.head_dim - first_column - column));
  }
}

/// A thread for each eight elements of the copy.
__global__ void __launch_bounds__(256)
    widen_rows_kernel(const __grid_constant__ WidenParams p, std::int64_t chunks) {
  const int in_row = static_cast<int>(whole_chunks(p.head_dim) / 8);
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t chunk = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; chunk < chunks;
       chunk += step) {
    const std::int64_t row = chunk / in_row, head = row % p.heads, token = row / p.heads;
    const int column = 8 * static_cast<int>(chunk - row * in_row);
    const std::uint16_t* const from =
        static_cast<const std::uint16_t*>(p.from.data) + token / p.seqlen * p.from.stride_batch +
        token % p.seqlen * p.from.stride_seqlen + head * p.from.stride_heads + column;
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t low = column + 2 * i < p.head_dim ? from[2 * i] : 0u;
      const std::uint32_t high = column + 2 * i + 1 < p.head_dim ? from[2 * i + 1] : 0u;
      pairs[i] = low | high << 16;
    }
    static_cast<uint4*>(p.to)[chunk] = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}

template <DType kDType, int kLanes>
const void* rows_kernel(bool plain) {
  return plain ? reinterpret_cast<const void*>(&backward_rows_kernel<kDType, kLanes, true>)
               : reinterpret_cast<const void*>(&backward_rows_kernel<kDType, kLanes, false>);
}

}  // namespace

template <DType kDType>
Status launch_backward_rows(const BackwardParams& params, const BackwardRowInputs& in, int row,
                            void* stream) {
  int tile_q = tiles::kSm90BackwardRows[row].tile_q;
  void* arguments[] = {const_cast<BackwardParams*>(&params), const_cast<BackwardRowInputs*>(&in),
                       &tile_q};
  const int head_dim = tiles::kSm90BackwardRows[row].head_dim;
  const bool plain =
      in.d_o_copy == nullptr && !in.o.is_f32 && !in.d_o.is_f32 && in.o.aligned && in.d_o.aligned;
  const void* const kernel = head_dim == 64    ? rows_kernel<kDType, 8>(plain)
                             : head_dim == 128 ? rows_kernel<kDType, 16>(plain)
                                               : rows_kernel<kDType, 32>(plain);
  return launch(kernel,
                {.blocks = static_cast<unsigned>(params.slots * params.problem.heads_q),
                 .threads = 256,
                 .stream = stream},
                arguments);
}

Status launch_widen_rows(WidenParams params, void* stream) {
  constexpr std::int64_t kThreads = 256, kMostBlocks = 1 << 20;
  std::int64_t chunks =
      params.batch * params.seqlen * params.heads * (whole_chunks(params.head_dim) / 8);
  if (chunks == 0) {
    return Status::ok();
  }
  const std::int64_t blocks = (chunks + kThreads - 1) / kThreads;
  void* arguments[] = {&params, &chunks};
  return launch(reinterpret_cast<const void*>(&widen_rows_kernel),
                {.blocks = static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks),
                 .threads = kThreads,
                 .stream = stream},
                arguments);
}

template <DType kDType>
Status launch_backward_dq(const BackwardParams& params, int row, void* stream) {
  tiles::Sm90BackwardRow shape = tiles::kSm90BackwardRows[row];
  void* arguments[] = {const_cast<BackwardParams*>(&params), &shape};
  return launch(
      reinterpret_cast<const void*>(&backward_dq_kernel<kDType>),
      {.blocks = static_cast<unsigned>(params.slots * params.problem.heads_q * shape.parts()),
       .threads = 128,
       .stream = stream},
      arguments);
}

template Status launch_backward_rows<DType::bf16>(const BackwardParams&, const BackwardRowInputs&,
                                                  int, void*);
template Status launch_backward_rows<DType::f16>(const BackwardParams&, const BackwardRowInputs&,
                                                 int, void*);
template Status launch_backward_dq<DType::bf16>(const BackwardParams&, int, void*);
template Status launch_backward_dq<DType::f16>(const BackwardParams&, int, void*);

}  // namespace rafter::cuda
