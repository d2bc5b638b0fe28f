// What decode_sm90_columns does with the parts of a head: they are merged one after the other, from
// part 0 on, in the same operations wherever they come from. Each warp that has columns of O does
// so for these. The units of a CTA follow each other: the CTA that has part 0 keeps what follows
// from its parts in shared memory; parts beyond it are in the first units of the CTAs before it,
// which leave them in the workspace and announce them. Arrival is a word per part and warp, equal
// to the id of the launch: the workspace needs no preparation. One warp of its own announces, and
// finds the units.
#pragma once

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/decode_sm90_units.cuh"

namespace rafter::cuda {

template <DType kDType, int kWidth, int kRow>
struct DecodeColumnsFinish {
  using Shared = DecodeColumns<kWidth, kRow>;
  static constexpr tiles::Sm90DecodeRow kShape = Shared::kShape;
  static constexpr int kPieces = kShape.pieces(), kValueWarps = kShape.value_warps();

  const DecodeParams& params;
  const Shared shared;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int g = lane / 4, t = lane % 4;

  /// Two rows of the result of all: their (maxima, sums), and what joins more columns to theirs. A
  /// thread has columns of both rows in turn.
  struct Merged {
    float4 state = {-INFINITY, -INFINITY, 0, 0};  // sums relative to 2^maximum
    float mine[2] = {0, 0}, other[2] = {0, 0};

    __device__ void join(float4 of) {
      join(state.x, state.z, of.x, of.z, 0);
      join(state.y, state.w, of.y, of.w, 1);
    }
    __device__ float4 columns(float4 o, float4 part) const {
      return make_float4(__fmaf_rn(part.x, other[0], __fmul_rn(o.x, mine[0])),
                         __fmaf_rn(part.y, other[1], __fmul_rn(o.y, mine[1])),
                         __fmaf_rn(part.z, other[0], __fmul_rn(o.z, mine[0])),
                         __fmaf_rn(part.w, other[1], __fmul_rn(o.w, mine[1])));
    }

   private:
    __device__ void join(float& max, float& sum, float of_max, float of_sum, int row) {
      const float top = fmaxf(of_max, max);
      const float finite = top == -INFINITY ? 0.0f : top;
      mine[row] = exp2_approx(max - finite);
      other[row] = exp2_approx(of_max - finite);
      max = top;
      sum = __fmaf_rn(of_sum, other[row], __fmul_rn(sum, mine[row]));
    }
  };

  /// This thread's columns of rows 2t and 2t + 1 of a block, of piece `columns` of 16, and lse.
  __device__ void write_result(const DecodeUnit& unit, int block, int columns, float4 state,
                               float4 o) const {
    const int rows = Shared::rows_of(params, unit);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = block * tiles::kDecodeBlockRows + 2 * t + e;
      if (r >= rows) {
        break;
      }
      const int row = unit.row_block * Shared::kTileRows + r;
      const int position = row / params.group;
      const int head = unit.head * params.group + row - position * params.group;
      const std::int64_t outer = params.cu_seqlens_q.data != nullptr ? 0 : unit.batch;
      const float max = e == 0 ? state.x : state.y, sum = e == 0 ? state.z : state.w;
      const float scale = sum > 0 ? 1.0f / sum : (sum == sum ? 0.0f : sum);
      const std::int64_t at = outer * params.o_batch + (unit.row_q + position) * params.o_seqlen +
                              head * params.o_heads;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = tiles::kDecodeColumns * columns + (kWidth == 1 ? 2 * g + h : g + 8 * h);
        const float value = (h == 0 ? (e == 0 ? o.x : o.y) : (e == 0 ? o.z : o.w)) * scale;
        if (column < params.head_dim_v) {
          if (params.o_is_f32) {
            static_cast<float*>(params.o)[at + column] = value;
          } else {
            static_cast<std::uint16_t*>(params.o)[at + column] =
                static_cast<std::uint16_t>(pack<kDType>(value, 0.0f) & 0xffffu);
          }
        }
      }
      if (columns == 0 && g == 0 && params.lse != nullptr) {
        constexpr float kLn2 = 0.69314718055994531f;
        params.lse[outer * params.lse_batch + head * params.lse_heads +
                   (unit.row_q + position) * params.lse_seqlen] =
            sum > 0 ? (max + __log2f(sum)) * kLn2 : (sum == sum ? -INFINITY : sum);
      }
    }
  }

  __device__ float4* partial_state(const DecodeUnit& unit, int part, int block) const {
    return params.partial_states + (decode_slot(params, unit, part) * params.blocks + block) * 4 +
           t;
  }
  __device__ float4* partial_o(const DecodeUnit& unit, int part, int block, int piece) const {
    return params.partial_columns +
           ((decode_slot(params, unit, part) * params.blocks + block) * (kValueWarps * kPieces) +
            warp * kPieces + piece) *
               32 +
           lane;
  }
  /// What follows from the parts so far, of this warp's rows and columns.
  __device__ float4* so_far_state(int block) const {
    return shared.so_far_state(params.blocks) + (block * kValueWarps + warp) * 4 + t;
  }
  __device__ float4* so_far_o(int block, int piece) const {
    return shared.so_far_o(params.blocks) + ((block * kValueWarps + warp) * kPieces + piece) * 32 +
           lane;
  }

  /// Takes what this warp has of a part: merged with the parts before where this CTA has them, to
  /// the workspace where another CTA has the first.
  __device__ void add_part(const DecodeUnit& unit, int block, float4 state,
                           const float4 (&columns)[kPieces]) const {
    if (!unit.leads) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        *partial_o(unit, unit.part, block, p) = columns[p];
      }
      if (warp == 0 && g == 0) {
        *partial_state(unit, unit.part, block) = state;
      }
      return;
    }
    Merged merged;
    if (unit.part > 0) {
      merged.state = *so_far_state(block);
    }
    merged.join(state);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      float4 o = make_float4(0, 0, 0, 0);
      if (unit.part > 0) {
        o = *so_far_o(block, p);
      }
      *so_far_o(block, p) = merged.columns(o, columns[p]);
    }
    __syncwarp();  // all have read what was there
    if (g == 0) {
      *so_far_state(block) = merged.state;
    }
    __syncwarp();
  }

  /// Waits for parts from `first` on, one a lane, at most 32.
  __device__ void await(const DecodeUnit& unit, int first) const {
    if (first + lane < unit.parts) {
      await_part(params.arrived + decode_slot(params, unit, first + lane) * kValueWarps + warp,
                 params.launch_id);
    }
    __syncwarp();  // what one lane has acquired, all may read
  }

  /// Waits for the parts behind `unit`, if any, merges them, in their order, some at a time, and
  /// writes the result out.
  __device__ void finish_head(const DecodeUnit& unit) const {
    constexpr int kAtOnce = 6;  // parts whose loads are in flight
    const std::int64_t o_step = std::int64_t{params.blocks} * kValueWarps * kPieces * 32;
    const std::int64_t state_step = std::int64_t{params.blocks} * 4;
#pragma unroll 1
    for (int first = unit.part + 1; first < unit.parts; first += 32) {
      await(unit, first);
    }
    const int blocks =
        (Shared::rows_of(params, unit) + tiles::kDecodeBlockRows - 1) / tiles::kDecodeBlockRows;
#pragma unroll 1
    for (int i = 0; i < blocks * kPieces; ++i) {
      const int block = i / kPieces, piece = i % kPieces;
      Merged merged;
      merged.state = *so_far_state(block);
      float4 o = *so_far_o(block, piece);
#pragma unroll 1
      for (int first = unit.part + 1; first < unit.parts; first += kAtOnce) {
        float4 state[kAtOnce], columns[kAtOnce];
        const float4* const state_from = partial_state(unit, first, block);
        const float4* const from = partial_o(unit, first, block, piece);
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          const int part = min(s, unit.parts - 1 - first);
          state[s] = load_four(state_from + part * state_step);
          columns[s] = load_four(from + part * o_step);
        }
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          if (first + s < unit.parts) {
            merged.join(state[s]);
            o = merged.columns(o, columns[s]);
          }
        }
      }
      write_result(unit, block, warp * kPieces + piece, merged.state, o);
    }
  }
};

/// The warp that finds units for all and announces parts.
template <int kWidth, int kRow>
struct DecodeFind {
  const DecodeParams& params;
  DecodeControl& control;
  const int lane = static_cast<int>(threadIdx.x % 32);

  /// `finder` has begun.
  __device__ void run(DecodeUnitFinder<kWidth, kRow>& finder) const {
    std::uint32_t found = 0;  // units
    bool finds = true;
#pragma unroll 1
    for (std::uint32_t count = 0;; ++count) {
#pragma unroll 1
      for (; finds && found <= count + tiles::kDecodeUnitsAhead; ++found) {
        finds = publish_unit(params, control, finder, found);
      }
      const DecodeUnit unit = control.take(count);
      if (unit.batch < 0) {
        break;
      }
      control.release(count);
      count_bad_pages(params, unit);
      if (unit.ends && !unit.leads) {
        announce(unit, static_cast<int>(count) + 1);
      }
    }
  }

 private:
  /// Announces the parts up to that of `unit` that this CTA has, all its units so far, once the
  /// other warps have written them.
  __device__ void announce(const DecodeUnit& unit, int units) const {
    constexpr int kWords = tiles::kSm90DecodeRows[kWidth][kRow].value_warps();  // of a part
    barrier_wait(shared_address(&control.left), 0);
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    std::uint64_t* const words =
        params.arrived + decode_slot(params, unit, unit.part + 1 - units) * kWords;
#pragma unroll 1
    for (int i = lane; i < units * kWords; i += 32) {
      asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(words + i), "l"(params.launch_id)
                   : "memory");
    }
  }
};

}  // namespace rafter::cuda
