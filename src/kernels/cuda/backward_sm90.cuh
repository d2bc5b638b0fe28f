// Backward attention for sm_90a, deterministic: scores are computed again from Q, K and lse; bf16
// or f16 in, f32 inside.
//   Q, O, dO, dQ [batch, heads_q, seqlen_q, D]   K, V, dK, dV [batch, heads_kv, seqlen_kv, D]
//   lse [batch, heads_q, seqlen_q]               any strides; packed sequences by cu_seqlens
// A CTA per SM takes items: tile_kv keys of a KV head. It walks the query tiles that see them, of
// all query heads of the group, from the last to the first:
//   Sᵀ = K Qᵀ | dPᵀ = V dOᵀ | P = exp2(S − lse), dS = P ∘ (dP − delta) | dV += Pᵀ dO | dK += dSᵀ Q
//   | dQ = dS K
//   warpgroup 0, warp 0   producer: draws the items; TMA for K, V, then Q and lse, dO and delta
//   warpgroup 0, warp 1   adds dQ of a tile to its sums in memory by the copy engine, in turn:
//   after
//                         the item of the keys before, which was drawn before, so that no item
//                         waits for one that has not begun
//   warpgroups 1, 2       consumers; dK and dV in registers
// Barriers, in shared memory: k_full, v_full, q_full[stage], d_o_full[stage] producer → consumers
// (bytes); kv_empty, q_empty, d_o_empty back; dq_full[warpgroup] consumers → warp 1, dq_empty back.
// Named barriers: 1 all consumers, 2 and 3 one warpgroup.
#pragma once

#include <cstddef>
#include <type_traits>

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/tma.cuh"
#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/backward_sm90.h"
#include "kernels/cuda/foreign_rows.cuh"
#include "kernels/cuda/scores.cuh"
#include "tiles/sm90_descriptor.h"
#include "tiles/tile_order.h"

namespace rafter::cuda {

/// tile_kv keys of a KV head, as the producer tells the others.
struct BackwardItem {
  int batch = -1;  // −1: no more items
  int head = 0;    // of K and V
  int first_key = 0;
  int seqlen_q = 0, seqlen_kv = 0;
  int row_q = 0, row_kv = 0;  // first row of the sequence in its tensors (packed), else 0
  int slot = 0;               // of the sequence's first query tile
};

// Shared memory by address.
__device__ inline int4 load_int4(std::uint32_t address) {
  int4 x;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ inline void store_int4(std::uint32_t address, int4 x) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ inline float2 load_float2(std::uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

template <int kQStages, int kDoStages>
struct BackwardControl {
  std::uint64_t k_full, v_full, kv_empty;
  std::uint64_t q_full[kQStages], q_empty[kQStages];
  std::uint64_t d_o_full[kDoStages], d_o_empty[kDoStages];
  std::uint64_t dq_full[2], dq_empty[2];
  alignas(16) int walk[2][4];         // of a warpgroup
  alignas(16) BackwardItem items[2];  // alternating: one is read while the next is written
};

/// Turns item numbers into items. Whole warp; numbers must grow from call to call. Items of the
/// heads of a section alternate; those of a head come in ascending order of keys.
template <int kTileQ, int kTileKv>
struct ItemFinder {
  int items_before = 0;  // packed: of the sequences before first_batch
  int first_batch = 0;

  __device__ BackwardItem find(const BackwardParams& params, int number) {
    return params.problem.cu_seqlens_q.data == nullptr ? dense(params, number)
                                                       : packed(params, number);
  }

 private:
  __device__ static int blocks_of(int length) { return (length + kTileKv - 1) / kTileKv; }

  __device__ static int heads_kv(const ScoreProblem& p) {
    return static_cast<int>(p.heads_q / p.group);
  }

  __device__ static BackwardItem item_of(const BackwardParams& params, int batch, int head,
                                         int block) {
    const ScoreSequence s = sequence_of(params.problem, batch);
    const bool packed = params.problem.cu_seqlens_q.data != nullptr;
    return {batch,
            head,
            block * kTileKv,
            s.seqlen_q,
            s.seqlen_kv,
            static_cast<int>(s.row_q),
            static_cast<int>(s.row_kv),
            static_cast<int>(
                tiles::first_slot(packed, batch, s.row_q, params.problem.seqlen_q, kTileQ))};
  }

  __device__ static BackwardItem dense(const BackwardParams& params, int number) {
    const ScoreProblem& p = params.problem;
    const tiles::TileOrder order{static_cast<int>(p.batch) * heads_kv(p), blocks_of(p.seqlen_kv),
                                 params.section};
    if (number >= order.tiles()) {
      return {};
    }
    const tiles::QueryTile place = order.at(number);
    const int batch = place.head / heads_kv(p);
    return item_of(params, batch, place.head - batch * heads_kv(p), order.blocks - 1 - place.block);
  }

  __device__ BackwardItem packed(const BackwardParams& params, int number) {
    const ScoreProblem& p = params.problem;
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (; first_batch < p.batch; first_batch += 32) {
      const int b = first_batch + lane;
      const int length = b < p.batch ? sequence_of(p, b).seqlen_kv : 0;
      const int items = blocks_of(length) * heads_kv(p);
      int sum = items;  // inclusive scan over the lanes
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        sum += lane >= step ? other : 0;
      }
      const unsigned behind = __ballot_sync(~0u, number < items_before + sum);
      if (behind == 0) {
        items_before += __shfl_sync(~0u, sum, 31);
        continue;
      }
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      const int heads = heads_kv(p);
      const tiles::TileOrder order{heads, blocks_of(__shfl_sync(~0u, length, owner)),
                                   min(params.section, heads)};
      const tiles::QueryTile place =
          order.at(number - items_before - __shfl_sync(~0u, sum - items, owner));
      return item_of(params, first_batch + owner, place.head, order.blocks - 1 - place.block);
    }
    return {};
  }
};

/// kSoftcap: scores go through softcap · tanh(score / softcap).
template <DType kDType, int kRow, bool kSoftcap>
struct Backward {
  static constexpr tiles::Sm90BackwardRow kShape = tiles::kSm90BackwardRows[kRow];
  static constexpr int kD = kShape.head_dim;
  static constexpr int kTileQ = kShape.tile_q, kTileKv = kShape.tile_kv;
  static constexpr int kQStages = kShape.q_stages, kDoStages = kShape.d_o_stages;
  static constexpr bool kSplitsHeadDim = kShape.splits_head_dim;
  // Of a warpgroup: keys of dK and dV, their columns, queries of S.
  static constexpr int kColumns = kSplitsHeadDim ? kD / 2 : kD;
  static constexpr int kQueries = kSplitsHeadDim ? kTileQ / 2 : kTileQ;
  static constexpr int kScores = kQueries / 2, kSums = kColumns / 2;  // accumulators of a thread
  static constexpr int kPartsOfWarpgroup = kShape.parts_of_warpgroup();
  static constexpr int kDq = kPartsOfWarpgroup * 32;
  using Control = BackwardControl<kQStages, kDoStages>;
  static_assert(sizeof(Control) <= tiles::Sm90BackwardRow::kControlBytes);

  /// Shared memory: addresses are sums of one register and constants.
  struct Shared {
    std::uint32_t base;
    static constexpr std::uint32_t kV = kShape.kv_bytes(), kQ = 2 * kV;
    static constexpr std::uint32_t kDO = kQ + kQStages * kShape.q_bytes();
    static constexpr std::uint32_t kScoreTiles = kDO + kDoStages * kShape.q_bytes();
    static constexpr std::uint32_t kDqParts =
        kScoreTiles + kShape.score_buffers() * kShape.score_bytes();
    static constexpr std::uint32_t kRows = kDqParts + 2 * kShape.kPartBytes;
    static constexpr std::uint32_t kControl = kRows + (kQStages + kDoStages) * kShape.row_bytes();

    __device__ std::uint32_t k() const { return base; }
    __device__ std::uint32_t v() const { return base + kV; }
    __device__ std::uint32_t q(std::uint32_t n) const {
      return base + kQ + n % kQStages * kShape.q_bytes();
    }
    __device__ std::uint32_t d_o(std::uint32_t n) const {
      return base + kDO + n % kDoStages * kShape.q_bytes();
    }
    /// lse of a step's queries, with Q; delta, with dO.
    __device__ std::uint32_t lse(std::uint32_t n) const {
      return base + kRows + n % kQStages * kShape.row_bytes();
    }
    __device__ std::uint32_t delta(std::uint32_t n) const {
      return base + kRows + (kQStages + n % kDoStages) * kShape.row_bytes();
    }
    /// dS of a step, kept for the next one; and P.
    __device__ std::uint32_t ds(std::uint32_t n) const {
      return base + kScoreTiles + n % 2 * kShape.score_bytes();
    }
    __device__ std::uint32_t p(std::uint32_t n) const {
      return base + kScoreTiles + (2 + n % 2) * kShape.score_bytes();
    }
    __device__ std::uint32_t dq(int w) const { return base + kDqParts + w * kShape.kPartBytes; }

    // Barriers.
    __device__ std::uint32_t k_full() const { return base + kControl + offsetof(Control, k_full); }
    __device__ std::uint32_t v_full() const { return base + kControl + offsetof(Control, v_full); }
    __device__ std::uint32_t kv_empty() const {
      return base + kControl + offsetof(Control, kv_empty);
    }
    __device__ std::uint32_t q_full(std::uint32_t n) const {
      return base + kControl + offsetof(Control, q_full) + n % kQStages * 8;
    }
    __device__ std::uint32_t q_empty(std::uint32_t n) const {
      return base + kControl + offsetof(Control, q_empty) + n % kQStages * 8;
    }
    __device__ std::uint32_t d_o_full(std::uint32_t n) const {
      return base + kControl + offsetof(Control, d_o_full) + n % kDoStages * 8;
    }
    __device__ std::uint32_t d_o_empty(std::uint32_t n) const {
      return base + kControl + offsetof(Control, d_o_empty) + n % kDoStages * 8;
    }
    __device__ std::uint32_t dq_full(int w) const {
      return base + kControl + offsetof(Control, dq_full) + w * 8;
    }
    __device__ std::uint32_t dq_empty(int w) const {
      return base + kControl + offsetof(Control, dq_empty) + w * 8;
    }

    __device__ std::uint32_t walk(int w) const {
      return base + kControl + offsetof(Control, walk) + w * 16;
    }
    __device__ std::uint32_t item_address(std::uint32_t parity) const {
      return base + kControl + offsetof(Control, items) + parity * sizeof(BackwardItem);
    }
    __device__ BackwardItem item(std::uint32_t parity) const {
      const int4 a = load_int4(item_address(parity)), b = load_int4(item_address(parity) + 16);
      return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    }
    __device__ void set_item(std::uint32_t parity, const BackwardItem& item) const {
      store_int4(item_address(parity), {item.batch, item.head, item.first_key, item.seqlen_q});
      store_int4(item_address(parity) + 16, {item.seqlen_kv, item.row_q, item.row_kv, item.slot});
    }
  };
  static_assert(sizeof(BackwardItem) == 32);

  __device__ static Shared carve(unsigned char* raw) {
    constexpr std::uint32_t kAlign = tiles::kSwizzleGroupBytes;
    return {(shared_address(raw) + kAlign - 1) / kAlign * kAlign};
  }

  __device__ static void init_barriers(const Shared& shared) {
    constexpr int kWarps = 8;  // of consumers
    barrier_init(shared.k_full(), 1);
    barrier_init(shared.v_full(), 1);
    barrier_init(shared.kv_empty(), kWarps + 1);
    for (std::uint32_t i = 0; i < kQStages; ++i) {
      barrier_init(shared.q_full(i), 1);
      barrier_init(shared.q_empty(i), kWarps);
    }
    for (std::uint32_t i = 0; i < kDoStages; ++i) {
      barrier_init(shared.d_o_full(i), 1);
      barrier_init(shared.d_o_empty(i), kWarps);
    }
    for (int w = 0; w < 2; ++w) {
      barrier_init(shared.dq_full(w), kWarps / 2);
      barrier_init(shared.dq_empty(w), 1);
    }
    barrier_init_fence();
  }

  __device__ static ScoreMask mask_of_item(const BackwardParams& params, const BackwardItem& item) {
    return {params.problem.window_left, params.problem.window_right,
            params.problem.top_left ? 0 : item.seqlen_kv - item.seqlen_q, item.seqlen_kv};
  }

  /// Query tiles that see any of the keys: [x, y).
  __device__ static int2 query_tiles(const BackwardParams& params, const BackwardItem& item) {
    const int end = min(item.first_key + kTileKv, item.seqlen_kv);
    const ScoreMask::Range rows =
        mask_of_item(params, item).transposed(item.seqlen_q).hull(item.first_key, end);
    if (rows.size() == 0) {
      return {0, 0};
    }
    return {rows.first / kTileQ, (rows.last + kTileQ - 1) / kTileQ};
  }

  // ---- producer -------------------------------------------------------------------------------

  __device__ static void load_tile(std::uint32_t destination, const CUtensorMap& map,
                                   std::uint32_t barrier, int rows, int row, int head, int batch) {
#pragma unroll
    for (int box = 0; box < tiles::boxes(kD); ++box) {
      tma_load(destination + box * tiles::box_bytes(rows), map, barrier, box * tiles::kBoxColumns,
               row, head, batch);
    }
  }

  __device__ static void produce(const BackwardParams& params, const Shared& shared) {
    const bool leader = threadIdx.x == 0;
    std::uint32_t n = 0;  // query tiles that went through the rings
    ItemFinder<kTileQ, kTileKv> finder;
    for (std::uint32_t parity = 0;; parity ^= 1) {
      int number = 0;
      if (leader) {
        number = static_cast<int>(atomicAdd(params.counter, 1u));
      }
      number = __shfl_sync(~0u, number, 0);
      const BackwardItem item = finder.find(params, number);
      if (leader) {
        barrier_wait(shared.kv_empty(), parity ^ 1);
        shared.set_item(parity, item);
        load_item(params, shared, item, n);
      }
      if (item.batch < 0) {
        break;
      }
      __syncwarp();
    }
  }

  __device__ static void load_item(const BackwardParams& params, const Shared& shared,
                                   const BackwardItem& item, std::uint32_t& n) {
    const std::uint32_t k_full = shared.k_full(), v_full = shared.v_full();
    const int2 range = item.batch < 0 ? int2{0, 0} : query_tiles(params, item);
    if (range.x >= range.y) {
      barrier_arrive(k_full);
      barrier_arrive(v_full);
      return;
    }
    const int group = static_cast<int>(params.problem.group);
    const int heads_q = static_cast<int>(params.problem.heads_q);
    const int batch = params.problem.cu_seqlens_q.data == nullptr ? item.batch : 0;
    const int key = item.row_kv + item.first_key;
    barrier_arrive_expect(k_full, kShape.kv_bytes());
    load_tile(shared.k(), params.k, k_full, kTileKv, key, item.head * params.k_heads_step,
              batch * params.k_batch_step);
    bool first = true;
#pragma unroll 1
    for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
#pragma unroll 1
      for (int tile = range.y - 1; tile >= range.x; --tile, ++n) {
        const float* const rows =
            params.rows + (std::int64_t{item.slot + tile} * heads_q + head) * (2 * kTileQ);
        const int row = item.row_q + tile * kTileQ;
        const std::uint32_t q_full = shared.q_full(n);
        barrier_wait(shared.q_empty(n), n / kQStages % 2 ^ 1);
        barrier_arrive_expect(q_full, kShape.q_bytes() + kShape.row_bytes());
        load_tile(shared.q(n), params.q, q_full, kTileQ, row, head * params.q_heads_step,
                  batch * params.q_batch_step);
        bulk_load(shared.lse(n), rows, kShape.row_bytes(), q_full);
        if (first) {
          first = false;
          barrier_arrive_expect(v_full, kShape.kv_bytes());
          load_tile(shared.v(), params.v, v_full, kTileKv, key, item.head * params.v_heads_step,
                    batch * params.v_batch_step);
        }
        const std::uint32_t d_o_full = shared.d_o_full(n);
        barrier_wait(shared.d_o_empty(n), n / kDoStages % 2 ^ 1);
        barrier_arrive_expect(d_o_full, kShape.q_bytes() + kShape.row_bytes());
        load_tile(shared.d_o(n), params.d_o, d_o_full, kTileQ, row, head * params.d_o_heads_step,
                  batch * params.d_o_batch_step);
        bulk_load(shared.delta(n), rows + kTileQ, kShape.row_bytes(), d_o_full);
      }
    }
  }

  // ---- sums of dQ -----------------------------------------------------------------------------

  /// One thread. The first item that a query tile sees writes its sums, the others add to them, in
  /// ascending order of keys: the bits do not depend on who comes when.
  __device__ static void add_dq(const BackwardParams& params, const Shared& shared) {
    const int group = static_cast<int>(params.problem.group);
    const int heads_q = static_cast<int>(params.problem.heads_q);
    std::uint32_t m = 0;  // parts of a warpgroup so far
    for (std::uint32_t parity = 0;; parity ^= 1) {
      barrier_wait(shared.k_full(), parity);
      const BackwardItem item = shared.item(parity);
      barrier_arrive(shared.kv_empty());
      if (item.batch < 0) {
        break;
      }
      const int2 range = query_tiles(params, item);
      const ScoreMask mask = mask_of_item(params, item);
      const auto turn_of = [&](int tile) {  // items that add to a query tile before this one
        const int end = min((tile + 1) * kTileQ, item.seqlen_q);
        return static_cast<unsigned>(item.first_key / kTileKv -
                                     mask.hull(tile * kTileQ, end).first / kTileKv);
      };
      const auto index_of = [&](int head, int tile) {
        return std::int64_t{item.slot + tile} * heads_q + head;
      };
#pragma unroll 1
      for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
        // Whose turn it is at a tile is read while the copy for the one before completes.
        unsigned now =
            range.x < range.y ? load_acquire(params.turns + index_of(head, range.y - 1)) : 0u;
#pragma unroll 1
        for (int tile = range.y - 1; tile >= range.x; --tile) {
          const unsigned turn = turn_of(tile);
          const std::int64_t index = index_of(head, tile);
          while (now != turn) {
            now = load_acquire(params.turns + index);
          }
          fence_async();
          float* const sums = params.dq_sums + index * (kShape.parts() * kShape.kPartFloats);
#pragma unroll 1
          for (int part = 0; part < kPartsOfWarpgroup; ++part, ++m) {
#pragma unroll
            for (int w = 0; w < 2; ++w) {
              barrier_wait(shared.dq_full(w), m % 2);
              float* const to = sums + (w * kPartsOfWarpgroup + part) * kShape.kPartFloats;
              if (turn == 0) {
                bulk_store(to, shared.dq(w), kShape.kPartBytes);
              } else {
                bulk_add(to, shared.dq(w), kShape.kPartBytes);
              }
              tma_commit_stores();
            }
            tma_wait_stores_read();
            barrier_arrive(shared.dq_empty(0));
            barrier_arrive(shared.dq_empty(1));
          }
          if (tile > range.x) {
            now = load_acquire(params.turns + index_of(head, tile - 1));
          }
          tma_wait_stores();
          fence_async();
          store_release(params.turns + index, turn + 1);
        }
      }
    }
  }

  // ---- consumers ------------------------------------------------------------------------------

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

  __device__ static int warpgroup() { return static_cast<int>(threadIdx.x / 128) - 1; }
  /// First key of the warpgroup in the item; the thread's row among the warpgroup's, its second is
  /// 8 further on; the thread's first column in a query tile.
  __device__ static int key_shift() { return kSplitsHeadDim ? 0 : 64 * warpgroup(); }
  __device__ static int row_shift() {
    const int thread = static_cast<int>(threadIdx.x % 128);
    return thread / 32 * 16 + thread % 32 / 4;
  }
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
#pragma unroll
    for (int i = 0; i < kScores / 4; i += 2) {
      store_matrices(buffer + tiles::swizzled_chunk_bytes(kTileKv, row, chunk + i), p[2 * i],
                     p[2 * i + 1], p[2 * i + 2], p[2 * i + 3]);
    }
  }

  __device__ static void release(std::uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(barrier);
    }
  }

  /// The warpgroup's parts of dQ of step n to warp 1 of warpgroup 0.
  __device__ static void hand_over(const Shared& shared, const float (&dq)[kDq], std::uint32_t n) {
    const int w = warpgroup();
    const std::uint32_t to = shared.dq(w) + static_cast<std::uint32_t>(threadIdx.x % 128) * 16;
#pragma unroll
    for (std::uint32_t part = 0; part < kPartsOfWarpgroup; ++part) {
      barrier_wait(shared.dq_empty(w), (n * kPartsOfWarpgroup + part) % 2 ^ 1);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float* const four = dq + 32 * part + 4 * i;
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 2048), "f"(four[0]),
                     "f"(four[1]), "f"(four[2]), "f"(four[3])
                     : "memory");
      }
      fence_shared_to_async();
      release(shared.dq_full(w));
    }
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

  /// P and dS in registers. kAhead: the next tile's S is issued under this one's last products.
  __device__ __forceinline__ static void walk_keys(const BackwardParams& params,
                                                   const Shared& shared, std::uint32_t parity,
                                                   Walk& walk, std::uint32_t& n, float (&dk)[kSums],
                                                   float (&dv)[kSums]) {
    constexpr bool kAhead = kShape.scores_ahead && !kSoftcap;
    const int w = warpgroup();
    float s[kScores], dp[kScores], dq[kDq];
    std::uint32_t p[kScores / 2], ds[kScores / 2];
    [[maybe_unused]] std::uint32_t slopes[kScores / 2];
    const auto rows = [&](std::uint32_t tile) { return tile + w * 64 * tiles::kBoxRowBytes; };
    const auto step = [&](auto another) {
      if constexpr (kAhead) {
        await_d_o(params, shared, parity, n, walk.tile);
        wgmma_wait<0>();
        keep_in_place(s);
        wgmma_fence();
        issue_scores(dp, rows(shared.v()), shared.d_o(n));
      } else {
        await_q(params, shared, parity, n, walk.tile);
        await_d_o(params, shared, parity, n, walk.tile);
        wgmma_fence();
        issue_scores(s, rows(shared.k()), shared.q(n));
        if constexpr (!kSoftcap) {
          issue_scores(dp, rows(shared.v()), shared.d_o(n));
        }
        wgmma_wait<kSoftcap ? 0 : 1>();
        keep_in_place(s);
      }
      if constexpr (kSoftcap) {  // dP waits: S, dP and two kinds of P do not fit the registers
        capped_probabilities(params, shared, parity, walk, shared.lse(n), s, p, slopes);
        wgmma_fence();
        issue_scores(dp, rows(shared.v()), shared.d_o(n));
      } else {
        probabilities(params, shared, parity, walk, shared.lse(n), s, p);
      }
      wgmma_wait<0>();
      keep_in_place(dp);
      wgmma_fence();
      issue_sums(dv, p, shared.d_o(n));
      gradients(shared.delta(n), kSoftcap ? slopes : p, dp, ds);
      store_scores(ds, shared.ds(n));
      fence_shared_to_async();
      wgmma_fence();
      issue_sums(dk, ds, shared.q(n));
      named_barrier_sync(1, 256);
      wgmma_wait<1>();
      keep_in_place(dv);
      release(shared.d_o_empty(n));
      walk.advance();
      if constexpr (kAhead && another) {
        await_q(params, shared, parity, n + 1, walk.tile);
      }
      wgmma_fence();
      issue_dq(dq, shared.ds(n), shared.k(), w);
      if constexpr (kAhead && another) {
        issue_scores(s, rows(shared.k()), shared.q(n + 1));
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      keep_in_place(dk);
      keep_in_place(dq);
      release(shared.q_empty(n));
      hand_over(shared, dq, n);
      ++n;
    };
    if constexpr (kAhead) {
      await_q(params, shared, parity, n, walk.tile);
      wgmma_fence();
      issue_scores(s, rows(shared.k()), shared.q(n));
    }
#pragma unroll 1
    while (walk.left > (kAhead ? 1 : 0)) {
      step(std::true_type{});
    }
    if constexpr (kAhead) {
      step(std::false_type{});
    }
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
    for (; walk.left > 0; walk.advance(), ++n) {
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
      hand_over(shared, dq, n);
    }
  }

  /// Two neighbouring elements.
  template <typename T>
  __device__ static void store_pair(T* to, bool aligned, float low, float high) {
    if constexpr (sizeof(T) == 4) {
      to[0] = low;
      to[1] = high;
    } else {
      const std::uint32_t pair = pack<kDType>(low, high);
      if (aligned) {
        *reinterpret_cast<std::uint32_t*>(to) = pair;
      } else {
        to[0] = static_cast<T>(pair);
        to[1] = static_cast<T>(pair >> 16);
      }
    }
  }

  template <typename T>
  __device__ static void store_sums(const BackwardItem& item, const PlainTensor& t,
                                    std::int64_t batch, int head_dim, float factor,
                                    const float (&sums)[kSums]) {
    const int column =
        (kSplitsHeadDim ? kColumns * warpgroup() : 0) + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = item.first_key + key_shift() + row_shift() + 8 * h;
      if (key >= item.seqlen_kv) {
        continue;
      }
      T* const row = static_cast<T*>(t.data) + batch * t.stride_batch +
                     (std::int64_t{item.row_kv} + key) * t.stride_seqlen +
                     item.head * t.stride_heads + column;
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        if (column + 8 * i < head_dim) {
          store_pair(row + 8 * i, t.aligned, sums[4 * i + 2 * h] * factor,
                     sums[4 * i + 2 * h + 1] * factor);
        }
      }
    }
  }

  __device__ static void store(const BackwardParams& params, const BackwardItem& item,
                               const PlainTensor& t, int head_dim, float factor,
                               const float (&sums)[kSums]) {
    const std::int64_t batch = params.problem.cu_seqlens_q.data == nullptr ? item.batch : 0;
    if (t.is_f32) {
      store_sums<float>(item, t, batch, head_dim, factor, sums);
    } else {
      store_sums<std::uint16_t>(item, t, batch, head_dim, factor, sums);
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
        }
      }
      release(shared.kv_empty());
      const BackwardItem item = shared.item(parity);
      store(params, item, params.dk, params.head_dim, params.softmax_scale, dk);
      store(params, item, params.dv, params.head_dim_v, 1, dv);
    }
  }
};

template <DType kDType, int kRow, bool kSoftcap>
__global__ void __launch_bounds__(tiles::Sm90BackwardRow::threads(), 1)
    backward_sm90_kernel(const __grid_constant__ BackwardParams params) {
  using B = Backward<kDType, kRow, kSoftcap>;
  extern __shared__ unsigned char raw[];
  const typename B::Shared shared = B::carve(raw);
  if (threadIdx.x == 0) {
    tma_prefetch(params.q);
    tma_prefetch(params.k);
    tma_prefetch(params.v);
    tma_prefetch(params.d_o);
    B::init_barriers(shared);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers_back<B::kShape.producer_registers>();
    if (threadIdx.x < 32) {
      B::produce(params, shared);
    } else if (threadIdx.x == 32) {
      B::add_dq(params, shared);
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
