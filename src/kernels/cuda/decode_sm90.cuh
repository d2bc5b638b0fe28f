// Decode for sm_90a: few queries against many keys, O = softmax(softmax_scale · QKᵀ + mask) V with
// the keys of a sequence split into parts that are merged in the same launch.
//   Q, O [batch, heads_q, seqlen_q, D], bf16 or f16   lse [batch, heads_q, seqlen_q]
//   K, V [batch, heads_kv, seqlen_kv, D], dense, packed or in pages; 16 bits, int8 or e4m3
// A unit of work is one part of the keys of a sequence for one KV head and up to 64 query rows
// (position × head of the group). CTAs take units in turn. Its warps take 16 keys each, every
// parts-th tile of 128 (or, beyond 8, 16, 32 rows, 2, 4, 8 warps the same keys and 8 rows each):
//   copies   rows of K and V by cp.async into rings of the warp's own, units ahead
//   scores   Sᵀ[keys, rows] = K Qᵀ, so that 8 rows fill an instruction
//   softmax  maximum over the lanes of a row, exp2, sum
//   values   Oᵀ[D, rows] += Vᵀ Pᵀ
// then the warps' results meet in shared memory and four other warps finish them, while the first
// go on: where a unit is one of several parts the result goes to the workspace, and the last CTA to
// arrive merges them in their order. Arrival is a word per part, equal to the id of the launch: the
// workspace needs no preparation. Should two CTAs merge they would write the same bits.
// Named barriers: 1 … 7 among the warps of the same keys, 9 results are in shared memory, 10 they
// were taken. One of the finishing warps finds the units: barriers full and empty of a ring of
// them.
#pragma once

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/mma.cuh"
#include "hw/cuda/wgmma.cuh"
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
    unit.row_block = index % cut.row_blocks;
    index /= cut.row_blocks;
    unit.head = index / cut.parts;
    unit.part = index - unit.head * cut.parts;
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

/// Two bytes of a cache, in the low half of `bytes`, as a pair of 16-bit values.
template <DType kTo>
__device__ inline std::uint32_t widen(std::uint32_t bytes, bool e4m3) {
  std::uint32_t halves;
  if (e4m3) {
    asm("{\n.reg .b16 two;\ncvt.u16.u32 two, %1;\ncvt.rn.f16x2.e4m3x2 %0, two;\n}"
        : "=r"(halves)
        : "r"(bytes));
  } else {
    // Biased by 128 the bytes are the low mantissa bits of 1024 + x + 128.
    const std::uint32_t biased = __byte_perm(bytes ^ 0x8080u, 0x64646464u, 0x4140);
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(biased), "r"(0x64806480u));
  }
  if constexpr (kTo == DType::f16) {
    return halves;
  } else {
    float low, high;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(low), "=f"(high)
        : "r"(halves));
    return pack<kTo>(low, high);
  }
}

/// Units that one warp found, for all.
struct DecodeControl {
  std::uint64_t full[tiles::kDecodeUnitRing], empty[tiles::kDecodeUnitRing];
  DecodeUnit units[tiles::kDecodeUnitRing];
};

template <DType kDType, int kWidth, int kRow>
struct Decode {
  static constexpr tiles::Sm90DecodeRow kShape = tiles::kSm90DecodeRows[kWidth][kRow];
  static constexpr bool kBytes = kWidth == 1;
  static constexpr int kD = kShape.head_dim, kSteps = kD / 16;  // of 16 columns
  static constexpr int kRowBytes = kShape.row_bytes();
  static constexpr int kStages = kShape.stages, kBlockBytes = kShape.block_bytes();
  static constexpr int kKeys = tiles::kDecodeBlockKeys, kRows = tiles::kDecodeBlockRows;
  static constexpr int kWarps = kShape.warps, kTileRows = kShape.tile_rows();
  static constexpr int kFinishers = 32 * tiles::kDecodeFinishWarps;  // threads
  static constexpr int kWritten = 9, kTaken = 10;                    // named barriers of those two
  static_assert(kWarps <= 8);  // whose groups have the seven from 1 on
  static constexpr int kMeeting = 32 * kWarps + kFinishers;
  static constexpr int kUnits = tiles::kDecodeUnitRing;
  static constexpr std::int64_t kAbsent = INT64_MIN;  // offset of a row that is not there
  static constexpr int kQueryBytes = kShape.query_bytes();
  static constexpr int kScale = kShape.scale_bytes();
  static constexpr int kPresent = tiles::Sm90DecodeRow::kPresentBytes;
  // An 8-bit V is exact in bf16, whose range holds p · factor; where q is f16 a second product adds
  // what bf16 drops of p.
  static constexpr DType kValues = kBytes ? DType::bf16 : kDType;
  static constexpr bool kTwoProducts = kBytes && kDType == DType::f16;

  const DecodeParams& params;
  const bool e4m3;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int g = lane / 4, t = lane % 4;
  unsigned char* const raw;      // shared memory, aligned
  std::uint32_t k_ring, v_ring;  // kStages · kWarps blocks
  std::uint32_t k_scales, v_scales, present_words;
  std::uint32_t queries;  // of this warp: kStages blocks of its rows
  DecodeControl& control;

  __device__ Decode(const DecodeParams& p, bool is_e4m3, unsigned char* shared,
                    DecodeControl& units)
      : params(p), e4m3(is_e4m3), raw(shared), control(units) {
    // Each stage has a block for each warp, which fills it; warps of the same keys read each
    // other's.
    constexpr int kBlocks = kWarps * kStages;
    k_ring = shared_address(raw);
    v_ring = k_ring + kBlocks * kBlockBytes;
    const std::uint32_t behind = v_ring + kBlocks * kBlockBytes;
    queries = behind + warp * kStages * kQueryBytes;
    k_scales = behind + kBlocks * kQueryBytes;
    v_scales = k_scales + kBlocks * kScale;
    present_words = v_scales + kBlocks * kScale;
  }

  /// Among the warps of its keys; which keys.
  __device__ int row_warp(const DecodeUnit& unit) const {
    return warp & ((1 << unit.row_warps_log2) - 1);
  }
  __device__ int key_warp(const DecodeUnit& unit) const { return warp >> unit.row_warps_log2; }

  __device__ float* exchange_o() const {
    return reinterpret_cast<float*>(raw + kShape.shared_bytes() - tiles::Sm90DecodeRow::kAlign -
                                    kShape.exchange_bytes());
  }
  __device__ float2* exchange_state() const {
    return reinterpret_cast<float2*>(exchange_o() + kTileRows * kD);
  }

  /// Among the warps of the same keys. Groups of 2, 4 and 8 warps have barriers of their own: a
  /// unit may follow one whose groups were of another size before all of those have gone on.
  __device__ void group_barrier(const DecodeUnit& unit) const {
    if (unit.row_warps_log2 == 0) {
      __syncwarp();
    } else {
      const int first = 1 + kWarps - (2 * kWarps >> unit.row_warps_log2);
      named_barrier_sync(first + key_warp(unit), 32 << unit.row_warps_log2);
    }
  }

  // ---- copies ---------------------------------------------------------------------------------

  /// What is copied next. All lanes agree on all but the rows.
  struct Cursor {
    DecodeUnit unit;
    std::uint32_t count = 0;  // of units begun
    int tile = 0;
    int slot = 0;
    int query_slot = 0;
    int page_key = -1;      // first key of the block whose page numbers were fetched ahead
    std::int64_t page = 0;  // of key page_key + lane
    // Row `lane` of the block: its sequence or page, its place there, whether it exists.
    std::int64_t outer = 0;
    int inner = 0;
    bool there = false;
  };

  /// First key of the block that warp `of` of the CTA fills, of a tile.
  __device__ static int first_key_of(int tile, int of) {
    return tile * kShape.tile_keys() + of * kKeys;
  }

  __device__ static int next_slot(int slot) { return slot + 1 == kStages ? 0 : slot + 1; }

  __device__ std::int64_t page_of(const DecodeUnit& unit, int key) const {
    return lane >= kKeys || key < unit.first_key || key >= unit.end_key
               ? -1
               : index_at(params.page_table,
                          unit.batch * params.page_table_batch + key / params.page_size);
  }

  /// Where chunk `c` of row `r` of rows of kBytesOfRow lies: eight rows of one column meet eight
  /// banks.
  template <int kBytesOfRow>
  __device__ static std::uint32_t place_in(int r, int c) {
    const int twist = kBytesOfRow >= 128 ? r % 8 : r / 2 % 4;
    return static_cast<std::uint32_t>(r * kBytesOfRow + (c ^ twist) * 16);
  }
  __device__ static std::uint32_t place(int r, int c) { return place_in<kRowBytes>(r, c); }

  /// Copies kCount rows of kBytesOfRow; `row` is the byte offset of row `lane`, kAbsent: zeros.
  template <int kCount, int kBytesOfRow, int kSize>
  __device__ void copy_rows(const DecodeCache& cache, std::uint32_t to, std::int64_t row) const {
    constexpr int kInRow = kBytesOfRow / 16;
    static_assert(kCount * kInRow % 32 == 0);
    if (!cache.aligned) {
      copy_unaligned<kCount, kBytesOfRow, kSize>(cache, to, row);
      return;
    }
    const int chunk = lane % kInRow;
    const unsigned char* const data = cache.data + chunk * 16;
#pragma unroll
    for (int i = 0; i < kCount * kInRow / 32; ++i) {
      const int r = (i * 32 + lane) / kInRow;
      const std::int64_t offset = __shfl_sync(~0u, row, r);
      const bool there = offset != kAbsent && chunk < cache.chunks;
      copy_16_async(to + place_in<kBytesOfRow>(r, chunk), there ? data + offset : cache.data,
                    there ? 16 : 0);
    }
  }

  /// Element by element, for rows that do not begin and end at multiples of 16 bytes.
  template <int kCount, int kBytesOfRow, int kSize>
  __device__ __noinline__ static void copy_unaligned(const DecodeCache& cache, std::uint32_t to,
                                                     std::int64_t row) {
    constexpr int kInRow = kBytesOfRow / 16;
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
    for (int i = 0; i < kCount * kInRow / 32; ++i) {
      const int r = (i * 32 + lane) / kInRow;
      const int chunk = lane % kInRow;
      const std::int64_t offset = __shfl_sync(~0u, row, r);
#pragma unroll 1
      for (int word = 0; word < 4; ++word) {
        std::uint32_t value = 0;
#pragma unroll 1
        for (int e = 0; e < 4 / kSize; ++e) {
          const int byte = chunk * 16 + word * 4 + e * kSize;
          if (offset != kAbsent && byte < cache.row_bytes) {
            const unsigned char* source = cache.data + offset + byte;
            value |= kSize == 1 ? std::uint32_t{*source} << (8 * e)
                                : std::uint32_t{*reinterpret_cast<const std::uint16_t*>(source)}
                                      << (16 * e);
          }
        }
        asm volatile(
            "st.shared.u32 [%0], %1;" ::"r"(to + place_in<kBytesOfRow>(r, chunk) + word * 4),
            "r"(value)
            : "memory");
      }
    }
  }

  /// Begins the copies of this warp's query rows of a unit.
  __device__ void copy_queries(const DecodeUnit& unit, int slot) const {
    const int row = row_of(unit, lane);
    const bool there = lane < kRows && row < unit.seqlen_q * params.group;
    const int position = row / params.group;
    const std::int64_t outer = params.cu_seqlens_q.data != nullptr ? 0 : unit.batch;
    const std::int64_t offset =
        outer * params.q.stride_batch + (unit.row_q + position) * params.q.stride_seqlen +
        (unit.head * params.group + row - position * params.group) * params.q.stride_heads;
    copy_rows<kRows, 2 * kD, 2>(params.q, queries + slot * kQueryBytes, there ? offset : kAbsent);
  }

  __device__ void copy_scale(const DecodeCache& cache, std::uint32_t note,
                             std::int64_t element) const {
    if (kBytes && cache.scale != nullptr && lane < kKeys) {
      copy_4_async(note + lane * 4, cache.scale + (element != kAbsent ? element : 0),
                   element != kAbsent ? 4 : 0);
    }
  }

  /// Begins the copies of the next block of K (which = 0), or of the block of V that belongs to it
  /// (1). A unit without keys takes a turn too.
  __device__ void copy(Cursor& c, int which) const {
    const DecodeUnit& unit = c.unit;
    const int slot = c.slot * kWarps + warp;
    if (which == 0) {
      choose_block(c, slot);
    }
    if (c.tile < unit.end_tile) {
      const DecodeCache& cache = which == 0 ? params.k : params.v;
      const std::int64_t row = c.outer * cache.stride_batch + c.inner * cache.stride_seqlen +
                               unit.head * cache.stride_heads;
      copy_rows<kKeys, kRowBytes, kBytes ? 1 : 2>(
          cache, (which == 0 ? k_ring : v_ring) + slot * kBlockBytes, c.there ? row : kAbsent);
      if constexpr (kBytes) {
        const std::int64_t element = c.outer * cache.scale_batch + c.inner * cache.scale_seqlen +
                                     unit.head * cache.scale_heads;
        copy_scale(cache, (which == 0 ? k_scales : v_scales) + slot * kScale,
                   c.there ? element : kAbsent);
      }
    }
    if (which == 1) {
      c.tile += unit.parts;
      c.slot = next_slot(c.slot);
    }
    commit_copies();
  }

  /// Which rows the next block has: of this unit, or of the next with its queries.
  __device__ void choose_block(Cursor& c, int slot) const {
    const DecodeUnit& unit = c.unit;
    if (c.tile >= unit.end_tile && (c.count == 0 || unit.batch >= 0)) {
      barrier_wait(shared_address(&control.full[c.count % kUnits]), c.count / kUnits % 2);
      c.unit = control.units[c.count % kUnits];
      ++c.count;
      c.page_key = -1;
      c.tile = unit.batch < 0 ? unit.end_tile : unit.first_tile;
      if (unit.batch >= 0) {
        copy_queries(unit, c.query_slot);
      }
      c.query_slot = next_slot(c.query_slot);
    }
    if (c.tile >= unit.end_tile) {
      return;
    }
    const int first = first_key_of(c.tile, warp);
    const int key = first + lane;
    c.there = lane < kKeys && key >= unit.first_key && key < unit.end_key;
    c.outer = params.cu_seqlens_kv.data != nullptr ? 0 : unit.batch;
    c.inner = unit.row_kv + key;
    if (params.page_size > 0) {
      c.outer = c.page_key == first ? c.page : page_of(unit, key);
      c.inner = key % params.page_size;
      c.there = c.there && c.outer >= 0 && c.outer < params.num_pages;
      const unsigned rows = __ballot_sync(~0u, c.there);
      if (lane == 0) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(present_words + slot * kPresent), "r"(rows)
                     : "memory");
      }
      c.page_key = first_key_of(c.tile + unit.parts, warp);
      c.page = page_of(unit, c.page_key + lane);
    }
  }

  // ---- products -------------------------------------------------------------------------------

  /// This warp's rows of a unit. A thread has rows 2t and 2t + 1 in its scores, row g in q.
  struct Rows {
    std::uint32_t q[kSteps][2];
    float o[kSteps][4];
    float max[2], sum[2];
    int first[2], last[2];  // keys that rows 2t and 2t + 1 see
    std::uint64_t tree[2];  // of keys from tree_key on
    int tree_key;
  };

  __device__ int row_of(const DecodeUnit& unit, int i) const {
    return unit.row_block * kTileRows + row_warp(unit) * kRows + i;
  }

  __device__ static std::uint32_t shared_word(std::uint32_t address) {
    std::uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
  }

  /// Row g of the queries that copy_queries() brought, and empty results.
  __device__ void start_rows(const DecodeUnit& unit, int slot, Rows& rows) const {
    const std::uint32_t from = queries + slot * kQueryBytes;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // 8-bit K gives a thread four columns in a row: q follows.
        const int byte = kBytes ? 8 * t + 4 * h : 16 * h + 4 * t;  // of 32
        rows.q[i][h] = shared_word(from + place_in<2 * kD>(g, 2 * i + byte / 16) + byte % 16);
      }
    }
    const int count = unit.seqlen_q * params.group;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rows.o[i][e] = 0;
      }
    }
    const auto mask = mask_of(params, unit.seqlen_q, unit.seqlen_kv);
    rows.tree_key = unit.seqlen_kv - unit.seqlen_q;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = row_of(unit, 2 * t + e);
      const auto keys = mask.row(r / params.group);
      rows.first[e] = r < count ? keys.first : 0;
      rows.last[e] = r < count ? keys.last : 0;
      rows.max[e] = -INFINITY;
      rows.sum[e] = 0;
      rows.tree[e] = ~std::uint64_t{0};
      if (params.tree_mask != nullptr && r < count) {
        rows.tree[e] = params.tree_mask[unit.batch * params.tree_mask_batch + r / params.group];
      }
    }
  }

  /// Sᵀ of 16 keys and 8 rows.
  __device__ void scores(const Rows& rows, std::uint32_t block, float (&s)[4]) const {
    s[0] = s[1] = s[2] = s[3] = 0;
    float odd[4] = {0, 0, 0, 0};  // two chains of products
    const int r = lane % 8 + lane / 8 % 2 * 8;
    const int column = lane / 16;
    if constexpr (!kBytes) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        std::uint32_t a[4];
        load_matrices(a, block + place(r, 2 * i + column));
        mma_16_8_16<kDType>(i % 2 == 0 ? s : odd, a, rows.q[i][0], rows.q[i][1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; i += 2) {
        std::uint32_t b[4];
        load_matrices(b, block + place(r, i + column));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const std::uint32_t a[4] = {
              widen<kDType>(b[2 * h] & 0xffffu, e4m3), widen<kDType>(b[2 * h + 1] & 0xffffu, e4m3),
              widen<kDType>(b[2 * h] >> 16, e4m3), widen<kDType>(b[2 * h + 1] >> 16, e4m3)};
          mma_16_8_16<kDType>(h == 0 ? s : odd, a, rows.q[i + h][0], rows.q[i + h][1]);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[e] += odd[e];
    }
  }

  /// Oᵀ += Vᵀ Pᵀ over 16 keys.
  __device__ void add_values(Rows& rows, std::uint32_t block, std::uint32_t p0,
                             std::uint32_t p1) const {
    if constexpr (!kBytes) {
      const int r = lane % 8 + lane / 16 * 8;
      const int column = lane / 8 % 2;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        std::uint32_t a[4];
        load_matrices_transposed(a, block + place(r, 2 * i + column));
        mma_16_8_16<kValues>(rows.o[i], a, p0, p1);
      }
    } else {
      const int r = lane % 8 + lane / 8 % 2 * 8;
      const int column = lane / 16;
#pragma unroll
      for (int i = 0; i < kSteps; i += 2) {
        std::uint32_t b[4];
        load_matrices_transposed(b, block + place(r, i + column));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // Keys 2t and 2t + 1, columns 2g and 2g + 1 of each.
          const std::uint32_t a[4] = {widen<kValues>(__byte_perm(b[2 * h], 0, 0x4420), e4m3),
                                      widen<kValues>(__byte_perm(b[2 * h], 0, 0x4431), e4m3),
                                      widen<kValues>(__byte_perm(b[2 * h + 1], 0, 0x4420), e4m3),
                                      widen<kValues>(__byte_perm(b[2 * h + 1], 0, 0x4431), e4m3)};
          mma_16_8_16<kValues>(rows.o[i + h], a, p0, p1);
        }
      }
    }
  }

  /// Column of O of accumulator half `h` of step `i`.
  __device__ int column_of(int i, int h) const { return 16 * i + (kBytes ? 2 * g + h : g + 8 * h); }

  __device__ static float shared_float(std::uint32_t address) {
    return __uint_as_float(shared_word(address));
  }

  /// Scores, masked and in log2 units; `first` is the block's first key.
  __device__ void finish_scores(const Rows& rows, int slot, int first, float (&s)[4]) const {
    std::uint32_t present = ~0u;
    if (params.page_size > 0) {
      present = shared_word(present_words + slot * kPresent);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first + g + 8 * h;
      float scale = 1;
      if constexpr (kBytes) {
        scale = params.k.scale != nullptr ? shared_float(k_scales + slot * kScale + (g + 8 * h) * 4)
                                          : 1.0f;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = s[2 * h + e];
        score *= scale;
        if (params.transform_cap > 0) {  // tanh(x) = 1 − 2 / (e^2x + 1)
          const float power = exp2_approx(score * params.transform_scale);
          score = params.transform_cap * (1.0f - __fdividef(2.0f, power + 1.0f));
        } else {
          score *= params.scale_log2;
        }
        bool seen =
            key >= rows.first[e] && key < rows.last[e] && (present >> (g + 8 * h) & 1u) != 0;
        if (params.tree_mask != nullptr && key >= rows.tree_key) {
          seen = seen && (rows.tree[e] >> (key - rows.tree_key) & 1u) != 0;
        }
        score = seen ? score : -INFINITY;
      }
    }
  }

  /// Scores become probabilities relative to the running maximum; sums and outputs follow.
  __device__ static void softmax(Rows& rows, float (&s)[4]) {
    float top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {  // over the lanes of a row
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], step));
      }
    }
    const bool grows = top[0] > rows.max[0] || top[1] > rows.max[1];
    if (__any_sync(~0u, grows)) {
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float max = fmaxf(rows.max[e], top[e]);
        factor[e] = max == -INFINITY ? 1.0f : exp2_approx(rows.max[e] - max);
        rows.max[e] = max;
        rows.sum[e] *= factor[e];
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          rows.o[i][e] *= factor[e % 2];
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float finite = rows.max[e] == -INFINITY ? 0.0f : rows.max[e];
      s[e] = exp2_approx(s[e] - finite);
      s[2 + e] = exp2_approx(s[2 + e] - finite);
      rows.sum[e] += s[e] + s[2 + e];
    }
  }

  /// Pairs of probabilities become the operand of the next product.
  __device__ static void operand(const float (&p)[4], std::uint32_t& p0, std::uint32_t& p1) {
    p0 = transpose_matrix(pack<kValues>(p[0], p[1]));
    p1 = transpose_matrix(pack<kValues>(p[2], p[3]));
  }

  __device__ void values(Rows& rows, int slot, float (&p)[4]) const {
    const std::uint32_t block = v_ring + slot * kBlockBytes;
    if constexpr (kBytes) {
      if (params.v.scale != nullptr) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float scale = shared_float(v_scales + slot * kScale + (g + 8 * h) * 4);
          p[2 * h] *= scale;
          p[2 * h + 1] *= scale;
        }
      }
    }
    std::uint32_t p0, p1;
    operand(p, p0, p1);
    add_values(rows, block, p0, p1);
    if constexpr (kTwoProducts) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[e] -= to_bf16_value(p[e]);
      }
      operand(p, p0, p1);
      add_values(rows, block, p0, p1);
    }
  }

  /// The value that pack<bf16> gives.
  __device__ static float to_bf16_value(float x) {
    return __uint_as_float(pack<DType::bf16>(0.0f, x) & 0xffff0000u);
  }

  /// One tile: 16 keys of each warp of the group, which all of them take. A warp alone with its
  /// keys lets the next block of K come as soon as the scores are there. Returns what is to be
  /// copied then: from K (0) or from V (1) on.
  __device__ int step(const DecodeUnit& unit, Rows& rows, Cursor& c, int tile, int slot) const {
    const int first = warp - row_warp(unit);
    const bool alone = unit.row_warps_log2 == 0;
    if (!alone) {
      wait_copies<2 * kStages - 2>();
      group_barrier(unit);
    }
#pragma unroll 1
    for (int of = first; of < first + (1 << unit.row_warps_log2); ++of) {
      const int block = slot * kWarps + of;
      float s[4];
      scores(rows, k_ring + block * kBlockBytes, s);
      finish_scores(rows, block, first_key_of(tile, of), s);
      softmax(rows, s);
      if (alone) {
        __syncwarp();
        copy(c, 0);
        wait_copies<2 * kStages - 1>();
        __syncwarp();
      }
      values(rows, block, s);
    }
    return alone ? 1 : 0;
  }

  // ---- results --------------------------------------------------------------------------------

  /// Columns are twisted in pieces of 8, so that the rows of a thread's column meet other banks.
  __device__ static int exchange_place(int row, int column) {
    return row * kD + (column ^ row / 2 % 4 * 8);
  }

  /// Partial results meet in shared memory.
  __device__ void exchange(const DecodeUnit& unit, const Rows& rows) const {
    const int rows_here = rows_of(unit) - row_warp(unit) * kRows;  // of this warp
    float sum[2] = {rows.sum[0], rows.sum[1]};
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[e] += __shfl_xor_sync(~0u, sum[e], step);
      }
    }
    // Slot of a row: those of the warps of other keys follow those of other rows.
    const int first = warp * kRows;
    float* const o = exchange_o();
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = 2 * t + e;
      if (r < rows_here) {
        if (g == 0) {
          exchange_state()[first + r] = {rows.max[e], sum[e]};
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          o[exchange_place(first + r, column_of(i, 0))] = rows.o[i][e];
          o[exchange_place(first + r, column_of(i, 1))] = rows.o[i][2 + e];
        }
      }
    }
  }

  /// Weighted sums of results in their order, some at a time: a row of the result of all.
  struct Merged {
    float max = -INFINITY, sum = 0;
    float o[4] = {0, 0, 0, 0};
    template <int kCount>
    __device__ void add(const float2 (&state)[kCount], const float4 (&part)[kCount]) {
      float top = max;
#pragma unroll
      for (int s = 0; s < kCount; ++s) {
        top = fmaxf(top, state[s].x);
      }
      const float finite = top == -INFINITY ? 0.0f : top;
      const float mine = exp2_approx(max - finite);
      max = top;
      sum *= mine;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        o[e] *= mine;
      }
#pragma unroll
      for (int s = 0; s < kCount; ++s) {
        const float weight = exp2_approx(state[s].x - finite);
        sum += state[s].y * weight;
        o[0] += part[s].x * weight;
        o[1] += part[s].y * weight;
        o[2] += part[s].z * weight;
        o[3] += part[s].w * weight;
      }
    }
  };

  /// Slot of a part of the unit's head and row block.
  __device__ std::int64_t slot_of(const DecodeUnit& unit, int part) const {
    const std::int64_t group =
        (static_cast<std::int64_t>(unit.batch) * params.heads_kv + unit.head) * params.row_blocks +
        unit.row_block;
    return group * params.max_parts + part;
  }

  /// Four columns from d of row r, and its lse.
  __device__ void write_result(const DecodeUnit& unit, int r, int d, const Merged& m) const {
    const int row = unit.row_block * kTileRows + r;
    const int position = row / params.group;
    const int head = unit.head * params.group + row - position * params.group;
    const std::int64_t outer = params.cu_seqlens_q.data != nullptr ? 0 : unit.batch;
    const float scale = m.sum > 0 ? 1.0f / m.sum : (m.sum == m.sum ? 0.0f : m.sum);
    const std::int64_t at = outer * params.o_batch + (unit.row_q + position) * params.o_seqlen +
                            head * params.o_heads + d;
    const float value[4] = {m.o[0] * scale, m.o[1] * scale, m.o[2] * scale, m.o[3] * scale};
    if (params.o_is_f32) {
      auto* const o = static_cast<float*>(params.o) + at;
      if (params.o_in_fours) {
        *reinterpret_cast<float4*>(o) = make_float4(value[0], value[1], value[2], value[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (d + e < params.head_dim_v) {
            o[e] = value[e];
          }
        }
      }
    } else {
      const uint2 packed = {pack<kDType>(value[0], value[1]), pack<kDType>(value[2], value[3])};
      auto* const o = static_cast<std::uint16_t*>(params.o) + at;
      if (params.o_in_fours) {
        *reinterpret_cast<uint2*>(o) = packed;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (d + e < params.head_dim_v) {
            o[e] = static_cast<std::uint16_t>((e < 2 ? packed.x : packed.y) >> (e % 2 * 16));
          }
        }
      }
    }
    if (d == 0 && params.lse != nullptr) {
      constexpr float kLn2 = 0.69314718055994531f;
      params.lse[outer * params.lse_batch + head * params.lse_heads +
                 (unit.row_q + position) * params.lse_seqlen] =
          m.sum > 0 ? (m.max + __log2f(m.sum)) * kLn2 : (m.sum == m.sum ? -INFINITY : m.sum);
    }
  }

  /// Results of the same rows, `count` of them.
  struct Sources {
    const float2* state;
    const float* o;
    int count;
    std::int64_t state_step, o_step;  // from one to the next
  };

  /// Merges results in their order: those of the warps, or of the parts. What is final goes out.
  __device__ void merge(const DecodeUnit& unit, int rows_here, bool of_parts) const {
    const int columns = (params.head_dim_v + 3) / 4;
    const int rows_a_group = kRows << unit.row_warps_log2;  // of warps
    const std::int64_t slot = slot_of(unit, of_parts ? 0 : unit.part);
#pragma unroll 1
    for (int i = finisher(); i < rows_here * columns; i += kFinishers) {
      const int r = i / columns, d = 4 * (i - r * columns);
      const std::int64_t at = slot * params.partial_rows + r;
      float2* const partial_state = params.partial_state + at;
      float* const partial_o = params.partial_o + at * (4 * columns) + d;
      Sources from;
      if (of_parts) {
        from = {partial_state, partial_o, unit.parts, params.partial_rows,
                std::int64_t{params.partial_rows} * 4 * columns};
      } else {
        from = {exchange_state() + r, exchange_o() + exchange_place(r, d),
                kWarps >> unit.row_warps_log2, rows_a_group, rows_a_group * kD};
      }
      Merged merged;
      constexpr int kAtOnce = 8;  // loads in flight
#pragma unroll 1
      for (int first = 0; first < from.count; first += kAtOnce) {
        float2 state[kAtOnce];
        float4 part[kAtOnce];
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          const int source = min(first + s, from.count - 1);  // no branch between the loads
          state[s] = from.state[source * from.state_step];
          part[s] = *reinterpret_cast<const float4*>(from.o + source * from.o_step);
        }
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          if (first + s >= from.count) {
            state[s] = make_float2(-INFINITY, 0);  // weighs nothing
            part[s] = make_float4(0, 0, 0, 0);
          }
        }
        merged.add(state, part);
      }
      if (of_parts || unit.parts == 1) {
        write_result(unit, r, d, merged);
      } else {
        *reinterpret_cast<float4*>(partial_o) =
            make_float4(merged.o[0], merged.o[1], merged.o[2], merged.o[3]);
        if (d == 0) {
          *partial_state = make_float2(merged.max, merged.sum);
        }
      }
    }
  }

  /// Among the finishing threads.
  __device__ static int finisher() { return static_cast<int>(threadIdx.x) - 32 * kWarps; }

  /// Tells the other parts that this warp's share of this one is there; true for who must merge
  /// them: shares of the same warp of other CTAs are of the same rows and columns.
  __device__ bool arrive(const DecodeUnit& unit) const {
    constexpr int kEach = tiles::kDecodeFinishWarps;
    std::uint64_t* const arrived = params.arrived + slot_of(unit, 0) * kEach + warp - kWarps;
    __syncwarp();  // the share is written
    if (lane == 0) {
      asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(arrived + unit.part * kEach),
                   "l"(params.launch_id)
                   : "memory");
      // This word is out before the others are read: at least one part sees them all.
      asm volatile("fence.sc.gpu;" ::: "memory");
    }
    __syncwarp();
    bool all = true;
#pragma unroll 1
    for (int i = lane; i < unit.parts; i += 32) {
      std::uint64_t word;
      asm volatile("ld.acquire.gpu.u64 %0, [%1];"
                   : "=l"(word)
                   : "l"(arrived + i * kEach)
                   : "memory");
      all = all && word == params.launch_id;
    }
    if (!__all_sync(~0u, all)) {
      return false;
    }
    // Parts that end together all see it: the first to say so merges.
    unsigned long long before = 0;
    if (lane == 0) {
      before = atomicExch(reinterpret_cast<unsigned long long*>(claim_of(unit)), params.launch_id);
    }
    before = __shfl_sync(~0u, before, 0);
    __syncwarp();  // what one lane has acquired, all may read
    return before != params.launch_id;
  }

  __device__ std::uint64_t* claim_of(const DecodeUnit& unit) const {
    const std::int64_t group = slot_of(unit, 0) / params.max_parts;
    return params.claimed + group * tiles::kDecodeFinishWarps + warp - kWarps;
  }

  /// A graph runs again under the same id.
  __device__ void forget_arrivals(const DecodeUnit& unit) const {
    constexpr int kEach = tiles::kDecodeFinishWarps;
#pragma unroll 1
    for (int i = lane; i < unit.parts; i += 32) {
      params.arrived[slot_of(unit, i) * kEach + warp - kWarps] = 0;
    }
    if (lane == 0) {
      *claim_of(unit) = 0;
    }
  }

  /// Pages of the sequence that do not exist. One unit of a sequence counts.
  __device__ void count_bad_pages(const DecodeUnit& unit) const {
    if (params.bad_pages == nullptr || params.page_size == 0 || unit.part != 0 || unit.head != 0 ||
        unit.row_block != 0 || warp != kWarps) {
      return;
    }
    const int pages = (unit.seqlen_kv + params.page_size - 1) / params.page_size;
    int bad = 0;
#pragma unroll 1
    for (int i = lane; i < pages; i += 32) {
      const std::int64_t page =
          index_at(params.page_table, unit.batch * params.page_table_batch + i);
      bad += page < 0 || page >= params.num_pages;
    }
    bad = __reduce_add_sync(~0u, bad);
    if (lane == 0) {
      params.bad_pages[unit.batch] = bad;
    }
  }

  __device__ void release_unit(std::uint32_t count) const {
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(shared_address(&control.empty[count % kUnits]));
    }
  }

  /// The code of a step stands once, and so does that of a copy: instructions come from memory too.
  __device__ void attend() const {
    Cursor c;
    DecodeUnit unit;
    Rows rows;
    std::uint32_t count = 0;
    int tile = 0, slot = 0, query_slot = 0;
    int to_fill = kStages;  // of the ring, before the first step
    bool in_unit = false;
#pragma unroll 1
    while (true) {
      int copy_from = 0;
      if (to_fill > 0) {
        --to_fill;
      } else {
        wait_copies<2 * kStages - 1>();
        __syncwarp();
        if (!in_unit) {
          unit = control.units[count % kUnits];  // the copies waited for it
          if (unit.batch < 0) {
            named_barrier_sync(kTaken, kMeeting);  // pairs with the last arrival
            break;
          }
          start_rows(unit, query_slot, rows);
          query_slot = next_slot(query_slot);
          tile = unit.first_tile;
          in_unit = true;
        }
        if (tile < unit.end_tile) {
          copy_from = step(unit, rows, c, tile, slot);
        }
        slot = next_slot(slot);
        tile += unit.parts;
        if (tile >= unit.end_tile) {
          named_barrier_sync(kTaken, kMeeting);
          exchange(unit, rows);
          named_barrier_arrive(kWritten, kMeeting);
          release_unit(count);
          ++count;
          in_unit = false;
        }
        group_barrier(unit);
      }
#pragma unroll 1
      for (int which = copy_from; which < 2; ++which) {
        copy(c, which);
      }
    }
  }

  __device__ void finish() const {
    DecodeUnitFinder<kWidth, kRow> finder;
    std::uint32_t found = 0;
    bool more = warp == kWarps;  // one warp finds units for all
    named_barrier_arrive(kTaken, kMeeting);
#pragma unroll 1
    for (std::uint32_t count = 0;; ++count) {
#pragma unroll 1
      for (; more && found <= count + tiles::kDecodeUnitsAhead; ++found) {
        barrier_wait(shared_address(&control.empty[found % kUnits]), found / kUnits % 2 ^ 1);
        const DecodeUnit next =
            finder.find(params, static_cast<int>(blockIdx.x + found * gridDim.x));
        if (lane == 0) {
          control.units[found % kUnits] = next;
          barrier_arrive(shared_address(&control.full[found % kUnits]));
        }
        __syncwarp();
        more = next.batch >= 0;  // one that says there are no more is the last
      }
      barrier_wait(shared_address(&control.full[count % kUnits]), count / kUnits % 2);
      const DecodeUnit unit = control.units[count % kUnits];
      if (unit.batch < 0) {
        break;
      }
      release_unit(count);
      count_bad_pages(unit);
      named_barrier_sync(kWritten, kMeeting);
      // What the warps have, then, where this is the last part, what the parts have.
      bool of_parts = false;
#pragma unroll 1
      while (true) {
        merge(unit, rows_of(unit), of_parts);
        if (of_parts) {
          forget_arrivals(unit);
          break;
        }
        named_barrier_arrive(kTaken, kMeeting);
        of_parts = unit.parts > 1 && arrive(unit);
        if (!of_parts) {
          break;
        }
      }
    }
  }

  /// Query rows of the unit.
  __device__ int rows_of(const DecodeUnit& unit) const {
    return min(kTileRows, unit.seqlen_q * params.group - unit.row_block * kTileRows);
  }
};

template <DType kDType, int kWidth, int kRow>
__global__ void __launch_bounds__(tiles::kSm90DecodeRows[kWidth][kRow].threads(), 1)
    decode_sm90_kernel(const __grid_constant__ DecodeParams params, bool e4m3) {
  constexpr tiles::Sm90DecodeRow kShape = tiles::kSm90DecodeRows[kWidth][kRow];
  extern __shared__ unsigned char raw[];
  __shared__ DecodeControl control;
  if (threadIdx.x == 0) {
    for (int i = 0; i < tiles::kDecodeUnitRing; ++i) {
      barrier_init(shared_address(&control.full[i]), 1);
      barrier_init(shared_address(&control.empty[i]), kShape.warps + tiles::kDecodeFinishWarps);
    }
  }
  __syncthreads();
  constexpr std::uint32_t kAlign = tiles::Sm90DecodeRow::kAlign;
  const std::uint32_t start = shared_address(raw);
  const Decode<kDType, kWidth, kRow> decode(
      params, e4m3, raw + ((start + kAlign - 1) / kAlign * kAlign - start), control);
  if (decode.warp < kShape.warps) {
    decode.attend();
  } else {
    decode.finish();
  }
}

template <DType kDType, int kWidth, int kRow>
Status launch_decode_sm90(const DecodeParams& params, bool e4m3, unsigned blocks, void* stream) {
  constexpr tiles::Sm90DecodeRow kShape = tiles::kSm90DecodeRows[kWidth][kRow];
  void* arguments[] = {const_cast<DecodeParams*>(&params), &e4m3};
  return launch(reinterpret_cast<const void*>(&decode_sm90_kernel<kDType, kWidth, kRow>),
                {.blocks = blocks,
                 .threads = static_cast<unsigned>(kShape.threads()),
                 .shared_bytes = static_cast<unsigned>(kShape.shared_bytes()),
                 .stream = stream},
                arguments);
}

}  // namespace rafter::cuda
