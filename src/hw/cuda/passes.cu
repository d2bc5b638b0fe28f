#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "hw/cuda/launch.h"
#include "hw/cuda/passes.h"

namespace rafter::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 8;  // independent 16-byte accesses of a thread

__device__ unsigned improbable;

__device__ std::int64_t tile_start(std::int64_t tile) {
  return tile * (kThreads * kUnroll) + threadIdx.x;
}

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* memory, std::int64_t count) {
  unsigned sum = 0;
  for (std::int64_t tile = blockIdx.x; tile * (kThreads * kUnroll) < count; tile += gridDim.x) {
    uint4 v[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t at = tile_start(tile) + i * kThreads;
      v[i] = at < count ? __ldg(memory + at) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      sum += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
  }
  if (sum == 0x9e3779b9u) {
    improbable = sum;
  }
}

__global__ void __launch_bounds__(kThreads) write_kernel(uint4* memory, std::int64_t count) {
  for (std::int64_t tile = blockIdx.x; tile * (kThreads * kUnroll) < count; tile += gridDim.x) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t at = tile_start(tile) + i * kThreads;
      if (at < count) {
        memory[at] = uint4{1, 2, 3, static_cast<unsigned>(at)};
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    copy_kernel(uint4* to, const uint4* from, std::int64_t count) {
  for (std::int64_t tile = blockIdx.x; tile * (kThreads * kUnroll) < count; tile += gridDim.x) {
    uint4 v[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t at = tile_start(tile) + i * kThreads;
      v[i] = at < count ? from[at] : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t at = tile_start(tile) + i * kThreads;
      if (at < count) {
        to[at] = v[i];
      }
    }
  }
}

/// A good mix of 32 bits (the finaliser of MurmurHash3).
__device__ unsigned mixed(unsigned x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

/// The sum of four uniform values: bell-shaped, within (−2, 2), variance 1/3.
__device__ float bell(unsigned seed, std::int64_t i) {
  const unsigned low = static_cast<unsigned>(i), high = static_cast<unsigned>(i >> 32);
  const unsigned a = mixed(low ^ mixed(high ^ seed)), b = mixed(a + 0x9e3779b9u);
  constexpr float kUnit = 1.0f / 65536;
  return kUnit * static_cast<float>((a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16)) - 2.0f;
}

template <typename T>
__device__ T element(unsigned seed, std::int64_t i);
template <>
__device__ float element<float>(unsigned seed, std::int64_t i) {
  return bell(seed, i);
}
template <>
__device__ __nv_bfloat16 element<__nv_bfloat16>(unsigned seed, std::int64_t i) {
  return __float2bfloat16_rn(bell(seed, i));
}
template <>
__device__ __half element<__half>(unsigned seed, std::int64_t i) {
  return __float2half_rn(bell(seed, i));
}
template <>
__device__ unsigned char element<unsigned char>(unsigned seed, std::int64_t i) {
  const unsigned bits = mixed(static_cast<unsigned>(i) ^ mixed(seed));
  return static_cast<unsigned char>(bits & 0xbf);  // e4m3: below 2, so no NaN
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    random_kernel(T* memory, std::int64_t count, unsigned seed) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    memory[i] = element<T>(seed, i);
  }
}

__global__ void empty_kernel() {}

/// PTX ISA: %globaltimer counts nanoseconds, in steps of up to a microsecond or so.
__device__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void hold_kernel(std::uint64_t duration) {
  const std::uint64_t start = nanoseconds();
  while (nanoseconds() - start < duration) {
  }
}

constexpr int kChains = 8;
template <bool kExp>
__global__ void __launch_bounds__(kThreads) register_kernel(float* sink, std::int64_t rounds) {
  float x[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) {
    x[i] = -0.001f * static_cast<float>(threadIdx.x + i);
  }
  constexpr int kRoundsAtOnce = 16;  // counting rounds takes issue slots of the arithmetic
#pragma unroll kRoundsAtOnce
  for (int r = 0; r < static_cast<int>(rounds); ++r) {
#pragma unroll
    for (int i = 0; i < kChains; ++i) {
      if constexpr (kExp) {
        asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
      } else {
        asm volatile("fma.rn.f32 %0, %0, 0f3F7FFFFF, 0f3A000000;" : "+f"(x[i]));
      }
    }
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kChains; ++i) {
    sum += x[i];
  }
  if (sum == 12345.678f) {
    *sink = sum;
  }
}

/// Enough CTAs for every SM, however much there is to do.
unsigned blocks_for(std::int64_t tiles) {
  constexpr std::int64_t kMost = 132 * 4;
  return static_cast<unsigned>(tiles < kMost ? tiles : kMost);
}

unsigned pass_blocks(std::int64_t count) {
  return blocks_for((count + kThreads * kUnroll - 1) / (kThreads * kUnroll));
}

template <typename T>
Status launch_random(void* memory, std::int64_t elements, std::uint32_t seed, void* stream) {
  auto* typed = static_cast<T*>(memory);
  void* arguments[] = {&typed, &elements, &seed};
  return launch(reinterpret_cast<const void*>(&random_kernel<T>),
                {.blocks = blocks_for((elements + kThreads - 1) / kThreads),
                 .threads = kThreads,
                 .stream = stream},
                arguments);
}

}  // namespace

Status read_pass(const void* memory, std::int64_t bytes, void* stream) {
  const auto* typed = static_cast<const uint4*>(memory);
  std::int64_t count = bytes / 16;
  void* arguments[] = {&typed, &count};
  return launch(reinterpret_cast<const void*>(&read_kernel),
                {.blocks = pass_blocks(count), .threads = kThreads, .stream = stream}, arguments);
}

Status write_pass(void* memory, std::int64_t bytes, void* stream) {
  auto* typed = static_cast<uint4*>(memory);
  std::int64_t count = bytes / 16;
  void* arguments[] = {&typed, &count};
  return launch(reinterpret_cast<const void*>(&write_kernel),
                {.blocks = pass_blocks(count), .threads = kThreads, .stream = stream}, arguments);
}

Status copy_pass(void* to, const void* from, std::int64_t bytes, void* stream) {
  auto* target = static_cast<uint4*>(to);
  const auto* source = static_cast<const uint4*>(from);
  std::int64_t count = bytes / 16;
  void* arguments[] = {&target, &source, &count};
  return launch(reinterpret_cast<const void*>(&copy_kernel),
                {.blocks = pass_blocks(count), .threads = kThreads, .stream = stream}, arguments);
}

Status fill_random(void* memory, std::int64_t elements, DType dtype, std::uint32_t seed,
                   void* stream) {
  switch (dtype) {
    case DType::f32:
      return launch_random<float>(memory, elements, seed, stream);
    case DType::bf16:
      return launch_random<__nv_bfloat16>(memory, elements, seed, stream);
    case DType::f16:
      return launch_random<__half>(memory, elements, seed, stream);
    case DType::e4m3:
    case DType::int8:
      return launch_random<unsigned char>(memory, elements, seed, stream);
    default:
      return Status::unsupported("dtype", to_string(dtype), "f32, bf16, f16, e4m3, int8");
  }
}

Status hold(double seconds, void* stream) {
  auto duration = static_cast<std::uint64_t>(seconds * 1e9);
  void* arguments[] = {&duration};
  return launch(reinterpret_cast<const void*>(&hold_kernel),
                {.blocks = duration > 0 ? 1U : 0U, .threads = 1, .stream = stream}, arguments);
}

Status empty_launch(void* stream) {
  return launch(reinterpret_cast<const void*>(&empty_kernel),
                {.blocks = 1, .threads = 32, .stream = stream}, nullptr);
}

namespace {

/// Queues `kernel` on all SMs; returns how many of its operations are done.
Result<double> register_pass(const void* kernel, std::int64_t rounds, void* sink, void* stream) {
  const Result<int> sms = sm_count();
  if (!sms) {
    return sms.status();
  }
  auto* typed = static_cast<float*>(sink);
  void* arguments[] = {&typed, &rounds};
  const auto blocks = static_cast<unsigned>(4 * *sms);
  if (Status status =
          launch(kernel, {.blocks = blocks, .threads = kThreads, .stream = stream}, arguments);
      !status) {
    return status;
  }
  return static_cast<double>(rounds) * kChains * kThreads * blocks;
}

}  // namespace

Result<double> exp_pass(std::int64_t rounds, void* sink, void* stream) {
  return register_pass(reinterpret_cast<const void*>(&register_kernel<true>), rounds, sink, stream);
}

Result<double> multiply_add_pass(std::int64_t rounds, void* sink, void* stream) {
  return register_pass(reinterpret_cast<const void*>(&register_kernel<false>), rounds, sink,
                       stream);
}

}  // namespace rafter::cuda
