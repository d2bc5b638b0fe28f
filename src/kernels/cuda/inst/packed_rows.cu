// y = x weightᵀ + bias for up to eight rows x: what a decode step multiplies with.
// x [m, k] in bf16 or f16, weight [n, k] packed in 8 or 4 bits an element
// (src/base/packed_weight.h), y [m, n] in x's dtype or f32, sums in f32.
// The wall is bandwidth: 2 m FLOP for each weight of one byte or half. One CTA an SM takes every
// gridDim-th stripe of 16 rows.
//   warp 16     producer: the copy engine brings 16 units of a stripe (1 KiB of values each, with
//               their scales) to each of `stages` slots. Where the weight is settled it begins
//               while the kernel before this one still runs
//   warps 0-15  consumers: one unit of a stage each. Values become pairs of x's dtype, exactly, by
//               masks; mma.sync with 16 rows of the weight as A and the rows of x as B, so that one
//               row of x costs what eight do. int4 scales each group's sum, 8 bits each row's
//   warp 17     finisher: adds a stripe's sums of all warps in a fixed order and stores y, while
//   the
//               consumers go on with the next stripe
// x lies in shared memory. The bits are the same with every run, and a row's do not depend on the
// other rows.
// Barriers: full[s] copies → consumers (bytes), empty[s] consumers → producer (one arrival a warp),
// summed[2] consumers → finisher (one arrival a warp), stored[2] finisher → consumers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/early.cuh"
#include "hw/cuda/early.h"
#include "hw/cuda/mma.cuh"
#include "hw/cuda/tma.cuh"
#include "kernels/cuda/packed_rows.h"
#include "kernels/cuda/rows.cuh"

namespace rafter::cuda {
namespace {

constexpr int kWarps = 16;  // consumers
constexpr int kProducer = kWarps, kFinisher = kWarps + 1;
constexpr int kThreads = (kWarps + 2) * 32;
constexpr int kRows = base::kStripeRows;
constexpr int kFewestStages = 2, kMostStages = 24;
constexpr std::int64_t kMostShared = 232448;  // of a CTA. CUDA C++ programming guide, 9.0

/// Bytes of a row of x in shared memory: 64 more than a multiple of 128, so that the eight lanes of
/// one phase of a load meet all banks once.
constexpr std::int64_t x_pitch(std::int64_t k) { return (k * 2 + 127) / 128 * 128 + 64; }
constexpr std::int64_t sums_bytes(std::int64_t m) {
  return std::int64_t{2} * kWarps * m * kRows * 4;
}
constexpr std::int64_t kBarrierBytes = (2 * kMostStages + 5) * 8 + 24;  // a multiple of 64
static_assert(kBarrierBytes % 64 == 0);
constexpr std::int64_t front_bytes(std::int64_t m, std::int64_t k) {
  return kBarrierBytes + sums_bytes(m) + m * x_pitch(k);
}
constexpr std::int64_t stage_bytes(const base::PackedShape& s) { return kWarps * s.unit_bytes(); }
constexpr std::int64_t stages_of(std::int64_t m, const base::PackedShape& s) {
  return std::min<std::int64_t>(kMostStages, (kMostShared - front_bytes(m, s.k)) / stage_bytes(s));
}

__device__ uint4 load_shared(std::uint32_t address) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address));
  return words;
}
/// A bf16 widened.
__device__ float load_shared_scale(std::uint32_t address) {
  std::uint16_t bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address));
  return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
}

/// a − b and a · b of two pairs.
template <DType kX>
__device__ std::uint32_t subtract(std::uint32_t a, std::uint32_t b) {
  if constexpr (kX == DType::bf16) {
    const __nv_bfloat162 d = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const std::uint32_t*>(&d);
  } else {
    const __half2 d =
        __hsub2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const std::uint32_t*>(&d);
  }
}
template <DType kX>
__device__ std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  if constexpr (kX == DType::bf16) {
    const __nv_bfloat162 d = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const std::uint32_t*>(&d);
  } else {
    const __half2 d =
        __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const std::uint32_t*>(&d);
  }
}

/// 128 in each half of a pair, of f16 1024: the last bits of the mantissa count ones.
template <DType kX>
constexpr std::uint32_t kOnes = kX == DType::bf16 ? 0x43004300u : 0x64006400u;

/// (a & mask) | bits, one instruction. PTX ISA: lop3.
__device__ std::uint32_t and_or(std::uint32_t a, std::uint32_t mask, std::uint32_t bits) {
  std::uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

/// A of one mma from a word of eight int4: nibbles i and i + 4 are v + 8 of pair i.
template <DType kX>
__device__ void unpack_int4(std::uint32_t word, std::uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = subtract<kX>(and_or(word >> (4 * i), 0x000f000fu, kOnes<kX>), kOnes<kX> + 0x00080008u);
  }
}

/// A pair of row g and one of row g + 8 from a word of four int8: ±(128 + |v|) ∓ 128.
template <DType kX>
__device__ void unpack_int8(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
  const auto pair = [](std::uint32_t w) {
    return subtract<kX>(and_or(w, 0x807f807fu, kOnes<kX>), and_or(w, 0x80008000u, kOnes<kX>));
  };
  low = pair(word);
  high = pair(__byte_perm(word, 0, 0x2301));
}

/// The same of four e4m3: exponent and mantissa shifted to where the dtype has them, then the
/// difference of the exponents' biases. Subnormals come out right: they are of both formats.
template <DType kX>
__device__ void unpack_e4m3(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
  constexpr int kShift = kX == DType::bf16 ? 4 : 1;
  constexpr std::uint32_t kMagnitude = kX == DType::bf16 ? 0x07f007f0u : 0x3f803f80u;
  constexpr std::uint32_t kBias = kX == DType::bf16 ? 0x7b807b80u : 0x5c005c00u;  // 2^120, 2^8
  const auto pair = [](std::uint32_t w) {
    return multiply<kX>(and_or(w, 0x80008000u, w >> kShift & kMagnitude), kBias);
  };
  low = pair(word);
  high = pair(word << 8);
}

/// sum += the products of a unit; kScales rows of scales lie in front of it. Two chains of sums, so
/// that one mma does not wait for the one before.
template <DType kX, DType kW, int kScales>
__device__ void multiply_unit(std::uint32_t unit, std::uint32_t x, int lane, float (&sum)[4]) {
  const std::uint32_t values = unit + static_cast<std::uint32_t>(kScales * 32 + lane * 16);
  const uint4 tiles[2] = {load_shared(values), load_shared(values + 512)};
  float chains[2][4] = {};
  if constexpr (kW == DType::int4) {
    const std::uint32_t words[8] = {tiles[0].x, tiles[0].y, tiles[0].z, tiles[0].w,
                                    tiles[1].x, tiles[1].y, tiles[1].z, tiles[1].w};
    constexpr int kBlocks = 4 / kScales;  // of 32 columns, that share a scale
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint4 of_x = load_shared(x + b * base::kBlockCols * 2);
      std::uint32_t a[4];
      unpack_int4<kX>(words[2 * b], a);
      mma_16_8_16<kX>(chains[0], a, of_x.x, of_x.y);
      unpack_int4<kX>(words[2 * b + 1], a);
      mma_16_8_16<kX>(chains[1], a, of_x.z, of_x.w);
      if ((b + 1) % kBlocks == 0) {
        const std::uint32_t at = unit + static_cast<std::uint32_t>(b / kBlocks * 32 + lane / 4 * 2);
        const float scales[2] = {load_shared_scale(at), load_shared_scale(at + 16)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[i] = fmaf(scales[i / 2], chains[0][i] + chains[1][i], sum[i]);
          chains[0][i] = chains[1][i] = 0;
        }
      }
    }
  } else {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint4 of_x = load_shared(x + b * base::kBlockCols * 2);
      const std::uint32_t words[4] = {tiles[b].x, tiles[b].y, tiles[b].z, tiles[b].w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        std::uint32_t a[4];
        if constexpr (kW == DType::int8) {
          unpack_int8<kX>(words[2 * j], a[0], a[1]);
          unpack_int8<kX>(words[2 * j + 1], a[2], a[3]);
        } else {
          unpack_e4m3<kX>(words[2 * j], a[0], a[1]);
          unpack_e4m3<kX>(words[2 * j + 1], a[2], a[3]);
        }
        mma_16_8_16<kX>(chains[j], a, j == 0 ? of_x.x : of_x.z, j == 0 ? of_x.y : of_x.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] += chains[0][i] + chains[1][i];
    }
  }
}

/// Where a ring of slots stands.
struct Turn {
  int slot = 0;
  std::uint32_t parity = 0;
  __device__ void next(int stages) {
    if (++slot == stages) {
      slot = 0;
      parity ^= 1u;
    }
  }
};

/// Where things lie in shared memory, as addresses.
struct Shared {
  std::uint32_t barriers, x, stages, stage_bytes;
  __device__ std::uint32_t full(int slot) const { return barriers + 16 * slot; }
  __device__ std::uint32_t empty(int slot) const { return barriers + 16 * slot + 8; }
  __device__ std::uint32_t x_is_there() const { return barriers + 16 * kMostStages; }
  __device__ std::uint32_t summed(int side) const { return x_is_there() + 8 + 8 * side; }
  __device__ std::uint32_t stored(int side) const { return x_is_there() + 24 + 8 * side; }
  __device__ std::uint32_t stage(int slot) const { return stages + slot * stage_bytes; }
};

/// One lane.
__device__ void bring_weights(const PackedRowsParams& p, const Shared& at) {
  const std::int64_t stripes = p.shape.n / kRows, stripe_bytes = p.shape.stripe_bytes();
  const int units = static_cast<int>(p.shape.stripe_units());
  const int unit_bytes = static_cast<int>(p.shape.unit_bytes());
  Turn turn{0, 1};
  for (std::int64_t stripe = blockIdx.x; stripe < stripes; stripe += gridDim.x) {
    const auto* from = static_cast<const std::uint8_t*>(p.weight) + stripe * stripe_bytes;
    for (int u = 0; u < units; u += kWarps) {
      const auto bytes = static_cast<std::uint32_t>(min(kWarps, units - u) * unit_bytes);
      barrier_wait(at.empty(turn.slot), turn.parity);
      barrier_arrive_expect(at.full(turn.slot), bytes);
      bulk_load(at.stage(turn.slot), from, bytes, at.full(turn.slot));
      from += bytes;
      turn.next(p.stages);
    }
  }
}

/// The finisher: y of stripe after stripe from the sums of all warps, [2, warps, m, 16 rows]. A
/// lane has one row of a stripe, whose scale and bias it loads while the sums are awaited.
__device__ void finish(const PackedRowsParams& p, const Shared& at, const float* sums, int lane) {
  const std::int64_t stripes = p.shape.n / kRows;
  const int size = p.m * kRows, in_stripe = lane % kRows;
  Rows bias, y;
  bias.data = const_cast<void*>(p.bias);
  bias.dtype = p.dtype;
  y.data = p.y;
  y.dtype = p.y_is_f32 ? DType::f32 : p.dtype;
  Turn turn;
  for (std::int64_t stripe = blockIdx.x; stripe < stripes; stripe += gridDim.x) {
    const std::int64_t row = stripe * kRows + in_stripe;
    const float scale =
        p.shape.is_int4()
            ? 1.0f
            : base::load_scale(p.shape, static_cast<const std::uint8_t*>(p.weight), row, 0);
    const float added = p.bias != nullptr ? element(bias, row) : 0.0f;
    barrier_wait(at.summed(turn.slot), turn.parity);
    const float* const all = sums + turn.slot * kWarps * size + in_stripe;
    for (int m = lane / kRows; m < p.m; m += 2) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        total += all[w * size + m * kRows];
      }
      store_element(y, m * p.y_stride + row, fmaf(total, scale, added));
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(at.stored(turn.slot));
    }
    turn.next(2);
  }
}

/// A consumer: its unit of every stage.
template <DType kX, DType kW, int kScales>
__device__ void consume(const PackedRowsParams& p, const Shared& at, float* sums, int warp,
                        int lane) {
  const std::int64_t stripes = p.shape.n / kRows;
  const int units = static_cast<int>(p.shape.stripe_units());
  constexpr int kCols = kW == DType::int4 ? 128 : 64, kBytes = base::kUnitBytes + kScales * 32;
  const int g = lane / 4, t = lane % 4;
  // Columns of B past m are the last row again: their sums are not kept.
  const std::uint32_t x =
      at.x + min(g, p.m - 1) * static_cast<std::uint32_t>(x_pitch(p.shape.k)) + t * 16;
  Turn turn, side{0, 1};
  for (std::int64_t stripe = blockIdx.x; stripe < stripes; stripe += gridDim.x) {
    float sum[4] = {};
    for (int u = warp; u - warp < units; u += kWarps) {
      barrier_wait(at.full(turn.slot), turn.parity);
      if (u < units) {
        multiply_unit<kX, kW, kScales>(at.stage(turn.slot) + warp * kBytes, x + u * kCols * 2, lane,
                                       sum);
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(at.empty(turn.slot));
      }
      turn.next(p.stages);
    }
    barrier_wait(at.stored(side.slot), side.parity);
    float* const mine = sums + (side.slot * kWarps + warp) * p.m * kRows;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = 2 * t + i % 2;
      if (m < p.m) {
        mine[m * kRows + g + i / 2 * 8] = sum[i];
      }
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(at.summed(side.slot));
    }
    side.next(2);
  }
}

template <DType kX, DType kW, int kScales>
__global__ void __launch_bounds__(kThreads, 1)
    packed_rows(const __grid_constant__ PackedRowsParams p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  auto* const sums = reinterpret_cast<float*>(shared + kBarrierBytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const auto pitch = static_cast<std::uint32_t>(x_pitch(p.shape.k));
  Shared at;
  at.barriers = shared_address(shared);
  at.x = at.barriers + static_cast<std::uint32_t>(kBarrierBytes + sums_bytes(p.m));
  at.stages = at.x + static_cast<std::uint32_t>(p.m) * pitch;
  at.stage_bytes = static_cast<std::uint32_t>(stage_bytes(p.shape));
  if (thread == 0) {
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(at.full(s), 1);
      barrier_init(at.empty(s), kWarps);
    }
    barrier_init(at.x_is_there(), 1);
    for (int side = 0; side < 2; ++side) {
      barrier_init(at.summed(side), kWarps);
      barrier_init(at.stored(side), 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  let_next_grid_begin();
  if (warp == kProducer) {
    if (!p.weight_is_settled) {
      wait_for_earlier_grids();
    }
    if (lane == 0) {
      bring_weights(p, at);
    }
    return;
  }
  wait_for_earlier_grids();
  if (warp == kFinisher) {
    finish(p, at, sums, lane);
    return;
  }
  if (thread == 0) {
    const auto bytes = static_cast<std::uint32_t>(p.shape.k * 2);
    barrier_arrive_expect(at.x_is_there(), static_cast<std::uint32_t>(p.m) * bytes);
    for (int m = 0; m < p.m; ++m) {
      bulk_load(at.x + m * pitch, static_cast<const std::uint16_t*>(p.x) + m * p.x_stride, bytes,
                at.x_is_there());
    }
  }
  barrier_wait(at.x_is_there(), 0);
  consume<kX, kW, kScales>(p, at, sums, warp, lane);
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

}  // namespace

bool packed_rows_takes(std::int64_t m, const base::PackedShape& shape) {
  return m <= kMostPackedRows && shape.k < (std::int64_t{1} << 20) &&
         stages_of(m, shape) >= kFewestStages;
}

Status launch_packed_rows(PackedRowsParams params, void* stream) {
  const Result<int> sms = sm_count();
  if (!sms) {
    return sms.status();
  }
  params.stages = static_cast<int>(stages_of(params.m, params.shape));
  void* arguments[] = {&params};
  const void* const kernel = params.dtype == DType::bf16 ? kernel_of<DType::bf16>(params.shape)
                                                         : kernel_of<DType::f16>(params.shape);
  const std::int64_t shared =
      front_bytes(params.m, params.shape.k) + params.stages * stage_bytes(params.shape);
  return launch_early(
      kernel,
      {.blocks = static_cast<unsigned>(std::min<std::int64_t>(*sms, params.shape.n / kRows)),
       .threads = kThreads,
       .shared_bytes = static_cast<unsigned>(shared),
       .stream = stream},
      arguments);
}

}  // namespace rafter::cuda
