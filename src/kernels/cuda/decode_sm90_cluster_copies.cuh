// What kernels in clusters have in common: CTA i of C has the parts i, i + C, … of the head of its
// cluster, and each of its warps copies its own keys of their tiles (cp.async), without barriers.
#pragma once

#include "hw/cuda/cluster.cuh"
#include "hw/cuda/copies.cuh"
#include "hw/cuda/mma.cuh"
#include "kernels/cuda/decode_sm90_units.cuh"

namespace rafter::cuda {

/// `Shared` is DecodeShared or DecodeColumns.
template <typename Shared, bool kPaged>
struct DecodeClusterCopies {
  static constexpr tiles::Sm90DecodeRow kShape = Shared::kShape;
  static constexpr int kSlots = kShape.slots, kKeys = tiles::kDecodeBlockKeys;
  static constexpr int kChunks = 8 * kShape.panels();  // of 16 bytes in a row
  static constexpr int kRowsAtOnce = 32 / kChunks;     // that a warp copies in one instruction
  static constexpr int kCopies = kKeys / kRowsAtOnce;
  static constexpr std::uint32_t kAllPresent = (1u << kKeys) - 1;
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
  struct Tile {
    int part, tile;
  };
  __device__ bool more(const DecodeUnit& unit, const Tile& at) const {
    return at.part < unit.parts && at.tile < unit.end_tile;
  }
  __device__ Tile following(const DecodeUnit& unit, Tile at) const {
    at.tile += unit.parts;
    if (at.tile >= unit.end_tile) {
      at.part += ctas;
      at.tile = unit.first_tile + at.part;
    }
    return at;
  }

  /// The tile whose keys are asked for next, and pages that were asked for before: two tiles at a
  /// time, as whatever moves a register waits for what is on its way there.
  struct Next {
    Tile at;
    int half = 0;            // 16: the second of the two
    AskedIndex pages, then;  // of key lane % 16 of this warp in the tile lane / 16, and two later
    Tile ahead;              // the first that was not asked for
  };
  __device__ Next first_of(const DecodeUnit& unit) const {
    Next next;
    next.at = next.ahead = {cta, unit.first_tile + cta};
    if constexpr (kPaged) {
      next.pages = look_up(unit, next);
      next.then = look_up(unit, next);
    }
    return next;
  }
  __device__ void advance(const DecodeUnit& unit, Next& next) const {
    next.at = following(unit, next.at);
    if constexpr (kPaged) {
      next.half ^= kKeys;
      if (next.half == 0) {
        next.pages = next.then;
        next.then = look_up(unit, next);
      }
    }
  }
  __device__ int first_key(int tile) const { return tile * kShape.tile_keys() + warp * kKeys; }
  __device__ static bool seen(const DecodeUnit& unit, int key) {
    return key >= unit.first_key && key < unit.end_key;
  }
  /// Pages of the two tiles from `ahead` on, which moves.
  __device__ AskedIndex look_up(const DecodeUnit& unit, Next& next) const {
    Tile mine = next.ahead;
    next.ahead = following(unit, mine);
    mine = lane < kKeys ? mine : next.ahead;
    next.ahead = following(unit, next.ahead);
    const int key = first_key(mine.tile) + lane % kKeys;
    const std::int64_t row = unit.batch * params.page_table_batch;
    // Under load the memory takes longer than two tiles: what comes then is in the L2 by then.
    const int later = key + 4 * unit.parts * kShape.tile_keys();
    if (lane % 8 == 0 && later < unit.end_key) {
      prefetch_index(params.page_table, row + params.by_page.quotient(later));
    }
    return ask_index(params.page_table, row + params.by_page.quotient(key),
                     more(unit, mine) && seen(unit, key));
  }

  /// Where this lane's chunks of the head's rows begin: of a sequence, or of a page.
  __device__ const unsigned char* rows_of(const DecodeUnit& unit, const DecodeCache& cache) const {
    return cache.data + (kPaged ? 0 : unit.batch * cache.stride_batch) +
           unit.head * cache.stride_heads + chunk * 16;
  }

  /// The factor of a key a lane, zero where nobody sees it.
  __device__ void ask_factor(const DecodeUnit& unit, const Next& next, const DecodeCache& cache,
                             std::uint32_t factors) const {
    if (cache.scale == nullptr || lane / kKeys * kKeys != next.half) {
      return;
    }
    const int key = first_key(next.at.tile) + lane % kKeys;
    std::int64_t outer = unit.batch, inner = key;
    bool there = seen(unit, key);
    if constexpr (kPaged) {
      outer = next.pages.value(params.page_table);
      inner -= std::int64_t{params.by_page.quotient(key)} * params.page_size;
      there = outer >= 0 && outer < params.num_pages;
    }
    copy_4_async(factors + (warp * kKeys + lane % kKeys) * 4,
                 cache.scale + unit.head * cache.scale_heads +
                     (there ? outer * cache.scale_batch + inner * cache.scale_seqlen : 0),
                 there ? 4 : 0);
  }

  /// Asks for this warp's keys of the next tile: K, or V, whereupon the tile after it is next. One
  /// group of copies, be it empty.
  __device__ void ask(const DecodeUnit& unit, Next& next, bool values, int slot,
                      const unsigned char* k_rows, const unsigned char* v_rows) const {
    if (more(unit, next.at)) {
      const DecodeCache& cache = values ? params.v : params.k;
      const int first = first_key(next.at.tile), mine = lane / kChunks;
      const unsigned char* from = values ? v_rows : k_rows;
      // As place() has it: a row's low bits turn those of its chunks.
      const std::uint32_t to = shared.slot(slot) + Shared::place(warp * kKeys + mine, chunk);
      const bool within = chunk < cache.chunks;
      const auto at = [&](int i) {
        const int r = i * kRowsAtOnce;
        return (to ^ r % 8 * 16) + r * tiles::kDecodePanelBytes;
      };
      if constexpr (kPaged) {
        const int key = first + lane % kKeys, page = next.pages.value(params.page_table);
        const int inner = key - params.by_page.quotient(key) * params.page_size;
        const int row = page * cache.step_batch + inner * cache.step_seqlen;
        unsigned present = __ballot_sync(~0u, page >= 0 && page < params.num_pages) >> next.half;
        if (!values && lane == 0) {
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared.present(slot) + warp * 4),
                       "r"(present & kAllPresent)
                       : "memory");
        }
        present = within ? present >> mine : 0;
        int rows[kCopies];  // all on their way before the first is waited for
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          rows[i] = __shfl_sync(~0u, row, next.half + i * kRowsAtOnce + mine);
        }
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          copy_16_async_alone(at(i), from + std::int64_t{rows[i]} * params.row_unit,
                              (present >> i * kRowsAtOnce & 1u) != 0 ? 16 : 0);
        }
      } else {
        const std::int64_t step = values ? params.v.stride_seqlen : params.k.stride_seqlen;
        from += (first + mine) * step;
        const auto behind = static_cast<unsigned>(first + mine - unit.first_key);
        const auto keys = static_cast<unsigned>(unit.end_key - unit.first_key);
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          copy_16_async_alone(at(i), from, within && behind + i * kRowsAtOnce < keys ? 16 : 0);
          from += kRowsAtOnce * step;
        }
      }
      if constexpr (Shared::kElementWidth == 1) {
        ask_factor(unit, next, cache, shared.scales(slot));
      }
      if (values) {
        advance(unit, next);
      }
    }
    commit_copies();
  }
};

}  // namespace rafter::cuda
