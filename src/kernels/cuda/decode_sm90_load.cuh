// The warps of decode_sm90 that load: tiles of K and V go in turn into a ring of slots in shared
// memory. Where the layout lets it one warp asks the copy engine for boxes of rows, or four where
// boxes are small; else four warps copy 16 bytes a lane (cp.async), or element by element where
// rows are not aligned to 16 bytes.
#pragma once

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/copies.cuh"
#include "hw/cuda/mma.cuh"
#include "hw/cuda/tma.cuh"
#include "kernels/cuda/decode_sm90_units.cuh"

namespace rafter::cuda {

/// `Shared` is DecodeShared or DecodeColumns.
template <typename Shared>
struct DecodeLoad {
  static constexpr tiles::Sm90DecodeRow kShape = Shared::kShape;
  static constexpr bool kBytes = Shared::kElementWidth == 1;
  static constexpr int kTileKeys = kShape.tile_keys(), kPanels = kShape.panels();
  static constexpr int kKeysEach = kTileKeys / tiles::kDecodeMostLoadWarps;  // of four warps
  static_assert(kTileKeys / tiles::kDecodeBoxRows * kPanels <= 32);          // boxes: one a lane
  static_assert(kKeysEach % tiles::kDecodeBlockKeys == 0 && kKeysEach <= 32);

  const DecodeParams& params;
  const Shared shared;
  const int warp =  // among those that load
      static_cast<int>(threadIdx.x / 32) - Shared::kFirstLoadWarp;
  const int lane = static_cast<int>(threadIdx.x % 32);

  /// Arrivals that complete a slot beside the bytes of the copy engine: one of each warp, and one
  /// of each lane that has copies of its own in flight.
  __device__ static std::uint32_t arrivals(const DecodeParams& params) {
    return params.by_box ? decode_load_warps(params) + (has_factors(params) ? 32 : 0)
                         : tiles::kDecodeMostLoadWarps * 33;
  }
  __device__ static bool has_factors(const DecodeParams& params) {
    return kBytes && (params.k.scale != nullptr || params.v.scale != nullptr);
  }
  __device__ static int warps(const DecodeParams& params) { return decode_load_warps(params); }

  /// What lies beyond the columns of q is 0 from the beginning. By the warps that attend, but for
  /// the first thread.
  __device__ static void clear_queries(const DecodeParams& params, const Shared& shared) {
    const std::uint32_t from = shared.queries(params.blocks, 0);
    const int bytes = tiles::kDecodeQueryBuffers * params.blocks * Shared::kQueries;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x - 1) * 16; i < bytes;
         i += (32 * Shared::kWarps - 1) * 16) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(from + i), "r"(0) : "memory");
    }
    fence_shared_to_async();  // the copy engine writes there next
  }

  /// What this lane loads of a tile: a box of rows (columns of one panel) or one row.
  struct Rows {
    int key = 0;             // first
    std::int64_t outer = 0;  // sequence or page; 0 packed
    int inner = 0;           // place there
    bool touches = false;    // has keys that are seen
    bool there = false;      // and exists: its page does
  };

  /// Of a tile: this lane's first row, how many it has, whether it has any.
  __device__ int offset() const {
    return params.by_box ? lane / kPanels << params.box_log2 : warp * kKeysEach + lane;
  }
  __device__ int rows_each() const { return params.by_box ? 1 << params.box_log2 : 1; }
  __device__ bool busy() const {
    return params.by_box ? lane < (kTileKeys >> params.box_log2) * kPanels : lane < kKeysEach;
  }

  __device__ bool touches(const DecodeUnit& unit, int key) const {
    return busy() && key < unit.end_key && key + rows_each() > unit.first_key;
  }

  /// Asks for the page of the rows from `key` on, −1 where nobody sees them.
  __device__ AskedIndex ask_page(const DecodeUnit& unit, int key, bool wanted) const {
    return ask_index(params.page_table,
                     unit.batch * params.page_table_batch + params.by_page.quotient(key),
                     wanted && key < unit.end_key && key + rows_each() > unit.first_key);
  }

  /// Pages of the next tiles of a unit, asked for before they are needed: an answer takes longer
  /// than a tile. By box a lane has box lane % boxes of the tile lane / boxes ahead; else its key
  /// of the next two tiles.
  struct Pages {
    AskedIndex now, next;
    int used = 0;  // tiles of `now`
  };
  __device__ int boxes() const { return kTileKeys >> params.box_log2; }  // of rows, in a tile
  __device__ AskedIndex ask_pages(const DecodeUnit& unit, int tile) const {
    int of = tile, key = offset();
    if (params.by_box) {
      const int ahead = (lane << params.box_log2) / kTileKeys;
      of += ahead * unit.parts;
      key = (lane - ahead * boxes()) << params.box_log2;
    }
    return ask_page(unit, of * kTileKeys + key, of < unit.end_tile && (params.by_box || busy()));
  }
  __device__ int tiles_at_once() const {
    return params.by_box ? (32 << params.box_log2) / kTileKeys : 1;
  }
  __device__ Pages first_pages(const DecodeUnit& unit) const {
    Pages pages;
    pages.now = ask_pages(unit, unit.first_tile);
    pages.next = ask_pages(unit, unit.first_tile + tiles_at_once() * unit.parts);
    return pages;
  }
  /// Page of this lane's rows of `tile`, the next of the unit.
  __device__ int take_page(const DecodeUnit& unit, int tile, Pages& pages) const {
    int page = pages.now.value(params.page_table);
    if (params.by_box) {
      page = __shfl_sync(~0u, page, pages.used * boxes() + (lane / kPanels & (boxes() - 1)));
    }
    if (++pages.used == tiles_at_once()) {
      pages.used = 0;
      pages.now = pages.next;
      pages.next = ask_pages(
          unit, tile + 2 * tiles_at_once() * unit.parts - (tiles_at_once() - 1) * unit.parts);
    }
    return page;
  }

  __device__ Rows locate(const DecodeUnit& unit, int tile, int page) const {
    Rows rows;
    rows.key = tile * kTileKeys + offset();
    rows.touches = touches(unit, rows.key);
    rows.there = rows.touches;
    if (params.page_size > 0) {
      rows.outer = page;
      rows.inner = rows.key - params.by_page.quotient(rows.key) * params.page_size;
      rows.there = rows.touches && page >= 0 && page < params.num_pages;
    } else {
      rows.outer = params.cu_seqlens_kv.data != nullptr ? 0 : unit.batch;
      rows.inner = unit.row_kv + rows.key;
    }
    return rows;
  }

  /// Notes which of 16 keys of a warp that attends lie in pages that exist. Boxes: by one warp.
  __device__ void note_present(const Rows& rows, int slot) const {
    const unsigned there = __ballot_sync(~0u, rows.there);
    constexpr int kBlock = tiles::kDecodeBlockKeys;
    std::uint32_t word = 0;
    int block = lane;
    if (params.by_box) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int box = (block * kBlock + half * kBlock / 2) >> params.box_log2;
        word |= (there >> (box * kPanels & 31) & 1u) * (0xffu << (half * kBlock / 2));
      }
    } else {
      word = there >> (lane * kBlock & 31);
      block += warp * kKeysEach / kBlock;
    }
    if (lane < (params.by_box ? Shared::kWarps : kKeysEach / kBlock)) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared.present(slot) + block * 4), "r"(word)
                   : "memory");
    }
    __syncwarp();  // one lane may arrive for all
  }

  __device__ void copy_scale(const DecodeCache& cache, const DecodeUnit& unit, std::uint32_t to,
                             std::int64_t outer, int inner, bool there) const {
    const float* const from = cache.scale + outer * cache.scale_batch + inner * cache.scale_seqlen +
                              unit.head * cache.scale_heads;
    copy_4_async(to, there ? from : cache.scale, there ? 4 : 0);
  }

  /// Boxes of the copy engine, this warp's of all. A page that does not exist is outside the
  /// tensor: zeros.
  __device__ void fill_by_box(const DecodeUnit& unit, const Rows& rows, const DecodeCache& cache,
                              const CUtensorMap& map, int slot) const {
    const bool mine = rows.touches && (lane & (warps(params) - 1)) == warp;
    const unsigned boxes = __ballot_sync(~0u, mine);
    const int box_bytes = tiles::kDecodePanelBytes << params.box_log2;
    if (lane == 0) {
      barrier_arrive_expect(shared.full(slot),
                            static_cast<std::uint32_t>(__popc(boxes) * box_bytes));
    }
    __syncwarp();
    if (mine) {
      const int panel = lane % kPanels;
      const int outer = rows.there ? static_cast<int>(rows.outer) * cache.outer_step
                                   : (params.page_size > 0 ? max(params.num_pages, 1) : 0);
      tma_load(shared.slot(slot) + panel * kShape.panel_bytes() + lane / kPanels * box_bytes, map,
               shared.full(slot), panel * (tiles::kDecodePanelBytes / (kBytes ? 1 : 2)), rows.inner,
               unit.head * cache.heads_step, outer);
    }
    if constexpr (kBytes) {
      if (warp != 0) {
        return;
      }
      if (cache.scale != nullptr) {
#pragma unroll 1
        for (int i = lane; i < kTileKeys; i += 32) {
          const int box = i >> params.box_log2;
          const std::int64_t outer = __shfl_sync(~0u, rows.outer, box * kPanels);
          const int first = __shfl_sync(~0u, rows.key, box * kPanels);
          const int inner =
              __shfl_sync(~0u, rows.inner, box * kPanels) + i - (box << params.box_log2);
          const bool box_there = __shfl_sync(~0u, rows.there, box * kPanels);
          const int key = first + i - (box << params.box_log2);
          copy_scale(cache, unit, shared.scales(slot) + i * 4, outer, inner,
                     box_there && key >= unit.first_key && key < unit.end_key);
        }
      }
      if (has_factors(params)) {
        arrive_with_copies(shared.full(slot));
      }
    }
  }

  /// 16 bytes a lane: some rows of 16-byte chunks in one instruction.
  __device__ void fill_by_rows(const DecodeUnit& unit, const Rows& rows, const DecodeCache& cache,
                               int slot) const {
    constexpr int kChunks = 8 * kPanels, kRowsAtOnce = 32 / kChunks;  // chunks of a row
    constexpr int kCopies = kKeysEach / kRowsAtOnce, kTogether = 8;
    unsigned present = __ballot_sync(~0u, rows.there);
    if (cache.aligned) {
      const int row =
          static_cast<int>(rows.outer) * cache.step_batch + rows.inner * cache.step_seqlen;
      const int chunk = lane % kChunks, mine = lane / kChunks;
      const unsigned char* const from = cache.data + unit.head * cache.stride_heads + chunk * 16;
      // As place() has it: a row's low bits turn those of its chunks.
      const std::uint32_t to = shared.slot(slot) + Shared::place(warp * kKeysEach + mine, chunk);
      present = chunk < cache.chunks ? present >> mine : 0;
#pragma unroll
      for (int first = 0; first < kCopies; first += kTogether) {
        int at[kTogether];  // all on their way before the first is waited for
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          at[i] = __shfl_sync(~0u, row, (first + i) * kRowsAtOnce + mine);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int r = (first + i) * kRowsAtOnce;
          copy_16_async_alone((to ^ r % 8 * 16) + r * tiles::kDecodePanelBytes,
                              from + std::int64_t{at[i]} * params.row_unit,
                              (present >> r & 1u) != 0 ? 16 : 0);
        }
      }
    } else {
      copy_unaligned(cache, shared.slot(slot),
                     rows.outer * cache.stride_batch + rows.inner * cache.stride_seqlen +
                         unit.head * cache.stride_heads,
                     present);
    }
    if constexpr (kBytes) {
      if (cache.scale != nullptr && lane < kKeysEach) {
        copy_scale(cache, unit, shared.scales(slot) + (warp * kKeysEach + lane) * 4, rows.outer,
                   rows.inner, rows.there);
      }
    }
    arrive_with_copies(shared.full(slot));
    __syncwarp();
    if (lane == 0) {  // for what was written without cp.async
      barrier_arrive(shared.full(slot));
    }
  }

  /// Element by element, for rows that do not begin and end at multiples of 16 bytes.
  __device__ __noinline__ void copy_unaligned(const DecodeCache& cache, std::uint32_t to,
                                              std::int64_t row, unsigned present) const {
    constexpr int kChunks = 8 * kPanels, kSize = kBytes ? 1 : 2;
#pragma unroll 1
    for (int i = lane; i < kKeysEach * kChunks; i += 32) {
      const int r = i / kChunks, chunk = i % kChunks;
      const std::int64_t offset = __shfl_sync(~0u, row, r);
#pragma unroll 1
      for (int word = 0; word < 4; ++word) {
        std::uint32_t value = 0;
#pragma unroll 1
        for (int e = 0; e < 4 / kSize; ++e) {
          const int byte = chunk * 16 + word * 4 + e * kSize;
          if ((present >> r & 1u) != 0 && byte < cache.row_bytes) {
            const unsigned char* source = cache.data + offset + byte;
            value |= kSize == 1 ? std::uint32_t{*source} << (8 * e)
                                : std::uint32_t{*reinterpret_cast<const std::uint16_t*>(source)}
                                      << (16 * e);
          }
        }
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(
                         to + Shared::place(warp * kKeysEach + r, chunk) + word * 4),
                     "r"(value)
                     : "memory");
      }
    }
  }

  /// The query rows of a unit, each query_pitch() bytes behind the other.
  __device__ void fill_queries(const DecodeUnit& unit, int slot) const {
    const int rows = Shared::rows_of(params, unit);
    const std::int64_t outer = params.cu_seqlens_q.data != nullptr ? 0 : unit.batch;
    if (warp == 0) {
      if (!params.by_box) {
        fence_shared_to_async();  // copies of lanes wrote here before
      }
      if (lane == 0) {
        barrier_arrive_expect(shared.full(slot),
                              static_cast<std::uint32_t>(rows * params.q.row_bytes));
      }
      __syncwarp();
#pragma unroll 1
      for (int r = lane; r < rows; r += 32) {
        const int row = unit.row_block * Shared::kTileRows + r;
        const int position = row / params.group;
        bulk_load(
            shared.slot(slot) + r * kShape.query_pitch(),
            params.q.data + outer * params.q.stride_batch +
                (unit.row_q + position) * params.q.stride_seqlen +
                (unit.head * params.group + row - position * params.group) * params.q.stride_heads,
            static_cast<std::uint32_t>(params.q.row_bytes), shared.full(slot));
      }
    } else if (lane == 0) {
      barrier_arrive(shared.full(slot));
    }
    if (!params.by_box) {
      arrive_with_copies(shared.full(slot));
    }
  }

  /// The same where queries have a place of their own. By one warp.
  __device__ void place_queries(const DecodeUnit& unit, std::uint32_t to,
                                std::uint32_t full) const {
    const int rows = Shared::rows_of(params, unit);
    const std::int64_t outer = params.cu_seqlens_q.data != nullptr ? 0 : unit.batch;
    if (params.q.aligned) {
      if (lane == 0) {
        barrier_arrive_expect(full, static_cast<std::uint32_t>(rows * params.q.row_bytes));
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int r = lane; r < rows; r += 32) {
      const int row = unit.row_block * Shared::kTileRows + r;
      const int position = row / params.group;
      const unsigned char* const from =
          params.q.data + outer * params.q.stride_batch +
          (unit.row_q + position) * params.q.stride_seqlen +
          (unit.head * params.group + row - position * params.group) * params.q.stride_heads;
      const std::uint32_t row_to = to + r * kShape.query_pitch();
      if (params.q.aligned) {
        bulk_load(row_to, from, static_cast<std::uint32_t>(params.q.row_bytes), full);
      } else {
#pragma unroll 1
        for (int byte = 0; byte < params.q.row_bytes; byte += 2) {
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(row_to + byte),
                       "h"(*reinterpret_cast<const std::uint16_t*>(from + byte))
                       : "memory");
        }
      }
    }
    if (!params.q.aligned) {
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(full);
      }
    }
  }

  __device__ void run(const CUtensorMap& k_map, const CUtensorMap& v_map) const {
    if (params.by_box && lane == 0) {
      tma_prefetch(k_map);
      tma_prefetch(v_map);
    }
    typename Shared::Ring ring;
#pragma unroll 1
    for (std::uint32_t count = 0;; ++count) {
      const DecodeUnit unit = shared.control.take(count);
      if (unit.batch < 0) {
        return;
      }
      shared.control.release(count);
      // First: once the memory is busy with keys, whatever else is asked of it takes long.
      if constexpr (Shared::kQueriesInSlots) {
        if (params.q.aligned && !unit.follows) {
          barrier_wait(shared.empty(ring.slot), ring.turn ^ 1);
          fill_queries(unit, ring.slot);
          ring.next();
        }
      } else if (warp == 0) {
        constexpr int kBuffers = tiles::kDecodeQueryBuffers;
        const int buffer = static_cast<int>(count % kBuffers);
        barrier_wait(shared_address(&shared.control.query_empty[buffer]), count / kBuffers % 2 ^ 1);
        place_queries(unit, shared.queries(params.blocks, buffer),
                      shared_address(&shared.control.query_full[buffer]));
      }
      load_keys(unit, ring, k_map, v_map);
    }
  }

 private:
  __device__ void load_keys(const DecodeUnit& unit, typename Shared::Ring& ring,
                            const CUtensorMap& k_map, const CUtensorMap& v_map) const {
    const bool paged = params.page_size > 0;
    Pages pages;
    if (paged) {
      pages = first_pages(unit);
    }
#pragma unroll 1
    for (int tile = unit.first_tile; tile < unit.end_tile; tile += unit.parts) {
      const Rows rows = locate(unit, tile, paged ? take_page(unit, tile, pages) : -1);
#pragma unroll 1
      for (int which = 0; which < 2; ++which) {
        barrier_wait(shared.empty(ring.slot), ring.turn ^ 1);
        if (paged && which == 0 && (warp == 0 || !params.by_box)) {
          note_present(rows, ring.slot);
        }
        if (params.by_box) {
          fill_by_box(unit, rows, which == 0 ? params.k : params.v, which == 0 ? k_map : v_map,
                      ring.slot);
        } else {
          fill_by_rows(unit, rows, which == 0 ? params.k : params.v, ring.slot);
        }
        ring.next();
      }
    }
  }
};

}  // namespace rafter::cuda
