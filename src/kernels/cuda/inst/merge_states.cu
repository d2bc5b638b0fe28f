// The union of attention states over disjoint keys: lse = log Σ exp(lse_i), o = Σ exp(lse_i − lse)
// o_i.
//   states o [batch, seqlen, heads, head_dim], lse [batch, heads, seqlen] → out, which may be one
// A row belongs to some lanes of a warp, eight elements each; rows beyond 256 elements go in turns.
// Weights are f64 and added in the order of the states, as on the CPU. An empty state is not read,
// and what is left of one state alone is a copy.
#include <cuda_runtime_api.h>

#include "hw/cuda/launch.h"
#include "kernels/cuda/merge_states.h"
#include "kernels/cuda/rows.cuh"

namespace rafter::cuda {
namespace {

constexpr int kMergeThreads = 256;

struct RowIndex {
  std::int64_t batch = 0, head = 0, row = 0;
};

__device__ float& lse_at(const MergeState& state, const RowIndex& r) {
  return state.lse[r.batch * state.lse_stride_batch + r.head * state.lse_stride_heads +
                   r.row * state.lse_stride_seqlen];
}

/// What the weights of a row are made of.
struct Total {
  double largest = -INFINITY, sum = 0;
  int nonempty = 0, last = 0;  // states that are not empty; the last of them
};

template <int kCapacity>
__device__ Total total_of(const MergeParams<kCapacity>& p, const RowIndex& r) {
  Total total;
  for (int i = 0; i < p.count; ++i) {
    const double lse = lse_at(p.states[i], r);
    if (lse != -INFINITY) {
      ++total.nonempty;
      total.last = i;
      total.largest = lse > total.largest || isnan(lse) ? lse : total.largest;
    }
  }
  return total;
}

template <int kCapacity>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ MergeParams<kCapacity> p) {
  const int lanes = 1 << p.lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const std::int64_t index =
      (std::int64_t{blockIdx.x} * kMergeThreads + threadIdx.x) >> p.lane_bits;
  const bool active = index < p.rows;
  RowIndex r;
  if (active) {
    const auto i = static_cast<unsigned>(index);
    const unsigned outer = i / p.heads;
    r.head = i - outer * p.heads;
    r.batch = outer / p.seqlen;
    r.row = outer - static_cast<unsigned>(r.batch) * p.seqlen;
  }
  Total total;
  if (active) {
    total = total_of(p, r);
  }
  const auto weight_of = [&](int i) {
    const double lse = active && i < p.count ? double{lse_at(p.states[i], r)} : -INFINITY;
    return lse == -INFINITY ? 0.0 : exp(lse - total.largest);
  };
  // The lanes of a row take one exponential each, and all of them add all.
  for (int base = 0; base < p.count; base += lanes) {
    const double mine = weight_of(base + lane);
    for (int i = 0; i < lanes; ++i) {
      total.sum += __shfl_sync(~0u, mine, i, lanes);
    }
  }
  const std::int64_t to = active ? p.out.o.at(r.batch, r.row, r.head) : 0;
  for (int first = lane * kRowWidth; first - lane * kRowWidth < p.head_dim;
       first += lanes * kRowWidth) {
    const int count = active ? lane_elements(first, p.head_dim) : 0;
    float x[kRowWidth] = {};
    if (total.nonempty == 1 && count > 0) {
      const Rows& o = p.states[total.last].o;
      load_eight(o, o.at(r.batch, r.row, r.head) + first, count, x);
    }
    double sums[kRowWidth] = {};
    for (int base = 0; base < p.count; base += lanes) {
      const double mine = weight_of(base + lane);
      const int some = min(lanes, p.count - base);
      for (int i = 0; i < some; ++i) {
        const double weight = __shfl_sync(~0u, mine, i, lanes) / total.sum;
        if (total.nonempty > 1 && weight != 0 && count > 0) {
          const Rows& o = p.states[base + i].o;
          float one[kRowWidth];
          load_eight(o, o.at(r.batch, r.row, r.head) + first, count, one);
#pragma unroll
          for (int d = 0; d < kRowWidth; ++d) {
            sums[d] = __dadd_rn(sums[d], __dmul_rn(weight, double{one[d]}));  // as on the CPU
          }
        }
      }
    }
    if (total.nonempty > 1) {
#pragma unroll
      for (int d = 0; d < kRowWidth; ++d) {
        x[d] = static_cast<float>(sums[d]);
      }
    }
    if (count > 0) {
      store_eight(p.out.o, to + first, count, x);
    }
  }
  __syncwarp();  // every lane has read the states' lse, one of which may be out
  if (active && lane == 0) {
    lse_at(p.out, r) =
        static_cast<float>(total.nonempty > 1 ? total.largest + log(total.sum) : total.largest);
  }
}

}  // namespace

template <int kCapacity>
Status launch_merge(const MergeParams<kCapacity>& params, void* stream) {
  static_assert(sizeof(MergeParams<kCapacity>) <= 32764);  // what a kernel's parameters may take
  const std::int64_t rows_per_block = kMergeThreads >> params.lane_bits;
  void* arguments[] = {const_cast<MergeParams<kCapacity>*>(&params)};
  return launch(
      reinterpret_cast<const void*>(&merge_kernel<kCapacity>),
      {.blocks = static_cast<unsigned>((params.rows + rows_per_block - 1) / rows_per_block),
       .threads = kMergeThreads,
       .stream = stream},
      arguments);
}
template Status launch_merge(const MergeParams<kFewStates>&, void*);
template Status launch_merge(const MergeParams<kManyStates>&, void*);

}  // namespace rafter::cuda
