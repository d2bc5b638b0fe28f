// What kernels in clusters have in common: CTA i of C has the parts i, i + C, … of the head of its
// cluster, and each of its warps copies its own keys of their tiles (cp.async), without barriers.
#pragma once

#include "hw/cuda/cluster.cuh"
#include "hw/cuda/copies.cuh"
#include "kernels/cuda/decode_sm90_units.cuh"

namespace rafter::cuda {

/// `Shared` is DecodeShared or DecodeColumns.
template <typename Shared, bool kPaged>
struct DecodeClusterCopies {
  static constexpr tiles::Sm90DecodeRow kShape = Shared::kShape;
  static constexpr int kSlots = kShape.slots, kKeys = tiles::kDecodeBlockKeys;
  static constexpr int kChunks = 8 * kShape.panels();  // of 16 bytes in a row
  static constexpr int kRowsAtOnce = 32 / kChunks;     // that a warp copies in one instruction
  static_assert(kShape.warps == 8 && kShape.pieces() == 1 && kChunks <= 16);

  const DecodeParams& params;
  const Shared shared;
  const int cta = cluster_rank(), ctas = cluster_size();
  // Said to be the same for all lanes: else those of a branch that depends on it are gathered again
  // for every instruction of a whole warp.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int chunk = lane % kChunks;

  /// The head of this cluster; batch, lengths and cut of its sequence.
  __device__ DecodeUnit find() const {
    DecodeUnit unit;
    const int of = cluster_number();
    unit.batch = params.batch > 1 ? of / params.heads_kv : 0;
    unit.head = of - unit.batch * params.heads_kv;
    unit.seqlen_q = params.seqlen_q;
    unit.seqlen_kv = params.seqlen_kv;
    tiles::Sm90DecodeCut cut = params.same_cut;
    if (params.seqused_kv.data != nullptr) {
      unit.seqlen_kv = clamped_length(index_at(params.seqused_kv, unit.batch), params.seqlen_kv);
      cut = tiles::sm90_decode_cut(kShape, mask_of(params, unit.seqlen_q, unit.seqlen_kv),
                                   unit.seqlen_q, params.group, params.parts);
    }
    unit.parts = cut.parts;
    unit.first_tile = cut.first_tile;
    unit.end_tile = cut.end_tile;
    unit.first_key = cut.first_key;
    unit.end_key = cut.end_key;
    return unit;
  }

  /// Tiles of this CTA in turn: those of a part, then those of its next part.
  struct Next {
    int part, tile;
    AskedIndex page;  // of key lane % 16 of this warp there
  };
  __device__ Next first_of(const DecodeUnit& unit) const {
    Next next{cta, unit.first_tile + cta, {}};
    look_up(unit, next);
    return next;
  }
  __device__ bool more(const DecodeUnit& unit, const Next& next) const {
    return next.part < unit.parts && next.tile < unit.end_tile;
  }
  __device__ Next following(const DecodeUnit& unit, Next next) const {
    next.tile += unit.parts;
    if (next.tile >= unit.end_tile) {
      next.part += ctas;
      next.tile = unit.first_tile + next.part;
    }
    look_up(unit, next);
    return next;
  }
  __device__ int first_key(int tile) const { return tile * kShape.tile_keys() + warp * kKeys; }
  __device__ static bool seen(const DecodeUnit& unit, int key) {
    return key >= unit.first_key && key < unit.end_key;
  }
  __device__ void look_up(const DecodeUnit& unit, Next& next) const {
    if constexpr (kPaged) {
      const int key = first_key(next.tile) + lane % kKeys;
      next.page = ask_index(params.page_table,
                            unit.batch * params.page_table_batch + key / params.page_size,
                            more(unit, next) && seen(unit, key));
    }
  }

  /// Where this lane's chunks of the head's rows begin: of a sequence, or of a page.
  __device__ const unsigned char* rows_of(const DecodeUnit& unit, const DecodeCache& cache) const {
    return cache.data + (kPaged ? 0 : unit.batch * cache.stride_batch) +
           unit.head * cache.stride_heads + chunk * 16;
  }

  /// Asks for this warp's keys of the next tile: K, or V, whereupon the tile after it is next,
  /// whose page was asked for a tile ago. One group of copies, be it empty.
  __device__ void ask(const DecodeUnit& unit, Next& next, Next& after, bool values, int slot,
                      const unsigned char* k_rows, const unsigned char* v_rows) const {
    if (more(unit, next)) {
      const DecodeCache& cache = values ? params.v : params.k;
      const int first = first_key(next.tile), mine = lane / kChunks;
      const unsigned char* from = values ? v_rows : k_rows;
      const std::int64_t step = values ? params.v.stride_seqlen : params.k.stride_seqlen;
      std::int64_t offset = 0;  // of the row of key lane % 16
      unsigned present = 0;
      if constexpr (kPaged) {
        const int key = first + lane % kKeys, page = next.page.value(params.page_table);
        present = __ballot_sync(~0u, page >= 0 && page < params.num_pages);
        offset = page * cache.stride_batch + key % params.page_size * step;
        if (!values && lane == 0) {
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared.present(slot) + warp * 4),
                       "r"(present)
                       : "memory");
        }
      } else {
        from += (first + mine) * step;
      }
      // As place() has it: a row's low bits turn those of its chunks.
      const std::uint32_t to = shared.slot(slot) + Shared::place(warp * kKeys + mine, chunk);
      const auto behind = static_cast<unsigned>(first + mine - unit.first_key);
      const auto keys = static_cast<unsigned>(unit.end_key - unit.first_key);
      const bool within = chunk < cache.chunks;
#pragma unroll
      for (int i = 0; i < kKeys / kRowsAtOnce; ++i) {
        const int r = i * kRowsAtOnce;
        const std::uint32_t at = (to ^ r % 8 * 16) + r * tiles::kDecodePanelBytes;
        if constexpr (kPaged) {
          const std::int64_t row = __shfl_sync(~0u, offset, r + mine);
          copy_16_async_alone(at, from + row, within && (present >> (r + mine) & 1u) != 0 ? 16 : 0);
        } else {
          copy_16_async_alone(at, from, within && behind + r < keys ? 16 : 0);
          from += kRowsAtOnce * step;
        }
      }
      if (values) {
        if constexpr (kPaged) {
          next = after;
          after = following(unit, after);
        } else {
          next = following(unit, next);
        }
      }
    }
    commit_copies();
  }
};

}  // namespace rafter::cuda
