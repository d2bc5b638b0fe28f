// Forward attention for sm_90a: O = softmax(softmax_scale · QKᵀ + mask) V, bf16 or f16 in, f32
// inside.
//   Q, O [batch, heads_q, seqlen_q, D]   K, V [batch, heads_kv, seqlen_kv, D]
//   lse [batch, heads_q, seqlen_q]       any strides; packed sequences by cu_seqlens
// One CTA per SM takes query tiles of one head (64 queries per consumer warpgroup) and walks the
// keys that they see from the last tile to the first.
//   warpgroup 0   warp 0, the planner, finds the query tiles, tells the others of them (plans) and
//                 loads their Q by TMA; a thread of warp 1 loads K and V into `stages` slots each:
//                 K[last], then K[j − 1], V[j], …, on into the next query tile
//   warpgroups 1+ consumers: S = Q K[j]ᵀ | O += P V[j + 1] in flight; P = exp2(…) under the second.
//                 Where the tuning row says so, the first S of the next query tile goes with the
//                 last O += P V of this one: O is stored after that softmax
// Barriers, all in shared memory: k_full, v_full[stage] and q_full[warpgroup] warpgroup 0 →
// consumers (bytes); k_empty, v_empty[stage] (one arrival per consumer warp) and
// q_empty[warpgroup] back; plan_full the planner → all, plan_empty back.
// Named barriers 1 … order the consumers' matmuls where the tuning row says so.
#pragma once

#include <type_traits>

#include "hw/cuda/early.cuh"
#include "hw/cuda/early.h"
#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/foreign_rows.cuh"
#include "kernels/cuda/forward_sm90_load.cuh"
#include "kernels/cuda/forward_sm90_store.cuh"
#include "tiles/sm90_descriptor.h"

namespace rafter::cuda {

template <DType kDType, int kRow>
struct Forward {
  static constexpr tiles::Sm90ForwardRow kShape = tiles::kSm90ForwardRows[kRow];
  static constexpr int kD = kShape.head_dim, kDv = kShape.head_dim_v, kTileKv = kShape.tile_kv;
  static constexpr int kWarpgroups = kShape.warpgroups, kStages = kShape.stages;
  static constexpr int kScores = kTileKv / 2, kOutputs = kDv / 2;  // accumulators of a thread
  static constexpr std::uint32_t kSlots = kShape.q_slots;
  using Store = ForwardStore<kDType, kRow>;
  using Shared = ForwardShared<kRow>;
  using Control = typename Shared::Control;

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

  /// O += P V, or O = P V where `add` is false: issued and committed, not awaited. v: low half.
  __device__ static void issue_outputs(float (&o)[kOutputs], const std::uint32_t (&p)[kScores / 2],
                                       std::uint32_t v, bool add) {
    using Product = Mma<kDType, kDv>;
    if constexpr (kShape.sets_outputs) {
      Product::registers_or_set(o, p[0], p[1], p[2], p[3], with_high_half(kMnMajor, v), add);
    } else {
      Product::registers(o, p[0], p[1], p[2], p[3], with_high_half(kMnMajor, v));
    }
#pragma unroll
    for (int step = 1; step < kTileKv / 16; ++step) {
      Product::registers(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                         with_high_half(kMnMajor, v + tiles::mn_major_step_bytes(step) / 16));
    }
    wgmma_commit();
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
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(shared_address(&barrier));
    }
  }

  /// Key tiles that the warpgroup walks: its own, or all that the query tile sees.
  __device__ static const int2& walked_by(const PlannedTile<kWarpgroups>& work, int warpgroup) {
    if constexpr (kShape.own_ranges) {
      return work.own[warpgroup];
    } else {
      return work.range;
    }
  }

  static constexpr std::uint32_t kNoTile = ~0u;

  /// Where warpgroups walk their own ranges: key tiles that went through the rings, of them those
  /// before the query tile at hand.
  struct Passed {
    std::uint32_t n = 0, first = 0;
  };

  /// Key tiles up to number `end` are for others. A slot may be released again only after it was
  /// loaded.
  __device__ static void pass_over(Control& control, Passed& passed, std::uint32_t end) {
#pragma unroll 1
    for (; passed.n != end; ++passed.n) {
      const std::uint32_t slot = passed.n % kStages;
      barrier_wait(shared_address(&control.k_full[slot]), passed.n / kStages % 2);
      release(control.k_empty[slot]);
      barrier_wait(shared_address(&control.v_full[slot]), passed.n / kStages % 2);
      release(control.v_empty[slot]);
    }
  }

  __device__ static void take_turn(int warpgroup) {
    if constexpr (kShape.ordered) {
      named_barrier_sync(1 + warpgroup, 256);
    }
  }
  __device__ static void hand_on(int warpgroup) {
    if constexpr (kShape.ordered) {
      named_barrier_arrive(1 + (warpgroup + 1) % kWarpgroups, 256);
    }
  }

  /// The tile has no query for the warpgroup, which then only gives slots back and takes its turns.
  __device__ static bool idles(const PlannedTile<kWarpgroups>& work, int warpgroup) {
    return kShape.idles && work.first_query + 64 * warpgroup >= work.seqlen_q;
  }

  /// The first query tile from number t on that the warpgroup walks keys of, or kNoTile; those
  /// before it are stored. Its Q is there. follows: the others may step into t from a tile before.
  __device__ static std::uint32_t next_tile(const ForwardParams& params, const Shared& shared,
                                            int warpgroup, std::uint32_t t, Passed& passed,
                                            bool follows) {
    Control& control = *shared.control;
    for (;; ++t) {
      control.await_plan(t);
      const PlannedTile<kWarpgroups>& work = control.plan(t);
      if constexpr (kShape.own_ranges) {
        pass_over(control, passed, passed.first);
      }
      if (work.batch < 0) {
        return kNoTile;
      }
      barrier_wait(shared_address(&control.q_full[warpgroup][t % kSlots]), t / kSlots % 2);
      const int2& walked = walked_by(work, warpgroup);
      if (walked.x < walked.y) {
        if constexpr (kShape.own_ranges) {
          pass_over(control, passed,
                    passed.first + static_cast<std::uint32_t>(work.range.y - walked.y));
        }
        if (kShape.idles && follows) {  // whoever steps into this tile takes a turn
          take_turn(warpgroup);
          hand_on(warpgroup);
        }
        if (idles(work, warpgroup)) {
          release(control.q_empty[warpgroup][t % kSlots]);  // first: as below
#pragma unroll 1
          for (int left = work.range.y - work.range.x; left > 0; --left) {
            pass_over(control, passed, passed.n + 1);
            if (left > 1) {
              take_turn(warpgroup);
              hand_on(warpgroup);
            }
          }
          release(control.plan_empty[t % Control::kPlans]);
          follows = true;
          continue;
        }
        return t;
      }
      if constexpr (kShape.own_ranges) {
        // Q first: the planner may wait for it, and V of the last key tile for the planner.
        release(control.q_empty[warpgroup][t % kSlots]);
        passed.first += static_cast<std::uint32_t>(work.range.y - work.range.x);
        pass_over(control, passed, passed.first);
      }
      follows = false;
      Store::store_nothing(params, work, warpgroup);
      if constexpr (!kShape.own_ranges) {
        release(control.q_empty[warpgroup][t % kSlots]);
      }
      release(control.plan_empty[t % Control::kPlans]);
    }
  }

  __device__ static void consume(const ForwardParams& params, const Shared& shared) {
    Control& control = *shared.control;
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0) - 1;  // uniform
    if (kShape.ordered && warpgroup == kWarpgroups - 1) {
      named_barrier_arrive(1, 256);  // the first consumer may start
    }
    Passed passed;
    std::uint32_t& n = passed.n;  // K and V of key tile n share slot and parity
    std::uint32_t t = next_tile(params, shared, warpgroup, 0, passed, false);
    if (t == kNoTile) {
      return;
    }
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
    Queries q;
    float s[kScores], o[kOutputs];
    std::uint32_t p[kScores / 2];
    RowState rows;
    int j;  // key tile that S is of
    std::uint32_t k, v;
    bool adds = true;  // the next product is added to O, else it sets O
    const auto begin_outputs = [&] {
      if constexpr (kShape.sets_outputs) {
        adds = false;
      } else {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
          o[i] = 0;
        }
      }
    };
    const auto finish_edge = [&] {
      const TileWork& work = control.plan(t);
      if (params.transform) [[unlikely]] {
        transform_scores(params, s);
      }
      int thread;
      asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));  // not kept in a register
      const int row = thread % 128 / 32 * 16 + thread % 32 / 4;
      mask_scores(params, work, s, work.first_query + 64 * warpgroup + row,
                  j * kTileKv + 2 * (thread % 4));
    };
    const auto load_q = [&] {
      q.load(shared.q_of(warpgroup, t));
      if constexpr (kShape.queries_in_registers) {
        release(control.q_empty[warpgroup][t % kSlots]);
      }
    };
    // Before the first softmax of query tile t.
    const auto begin_rows = [&] {
      const PlannedTile<kWarpgroups>& work = control.plan(t);
      const int2 interior = work.interior[warpgroup];
      j = walked_by(work, warpgroup).y - 1;
      rows = {{-INFINITY, -INFINITY}, {0, 0}, {0, 0}};
      if (j < interior.x || j >= interior.y) [[unlikely]] {
        finish_edge();
      }
    };
    // Before the first product with V of key tile i, the first of query tile t.
    const auto clear_foreign = [&](std::uint32_t i) {
      // Rows behind the keys of this sequence are foreign where the tensor does not end with it;
      // only this tile can hold some.
      const int valid = control.plan(t).seqlen_kv - j * kTileKv;
      if ((params.cu_seqlens_kv.data != nullptr || params.seqused_kv.data != nullptr) &&
          valid < kTileKv) [[unlikely]] {
        await_values(i);
        clear_foreign_rows<kTileKv, kDv>(shared.v_of(i % kStages), valid,
                                         1 + kWarpgroups + warpgroup);
      }
    };
    // S of the first key tile of query tile t, by itself.
    const auto begin = [&] {
      load_q();
      await_keys(n);
      wgmma_fence();
      issue_scores(s, q, low_half(kKMajor, shared.k_of(n % kStages)));
      begin_outputs();
      wgmma_wait<0>();
      keep_in_place(s);
      release(control.k_empty[n % kStages]);
      begin_rows();
      softmax(s, rows, params.scale_log2);
      pack_probabilities<kDType>(p, s);
      clear_foreign(n);
      v = low_half(kMnMajor, shared.v_of(n % kStages));
      k = low_half(kKMajor, shared.k_of((n + 1) % kStages));
    };
    bool begins = true;  // with query tile t, not by a step out of the one before
    bool ready = false;  // K and V of the next step were seen to have arrived
    // S of the next key tile and O += P V of key tile n.
    const auto issue = [&] {
      take_turn(warpgroup);
      wgmma_fence();
      issue_scores(s, q, k);
      issue_outputs(o, p, v, adds);
      adds = true;
      hand_on(warpgroup);
    };
    // P of those S, of key tile m, under that product.
    const auto finish_scores = [&](std::uint32_t m) {
      softmax(s, rows, params.scale_log2);
      keep_in_place(s);
      release_after(control.k_empty[m % kStages], rows.sum[0] + rows.sum[1]);
      k = low_half(kKMajor, shared.k_of((m + 1) % kStages));
      v = low_half(kMnMajor, shared.v_of(m % kStages));
      ready = keys_ready(m + 1) & values_ready(m);  // both are asked: no branch
      wgmma_wait<0>();
      keep_in_place(o);
      release(control.v_empty[n % kStages]);
      pack_probabilities<kDType>(p, s);
    };
    for (;;) {
      if (begins) {
        begin();
        begins = false;
        ready = false;
      }
      // The code of interior tiles has no branch between the two waits.
      const auto step = [&](auto edge) {
        if (!ready) {
          await_keys(n + 1);
          await_values(n);
        }
        issue();
        wgmma_wait<1>();
        keep_in_place(s);
        if constexpr (kShape.is_short) {
          const int2 interior = control.plan(t).interior[warpgroup];
          if (j < interior.x || j >= interior.y) [[unlikely]] {
            finish_edge();
          }
        } else if constexpr (edge) {
          finish_edge();
        }
        finish_scores(n + 1);
        rescale_outputs(o, rows);
        ++n;
      };
      --j;
      const PlannedTile<kWarpgroups>& walked = control.plan(t);
      if constexpr (kShape.is_short) {
        const int last = walked_by(walked, warpgroup).x;
#pragma unroll 1
        for (; j >= last; --j) {
          step(std::true_type{});
        }
      } else {
#pragma unroll 1
        while (j >= walked_by(walked, warpgroup).x) {  // edges on the right, interior, on the left
          const int edges_end = j < walked.interior[warpgroup].x ? walked_by(walked, warpgroup).x
                                                                 : walked.interior[warpgroup].y;
#pragma unroll 1
          for (; j >= edges_end; --j) {
            step(std::true_type{});
          }
          const int interior_end = walked.interior[warpgroup].x;
#pragma unroll 1
          for (; j >= interior_end; --j) {
            step(std::false_type{});
          }
        }
      }
      if constexpr (!kShape.queries_in_registers) {
        release(control.q_empty[warpgroup][t % kSlots]);
      }
      if constexpr (kShape.own_ranges) {
        passed.first += static_cast<std::uint32_t>(walked.range.y - walked.range.x);
      }
      float inverse[2];  // what O is to be multiplied by
      if constexpr (kShape.runs_on) {
        control.await_plan(t + 1);
        const PlannedTile<kWarpgroups>& next = control.plan(t + 1);
        bool follows = !next.is_empty() && !idles(next, warpgroup);
        std::uint32_t next_n = n + 1;  // the first key tile of the next query tile
        if constexpr (kShape.own_ranges) {
          // Key tiles that lie between are for others. While V of this one holds its slot, those
          // that are passed over must fit the rest.
          const int2 keys = next.own[warpgroup];
          if constexpr (kShape.is_short) {
            next_n = passed.first + static_cast<std::uint32_t>(next.range.y - keys.y);
            follows = keys.x < keys.y && next_n - (n + 1) <= kStages - 2u;
          } else {
            follows = keys.x < keys.y && keys.y == next.range.y && n + 1 == passed.first;
          }
        }
        if (follows) {
          // A step into the next query tile.
          ++t;
          barrier_wait(shared_address(&control.q_full[warpgroup][t % kSlots]), t / kSlots % 2);
          load_q();
          if constexpr (kShape.is_short) {
            Passed between{n + 1, 0};
            pass_over(control, between, next_n);
            k = low_half(kKMajor, shared.k_of(next_n % kStages));
          }
          if (!kShape.sets_outputs || !ready) {
            await_keys(next_n);
            await_values(n);
          }
          issue();
          Store::finish_rows(params, control.plan(t - 1), warpgroup, rows, inverse);
          wgmma_wait<1>();
          keep_in_place(s);
          begin_rows();
          finish_scores(next_n);
          Store::store(params, shared.o_of(warpgroup),
                       Store::place_of(params, control.plan(t - 1), warpgroup), o, inverse);
          release(control.plan_empty[(t - 1) % Control::kPlans]);
          begin_outputs();
          n = next_n;
          clear_foreign(n);
          continue;
        }
      }
      await_values(n);
      wgmma_fence();
      issue_outputs(o, p, v, adds);
      Store::finish_rows(params, control.plan(t), warpgroup, rows, inverse);
      wgmma_wait<0>();
      keep_in_place(o);
      release(control.v_empty[n % kStages]);
      ++n;
      Store::store(params, shared.o_of(warpgroup),
                   Store::place_of(params, control.plan(t), warpgroup), o, inverse);
      release(control.plan_empty[t % Control::kPlans]);
      t = next_tile(params, shared, warpgroup, t + 1, passed, true);
      if (t == kNoTile) {
        return;
      }
      begins = true;
    }
  }
};

template <DType kDType, int kRow>
__global__ void __launch_bounds__(tiles::kSm90ForwardRows[kRow].threads(), 1)
    forward_sm90_kernel(const __grid_constant__ ForwardParams params) {
  using F = Forward<kDType, kRow>;
  extern __shared__ unsigned char raw[];
  using Load = ForwardLoad<kRow>;
  const typename F::Shared shared = F::Shared::carve(raw);
  if (threadIdx.x == 0) {
    tma_prefetch(params.q);
    tma_prefetch(params.k);
    tma_prefetch(params.v);
    F::Shared::init_barriers(*shared.control);
    if (F::kShape.own_ranges && params.is_first) {
      let_next_grid_begin();
    }
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers_back<F::kShape.producer_registers>();
    if (threadIdx.x < 32) {
      Load::plan(params, shared);
    } else if (threadIdx.x == 32) {
      Load::load(params, shared);
    }
  } else {
    take_registers<F::kShape.consumer_registers>();
    F::consume(params, shared);
    if (F::kShape.store_by_copy && threadIdx.x % 32 == 0) {
      tma_wait_stores_read();  // shared memory must outlive the copies
    }
  }
}

template <DType kDType, int kRow>
Status launch_forward_sm90(const ForwardParams& params, unsigned blocks, void* stream) {
  constexpr tiles::Sm90ForwardRow kShape = tiles::kSm90ForwardRows[kRow];
  void* arguments[] = {const_cast<ForwardParams*>(&params)};
  const auto queue = params.is_second ? launch_early : launch;
  return queue(reinterpret_cast<const void*>(&forward_sm90_kernel<kDType, kRow>),
               {.blocks = blocks,
                .threads = static_cast<unsigned>(kShape.threads()),
                .shared_bytes = static_cast<unsigned>(kShape.shared_bytes()),
                .stream = stream},
               arguments);
}

}  // namespace rafter::cuda
