// The warps of decode_sm90_columns that attend, all to the same tile and up to 8, 16, 32 or 64
// query rows:
//   scores   a warp has 16 keys: Sᵀ[keys, rows] = K Qᵀ, so that 8 rows fill an instruction
//   softmax  maxima of the warps meet in shared memory, so that all know the same; exp2, sums
//   values   a warp has its own columns: Oᵀ[columns, rows] += Vᵀ Pᵀ over all keys of the tile, the
//            probabilities of all warps from shared memory
// So K and V are read once however many rows there are, and what a warp has after its tiles is
// final.
#pragma once

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/mma.cuh"
#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/decode_sm90_columns_finish.cuh"
#include "kernels/cuda/decode_sm90_columns_operands.cuh"
#include "kernels/cuda/decode_sm90_units.cuh"

namespace rafter::cuda {

template <DType kDType, int kWidth, int kRow, int kBlocks>
struct DecodeColumnsAttend : DecodeColumnsOperands<kDType, kWidth, kRow> {
  using Shared = DecodeColumns<kWidth, kRow>;
  using Operands = DecodeColumnsOperands<kDType, kWidth, kRow>;
  using Operands::kBytes, Operands::kKeys, Operands::kPieces, Operands::kRows, Operands::kShape;
  using Operands::key_operands, Operands::own_queries, Operands::query_words;
  using Operands::kTwoProducts, Operands::kValues, Operands::value_operands;
  using Operands::lane, Operands::params, Operands::shared, Operands::warp;
  using Finish = DecodeColumnsFinish<kDType, kWidth, kRow>;
  static constexpr int kWarps = Shared::kWarps;
  static constexpr int kSteps = Shared::kD / 16, kHalf = kSteps / 2;  // of 16 columns
  static constexpr bool kHeld = kBlocks * kSteps <= 16;               // queries stay in registers
  static constexpr bool kMaximaHeld = kBlocks <= 2;                   // and so do running maxima
  static constexpr int kUnroll = kBlocks == 8 ? 1 : 4;  // beyond, more registers than there are
  static constexpr int kMeet = 1;                       // named barrier

  const int g = lane / 4, t = lane % 4;

  /// Of a unit. A thread has rows 2t and 2t + 1 of each block of 8, in its scores as in its columns
  /// of O.
  struct Rows {
    float o[kPieces][kBlocks][4];
    float max[kMaximaHeld ? kBlocks : 1][2];
    float sum[kBlocks];  // of row 2t in lanes of g < 4, else of row 2t + 1
  };
  struct Queries {
    std::uint32_t word[kHeld ? kBlocks : 1][kHeld ? kSteps : 1][2];  // of row g
  };
  using Scores = float[kBlocks][4];  // keys g and g + 8

  __device__ static void meet() { named_barrier_sync(kMeet, 32 * kWarps); }
  __device__ bool has_columns() const { return warp < kShape.value_warps(); }

  __device__ static std::uint32_t shared_word(std::uint32_t address) {
    std::uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
  }

  __device__ void hold(Queries& q, std::uint32_t queries) const {
    if constexpr (kHeld) {
      const std::uint32_t own = own_queries(queries);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kSteps; i += 2) {
          std::uint32_t word[4];
          query_words(own, b, i, word);
          q.word[b][i][0] = word[0];
          q.word[b][i][1] = word[1];
          q.word[b][i + 1][0] = word[2];
          q.word[b][i + 1][1] = word[3];
        }
      }
    }
  }

  /// No results yet.
  __device__ void empty_rows(Rows& rows) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
          rows.o[p][b][e] = 0;
        }
      }
      rows.sum[b] = 0;
      const float none[2] = {-INFINITY, -INFINITY};
      set_maxima(rows, b, none);
    }
  }

  // Running maxima of this thread's rows: in registers, or each warp's own in shared memory. What
  // is written there is read behind a meet().
  __device__ std::uint32_t kept_at(int block) const {
    return shared.kept(kBlocks) + ((block * kWarps + warp) * 4 + t) * 8;
  }
  __device__ void set_maxima(Rows& rows, int block, const float (&max)[2]) const {
    if constexpr (kMaximaHeld) {
      rows.max[block][0] = max[0];
      rows.max[block][1] = max[1];
    } else if (g == 0) {
      store_shared(kept_at(block), __float_as_uint(max[0]), __float_as_uint(max[1]));
    }
  }
  __device__ void get_maxima(const Rows& rows, int block, float (&max)[2]) const {
    if constexpr (kMaximaHeld) {
      max[0] = rows.max[block][0];
      max[1] = rows.max[block][1];
    } else {
      std::uint32_t word[2];
      load_shared(kept_at(block), word[0], word[1]);
      max[0] = __uint_as_float(word[0]);
      max[1] = __uint_as_float(word[1]);
    }
  }

  /// Sᵀ of this warp's keys in a slot, each half of the columns a chain of products.
  __device__ void scores(const Queries& q, std::uint32_t queries, std::uint32_t keys,
                         Scores& s) const {
    if constexpr (kHeld) {
      float other[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[b][e] = other[b][e] = 0;
        }
      }
#pragma unroll
      for (int i = 0; i < kHalf; i += 2) {
        std::uint32_t a[2][2][4];
        key_operands(keys, i, a[0]);
        key_operands(keys, kHalf + i, a[1]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            const auto& of = q.word[b];
            mma_16_8_16<kDType>(s[b], a[0][h], of[i + h][0], of[i + h][1]);
            mma_16_8_16<kDType>(other[b], a[1][h], of[kHalf + i + h][0], of[kHalf + i + h][1]);
          }
        }
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[b][e] += other[b][e];
        }
      }
    } else {
      const std::uint32_t own = own_queries(queries);
#pragma unroll kUnroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t a[kHalf / 2][2][4];
#pragma unroll
        for (int i = 0; i < kHalf; i += 2) {
          key_operands(keys, half * kHalf + i, a[i / 2]);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          float d[4] = {0, 0, 0, 0};
#pragma unroll
          for (int i = 0; i < kHalf; i += 2) {
            std::uint32_t word[4];
            query_words(own, b, half * kHalf + i, word);
            mma_16_8_16<kDType>(d, a[i / 2][0], word[0], word[1]);
            mma_16_8_16<kDType>(d, a[i / 2][1], word[2], word[3]);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            s[b][e] = half == 0 ? d[e] : s[b][e] + d[e];
          }
        }
      }
    }
  }

  /// Factor of this warp's key g + 8 h in a slot.
  __device__ float scale_of(int slot, int h) const {
    return __uint_as_float(shared_word(shared.scales(slot) + (warp * kKeys + g + 8 * h) * 4));
  }

  /// Scores of 16 keys from `first` on in a slot become log2 units, those of unseen keys −∞.
  __device__ void finish_scores(const DecodeUnit& unit, int slot, int first, Scores& s) const {
    float scale[2] = {1, 1};
    if constexpr (kBytes) {
      if (params.k.scale != nullptr) {
        scale[0] = scale_of(slot, 0);
        scale[1] = scale_of(slot, 1);
      }
    }
    if constexpr (kBytes) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[b][e] *= scale[e / 2];
        }
      }
    }
    if (params.transform_cap > 0) {  // tanh(x) = 1 − 2 / (e^2x + 1)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float power = exp2_approx(s[b][e] * params.transform_scale);
          s[b][e] = __fmul_rn(params.transform_cap, 1.0f - __fdividef(2.0f, power + 1.0f));
        }
      }
    } else {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[b][e] = __fmul_rn(s[b][e], params.scale_log2);
        }
      }
    }
    const std::uint32_t present =
        params.page_size > 0 ? shared_word(shared.present(slot) + warp * 4) : ~0u;
    if (first < unit.common_first || first + kKeys > unit.common_end || (~present & 0xffffu) != 0) {
      const std::uint32_t hidden = hidden_scores(unit, present, first);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[b][e] = (hidden >> (4 * b + e) & 1u) != 0 ? -INFINITY : s[b][e];
        }
      }
    }
  }

  /// Which of this thread's scores of keys from `first` on are not seen: four bits a block.
  __device__ std::uint32_t hidden_scores(const DecodeUnit& unit, std::uint32_t present,
                                         int first) const {
    const auto mask = mask_of(params, unit.seqlen_q, unit.seqlen_kv);
    const int tree_key = unit.seqlen_kv - unit.seqlen_q;
    const int first_row = unit.row_block * Shared::kTileRows + 2 * t;
    std::uint32_t hidden = 0;
#pragma unroll 1
    for (int i = 0; i < 2 * kBlocks; ++i) {  // block i / 2, row i % 2 of its two
      const int row = first_row + i / 2 * kRows + i % 2;
      const int position = unit.seqlen_q == 1 ? 0 : row / params.group;
      const auto keys = mask.row(position);
      std::uint64_t tree = ~std::uint64_t{0};
      if (params.tree_mask != nullptr && position < unit.seqlen_q) {
        tree = params.tree_mask[unit.batch * params.tree_mask_batch + position];
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = first + g + 8 * h;
        bool seen = key >= keys.first && key < keys.last && (present >> (g + 8 * h) & 1u) != 0;
        if (params.tree_mask != nullptr && key >= tree_key) {
          seen = seen && (tree >> (key - tree_key) & 1u) != 0;
        }
        hidden |= (seen ? 0u : 1u) << (i / 2 * 4 + 2 * h + i % 2);
      }
    }
    return hidden;
  }

  /// Where warp `of` puts its pair of numbers of this thread's rows of a block, and where those of
  /// two warps lie side by side.
  __device__ std::uint32_t exchanged(std::uint32_t where, int block, int of) const {
    return where + ((block * (kWarps / 2) + of / 2) * 4 + t) * 16 + of % 2 * 8;
  }
  __device__ void offer(std::uint32_t where, int block, const float (&pair)[2]) const {
    if (g == 0) {
      store_shared(exchanged(where, block, warp), __float_as_uint(pair[0]),
                   __float_as_uint(pair[1]));
    }
  }

  /// Largest scores of this warp's keys, for all; then meet().
  __device__ void offer_maxima(const Scores& s) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float top[2] = {fmaxf(s[b][0], s[b][2]), fmaxf(s[b][1], s[b][3])};
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {  // over the lanes of a row
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], step));
        }
      }
      offer(shared.maxima(kBlocks), b, top);
    }
  }
  /// Where the operands of 16 keys lie, those of two warps side by side.
  __device__ std::uint32_t weights_at(int product, int block, int of) const {
    return shared.weights() +
           (((product * kBlocks + block) * (kWarps / 2) + of / 2) * 32 + lane) * 16 + of % 2 * 8;
  }
  /// Pairs of probabilities become the operand of the next product.
  __device__ void store_weights(int product, int block, const float (&p)[4]) const {
    store_shared(weights_at(product, block, warp), transpose_matrix(pack<kValues>(p[0], p[1])),
                 transpose_matrix(pack<kValues>(p[2], p[3])));
  }

  // Products that sums follow are of __fmul_rn(), and sums of products of __fmaf_rn(): what the
  // compiler would contract differs from kernel to kernel, and bits may not.

  /// The running maximum of a block, the same in all warps; outputs follow. Gives the factor of
  /// this thread's sum.
  __device__ float raise(Rows& rows, int block, float (&top)[2]) const {
    float old[2];
    get_maxima(rows, block, old);
    top[0] = old[0];
    top[1] = old[1];
#pragma unroll
    for (int w = 0; w < kWarps; w += 2) {
      const float4 two = load_shared_four(exchanged(shared.maxima(kBlocks), block, w));
      top[0] = fmaxf(top[0], fmaxf(two.x, two.z));
      top[1] = fmaxf(top[1], fmaxf(two.y, two.w));
    }
    if constexpr (!kMaximaHeld) {
      __syncwarp();  // all have read what was there
    }
    set_maxima(rows, block, top);
    float factor[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      factor[e] = top[e] == -INFINITY ? 1.0f : exp2_approx(old[e] - top[e]);
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        rows.o[p][block][e] *= factor[e];
        rows.o[p][block][2 + e] *= factor[e];
      }
    }
    return lane >= 16 ? factor[1] : factor[0];
  }

  /// Probabilities of this warp's keys relative to the running maxima, for all; then meet().
  __device__ void weigh(Rows& rows, int v_slot, Scores& s) const {
    float scale[2] = {1, 1};
    if constexpr (kBytes) {
      if (params.v.scale != nullptr) {
        scale[0] = scale_of(v_slot, 0);
        scale[1] = scale_of(v_slot, 1);
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float top[2];
      const float factor = raise(rows, b, top);
      float(&p)[4] = s[b];
      float sum[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float finite = top[e] == -INFINITY ? 0.0f : top[e];
        p[e] = exp2_approx(p[e] - finite);
        p[2 + e] = exp2_approx(p[2 + e] - finite);
        sum[e] = p[e] + p[2 + e];
        if constexpr (kBytes) {
          p[e] = __fmul_rn(p[e], scale[0]);
          p[2 + e] = __fmul_rn(p[2 + e], scale[1]);
        }
      }
      const bool upper = lane >= 16;
      const float mine = upper ? sum[1] : sum[0];
      const float other = __shfl_xor_sync(~0u, upper ? sum[0] : sum[1], 16);
      rows.sum[b] = __fmaf_rn(rows.sum[b], factor, mine + other);
      store_weights(0, b, p);
      if constexpr (kTwoProducts) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          p[e] -= to_bf16_value(p[e]);
        }
        store_weights(1, b, p);
      }
    }
  }
  /// The value that pack<bf16> gives.
  __device__ static float to_bf16_value(float x) {
    return __uint_as_float(pack<DType::bf16>(0.0f, x) & 0xffff0000u);
  }

  /// Oᵀ += Vᵀ Pᵀ over all keys of a tile, of this warp's columns.
  __device__ void add_values(Rows& rows, std::uint32_t values) const {
#pragma unroll kUnroll
    for (int of = 0; of < kWarps; of += 2) {
      std::uint32_t a[kPieces][2][4];
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        value_operands(values, p, of, a[p]);
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int product = 0; product < (kTwoProducts ? 2 : 1); ++product) {
          std::uint32_t w[4];
          load_shared(weights_at(product, b, of), w);
#pragma unroll
          for (int p = 0; p < kPieces; ++p) {
            mma_16_8_16<kValues>(rows.o[p][b], a[p][0], w[0], w[1]);
            mma_16_8_16<kValues>(rows.o[p][b], a[p][1], w[2], w[3]);
          }
        }
      }
    }
  }

  /// Sums of this warp's keys, for all.
  __device__ void offer_sums(const Rows& rows) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float sum = rows.sum[b];
      sum += __shfl_xor_sync(~0u, sum, 4);
      sum += __shfl_xor_sync(~0u, sum, 8);
      if (g % 4 == 0) {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(exchanged(shared.sums(kBlocks), b, warp) + g),
                     "f"(sum)
                     : "memory");
      }
    }
    meet();
  }
  /// Maxima and, behind offer_sums(), sums over the keys of all warps.
  __device__ float4 state_of(const Rows& rows, int block) const {
    float max[2], sum[2] = {0, 0};
    get_maxima(rows, block, max);
#pragma unroll
    for (int w = 0; w < kWarps; w += 2) {
      const float4 two = load_shared_four(exchanged(shared.sums(kBlocks), block, w));
      sum[0] = (sum[0] + two.x) + two.z;
      sum[1] = (sum[1] + two.y) + two.w;
    }
    return make_float4(max[0], max[1], sum[0], sum[1]);
  }
  __device__ static float4 columns_of(const Rows& rows, int piece, int block) {
    const float(&o)[4] = rows.o[piece][block];
    return make_float4(o[0], o[1], o[2], o[3]);
  }

  /// Whether a warp has keys that no row of the sequence sees.
  __device__ static bool has_foreign(const DecodeUnit& unit, int first) {
    return first < unit.first_key || first + kKeys > unit.end_key;
  }
  /// Rows of V that no row of the sequence sees: 0 · NaN would be NaN.
  __device__ void clear_foreign(const DecodeUnit& unit, int slot, int first) const {
    shared.clear_foreign_rows(unit, slot, warp, first);
  }

  /// This warp is done with a slot, or with the queries of a unit.
  __device__ void release(std::uint32_t empty) const {
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(empty);
    }
  }

  /// One tile of all warps.
  __device__ void step(const DecodeUnit& unit, const Queries& q, std::uint32_t queries, Rows& rows,
                       typename Shared::Ring& ring, int tile) const {
    const int k_slot = ring.slot, first = tile * kShape.tile_keys() + warp * kKeys;
    barrier_wait(shared.full(k_slot), ring.turn);
    ring.next();
    const int v_slot = ring.slot;
    Scores s;
    scores(q, queries, shared.slot(k_slot), s);
    finish_scores(unit, k_slot, first, s);
    release(shared.empty(k_slot));
    offer_maxima(s);
    meet();
    const bool foreign = has_foreign(unit, first);
    if (foreign || (kBytes && params.v.scale != nullptr)) {
      barrier_wait(shared.full(v_slot), ring.turn);
    }
    if (foreign) {
      clear_foreign(unit, v_slot, first);
    }
    weigh(rows, v_slot, s);
    meet();
    if (has_columns()) {
      barrier_wait(shared.full(v_slot), ring.turn);
      add_values(rows, shared.slot(v_slot));
    }
    release(shared.empty(v_slot));
    ring.next();
  }

  /// A part is complete.
  __device__ void finish_part(const DecodeUnit& unit, Rows& rows) const {
    meet();  // sums of a unit without tiles may follow at once
    offer_sums(rows);
    if (!has_columns()) {
      return;
    }
    const Finish finish{params, shared};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float4 columns[kPieces];
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        columns[p] = columns_of(rows, p, b);
      }
      int block = b;
      asm volatile("" : "+r"(block));  // else addresses of all blocks stay in registers
      const float4 state = state_of(rows, b);
      finish.add_part(unit, block, state, columns);
    }
    if (unit.ends && !unit.leads) {
      release(shared_address(&shared.control.left));
    } else if (unit.ends) {
      finish.finish_head(unit);
    }
  }

  __device__ void run() const {
    typename Shared::Ring ring;
#pragma unroll 1
    for (std::uint32_t count = 0;; ++count) {
      const DecodeUnit unit = shared.control.take(count);
      if (unit.batch < 0) {
        break;
      }
      constexpr int kBuffers = tiles::kDecodeQueryBuffers;
      const int buffer = static_cast<int>(count % kBuffers);
      const std::uint32_t queries = shared.queries(kBlocks, buffer);
      const std::uint32_t used = shared_address(&shared.control.query_empty[buffer]);
      Queries q;
      Rows rows;
      empty_rows(rows);
      barrier_wait(shared_address(&shared.control.query_full[buffer]), count / kBuffers % 2);
      hold(q, queries);
      if (kHeld) {
        release(used);
      }
      // What is read again need not stay in registers meanwhile.
      const DecodeUnit& again = shared.control.units[count % tiles::kDecodeUnitRing];
#pragma unroll 1
      for (int tile = unit.first_tile; tile < again.end_tile; tile += again.parts) {
        step(again, q, queries, rows, ring, tile);
      }
      if (!kHeld) {
        release(used);
      }
      finish_part(again, rows);
      shared.control.release(count);
    }
  }
};

}  // namespace rafter::cuda
