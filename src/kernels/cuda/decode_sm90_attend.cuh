// The warps of decode_sm90 that attend: each takes 16 keys of a tile and 8 query rows (beyond 8,
// 16, 32 rows, 2, 4, 8 warps take the same keys and other rows).
//   scores   Sᵀ[keys, rows] = K Qᵀ, so that 8 rows fill an instruction
//   softmax  maximum over the lanes of a row, exp2, sum
//   values   Oᵀ[D, rows] += Vᵀ Pᵀ
// What a warp has after its tiles meets that of the others in shared memory.
#pragma once

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/mma.cuh"
#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/decode_sm90_units.cuh"

namespace rafter::cuda {

template <DType kDType, int kRow>
struct DecodeAttend {
  using Shared = DecodeShared<kRow>;
  static constexpr tiles::Sm90DecodeRow kShape = Shared::kShape;
  static constexpr int kSteps = Shared::kD / 16;  // of 16 columns
  static constexpr int kKeys = tiles::kDecodeBlockKeys, kRows = tiles::kDecodeBlockRows;

  const DecodeParams& params;
  const Shared shared;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int g = lane / 4, t = lane % 4;

  /// Among the warps of its keys.
  __device__ int row_warp(const DecodeUnit& unit) const {
    return warp & ((1 << unit.row_warps_log2) - 1);
  }

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
    return unit.row_block * Shared::kTileRows + row_warp(unit) * kRows + i;
  }

  __device__ static std::uint32_t shared_word(std::uint32_t address) {
    std::uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
  }

  __device__ static void store_shared(std::uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
  }

  /// Row g of the queries in words of two columns; zeros where there is none.
  __device__ void read_queries(const DecodeUnit& unit, typename Shared::Ring& ring,
                               Rows& rows) const {
    const int local = row_warp(unit) * kRows + g;
    const bool there = local < Shared::rows_of(params, unit);
    const int bytes = there ? params.q.row_bytes : 0;
    if (params.q.aligned) {
      barrier_wait(shared.full(ring.slot), ring.turn);
      const std::uint32_t from = shared.slot(ring.slot) + local * kShape.query_pitch();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int byte = query_byte(i, h);
          rows.q[i][h] = byte < bytes ? shared_word(from + byte) : 0u;
        }
      }
      release(ring.slot);
      ring.next();
      return;
    }
    const int position = row_of(unit, g) / params.group;
    const std::int64_t outer = params.cu_seqlens_q.data != nullptr ? 0 : unit.batch;
    const unsigned char* const source =
        params.q.data + outer * params.q.stride_batch +
        (unit.row_q + position) * params.q.stride_seqlen +
        (unit.head * params.group + row_of(unit, g) - position * params.group) *
            params.q.stride_heads;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        std::uint32_t word = 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int byte = query_byte(i, h) + 2 * e;
          if (byte < bytes) {
            word |= std::uint32_t{*reinterpret_cast<const std::uint16_t*>(source + byte)}
                    << (16 * e);
          }
        }
        rows.q[i][h] = word;
      }
    }
  }

  /// First byte of word h of step i in a row.
  __device__ int query_byte(int i, int h) const { return 32 * i + 16 * h + 4 * t; }

  /// No results yet.
  __device__ static void empty_rows(Rows& rows) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rows.o[i][e] = 0;
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      rows.max[e] = -INFINITY;
      rows.sum[e] = 0;
    }
  }
  /// What the rows of a unit see.
  __device__ void set_masks(const DecodeUnit& unit, Rows& rows) const {
    const int count = unit.seqlen_q * params.group;
    const auto mask = mask_of(params, unit.seqlen_q, unit.seqlen_kv);
    rows.tree_key = unit.seqlen_kv - unit.seqlen_q;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = row_of(unit, 2 * t + e);
      const auto keys = mask.row(r / params.group);
      rows.first[e] = r < count ? keys.first : 0;
      rows.last[e] = r < count ? keys.last : 0;
      rows.tree[e] = ~std::uint64_t{0};
      if (params.tree_mask != nullptr && r < count) {
        rows.tree[e] = params.tree_mask[unit.batch * params.tree_mask_batch + r / params.group];
      }
    }
  }

  /// Sᵀ of 16 keys and 8 rows.
  __device__ void scores(const Rows& rows, std::uint32_t keys, int of, float (&s)[4]) const {
    s[0] = s[1] = s[2] = s[3] = 0;
    float odd[4] = {0, 0, 0, 0};  // two chains of products
    const int r = of * kKeys + lane % 8 + lane / 8 % 2 * 8;
    const int column = lane / 16;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      std::uint32_t a[4];
      load_matrices(a, keys + Shared::place(r, 2 * i + column));
      mma_16_8_16<kDType>(i % 2 == 0 ? s : odd, a, rows.q[i][0], rows.q[i][1]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[e] += odd[e];
    }
  }

  /// Oᵀ += Vᵀ Pᵀ over 16 keys.
  __device__ void add_values(Rows& rows, std::uint32_t keys, int of, std::uint32_t p0,
                             std::uint32_t p1) const {
    const int r = of * kKeys + lane % 8 + lane / 16 * 8;
    const int column = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      std::uint32_t a[4];
      load_matrices_transposed(a, keys + Shared::place(r, 2 * i + column));
      mma_16_8_16<kDType>(rows.o[i], a, p0, p1);
    }
  }

  /// Column of O of accumulator half `h` of step `i`.
  __device__ int column_of(int i, int h) const { return 16 * i + g + 8 * h; }

  static constexpr std::uint32_t kAllPresent = (1u << kKeys) - 1;

  /// Scores of 16 keys from `first` on, of which those of `present` are there, masked and in log2
  /// units. Where every row sees all of them they have only to be scaled.
  __device__ void finish_scores(const DecodeUnit& unit, const Rows& rows, std::uint32_t present,
                                int first, float (&s)[4]) const {
    if (first >= unit.common_first && first + kKeys <= unit.common_end &&
        params.transform_cap == 0 && present == kAllPresent) {
#pragma unroll
      for (float& score : s) {
        score *= params.scale_log2;
      }
    } else {
      hide_scores(rows, present, first, s);
    }
  }
  __device__ void hide_scores(const Rows& rows, std::uint32_t present, int first,
                              float (&s)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first + g + 8 * h;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = s[2 * h + e];
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
    p0 = transpose_matrix(pack<kDType>(p[0], p[1]));
    p1 = transpose_matrix(pack<kDType>(p[2], p[3]));
  }

  __device__ void values(Rows& rows, int slot, int of, float (&p)[4]) const {
    const std::uint32_t keys = shared.slot(slot);
    std::uint32_t p0, p1;
    operand(p, p0, p1);
    add_values(rows, keys, of, p0, p1);
  }

  /// Partial results meet in shared memory.
  __device__ void exchange(const DecodeUnit& unit, const Rows& rows) const {
    const int rows_here = Shared::rows_of(params, unit) - row_warp(unit) * kRows;  // of this warp
    float sum[2] = {rows.sum[0], rows.sum[1]};
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[e] += __shfl_xor_sync(~0u, sum[e], step);
      }
    }
    // Slot of a row: those of the warps of other keys follow those of other rows. Columns of steps
    // that are twisted alike lie at distances that instructions have room for.
    const int first = warp * kRows + 2 * t;
    std::uint32_t to[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        to[i][h] =
            shared_address(shared.exchange_o() + Shared::exchange_place(first, column_of(i, h)) -
                           column_of(i, 0) + g);
        // Else all places are computed, before the loop over units: too many to keep.
        asm volatile("" : "+r"(to[i][h]));
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (2 * t + e < rows_here) {
        if (g == 0) {
          shared.exchange_state()[first + e] = {rows.max[e], sum[e]};
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            store_shared(to[i % 2][h] + (e * Shared::kD + 16 * i) * 4, rows.o[i][2 * h + e]);
          }
        }
      }
    }
  }

  /// Rows of V that no row of the sequence sees: 0 · NaN would be NaN.
  __device__ void clear_foreign(const DecodeUnit& unit, int slot, int of, int first) const {
    if (first >= unit.first_key && first + kKeys <= unit.end_key) {
      return;
    }
    shared.clear_foreign_rows(unit, slot, of, first);
  }

  /// This warp has read a slot.
  __device__ void release(int slot) const {
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(shared.empty(slot));
    }
  }

  /// One tile: the blocks of 16 keys of the warps of the group, which all of them take.
  __device__ void step(const DecodeUnit& unit, Rows& rows, typename Shared::Ring& ring,
                       int tile) const {
    const int k_slot = ring.slot;
    barrier_wait(shared.full(k_slot), ring.turn);
    ring.next();
    const int v_slot = ring.slot;
    const int first = warp - row_warp(unit), end = first + (1 << unit.row_warps_log2);
#pragma unroll 1
    for (int of = first; of < end; ++of) {
      const int first_key = tile * kShape.tile_keys() + of * kKeys;
      float s[4];
      scores(rows, shared.slot(k_slot), of, s);
      const std::uint32_t present = params.page_size > 0
                                        ? shared_word(shared.present(k_slot) + of * 4) & kAllPresent
                                        : kAllPresent;
      finish_scores(unit, rows, present, first_key, s);
      if (of + 1 == end) {
        release(k_slot);
      }
      softmax(rows, s);
      if (of == first) {
        barrier_wait(shared.full(v_slot), ring.turn);
      }
      clear_foreign(unit, v_slot, of, first_key);
      values(rows, v_slot, of, s);
    }
    release(v_slot);
    ring.next();
  }

  __device__ void run() const {
    typename Shared::Ring ring;
    Rows rows;
#pragma unroll 1
    for (std::uint32_t count = 0;; ++count) {
      const DecodeUnit unit = shared.control.take(count);
      if (unit.batch < 0) {
        break;
      }
      // What is read again need not stay in registers meanwhile.
      const DecodeUnit& again = shared.control.units[count % tiles::kDecodeUnitRing];
      if (!unit.follows) {  // else they are here
        read_queries(unit, ring, rows);
        set_masks(unit, rows);
      }
      empty_rows(rows);
#pragma unroll 1
      for (int tile = unit.first_tile; tile < again.end_tile; tile += again.parts) {
        step(unit, rows, ring, tile);
      }
      hand_over(again, rows, count);
      shared.control.release(count);
    }
  }

  /// Leaves this warp's results of unit or part `count` to those that finish, once they have taken
  /// the ones before; the eight do not wait for each other.
  __device__ void hand_over(const DecodeUnit& unit, const Rows& rows, std::uint32_t count) const {
    if (count > 0) {
      barrier_wait(shared_address(&shared.control.taken), (count - 1) % 2);
    }
    exchange(unit, rows);
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(shared_address(&shared.control.written));
    }
  }
};

}  // namespace rafter::cuda
