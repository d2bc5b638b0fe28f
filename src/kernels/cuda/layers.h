// The operations of layers.h on CUDA: what the host gives the kernels.
#pragma once

#include <cstdint>

#include "kernels/cuda/device_indices.h"
#include "kernels/cuda/rope.h"
#include "kernels/cuda/rows.h"
#include "rafter/status.h"

namespace rafter::cuda {

/// How many rows [batch, seqlen, heads] of how many elements.
struct RowCount {
  std::int64_t rows = 0;
  int seqlen = 1, heads = 1, size = 0;
};

inline constexpr std::int64_t kMostNormElements = 16384;
struct RmsNormParams {
  RowCount count;
  Rows x, residual, y, sum;  // residual.data null: none, and no sum
  const void* weight = nullptr;
  bool weight_in_vectors = false;
  float eps = 0;
};
Status launch_rmsnorm(const RmsNormParams& params, void* stream);

struct PointwiseParams {
  RowCount count;
  Rows a, b, out;
  int function = 0;        // Pointwise
  int row_chunks = 1;      // of eight elements
  std::int64_t items = 0;  // chunks of all rows
};
Status launch_pointwise(PointwiseParams params, void* stream);

struct RopeParams {
  RowCount count;  // seqlen: tokens
  Rows x, out;
  DeviceIndices positions;
  RopeTables rope;
  std::int64_t items = 0;  // of one row, times the rows
  int row_items = 1;
};
Status launch_rope(RopeParams params, void* stream);

struct GatherParams {
  Rows table, out;
  DeviceIndices rows;
  std::int64_t table_rows = 0, count = 0;
  int size = 0, row_chunks = 1;
};
Status launch_gather(GatherParams params, void* stream);

Status launch_fill_uniform(void* data, DType dtype, std::int64_t count, std::uint64_t seed,
                           float bound, void* stream);
Status launch_advance(std::int32_t* counts, std::int64_t size, std::int32_t by, void* stream);

/// y = x weightᵀ + bias of few rows x [m, k]: weight [n, k] read once.
inline constexpr std::int64_t kMostVectorRows = 2;
struct VectorRowsParams {
  const void* x = nullptr;       // rows x_stride elements apart
  const void* weight = nullptr;  // contiguous
  const void* bias = nullptr;    // null: none
  void* y = nullptr;             // rows y_stride elements apart
  std::int64_t x_stride = 0, y_stride = 0;
  std::int64_t n = 0;
  int m = 0, k = 0;
  DType dtype = DType::bf16;  // bf16 or f16
  bool y_is_f32 = false;
  bool weight_is_settled = false;  // it may be read before what came earlier on the stream is done
};
Status launch_vector_rows(const VectorRowsParams& params, void* stream);

}  // namespace rafter::cuda
