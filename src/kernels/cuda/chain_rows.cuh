// A decode step's products between two attentions, with what stands between them, in one launch:
// up to four phases y = end(norm(x) weightᵀ + bias) of one or two rows, x of a phase being y of the
// one before. One CTA an SM. A Format (inst/chain_rows.cu) says how weights lie and are multiplied.
//   producer   one lane: streams the weights of all phases through a ring and waits for no phase.
//              chain_ring.cuh
//   consumers  16 warps in kGroups, each of which takes every kGroups-th stripe; all bring x of a
//              phase together
//   finisher   a warp: adds a stripe's sums in a fixed order, ends the product, sends y to the CTAs
// Barriers: full[s] copies → a group (bytes), empty[s] a group → producer (one arrival a warp),
// told[i] producer → a group or the finisher, summed[i] a group → finisher (one arrival a warp),
// stored[i] finisher → the group.
#pragma once

#include <algorithm>
#include <string>

#include "hw/cuda/early.h"
#include "kernels/cuda/chain_ring.cuh"

namespace rafter::cuda {

/// How CTAs tell each other what a phase wrote: pairs of elements, each with the number of the
/// launch, in a word that is written and read whole. A reader sees by the word itself that it is
/// there; a counter behind it would cost a fence and another way through the L2.
struct Letter {
  unsigned long long word = 0;
  static __device__ Letter of(std::uint32_t pair, unsigned launch) {
    return {static_cast<unsigned long long>(launch) << 32 | pair};
  }
  __device__ bool is_of(unsigned launch) const { return word >> 32 == launch; }
  __device__ std::uint32_t pair() const { return static_cast<std::uint32_t>(word); }
};
__device__ inline void send(unsigned long long* to, const Letter& letter) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)),
               "l"(letter.word)
               : "memory");
}
__device__ inline void receive(const unsigned long long* from, Letter& a, Letter& b) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(a.word), "=l"(b.word)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
}
__device__ inline Letter await_letter(const unsigned long long* from, unsigned launch) {
  Letter letter;
  do {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                 : "=l"(letter.word)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
  } while (!letter.is_of(launch));
  return letter;
}
/// This launch's number, once what came before is done.
__device__ inline unsigned launch_number(const ChainParams& p) {
  return __ldcg(&p.words->launches.value) + 1;
}

__device__ inline float as_stored(DType dtype, float x) {
  return dtype == DType::bf16 ? __bfloat162float(__float2bfloat16_rn(x))
                              : __half2float(__float2half_rn(x));
}
/// Of a pair the first or the second.
__device__ inline float one_of(DType dtype, std::uint32_t pair, std::int64_t which) {
  const auto bits = static_cast<unsigned short>(which == 0 ? pair & 0xffffu : pair >> 16);
  return dtype == DType::bf16 ? __uint_as_float(static_cast<std::uint32_t>(bits) << 16)
                              : __half2float(__ushort_as_half(bits));
}
__device__ inline float element_of_l2(DType dtype, const void* data, std::int64_t at) {
  return one_of(dtype, __ldcg(static_cast<const unsigned short*>(data) + at), 0);
}

template <typename Format>
__device__ void finish_runs(const ChainParams& p, const Places& at, int lane) {
  constexpr int kStripe = Format::kStripe, kSums = Format::kSums;
  const int m = lane / kStripe, size = p.m * kStripe;
  const unsigned launch = launch_number(p);
  Turn side;
  float gate = 0;
  for (int index = 0;; ++index, side.next(kSides<Format>)) {
    barrier_wait(at.run_told(index), index / kRuns & 1);
    const Run run{at.runs[index % kRuns]};
    if (run.is_end()) {
      break;
    }
    const ChainPhase& f = p.phases[run.phase()];
    const std::int64_t row = std::int64_t{run.stripe()} * kStripe + lane % kStripe;
    Rows y;
    y.data = f.y;
    y.dtype = p.dtype;
    const bool is_pair = f.end == LinkEnd::swiglu, is_gate = is_pair && run.stripe() < f.tickets;
    const std::int64_t col = row - (is_pair && !is_gate ? f.tickets * kStripe : 0);
    const std::int64_t to = m * f.y_stride + col, letter = (m * f.letter_cols + col) / 2;
    const float added = f.bias != nullptr ? element_of_l2(p.dtype, f.bias, row) : 0.0f;
    const float scale = Format::scale(f, row);
    float before = 0;
    if (f.end == LinkEnd::add && m < p.m) {
      before = f.before == nullptr
                   ? element_of_l2(p.dtype, f.y, to)
                   : one_of(p.dtype, await_letter(f.before + letter, launch).pair(), col % 2);
    }
    barrier_wait(at.summed(side.slot), side.parity);
    float total = 0;
    if (m < p.m) {
      const float* const all = at.sums + side.slot * kSums * size + lane;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        total += all[i * size];
      }
      total = fmaf(total, scale, added);
    }
    if (is_gate) {
      gate = as_stored(p.dtype, total);
    } else {
      const float value = is_pair                 ? silu(gate) * as_stored(p.dtype, total)
                          : f.end == LinkEnd::add ? as_stored(p.dtype, total) + before
                                                  : total;
      const float next = __shfl_down_sync(0xffffffffu, value, 1);
      if (m < p.m) {
        if (f.letters != nullptr && lane % 2 == 0) {
          send(f.letters + letter, Letter::of(pack_pair(p.dtype, value, next), launch));
        }
        if (f.stores) {
          store_element(y, to, value);
        }
      }
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(at.stored(side.slot));
    }
  }
  if (lane == 0 && atomicAdd(&p.words->left.value, 1u) == gridDim.x - 1) {
    p.words->left.value = 0;
    p.words->launches.value = launch;
  }
}

/// Chunks of a row of x, kConsumers apart; from memory, or as the phase before sends them. Which
/// a warp waits for by its first one, so that those who wait take little of the L2.
template <int kCount>
__device__ void load_x(const ChainPhase& f, int row, int first, unsigned launch,
                       Raw<false> (&raw)[kCount]) {
  const int chunks = f.k / kRowWidth;
  if (f.letters_of_x == nullptr) {
    const auto* const from =
        reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(f.x) + row * f.x_stride);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first + i * kConsumers < chunks) {
        raw[i].words[0] = __ldcg(from + first + i * kConsumers);
      }
    }
    return;
  }
  constexpr int kPairs = kRowWidth / 2;
  const unsigned long long* const from =
      f.letters_of_x + (static_cast<std::int64_t>(row) * chunks + first) * kPairs;
  if (first % 32 == 0 && first < chunks) {
    await_letter(from, launch);
  }
  __syncwarp();
  Letter letters[kCount][kPairs];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first + i * kConsumers < chunks) {
      receive(from + i * kConsumers * kPairs, letters[i][0], letters[i][1]);
      receive(from + i * kConsumers * kPairs + 2, letters[i][2], letters[i][3]);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first + i * kConsumers < chunks) {
      while (!letters[i][0].is_of(launch) || !letters[i][1].is_of(launch) ||
             !letters[i][2].is_of(launch) || !letters[i][3].is_of(launch)) {
        receive(from + i * kConsumers * kPairs, letters[i][0], letters[i][1]);
        receive(from + i * kConsumers * kPairs + 2, letters[i][2], letters[i][3]);
      }
      raw[i].words[0] = uint4{letters[i][0].pair(), letters[i][1].pair(), letters[i][2].pair(),
                              letters[i][3].pair()};
    }
  }
  __syncwarp();
}

/// All consumers: x of a phase, taken apart.
template <typename Format>
__device__ void bring_x(const ChainParams& p, int phase, unsigned launch, const Places& at,
                        int thread) {
  const ChainPhase& f = p.phases[phase];
  constexpr DType kX = Format::kDType;
  const int chunks = f.k / kRowWidth;
  Raw<false> norm[kMostNormVectors];
  if (f.norm != nullptr) {
#pragma unroll
    for (int v = 0; v < kMostNormVectors; ++v) {
      if (thread + v * kConsumers < chunks) {
        norm[v].words[0] = __ldg(static_cast<const uint4*>(f.norm) + thread + v * kConsumers);
      }
    }
  }
  named_barrier_sync(1, kConsumers);
  if (f.norm == nullptr) {
    constexpr int kTogether = 3;
    for (int row = 0; row < p.m; ++row) {
      for (int first = thread; first - thread < chunks; first += kTogether * kConsumers) {
        Raw<false> raw[kTogether];
        load_x(f, row, first, launch, raw);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first - thread + i * kConsumers < chunks) {
            const int chunk = first + i * kConsumers;
            Format::put(raw[i], at.x, f.k, p.m, row, chunk, chunk < chunks);
          }
        }
      }
    }
  } else {
    const int warp = thread / 32;
    for (int row = 0; row < p.m; ++row) {
      float* const squares = at.squares + row * kMostNormVectors * kChainWarps;
      Raw<false> raw[kMostNormVectors];
      load_x(f, row, thread, launch, raw);
#pragma unroll
      for (int v = 0; v < kMostNormVectors; ++v) {
        float x[kRowWidth], sum = 0;
        unpack(kX, raw[v], x);
#pragma unroll
        for (int i = 0; i < kRowWidth; ++i) {
          sum = fmaf(x[i], x[i], sum);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
          sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        if (thread % 32 == 0) {
          squares[v * kChainWarps + warp] = sum;
        }
      }
      named_barrier_sync(1, kConsumers);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kMostNormVectors * kChainWarps; ++i) {
        if (i % kChainWarps == 0 && i * 32 >= chunks) {
          break;
        }
        sum += squares[i];
      }
      const float inverse = __frsqrt_rn(sum / static_cast<float>(f.k) + p.eps);
#pragma unroll
      for (int v = 0; v < kMostNormVectors; ++v) {
        if (v * kConsumers < chunks) {
          float x[kRowWidth], w[kRowWidth];
          unpack(kX, raw[v], x);
          unpack(kX, norm[v], w);
#pragma unroll
          for (int i = 0; i < kRowWidth; ++i) {
            x[i] *= inverse * w[i];
          }
          const int chunk = thread + v * kConsumers;
          Format::put(pack_eight<kX>(x), at.x, f.k, p.m, row, chunk, chunk < chunks);
        }
      }
    }
  }
  named_barrier_sync(1, kConsumers);
}

template <typename Format>
__device__ void consume_runs(const ChainParams& p, const Places& at, int thread) {
  constexpr int kAll = kGroups<Format>;
  const int warp = thread / 32, lane = thread % 32, group = warp / Format::kGroup;
  const int size = Format::kSums * Format::kStripe * p.m;
  const unsigned launch = launch_number(p);
  Turn side{group, 1};
  int phase = 0;
  typename Format::Worker worker;
  for (Inbox<Format> inbox(group);; ++inbox.next) {
    barrier_wait(at.told(inbox.place()), inbox.parity());
    const Run run{at.messages[inbox.place()]};
    if (run.is_end()) {
      break;
    }
    if (run.is_begin()) {
      phase = run.phase();
      bring_x<Format>(p, phase, launch, at, thread);
      worker.begin(p.phases[phase], p.m, at.x, warp % Format::kGroup, lane);
      continue;
    }
    const int stages = p.phases[phase].stages;
    typename Format::Sums sums = {};
    Turn turn = run.turn();
    for (int s = 0; s < stages; ++s, turn.next(p.stages)) {
      barrier_wait(at.full(turn.slot), turn.parity);
      worker.add(at.stage(turn.slot), s, sums);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(at.empty(turn.slot));
      }
    }
    barrier_wait(at.stored(side.slot), side.parity);
    worker.keep(sums, at.sums + side.slot * size);
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(at.summed(side.slot));
    }
    side.slot ^= kAll;  // of two: group, and group + kAll
    side.parity ^= side.slot == group ? 1u : 0u;
  }
}

/// A kernel's all.
template <typename Format>
__device__ void run_chain(const ChainParams& p, std::uint8_t* shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  Places at;
  at.barriers = shared_address(shared);
  at.runs = reinterpret_cast<int2*>(shared + kFrontBarriers);
  at.messages = at.runs + kRuns;
  at.squares = reinterpret_cast<float*>(shared + kFrontBytes);
  at.sums = reinterpret_cast<float*>(shared + kFrontBytes + kSquaresBytes);
  at.x = at.barriers +
         static_cast<std::uint32_t>(kFrontBytes + kSquaresBytes + chain_sums_bytes<Format>(p.m));
  at.stages = at.x + static_cast<std::uint32_t>(p.x_bytes);
  at.stage_bytes = Format::kStageBytes;
  if (thread == 0) {
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(at.full(s), 1);
      barrier_init(at.empty(s), Format::kGroup);
    }
    for (int run = 0; run < kRuns; ++run) {
      barrier_init(at.run_told(run), 1);
    }
    for (int message = 0; message < kMessages; ++message) {
      barrier_init(at.told(message), 1);
    }
    for (int side = 0; side < kSides<Format>; ++side) {
      barrier_init(at.summed(side), Format::kGroup);
      barrier_init(at.stored(side), 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (warp == kProducer) {
    if (lane == 0) {
      bring<Format>(p, at);
    }
    return;
  }
  wait_for_earlier_grids();
  if (warp == kFinisher) {
    finish_runs<Format>(p, at, lane);
    return;
  }
  consume_runs<Format>(p, at, thread);
}

/// Fills in what depends on the format. Returns the ring's bytes, and what is in front of it.
template <typename Format>
std::int64_t shape_chain(ChainParams& params) {
  params.tickets = 0;
  std::int64_t x_bytes = 0;
  auto* letters = reinterpret_cast<unsigned long long*>(params.words + 1);
  for (int i = 0; i < params.count; ++i) {
    ChainPhase& f = params.phases[i];
    f.first = params.tickets;
    f.tickets = static_cast<int>(f.n / (f.end == LinkEnd::swiglu ? 2 : 1) / Format::kStripe);
    f.stages = (f.k + Format::kStageCols - 1) / Format::kStageCols;
    params.tickets += f.tickets;
    f.letter_cols = f.end == LinkEnd::swiglu ? f.n / 2 : f.n;
    if (params.words != nullptr) {
      ChainPhase* const next = i + 1 < params.count ? &params.phases[i + 1] : nullptr;
      f.letters = next != nullptr ? letters : nullptr;
      for (int j = 0; j < i; ++j) {  // the last that wrote it
        if (params.phases[j].y == f.y) {
          f.before = params.phases[j].letters;
          params.phases[j].stores = false;
        }
      }
      if (next != nullptr) {
        next->letters_of_x = letters;
        letters += params.m * f.letter_cols / 2;
      }
    }
    x_bytes = std::max(x_bytes, Format::x_bytes(params.m, f.k));
  }
  const std::int64_t front =
      kFrontBytes + kSquaresBytes + chain_sums_bytes<Format>(params.m) + x_bytes;
  params.x_bytes = static_cast<int>(x_bytes);
  params.stages = static_cast<int>(
      std::clamp<std::int64_t>((kMostShared - front) / Format::kStageBytes, 0, kMostChainStages));
  return front + params.stages * Format::kStageBytes;
}

template <typename Format>
std::string why_not(ChainParams params) {
  shape_chain<Format>(params);
  if (params.stages < kFewestChainStages) {
    return "the rows take too much shared memory";
  }
  std::int64_t stripes = 0;
  for (int i = 0; i < params.count; ++i) {
    const ChainPhase& f = params.phases[i];
    const int multiple = Format::kStripe * (f.end == LinkEnd::swiglu ? 2 : 1);
    if (f.n % multiple != 0) {
      return "columns are in multiples of " + std::to_string(multiple);
    }
    stripes += f.n / Format::kStripe;
  }
  // one CTA may do all of it, and Teller counts the messages of a group in 16 bits
  return stripes / kGroups<Format> + 2 * kMostPhases < 65536 ? "" : "there are too many columns";
}

template <typename Format>
Status launch_chain(const void* kernel, ChainParams params, void* stream) {
  const Result<int> sms = params.blocks > 0 ? Result<int>(params.blocks) : sm_count();
  if (!sms) {
    return sms.status();
  }
  const std::int64_t bytes = shape_chain<Format>(params);
  void* arguments[] = {&params};
  return launch_early(kernel,
                      {.blocks = static_cast<unsigned>(*sms),
                       .threads = kChainThreads,
                       .shared_bytes = static_cast<unsigned>(bytes),
                       .stream = stream},
                      arguments);
}

}  // namespace rafter::cuda
