// decode_sm90 where every KV head of every sequence has a cluster of CTAs at once: few heads, or
// one sequence. The cut and the arithmetic are decode_sm90_columns.cuh's, and so are the bits; what
// is missing is what a CTA needs to go from unit to unit. CTA i of C has the parts i, i + C, … of
// its head. Each of its warps copies its own keys (cp.async); a warp that has columns of O sends
// them, of each part, to one CTA of the cluster through shared memory of the cluster; each merges
// what it was sent in the order of the parts and writes it out.
#pragma once

#include "hw/cuda/cluster.cuh"
#include "hw/cuda/cluster.h"
#include "hw/cuda/early.cuh"
#include "kernels/cuda/decode_sm90_cluster.h"
#include "kernels/cuda/decode_sm90_cluster_copies.cuh"
#include "kernels/cuda/decode_sm90_columns_attend.cuh"
#include "kernels/cuda/decode_sm90_columns_finish.cuh"
#include "tiles/sm90_decode_cluster.h"

namespace rafter::cuda {

template <DType kDType, int kWidth, int kRow, bool kPaged, int kBlocks>
struct DecodeColumnsCluster : DecodeClusterCopies<DecodeColumns<kWidth, kRow>,
                                                  kPaged ? DecodePages::any : DecodePages::none> {
  using Shared = DecodeColumns<kWidth, kRow>;
  using Attend = DecodeColumnsAttend<kDType, kWidth, kRow, kBlocks>;
  using Finish = DecodeColumnsFinish<kDType, kWidth, kRow>;
  using Copies = DecodeClusterCopies<Shared, kPaged ? DecodePages::any : DecodePages::none>;
  using Copies::ask, Copies::first_key, Copies::rows_of;
  using Copies::cta, Copies::ctas, Copies::lane, Copies::warp;
  using Copies::kShape, Copies::kSlots;
  using Copies::params, Copies::shared;
  using typename Copies::Next;

  const bool e4m3;
  const std::uint32_t result_barrier;

  __device__ std::uint32_t queries() const { return shared.queries(kBlocks, 0); }
  /// By all warps; zeros where there is no row.
  __device__ void ask_queries(const DecodeUnit& unit, int rows) const {
    constexpr int kChunks = kShape.head_dim / 8;  // of 16 bytes
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
#pragma unroll 1
    for (int r = static_cast<int>(threadIdx.x) / kChunks; r < kBlocks * tiles::kDecodeBlockRows;
         r += 32 * kShape.warps / kChunks) {
      const int position = params.seqlen_q > 1 ? r / params.group : 0;
      const unsigned char* const from =
          params.q.data + unit.batch * params.q.stride_batch + position * params.q.stride_seqlen +
          (unit.head * params.group + r - position * params.group) * params.q.stride_heads +
          chunk * 16;
      copy_16_async_alone(queries() + r * kShape.query_pitch() + chunk * 16, from,
                          r < rows && chunk < params.q.chunks ? 16 : 0);
    }
  }

  // What a CTA is sent: of each part the columns of warps cta, cta + ctas, …, four numbers a lane,
  // then (maxima, sums).
  __device__ int share() const {
    return tiles::sm90_decode_cluster_share(kShape.value_warps(), ctas);
  }
  __device__ bool has_share() const { return cta < kShape.value_warps(); }
  __device__ float4* received_o(int part, int block, int of) const {
    return shared.behind_queries(kBlocks, 1) + ((part * kBlocks + block) * share() + of) * 32 +
           lane;
  }
  __device__ float4* received_state(int part, int block, int parts) const {
    return received_o(parts, 0, 0) - lane + (part * kBlocks + block) * 4 + lane % 4;
  }

  /// Sends this warp's columns of a part.
  __device__ void send(const Attend& attend, const DecodeUnit& unit,
                       const typename Attend::Rows& mine) const {
    if (warp >= kShape.value_warps()) {
      return;
    }
    const int to = warp % ctas;
    const std::uint32_t barrier = Copies::address_of(result_barrier, to);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      cluster_send(Copies::address_of(shared_address(received_o(unit.part, b, warp / ctas)), to),
                   Attend::columns_of(mine, 0, b), barrier);
      if (warp < ctas && lane < 4) {
        cluster_send(
            Copies::address_of(shared_address(received_state(unit.part, b, unit.parts)), to),
            attend.state_of(mine, b), barrier);
      }
    }
  }

  /// Merges what the parts have of this CTA's columns, in their order, and writes it out.
  __device__ void write(const DecodeUnit& unit) const {
    if (!has_share()) {
      return;
    }
    cluster_barrier_wait(result_barrier, 0);  // all: a CTA that has ended can be sent nothing
    const Finish finish{params, shared};
#pragma unroll 1
    for (int i = warp; i < share() * kBlocks; i += kShape.warps) {
      const int block = i / share(), of = i - block * share();
      typename Finish::Merged merged;
      float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int part = 0; part < unit.parts; ++part) {
        merged.join(*received_state(part, block, unit.parts));
        o = merged.columns(o, *received_o(part, block, of));
      }
      finish.write_result(unit, block, cta + of * ctas, merged.state, o);
    }
  }

  __device__ void run() const {
    DecodeUnit unit = Copies::head();
    const AskedIndex length = Copies::ask_length(unit);
    const int rows = Shared::rows_of(params, unit);
    typename Copies::Finder find;
    if constexpr (kPaged) {
      find = Copies::finder(unit);
      Copies::ask_first_pages(find);
    }
    ask_queries(unit, rows);
    Copies::set_cut(unit, length);
    if (threadIdx.x == 0) {
      barrier_init(result_barrier, 1);
      barrier_init_fence();
      const int bytes =
          has_share() ? tiles::sm90_decode_cluster_part_bytes(kShape.value_warps(), kBlocks, ctas)
                      : 0;
      barrier_arrive_expect(result_barrier, static_cast<std::uint32_t>(unit.parts * bytes));
    }
    cluster_arrive();
    const Attend attend{{params, e4m3, shared}};
    typename Attend::Queries q;
    typename Attend::Rows mine;
    const unsigned char *const k_rows = rows_of(unit, params.k), *const v_rows =
                                                                     rows_of(unit, params.v);
    set_common_keys(params, unit);
    Next next = Copies::first_of(unit, find);
    unit.part = cta;
    int tile = unit.first_tile + cta, slot = 0;
    bool first_of_part = true;
    typename Attend::Scores s;
    // One place for all copies, as instructions come from memory too: the first rounds only ask.
#pragma unroll 1
    for (int round = 0;; ++round) {
      const bool values = round % 2 != 0;
      bool ends = false;  // a part
      if constexpr (kPaged) {
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
        const bool there = tile < unit.end_tile;  // else the sequence has no keys
        if (!values) {
          if (first_of_part) {
            attend.empty_rows(mine);
            first_of_part = false;
          }
          wait_copies<kSlots - 1>();
          __syncwarp();
          if (round == kSlots) {
            Attend::meet();  // each warp copied some of the queries
            attend.hold(q, queries());
          }
          if (there) {
            attend.scores(q, queries(), shared.slot(slot), s);
            attend.finish_scores(unit, slot, first_key(tile), s);
            attend.offer_maxima(s);
          }
          __syncwarp();
        } else {
          if (there) {
            Attend::meet();
            if (Shared::kElementWidth == 1 && params.v.scale != nullptr) {
              wait_copies<kSlots - 1>();  // factors of this warp's keys
              __syncwarp();
            }
            attend.weigh(mine, slot, s);
            wait_copies<kSlots - 1>();
            Attend::meet();
            if (attend.has_columns()) {
              attend.add_values(mine, shared.slot(slot));
            }
            Attend::meet();  // whoever copies next writes where others read
          }
          tile += unit.parts;
          ends = tile >= unit.end_tile;
        }
      }
      ask(unit, next, values, slot, k_rows, v_rows);
      slot = slot + 1 == kSlots ? 0 : slot + 1;
      if (ends) {
        attend.offer_sums(mine);
        send(attend, unit, mine);
        unit.part += ctas;
        tile = unit.first_tile + unit.part;
        first_of_part = true;
      }
    }
    write(unit);
    if (warp == 0 && cta == 0) {
      unit.part = 0;
      count_bad_pages(params, unit);
    }
  }
};

template <DType kDType, int kWidth, int kRow, bool kPaged, int kBlocks>
__global__ void __launch_bounds__(32 * DecodeColumns<kWidth, kRow>::kWarps, 1)
    decode_sm90_columns_cluster_kernel(const __grid_constant__ DecodeParams params, bool e4m3) {
  let_next_grid_begin();
  wait_for_earlier_grids();
  extern __shared__ unsigned char raw[];
  __shared__ DecodeControl control;  // for the sake of its type
  __shared__ std::uint64_t result_barrier;
  constexpr int kPageBytes =
      kPaged ? tiles::sm90_decode_cluster_page_bytes(tiles::kSm90DecodeRows[kWidth][kRow]) : 16;
  __shared__ __align__(512) unsigned char pages[kPageBytes];
  constexpr std::uint32_t kAlign = tiles::Sm90DecodeRow::kAlign;
  const std::uint32_t start = shared_address(raw);
  const DecodeColumns<kWidth, kRow> shared{
      {raw + ((start + kAlign - 1) / kAlign * kAlign - start), control}};
  DecodeColumnsCluster<kDType, kWidth, kRow, kPaged, kBlocks>{
      {params, shared, shared_address(pages)}, e4m3, shared_address(&result_barrier)}
      .run();
}

template <DType kDType, int kWidth, int kRow, bool kPaged>
const void* decode_sm90_columns_cluster_of(int blocks) {
  if constexpr (tiles::kSm90DecodeRows[kWidth][kRow].least_column_blocks() == 1) {
    if (blocks == 1) {
      return reinterpret_cast<const void*>(
          &decode_sm90_columns_cluster_kernel<kDType, kWidth, kRow, kPaged, 1>);
    }
  }
  return reinterpret_cast<const void*>(
      &decode_sm90_columns_cluster_kernel<kDType, kWidth, kRow, kPaged,
                                          tiles::kDecodeClusterBlocks>);
}

template <DType kDType, int kWidth, int kRow>
Status launch_decode_sm90_columns_cluster(const DecodeParams& params, bool e4m3, unsigned heads,
                                          unsigned ctas, void* stream) {
  constexpr tiles::Sm90DecodeRow kShape = tiles::kSm90DecodeRows[kWidth][kRow];
  void* arguments[] = {const_cast<DecodeParams*>(&params), &e4m3};
  const std::int64_t shared_bytes = tiles::sm90_decode_column_cluster_bytes(
      kShape, params.max_parts, params.blocks, static_cast<int>(ctas));
  const void* const kernel =
      params.page_size > 0
          ? decode_sm90_columns_cluster_of<kDType, kWidth, kRow, true>(params.blocks)
          : decode_sm90_columns_cluster_of<kDType, kWidth, kRow, false>(params.blocks);
  return launch_in_clusters(kernel,
                            {.blocks = heads * ctas,
                             .threads = 32 * kShape.warps,
                             .shared_bytes = static_cast<unsigned>(shared_bytes),
                             .stream = stream},
                            tiles::sm90_decode_launched_cluster(heads, ctas), arguments);
}

}  // namespace rafter::cuda
