#include <cuda_runtime_api.h>

#include "hw/cuda/attention_rate.h"
#include "hw/cuda/barrier.cuh"
#include "hw/cuda/launch.h"
#include "hw/cuda/wgmma.cuh"

namespace rafter::cuda {
namespace {

constexpr int kKeys = 128, kDim = 128, kSteps = kDim / 16;
constexpr int kWarpgroups = 2, kThreads = 128 * kWarpgroups, kRows = 64 * kWarpgroups;
constexpr int kTileBytes = kKeys * kDim * 2;
// Boxes of 64 columns: rows of 128 bytes whose 16-byte chunks are permuted, which random values
// need not know. PTX ISA, "Matrix descriptor": address, leading and stride offset over 16, the
// swizzle.
constexpr int kBoxBytes = kKeys * 128, kGroupBytes = 8 * 128;
constexpr int kSharedBytes = 2 * kTileBytes + 16 + kGroupBytes;
constexpr std::uint64_t kKMajor = std::uint64_t{kGroupBytes / 16} << 32 | std::uint64_t{1} << 62;
constexpr std::uint64_t kMnMajor = kKMajor | std::uint64_t{kBoxBytes / 16} << 16;

/// Two values in (−1, 1), hashes of the index: what is multiplied decides the power, and with it
/// the rate.
template <DType kDType>
__device__ std::uint32_t random_pair(std::uint32_t index) {
  float pair[2];
#pragma unroll
  for (std::uint32_t i = 0; i < 2; ++i) {
    std::uint32_t bits = (2 * index + i) * 0x9e3779b9u + 0x7f4a7c15u;
    bits = (bits ^ bits >> 16) * 0x85ebca6bu;
    bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
    pair[i] = static_cast<float>(static_cast<std::int32_t>(bits ^ bits >> 16)) * 0x1p-31f;
  }
  return pack<kDType>(pair[0], pair[1]);
}

__device__ std::uint64_t at(std::uint64_t descriptor, std::uint32_t address) {
  return descriptor | (address & 0x3ffffu) >> 4;
}

/// Scale, running maximum, subtraction, exponential and sum: the five operations that the cost
/// model counts of a score.
__device__ void softmax(float (&s)[64], float (&max)[2], float (&sum)[2]) {
  constexpr float kScale = 0.1275f;  // log2(e) / sqrt(128)
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    max[i / 2 % 2] = fmaxf(max[i / 2 % 2], s[i]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    max[h] = fmaxf(max[h], __shfl_xor_sync(~0u, max[h], 1));
    max[h] = fmaxf(max[h], __shfl_xor_sync(~0u, max[h], 2));
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    s[i] = exp2_approx(fmaf(s[i], kScale, -kScale * max[i / 2 % 2]));
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    sum[i / 2 % 2] += s[i];
  }
}

/// QKᵀ of a round runs beside PV of the round before, whose softmax is done; the other warpgroup's
/// products fill what is left.
template <DType kDType>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(float* sink, int rounds) {
  extern __shared__ unsigned char shared[];
  const std::uint32_t start = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  const std::uint32_t skip = -start % kGroupBytes;
  auto* const words = reinterpret_cast<std::uint32_t*>(shared + skip);
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kTileBytes / 4; i += kThreads) {
    words[i] = random_pair<kDType>(static_cast<std::uint32_t>(i));
  }
  const std::uint32_t k = start + skip, v = k + kTileBytes, arrivals = v + kTileBytes;
  if (threadIdx.x == 0) {
    barrier_init(arrivals, kThreads / 32);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  std::uint32_t q[kSteps][4], p[32];
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) {
    q[i / 4][i % 4] = random_pair<kDType>(100'000 + threadIdx.x * 32 + i);
  }
  float s[64], o[64] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  const auto scores = [&] {
    Mma<kDType, kKeys>::template registers_k_major<false>(s, q[0][0], q[0][1], q[0][2], q[0][3],
                                                          at(kKMajor, k));
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
      Mma<kDType, kKeys>::template registers_k_major<true>(
          s, q[step][0], q[step][1], q[step][2], q[step][3],
          at(kKMajor, k + step / 4 * kBoxBytes + step % 4 * 32));
    }
    wgmma_commit();
  };
  const auto probabilities = [&] {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      p[i] = pack<kDType>(s[2 * i], s[2 * i + 1]);
    }
  };
  wgmma_fence();
  scores();
  wgmma_wait<0>();
  keep_in_place(s);
  softmax(s, max, sum);
  probabilities();
  for (int round = 0; round < rounds; ++round) {
    keep_in_place(p);
    wgmma_fence();
    scores();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      Mma<kDType, kDim>::registers(o, p[4 * step], p[4 * step + 1], p[4 * step + 2],
                                   p[4 * step + 3], at(kMnMajor, v + step * 16 * 128));
    }
    wgmma_commit();
    wgmma_wait<1>();
    keep_in_place(s);
    softmax(s, max, sum);
    // ptxas moves the wait for PV above arithmetic that does not depend on it, and the softmax
    // would not run under PV: an arrival whose address needs the sums, which are not below 0, stays
    // before it. Nobody waits for it.
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(arrivals + (sum[0] + sum[1] < 0 ? 8 : 0));
    }
    wgmma_wait<0>();
    keep_in_place(o);
    probabilities();
  }
  float total = sum[0] + sum[1];
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    total += o[i];
  }
  if (total == 12345.678f) {
    *sink = total;
  }
}

}  // namespace

Result<double> attention_pass(DType dtype, int rounds, void* sink, void* stream) {
  const Result<int> sms = sm_count();
  if (!sms) {
    return sms.status();
  }
  const void* const kernel = dtype == DType::f16
                                 ? reinterpret_cast<const void*>(&attention_kernel<DType::f16>)
                                 : reinterpret_cast<const void*>(&attention_kernel<DType::bf16>);
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess) {
    return status_of(error, "shared memory of the attention rate");
  }
  auto* typed = static_cast<float*>(sink);
  void* arguments[] = {&typed, &rounds};
  const auto blocks = static_cast<unsigned>(*sms);
  if (Status status = launch(
          kernel,
          {.blocks = blocks, .threads = kThreads, .shared_bytes = kSharedBytes, .stream = stream},
          arguments);
      !status) {
    return status;
  }
  return static_cast<double>(blocks) * (rounds + 1) * kRows * kKeys;
}

}  // namespace rafter::cuda
