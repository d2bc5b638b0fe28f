// What stands between the attention of a Llama-like model's layers: products with weights, norms,
// pointwise functions, RoPE, rows of a table. Each is one launch on CUDA, products of 3 to 256 rows
// one or two (k may be cut), those that dequantise their weight one more; TransformerSession
// (transformer.h) strings them together.
// Rows are views [batch, seqlen, heads, head_dim] with contiguous head_dim; a matrix [rows, cols]
// is [1, rows, 1, cols] (matrix() makes one). Arithmetic is f32, rounded once to the output's dtype
// except where said. Every function validates its views before anything is queued: errors are
// invalid_argument (names the tensor, what was given, what is allowed) and unsupported (what the
// device lacks). On CUDA every pointer is device memory and the work is queued on `stream`; nothing
// is allocated or waited for, so that a graph may capture it. A kernel may begin before the one
// ahead of it on the stream has ended, and waits for it before it touches what it does. A CPU
// refuses any stream but null.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "rafter/attention.h"
#include "rafter/cache.h"
#include "rafter/device.h"
#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter {

/// A contiguous matrix as a view: [1, rows, 1, cols].
inline TensorView matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t cols) {
  return TensorView::contiguous(data, dtype, 1, rows, 1, cols);
}
/// Columns [first, first + count) of a matrix.
inline TensorView columns(TensorView of, std::int64_t first, std::int64_t count) {
  of.data = static_cast<char*>(of.data) + first * bits_of(of.dtype) / 8;
  of.head_dim = count;
  return of;
}
/// Columns of a matrix as heads: [1, rows, heads, head_dim].
inline TensorView heads_of(TensorView of, std::int64_t heads, std::int64_t head_dim) {
  of.heads = heads;
  of.head_dim = head_dim;
  of.stride_heads = head_dim;
  return of;
}

struct RmsNormInputs {
  TensorView x;              // f32, bf16 or f16
  TensorView residual = {};  // of x's shape and dtype; null: none
  TensorView weight;         // [1, 1, 1, head_dim] of x's dtype
  float eps = 1e-6f;
};
struct RmsNormOutputs {
  TensorView y;         // of x's shape and dtype; may be x or residual
  TensorView sum = {};  // x + residual, rounded; null without a residual; may be x or residual
};
/// y = s / sqrt(mean(s²) + eps) · weight over each row's head_dim, where s is x, or x + residual
/// rounded to the dtype. Source: Zhang & Sennrich 2019, arXiv 1910.07467.
Status rmsnorm(const RmsNormInputs& in, const RmsNormOutputs& out, const Device& device,
               Stream stream = {});

enum class Pointwise : std::uint8_t {
  add,       // a + b
  multiply,  // a · b
  silu,      // a / (1 + exp(−a)); b is null
  swiglu,    // silu(a) · b, rounded once
};
const char* to_string(Pointwise function);
/// out = function(a, b), all of one shape and dtype (f32, bf16, f16); out may be a or b.
Status pointwise(Pointwise function, const TensorView& a, const TensorView& b,
                 const TensorView& out, const Device& device, Stream stream = {});

/// Turns every head of row i of x by the angles of positions[i], as append() turns a token's; x and
/// out are [1, tokens, heads, head_dim], out may be x itself. A row whose position is not in [0,
/// max_position) becomes NaN on CUDA and is an error on the CPU.
Status rope(const TensorView& x, const IndexView& positions, const Rope& rope,
            const TensorView& out, const Device& device, Stream stream = {});

/// out[i] = table[rows[i]]: table [1, n, 1, cols], out [1, rows.size, 1, cols] of its dtype. A row
/// that is not in [0, n) is NaN on CUDA and an error on the CPU.
Status gather(const TensorView& table, const IndexView& rows, const TensorView& out,
              const Device& device, Stream stream = {});

/// A weight [n, k] of 8 or 4 bits an element, in an order of our own that quantize() writes: weight
/// = value · scale. int8 and e4m3 have one f32 scale of each row, int4 (−7 to 7) one bf16 scale of
/// each `group_size` elements of a row.
struct PackedWeight {
  void* data = nullptr;  // packed_bytes() of them, aligned to 16
  DType dtype = DType::int8;
  std::int64_t n = 0, k = 0;    // n: a multiple of 16; k: of 64, of int4 of 128
  std::int64_t group_size = 0;  // int4: 32, 64 or 128; else 0
};
/// Errors: invalid_argument names n, k, dtype or group_size.
Result<std::int64_t> packed_bytes(const PackedWeight& shape);
/// Rounds a weight [1, n, 1, k] (f32, bf16, f16; contiguous). The scale is the largest magnitude of
/// the row or group over 127 (int8), 448 (e4m3) or 7 (int4, then rounded to bf16), all in f32; each
/// element over its scale goes to the nearest value, ties to even. The same bits on every device.
/// A row or group with an element that is not finite becomes NaN.
Status quantize(const TensorView& weight, const PackedWeight& out, const Device& device,
                Stream stream = {});
/// out [1, n, 1, k] (f32, bf16, f16; contiguous) = value · scale, a product in f32 that is rounded
/// once.
Status dequantize(const PackedWeight& weight, const TensorView& out, const Device& device,
                  Stream stream = {});

struct LinearInputs {
  TensorView x;              // [1, m, 1, k]
  TensorView weight = {};    // [1, n, 1, k] of x's dtype, contiguous; null: packed
  PackedWeight packed = {};  // null: weight
  TensorView bias = {};      // [1, 1, 1, n] of x's dtype; null: none
  /// Nothing that is queued writes the weight: on CUDA it may be read ahead of what came before on
  /// the stream.
  bool weight_is_settled = false;
};
/// out = x weightᵀ + bias, accumulated in f32; out [1, m, 1, n] of x's dtype or, without a bias,
/// f32. CUDA: cuBLASLt, and for few rows of 16 bits a kernel of ours that reads the weights once at
/// the speed of memory; k and n are multiples of 8 there. CPU: oneDNN, in dtypes that it multiplies
/// itself on this machine. A packed weight: on CUDA, x in 16 bits, the kernel of ours for few rows,
/// which takes value · scale as it is; many rows, and a CPU, multiply with what dequantize() makes
/// of it in x's dtype, in the workspace. The bits of a row may depend on the number of rows and, on
/// a CPU, of threads, as the library's algorithm does.
Status linear(const LinearInputs& in, const TensorView& out, Workspace workspace,
              const Device& device, Stream stream = {});
/// What linear() runs: "onednn", "cublaslt", "vector_rows"; of a packed weight "packed_rows",
/// "dequantize+cublaslt", "dequantize+onednn".
std::string linear_kernel(std::int64_t rows, DType dtype, const Device& device,
                          const PackedWeight& packed = {});
/// What linear() wants on a device, at least.
std::int64_t linear_workspace_bytes(const Device& device);
/// The same for so many rows in dtype with a packed weight.
std::int64_t linear_workspace_bytes(std::int64_t rows, DType dtype, const Device& device,
                                    const PackedWeight& packed);
/// "" when linear() multiplies this dtype on the device, else why not.
std::string why_no_linear(DType dtype, const Device& device);

/// What becomes of a link's product.
enum class LinkEnd : std::uint8_t {
  store,   // out = product + bias
  add,     // out += product + bias, which is rounded before it is added
  swiglu,  // out = silu(first half of the columns) · second half, which are rounded before
};
/// One product of a chain: RMSNorm(x) weightᵀ, or x weightᵀ.
struct Link {
  TensorView x;              // [1, m, 1, k], bf16 or f16
  TensorView norm = {};      // weight [1, 1, 1, k] of the RMSNorm, no link's out; null: none
  TensorView weight = {};    // as in LinearInputs; nothing that is queued writes it
  PackedWeight packed = {};  // null: weight
  TensorView bias = {};      // [1, 1, 1, n], no link's out; null: none
  TensorView out;            // [1, m, 1, n] of x's dtype; of swiglu [1, m, 1, n / 2]
  LinkEnd end = LinkEnd::store;
};
/// Links in order in one launch: x of each but the first is what the one before writes, and outputs
/// are one tensor or apart. The same bits as rmsnorm(), linear() and pointwise() one after the
/// other; an output that several links write has in between what the last of them leaves. The
/// workspace, linear_chain_workspace_bytes() of it, is 0 before its first chain: chains that may
/// run at the same time have one each. Errors: as theirs; unsupported says what
/// why_no_linear_chain() does.
Status linear_chain(std::span<const Link> links, float eps, Workspace workspace,
                    const Device& device, Stream stream = {});
std::int64_t linear_chain_workspace_bytes(std::span<const Link> links, const Device& device);
/// "" where the device has a kernel for these links (their sizes and dtypes; addresses do not
/// count), else why not: CUDA, one or two rows, up to four links, weights of one format.
std::string why_no_linear_chain(std::span<const Link> links, const Device& device);

/// Uniform values in (−bound, bound), a hash of seed and index: the same bits on every device.
Status fill_uniform(const TensorView& out, std::uint64_t seed, float bound, const Device& device,
                    Stream stream = {});

/// counts[i] += by: lengths that grow on the device, inside a graph.
Status advance(const CountView& counts, std::int32_t by, const Device& device, Stream stream = {});

}  // namespace rafter
