// What kernels in clusters have in common: CTA i of C has the parts i, i + C, … of the head of its
// cluster, and each of its warps copies its own keys of their tiles (cp.async), without barriers.
// The pages of its keys too, tiles ahead, to shared memory: a register that a lookup is still to
// fill would be waited for wherever it is moved. Each warp asks for its own, and for the first ones
// before it knows the length: as of the sequence that is likely.
// What all lanes have in common is known as such to the compiler by how it came about, without
// ballots and lane conditions on the way; else it gathers the lanes before each instruction of a
// whole warp.
#pragma once

#include <limits>

#include "hw/cuda/cluster.cuh"
#include "hw/cuda/copies.cuh"
#include "hw/cuda/mma.cuh"
#include "kernels/cuda/decode_sm90_units.cuh"
#include "tiles/sm90_decode_cluster.h"

namespace rafter::cuda {

/// Whether keys lie in pages, and these hold whole blocks of the 16 keys of a warp.
enum class DecodePages { none, any, blocks };

/// The same value, of which the compiler does not know that all lanes have it: what follows from it
/// would lie in uniform registers, to and from which every tile had instructions more.
__device__ inline int as_if_of_lanes(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// `Shared` is DecodeShared or DecodeColumns.
template <typename Shared, DecodePages kPages>
struct DecodeClusterCopies {
  static constexpr bool kPaged = kPages != DecodePages::none;
  static constexpr bool kBlocks = kPages == DecodePages::blocks;
  static constexpr tiles::Sm90DecodeRow kShape = Shared::kShape;
  static constexpr int kSlots = kShape.slots, kKeys = tiles::kDecodeBlockKeys;
  static constexpr int kChunks = 8 * kShape.panels();  // of 16 bytes in a row
  static constexpr int kRowsAtOnce = 32 / kChunks;     // that a warp copies in one instruction
  static constexpr int kCopies = kKeys / kRowsAtOnce;
  static constexpr std::uint32_t kAllPresent = (1u << kKeys) - 1;
  static_assert(kShape.warps == 8 && kShape.pieces() == 1 && kChunks <= 16);

  const DecodeParams& params;
  const Shared shared;
  const std::uint32_t pages;  // shared memory, where there are pages
  // CTAs of the head, which follow each other in the cluster.
  const int ctas = as_if_of_lanes(params.head_ctas), cta = cluster_rank() & (ctas - 1);
  // Said to be the same for all lanes: else those of a branch that depends on it are gathered again
  // for every instruction of a whole warp.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int chunk = lane % kChunks;

  /// Where CTA `of` of the head has what lies at `address` in this one.
  __device__ std::uint32_t address_of(std::uint32_t address, int of) const {
    return cluster_address(address, cluster_rank() - cta + of);
  }

  /// The head of this CTA; its sequence, but for what follows from its length.
  __device__ DecodeUnit head() const {
    DecodeUnit unit;
    const int of = as_if_of_lanes(static_cast<int>(blockIdx.x)) / ctas;
    unit.batch = params.batch > 1 ? of / params.heads_kv : 0;
    unit.head = of - unit.batch * params.heads_kv;
    unit.seqlen_q = params.seqlen_q;
    return unit;
  }
  __device__ AskedIndex ask_length(const DecodeUnit& unit) const {
    return ask_index(params.seqused_kv, unit.batch, params.seqused_kv.data != nullptr);
  }
  /// Length and cut of the sequence.
  __device__ void set_cut(DecodeUnit& unit, const AskedIndex& length) const {
    unit.seqlen_kv = params.seqlen_kv;
    tiles::Sm90DecodeCut cut = params.same_cut;
    if (params.seqused_kv.data != nullptr) {
      unit.seqlen_kv = clamped_length(length.whole(params.seqused_kv), params.seqlen_kv);
      cut = tiles::sm90_decode_cut(kShape, mask_of(params, unit.seqlen_q, unit.seqlen_kv),
                                   unit.seqlen_q, params.group, params.parts);
    }
    unit.parts = cut.parts;
    unit.first_tile = cut.first_tile;
    unit.end_tile = cut.end_tile;
    unit.first_key = cut.first_key;
    unit.end_key = cut.end_key;
  }

  /// Tiles of this CTA in turn: those of a part, then those of its next part.
  struct Tile {
    int part, tile;
  };
  __device__ bool more(const DecodeUnit& unit, const Tile& at) const {
    return at.part < unit.parts && at.tile < unit.end_tile;
  }
  __device__ Tile following(const DecodeUnit& unit, Tile at, int tiles = 1) const {
    at.tile += tiles * unit.parts;
    if (at.tile >= unit.end_tile) {
      at.part += ctas;
      at.tile = unit.first_tile + at.part;
    }
    return at;
  }

  /// What a lane needs to find rows in pages.
  struct Finder {
    const char* table;          // of the sequence
    std::uint32_t pages;        // what it says, in shared memory
    std::uint32_t write, read;  // places of rows: of one, and of those that this lane copies
    int step_page, step_row;    // of rows of K, for lanes up to 15, or V
  };
  /// The tile whose keys are asked for next.
  struct Next {
    Tile at;
    // Pages of any size: pages of `at` and tiles after it were asked for.
    Tile ahead;             // the first for which they were not
    unsigned count = 0;     // tiles before `at`
    int asked = 0;          // from `at` to `ahead`
    AskedIndex page;        // of key lane % 16 of `at`
    std::uint32_t present;  // keys of `at` that are there
    Finder find;
    // Pages of whole blocks.
    std::uint32_t entry;          // in shared memory, of `at`
    int place_k, place_v;         // what it says: where the block begins
    bool all_there = true;        // no page so far did not exist
    std::int64_t step_k, step_v;  // bytes between rows that a lane copies
    int behind_k, behind_v;       // of the first of them behind the first key seen, less the tile's
  };
  __device__ Next first_of(const DecodeUnit& unit, const Finder& find) const {
    Next next;
    next.at = next.ahead = {cta, unit.first_tile + cta};
    if constexpr (kPaged) {
      next.find = find;
    }
    if constexpr (kBlocks) {
      begin_chunks(unit, next);
    } else if constexpr (kPaged) {
      const bool one_part = cta + ctas >= unit.parts;
      const bool all = unit.parts == params.likely_parts &&
                       (one_part || next.at.tile + (kFirstTiles - 1) * unit.parts < unit.end_tile);
      next.asked = unit.first_tile != 0 ? 0 : all ? kFirstTiles : 1;
      if (next.asked > 0) {
        next.ahead = following(unit, next.ahead, next.asked);
      }
    }
    return next;
  }
  __device__ void advance(const DecodeUnit& unit, Next& next) const {
    if constexpr (kBlocks) {
      next.at.tile += unit.parts;
      next.entry += 8;
      if (next.at.tile >= unit.end_tile || next.entry % kChunkBytes == 0) {
        next_chunk(unit, next);
      }
      read_places(next);
    } else {
      next.at = following(unit, next.at);
      if constexpr (kPaged) {
        ++next.count;
        --next.asked;
      }
    }
  }
  __device__ int first_key(int tile) const { return tile * kShape.tile_keys() + warp * kKeys; }
  __device__ static bool seen(const DecodeUnit& unit, int key) {
    return key >= unit.first_key && key < unit.end_key;
  }

  // Of each warp: pages of its keys in tiles that follow each other, 8 bytes each; where rows of K
  // and V of one tile lie, those that a lane copies side by side. Where pages hold whole blocks:
  // pages of a chunk of tiles of one part, a lane each, and of the next, which become places of K
  // and V.
  static constexpr int kTableTiles = 2 * kSlots, kFirstTiles = 8, kChunk = 32;
  static constexpr std::uint32_t kChunkBytes = kChunk * 8;  // aligned to twice as much
  static constexpr int kTableBytes = kBlocks ? 2 * kChunkBytes : kTableTiles * kKeys * 8;
  static constexpr int kPlaceBytes = 2 * kKeys * 4;
  static_assert(kFirstTiles <= kTableTiles && kShape.warps * (kTableBytes + kPlaceBytes) <=
                                                  tiles::sm90_decode_cluster_page_bytes(kShape));
  static constexpr int kNowhere = std::numeric_limits<int>::min();  // no row's place
  __device__ Finder finder(const DecodeUnit& unit) const {
    const int r = lane % kKeys;
    const bool of_k = lane < kKeys;
    Finder find;
    find.table = static_cast<const char*>(params.page_table.data) +
                 unit.batch * params.page_table_batch * (params.page_table.wide ? 8 : 4);
    find.pages = pages + warp * kTableBytes + (kBlocks ? 0 : r) * 8;
    const std::uint32_t places = pages + kShape.warps * kTableBytes + warp * kPlaceBytes;
    find.write = places + (lane / kKeys * kKeys + r % kRowsAtOnce * kCopies + r / kRowsAtOnce) * 4;
    find.read = places + lane / kChunks * kCopies * 4;
    find.step_page = of_k ? params.k.step_batch : params.v.step_batch;
    find.step_row = of_k ? params.k.step_seqlen : params.v.step_seqlen;
    // Else all of it is computed again for each tile.
    asm volatile(""
                 : "+l"(find.table), "+r"(find.pages), "+r"(find.write), "+r"(find.read),
                   "+r"(find.step_page), "+r"(find.step_row));
    return find;
  }
  /// A key's page to where it belongs in shared memory.
  __device__ void ask_page(const Finder& find, std::uint32_t to, int key, bool wanted) const {
    copy_index_async(to, find.table, params.by_page.quotient(key), params.page_table.wide, wanted);
  }
  __device__ static std::uint32_t page_of(const Finder& find, unsigned count) {
    return find.pages + count % kTableTiles * (kKeys * 8);
  }
  /// Pages of the first tiles, if the sequence is cut as is likely and its first key is seen.
  /// Whether, and which keys there are, is on its way. A group of copies.
  __device__ void ask_first_pages(const Finder& find) const {
    const int all = (params.seqlen_kv + kShape.tile_keys() - 1) / kShape.tile_keys();
    if constexpr (kBlocks) {
      const int tile = cta + lane * params.likely_parts;
      ask_page(find, find.pages + lane * 8, first_key(tile),
               tile < all && first_key(tile) < params.seqlen_kv);
    } else {
#pragma unroll 1
      for (int i = lane / kKeys; i < kFirstTiles; i += 2) {
        const int tile = cta + i * params.likely_parts;
        const int key = first_key(tile) + lane % kKeys;
        ask_page(find, page_of(find, i), key, tile < all && key < params.seqlen_kv);
      }
    }
    commit_copies();
  }
  /// Pages of kSlots more tiles from `ahead` on, which moves.
  __device__ void ask_pages(const DecodeUnit& unit, Next& next) const {
#pragma unroll 1
    for (const int all = next.asked + kSlots; next.asked < all; next.asked += 2) {
      Tile mine = next.ahead;
      next.ahead = following(unit, mine);
      mine = lane < kKeys ? mine : next.ahead;
      next.ahead = following(unit, next.ahead);
      const int key = first_key(mine.tile) + lane % kKeys;
      ask_page(next.find, page_of(next.find, next.count + next.asked + lane / kKeys), key,
               more(unit, mine) && seen(unit, key));
    }
  }
  __device__ static AskedIndex page_at(std::uint32_t at) {
    AskedIndex page;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(page.low), "=r"(page.high)
                 : "r"(at)
                 : "memory");
    return page;
  }

  // Where pages hold whole blocks.

  /// A tile of a chunk, a lane each: its first key of this warp.
  __device__ int chunk_key(const DecodeUnit& unit, const Tile& first) const {
    return first_key(first.tile + lane * unit.parts);
  }
  __device__ bool chunk_has(const DecodeUnit& unit, const Tile& first, int key) const {
    return first.part < unit.parts && first.tile + lane * unit.parts < unit.end_tile &&
           key + kKeys > unit.first_key && key < unit.end_key;
  }
  /// Asks for the pages of the chunk behind that of `at`, which has only begun.
  __device__ void ask_chunk(const DecodeUnit& unit, const Next& next) const {
    const Tile ahead = following(unit, next.at, kChunk);
    if (more(unit, ahead)) {
      const int key = chunk_key(unit, ahead);
      ask_page(next.find, (next.entry ^ kChunkBytes) + lane * 8, key, chunk_has(unit, ahead, key));
    }
  }
  /// Pages of the chunk of `at`, a lane each, become places.
  __device__ void set_places(const DecodeUnit& unit, const Next& next,
                             const AskedIndex& asked) const {
    const int key = chunk_key(unit, next.at);
    const int page = chunk_has(unit, next.at, key) ? asked.value(params.page_table) : -1;
    const int inner = key - params.by_page.quotient(key) * params.page_size;
    const int k = page * params.k.step_batch + inner * params.k.step_seqlen;
    const int v = page * params.v.step_batch + inner * params.v.step_seqlen;
    __syncwarp();
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(next.entry + lane * 8),
                 "r"(exists(page) ? k : kNowhere), "r"(v)
                 : "memory");
    __syncwarp();
  }
  __device__ void read_places(Next& next) const {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(next.place_k), "=r"(next.place_v)
                 : "r"(next.entry)
                 : "memory");
  }
  /// Of the first chunk every (parts / likely_parts)-th page was asked for while the length was on
  /// its way.
  __device__ void begin_chunks(const DecodeUnit& unit, Next& next) const {
    const int mine = lane / kChunks;
    next.entry = next.find.pages;
    next.step_k = kRowsAtOnce * params.k.stride_seqlen;
    next.step_v = kRowsAtOnce * params.v.stride_seqlen;
    constexpr int kFar = 1 << 30;  // beyond all keys
    next.behind_k = chunk < params.k.chunks ? mine - unit.first_key : kFar;
    next.behind_v = chunk < params.v.chunks ? mine - unit.first_key : kFar;
    asm volatile(""
                 : "+l"(next.step_k), "+l"(next.step_v), "+r"(next.behind_k), "+r"(next.behind_v));
    if (!more(unit, next.at)) {
      return;
    }
    if (lane < kSlots) {
      say_present(lane, kAllPresent);
    }
    const int every = params.by_likely_parts.quotient(unit.parts);
    const int known = unit.first_tile > 0 || every * params.likely_parts != unit.parts
                          ? 0
                          : kChunk / max(every, 1);
    const int key = chunk_key(unit, next.at);
    AskedIndex page = ask_index(params.page_table,
                                unit.batch * params.page_table_batch + params.by_page.quotient(key),
                                lane >= known && chunk_has(unit, next.at, key));
    wait_copies<0>();
    __syncwarp();
    if (lane < known) {
      page = page_at(next.entry + lane * every * 8);
    }
    set_places(unit, next, page);
    ask_chunk(unit, next);
    read_places(next);
  }
  __device__ void next_chunk(const DecodeUnit& unit, Next& next) const {
    // Else pages were asked for a moment ago.
    if ((next.entry - 8) % kChunkBytes < (kSlots / 2) * 8u) {
      wait_copies<0>();
    }
    next.entry = ((next.entry - 8) & ~(kChunkBytes - 1)) ^ kChunkBytes;
    next.at = following(unit, next.at, 0);
    if (more(unit, next.at)) {
      __syncwarp();
      set_places(unit, next, page_at(next.entry + lane * 8));
      ask_chunk(unit, next);
    }
  }

  __device__ bool exists(int page) const {
    return static_cast<unsigned>(page) < static_cast<unsigned>(params.num_pages);
  }
  /// Finds the rows of K and V of the next tile, or their page, and asks for pages of more tiles.
  /// In the round that asks for K, before it waits for other keys.
  __device__ void prepare(const DecodeUnit& unit, Next& next) const {
    if (!more(unit, next.at)) {
      return;
    }
    const bool begins = next.count == 0, none = next.asked == 0;
    if (begins) {
      wait_copies<0>();
    }
    // So early that the copies are there when they are needed: of those that were asked for before
    // the last round, all but kSlots − 1 groups were waited for.
    if (next.asked <= kSlots / 2 + 1) {
      ask_pages(unit, next);
      if (begins) {
        commit_copies();
        if (none) {
          wait_copies<0>();
        }
      }
    }
    if (next.count == 1) {
      wait_copies<2>();  // those from the second tile on, where they were not asked for before
    }
    __syncwarp();
    next.page = page_at(page_of(next.find, next.count));
    const int key = first_key(next.at.tile) + lane % kKeys;
    const int page = seen(unit, key) ? next.page.value(params.page_table) : -1;
    const int inner = key - params.by_page.quotient(key) * params.page_size;
    const int place = page * next.find.step_page + inner * next.find.step_row;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(next.find.write),
                 "r"(exists(page) ? place : kNowhere)
                 : "memory");
    next.present = __ballot_sync(~0u, exists(page)) & kAllPresent;
    __syncwarp();
  }

  /// Where this lane's chunks of the head's rows begin: of a sequence, or of a page.
  __device__ const unsigned char* rows_of(const DecodeUnit& unit, const DecodeCache& cache) const {
    const unsigned char* rows = cache.data + (kPaged ? 0 : unit.batch * cache.stride_batch) +
                                unit.head * cache.stride_heads + chunk * 16;
    if constexpr (kBlocks) {
      rows += lane / kChunks * cache.stride_seqlen;
    }
    if constexpr (kPaged) {
      asm volatile("" : "+l"(rows));  // else computed again for each tile
    }
    return rows;
  }

  /// The factor of a key a lane, zero where nobody sees it.
  __device__ void ask_factor(const DecodeUnit& unit, const Next& next, const DecodeCache& cache,
                             std::uint32_t factors) const {
    if (cache.scale == nullptr || lane >= kKeys) {
      return;
    }
    const int key = first_key(next.at.tile) + lane % kKeys;
    std::int64_t outer = unit.batch, inner = key;
    bool there = seen(unit, key);
    if constexpr (kPaged) {
      const int page = there ? next.page.value(params.page_table) : -1;
      outer = page;
      inner -= std::int64_t{params.by_page.quotient(key)} * params.page_size;
      there = exists(page);
    }
    copy_4_async(factors + (warp * kKeys + lane % kKeys) * 4,
                 cache.scale + unit.head * cache.scale_heads +
                     (there ? outer * cache.scale_batch + inner * cache.scale_seqlen : 0),
                 there ? 4 : 0);
  }

  /// Which keys of this warp are in a slot.
  __device__ void say_present(int slot, std::uint32_t present) const {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared.present(slot) + warp * 4), "r"(present)
                 : "memory");
  }
  /// Those of the block in a slot: written from the first on that has no page.
  __device__ std::uint32_t present_of_block(int slot, const Next& next) const {
    std::uint32_t present = kAllPresent;
    if (!next.all_there) {
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(present)
                   : "r"(shared.present(slot) + warp * 4)
                   : "memory");
    }
    return present;
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
      if constexpr (kBlocks) {
        const bool there = next.place_k != kNowhere;
        const auto behind = static_cast<unsigned>(first + (values ? next.behind_v : next.behind_k));
        const auto keys = static_cast<unsigned>(there ? unit.end_key - unit.first_key : 0);
        const std::int64_t step = values ? next.step_v : next.step_k;
        from += std::int64_t{values ? next.place_v : next.place_k} * params.row_unit;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          copy_16_async_alone(at(i), from, behind + i * kRowsAtOnce < keys ? 16 : 0);
          from += step;
        }
        next.all_there = next.all_there && there;
        if (!next.all_there && !values) {
          say_present(slot, there ? kAllPresent : 0);
        }
      } else if constexpr (kPaged) {
        if (!values && lane == 0) {
          say_present(slot, next.present);
        }
        int rows[kCopies];
#pragma unroll
        for (int i = 0; i < kCopies; i += 4) {
          asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(rows[i]), "=r"(rows[i + 1]), "=r"(rows[i + 2]), "=r"(rows[i + 3])
                       : "r"(next.find.read + ((values ? kKeys : 0) + i) * 4)
                       : "memory");
        }
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          copy_16_async_alone(at(i), from + std::int64_t{rows[i]} * params.row_unit,
                              within && rows[i] != kNowhere ? 16 : 0);
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
