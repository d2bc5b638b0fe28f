// y = x weightᵀ + bias for up to eight rows x: what a decode step multiplies with.
// x [m, k] in bf16 or f16, weight [n, k] packed in 8 or 4 bits an element
// (src/base/packed_weight.h), y [m, n] in x's dtype or f32, sums in f32.
// The wall is bandwidth: 2 m FLOP for each weight of one byte or half. kernels/cuda/packed_rows.cuh
// has the schedule, packed_pairs.cuh the arithmetic. One or two rows and int4 have
// inst/packed_digits.cu. The bits are the same with every run, and a row's do not depend on the
// other rows.
#include "hw/cuda/early.h"
#include "kernels/cuda/packed_pairs.cuh"

namespace rafter::cuda {
namespace {

constexpr int kPairWarps = 8;
template <DType kX, DType kW, int kScales>
using PairProducts = Pairs<kX, kW, kScales, kPairWarps>;

template <DType kX, DType kW, int kScales>
__global__ void __launch_bounds__(threads_of(kPairWarps), 2)
    packed_rows(const __grid_constant__ PackedRowsParams p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  multiply_rows<PairProducts<kX, kW, kScales>>(p, shared);
}

template <DType kX>
const void* kernel_of(const base::PackedShape& weight) {
  switch (weight.dtype) {
    case DType::int4:
      return weight.group_size == 128
                 ? reinterpret_cast<const void*>(&packed_rows<kX, DType::int4, 1>)
             : weight.group_size == 64
                 ? reinterpret_cast<const void*>(&packed_rows<kX, DType::int4, 2>)
                 : reinterpret_cast<const void*>(&packed_rows<kX, DType::int4, 4>);
    case DType::int8:
      return reinterpret_cast<const void*>(&packed_rows<kX, DType::int8, 0>);
    default:
      return reinterpret_cast<const void*>(&packed_rows<kX, DType::e4m3, 0>);
  }
}

Ring pairs_ring(std::int64_t m, const base::PackedShape& shape) {
  return ring_of(kPairWarps, kPairWarps, m, m * x_pitch(shape.k), shape);
}

}  // namespace

bool packed_rows_takes(std::int64_t m, const base::PackedShape& shape) {
  return m <= kMostPackedRows && shape.k < (std::int64_t{1} << 20) &&
         pairs_ring(m, shape).stages >= kFewestStages;
}

Status launch_packed_rows(PackedRowsParams params, void* stream) {
  if (packed_digits_takes(params.m, params.shape)) {
    return launch_packed_digits(params, stream);
  }
  const Result<int> sms = sm_count();
  if (!sms) {
    return sms.status();
  }
  const Ring ring = pairs_ring(params.m, params.shape);
  params.stages = static_cast<int>(ring.stages);
  void* arguments[] = {&params};
  const void* const kernel = params.dtype == DType::bf16 ? kernel_of<DType::bf16>(params.shape)
                                                         : kernel_of<DType::f16>(params.shape);
  return launch_early(kernel,
                      {.blocks = static_cast<unsigned>(std::min<std::int64_t>(
                           *sms * (ring.is_share ? 2 : 1), params.shape.n / kRows)),
                       .threads = threads_of(kPairWarps),
                       .shared_bytes = static_cast<unsigned>(ring.shared_bytes),
                       .stream = stream},
                      arguments);
}

}  // namespace rafter::cuda
