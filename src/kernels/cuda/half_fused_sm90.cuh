// Softmax fused into P V for sm_90a: O = softmax(S) V, the scores S already in memory.
//   S [pairs, rows, seqlen_kv] in the dtype, scaled; V [batch, heads_kv, seqlen_kv, D]
//   O [batch, heads_q, seqlen_q, D], lse [batch, heads_q, seqlen_q]; accumulators f32
// One CTA owns 128 query rows of one (sequence, head) pair and walks the keys that they see 128 (or
// 64) at a time, with a running maximum and sum; S is read once and P never leaves the registers.
//   warpgroup 0      producer: one thread issues TMA for the boxes of S and for V, `stages` deep
//   warpgroups 1, 2  consumers, 64 rows each: scores out of shared memory into the fragment that is
//                    the next product's A operand; P = exp(…) in place; O += P V by wgmma
// Barriers in shared memory: full[stage] producer → consumers (bytes), empty[stage] consumers →
// producer (one arrival a warp). The softmax of a tile runs under the product of the one before.
// Source of the running maximum: Milakov & Gimelshein 2018, arXiv 1805.02867.
#pragma once

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/tma.cuh"
#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/scores.cuh"
#include "tiles/sm90_half_fused.h"

namespace rafter::cuda {

template <DType kDType, int kRow>
struct HalfFused {
  static constexpr tiles::Sm90HalfFusedRow kShape = tiles::kSm90HalfFusedRows[kRow];
  static constexpr int kDv = kShape.head_dim_v, kStages = kShape.stages;
  static constexpr int kTileKv = kShape.tile_kv, kWarpgroups = kShape.kWarpgroups;
  static constexpr int kScores = kTileKv / 2, kOutputs = kDv / 2;  // accumulators of a thread

  struct Control {
    std::uint64_t full[kStages], empty[kStages];
  };
  static_assert(sizeof(Control) <= tiles::Sm90HalfFusedRow::kControlBytes);

  /// Byte addresses in shared memory: a stage is S of either warpgroup, then V.
  struct Shared {
    std::uint32_t start;
    Control* control;
    __device__ std::uint32_t s_of(std::uint32_t stage, int warpgroup) const {
      return start + stage * kShape.stage_bytes() + warpgroup * kShape.score_bytes();
    }
    __device__ std::uint32_t v_of(std::uint32_t stage) const { return s_of(stage, kWarpgroups); }
  };

  __device__ static Shared carve(unsigned char* raw) {
    const std::uint32_t start = shared_address(raw);
    constexpr std::uint32_t kAlign = tiles::kSwizzleGroupBytes;
    Shared shared;
    shared.start = (start + kAlign - 1) / kAlign * kAlign;
    shared.control =
        reinterpret_cast<Control*>(raw + (shared.start - start) + kStages * kShape.stage_bytes());
    return shared;
  }

  __device__ static void init_barriers(Control& control) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&control.full[i]), 1);
      barrier_init(shared_address(&control.empty[i]), 4 * kWarpgroups);
    }
    barrier_init_fence();
  }

  /// What the CTA works on.
  struct Work {
    std::int64_t pair;  // of the wave
    std::int64_t head;
    ScoreSequence sequence;
    int first_row;    // of the sequence
    int first_local;  // the same in the buffer
    int first_tile, last_tile;
  };

  __device__ static Work find_work(const HalfFusedParams& params) {
    const int blocks = (params.wave.rows + kShape.tile_q() - 1) / kShape.tile_q();
    Work work;
    work.pair = blockIdx.x / static_cast<unsigned>(blocks);
    // The last rows first: under a causal mask they see the most.
    const int block = blocks - 1 - static_cast<int>(blockIdx.x - work.pair * blocks);
    const tiles::PairOrder::Pair place =
        pair_at(params.problem, params.wave.first_pair + work.pair);
    work.head = place.head;
    work.sequence = sequence_of(params.problem, place.batch);
    work.first_local = block * kShape.tile_q();
    work.first_row = params.wave.first_row + work.first_local;
    const int end = min(work.first_row + kShape.tile_q(), work.sequence.seqlen_q);
    const ScoreMask::Range keys = mask_of(params.problem, work.sequence).hull(work.first_row, end);
    work.first_tile = keys.first / kTileKv;
    work.last_tile = keys.size() == 0 ? work.first_tile : (keys.last + kTileKv - 1) / kTileKv;
    return work;
  }

  __device__ static void produce(const HalfFusedParams& params, const Shared& shared,
                                 const Work& work) {
    Control& control = *shared.control;
    const int v_batch =
        static_cast<int>(params.v_by_pair ? work.pair : work.sequence.batch) * params.v_batch_step;
    const int v_head =
        params.v_by_pair ? 0
                         : static_cast<int>(work.head / params.problem.group) * params.v_heads_step;
    std::uint32_t n = 0;
    for (int j = work.first_tile; j < work.last_tile; ++j, ++n) {
      const std::uint32_t stage = n % kStages;
      const std::uint32_t full = shared_address(&control.full[stage]);
      barrier_wait(shared_address(&control.empty[stage]), n / kStages % 2 ^ 1);
      barrier_arrive_expect(full, static_cast<std::uint32_t>(kShape.stage_bytes()));
#pragma unroll
      for (int w = 0; w < kWarpgroups; ++w) {
#pragma unroll
        for (int box = 0; box < kShape.score_boxes(); ++box) {
          tma_load(shared.s_of(stage, w) + box * tiles::box_bytes(64), params.s, full,
                   j * kTileKv + box * tiles::kBoxColumns, work.first_local + 64 * w, 0,
                   static_cast<int>(work.pair) * params.s_pair_step);
        }
      }
#pragma unroll
      for (int box = 0; box < tiles::boxes(kDv); ++box) {
        tma_load(shared.v_of(stage) + box * tiles::box_bytes(kTileKv), params.v, full,
                 box * tiles::kBoxColumns, j * kTileKv, v_head, v_batch);
      }
    }
  }

  /// Two rows of a thread: lane / 4 and lane / 4 + 8 of its warp's 16.
  struct Rows {
    float max[2], sum[2], rescale[2];
  };

  /// The warpgroup's scores, 64 rows of a tile, widened, in the order of wgmma's A operand: f[2 · a
  /// + e] with a = 4 · step + 2 · c + h is row half h, column 16 · step + 8 · c + 2 · (lane % 4) +
  /// e. `highest`: of either row, as they were packed.
  __device__ static void load_scores(const HalfFusedParams& params, float (&f)[kScores],
                                     std::uint32_t (&highest)[2], std::uint32_t s) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int row = thread / 32 * 16 + thread % 16;
    highest[0] = highest[1] = minus_infinities<kDType>();
#pragma unroll
    for (int step = 0; step < kTileKv / 16; ++step) {
      std::uint32_t fragment[4];
      load_matrices(fragment,
                    s + step / 4 * tiles::box_bytes(64) +
                        tiles::swizzled_chunk_bytes(64, row, 2 * (step % 4) + thread % 32 / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        highest[i % 2] = pairwise_max<kDType>(highest[i % 2], fragment[i]);
        const float2 pair = unpack<kDType>(fragment[i]);
        f[8 * step + 2 * i] = pair.x;
        f[8 * step + 2 * i + 1] = pair.y;
      }
    }
    if (params.problem.cap > 0) {
#pragma unroll
      for (float& score : f) {
        score = capped(params.problem, score);
      }
    }
  }

  __device__ static void mask_scores(const ScoreMask::Range (&keys)[2], float (&f)[kScores],
                                     int first_key) {
    const int column = first_key + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int a = i / 2, key = column + 16 * (a / 4) + 8 * (a % 4 / 2) + i % 2;
      const ScoreMask::Range& seen = keys[a % 2];
      f[i] = key < seen.first || key >= seen.last ? -INFINITY : f[i];
    }
  }

  __device__ static void highest_of(const float (&f)[kScores], float (&highest)[2]) {
    highest[0] = highest[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      highest[i / 2 % 2] = fmaxf(highest[i / 2 % 2], f[i]);
    }
  }

  /// `highest` is of the scores as they are now: a thread's own of either row.
  __device__ static void softmax(float (&f)[kScores], const float (&highest)[2], Rows& rows) {
    float max[2] = {fmaxf(rows.max[0], highest[0]), fmaxf(rows.max[1], highest[1])};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max[h] = fmaxf(max[h], __shfl_xor_sync(~0u, max[h], 1));
      max[h] = fmaxf(max[h], __shfl_xor_sync(~0u, max[h], 2));
      rows.rescale[h] = weight(rows.max[h], finite_top(max[h]));
      rows.max[h] = max[h];
    }
    const float below[2] = {-finite_top(max[0]) * kLog2E, -finite_top(max[1]) * kLog2E};
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      f[i] = exp2_approx(fmaf(f[i], kLog2E, below[i / 2 % 2]));
      sum[i % 4] += f[i];
    }
    rows.sum[0] = fmaf(rows.sum[0], rows.rescale[0], sum[0] + sum[1]);
    rows.sum[1] = fmaf(rows.sum[1], rows.rescale[1], sum[2] + sum[3]);
  }

  __device__ static void rescale_outputs(float (&o)[kOutputs], const Rows& rows) {
    if (!__any_sync(~0u, rows.rescale[0] != 1.0f || rows.rescale[1] != 1.0f)) {
      return;  // a factor of 1 changes no bit
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      o[i] *= rows.rescale[i / 2 % 2];
    }
  }

  template <typename T>
  __device__ static void store_row(const HalfFusedParams& params, const float (&o)[kOutputs], int h,
                                   float inverse, T* row) {
#pragma unroll
    for (int i = 0; i < kOutputs / 4; ++i) {
      if (8 * i >= params.head_dim_v) {
        break;
      }
      const float low = o[4 * i + 2 * h] * inverse, high = o[4 * i + 2 * h + 1] * inverse;
      if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float2*>(row + 8 * i) = {low, high};
      } else {
        *reinterpret_cast<std::uint32_t*>(row + 8 * i) = pack<kDType>(low, high);
      }
    }
  }

  __device__ static void store(const HalfFusedParams& params, const Work& work,
                               const ScoreMask::Range (&keys)[2], int row,
                               const float (&o)[kOutputs], const Rows& rows) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int query = row + 8 * h;
      if (query >= work.sequence.seqlen_q || query >= params.wave.first_row + params.wave.rows) {
        continue;
      }
      if (lane % 4 == 0) {
        store_lse(params.lse, work.sequence, work.head, query,
                  lse_of(keys[h].size(), rows.max[h], sum));
      }
      const float inverse = inverse_of(keys[h].size(), sum);
      const std::int64_t at = work.sequence.batch * params.o_stride_batch +
                              (work.sequence.row_q + query) * params.o_stride_seqlen +
                              work.head * params.o_stride_heads + 2 * (lane % 4);
      if (params.o_is_f32) {
        store_row(params, o, h, inverse, static_cast<float*>(params.o) + at);
      } else {
        store_row(params, o, h, inverse, static_cast<std::uint16_t*>(params.o) + at);
      }
    }
  }

  __device__ static void consume(const HalfFusedParams& params, const Shared& shared,
                                 const Work& work) {
    Control& control = *shared.control;
    const int warpgroup = static_cast<int>(threadIdx.x / 128) - 1;
    const int first = work.first_row + 64 * warpgroup;
    const int row = first + static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    const ScoreMask mask = mask_of(params.problem, work.sequence);
    const ScoreMask::Range keys[2] = {mask.row(row), mask.row(row + 8)};
    // Keys that all 64 rows see: the first row ends first, the last begins last.
    const ScoreMask::Range top = mask.row(first), bottom = mask.row(first + 63);
    const int whole_first = bottom.size() == 0 ? work.last_tile * kTileKv : bottom.first;
    const int whole_last = top.last;
    float o[kOutputs];
#pragma unroll
    for (float& value : o) {
      value = 0;
    }
    Rows rows{{-INFINITY, -INFINITY}, {0, 0}, {0, 0}};
    float f[kScores];
    std::uint32_t p[kScores / 2];  // written only when no product reads it
    const auto weigh = [&](int j, std::uint32_t stage) {
      std::uint32_t packed[2];
      load_scores(params, f, packed, shared.s_of(stage, warpgroup));
      const bool cut = j * kTileKv < whole_first || (j + 1) * kTileKv > whole_last;
      if (cut) {
        mask_scores(keys, f, j * kTileKv);
      }
      float highest[2];
      if (cut || params.problem.cap > 0) {  // not what was packed
        highest_of(f, highest);
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 two = unpack<kDType>(packed[h]);
          highest[h] = fmaxf(two.x, two.y);
        }
      }
      softmax(f, highest, rows);
    };
    const auto await = [&](std::uint32_t n) {
      barrier_wait(shared_address(&control.full[n % kStages]), n / kStages % 2);
    };
    const auto pack_weights = [&] {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        p[i] = pack<kDType>(f[2 * i], f[2 * i + 1]);
      }
    };
    if (work.first_tile < work.last_tile) {
      std::uint32_t n = 0;
      await(n);
      weigh(work.first_tile, n);
      pack_weights();
#pragma unroll 1
      for (int j = work.first_tile + 1; j < work.last_tile; ++j, ++n) {
        await(n + 1);
        wgmma_fence();
        issue_outputs(o, p, shared.v_of(n % kStages));
        weigh(j, (n + 1) % kStages);
        wgmma_wait<0>();
        keep_in_place(o);
        release(control.empty[n % kStages]);
        pack_weights();
        rescale_outputs(o, rows);
      }
      wgmma_fence();
      issue_outputs(o, p, shared.v_of(n % kStages));
      wgmma_wait<0>();
      keep_in_place(o);
    }
    store(params, work, keys, row, o, rows);
  }

  /// O += P V, issued and committed, not awaited.
  __device__ static void issue_outputs(float (&o)[kOutputs], const std::uint32_t (&p)[kScores / 2],
                                       std::uint32_t v) {
    // In one lane's name, so that ptxas keeps the descriptor in uniform registers.
    const std::uint64_t base = tiles::mn_major_descriptor(kTileKv) | (__shfl_sync(~0u, v, 0) >> 4);
#pragma unroll
    for (int step = 0; step < kTileKv / 16; ++step) {
      Mma<kDType, kDv>::registers(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                  base + tiles::mn_major_step_bytes(step) / 16);
    }
    wgmma_commit();
  }

  __device__ static void release(std::uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(shared_address(&barrier));
    }
  }
};

template <DType kDType, int kRow>
__global__ void __launch_bounds__(tiles::Sm90HalfFusedRow::threads(), 1)
    half_fused_sm90_kernel(const __grid_constant__ HalfFusedParams params) {
  using F = HalfFused<kDType, kRow>;
  extern __shared__ unsigned char raw[];
  const typename F::Shared shared = F::carve(raw);
  if (threadIdx.x == 0) {
    tma_prefetch(params.s);
    tma_prefetch(params.v);
    F::init_barriers(*shared.control);
  }
  __syncthreads();
  const typename F::Work work = F::find_work(params);
  if (threadIdx.x < 128) {
    give_registers_back<F::kShape.kProducerRegisters>();
    if (threadIdx.x == 0) {
      F::produce(params, shared, work);
    }
  } else {
    take_registers<F::kShape.kConsumerRegisters>();
    F::consume(params, shared, work);
  }
}

template <DType kDType, int kRow>
Status launch_half_fused_row(const HalfFusedParams& params, void* stream) {
  constexpr tiles::Sm90HalfFusedRow kShape = tiles::kSm90HalfFusedRows[kRow];
  const std::int64_t blocks =
      params.wave.pairs * ((params.wave.rows + kShape.tile_q() - 1) / kShape.tile_q());
  void* arguments[] = {const_cast<HalfFusedParams*>(&params)};
  return launch(reinterpret_cast<const void*>(&half_fused_sm90_kernel<kDType, kRow>),
                {.blocks = static_cast<unsigned>(blocks),
                 .threads = static_cast<unsigned>(kShape.threads()),
                 .shared_bytes = static_cast<unsigned>(kShape.shared_bytes()),
                 .stream = stream},
                arguments);
}

template <DType kDType>
Status launch_half_fused(const HalfFusedParams& params, void* stream) {
  switch (tiles::sm90_half_fused_row_for(params.head_dim_v)) {
    case 0:
      return launch_half_fused_row<kDType, 0>(params, stream);
    case 1:
      return launch_half_fused_row<kDType, 1>(params, stream);
    default:
      return launch_half_fused_row<kDType, 2>(params, stream);
  }
}

}  // namespace rafter::cuda
