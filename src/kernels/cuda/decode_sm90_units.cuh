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
  int seqlen_q = 0, seqlen_kv = 0;
  int row_q = 0, row_kv = 0;         // first row of the sequence in its tensor (packed), else 0
  int first_tile = 0, end_tile = 0;  // first of the part; end of all
  int first_key = 0, end_key = 0;    // what any row of the sequence sees
};

using DecodeMask = tiles::BasicMaskWindow<int>;

__device__ inline DecodeMask mask_of(const DecodeParams& params, int seqlen_q, int seqlen_kv) {
  return {params.window_left, params.window_right, params.top_left ? 0 : seqlen_kv - seqlen_q,
          seqlen_kv};
}

/// Turns unit numbers into units. Whole warp; unit numbers must grow from call to call.
template <int kWidth, int kRow>
struct DecodeUnitFinder {
  static constexpr tiles::Sm90DecodeRow kShape = tiles::kSm90DecodeRows[kWidth][kRow];
  int units_before = 0;  // of the sequences before first_batch
  int first_batch = 0;

  __device__ DecodeUnit find(const DecodeParams& params, int number) {
    DecodeUnit unit;
    unit.seqlen_q = params.seqlen_q;
    unit.seqlen_kv = params.seqlen_kv;
    tiles::Sm90DecodeCut cut = params.same_cut;
    int index = 0;  // among the units of the sequence
    if (params.cu_seqlens_q.data == nullptr && params.seqused_kv.data == nullptr) {
      const int each = cut.units(params.heads_kv);
      const int b = each > 0 ? number / each : params.batch;
      index = number - b * each;
      unit.batch = b < params.batch ? b : -1;
    } else {
      search(params, number, unit, cut, index);
    }
    if (unit.batch < 0) {
      return unit;
    }
    unit.parts = cut.parts;
    unit.row_warps_log2 = cut.row_warps_log2;
    const int block = index / cut.parts;
    unit.part = index - block * cut.parts;
    unit.head = block / cut.row_blocks;
    unit.row_block = block - unit.head * cut.row_blocks;
    unit.first_tile = cut.first_tile + unit.part;
    unit.end_tile = cut.end_tile;
    unit.first_key = cut.first_key;
    unit.end_key = cut.end_key;
    return unit;
  }

 private:
  __device__ static void read_lengths(const DecodeParams& params, int b, DecodeUnit& unit) {
    if (params.cu_seqlens_q.data != nullptr) {
      const std::int64_t q = index_at(params.cu_seqlens_q, b);
      const std::int64_t kv = index_at(params.cu_seqlens_kv, b);
      unit.row_q = static_cast<int>(q);
      unit.row_kv = static_cast<int>(kv);
      unit.seqlen_q = clamped_length(index_at(params.cu_seqlens_q, b + 1) - q, params.seqlen_q);
      unit.seqlen_kv = clamped_length(index_at(params.cu_seqlens_kv, b + 1) - kv, params.seqlen_kv);
    }
    if (params.seqused_kv.data != nullptr) {
      unit.seqlen_kv = clamped_length(index_at(params.seqused_kv, b), unit.seqlen_kv);
    }
  }

  /// The sequence whose unit `number` is: 32 sequences at a time, one a lane.
  __device__ void search(const DecodeParams& params, int number, DecodeUnit& unit,
                         tiles::Sm90DecodeCut& cut, int& index) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
    for (; first_batch < params.batch; first_batch += 32) {
      DecodeUnit mine = unit;
      tiles::Sm90DecodeCut my_cut;
      if (first_batch + lane < params.batch) {
        read_lengths(params, first_batch + lane, mine);
        my_cut = tiles::sm90_decode_cut(kShape, mask_of(params, mine.seqlen_q, mine.seqlen_kv),
                                        mine.seqlen_q, params.group, params.least_parts,
                                        params.forced_parts);
      }
      const int units = my_cut.units(params.heads_kv);
      int sum = units;  // inclusive scan over the lanes
#pragma unroll 1
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        sum += lane >= step ? other : 0;
      }
      const unsigned behind = __ballot_sync(~0u, number < units_before + sum);
      if (behind == 0) {
        units_before += __shfl_sync(~0u, sum, 31);
        continue;
      }
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      const auto of_owner = [&](int value) { return __shfl_sync(~0u, value, owner); };
      index = number - units_before - of_owner(sum - units);
      unit.batch = first_batch + owner;
      unit.seqlen_q = of_owner(mine.seqlen_q);
      unit.seqlen_kv = of_owner(mine.seqlen_kv);
      unit.row_q = of_owner(mine.row_q);
      unit.row_kv = of_owner(mine.row_kv);
      cut.first_key = of_owner(my_cut.first_key);
      cut.end_key = of_owner(my_cut.end_key);
      cut.first_tile = of_owner(my_cut.first_tile);
      cut.end_tile = of_owner(my_cut.end_tile);
      cut.parts = of_owner(my_cut.parts);
      cut.row_blocks = of_owner(my_cut.row_blocks);
      cut.row_warps_log2 = of_owner(my_cut.row_warps_log2);
      return;
    }
  }
};

/// What all warps share: units that one warp found, and the slots of the ring.
struct DecodeControl {
  std::uint64_t unit_full[tiles::kDecodeUnitRing], unit_empty[tiles::kDecodeUnitRing];
  std::uint64_t slot_full[tiles::kDecodeMostSlots], slot_empty[tiles::kDecodeMostSlots];
  DecodeUnit units[tiles::kDecodeUnitRing];

  /// Waits for the count-th unit of this CTA; batch −1: there are no more.
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

/// Shared memory of an instantiation, and who is who.
template <int kWidth, int kRow>
struct DecodeShared {
  static constexpr tiles::Sm90DecodeRow kShape = tiles::kSm90DecodeRows[kWidth][kRow];
  static constexpr int kWarps = kShape.warps, kSlots = kShape.slots;
  static constexpr int kD = kShape.head_dim, kTileRows = kShape.tile_rows();
  static constexpr int kFinishers = 32 * tiles::kDecodeFinishWarps;  // threads
  // Named barriers: results are in shared memory, and they were taken.
  static constexpr int kWritten = 1, kTaken = 2;
  static constexpr int kMeeting = 32 * kWarps + kFinishers;
  using Ring = DecodeRing<kSlots>;

  unsigned char* const raw;  // aligned
  DecodeControl& control;

  __device__ std::uint32_t slot(int s) const {
    return shared_address(raw) + s * kShape.slot_bytes();
  }
  /// Where the 16 bytes of chunk `chunk` of row `row` lie in a slot: eight rows of one chunk meet
  /// eight banks, as the copy engine writes them.
  __device__ static std::uint32_t place(int row, int chunk) {
    return chunk / 8 * kShape.panel_bytes() + row * tiles::kDecodePanelBytes +
           (chunk % 8 ^ row % 8) * 16;
  }
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
  __device__ std::uint32_t scales(int s) const {
    return behind_exchange() + s * kShape.scale_bytes();
  }
  __device__ std::uint32_t present(int s) const {
    return behind_exchange() + kSlots * kShape.scale_bytes() + s * kShape.present_bytes();
  }
  __device__ std::uint32_t full(int s) const { return shared_address(&control.slot_full[s]); }
  __device__ std::uint32_t empty(int s) const { return shared_address(&control.slot_empty[s]); }

  /// Query rows of a unit.
  __device__ static int rows_of(const DecodeParams& params, const DecodeUnit& unit) {
    return min(kTileRows, unit.seqlen_q * params.group - unit.row_block * kTileRows);
  }

 private:
  __device__ std::uint32_t behind_exchange() const {
    return shared_address(raw) + kSlots * kShape.slot_bytes() + kShape.exchange_bytes();
  }
};

}  // namespace rafter::cuda
