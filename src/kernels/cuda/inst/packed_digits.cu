// y = x weightᵀ + bias for one or two rows x and int4 weights, by products of integers.
// x [m, k] in bf16 or f16, weight [n, k] (src/base/packed_weight.h), y [m, n] in x's dtype or f32.
// kernels/cuda/packed_rows.cuh has the schedule, packed_digits.cuh the arithmetic.
#include "hw/cuda/early.h"
#include "kernels/cuda/packed_digits.cuh"

namespace rafter::cuda {
namespace {

constexpr int kDigitWarps = 8;
constexpr int kDigitSums = 2;  // of a warp: the bits of sixteen warps with one
template <DType kX, int kScales>
using DigitProducts = Digits<kX, kScales, kDigitWarps, kDigitSums>;

template <DType kX, int kScales>
__global__ void __launch_bounds__(threads_of(kDigitWarps), 2)
    packed_digits(const __grid_constant__ PackedRowsParams p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  multiply_rows<DigitProducts<kX, kScales>>(p, shared);
}

template <DType kX>
const void* kernel_of(std::int64_t group_size) {
  return group_size == 128  ? reinterpret_cast<const void*>(&packed_digits<kX, 1>)
         : group_size == 64 ? reinterpret_cast<const void*>(&packed_digits<kX, 2>)
                            : reinterpret_cast<const void*>(&packed_digits<kX, 4>);
}

/// A CTA an SM, and beside it one of the next product: where two of a grid met on an SM, theirs
/// would be the last stripes. So the products of a model take by turns less than half of an SM,
/// those that widen (qkv, gate_up), and more, those that do not (o, down): beside one of either
/// there is room for one of the other and for a small kernel.
constexpr Share kSmaller{.most = 102 * 1024}, kLarger{.most = 122 * 1024, .least = 116 * 1024};
constexpr std::int64_t kOfSm = 228 * 1024, kOfSystem = 1024;  // an SM's; of each CTA
static_assert(2 * (kLarger.least + kOfSystem) > kOfSm);
static_assert(kSmaller.most + kLarger.most + 3 * kOfSystem < kOfSm);
constexpr Share share_of(const base::PackedShape& shape) {
  return shape.n > shape.k ? kSmaller : kLarger;
}

Ring digits_ring(std::int64_t m, const base::PackedShape& shape) {
  return ring_of(kDigitWarps, kDigitWarps * kDigitSums, m, digits_bytes(m, shape.k), shape,
                 share_of(shape));
}

}  // namespace

bool packed_digits_takes(std::int64_t m, const base::PackedShape& shape) {
  return shape.is_int4() && m <= kMostDigitRows && digits_ring(m, shape).stages >= kFewestStages;
}

Status launch_packed_digits(PackedRowsParams params, void* stream) {
  const Result<int> sms = sm_count();
  if (!sms) {
    return sms.status();
  }
  const base::PackedShape& shape = params.shape;
  const Ring ring = digits_ring(params.m, shape);
  params.stages = static_cast<int>(ring.stages);
  void* arguments[] = {&params};
  const void* const kernel = params.dtype == DType::bf16 ? kernel_of<DType::bf16>(shape.group_size)
                                                         : kernel_of<DType::f16>(shape.group_size);
  return launch_early(
      kernel,
      {.blocks = static_cast<unsigned>(std::min<std::int64_t>(*sms, shape.n / kRows)),
       .threads = threads_of(kDigitWarps),
       .shared_bytes = static_cast<unsigned>(ring.shared_bytes),
       .stream = stream},
      arguments);
}

}  // namespace rafter::cuda
