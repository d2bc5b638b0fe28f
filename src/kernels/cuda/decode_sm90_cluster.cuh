// decode_sm90 where every KV head of every sequence has a cluster of CTAs at once: few heads, or
// one sequence. The cut and the arithmetic are those of decode_sm90.cuh, and so are the bits; what
// is missing is what a CTA needs to go from unit to unit. CTA i of C has the parts i, i + C, … of
// its head. Eight warps copy their own keys (cp.async) and attend to them. Four others bring the
// queries, merge what those have of a part and send each CTA of the head a share of the columns
// through shared memory of the cluster; each merges what it was sent in the order of the parts and
// writes it out.
#pragma once

#include "hw/cuda/cluster.cuh"
#include "hw/cuda/cluster.h"
#include "hw/cuda/early.cuh"
#include "kernels/cuda/decode_sm90_attend.cuh"
#include "kernels/cuda/decode_sm90_cluster.h"
#include "kernels/cuda/decode_sm90_finish.cuh"
#include "kernels/cuda/decode_sm90_own_keys.cuh"
#include "tiles/sm90_decode_cluster.h"

namespace rafter::cuda {

template <DType kDType, int kRow, DecodePages kPages>
struct DecodeCluster : DecodeOwnKeys<kDType, kRow, kPages> {
  using Shared = DecodeShared<kRow>;
  using Attend = DecodeAttend<kDType, kRow>;
  using Finish = DecodeFinish<kDType, kRow>;
  using Copies = DecodeOwnKeys<kDType, kRow, kPages>;
  using Copies::ask, Copies::first_key, Copies::rows_of;
  using Copies::cta, Copies::ctas, Copies::lane, Copies::warp;
  using Copies::kPaged, Copies::kShape, Copies::kSlots;
  using Copies::params, Copies::shared;
  using typename Copies::Next;
  static constexpr int kColumnsLog2 = kRow == 0 ? 4 : 5;  // four at a time
  static constexpr int kColumns = 1 << kColumnsLog2;
  static_assert(4 * kColumns == kShape.head_dim && kColumns <= 32);

  static constexpr int kThreads = 32 * (Shared::kWarps + tiles::kDecodeFinishWarps);

  const std::uint32_t result_barrier;

  /// Queries, behind what the warps have of a part.
  static constexpr int kQueryBytes = tiles::kDecodeBlockRows * kShape.query_pitch();
  __device__ std::uint32_t queries() const {
    return shared.at(kShape.ring_bytes() + kShape.exchange_bytes());
  }
  __device__ std::uint32_t queries_there() const {
    return shared_address(&shared.control.query_full[0]);
  }

  // What a CTA is sent: of each part and row its share of the columns, four at a time, then
  // (maximum, sum).
  __device__ int share_log2() const { return kColumnsLog2 - (31 - __clz(ctas)); }
  __device__ int share() const { return 1 << share_log2(); }
  __device__ unsigned char* received() const {
    return shared.raw + kShape.ring_bytes() + kShape.exchange_bytes() + kQueryBytes;
  }
  __device__ float4* received_o(int part, int r, int rows) const {
    return reinterpret_cast<float4*>(received()) + (part * rows + r) * share();
  }
  __device__ float2* received_state(int part, int r, int rows, int parts) const {
    return reinterpret_cast<float2*>(received_o(parts, 0, rows)) + part * rows + r;
  }

  __device__ int finisher() const { return warp - Shared::kWarps; }

  /// Merges what the warps have of this warp's rows of a part and sends it, unless rehearsed.
  __device__ void send(const DecodeUnit& unit, int rows, bool real) const {
    const int c = lane % kColumns, to = c >> share_log2(), first = to << share_log2();
    const std::uint32_t barrier = Copies::address_of(result_barrier, to);
#pragma unroll 1
    for (int r = finisher(); r < rows; r += tiles::kDecodeFinishWarps) {
      float2 state;
      float4 o = Finish{params, shared}.of_warps(r, 4 * c, state);
      // Else nothing of it would be done in the rehearsal.
      asm volatile("" : "+f"(o.x), "+f"(o.y), "+f"(o.z), "+f"(o.w), "+f"(state.x), "+f"(state.y));
      const float4* const place = received_o(unit.part, r, rows) + c - first;
      if (real && lane < kColumns) {
        cluster_send(Copies::address_of(shared_address(place), to), o, barrier);
        if (c == first) {
          cluster_send(Copies::address_of(
                           shared_address(received_state(unit.part, r, rows, unit.parts)), to),
                       state, barrier);
        }
      }
    }
  }

  /// Merges what the parts have of this CTA's columns, in their order, and writes it out.
  __device__ void write(const DecodeUnit& unit, int rows, bool real) const {
    const int thread = static_cast<int>(threadIdx.x) - 32 * Shared::kWarps;
    const int c = thread & (share() - 1), d = 4 * ((cta << share_log2()) + c);
    constexpr int kFinishThreads = 32 * tiles::kDecodeFinishWarps;
    if (real) {  // all: a CTA that has ended can be sent nothing
      cluster_barrier_wait(result_barrier, 0);
    }
    if (d >= params.head_dim_v) {
      return;
    }
#pragma unroll 1
    for (int r = thread >> share_log2(); r < rows; r += kFinishThreads >> share_log2()) {
      typename Finish::Merged merged;
#pragma unroll 4
      for (int part = 0; part < unit.parts; ++part) {
        merged.join(*received_state(part, r, rows, unit.parts), received_o(part, r, rows)[c]);
      }
      Finish{params, shared}.write_result(unit, r, d, merged, real);
    }
  }

  /// Takes what the others have of the parts of this CTA. Before there is anything all of it is
  /// rehearsed on whatever lies in shared memory: instructions come from memory too, which takes
  /// as long as it takes while nobody waits, and not after the last key.
  __device__ void finish(DecodeUnit& unit, int rows) const {
    if (finisher() == 0) {
      Copies::ask_queries(unit, rows, queries());
      commit_copies();
      wait_copies<0>();
      __syncwarp();
    }
    cluster_wait();
    if (finisher() == 0 && lane == 0) {
      barrier_arrive(queries_there());
    }
    unit.part = cta;
    int count = 0;  // parts
#pragma unroll 1
    for (int real = 0; real < 2; ++real) {
#pragma unroll 1
      do {
        if (real != 0) {
          if (unit.part >= unit.parts) {
            break;
          }
          barrier_wait(shared_address(&shared.control.written), count++ % 2);
        }
        send(unit, rows, real != 0);
        __syncwarp();
        if (lane == 0) {
          barrier_arrive(shared_address(&shared.control.taken));
        }
        unit.part += real != 0 ? ctas : 0;
      } while (real != 0);
      write(unit, rows, real != 0);
    }
    if (finisher() == 0 && cta == 0) {
      unit.part = 0;
      count_bad_pages(params, unit);
    }
  }

  __device__ void run() const {
    DecodeUnit unit = Copies::head();
    const AskedIndex length = Copies::ask_length(unit);
    const int rows = Shared::rows_of(params, unit);
    typename Copies::Finder find;
    if constexpr (kPaged) {
      if (warp < Shared::kWarps) {
        find = Copies::finder(unit);
        Copies::ask_first_pages(find);
      }
    }
    Copies::set_cut(unit, length);
    if (threadIdx.x == 0) {
      barrier_init(result_barrier, 1);
      barrier_init(shared_address(&shared.control.written), Shared::kWarps);
      barrier_init(shared_address(&shared.control.taken), tiles::kDecodeFinishWarps);
      barrier_init(queries_there(), 1);
      barrier_init_fence();
      barrier_arrive_expect(result_barrier,
                            static_cast<std::uint32_t>(unit.parts * rows * (share() * 16 + 8)));
    }
    cluster_arrive();
    if (warp >= Shared::kWarps) {
      finish(unit, rows);
      return;
    }
    const Attend attend{params, shared};
    typename Attend::Rows mine;
    const unsigned char *const k_rows = rows_of(unit, params.k), *const v_rows =
                                                                     rows_of(unit, params.v);
    Next next = Copies::first_of(unit, find);
    attend.set_masks(unit, mine);
    Attend::empty_rows(mine);
    set_common_keys(params, unit);
    unit.part = cta;
    int tile = unit.first_tile + cta, slot = 0;
    std::uint32_t count = 0;  // parts; one was rehearsed
    float s[4];
    // One place for all copies, as instructions come from memory too: the first rounds only ask.
#pragma unroll 1
    for (int round = 0;; ++round) {
      const bool values = round % 2 != 0;
      bool ends = false;  // a part
      if constexpr (kPages == DecodePages::any) {
        if (!values) {
          Copies::prepare(unit, next);
        }
      }
      if (round >= kSlots) {
        if (round == kSlots) {
          cluster_wait();  // before anything is sent; the keys take longer
        }
        if (unit.part >= unit.parts) {
          break;
        }
        if (values) {
          attend.softmax(mine, s);
        }
        wait_copies<kSlots - 1>();
        __syncwarp();
        const bool there = tile < unit.end_tile;  // else the sequence has no keys
        if (!values) {
          if (round == kSlots) {
            barrier_wait(queries_there(), 0);
            Copies::read_queries(mine, queries());
          }
          s[0] = s[1] = s[2] = s[3] = -INFINITY;
          if (there) {
            const std::uint32_t present =
                kPages == DecodePages::blocks ? Copies::present_of_block(slot, next)
                : kPaged                      ? Attend::shared_word(shared.present(slot) + warp * 4)
                                              : Copies::kAllPresent;
            attend.scores(mine, shared.slot(slot), warp, s);
            attend.finish_scores(unit, mine, present, first_key(tile), s);
          }
        } else {
          if (there) {
            attend.values(mine, slot, warp, s);
          }
          tile += unit.parts;
          ends = tile >= unit.end_tile;
        }
        __syncwarp();
      }
      ask(unit, next, values, slot, k_rows, v_rows);
      slot = slot + 1 == kSlots ? 0 : slot + 1;
      if (ends) {
        attend.hand_over(unit, mine, ++count);
        Attend::empty_rows(mine);  // elsewhere every tile would select each number anew
        unit.part += ctas;
        tile = unit.first_tile + unit.part;
      }
    }
  }
};

template <DType kDType, int kRow, DecodePages kPages>
__global__ void __launch_bounds__(DecodeCluster<kDType, kRow, kPages>::kThreads, 1)
    decode_sm90_cluster_kernel(const __grid_constant__ DecodeParams params) {
  let_next_grid_begin();
  wait_for_earlier_grids();
  extern __shared__ unsigned char raw[];
  __shared__ DecodeControl control;  // for the sake of its type
  __shared__ std::uint64_t result_barrier;
  constexpr int kPageBytes =
      kPages != DecodePages::none
          ? tiles::sm90_decode_cluster_page_bytes(tiles::kSm90DecodeRows[0][kRow])
          : 16;
  __shared__ __align__(512) unsigned char pages[kPageBytes];
  constexpr std::uint32_t kAlign = tiles::Sm90DecodeRow::kAlign;
  const std::uint32_t start = shared_address(raw);
  const DecodeShared<kRow> shared{
      {raw + ((start + kAlign - 1) / kAlign * kAlign - start), control}};
  DecodeCluster<kDType, kRow, kPages>{{params, shared, shared_address(pages)},
                                      shared_address(&result_barrier)}
      .run();
}

template <DType kDType, int kRow>
Status launch_decode_sm90_cluster(const DecodeParams& params, bool, unsigned heads, unsigned ctas,
                                  void* stream) {
  constexpr tiles::Sm90DecodeRow kShape = tiles::kSm90DecodeRows[0][kRow];
  void* arguments[] = {const_cast<DecodeParams*>(&params)};
  const std::int64_t shared_bytes = tiles::sm90_decode_cluster_bytes(
      kShape, params.max_parts, params.seqlen_q * params.group, static_cast<int>(ctas));
  const auto kernel_of = [&]<DecodePages kPages>() {
    return reinterpret_cast<const void*>(&decode_sm90_cluster_kernel<kDType, kRow, kPages>);
  };
  const void* const kernel = params.page_size == 0
                                 ? kernel_of.template operator()<DecodePages::none>()
                             : params.page_size % tiles::kDecodeBlockKeys == 0
                                 ? kernel_of.template operator()<DecodePages::blocks>()
                                 : kernel_of.template operator()<DecodePages::any>();
  return launch_in_clusters(kernel,
                            {.blocks = heads * ctas,
                             .threads = DecodeCluster<kDType, kRow, DecodePages::none>::kThreads,
                             .shared_bytes = static_cast<unsigned>(shared_bytes),
                             .stream = stream},
                            tiles::sm90_decode_launched_cluster(heads, ctas), arguments);
}

}  // namespace rafter::cuda
