// decode_sm90 where every CTA has as many whole heads as the others: sequences of one length, heads
// enough for all SMs. The cut and the arithmetic are those of decode_sm90.cuh, and so are the bits;
// nobody has to find units, wait for another CTA or fill slots for others. The heads of a CTA and
// the parts of each follow each other:
//   eight warps   copy their own keys (cp.async), those of the next head while they attend to the
//                 last of this one, and leave what they have of a part in shared memory
//   four others   merge that, and the parts in their order, and write the result of a head
#pragma once

#include "hw/cuda/early.cuh"
#include "hw/cuda/early.h"
#include "kernels/cuda/decode_sm90_attend.cuh"
#include "kernels/cuda/decode_sm90_cluster.h"
#include "kernels/cuda/decode_sm90_finish.cuh"
#include "kernels/cuda/decode_sm90_own_keys.cuh"
#include "tiles/sm90_decode_cluster.h"

namespace rafter::cuda {

template <DType kDType, int kRow>
struct DecodeHeads : DecodeOwnKeys<kDType, kRow, DecodePages::none> {
  using Shared = DecodeShared<kRow>;
  using Attend = DecodeAttend<kDType, kRow>;
  using Finish = DecodeFinish<kDType, kRow>;
  using Copies = DecodeOwnKeys<kDType, kRow, DecodePages::none>;
  using Copies::ask, Copies::first_key, Copies::more, Copies::rows_of;
  using Copies::kShape, Copies::kSlots;
  using Copies::lane, Copies::params, Copies::shared, Copies::warp;
  using typename Copies::Next;

  static constexpr int kThreads = 32 * (Shared::kWarps + tiles::kDecodeFinishWarps);
  static constexpr int kColumns = kShape.head_dim / 4;  // four at a time
  static_assert(kColumns <= 32);

  __device__ void set_head(DecodeUnit& unit, int of) const {
    unit.batch = of / params.heads_kv;
    unit.head = of - unit.batch * params.heads_kv;
  }

  /// Results of the warps become those of heads. By the warps that do not attend.
  __device__ void finish_heads(DecodeUnit& unit, int head, int end, int rows) const {
    constexpr int kEach = tiles::kDecodeBlockRows / tiles::kDecodeFinishWarps;  // rows of a warp
    const int first = warp - Shared::kWarps, d = 4 * (lane % kColumns);
    const Finish finish{params, shared};
    std::uint32_t count = 0;
#pragma unroll 1
    for (; head < end; ++head) {
      typename Finish::Merged merged[kEach];
#pragma unroll 1
      for (int part = 0; part < unit.parts; ++part, ++count) {
        barrier_wait(shared_address(&shared.control.written), count % 2);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int r = first + i * tiles::kDecodeFinishWarps;
          if (r < rows) {
            float2 state;
            const float4 o = finish.of_warps(r, d, state);
            merged[i].join(state, o);
          }
        }
        __syncwarp();
        if (lane == 0) {
          barrier_arrive(shared_address(&shared.control.taken));
        }
      }
      set_head(unit, head);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int r = first + i * tiles::kDecodeFinishWarps;
        if (r < rows && lane < kColumns && d < params.head_dim_v) {
          finish.write_result(unit, r, d, merged[i]);
        }
      }
    }
  }

  __device__ void run() const {
    int head = as_if_of_lanes(static_cast<int>(blockIdx.x)) * params.share;
    const int end = min(head + params.share, params.batch * params.heads_kv);
    DecodeUnit unit = Copies::head();  // every head is cut alike
    Copies::set_cut(unit, Copies::ask_length(unit));
    set_head(unit, head);
    const int rows = Shared::rows_of(params, unit);
    if (threadIdx.x == 0) {
      barrier_init(shared_address(&shared.control.written), Shared::kWarps);
      barrier_init(shared_address(&shared.control.taken), tiles::kDecodeFinishWarps);
      barrier_init_fence();
    }
    __syncthreads();
    if (warp >= Shared::kWarps) {
      finish_heads(unit, head, end, rows);
      return;
    }
    const Attend attend{params, shared};
    typename Attend::Rows mine;
    const std::uint32_t queries =
        shared.at(kShape.ring_bytes() + kShape.exchange_bytes()) +
        static_cast<std::uint32_t>(warp * tiles::kDecodeBlockRows * kShape.query_pitch());
    set_common_keys(params, unit);
    // What is asked for is up to kSlots / 2 tiles ahead.
    DecodeUnit asked = unit;
    int asked_head = head;
    const unsigned char *k_rows = rows_of(asked, params.k), *v_rows = rows_of(asked, params.v);
    Next next = Copies::first_of(asked, {});
    Copies::ask_queries(asked, rows, queries);
    unit.part = Copies::cta;  // 0, as with clusters of one
    int tile = unit.first_tile + unit.part, slot = 0;
    std::uint32_t count = 0;  // parts
    bool first_of_head = true;
    Attend::empty_rows(mine);
    float s[4];
    // One place for all copies, as instructions come from memory too: the first rounds only ask.
#pragma unroll 1
    for (int round = 0;; ++round) {
      const bool values = round % 2 != 0;
      bool ends = false;  // a part
      if (round >= kSlots) {
        if (head == end) {
          break;
        }
        if (values) {
          attend.softmax(mine, s);
        }
        wait_copies<kSlots - 1>();
        __syncwarp();
        if (!values) {
          if (first_of_head) {
            first_of_head = false;
            Copies::read_queries(mine, queries);
            attend.set_masks(unit, mine);
          }
          attend.scores(mine, shared.slot(slot), warp, s);
          attend.finish_scores(unit, mine, Attend::kAllPresent, first_key(tile), s);
        } else {
          attend.values(mine, slot, warp, s);
          tile += unit.parts;
          ends = tile >= unit.end_tile;
        }
        __syncwarp();
      }
      ask(asked, next, values, slot, k_rows, v_rows);
      slot = slot + 1 == kSlots ? 0 : slot + 1;
      if (values && asked_head + 1 < end && !more(asked, next.at)) {
        set_head(asked, ++asked_head);
        k_rows = rows_of(asked, params.k);
        v_rows = rows_of(asked, params.v);
        next = Copies::first_of(asked, {});
        Copies::ask_queries(asked, rows, queries);  // those of this head are in registers
      }
      if (ends) {
        attend.hand_over(unit, mine, count++);
        Attend::empty_rows(mine);  // elsewhere every tile would select each number anew
        unit.part += Copies::ctas;
        if (unit.part >= unit.parts) {
          unit.part = Copies::cta;
          first_of_head = true;
          set_head(unit, ++head);
        }
        tile = unit.first_tile + unit.part;
      }
    }
  }
};

template <DType kDType, int kRow>
__global__ void __launch_bounds__(DecodeHeads<kDType, kRow>::kThreads, 1)
    decode_sm90_heads_kernel(const __grid_constant__ DecodeParams params) {
  let_next_grid_begin();
  wait_for_earlier_grids();
  extern __shared__ unsigned char raw[];
  __shared__ DecodeControl control;  // for the sake of its type
  constexpr std::uint32_t kAlign = tiles::Sm90DecodeRow::kAlign;
  const std::uint32_t start = shared_address(raw);
  const DecodeShared<kRow> shared{
      {raw + ((start + kAlign - 1) / kAlign * kAlign - start), control}};
  DecodeHeads<kDType, kRow>{{params, shared, 0}}.run();
}

template <DType kDType, int kRow>
Status launch_decode_sm90_heads(const DecodeParams& params, unsigned ctas, void* stream) {
  void* arguments[] = {const_cast<DecodeParams*>(&params)};
  return launch_early(reinterpret_cast<const void*>(&decode_sm90_heads_kernel<kDType, kRow>),
                      {.blocks = ctas,
                       .threads = DecodeHeads<kDType, kRow>::kThreads,
                       .shared_bytes = static_cast<unsigned>(
                           tiles::sm90_decode_heads_bytes(tiles::kSm90DecodeRows[0][kRow])),
                       .stream = stream},
                      arguments);
}

}  // namespace rafter::cuda
