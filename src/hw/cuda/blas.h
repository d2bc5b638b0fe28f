// Matrix products by cuBLASLt. The library is opened at the first product: a build with CUDA loads
// on a machine without it.
#pragma once

#include <cstdint>

#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter::cuda {

/// C = alpha · A · B + bias for `batch` matrices, all row-major: A [m, k] or, transposed, [k, m], B
/// [k, n] or, transposed, [n, k], C [m, n]. Rows are ld elements apart, matrices `stride` elements
/// (0: the same one again; not C). bf16 and f16 accumulate in f32 and C is of the dtype or f32; f32
/// stays f32 (tf32 by name); e4m3 gives bf16 and int8 gives int32, both with B transposed.
struct Matmul {
  DType dtype = DType::bf16;
  bool c_is_f32 = false;
  bool tf32 = false;  // f32 operands rounded to tf32
  bool a_transposed = false;
  bool b_transposed = false;
  const void* bias = nullptr;  // [n] of C's dtype, added to each row; null: none
  bool split = false;  // k may be cut into parts, summed in a fixed order: products of few rows
  float alpha = 1;
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  std::int64_t lda = 0, ldb = 0, ldc = 0;
  std::int64_t stride_a = 0, stride_b = 0, stride_c = 0;
};

/// Device memory, aligned to 256 bytes, that matmul() may use beside its operands; one stream at a
/// time.
inline constexpr std::int64_t kMatmulWorkspaceBytes = std::int64_t{32} << 20;

/// Queues the product on the stream of the current device. Operands are aligned to 16 bytes, rows
/// and matrices too. The algorithm is the library's first choice for the shape, without split
/// reductions unless `split`, asked for once with a batch of its own, so that neither repeats nor
/// the number of matrices (at most 65535) change a bit. Errors: device_error with cuBLASLt's name
/// of the failure, or with why it cannot be opened; unsupported when it has no algorithm.
Status matmul(const Matmul& product, const void* a, const void* b, void* c, void* workspace,
              void* stream);

/// "" when cuBLASLt can be opened, else why not.
std::string why_no_cublaslt();

}  // namespace rafter::cuda
