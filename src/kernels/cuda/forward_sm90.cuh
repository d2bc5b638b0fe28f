// Forward attention for sm_90a: O = softmax(softmax_scale · QKᵀ + mask) V, bf16 or f16 in, f32
// inside.
//   Q, O [batch, heads_q, seqlen_q, D]   K, V [batch, heads_kv, seqlen_kv, D]
//   lse [batch, heads_q, seqlen_q]       any strides; packed sequences by cu_seqlens
// One CTA per SM takes query tiles of one head (64 queries per consumer warpgroup) and walks the
// keys that they see from the last tile to the first.
//   warpgroup 0   producer: one thread issues TMA for K[last], Q, V[last], K[last − 1], … into
//                 `stages` slots; the warp picks the next query tile
//   warpgroups 1+ consumers: S = Q K[j]ᵀ | O += P V[j + 1] in flight; P = exp2(…) under the second
// Barriers, all in shared memory: k_full, v_full[stage] and q_full[warpgroup] producer → consumers
// (bytes); k_empty, v_empty[stage] (one arrival per consumer warp) and q_empty[warpgroup] back.
// Named barriers 1 … order the consumers' matmuls where the tuning row says so.
#pragma once

#include <type_traits>

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/tma.cuh"
#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/foreign_rows.cuh"
#include "kernels/cuda/forward_sm90.h"
#include "kernels/cuda/forward_sm90_tiles.cuh"
#include "tiles/sm90_descriptor.h"

namespace rafter::cuda {

template <int kWarpgroups, int kStages>
struct ForwardControl {
  std::uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  std::uint64_t q_full[kWarpgroups], q_empty[kWarpgroups];
  TileWork work[kWarpgroups][2];  // alternating: one is read while the next is written
  TileWork loading;               // the producer's own: its registers are few
};

template <DType kDType, int kRow>
struct Forward {
  static constexpr tiles::Sm90ForwardRow kShape = tiles::kSm90ForwardRows[kRow];
  static constexpr int kD = kShape.head_dim, kDv = kShape.head_dim_v;
  static constexpr int kTileQ = kShape.tile_q(), kTileKv = kShape.tile_kv;
  static constexpr int kWarpgroups = kShape.warpgroups, kStages = kShape.stages;
  static constexpr int kScores = kTileKv / 2, kOutputs = kDv / 2;  // accumulators of a thread
  using Control = ForwardControl<kWarpgroups, kStages>;
  static_assert(sizeof(Control) <= tiles::Sm90ForwardRow::kControlBytes);

  /// Byte addresses in shared memory.
  struct Shared {
    std::uint32_t q, k, v, o;  // q, o + warpgroup · bytes; k, v + slot · bytes
    Control* control;
    __device__ std::uint32_t q_of(int w) const { return q + w * kShape.q_bytes(); }
    __device__ std::uint32_t o_of(int w) const { return o + w * kShape.o_bytes(); }
    __device__ std::uint32_t k_of(std::uint32_t slot) const { return k + slot * kShape.k_bytes(); }
    __device__ std::uint32_t v_of(std::uint32_t slot) const { return v + slot * kShape.v_bytes(); }
  };

  __device__ static Shared carve(unsigned char* raw) {
    const std::uint32_t start = shared_address(raw);
    constexpr std::uint32_t kAlign = tiles::kSwizzleGroupBytes;
    const std::uint32_t aligned = (start + kAlign - 1) / kAlign * kAlign;
    Shared shared;
    shared.q = aligned;
    shared.k = shared.q + kWarpgroups * kShape.q_bytes();
    shared.v = shared.k + kStages * kShape.k_bytes();
    shared.o = shared.v + kStages * kShape.v_bytes();
    const std::uint32_t end = shared.o + kWarpgroups * kShape.o_bytes();
    shared.control = reinterpret_cast<Control*>(raw + (end - start));
    return shared;
  }

  __device__ static void init_barriers(Control& control) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&control.k_full[i]), 1);
      barrier_init(shared_address(&control.v_full[i]), 1);
      barrier_init(shared_address(&control.k_empty[i]), 4 * kWarpgroups);
      barrier_init(shared_address(&control.v_empty[i]), 4 * kWarpgroups);
    }
    for (int w = 0; w < kWarpgroups; ++w) {
      barrier_init(shared_address(&control.q_full[w]), 1);
      barrier_init(shared_address(&control.q_empty[w]), 4);
    }
    barrier_init_fence();
  }

  // ---- producer -------------------------------------------------------------------------------

  __device__ static void load_tile(std::uint32_t destination, const CUtensorMap& map,
                                   std::uint32_t barrier, int columns, int rows, int row, int head,
                                   int batch) {
    barrier_arrive_expect(barrier, static_cast<std::uint32_t>(tiles::tile_bytes(rows, columns)));
#pragma unroll
    for (int box = 0; box < tiles::boxes(columns); ++box) {
      tma_load(destination + box * tiles::box_bytes(rows), map, barrier, box * tiles::kBoxColumns,
               row, head, batch);
    }
  }

  __device__ static void produce(const ForwardParams& params, const Shared& shared) {
    Control& control = *shared.control;
    const bool leader = threadIdx.x == 0;
    std::uint32_t n = 0;         // key tiles that went through the rings
    std::uint32_t q_parity = 1;  // slots are empty at first
    TileFinder<kTileQ> finder;
    int tile = static_cast<int>(blockIdx.x);
    for (;; q_parity ^= 1) {
      {
        const TileWork work = finder.find(params, tile);
        if (work.batch < 0) {
          break;
        }
        if (leader) {
          control.loading = work;
        }
      }
      tile += static_cast<int>(gridDim.x);
      if (leader) {
        if (params.counter != nullptr) {
          tile = static_cast<int>(atomicAdd(params.counter, 1u) + gridDim.x);
        }
        load_work(params, shared, n, q_parity);
      }
      tile = __shfl_sync(~0u, tile, 0);
    }
    if (leader) {
      for (int w = 0; w < kWarpgroups; ++w) {
        barrier_wait(shared_address(&control.q_empty[w]), q_parity);
        control.work[w][q_parity ^ 1] = TileWork{};
        barrier_arrive(shared_address(&control.q_full[w]));
      }
    }
  }

  __device__ static void load_work(const ForwardParams& params, const Shared& shared,
                                   std::uint32_t& n, std::uint32_t q_parity) {
    Control& control = *shared.control;
    const TileWork& work = control.loading;
    const int2 range = key_tiles<kTileQ, kTileKv>(params, work);
    const int batch = params.cu_seqlens_q.data == nullptr ? work.batch : 0;
    const int head_kv = work.head / params.group;
    // Key tile j goes through the rings as number n + (range.y − 1 − j).
    const std::uint32_t first = n + static_cast<std::uint32_t>(range.y - 1);
    const auto load_k = [&](int j) {
      const std::uint32_t i = first - static_cast<std::uint32_t>(j);
      barrier_wait(shared_address(&control.k_empty[i % kStages]), i / kStages % 2 ^ 1);
      load_tile(shared.k_of(i % kStages), params.k, shared_address(&control.k_full[i % kStages]),
                kD, kTileKv, work.row_kv + j * kTileKv, head_kv * params.k_heads_step,
                batch * params.k_batch_step);
    };
    const auto load_v = [&](int j) {
      const std::uint32_t i = first - static_cast<std::uint32_t>(j);
      barrier_wait(shared_address(&control.v_empty[i % kStages]), i / kStages % 2 ^ 1);
      load_tile(shared.v_of(i % kStages), params.v, shared_address(&control.v_full[i % kStages]),
                kDv, kTileKv, work.row_kv + j * kTileKv, head_kv * params.v_heads_step,
                batch * params.v_batch_step);
    };
    const bool any = range.x < range.y;
    if (any) {
      load_k(range.y - 1);
    }
#pragma unroll 1
    for (int w = 0; w < kWarpgroups; ++w) {
      barrier_wait(shared_address(&control.q_empty[w]), q_parity);
      control.work[w][q_parity ^ 1] = work;
      load_tile(shared.q_of(w), params.q, shared_address(&control.q_full[w]), kD, 64,
                work.row_q + work.first_query + 64 * w, work.head * params.q_heads_step,
                batch * params.q_batch_step);
    }
    if (any) {
#pragma unroll 1
      for (int j = range.y - 2; j >= range.x; --j) {
        load_k(j);
        load_v(j + 1);
      }
      load_v(range.x);
      n = first - static_cast<std::uint32_t>(range.x) + 1;
    }
  }

  // ---- consumers ------------------------------------------------------------------------------

  /// State of one query row pair (rows lane/4 and lane/4 + 8 of a warp's 16) of a thread.
  struct Rows {
    float max[2], sum[2], rescale[2];
  };

  /// The changing half of a descriptor: address and leading offset. Computed once per tile, in one
  /// lane's name so that ptxas keeps it in a uniform register.
  __device__ static std::uint32_t low_half(std::uint64_t layout, std::uint32_t address) {
    return __shfl_sync(~0u, static_cast<std::uint32_t>(layout) | (address >> 4), 0);
  }
  __device__ static std::uint64_t with_high_half(std::uint64_t layout, std::uint32_t low) {
    return (layout & 0xffffffff00000000) | low;
  }
  static constexpr std::uint64_t kKMajor = tiles::k_major_descriptor();
  static constexpr std::uint64_t kMnMajor = tiles::mn_major_descriptor(kTileKv);

  /// Q of one warpgroup as wgmma's A operand: a descriptor, or fragments of one k16 step each.
  struct SharedQueries {
    std::uint32_t low;
    __device__ void load(std::uint32_t q) { low = low_half(kKMajor, q); }
    template <bool kAdd>
    __device__ void multiply(float (&s)[kScores], int step, std::uint64_t b) const {
      Mma<kDType, kTileKv>::template shared<kAdd>(
          s, with_high_half(kKMajor, low + tiles::k_major_step_bytes(64, step) / 16), b);
    }
  };
  struct RegisterQueries {
    std::uint32_t fragments[kD / 16][4];
    __device__ void load(std::uint32_t q) {
      const int thread = static_cast<int>(threadIdx.x % 128);
      const int row = thread / 32 * 16 + thread % 16;
#pragma unroll
      for (int step = 0; step < kD / 16; ++step) {
        load_matrices(fragments[step],
                      q + tiles::swizzled_chunk_bytes(64, row, 2 * step + thread % 32 / 16));
      }
    }
    template <bool kAdd>
    __device__ void multiply(float (&s)[kScores], int step, std::uint64_t b) const {
      const std::uint32_t(&a)[4] = fragments[step];
      Mma<kDType, kTileKv>::template registers_k_major<kAdd>(s, a[0], a[1], a[2], a[3], b);
    }
  };
  using Queries = std::conditional_t<kShape.queries_in_registers, RegisterQueries, SharedQueries>;

  /// S = Q Kᵀ, issued and committed, not awaited. k: low half of its descriptor.
  __device__ static void issue_scores(float (&s)[kScores], const Queries& q, std::uint32_t k) {
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const std::uint64_t b =
          with_high_half(kKMajor, k + tiles::k_major_step_bytes(kTileKv, step) / 16);
      if (step == 0) {
        q.template multiply<false>(s, step, b);
      } else {
        q.template multiply<true>(s, step, b);
      }
    }
    wgmma_commit();
  }

  /// O += P V, issued and committed, not awaited. v: low half.
  __device__ static void issue_outputs(float (&o)[kOutputs], const std::uint32_t (&p)[kScores / 2],
                                       std::uint32_t v) {
#pragma unroll
    for (int step = 0; step < kTileKv / 16; ++step) {
      Mma<kDType, kDv>::registers(
          o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
          with_high_half(kMnMajor, v + tiles::mn_major_step_bytes(step) / 16));
    }
    wgmma_commit();
  }

  /// Softcap, or a scale that is not positive: raw scores become scores in log2 units.
  __device__ static void transform_scores(const ForwardParams& params, float (&s)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[i] *= params.transform_scale;
      if (params.transform_cap > 0) {  // tanh(x) = 1 − 2 / (e^2x + 1)
        s[i] = params.transform_cap * (1.0f - __fdividef(2.0f, exp2_approx(s[i]) + 1.0f));
      }
    }
  }

  __device__ static void mask_scores(const ForwardParams& params, const TileWork& work,
                                     float (&s)[kScores], int query, int first_key) {
    const int column = first_key + 2 * static_cast<int>(threadIdx.x % 4);
    const Mask32 mask = mask_of(params, work);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Mask32::Range keys = mask.row(query + 8 * h);
      const int first = keys.first - column;
      const int last = keys.last - column;
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = 8 * i + e;
          float& score = s[4 * i + 2 * h + e];
          score = key < first || key >= last ? -INFINITY : score;
        }
      }
    }
  }

  /// Scores become probabilities relative to the running maximum; the sum follows. Both rows of the
  /// thread advance together: the chains of one hide the latencies of the other.
  __device__ static void softmax(float (&s)[kScores], Rows& rows, float scale) {
    float max[2] = {rows.max[0], rows.max[1]};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      max[i / 2 % 2] = fmaxf(max[i / 2 % 2], fmaxf(s[i], s[i + 1]));
    }
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      const float other[2] = {__shfl_xor_sync(~0u, max[0], lanes),
                              __shfl_xor_sync(~0u, max[1], lanes)};
      max[0] = fmaxf(max[0], other[0]);
      max[1] = fmaxf(max[1], other[1]);
    }
    float offset[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float finite = max[h] == -INFINITY ? 0.0f : max[h];  // a row that sees nothing yet
      rows.rescale[h] = exp2_approx((rows.max[h] - finite) * scale);
      rows.max[h] = max[h];
      offset[h] = finite * scale;
    }
    // The sums start from the last exponential: additions in between would hold up the others.
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[i] = exp2_approx(fmaf(s[i], scale, -offset[i / 2 % 2]));
    }
#pragma unroll
    for (int i = kScores - 1; i >= 0; --i) {
      sum[i % 4] += s[i];
    }
    rows.sum[0] = fmaf(rows.sum[0], rows.rescale[0], sum[0] + sum[1]);
    rows.sum[1] = fmaf(rows.sum[1], rows.rescale[1], sum[2] + sum[3]);
  }

  __device__ static void pack_probabilities(std::uint32_t (&p)[kScores / 2],
                                            const float (&s)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      p[i] = pack<kDType>(s[2 * i], s[2 * i + 1]);
    }
  }

  __device__ static void rescale_outputs(float (&o)[kOutputs], const Rows& rows) {
    // Most tiles raise no maximum, and a factor of 1 changes no bit.
    if (!__any_sync(~0u, rows.rescale[0] != 1.0f || rows.rescale[1] != 1.0f)) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kOutputs / 4; ++i) {
      o[4 * i] *= rows.rescale[0];
      o[4 * i + 1] *= rows.rescale[0];
      o[4 * i + 2] *= rows.rescale[1];
      o[4 * i + 3] *= rows.rescale[1];
    }
  }

  /// Two neighbouring elements of O.
  __device__ static void store_pair(std::uint16_t* o, bool in_pairs, float low, float high) {
    const std::uint32_t pair = pack<kDType>(low, high);
    if (in_pairs) {
      *reinterpret_cast<std::uint32_t*>(o) = pair;
    } else {
      o[0] = static_cast<std::uint16_t>(pair);
      o[1] = static_cast<std::uint16_t>(pair >> 16);
    }
  }
  __device__ static void store_pair(float* o, bool, float low, float high) {
    o[0] = low;
    o[1] = high;
  }

  /// Row h of the thread. The usual case has no branches: each would wait for the store before it.
  template <typename T>
  __device__ static void store_row(const ForwardParams& params, const float (&o)[kOutputs], int h,
                                   float inverse, std::int64_t at) {
    T* const row = static_cast<T*>(params.o) + at;
    if (params.head_dim_v == kDv && params.o_in_pairs) {
#pragma unroll
      for (int i = 0; i < kOutputs / 4; ++i) {
        store_pair(row + 8 * i, true, o[4 * i + 2 * h] * inverse, o[4 * i + 2 * h + 1] * inverse);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kOutputs / 4; ++i) {
      if (8 * i < params.head_dim_v) {
        store_pair(row + 8 * i, params.o_in_pairs, o[4 * i + 2 * h] * inverse,
                   o[4 * i + 2 * h + 1] * inverse);
      }
    }
  }

  /// All rows of the warpgroup through its buffer in shared memory.
  __device__ static void copy_out(const ForwardParams& params, const Shared& shared,
                                  const TileWork& work, int warpgroup, const float (&o)[kOutputs],
                                  const float (&inverse)[2]) {
    const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
    const std::uint32_t buffer = shared.o_of(warpgroup);
    if (thread == 0) {
      tma_wait_stores_read();  // of the tile before
    }
    named_barrier_sync(1 + kWarpgroups + warpgroup, 128);
    const int row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kOutputs / 4; i += 2) {
      store_matrices(buffer + tiles::swizzled_chunk_bytes(64, row, i + lane / 16),
                     pack<kDType>(o[4 * i] * inverse[0], o[4 * i + 1] * inverse[0]),
                     pack<kDType>(o[4 * i + 2] * inverse[1], o[4 * i + 3] * inverse[1]),
                     pack<kDType>(o[4 * i + 4] * inverse[0], o[4 * i + 5] * inverse[0]),
                     pack<kDType>(o[4 * i + 6] * inverse[1], o[4 * i + 7] * inverse[1]));
    }
    fence_shared_to_async();
    named_barrier_sync(1 + kWarpgroups + warpgroup, 128);
    if (thread == 0) {
      const int batch = params.cu_seqlens_q.data != nullptr ? 0 : work.batch;
#pragma unroll
      for (int box = 0; box < tiles::boxes(kDv); ++box) {
        tma_store(params.o_map, buffer + box * tiles::box_bytes(64), box * tiles::kBoxColumns,
                  work.row_q + work.first_query + 64 * warpgroup, work.head * params.o_heads_step,
                  batch * params.o_batch_step);
      }
      tma_commit_stores();
    }
  }

  __device__ static void store(const ForwardParams& params, const Shared& shared,
                               const TileWork& work, int warpgroup, int row,
                               const float (&o)[kOutputs], const Rows& rows) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const bool packed = params.cu_seqlens_q.data != nullptr;
    const std::int64_t batch = packed ? 0 : work.batch;
    const int first = work.first_query + 64 * warpgroup;
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const bool empty = sum == 0;  // no key seen; a NaN is not empty
      inverse[h] = empty ? 0.0f : __fdividef(1.0f, sum);
      const int query = first + row + 8 * h;
      if (params.lse != nullptr && lane % 4 == 0 && query < work.seqlen_q) {
        constexpr float kLn2 = 0.693147180559945309f;
        const std::int64_t q = std::int64_t{work.row_q} + query;
        params.lse[batch * params.lse_stride_batch + work.head * params.lse_stride_heads +
                   q * params.lse_stride_seqlen] =
            empty ? -INFINITY : rows.max[h] * params.scale_log2 * kLn2 + __logf(sum);
      }
    }
    if constexpr (kShape.store_by_copy) {
      // The copy engine leaves out rows beyond the tensor, not those of the next sequence.
      if (params.o_by_copy && (!packed || first + 64 <= work.seqlen_q)) {
        copy_out(params, shared, work, warpgroup, o, inverse);
        return;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = first + row + 8 * h;
      if (query >= work.seqlen_q) {
        continue;
      }
      const std::int64_t at = batch * params.o_stride_batch +
                              (std::int64_t{work.row_q} + query) * params.o_stride_seqlen +
                              work.head * params.o_stride_heads + 2 * (lane % 4);
      if (params.o_is_f32) {
        store_row<float>(params, o, h, inverse[h], at);
      } else {
        store_row<std::uint16_t>(params, o, h, inverse[h], at);
      }
    }
  }

  /// Releases once `sum` (≥ 0 or NaN) is known. ptxas moves a wait for wgmma above arithmetic that
  /// does not depend on it, and the softmax would not run under the matmul in flight; it keeps the
  /// order of the wait and an arrival, and the address of this arrival needs the sum.
  __device__ static void release_after(std::uint64_t& barrier, float sum) {
    const std::uint32_t address = shared_address(&barrier) + (sum < 0 ? 4u : 0u);
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(address);
    }
  }

  __device__ static void release(std::uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(shared_address(&barrier));
    }
  }

  __device__ static void consume(const ForwardParams& params, const Shared& shared) {
    Control& control = *shared.control;
    const int warpgroup = static_cast<int>(threadIdx.x / 128) - 1;
    const int row = static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    if (kShape.ordered && warpgroup == kWarpgroups - 1) {
      named_barrier_arrive(1, 256);  // the first consumer may start
    }
    std::uint32_t n = 0;
    for (std::uint32_t q_parity = 0;; q_parity ^= 1) {
      barrier_wait(shared_address(&control.q_full[warpgroup]), q_parity);
      const TileWork& work = control.work[warpgroup][q_parity];
      if (work.batch < 0) {
        break;
      }
      const int2 range = key_tiles<kTileQ, kTileKv>(params, work);
      float o[kOutputs];
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        o[i] = 0;
      }
      Rows rows{{-INFINITY, -INFINITY}, {0, 0}, {0, 0}};
      if (range.x < range.y) {
        attend(params, shared, work, range, warpgroup, row, n, o, rows);
      } else {
        release(control.q_empty[warpgroup]);
      }
      store(params, shared, work, warpgroup, row, o, rows);
    }
  }

  /// Key tiles that every query of the warpgroup sees whole, at most [range.x, range.y); they need
  /// no mask. Empty (range.y, range.y) when scores must be transformed.
  __device__ static int2 interior_tiles(const ForwardParams& params, const TileWork& work,
                                        int2 range, int warpgroup) {
    const Mask32 mask = mask_of(params, work);
    const int first = work.first_query + 64 * warpgroup;
    // The first row ends first, the last row begins last.
    const Mask32::Range last_row = mask.row(first + 63);
    const int begin = max(range.x, (last_row.first + kTileKv - 1) / kTileKv);
    const int end = min(range.y, mask.row(first).last / kTileKv);
    const bool none = params.transform || last_row.size() == 0 || begin >= end;
    return none ? int2{range.y, range.y} : int2{begin, end};
  }

  /// O and the row statistics of one query tile that sees the key tiles [range.x, range.y).
  /// `n` counts the tiles that went through the rings; K and V of tile n share slot and parity.
  __device__ __forceinline__ static void attend(const ForwardParams& params, const Shared& shared,
                                                const TileWork& work, int2 range, int warpgroup,
                                                int row, std::uint32_t& n, float (&o)[kOutputs],
                                                Rows& rows) {
    Control& control = *shared.control;
    const int2 interior = interior_tiles(params, work, range, warpgroup);
    Queries q;
    q.load(shared.q_of(warpgroup));
    if constexpr (kShape.queries_in_registers) {
      release(control.q_empty[warpgroup]);
    }
    float s[kScores];
    std::uint32_t p[kScores / 2];
    const auto finish_edge = [&](int j) {
      if (params.transform) {
        transform_scores(params, s);
      }
      mask_scores(params, work, s, work.first_query + 64 * warpgroup + row, j * kTileKv);
    };
    const auto await_keys = [&](std::uint32_t i) {
      barrier_wait(shared_address(&control.k_full[i % kStages]), i / kStages % 2);
    };
    const auto await_values = [&](std::uint32_t i) {
      barrier_wait(shared_address(&control.v_full[i % kStages]), i / kStages % 2);
    };
    const auto keys_ready = [&](std::uint32_t i) {
      return barrier_test(shared_address(&control.k_full[i % kStages]), i / kStages % 2);
    };
    const auto values_ready = [&](std::uint32_t i) {
      return barrier_test(shared_address(&control.v_full[i % kStages]), i / kStages % 2);
    };

    int j = range.y - 1;
    await_keys(n);
    const std::uint32_t k_first = low_half(kKMajor, shared.k_of(n % kStages));
    wgmma_fence();
    issue_scores(s, q, k_first);
    wgmma_wait<0>();
    keep_in_place(s);
    release(control.k_empty[n % kStages]);
    // Rows behind the keys of this sequence are foreign where the tensor does not end with it; only
    // this tile can hold some.
    if ((params.cu_seqlens_kv.data != nullptr || params.seqused_kv.data != nullptr) &&
        range.y * kTileKv > work.seqlen_kv) {
      await_values(n);
      clear_foreign_rows<kTileKv, kDv>(shared.v_of(n % kStages), work.seqlen_kv - j * kTileKv,
                                       1 + kWarpgroups + warpgroup);
    }
    if (j < interior.x || j >= interior.y) {
      finish_edge(j);
    }
    softmax(s, rows, params.scale_log2);
    pack_probabilities(p, s);
    std::uint32_t v = low_half(kMnMajor, shared.v_of(n % kStages));
    std::uint32_t k = low_half(kKMajor, shared.k_of((n + 1) % kStages));

    bool ready = false;  // K and V of the next step were seen to have arrived
    // The code of interior tiles has no branch between the two waits.
    const auto step = [&](auto edge) {
      if (!ready) {
        await_keys(n + 1);
        await_values(n);
      }
      if constexpr (kShape.ordered) {
        named_barrier_sync(1 + warpgroup, 256);
      }
      wgmma_fence();
      issue_scores(s, q, k);
      issue_outputs(o, p, v);
      if constexpr (kShape.ordered) {
        named_barrier_arrive(1 + (warpgroup + 1) % kWarpgroups, 256);
      }
      wgmma_wait<1>();
      keep_in_place(s);
      if constexpr (edge) {
        finish_edge(j);
      }
      softmax(s, rows, params.scale_log2);
      keep_in_place(s);
      release_after(control.k_empty[(n + 1) % kStages], rows.sum[0] + rows.sum[1]);
      k = low_half(kKMajor, shared.k_of((n + 2) % kStages));
      v = low_half(kMnMajor, shared.v_of((n + 1) % kStages));
      ready = keys_ready(n + 2) & values_ready(n + 1);  // both are asked: no branch
      wgmma_wait<0>();
      keep_in_place(o);
      release(control.v_empty[n % kStages]);
      pack_probabilities(p, s);
      rescale_outputs(o, rows);
      ++n;
    };
    --j;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {  // edges on the right, interior, edges on the left
      const int edges_end = pass == 0 ? max(range.x, interior.y) : range.x;
#pragma unroll 1
      for (; j >= edges_end; --j) {
        step(std::true_type{});
      }
#pragma unroll 1
      for (; j >= interior.x; --j) {
        step(std::false_type{});
      }
    }
    if constexpr (!kShape.queries_in_registers) {
      release(control.q_empty[warpgroup]);
    }
    await_values(n);
    wgmma_fence();
    issue_outputs(o, p, v);
    wgmma_wait<0>();
    keep_in_place(o);
    release(control.v_empty[n % kStages]);
    ++n;
  }
};

template <DType kDType, int kRow>
__global__ void __launch_bounds__(tiles::kSm90ForwardRows[kRow].threads(), 1)
    forward_sm90_kernel(const __grid_constant__ ForwardParams params) {
  using F = Forward<kDType, kRow>;
  extern __shared__ unsigned char raw[];
  const typename F::Shared shared = F::carve(raw);
  if (threadIdx.x == 0) {
    tma_prefetch(params.q);
    tma_prefetch(params.k);
    tma_prefetch(params.v);
    F::init_barriers(*shared.control);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers_back<F::kShape.producer_registers>();
    if (threadIdx.x < 32) {
      F::produce(params, shared);
    }
  } else {
    take_registers<F::kShape.consumer_registers>();
    F::consume(params, shared);
    if (F::kShape.store_by_copy && threadIdx.x % 128 == 0) {
      tma_wait_stores_read();  // shared memory must outlive the copies
    }
  }
}

template <DType kDType, int kRow>
Status launch_forward_sm90(const ForwardParams& params, unsigned blocks, void* stream) {
  constexpr tiles::Sm90ForwardRow kShape = tiles::kSm90ForwardRows[kRow];
  void* arguments[] = {const_cast<ForwardParams*>(&params)};
  return launch(reinterpret_cast<const void*>(&forward_sm90_kernel<kDType, kRow>),
                {.blocks = blocks,
                 .threads = static_cast<unsigned>(kShape.threads()),
                 .shared_bytes = static_cast<unsigned>(kShape.shared_bytes()),
                 .stream = stream},
                arguments);
}

}  // namespace rafter::cuda
