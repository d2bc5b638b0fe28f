// Units of work of decode_sm90, and how their numbers become units.
#pragma once

#include "hw/cuda/barrier.cuh"
#include "kernels/cuda/decode_sm90.h"
#include "tiles/key_range.h"

namespace rafter::cuda {

/// One unit of work.
struct DecodeUnit {
  int batch = -1;  // −1: no more units
  int head = 0;    // of K and V
  int row_block = 0;
  int row_warps_log2 = 0;  // warps that take the same keys: 2^row_warps_log2
  int part = 0, parts = 1;
  bool leads = false;    // this CTA has the parts from 0 on of its head and row block
  bool ends = false;     // and has no part of it after this one
  bool follows = false;  // a unit of the same head and row block in this CTA
  int seqlen_q = 0, seqlen_kv = 0;
  int row_q = 0, row_kv = 0;             // first row of the sequence in its tensor (packed), else 0
  int first_tile = 0, end_tile = 0;      // first of the part; end of all
  int first_key = 0, end_key = 0;        // what any row of the sequence sees
  int common_first = 0, common_end = 0;  // what all rows see, whatever a tree says
};

using DecodeMask = tiles::BasicMaskWindow<int>;

__device__ inline DecodeMask mask_of(const DecodeParams& params, int seqlen_q, int seqlen_kv) {
  return {params.window_left, params.window_right, params.top_left ? 0 : seqlen_kv - seqlen_q,
          seqlen_kv};
}

/// Keys that all rows of the unit's sequence see.
__device__ inline void set_common_keys(const DecodeParams& params, DecodeUnit& unit) {
  const auto mask = mask_of(params, unit.seqlen_q, unit.seqlen_kv);
  const auto first = mask.row(0), last = mask.row(unit.seqlen_q - 1);
  if (first.size() > 0 && last.size() > 0) {
    unit.common_first = last.first;
    unit.common_end =
        params.tree_mask == nullptr ? first.last : min(first.last, unit.seqlen_kv - unit.seqlen_q);
  }
}

/// Finds the units of a CTA, which follow each other. Whole warp.
template <int kWidth, int kRow>
struct DecodeUnitFinder {
  static constexpr tiles::Sm90DecodeRow kShape = tiles::kSm90DecodeRows[kWidth][kRow];
  const DecodeParams& params;
  const int lane = static_cast<int>(threadIdx.x % 32);
  int next_unit = 0;        // among all; where lengths are data, in its sequence
  int given = 0, left = 0;  // units of this CTA
  // Where lengths are data: a lane has those of one of 32 sequences, of which the next unit is of
  // `owner`. There are no units beyond the batch.
  int first_batch = 0, owner = 0;
  int seqlen_q = 0, seqlen_kv = 0, row_q = 0, row_kv = 0, units = 0;
  tiles::Sm90DecodeCut cut;

  __device__ bool lengths_are_data() const {
    return params.cu_seqlens_q.data != nullptr || params.seqused_kv.data != nullptr;
  }

  /// Finds where this CTA begins. The first CTAs have the last units: whoever waits for parts of
  /// others waits for CTAs that began before it.
  __device__ void begin() {
    const int cta = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    if (lengths_are_data()) {
      begin_by_lengths(cta);
    } else {
      next_unit = cta * params.share + min(cta, params.longer_shares);
      left = min(params.share + (cta < params.longer_shares ? 1 : 0),
                 params.batch * params.same_cut.units(params.heads_kv) - next_unit);
    }
  }

  /// The next unit of this CTA; batch −1: there is none.
  __device__ DecodeUnit next() {
    DecodeUnit unit;
    if (left <= 0) {
      return unit;
    }
    unit.seqlen_q = params.seqlen_q;
    unit.seqlen_kv = params.seqlen_kv;
    tiles::Sm90DecodeCut of = params.same_cut;
    int index = next_unit;  // in its sequence
    if (lengths_are_data()) {
      index = find_sequence(unit, of);
    } else {
      const int each = of.units(params.heads_kv);
      unit.batch = next_unit / each;
      index -= unit.batch * each;
    }
    unit.parts = of.parts;
    unit.row_warps_log2 = of.row_warps_log2;
    const int block = index / of.parts;
    unit.part = index - block * of.parts;
    unit.head = block / of.row_blocks;
    unit.row_block = block - unit.head * of.row_blocks;
    unit.first_tile = of.first_tile + unit.part;
    unit.end_tile = of.end_tile;
    unit.first_key = of.first_key;
    unit.end_key = of.end_key;
    unit.leads = unit.part <= given;
    unit.ends = unit.part + 1 == of.parts || left == 1;
    unit.follows = unit.part > 0 && given > 0;
    ++next_unit;
    ++given;
    --left;
    return unit;
  }

 private:
  /// The sequence of the next unit, and that unit's index in it.
  __device__ int find_sequence(DecodeUnit& unit, tiles::Sm90DecodeCut& of) {
    const auto of_owner = [&](int value) { return __shfl_sync(~0u, value, owner); };
#pragma unroll 1
    for (int others = of_owner(units); next_unit >= others; others = of_owner(units)) {
      next_unit -= others;
      ++owner;
      if (owner == 32) {
        owner = 0;
        read(first_batch + 32);
      }
    }
    unit.batch = first_batch + owner;
    unit.seqlen_q = of_owner(seqlen_q);
    unit.seqlen_kv = of_owner(seqlen_kv);
    unit.row_q = of_owner(row_q);
    unit.row_kv = of_owner(row_kv);
    of.first_key = of_owner(cut.first_key);
    of.end_key = of_owner(cut.end_key);
    of.first_tile = of_owner(cut.first_tile);
    of.end_tile = of_owner(cut.end_tile);
    of.parts = of_owner(cut.parts);
    of.row_blocks = of_owner(cut.row_blocks);
    of.row_warps_log2 = of_owner(cut.row_warps_log2);
    return next_unit;
  }

  /// Lengths and cuts of 32 sequences from `first` on.
  __device__ void read(int first) {
    first_batch = first;
    const int b = first + lane;
    units = 0;
    if (b >= params.batch) {
      return;
    }
    seqlen_q = params.seqlen_q;
    seqlen_kv = params.seqlen_kv;
    if (params.cu_seqlens_q.data != nullptr) {
      const std::int64_t q = index_at(params.cu_seqlens_q, b);
      const std::int64_t kv = index_at(params.cu_seqlens_kv, b);
      row_q = static_cast<int>(q);
      row_kv = static_cast<int>(kv);
      seqlen_q = clamped_length(index_at(params.cu_seqlens_q, b + 1) - q, params.seqlen_q);
      seqlen_kv = clamped_length(index_at(params.cu_seqlens_kv, b + 1) - kv, params.seqlen_kv);
    }
    if (params.seqused_kv.data != nullptr) {
      seqlen_kv = clamped_length(index_at(params.seqused_kv, b), seqlen_kv);
    }
    cut = tiles::sm90_decode_cut(kShape, mask_of(params, seqlen_q, seqlen_kv), seqlen_q,
                                 params.group, params.parts);
    units = cut.units(params.heads_kv);
  }

  /// Over the lanes up to this one.
  template <typename T>
  __device__ T running_sum(T value) const {
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const T other = __shfl_up_sync(~0u, value, step);
      value += lane >= step ? other : 0;
    }
    return value;
  }

  __device__ std::int64_t cost() const { return units > 0 ? cut.cost(params.heads_kv) : 0; }

  /// Equal shares of the cost of all units, or a unit for each CTA.
  __device__ void begin_by_lengths(int cta) {
    int all_units = 0;
#pragma unroll 1
    for (int first = 0; first < params.batch; first += 32) {
      read(first);
      all_units += __reduce_add_sync(~0u, units);
    }
    const bool one_each = all_units <= static_cast<int>(gridDim.x);
    const std::int64_t share = one_each ? 1 : share_of(all_units);
    const std::int64_t from = cta * share;
    std::int64_t before = 0;  // of the sequences of 32 lanes: what shares count
    int units_before = 0, begins = -1;
    int begin_batch = 0;
#pragma unroll 1
    for (int first = 0; first < params.batch; first += 32) {
      if (first != first_batch) {
        read(first);
      }
      const std::int64_t mine = one_each ? units : cost();
      const std::int64_t to = running_sum(mine) + before;
      const int units_to = running_sum(units) + units_before;
      // The sequence of this lane begins at to − mine. Units of it that begin before `at`:
      const auto begin_before = [&](std::int64_t at) {
        return static_cast<int>(one_each ? at - to + mine : cut.units_before(at - to + mine));
      };
      // In which sequence this CTA begins, and in which the next does.
      const unsigned begin = __ballot_sync(~0u, begins < 0 && from < to);
      if (begin != 0) {
        owner = __ffs(static_cast<int>(begin)) - 1;
        begin_batch = first;
        next_unit = __shfl_sync(~0u, lane == owner ? begin_before(from) : 0, owner);
        begins = __shfl_sync(~0u, units_to - units, owner) + next_unit;
        left = all_units - begins;
      }
      const unsigned end = __ballot_sync(~0u, from + share < to);
      if (end != 0) {
        const int last = __ffs(static_cast<int>(end)) - 1;
        const int ends = units_to - units + (lane == last ? begin_before(from + share) : 0);
        left = __shfl_sync(~0u, ends, last) - begins;
        break;
      }
      before = __shfl_sync(~0u, to, 31);
      units_before = __shfl_sync(~0u, units_to, 31);
    }
    if (left > 0 && begin_batch != first_batch) {
      read(begin_batch);
    }
  }

  /// Equal shares of the cost of all units.
  __device__ std::int64_t share_of(int all_units) {
    std::int64_t all = 0;
#pragma unroll 1
    for (int first = 0; first < params.batch; first += 32) {
      if (first != first_batch) {
        read(first);
      }
      all += cost();
    }
    all = __shfl_sync(~0u, running_sum(all), 31);
    const std::int64_t ctas = gridDim.x;
    const std::int64_t even = tiles::sm90_decode_even_share(all_units, ctas);
    return even > 0 ? (all * even + all_units - 1) / all_units : (all + ctas - 1) / ctas;
  }
};

/// What all warps share: units that one warp found, and the slots of the ring.
struct DecodeControl {
  std::uint64_t unit_full[tiles::kDecodeUnitRing], unit_empty[tiles::kDecodeUnitRing];
  std::uint64_t slot_full[tiles::kDecodeMostSlots], slot_empty[tiles::kDecodeMostSlots];
  // Results of the warps of a unit are in shared memory, and were taken.
  std::uint64_t written, taken;
  // Where warps have columns of O: queries, and parts that are in the workspace.
  std::uint64_t query_full[tiles::kDecodeQueryBuffers], query_empty[tiles::kDecodeQueryBuffers];
  std::uint64_t left;
  DecodeUnit units[tiles::kDecodeUnitRing];

  /// Waits for the count-th unit of this CTA, which stays until this warp releases it; batch −1:
  /// there are no more.
  __device__ DecodeUnit take(std::uint32_t count) {
    constexpr std::uint32_t kRing = tiles::kDecodeUnitRing;
    barrier_wait(shared_address(&unit_full[count % kRing]), count / kRing % 2);
    return units[count % kRing];
  }
  /// By each warp that took it.
  __device__ void release(std::uint32_t count) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(shared_address(&unit_empty[count % tiles::kDecodeUnitRing]));
    }
  }
};

/// Publishes unit `found` of this CTA for all; false: there is none, which is said too. Whole warp.
template <int kWidth, int kRow>
__device__ bool publish_unit(const DecodeParams& params, DecodeControl& control,
                             DecodeUnitFinder<kWidth, kRow>& finder, std::uint32_t found) {
  constexpr std::uint32_t kUnits = tiles::kDecodeUnitRing;
  barrier_wait(shared_address(&control.unit_empty[found % kUnits]), found / kUnits % 2 ^ 1);
  DecodeUnit next = finder.next();
  set_common_keys(params, next);
  if (threadIdx.x % 32 == 0) {
    control.units[found % kUnits] = next;
    barrier_arrive(shared_address(&control.unit_full[found % kUnits]));
  }
  __syncwarp();
  return next.batch >= 0;
}

/// Slot of a part of the unit's head and row block.
__device__ inline std::int64_t decode_slot(const DecodeParams& params, const DecodeUnit& unit,
                                           int part) {
  const std::int64_t group =
      (static_cast<std::int64_t>(unit.batch) * params.heads_kv + unit.head) * params.row_blocks +
      unit.row_block;
  return group * params.max_parts + part;
}

/// Waits until a part is announced in `word` and sets it back: a graph runs again under the same
/// id.
__device__ inline void await_part(std::uint64_t* word, std::uint64_t launch_id) {
  std::uint64_t value;
  do {
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  } while (value != launch_id);
  *word = 0;
}

/// Of the workspace; stays where it is written, not within the branch that uses it.
__device__ inline float4 load_four(const void* from) {
  float4 value;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

/// Counts pages of the sequence that do not exist, where `unit` is the first of one. Whole warp.
__device__ inline void count_bad_pages(const DecodeParams& params, const DecodeUnit& unit) {
  if (params.bad_pages == nullptr || params.page_size == 0 || unit.part != 0 || unit.head != 0 ||
      unit.row_block != 0) {
    return;
  }
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int pages = (unit.seqlen_kv + params.page_size - 1) / params.page_size;
  int bad = 0;
#pragma unroll 1
  for (int i = lane; i < pages; i += 32) {
    const std::int64_t page = index_at(params.page_table, unit.batch * params.page_table_batch + i);
    bad += page < 0 || page >= params.num_pages;
  }
  bad = __reduce_add_sync(~0u, bad);
  if (lane == 0) {
    params.bad_pages[unit.batch] = bad;
  }
}

/// Where a warp is in the ring of slots.
template <int kSlots>
struct DecodeRing {
  int slot = 0;
  std::uint32_t turn = 0;  // parity

  __device__ void next() {
    ++slot;
    if (slot == kSlots) {
      slot = 0;
      turn ^= 1;
    }
  }
};

/// The ring of an instantiation.
template <int kWidth, int kRow>
struct DecodeSlots {
  static constexpr int kElementWidth = kWidth;
  static constexpr tiles::Sm90DecodeRow kShape = tiles::kSm90DecodeRows[kWidth][kRow];
  static constexpr int kWarps = kShape.warps, kSlots = kShape.slots;
  static constexpr int kD = kShape.head_dim, kTileRows = kShape.tile_rows();
  using Ring = DecodeRing<kSlots>;

  unsigned char* const raw;  // aligned
  DecodeControl& control;

  __device__ std::uint32_t at(int byte) const {
    return shared_address(raw) + static_cast<std::uint32_t>(byte);
  }
  __device__ std::uint32_t slot(int s) const { return at(s * kShape.slot_bytes()); }
  /// Where the 16 bytes of chunk `chunk` of row `row` lie in a slot: eight rows of one chunk meet
  /// eight banks, as the copy engine writes them.
  __device__ static std::uint32_t place(int row, int chunk) {
    return chunk / 8 * kShape.panel_bytes() + row * tiles::kDecodePanelBytes +
           (chunk % 8 ^ row % 8) * 16;
  }
  __device__ std::uint32_t full(int s) const { return shared_address(&control.slot_full[s]); }
  __device__ std::uint32_t empty(int s) const { return shared_address(&control.slot_empty[s]); }

  /// Clears those of the 16 rows of V of block `of`, from key `first` on, that no row of the
  /// sequence sees: 0 · NaN would be NaN. Whole warp.
  __device__ void clear_foreign_rows(const DecodeUnit& unit, int s, int of, int first) const {
    constexpr int kKeys = tiles::kDecodeBlockKeys;
    const int lane = static_cast<int>(threadIdx.x % 32), key = first + lane % kKeys;
    if (key < unit.first_key || key >= unit.end_key) {
#pragma unroll 1
      for (int chunk = lane / kKeys; chunk < 8 * kShape.panels(); chunk += 2) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                         slot(s) + place(of * kKeys + lane % kKeys, chunk)),
                     "r"(0)
                     : "memory");
      }
      fence_shared_to_async();  // the copy engine writes there next
    }
    __syncwarp();
  }

  /// Query rows of a unit.
  __device__ static int rows_of(const DecodeParams& params, const DecodeUnit& unit) {
    return min(kTileRows, unit.seqlen_q * params.group - unit.row_block * kTileRows);
  }
};

/// Shared memory where warps have keys, and who is who.
template <int kRow>
struct DecodeShared : DecodeSlots<0, kRow> {
  using Slots = DecodeSlots<0, kRow>;
  using Slots::kD, Slots::kShape, Slots::kSlots, Slots::kTileRows, Slots::kWarps, Slots::raw;
  static constexpr int kFirstLoadWarp = kWarps + tiles::kDecodeFinishWarps;
  static constexpr bool kQueriesInSlots = true;

  __device__ float* exchange_o() const {
    return reinterpret_cast<float*>(raw + kSlots * kShape.slot_bytes());
  }
  __device__ float2* exchange_state() const {
    return reinterpret_cast<float2*>(exchange_o() + kTileRows * kD);
  }
  /// Columns are twisted in pieces of 8, so that the rows of a thread's column meet other banks.
  __device__ static int exchange_place(int row, int column) {
    return row * kD + (column ^ row / 2 % 4 * 8);
  }
  __device__ std::uint32_t present(int s) const {
    return shared_address(raw) + kSlots * kShape.slot_bytes() + kShape.exchange_bytes() +
           s * kShape.present_bytes();
  }
  /// What follows from the parts so far of a head, of so many rows: from row to row, and behind
  /// `rows` of them (maximum, sum) of each.
  __device__ float* so_far_o() const {
    return reinterpret_cast<float*>(raw + kShape.ring_bytes() + kShape.exchange_bytes());
  }
  __device__ float2* so_far_state(int rows) const {
    return reinterpret_cast<float2*>(so_far_o() + rows * kD);
  }
};

/// Shared memory where warps have columns of O. Behind the ring; `blocks` of 8 query rows.
template <int kWidth, int kRow>
struct DecodeColumns : DecodeSlots<kWidth, kRow> {
  using Slots = DecodeSlots<kWidth, kRow>;
  using Slots::at, Slots::kShape, Slots::kSlots, Slots::raw;
  static constexpr int kFirstLoadWarp = Slots::kWarps + 1;
  static constexpr bool kQueriesInSlots = false;
  // Bytes of a block of 8 query rows.
  static constexpr int kWeights = kShape.weights_bytes(1), kNumbers = kShape.numbers_bytes(1);
  static constexpr int kQueries = kShape.query_bytes(1), kColumns = kShape.column_bytes(1);

  __device__ std::uint32_t scales(int s) const {
    return at(kSlots * kShape.slot_bytes() + s * kShape.scale_bytes());
  }
  __device__ std::uint32_t present(int s) const {
    return at(kSlots * (kShape.slot_bytes() + kShape.scale_bytes()) + s * kShape.present_bytes());
  }
  __device__ std::uint32_t weights() const { return at(kShape.ring_bytes()); }
  __device__ std::uint32_t maxima(int blocks) const {
    return at(kShape.ring_bytes() + blocks * kWeights);
  }
  __device__ std::uint32_t sums(int blocks) const { return maxima(blocks) + blocks * kNumbers; }
  __device__ std::uint32_t kept(int blocks) const { return sums(blocks) + blocks * kNumbers; }
  __device__ static int queries_at(int blocks) {
    return kShape.ring_bytes() + blocks * (kWeights + 3 * kNumbers);
  }
  __device__ std::uint32_t queries(int blocks, int buffer) const {
    return at(queries_at(blocks) + buffer * blocks * kQueries);
  }
  /// What lies behind so many buffers of queries.
  __device__ float4* behind_queries(int blocks, int buffers) const {
    return reinterpret_cast<float4*>(raw + queries_at(blocks) + buffers * blocks * kQueries);
  }
  /// What follows from the parts so far of a head: of each value warp and its lanes.
  __device__ float4* so_far_o(int blocks) const {
    return behind_queries(blocks, tiles::kDecodeQueryBuffers);
  }
  __device__ float4* so_far_state(int blocks) const {
    return so_far_o(blocks) + blocks * (kColumns / 16);
  }
};

}  // namespace rafter::cuda
