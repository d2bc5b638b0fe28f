// The copies around products whose sizes are data: rows to padded ones, and back.
#include <cuda_runtime_api.h>

#include "kernels/cuda/scores.cuh"

namespace rafter::cuda {
namespace {

constexpr int kWidth = 8;  // elements of a 16-byte access

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
