// Products with a weight of 8 or 4 bits an element, and the way to and from it: what the host gives
// the kernels.
#pragma once

#include <cstdint>

#include "base/packed_weight.h"
#include "kernels/cuda/rows.h"
#include "rafter/status.h"

namespace rafter::cuda {

/// Between a matrix [n, k] of f32, bf16 or f16 and a packed weight.
struct PackParams {
  Rows matrix;
  void* packed = nullptr;
  base::PackedShape shape;
};
Status launch_quantize(const PackParams& params, void* stream);
Status launch_dequantize(const PackParams& params, void* stream);

inline constexpr std::int64_t kMostPackedRows = 8;
/// y = x weightᵀ + bias of few rows x [m, k]: the weight is read once.
struct PackedRowsParams {
  const void* x = nullptr;       // rows x_stride elements apart, aligned to 16 bytes
  const void* weight = nullptr;  // aligned to 16
  const void* bias = nullptr;    // null: none
  void* y = nullptr;             // rows y_stride elements apart
  std::int64_t x_stride = 0, y_stride = 0;
  base::PackedShape shape;
  int m = 0;
  DType dtype = DType::bf16;  // bf16 or f16
  bool y_is_f32 = false;
  bool weight_is_settled = false;  // it may be read before what came earlier on the stream is done
  int stages = 0;                  // launch_packed_rows() says
};
/// Whether x of m rows fits into shared memory beside the weights under way.
bool packed_rows_takes(std::int64_t m, const base::PackedShape& shape);
Status launch_packed_rows(PackedRowsParams params, void* stream);

/// The part of these that inst/packed_digits.cu has: one or two rows and int4.
bool packed_digits_takes(std::int64_t m, const base::PackedShape& shape);
Status launch_packed_digits(PackedRowsParams params, void* stream);

}  // namespace rafter::cuda
