// decode_sm90 where every KV head of every sequence has a cluster of CTAs at once: few heads, or
// one sequence. The cut and the arithmetic are those of decode_sm90.cuh, and so are the bits; what
// is missing is what a CTA needs to go from unit to unit. CTA i of C has the parts i, i + C, … of
// its head. Eight warps copy their own keys (cp.async) and attend to them. Four others merge what
// those have of a part, they themselves that of the last, and send each CTA of the cluster a share
// of the columns through shared memory of the cluster; each merges what it was sent in the order of
// the parts and writes it out.
#pragma once

#include "hw/cuda/cluster.cuh"
#include "hw/cuda/cluster.h"
#include "hw/cuda/early.cuh"
#include "kernels/cuda/decode_sm90_attend.cuh"
#include "kernels/cuda/decode_sm90_cluster.h"
#include "kernels/cuda/decode_sm90_cluster_copies.cuh"
#include "kernels/cuda/decode_sm90_finish.cuh"
#include "tiles/sm90_decode_cluster.h"

namespace rafter::cuda {

template <DType kDType, int kRow, DecodePages kPages>
struct DecodeCluster : DecodeClusterCopies<DecodeShared<kRow>, kPages> {
  using Shared = DecodeShared<kRow>;
  using Attend = DecodeAttend<kDType, kRow>;
  using Finish = DecodeFinish<kDType, kRow>;
  using Copies = DecodeClusterCopies<Shared, kPages>;
  using Copies::ask, Copies::first_key, Copies::rows_of;
  using Copies::cta, Copies::ctas, Copies::chunk, Copies::lane, Copies::warp;
  using Copies::kChunks, Copies::kPaged, Copies::kRowsAtOnce, Copies::kShape, Copies::kSlots;
  using Copies::params, Copies::shared;
  using typename Copies::Next;
  static constexpr int kColumnsLog2 = kRow == 0 ? 4 : 5;  // four at a time
  static constexpr int kColumns = 1 << kColumnsLog2;
  static_assert(4 * kColumns == kShape.head_dim && kColumns <= 32);

  static constexpr int kThreads = 32 * (Shared::kWarps + tiles::kDecodeFinishWarps);

  const std::uint32_t result_barrier;

  // Queries: where this warp leaves its results later.
  static_assert(tiles::kDecodeBlockRows * kShape.query_pitch() <=
                tiles::kDecodeBlockRows * kShape.head_dim * 4);
  __device__ std::uint32_t queries() const {
    return shared_address(shared.exchange_o() + warp * tiles::kDecodeBlockRows * kShape.head_dim);
  }
  __device__ void ask_queries(const DecodeUnit& unit, int rows) const {
#pragma unroll 1
    for (int r = lane / kChunks; r < tiles::kDecodeBlockRows; r += kRowsAtOnce) {
      const int position = params.seqlen_q > 1 ? r / params.group : 0;
      const unsigned char* const from =
          params.q.data + unit.batch * params.q.stride_batch + position * params.q.stride_seqlen +
          (unit.head * params.group + r - position * params.group) * params.q.stride_heads +
          chunk * 16;
      copy_16_async_alone(queries() + r * kShape.query_pitch() + chunk * 16, from,
                          r < rows && chunk < params.q.chunks ? 16 : 0);
    }
  }
  __device__ void read_queries(typename Attend::Rows& rows) const {
#pragma unroll
    for (int i = 0; i < Attend::kSteps; i += 2) {
      std::uint32_t word[4];
      load_matrices(word, queries() + lane % 8 * kShape.query_pitch() + 32 * i + lane / 8 * 16);
      rows.q[i][0] = word[0];
      rows.q[i][1] = word[1];
      rows.q[i + 1][0] = word[2];
      rows.q[i + 1][1] = word[3];
    }
  }

  // What a CTA is sent: of each part and row its share of the columns, four at a time, then
  // (maximum, sum).
  __device__ int share_log2() const { return kColumnsLog2 - (31 - __clz(ctas)); }
  __device__ int share() const { return 1 << share_log2(); }
  __device__ unsigned char* received() const {
    return shared.raw + kShape.ring_bytes() + kShape.exchange_bytes();
  }
  __device__ float4* received_o(int part, int r, int rows) const {
    return reinterpret_cast<float4*>(received()) + (part * rows + r) * share();
  }
  __device__ float2* received_state(int part, int r, int rows, int parts) const {
    return reinterpret_cast<float2*>(received_o(parts, 0, rows)) + part * rows + r;
  }

  /// Merges what the warps have of row r of a part and sends it.
  __device__ void send(const DecodeUnit& unit, int rows, int r) const {
    const int c = lane % kColumns;
    if (r >= rows) {
      return;
    }
    float2 state[Shared::kWarps];
    float4 part[Shared::kWarps];
    float top = -INFINITY;
#pragma unroll
    for (int s = 0; s < Shared::kWarps; ++s) {
      const int of = s * tiles::kDecodeBlockRows + r;
      state[s] = shared.exchange_state()[of];
      part[s] =
          *reinterpret_cast<const float4*>(shared.exchange_o() + Shared::exchange_place(of, 4 * c));
      top = fmaxf(top, state[s].x);
    }
    const float finite = top == -INFINITY ? 0.0f : top;
    float sum = 0;
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int s = 0; s < Shared::kWarps; ++s) {
      const float weight = exp2_approx(state[s].x - finite);
      sum += state[s].y * weight;
      o.x += part[s].x * weight;
      o.y += part[s].y * weight;
      o.z += part[s].z * weight;
      o.w += part[s].w * weight;
    }
    const int to = c >> share_log2(), first = to << share_log2();
    const std::uint32_t barrier = cluster_address(result_barrier, to);
    if (lane < kColumns) {
      cluster_send(cluster_address(shared_address(received_o(unit.part, r, rows) + c - first), to),
                   o, barrier);
      if (c == first) {
        cluster_send(
            cluster_address(shared_address(received_state(unit.part, r, rows, unit.parts)), to),
            make_float2(top, sum), barrier);
      }
    }
  }

  /// Merges what the parts have of this CTA's columns, in their order, and writes it out.
  __device__ void write(const DecodeUnit& unit, int rows) const {
    const int r = static_cast<int>(threadIdx.x) >> share_log2();
    const int c = static_cast<int>(threadIdx.x) & (share() - 1);
    const int d = 4 * ((cta << share_log2()) + c);
    cluster_barrier_wait(result_barrier, 0);  // all: a CTA that has ended can be sent nothing
    if (r >= rows || d >= params.head_dim_v) {
      return;
    }
    typename Finish::Merged merged;
#pragma unroll 4
    for (int part = 0; part < unit.parts; ++part) {
      merged.join(*received_state(part, r, rows, unit.parts), received_o(part, r, rows)[c]);
    }
    Finish{params, shared}.write_result(unit, r, d, merged);
  }

  /// As attend.finish_scores(), which has nothing to hide where all rows see all 16 keys.
  __device__ void finish_scores(const Attend& attend, const DecodeUnit& unit,
                                const typename Attend::Rows& mine, int slot, std::uint32_t present,
                                int first, float (&s)[4]) const {
    const bool alike = params.seqlen_q == 1 || (params.window_left < 0 && params.window_right < 0);
    if (present == Copies::kAllPresent && alike && params.transform_cap == 0 &&
        params.tree_mask == nullptr && first >= unit.first_key &&
        first + Copies::kKeys <= unit.end_key) {
#pragma unroll
      for (float& score : s) {
        score *= params.scale_log2;
      }
    } else {
      attend.finish_scores(mine, slot, warp, first, s);
    }
  }

  /// No part of this CTA follows that of the unit.
  __device__ bool last(const DecodeUnit& unit) const { return unit.part + ctas >= unit.parts; }

  /// What this CTA has of a part is complete. The warps that attend send their last one themselves,
  /// a row each; before it they go on while others do.
  __device__ void finish(const Attend& attend, const DecodeUnit& unit,
                         const typename Attend::Rows& mine, int rows, int count) const {
    attend.hand_over(unit, mine, static_cast<std::uint32_t>(count));
    if (last(unit)) {
      barrier_wait(shared_address(&shared.control.written), count % 2);
      send(unit, rows, warp);
    }
  }
  /// Sends the parts before the last. By the warps that do not attend.
  __device__ void finish_parts(DecodeUnit& unit, int rows) const {
    unit.part = cta;
    if (last(unit)) {
      return;
    }
    cluster_wait();
#pragma unroll 1
    for (int count = 0; !last(unit); ++count, unit.part += ctas) {
      barrier_wait(shared_address(&shared.control.written), count % 2);
#pragma unroll 1
      for (int r = warp - Shared::kWarps; r < rows; r += tiles::kDecodeFinishWarps) {
        send(unit, rows, r);
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(shared_address(&shared.control.taken));
      }
    }
  }

  __device__ void run() const {
    DecodeUnit unit = Copies::head();
    const AskedIndex length = Copies::ask_length(unit);
    const int rows = Shared::rows_of(params, unit);
    typename Copies::Finder find;
    if (warp < Shared::kWarps) {
      if constexpr (kPaged) {
        find = Copies::finder(unit);
        Copies::ask_first_pages(find);
      }
      ask_queries(unit, rows);
    }
    Copies::set_cut(unit, length);
    if (threadIdx.x == 0) {
      barrier_init(result_barrier, 1);
      barrier_init(shared_address(&shared.control.written), Shared::kWarps);
      barrier_init(shared_address(&shared.control.taken), tiles::kDecodeFinishWarps);
      barrier_init_fence();
      barrier_arrive_expect(result_barrier,
                            static_cast<std::uint32_t>(unit.parts * rows * (share() * 16 + 8)));
    }
    cluster_arrive();
    if (warp >= Shared::kWarps) {
      finish_parts(unit, rows);
      return;
    }
    const Attend attend{params, shared};
    typename Attend::Rows mine;
    const unsigned char *const k_rows = rows_of(unit, params.k), *const v_rows =
                                                                     rows_of(unit, params.v);
    Next next = Copies::first_of(unit, find);
    unit.part = cta;
    int tile = unit.first_tile + cta, slot = 0, count = 0;  // parts
    bool first_of_part = true;
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
        } else if (first_of_part) {
          attend.empty_rows(unit, mine);
          first_of_part = false;
        }
        wait_copies<kSlots - 1>();
        __syncwarp();
        const bool there = tile < unit.end_tile;  // else the sequence has no keys
        if (!values) {
          if (round == kSlots) {
            read_queries(mine);
          }
          s[0] = s[1] = s[2] = s[3] = -INFINITY;
          if (there) {
            const std::uint32_t present =
                kPages == DecodePages::blocks ? Copies::present_of_block(slot, next)
                : kPaged                      ? Attend::shared_word(shared.present(slot) + warp * 4)
                                              : Copies::kAllPresent;
            attend.scores(mine, shared.slot(slot), warp, s);
            finish_scores(attend, unit, mine, slot, present, first_key(tile), s);
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
        finish(attend, unit, mine, rows, count++);
        unit.part += ctas;
        tile = unit.first_tile + unit.part;
        first_of_part = true;
      }
    }
    write(unit, rows);
    if (warp == 0 && cta == 0) {
      unit.part = 0;
      count_bad_pages(params, unit);
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
  const int shared_bytes = tiles::sm90_decode_cluster_bytes(
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
                            ctas, arguments);
}

}  // namespace rafter::cuda
