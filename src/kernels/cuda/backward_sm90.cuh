// Backward attention for sm_90a, deterministic: scores are computed again from Q, K and lse; bf16
// or f16 in, f32 inside.
//   Q, O, dO, dQ [batch, heads_q, seqlen_q, D]   K, V, dK, dV [batch, heads_kv, seqlen_kv, D]
//   lse [batch, heads_q, seqlen_q]               any strides; packed sequences by cu_seqlens
// A CTA per SM takes items: tile_kv keys of a KV head. It walks the query tiles that see them, of
// all query heads of the group, from the last to the first:
//   Sᵀ = K Qᵀ | dPᵀ = V dOᵀ | P = exp2(S − lse), dS = P ∘ (dP − delta) | dV += Pᵀ dO | dK += dSᵀ Q
//   | dQ = dS K
//   warpgroup 0, warp 0       producer: draws the items; TMA for K, V, then Q and lse, dO and delta
//   warpgroup 0, warps 1 (2)  add dQ of a tile to its sums in memory by the copy engine, in turn:
//                             after the item of the keys before, which was drawn before, so that no
//                             item waits for one that has not begun
//   warpgroups 1, 2           consumers; dK and dV in registers
// Barriers, in shared memory: k_full, v_full, q_full[stage], d_o_full[stage] producer → consumers
// (bytes); kv_empty, q_empty, d_o_empty back; ds_full[step % 2] among the consumers;
// dq_full[warpgroup, buffer] consumers → the warp that adds, dq_empty back.
// Named barriers: 1 all consumers, 2 and 3 one warpgroup.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/tma.cuh"
#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/backward_sm90.h"
#include "kernels/cuda/backward_sm90_copies.cuh"
#include "kernels/cuda/backward_sm90_store.cuh"
#include "kernels/cuda/foreign_rows.cuh"
#include "kernels/cuda/scores.cuh"
#include "tiles/sm90_descriptor.h"

namespace rafter::cuda {

/// kSoftcap: scores go through softcap · tanh(score / softcap).
template <DType kDType, int kRow, bool kSoftcap>
struct Backward : BackwardStore<kDType, kRow> {
  using Store = BackwardStore<kDType, kRow>;
  using Store::kColumns;
  using Store::key_shift;
  using Store::kShape;
  using Store::kSplitsHeadDim;
  using Store::kSums;
  using Store::row_shift;
  using Store::warpgroup;
  static constexpr int kD = kShape.head_dim;
  static constexpr int kTileQ = kShape.tile_q, kTileKv = kShape.tile_kv;
  static constexpr int kQStages = kShape.q_stages, kDoStages = kShape.d_o_stages;
  static constexpr int kQueries = kSplitsHeadDim ? kTileQ / 2 : kTileQ;  // of S of a warpgroup
  static constexpr int kScores = kQueries / 2;                           // accumulators of a thread
  static constexpr int kPartsOfWarpgroup = kShape.parts_of_warpgroup();
  static constexpr int kDq = kPartsOfWarpgroup * 32;
  static constexpr int kDqBuffers = kShape.dq_buffers;
  using Shared = BackwardShared<kRow>;

  __device__ static int2 query_tiles(const BackwardParams& params, const BackwardItem& item) {
    return query_tiles_of<kTileQ, kTileKv>(params, item);
  }

  /// The changing half of a descriptor: address and leading offset, in one lane's name so that
  /// ptxas keeps it in a uniform register.
  __device__ static std::uint32_t low_half(std::uint64_t layout, std::uint32_t address) {
    return __shfl_sync(~0u, static_cast<std::uint32_t>(layout) | (address >> 4), 0);
  }
  __device__ static std::uint64_t with_high_half(std::uint64_t layout, std::uint32_t low) {
    return (layout & 0xffffffff00000000) | low;
  }
  static constexpr std::uint64_t kKMajor = tiles::k_major_descriptor();
  static constexpr std::uint64_t kMnMajorQ = tiles::mn_major_descriptor(kTileQ);    // Q, dO
  static constexpr std::uint64_t kMnMajorKv = tiles::mn_major_descriptor(kTileKv);  // K, scores

  /// Sᵀ = K Qᵀ or dPᵀ = V dOᵀ, issued and committed. a, b: addresses of the first rows.
  __device__ static void issue_scores(float (&s)[kScores], std::uint32_t a, std::uint32_t b) {
    const std::uint32_t a_low = low_half(kKMajor, a), b_low = low_half(kKMajor, b);
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const std::uint64_t a_step =
          with_high_half(kKMajor, a_low + tiles::k_major_step_bytes(kTileKv, step) / 16);
      const std::uint64_t b_step =
          with_high_half(kKMajor, b_low + tiles::k_major_step_bytes(kTileQ, step) / 16);
      if (step == 0) {
        Mma<kDType, kQueries>::template shared<false>(s, a_step, b_step);
      } else {
        Mma<kDType, kQueries>::template shared<true>(s, a_step, b_step);
      }
    }
    wgmma_commit();
  }

  /// dV += Pᵀ dO or dK += dSᵀ Q with Pᵀ, dSᵀ in registers, issued and committed.
  __device__ static void issue_sums(float (&sums)[kSums], const std::uint32_t (&p)[kScores / 2],
                                    std::uint32_t b) {
    const std::uint32_t b_low = low_half(kMnMajorQ, b);
#pragma unroll
    for (int step = 0; step < kTileQ / 16; ++step) {
      Mma<kDType, kColumns>::registers(
          sums, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
          with_high_half(kMnMajorQ, b_low + tiles::mn_major_step_bytes(step) / 16));
    }
    wgmma_commit();
  }
  /// The same with Pᵀ, dSᵀ in shared memory; b: of the warpgroup's columns.
  __device__ static void issue_sums(float (&sums)[kSums], std::uint32_t p, std::uint32_t b) {
    const std::uint32_t a_low = low_half(kKMajor, p), b_low = low_half(kMnMajorQ, b);
#pragma unroll
    for (int step = 0; step < kTileQ / 16; ++step) {
      Mma<kDType, kColumns>::template shared<true, false, true>(
          sums, with_high_half(kKMajor, a_low + tiles::k_major_step_bytes(kTileKv, step) / 16),
          with_high_half(kMnMajorQ, b_low + tiles::mn_major_step_bytes(step) / 16));
    }
    wgmma_commit();
  }

  /// dQ = dS K of the warpgroup's rows (head_dim 64) or columns, issued and committed.
  __device__ static void issue_dq(float (&dq)[kDq], std::uint32_t ds, std::uint32_t k,
                                  int warpgroup) {
    constexpr bool kRows = kTileQ > 64;
    const std::uint32_t a = kRows ? ds + warpgroup * tiles::box_bytes(kTileKv) : ds;
    const std::uint32_t b =
        kRows ? k : k + warpgroup * kPartsOfWarpgroup * tiles::box_bytes(kTileKv);
    const std::uint32_t a_low = low_half(kMnMajorKv, a), b_low = low_half(kMnMajorKv, b);
#pragma unroll
    for (int step = 0; step < kTileKv / 16; ++step) {
      const std::uint64_t a_step =
          with_high_half(kMnMajorKv, a_low + tiles::mn_major_step_bytes(step) / 16);
      const std::uint64_t b_step =
          with_high_half(kMnMajorKv, b_low + tiles::mn_major_step_bytes(step) / 16);
      if (step == 0) {
        Mma<kDType, 2 * kDq>::template shared<false, true, true>(dq, a_step, b_step);
      } else {
        Mma<kDType, 2 * kDq>::template shared<true, true, true>(dq, a_step, b_step);
      }
    }
    wgmma_commit();
  }

  /// The thread's first column in a query tile.
  __device__ static int query_shift() {
    return (kSplitsHeadDim ? kQueries * warpgroup() : 0) + 2 * static_cast<int>(threadIdx.x % 4);
  }

  /// A walk over the query tiles of an item, for each query head of the group. What does not change
  /// is in shared memory: registers are few.
  struct Walk {
    std::uint32_t fixed;  // address of: tiles [x, y); [z, w): every query sees every key of the
                          // warpgroup
    int left;             // tiles, of all heads
    int tile;
    __device__ Walk(const BackwardParams& params, const Shared& shared, const BackwardItem& item)
        : fixed(shared.walk(warpgroup())) {
      const int2 range = query_tiles(params, item);
      int2 interior{0, 0};
      const ScoreMask rows = mask_of_item(params, item).transposed(item.seqlen_q);
      const int first_key = item.first_key + key_shift();
      const ScoreMask::Range of_last = rows.row(first_key + 63);
      if (first_key + 64 <= item.seqlen_kv && of_last.size() > 0) {
        const int end = rows.row(first_key).last;
        interior = {(of_last.first + kTileQ - 1) / kTileQ,
                    end == item.seqlen_q ? range.y : end / kTileQ};
      }
      store_int4(fixed, {range.x, range.y, interior.x, interior.y});
      __syncwarp();  // every thread of the warpgroup writes the same
      tile = range.y - 1;
      left = static_cast<int>(params.problem.group) * (range.y - range.x);
    }
    __device__ bool at_edge() const {
      const int4 tiles = load_int4(fixed);
      return tile < tiles.z || tile >= tiles.w;
    }
    __device__ void advance() {
      const int4 tiles = load_int4(fixed);
      --left;
      tile = tile == tiles.x ? tiles.y - 1 : tile - 1;
    }
  };

  /// Columns of a thread's fragment that its two keys are seen by: [first, last) of each.
  struct Seen {
    int first[2], last[2];
    __device__ Seen(const BackwardParams& params, const BackwardItem& item, int tile) {
      const ScoreMask mask = mask_of_item(params, item).transposed(item.seqlen_q);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = item.first_key + key_shift() + row_shift() + 8 * h;
        const ScoreMask::Range rows = key < item.seqlen_kv ? mask.row(key) : ScoreMask::Range{0, 0};
        first[h] = rows.first - tile * kTileQ - query_shift();
        last[h] = rows.last - tile * kTileQ - query_shift();
      }
    }
    /// Accumulator 4i + 2h + e.
    __device__ float masked(float score, int i, int h, int e) const {
      return 8 * i + e < first[h] || 8 * i + e >= last[h] ? 0.0f : score;
    }
  };

  /// P of raw scores, packed in p.
  __device__ static void probabilities(const BackwardParams& params, const Shared& shared,
                                       std::uint32_t parity, const Walk& walk, std::uint32_t lse,
                                       float (&s)[kScores], std::uint32_t (&p)[kScores / 2]) {
    lse += 4 * query_shift();
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 l = load_float2(lse + 32 * i);
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        float& score = s[4 * i + h];
        score = exp2_approx(fmaf(score, params.scale_log2, h % 2 == 0 ? -l.x : -l.y));
      }
    }
    if (walk.at_edge()) {
      const Seen seen(params, shared.item(parity), walk.tile);
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        s[i] = seen.masked(s[i], i / 4, i / 2 % 2, i % 2);
      }
    }
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      p[i] = pack<kDType>(s[2 * i], s[2 * i + 1]);
    }
  }

  /// The same with softcap, and P times the derivative of the cap, packed in `slopes`.
  __device__ static void capped_probabilities(const BackwardParams& params, const Shared& shared,
                                              std::uint32_t parity, const Walk& walk,
                                              std::uint32_t lse, const float (&s)[kScores],
                                              std::uint32_t (&p)[kScores / 2],
                                              std::uint32_t (&slopes)[kScores / 2]) {
    lse += 4 * query_shift();
    const Seen seen(params, shared.item(parity), walk.tile);
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 l = load_float2(lse + 32 * i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float weight[2], slope[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          // tanh(x) = 1 − 2r, its derivative 4 r (1 − r), r = 1 / (e^2x + 1)
          const float r =
              __fdividef(1.0f, exp2_approx(s[4 * i + 2 * h + e] * params.transform_scale) + 1.0f);
          const float score = fmaf(1.0f - 2.0f * r, params.scale_log2, e == 0 ? -l.x : -l.y);
          weight[e] = seen.masked(exp2_approx(score), i, h, e);
          slope[e] = weight[e] * (4.0f * r * (1.0f - r));
        }
        p[2 * i + h] = pack<kDType>(weight[0], weight[1]);
        slopes[2 * i + h] = pack<kDType>(slope[0], slope[1]);
      }
    }
  }

  /// dS = P ∘ (dP − delta), packed; P as it was rounded for dV: its registers are fewer.
  __device__ static void gradients(std::uint32_t delta, const std::uint32_t (&p)[kScores / 2],
                                   const float (&dp)[kScores], std::uint32_t (&ds)[kScores / 2]) {
    delta += 4 * query_shift();
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 d = load_float2(delta + 32 * i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = 4 * i + 2 * h;
        const float2 weights = unpack<kDType>(p[2 * i + h]);
        ds[2 * i + h] = pack<kDType>(weights.x * (dp[at] - d.x), weights.y * (dp[at + 1] - d.y));
      }
    }
  }

  /// The warpgroup's fragment of Pᵀ or dSᵀ to its place in a buffer, keys in rows.
  __device__ static void store_scores(const std::uint32_t (&p)[kScores / 2], std::uint32_t buffer) {
    const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
    const int row = key_shift() + thread / 32 * 16 + lane % 16;
    const int chunk = (kSplitsHeadDim ? kQueries / 8 * warpgroup() : 0) + lane / 16;
    const std::uint32_t first = buffer + tiles::swizzled_chunk_bytes(kTileKv, row, chunk);
#pragma unroll
    for (int i = 0; i < kScores / 4; i += 2) {
      // an even number of chunks on, inside a box: the swizzle is a XOR of address bits
      store_matrices((first ^ i % 8 * 16) + i / 8 * tiles::box_bytes(kTileKv), p[2 * i],
                     p[2 * i + 1], p[2 * i + 2], p[2 * i + 3]);
    }
  }

  __device__ static void release(std::uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(barrier);
    }
  }

  /// A part of dQ of the warpgroup, the m-th of all, to shared memory.
  __device__ static void put_dq(const Shared& shared, const float* dq, std::uint32_t m) {
    const int w = warpgroup();
    const std::uint32_t to = shared.dq(w, m) + static_cast<std::uint32_t>(threadIdx.x % 128) * 16;
    barrier_wait(shared.dq_empty(w, m), m / kDqBuffers % 2 ^ 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* const four = dq + 4 * i;
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 2048), "f"(four[0]),
                   "f"(four[1]), "f"(four[2]), "f"(four[3])
                   : "memory");
    }
  }
  /// And from there to the warp that adds it. The fence waits for the stores: hundreds of clocks
  /// while products read shared memory.
  __device__ static void pass_on_dq(const Shared& shared, std::uint32_t m) {
    fence_shared_to_async();
    release(shared.dq_full(warpgroup(), m));
  }

  /// Packed: rows behind the sequence's last are those of others.
  __device__ static void clear_foreign_queries(const BackwardParams& params, const Shared& shared,
                                               std::uint32_t parity, std::uint32_t rows, int tile) {
    if (params.problem.cu_seqlens_q.data != nullptr) {
      const int valid = shared.item(parity).seqlen_q - tile * kTileQ;
      if (valid < kTileQ) {
        clear_foreign_rows<kTileQ, kD>(rows, valid, 1 + static_cast<int>(threadIdx.x / 128));
      }
    }
  }
  __device__ static void await_q(const BackwardParams& params, const Shared& shared,
                                 std::uint32_t parity, std::uint32_t n, int tile) {
    barrier_wait(shared.q_full(n), n / kQStages % 2);
    clear_foreign_queries(params, shared, parity, shared.q(n), tile);
  }
  __device__ static void await_d_o(const BackwardParams& params, const Shared& shared,
                                   std::uint32_t parity, std::uint32_t n, int tile) {
    barrier_wait(shared.d_o_full(n), n / kDoStages % 2);
    clear_foreign_queries(params, shared, parity, shared.d_o(n), tile);
  }

  /// P and dS in registers. The next tile's S is issued behind this one's dQ, which leaves under
  /// it.
  __device__ __forceinline__ static void walk_keys(const BackwardParams& params,
                                                   const Shared& shared, std::uint32_t parity,
                                                   Walk& walk, std::uint32_t& n, float (&dk)[kSums],
                                                   float (&dv)[kSums]) {
    static_assert(kPartsOfWarpgroup == 1);
    const int w = warpgroup();
    const std::uint32_t begin = n;
    const auto rows = [&](std::uint32_t tile) { return tile + w * 64 * tiles::kBoxRowBytes; };
    float s[kScores];
    await_q(params, shared, parity, n, walk.tile);
    wgmma_fence();
    issue_scores(s, rows(shared.k()), shared.q(n));
    const auto step = [&](auto another) {
      float dp[kScores], dq[kDq];
      std::uint32_t p[kScores / 2], ds[kScores / 2];
      [[maybe_unused]] std::uint32_t slopes[kScores / 2];
      await_d_o(params, shared, parity, n, walk.tile);
      wgmma_wait<0>();  // behind the issue of dP ptxas would serialise the products (C7514)
      keep_in_place(s);
      if constexpr (kSoftcap) {  // dP waits: S, dP and two kinds of P do not fit the registers
        capped_probabilities(params, shared, parity, walk, shared.lse(n), s, p, slopes);
      }
      wgmma_fence();
      issue_scores(dp, rows(shared.v()), shared.d_o(n));
      if constexpr (!kSoftcap) {
        probabilities(params, shared, parity, walk, shared.lse(n), s, p);
      }
      if (n != begin) {
        pass_on_dq(shared, n - 1);
      }
      wgmma_wait<0>();
      keep_in_place(dp);
      wgmma_fence();
      issue_sums(dv, p, shared.d_o(n));
      gradients(shared.delta(n), kSoftcap ? slopes : p, dp, ds);
      store_scores(ds, shared.ds(n));
      wgmma_fence();
      issue_sums(dk, ds, shared.q(n));
      fence_shared_to_async();
      release(shared.ds_full(n));
      walk.advance();
      if constexpr (another) {
        await_q(params, shared, parity, n + 1, walk.tile);
      }
      barrier_wait(shared.ds_full(n), n / 2 % 2);
      wgmma_fence();
      issue_dq(dq, shared.ds(n), shared.k(), w);
      if constexpr (another) {
        wgmma_wait<1>();  // S takes the registers of P and dS
        keep_in_place(dk);
        keep_in_place(dv);
        release(shared.d_o_empty(n));
        release(shared.q_empty(n));
        wgmma_fence();
        issue_scores(s, rows(shared.k()), shared.q(n + 1));
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      keep_in_place(dk);
      keep_in_place(dv);
      keep_in_place(dq);
      if constexpr (!another) {
        release(shared.d_o_empty(n));
        release(shared.q_empty(n));
        release(shared.kv_empty());
      }
      put_dq(shared, dq, n);
      ++n;
    };
#pragma unroll 1
    while (walk.left > 1) {
      step(std::true_type{});
    }
    step(std::false_type{});
    pass_on_dq(shared, n - 1);
  }

  /// P and dS in shared memory.
  __device__ __forceinline__ static void walk_columns(const BackwardParams& params,
                                                      const Shared& shared, std::uint32_t parity,
                                                      Walk& walk, std::uint32_t& n,
                                                      float (&dk)[kSums], float (&dv)[kSums]) {
    const int w = warpgroup();
    const std::uint32_t queries = w * kQueries * tiles::kBoxRowBytes;
    const std::uint32_t columns = w * (kColumns / tiles::kBoxColumns) * tiles::box_bytes(kTileQ);
#pragma unroll 1
    for (; walk.left > 0; ++n) {
      float s[kScores], dp[kScores], dq[kDq];
      std::uint32_t p[kScores / 2], ds[kScores / 2];
      [[maybe_unused]] std::uint32_t slopes[kScores / 2];
      await_q(params, shared, parity, n, walk.tile);
      await_d_o(params, shared, parity, n, walk.tile);
      wgmma_fence();
      issue_scores(s, shared.k(), shared.q(n) + queries);
      issue_scores(dp, shared.v(), shared.d_o(n) + queries);
      wgmma_wait<1>();
      keep_in_place(s);
      if constexpr (kSoftcap) {
        capped_probabilities(params, shared, parity, walk, shared.lse(n), s, p, slopes);
      } else {
        probabilities(params, shared, parity, walk, shared.lse(n), s, p);
      }
      store_scores(p, shared.p(n));
      wgmma_wait<0>();
      keep_in_place(dp);
      gradients(shared.delta(n), kSoftcap ? slopes : p, dp, ds);
      store_scores(ds, shared.ds(n));
      fence_shared_to_async();
      named_barrier_sync(1, 256);
      wgmma_fence();
      issue_sums(dv, shared.p(n), shared.d_o(n) + columns);
      issue_sums(dk, shared.ds(n), shared.q(n) + columns);
      issue_dq(dq, shared.ds(n), shared.k(), w);
      wgmma_wait<0>();
      keep_in_place(dv);
      keep_in_place(dk);
      keep_in_place(dq);
      release(shared.d_o_empty(n));
      release(shared.q_empty(n));
      walk.advance();
      if (walk.left == 0) {
        release(shared.kv_empty());
      }
#pragma unroll
      for (std::uint32_t part = 0; part < kPartsOfWarpgroup; ++part) {
        put_dq(shared, dq + 32 * part, n * kPartsOfWarpgroup + part);
        pass_on_dq(shared, n * kPartsOfWarpgroup + part);
      }
    }
  }

  __device__ static void consume(const BackwardParams& params, const Shared& shared) {
    std::uint32_t n = 0;
    for (std::uint32_t parity = 0;; parity ^= 1) {
      barrier_wait(shared.k_full(), parity);
      float dk[kSums], dv[kSums];
      {
        const BackwardItem item = shared.item(parity);
        if (item.batch < 0) {
          break;
        }
        barrier_wait(shared.v_full(), parity);
        Walk walk(params, shared, item);
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          dk[i] = dv[i] = 0;
        }
        if (walk.left > 0) {
          const bool foreign = params.problem.cu_seqlens_kv.data != nullptr ||
                               params.problem.seqused_kv.data != nullptr;
          if (foreign && item.first_key + kTileKv > item.seqlen_kv) {
            clear_foreign_rows<kTileKv, kD>(shared.k(), item.seqlen_kv - item.first_key,
                                            1 + static_cast<int>(threadIdx.x / 128));
            clear_foreign_rows<kTileKv, kD>(shared.v(), item.seqlen_kv - item.first_key,
                                            1 + static_cast<int>(threadIdx.x / 128));
          }
          if constexpr (kSplitsHeadDim) {
            walk_columns(params, shared, parity, walk, n, dk, dv);
          } else {
            walk_keys(params, shared, parity, walk, n, dk, dv);
          }
        } else {
          release(shared.kv_empty());
        }
      }
      const BackwardItem item = shared.item(parity);
      Store::store(params, item, params.dk, params.head_dim, params.softmax_scale, dk);
      Store::store(params, item, params.dv, params.head_dim_v, 1, dv);
    }
  }
};

template <DType kDType, int kRow, bool kSoftcap>
__global__ void __launch_bounds__(tiles::Sm90BackwardRow::threads(), 1)
    backward_sm90_kernel(const __grid_constant__ BackwardParams params) {
  using B = Backward<kDType, kRow, kSoftcap>;
  extern __shared__ __align__(tiles::kSwizzleGroupBytes) unsigned char raw[];
  const typename B::Shared shared = B::Shared::carve(raw);
  if (threadIdx.x == 0) {
    tma_prefetch(params.q);
    tma_prefetch(params.k);
    tma_prefetch(params.v);
    tma_prefetch(params.d_o);
    shared.init_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers_back<B::kShape.producer_registers>();
    if (threadIdx.x < 32) {
      BackwardCopies<kRow>::produce(params, shared);
    } else if (threadIdx.x % 32 == 0 && threadIdx.x / 32 <= B::kDqBuffers) {
      BackwardCopies<kRow>::add_dq(params, shared, threadIdx.x / 32 - 1);
    }
  } else {
    take_registers<B::kShape.consumer_registers>();
    B::consume(params, shared);
  }
}

template <DType kDType, int kRow>
Status launch_backward_sm90(const BackwardParams& params, unsigned blocks, void* stream) {
  constexpr tiles::Sm90BackwardRow kShape = tiles::kSm90BackwardRows[kRow];
  void* arguments[] = {const_cast<BackwardParams*>(&params)};
  const void* const kernel =
      params.softcap ? reinterpret_cast<const void*>(&backward_sm90_kernel<kDType, kRow, true>)
                     : reinterpret_cast<const void*>(&backward_sm90_kernel<kDType, kRow, false>);
  return launch(kernel,
                {.blocks = blocks,
                 .threads = static_cast<unsigned>(kShape.threads()),
                 .shared_bytes = static_cast<unsigned>(kShape.shared_bytes()),
                 .stream = stream},
                arguments);
}

}  // namespace rafter::cuda
