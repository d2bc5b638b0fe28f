// Four warps of decode_sm90 finish what the others leave in shared memory: the results of the warps
// of a unit are merged, and the parts of a head one after the other, from part 0 on. The units of a
// CTA follow each other: the CTA that has part 0 keeps what follows from its parts in shared
// memory; parts beyond it are in the first units of the CTAs before it, which leave them in the
// workspace and announce them. Arrival is a word per part and finishing warp, equal to the id of
// the launch: the workspace needs no preparation. One of the warps finds the units.
#pragma once

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/decode_sm90_units.cuh"

namespace rafter::cuda {

template <DType kDType, int kRow>
struct DecodeFinish {
  using Shared = DecodeShared<kRow>;

  const DecodeParams& params;
  const Shared shared;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);

  /// A row of the result of all, four columns of a lane: sums relative to 2^max.
  struct Merged {
    float max = -INFINITY, sum = 0;
    float o[4] = {0, 0, 0, 0};

    /// The result of more keys, sums relative to 2^`of`.max. One order of operations wherever the
    /// parts of a head come from.
    __device__ void join(float2 of, float4 part) {
      const float top = fmaxf(of.x, max);
      const float finite = top == -INFINITY ? 0.0f : top;
      const float mine = exp2_approx(max - finite), other = exp2_approx(of.x - finite);
      max = top;
      sum = __fmaf_rn(of.y, other, __fmul_rn(sum, mine));
      o[0] = __fmaf_rn(part.x, other, __fmul_rn(o[0], mine));
      o[1] = __fmaf_rn(part.y, other, __fmul_rn(o[1], mine));
      o[2] = __fmaf_rn(part.z, other, __fmul_rn(o[2], mine));
      o[3] = __fmaf_rn(part.w, other, __fmul_rn(o[3], mine));
    }
    __device__ float4 columns() const { return make_float4(o[0], o[1], o[2], o[3]); }
  };

  __device__ std::int64_t slot_of(const DecodeUnit& unit, int part) const {
    return decode_slot(params, unit, part);
  }

  /// Four columns from d of row r, and its lse; nothing if that is a rehearsal.
  __device__ void write_result(const DecodeUnit& unit, int r, int d, const Merged& m,
                               bool real = true) const {
    const int row = unit.row_block * Shared::kTileRows + r;
    const int position = row / params.group;
    const int head = unit.head * params.group + row - position * params.group;
    const std::int64_t outer = params.cu_seqlens_q.data != nullptr ? 0 : unit.batch;
    const float scale = m.sum > 0 ? 1.0f / m.sum : (m.sum == m.sum ? 0.0f : m.sum);
    const std::int64_t at = outer * params.o_batch + (unit.row_q + position) * params.o_seqlen +
                            head * params.o_heads + d;
    float value[4] = {m.o[0] * scale, m.o[1] * scale, m.o[2] * scale, m.o[3] * scale};
    // Else nothing of it would be done in a rehearsal.
    asm volatile("" : "+f"(value[0]), "+f"(value[1]), "+f"(value[2]), "+f"(value[3]));
    if (!real) {
      return;
    }
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

  /// Groups of four columns of a row of the result.
  __device__ int columns() const { return (params.head_dim_v + 3) / 4; }
  __device__ float2* partial_state(const DecodeUnit& unit, int part, int r) const {
    return params.partial_state + slot_of(unit, part) * params.partial_rows + r;
  }
  __device__ float* partial_o(const DecodeUnit& unit, int part, int r) const {
    return params.partial_o +
           (slot_of(unit, part) * params.partial_rows + r) * std::int64_t{4 * columns()};
  }

  /// What follows from the parts so far: four columns from d of row r.
  __device__ float4* so_far(int r, int d) const {
    return reinterpret_cast<float4*>(shared.so_far_o() + r * Shared::kD + d);
  }
  __device__ Merged read_so_far(int r, int d) const {
    const float2 state = shared.so_far_state(params.partial_rows)[r];
    const float4 o = *so_far(r, d);
    return {state.x, state.y, {o.x, o.y, o.z, o.w}};
  }

  /// What eight warps with other keys each have of row r: four columns from d; (maximum, sum).
  __device__ float4 of_warps(int r, int d, float2& of) const {
    float2 state[Shared::kWarps];
    float4 part[Shared::kWarps];
    float top = -INFINITY;
#pragma unroll
    for (int s = 0; s < Shared::kWarps; ++s) {
      const int from = s * tiles::kDecodeBlockRows + r;
      state[s] = shared.exchange_state()[from];
      part[s] =
          *reinterpret_cast<const float4*>(shared.exchange_o() + Shared::exchange_place(from, d));
      top = fmaxf(top, state[s].x);
    }
    const float finite = top == -INFINITY ? 0.0f : top;
    float sum = 0;
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int s = 0; s < Shared::kWarps; ++s) {
      const float weight = exp2_approx(state[s].x - finite);
      sum += state[s].y * weight;
      o.x += part[s].x * weight;
      o.y += part[s].y * weight;
      o.z += part[s].z * weight;
      o.w += part[s].w * weight;
    }
    of = make_float2(top, sum);
    return o;
  }

  /// Merges what the warps have of the rows of this warp, and that with the parts before where this
  /// CTA has them. What is final goes out, parts whose first another CTA has to the workspace.
  __device__ void merge_warps(const DecodeUnit& unit) const {
    const int rows = Shared::rows_of(params, unit);
    const int sources = Shared::kWarps >> unit.row_warps_log2;
    const int step = tiles::kDecodeBlockRows << unit.row_warps_log2;  // rows from one to the next
#pragma unroll 1
    for (int r = finisher(); r < rows; r += tiles::kDecodeFinishWarps) {
      float2 state[Shared::kWarps];
      float top = -INFINITY;
#pragma unroll
      for (int s = 0; s < Shared::kWarps; ++s) {  // no branch between the loads
        state[s] = shared.exchange_state()[r + min(s, sources - 1) * step];
        top = fmaxf(top, state[s].x);
      }
      const float finite = top == -INFINITY ? 0.0f : top;
      float sum = 0;
      float2 so_far_state = make_float2(-INFINITY, 0);
#pragma unroll 1
      for (int c = lane; c < columns(); c += 32) {
        const int d = 4 * c;
        float4 part[Shared::kWarps];
#pragma unroll
        for (int s = 0; s < Shared::kWarps; ++s) {
          part[s] = *reinterpret_cast<const float4*>(
              shared.exchange_o() + Shared::exchange_place(r + min(s, sources - 1) * step, d));
        }
        float4 o = make_float4(0, 0, 0, 0);
        sum = 0;
#pragma unroll
        for (int s = 0; s < Shared::kWarps; ++s) {
          if (s < sources) {
            const float weight = exp2_approx(state[s].x - finite);
            sum += state[s].y * weight;
            o.x += part[s].x * weight;
            o.y += part[s].y * weight;
            o.z += part[s].z * weight;
            o.w += part[s].w * weight;
          }
        }
        if (!unit.leads) {
          *reinterpret_cast<float4*>(partial_o(unit, unit.part, r) + d) = o;
          if (c == 0) {
            *partial_state(unit, unit.part, r) = make_float2(top, sum);
          }
          continue;
        }
        Merged merged;
        if (unit.part > 0) {
          merged = read_so_far(r, d);
        }
        merged.join(make_float2(top, sum), o);
        if (unit.part + 1 == unit.parts) {
          write_result(unit, r, d, merged);
        } else {
          *so_far(r, d) = merged.columns();
          so_far_state = make_float2(merged.max, merged.sum);
        }
      }
      __syncwarp();
      if (lane == 0 && unit.leads) {
        shared.so_far_state(params.partial_rows)[r] =
            so_far_state;  // of no use after the last part
      }
    }
    __syncwarp();
  }

  /// Among the finishing warps.
  __device__ int finisher() const { return warp - Shared::kWarps; }

  // Arrival. A warp's rows are the same in all parts, so that warps of different CTAs arrive for
  // themselves.

  __device__ std::uint64_t* arrived(const DecodeUnit& unit, int part) const {
    return params.arrived + slot_of(unit, part) * tiles::kDecodeFinishWarps + finisher();
  }

  /// Announces the parts up to that of `unit` that this CTA has, of which this warp's rows are
  /// written: all its units so far.
  __device__ void announce(const DecodeUnit& unit, int units) const {
    __syncwarp();
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#pragma unroll 1
    for (int part = unit.part - lane; part > unit.part - units; part -= 32) {
      asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(arrived(unit, part)), "l"(params.launch_id)
                   : "memory");
    }
  }

  /// Waits for parts from `first` on, one a lane, at most 32.
  __device__ void await(const DecodeUnit& unit, int first) const {
    if (first + lane < unit.parts) {
      await_part(arrived(unit, first + lane), params.launch_id);
    }
    __syncwarp();  // what one lane has acquired, all may read
  }

  /// Waits for the parts behind `unit` and merges them, in their order, some at a time.
  __device__ void finish_parts(const DecodeUnit& unit) const {
    constexpr int kGroup = 32, kAtOnce = 8;  // parts; loads in flight
    const int rows = Shared::rows_of(params, unit);
    const std::int64_t step = std::int64_t{params.partial_rows} * 4 * columns();
#pragma unroll 1
    for (int group = unit.part + 1; group < unit.parts; group += kGroup) {
      await(unit, group);
    }
#pragma unroll 1
    for (int r = finisher(); r < rows; r += tiles::kDecodeFinishWarps) {
#pragma unroll 1
      for (int first_column = 0; first_column < columns(); first_column += 32) {
        const int d = 4 * min(first_column + lane, columns() - 1);
        Merged merged = read_so_far(r, d);
#pragma unroll 1
        for (int group = unit.part + 1; group < unit.parts; group += kGroup) {
          const float2 state = *partial_state(unit, min(group + lane, unit.parts - 1), r);
#pragma unroll 1
          for (int first = group; first < min(group + kGroup, unit.parts); first += kAtOnce) {
            float4 part[kAtOnce];
            const float* const from = partial_o(unit, first, r) + d;
#pragma unroll
            for (int s = 0; s < kAtOnce; ++s) {
              part[s] = load_four(from + min(s, unit.parts - 1 - first) * step);
            }
#pragma unroll
            for (int s = 0; s < kAtOnce; ++s) {
              const float2 of = make_float2(__shfl_sync(~0u, state.x, first - group + s),
                                            __shfl_sync(~0u, state.y, first - group + s));
              if (first + s < unit.parts) {
                merged.join(of, part[s]);
              }
            }
          }
        }
        if (first_column + lane < columns()) {
          write_result(unit, r, d, merged);
        }
      }
    }
  }

  /// `finder` has begun in the first of the warps, which finds units for all.
  __device__ void run(DecodeUnitFinder<0, kRow>& finder) const {
    std::uint32_t found = 0;  // units
    bool finds = finisher() == 0;
#pragma unroll 1
    for (std::uint32_t count = 0;; ++count) {
#pragma unroll 1
      for (; finds && found <= count + tiles::kDecodeUnitsAhead; ++found) {
        finds = publish_unit(params, shared.control, finder, found);
      }
      const DecodeUnit unit = shared.control.take(count);
      if (unit.batch < 0) {
        break;
      }
      shared.control.release(count);
      if (finisher() == 0) {
        count_bad_pages(params, unit);
      }
      barrier_wait(shared_address(&shared.control.written), count % 2);
      merge_warps(unit);
      if (lane == 0) {
        barrier_arrive(shared_address(&shared.control.taken));
      }
      if (unit.ends && !unit.leads) {
        announce(unit, static_cast<int>(count) + 1);
      } else if (unit.ends && unit.part + 1 < unit.parts) {
        finish_parts(unit);
      }
    }
  }
};

}  // namespace rafter::cuda
