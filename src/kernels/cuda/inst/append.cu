// Rows of new tokens into a dense or paged cache, turned by RoPE and quantised as asked.
//   k, v, q [batch, seqlen, heads, head_dim] → caches [batch or pages, rows, heads_kv, head_dim]; q
// Four rows of a token (heads of k, of v or of q) belong to some lanes of a warp, eight
// elements of each row a lane: 16 bytes of a 16-bit dtype. All four are on their way before the
// token's place is looked up. Its angles are the same for every head. A row's elements are all
// loaded before any is stored: q may be turned in place.
#include <cuda_runtime_api.h>

#include "hw/cuda/early.cuh"
#include "hw/cuda/early.h"
#include "kernels/cuda/append.h"
#include "kernels/cuda/rows.cuh"
#include "tiles/append_rows.h"

namespace rafter::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRowsTogether = 4;  // of one token: in flight at once

/// Where a token goes; batch < 0: nowhere.
struct Place {
  std::int64_t batch = -1, row = 0;
};

__device__ bool has_angles(const AppendParams& p, std::int64_t position) {
  return position >= 0 && (p.rotary_dim == 0 || position < p.max_position);
}

__device__ Place place_of(const AppendParams& p, std::int64_t batch, std::int64_t position) {
  Place place;
  if (!has_angles(p, position)) {
    return place;
  }
  if (p.page_table.data == nullptr) {
    if (position < p.place_rows) {
      place = {batch, position};
    }
    return place;
  }
  const std::int64_t column = position / p.place_rows;
  if (column < p.page_cols) {
    const std::int64_t page = index_at(p.page_table, batch * p.page_cols + column);
    if (page >= 0 && page < p.places) {
      place = {page, position - column * p.place_rows};
    }
  }
  return place;
}

/// cos and sin of a lane's eight elements of a row.
struct Angles {
  float cos[kRowWidth], sin[kRowWidth];
};

__device__ void load_table(const float* from, bool in_vectors, float (&x)[kRowWidth]) {
  if (in_vectors) {
    const float4 low = __ldg(reinterpret_cast<const float4*>(from));
    const float4 high = __ldg(reinterpret_cast<const float4*>(from) + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < kRowWidth; ++i) {
    x[i] = __ldg(from + i);
  }
}

/// Partners lie in a row as the elements do: eight of a lane are all of one half.
__device__ bool apart(const AppendParams& p) {
  return !p.interleaved && p.rotary_dim / 2 % kRowWidth == 0;
}

/// Those of the elements from `first` on, the same for every head of a token. Where pairs are
/// apart but not in whole lanes, turn() reads each by itself.
__device__ void load_angles(const AppendParams& p, std::int64_t position, int first,
                            Angles& angles) {
  const int half = p.rotary_dim / 2;
  const float* const cos = p.cos + position * half;
  const float* const sin = p.sin + position * half;
  if (apart(p)) {
    const int angle = first >= half ? first - half : first;
    load_table(cos + angle, p.tables_in_vectors, angles.cos);
    load_table(sin + angle, p.tables_in_vectors, angles.sin);
  } else if (p.interleaved) {
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      const int angle = (first + i) / 2;
      angles.cos[i] = angle < half ? __ldg(cos + angle) : 1.0f;
      angles.sin[i] = angle < half ? __ldg(sin + angle) : 0.0f;
    }
  }
}

/// x turned; y are the partners of its elements. Products and sums are rounded one by one, as on
/// the CPU.
__device__ float turned(float x, float y, float cos, float sin, bool second) {
  const float along = __fmul_rn(x, cos), across = __fmul_rn(y, sin);
  return second ? __fadd_rn(along, across) : __fsub_rn(along, across);
}

/// The lane's elements [first, first + 8) of a row that begins at `at`, turned. `partners` are
/// those that lie in another lane, where pairs are apart in whole lanes.
template <bool kWide>
__device__ void turn(const AppendParams& p, const Rows& from, std::int64_t at, int first,
                     std::int64_t position, const Angles& angles, const Raw<kWide>& partners,
                     float (&x)[kRowWidth]) {
  if (first >= p.rotary_dim) {
    return;
  }
  const int half = p.rotary_dim / 2;
  if (apart(p)) {
    float y[kRowWidth];
    unpack(from.dtype, partners, y);
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      x[i] = turned(x[i], y[i], angles.cos[i], angles.sin[i], first >= half);
    }
    return;
  }
  float before[kRowWidth];
#pragma unroll
  for (int i = 0; i < kRowWidth; ++i) {
    before[i] = x[i];
  }
#pragma unroll
  for (int i = 0; i < kRowWidth; ++i) {
    const int d = first + i;
    if (d < p.rotary_dim && p.interleaved) {
      x[i] = turned(before[i], before[i ^ 1], angles.cos[i], angles.sin[i], i % 2 == 1);
    } else if (d < p.rotary_dim) {
      const tiles::RopePair pair = tiles::rope_pair(d, p.rotary_dim, false);
      x[i] = turned(before[i], element(from, at + pair.partner),
                    __ldg(p.cos + position * half + pair.angle),
                    __ldg(p.sin + position * half + pair.angle), pair.second);
    }
  }
}

/// Another lane's part of a row. Every lane of the warp comes here.
template <bool kWide>
__device__ Raw<kWide> of_lane(const Raw<kWide>& raw, int lane) {
  Raw<kWide> other;
#pragma unroll
  for (int i = 0; i < (kWide ? 2 : 1); ++i) {
    other.words[i] = {
        __shfl_sync(~0u, raw.words[i].x, lane), __shfl_sync(~0u, raw.words[i].y, lane),
        __shfl_sync(~0u, raw.words[i].z, lane), __shfl_sync(~0u, raw.words[i].w, lane)};
  }
  return other;
}

/// The largest magnitude of a row. Every lane of the warp comes here.
__device__ float largest_of(const float (&x)[kRowWidth], int lanes) {
  float largest = 0;
#pragma unroll
  for (const float value : x) {
    largest = tiles::larger_magnitude(largest, value);
  }
  for (int step = lanes / 2; step > 0; step /= 2) {
    largest = tiles::larger_magnitude(largest, __shfl_xor_sync(~0u, largest, step));
  }
  return largest;
}

/// Some heads of one token of k, of v or of q.
struct Group {
  int kind = 0, first_head = 0;  // 0: k, 1: v, 2: q
};
__device__ Group group_of(const AppendParams& p, int index) {
  const int of_k = (p.k.heads + kRowsTogether - 1) / kRowsTogether;
  const int kind = index < of_k ? 0 : index < 2 * of_k ? 1 : 2;
  return {kind, (index - kind * of_k) * kRowsTogether};
}

/// kPlain: nothing turns and nothing is quantised, a copy.
template <bool kWide, bool kPlain>
__global__ void __launch_bounds__(kThreads, kPlain  ? 8
                                            : kWide ? 3
                                                    : 5)
    append_kernel(const __grid_constant__ AppendParams p) {
  let_next_grid_begin();
  wait_for_earlier_grids();
  const int lanes = 1 << p.lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int first = lane * kRowWidth;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const auto item = static_cast<unsigned>(thread >> p.lane_bits);
  const unsigned token = item / p.groups;
  const Group group = group_of(p, static_cast<int>(item - token * p.groups));
  const AppendRows& rows = group.kind == 0 ? p.k : group.kind == 1 ? p.v : p.q;
  const unsigned batch = token / p.seqlen;
  const auto i = static_cast<int>(token - batch * p.seqlen);
  const bool exists = item < p.items;
  const int heads = exists ? min(kRowsTogether, rows.heads - group.first_head) : 0;
  const int count = lane_elements(first, rows.head_dim);

  // Independent of where the rows go: on their way first.
  const Rows from = rows.from;
  const std::int64_t at = from.at(batch, i, group.first_head) + first;
  Raw<kWide> raw[kRowsTogether] = {};
#pragma unroll
  for (int r = 0; r < kRowsTogether; ++r) {
    if (r < heads && count > 0) {
      raw[r] = load_raw<kWide>(from, at + r * from.stride_heads, count);
    }
  }
  std::int64_t position = -1;
  Place place;
  if (exists) {
    const std::int64_t fresh =
        p.seqused_new.data == nullptr ? p.seqlen : index_at(p.seqused_new, batch);
    if (i < fresh) {
      position = index_at(p.seqused_kv, batch) + i;
      place = place_of(p, batch, position);
      if (group.kind == 0 && group.first_head == 0 && lane == 0 && p.dropped != nullptr &&
          place.batch < 0) {
        atomicAdd(p.dropped + batch, 1);
      }
    }
  }
  const bool turns = group.kind != 1 && p.rotary_dim > 0 && has_angles(p, position);
  if (group.kind == 2) {
    place = turns ? Place{batch, i} : Place{};
  }
  const bool active = place.batch >= 0;
  const Rows to = rows.to;
  const std::int64_t target = to.at(place.batch, place.row, group.first_head) + first;
  if constexpr (kPlain) {
#pragma unroll
    for (int r = 0; r < kRowsTogether; ++r) {
      if (active && r < heads && count > 0) {
        store_raw<kWide>(to, target + r * to.stride_heads, count, raw[r]);
      }
    }
    return;
  }
  __syncwarp();  // q in place: what turn() reads of other lanes' elements has been loaded
  Angles angles = {};
  if (turns && first < p.rotary_dim) {
    load_angles(p, position, first, angles);
  }
  const bool quantised = to.dtype == DType::int8 || to.dtype == DType::e4m3;
  const bool exchanges = p.rotary_dim > 0 && apart(p);  // of the whole grid
  const int to_partner = p.rotary_dim / 2 / kRowWidth;
  const int partner =
      static_cast<int>(threadIdx.x % 32) + (first >= p.rotary_dim / 2 ? -to_partner : to_partner);
#pragma unroll
  for (int r = 0; r < kRowsTogether; ++r) {
    const int head = group.first_head + r;
    float x[kRowWidth];
    unpack(from.dtype, raw[r], x);
    const Raw<kWide> partners = exchanges ? of_lane(raw[r], partner) : Raw<kWide>{};
    if (active && turns && r < heads) {
      turn(p, from, at + r * from.stride_heads - first, first, position, angles, partners, x);
    }
    if (p.rotary_dim > 0 && !apart(p)) {
      __syncwarp();  // and those that turn() reads by itself
    }
    float inverse = 1;
    if (p.k.computed.data != nullptr || p.v.computed.data != nullptr) {  // of the whole grid
      const float largest = largest_of(x, lanes);
      if (rows.computed.data != nullptr) {
        const tiles::RowFactor factor = tiles::row_factor(
            largest, to.dtype == DType::int8 ? tiles::kInt8Limit : tiles::kE4m3Limit);
        inverse = factor.inverse;
        if (active && r < heads && lane == 0) {
          static_cast<float*>(rows.computed.data)[rows.computed.at(place.batch, place.row, head)] =
              factor.scale;
        }
      }
    }
    if (active && r < heads && count > 0) {
      if (rows.given != nullptr) {
        inverse = __frcp_rn(__ldg(rows.given + head * rows.given_stride));
      }
      if (quantised) {
#pragma unroll
        for (float& value : x) {
          value = __fmul_rn(value, inverse);
        }
      }
      store_eight(to, target + r * to.stride_heads, count, x);
    }
  }
}

template <bool kWide, bool kPlain>
Status launch_rows(AppendParams params, void* stream) {
  const std::int64_t items_per_block = kThreads >> params.lane_bits;
  void* arguments[] = {&params};
  return launch_early(
      reinterpret_cast<const void*>(&append_kernel<kWide, kPlain>),
      {.blocks = static_cast<unsigned>((params.items + items_per_block - 1) / items_per_block),
       .threads = kThreads,
       .stream = stream},
      arguments);
}

}  // namespace

Status launch_append(const AppendParams& params, void* stream) {
  const auto groups_of = [](int heads) { return (heads + kRowsTogether - 1) / kRowsTogether; };
  AppendParams grouped = params;
  grouped.groups = static_cast<unsigned>(2 * groups_of(params.k.heads) + groups_of(params.q.heads));
  grouped.items = params.tokens * grouped.groups;
  const bool plain = params.rotary_dim == 0 && params.k.to.dtype == params.k.from.dtype;
  if (params.k.from.dtype == DType::f32) {
    return plain ? launch_rows<true, true>(grouped, stream)
                 : launch_rows<true, false>(grouped, stream);
  }
  return plain ? launch_rows<false, true>(grouped, stream)
               : launch_rows<false, false>(grouped, stream);
}

}  // namespace rafter::cuda
