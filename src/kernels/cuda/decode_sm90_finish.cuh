// Four warps of decode_sm90 finish what the others leave in shared memory: the results of the warps
// of a unit are merged and written out or, where the unit is one of several parts, to the
// workspace; who sees that all parts of a head have arrived merges them in their order. Arrival is
// a word per part and finishing warp, equal to the id of the launch: the workspace needs no
// preparation. Should two CTAs merge they write the same bits. One of the warps finds the units.
#pragma once

#include "hw/cuda/barrier.cuh"
#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/decode_sm90_units.cuh"

namespace rafter::cuda {

template <DType kDType, int kWidth, int kRow>
struct DecodeFinish {
  using Shared = DecodeShared<kWidth, kRow>;

  const DecodeParams& params;
  const Shared shared;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);

  /// A row of the result of all, four columns of a lane: sums relative to 2^max.
  struct Merged {
    float max = -INFINITY, sum = 0;
    float o[4] = {0, 0, 0, 0};

    /// Begins a group of results of which the greatest maximum is `top`; returns what exponents
    /// are relative to.
    __device__ float rise(float top) {
      top = fmaxf(top, max);
      const float finite = top == -INFINITY ? 0.0f : top;
      const float mine = exp2_approx(max - finite);
      max = top;
      sum *= mine;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        o[e] *= mine;
      }
      return finite;
    }
    __device__ void add(float weight, float4 part) {
      o[0] += part.x * weight;
      o[1] += part.y * weight;
      o[2] += part.z * weight;
      o[3] += part.w * weight;
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
    const int row = unit.row_block * Shared::kTileRows + r;
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

  /// Groups of four columns of a row of the result.
  __device__ int columns() const { return (params.head_dim_v + 3) / 4; }
  __device__ float2* partial_state(const DecodeUnit& unit, int part, int r) const {
    return params.partial_state + slot_of(unit, part) * params.partial_rows + r;
  }
  __device__ float* partial_o(const DecodeUnit& unit, int part, int r) const {
    return params.partial_o +
           (slot_of(unit, part) * params.partial_rows + r) * std::int64_t{4 * columns()};
  }

  /// Merges what the warps have of the rows of this warp. What is final goes out, else to the
  /// workspace.
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
#pragma unroll 1
      for (int c = lane; c < columns(); c += 32) {
        const int d = 4 * c;
        float4 part[Shared::kWarps];
#pragma unroll
        for (int s = 0; s < Shared::kWarps; ++s) {
          part[s] = *reinterpret_cast<const float4*>(
              shared.exchange_o() + Shared::exchange_place(r + min(s, sources - 1) * step, d));
        }
        Merged merged;
        const float finite = merged.rise(top);
#pragma unroll
        for (int s = 0; s < Shared::kWarps; ++s) {
          if (s < sources) {
            const float weight = exp2_approx(state[s].x - finite);
            merged.sum += state[s].y * weight;
            merged.add(weight, part[s]);
          }
        }
        if (unit.parts == 1) {
          write_result(unit, r, d, merged);
        } else {
          *reinterpret_cast<float4*>(partial_o(unit, unit.part, r) + d) =
              make_float4(merged.o[0], merged.o[1], merged.o[2], merged.o[3]);
          if (d == 0) {
            *partial_state(unit, unit.part, r) = make_float2(merged.max, merged.sum);
          }
        }
      }
    }
  }

  /// Merges what the parts have of the rows of this warp, in their order, some at a time.
  __device__ void merge_parts(const DecodeUnit& unit) const {
    constexpr int kGroup = 32, kAtOnce = 8;  // parts; loads in flight
    const int rows = Shared::rows_of(params, unit);
    const std::int64_t step = std::int64_t{params.partial_rows} * 4 * columns();
#pragma unroll 1
    for (int r = finisher(); r < rows; r += tiles::kDecodeFinishWarps) {
#pragma unroll 1
      for (int first_column = 0; first_column < columns(); first_column += 32) {
        const int d = 4 * min(first_column + lane, columns() - 1);
        Merged merged;
#pragma unroll 1
        for (int group = 0; group < unit.parts; group += kGroup) {
          float2 state = make_float2(-INFINITY, 0);
          if (group + lane < unit.parts) {
            state = *partial_state(unit, group + lane, r);
          }
          float finite = 0, weight = 0;
#pragma unroll 1
          for (int first = group; first < min(group + kGroup, unit.parts); first += kAtOnce) {
            float4 part[kAtOnce];
            const float* const from = partial_o(unit, first, r) + d;
#pragma unroll
            for (int s = 0; s < kAtOnce; ++s) {  // no branch between the loads
              part[s] =
                  *reinterpret_cast<const float4*>(from + min(s, unit.parts - 1 - first) * step);
            }
            if (first == group) {
              float top = state.x;
#pragma unroll
              for (int other = 1; other < 32; other *= 2) {
                top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
              }
              finite = merged.rise(top);
              weight = exp2_approx(state.x - finite);
            }
#pragma unroll
            for (int s = 0; s < kAtOnce; ++s) {
              const float of = __shfl_sync(~0u, weight, first - group + s);
              merged.sum += __shfl_sync(~0u, state.y, first - group + s) * of;
              if (first + s < unit.parts) {
                merged.add(of, part[s]);
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

  /// Among the finishing warps.
  __device__ int finisher() const { return warp - Shared::kWarps; }

  /// A unit that this warp has not released.
  __device__ const DecodeUnit& unit_of(std::uint32_t count) const {
    return shared.control.units[count % tiles::kDecodeUnitRing];
  }

  // Arrival. A warp's rows are the same in all parts, so that warps of different CTAs arrive for
  // themselves. Under load a fence takes some ten thousand clocks: some units share one. It lets
  // their words out after what they are of, and those of the units before out before the words of
  // other parts are read: of the parts of a head at least one sees all.

  static constexpr int kTogether = 2;  // units

  __device__ std::uint64_t* arrived(const DecodeUnit& unit, int part) const {
    return params.arrived + slot_of(unit, part) * tiles::kDecodeFinishWarps + finisher();
  }

  __device__ std::uint64_t* claim_of(const DecodeUnit& unit) const {
    const std::int64_t group = slot_of(unit, 0) / params.max_parts;
    return params.claimed + group * tiles::kDecodeFinishWarps + finisher();
  }

  __device__ bool has_arrived(const DecodeUnit& unit, int part) const {
    std::uint64_t word;
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(word) : "l"(arrived(unit, part)) : "memory");
    return word == params.launch_id;
  }

  /// Announces the units from `first` to before `end`, of which this warp's rows are written, and
  /// merges the parts of those from `looked` to before `first`, or `end` where no more units come,
  /// of which all have arrived.
  __device__ void settle(std::uint32_t looked, std::uint32_t first, std::uint32_t end,
                         bool more) const {
    __syncwarp();
    asm volatile("fence.sc.gpu;" ::: "memory");
    if (first + lane < end && unit_of(first + lane).parts > 1) {
      const DecodeUnit& unit = unit_of(first + lane);
      asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(arrived(unit, unit.part)),
                   "l"(params.launch_id)
                   : "memory");
    }
    if (!more) {
      asm volatile("fence.sc.gpu;" ::: "memory");
      first = end;
    }
#pragma unroll 1
    for (; looked < first; ++looked) {
      const DecodeUnit& unit = unit_of(looked);
      bool all = unit.parts > 1;
#pragma unroll 1
      for (int part = lane; part < unit.parts; part += 32) {
        all = all && has_arrived(unit, part);
      }
      // The last units of all CTAs end together: asking who merges takes longer than merging.
      if (__all_sync(~0u, all) && (!more || claims(unit))) {
        __syncwarp();  // what one lane has acquired, all may read
        merge_parts(unit);
        forget_arrivals(unit);
      }
      shared.control.release(looked);
    }
  }

  /// Several may see that all parts are there: the first to say so merges. Should two, they write
  /// the same bits.
  __device__ bool claims(const DecodeUnit& unit) const {
    unsigned long long before = 0;
    if (lane == 0) {
      before = atomicExch(reinterpret_cast<unsigned long long*>(claim_of(unit)), params.launch_id);
    }
    return __shfl_sync(~0u, before, 0) != params.launch_id;
  }

  /// A graph runs again under the same id.
  __device__ void forget_arrivals(const DecodeUnit& unit) const {
#pragma unroll 1
    for (int part = lane; part < unit.parts; part += 32) {
      *arrived(unit, part) = 0;
    }
    if (lane == 0) {
      *claim_of(unit) = 0;
    }
  }

  /// Pages of the sequence that do not exist. One unit of a sequence counts.
  __device__ void count_bad_pages(const DecodeUnit& unit) const {
    if (params.bad_pages == nullptr || params.page_size == 0 || unit.part != 0 || unit.head != 0 ||
        unit.row_block != 0 || warp != Shared::kWarps) {
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

  __device__ void run() const {
    DecodeUnitFinder<kWidth, kRow> finder;
    std::uint32_t found = 0, looked = 0, announced = 0;  // units
    bool finds = finisher() == 0;                        // one warp for all
    named_barrier_arrive(Shared::kTaken, Shared::kMeeting);
#pragma unroll 1
    for (std::uint32_t count = 0;; ++count) {
#pragma unroll 1
      for (; finds && found <= count + tiles::kDecodeUnitsAhead; ++found) {
        finds = publish(finder, found);
      }
      const bool more = shared.control.take(count).batch >= 0;
      if (more) {
        count_bad_pages(unit_of(count));
        named_barrier_sync(Shared::kWritten, Shared::kMeeting);
        merge_warps(unit_of(count));
        named_barrier_arrive(Shared::kTaken, Shared::kMeeting);
      }
      if (more ? count - announced == kTogether : looked < count) {
        settle(looked, announced, count, more);
        looked = announced;
        announced = count;
      }
      if (!more) {
        break;
      }
    }
  }

 private:
  /// Finds unit `found` of this CTA for all; false: there is none, which is said too.
  __device__ bool publish(DecodeUnitFinder<kWidth, kRow>& finder, std::uint32_t found) const {
    constexpr std::uint32_t kUnits = tiles::kDecodeUnitRing;
    DecodeControl& control = shared.control;
    barrier_wait(shared_address(&control.unit_empty[found % kUnits]), found / kUnits % 2 ^ 1);
    const DecodeUnit next = finder.find(params, static_cast<int>(blockIdx.x + found * gridDim.x));
    if (lane == 0) {
      control.units[found % kUnits] = next;
      barrier_arrive(shared_address(&control.unit_full[found % kUnits]));
    }
    __syncwarp();
    return next.batch >= 0;
  }
};

}  // namespace rafter::cuda
