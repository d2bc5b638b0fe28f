// Warps of decode_sm90 that copy their own keys (decode_sm90_cluster_copies.cuh) and attend to
// them: what kernels in which they do have in common.
#pragma once

#include "kernels/cuda/decode_sm90_attend.cuh"
#include "kernels/cuda/decode_sm90_cluster_copies.cuh"

namespace rafter::cuda {

template <DType kDType, int kRow, DecodePages kPages>
struct DecodeOwnKeys : DecodeClusterCopies<DecodeShared<kRow>, kPages> {
  using Attend = DecodeAttend<kDType, kRow>;
  using Copies = DecodeClusterCopies<DecodeShared<kRow>, kPages>;
  using Copies::chunk, Copies::lane, Copies::warp;
  using Copies::kChunks, Copies::kRowsAtOnce, Copies::kShape;
  using Copies::params, Copies::shared;

  /// Up to 8 rows of queries, zeros where there is none.
  __device__ void ask_queries(const DecodeUnit& unit, int rows, std::uint32_t to) const {
#pragma unroll 1
    for (int r = lane / kChunks; r < tiles::kDecodeBlockRows; r += kRowsAtOnce) {
      const int position = params.seqlen_q > 1 ? r / params.group : 0;
      const unsigned char* const from =
          params.q.data + unit.batch * params.q.stride_batch + position * params.q.stride_seqlen +
          (unit.head * params.group + r - position * params.group) * params.q.stride_heads +
          chunk * 16;
      copy_16_async_alone(to + r * kShape.query_pitch() + chunk * 16, from,
                          r < rows && chunk < params.q.chunks ? 16 : 0);
    }
  }
  __device__ void read_queries(typename Attend::Rows& rows, std::uint32_t from) const {
#pragma unroll
    for (int i = 0; i < Attend::kSteps; i += 2) {
      std::uint32_t word[4];
      load_matrices(word, from + lane % 8 * kShape.query_pitch() + 32 * i + lane / 8 * 16);
      rows.q[i][0] = word[0];
      rows.q[i][1] = word[1];
      rows.q[i + 1][0] = word[2];
      rows.q[i + 1][1] = word[3];
    }
  }
};

}  // namespace rafter::cuda
