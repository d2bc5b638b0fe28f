// Rows of new tokens into a dense or paged cache, turned by RoPE and quantised as asked.
//   k, v, q [batch, seqlen, heads, head_dim] → caches [batch or pages, rows, heads_kv, head_dim]; q
// A row belongs to some lanes of a warp, eight elements each: 16 bytes of a 16-bit dtype, in one
// load and one store. The rows of a token lie side by side in the grid, so that the angles and the
// place of its position come from the caches. A row's elements are all loaded before any is stored:
// q may be turned in place.
#include <cuda_runtime_api.h>

#include "hw/cuda/launch.h"
#include "kernels/cuda/append.h"
#include "kernels/cuda/rows.cuh"
#include "tiles/append_rows.h"

namespace rafter::cuda {
namespace {

constexpr int kThreads = 256;

__device__ std::int64_t read_index(const RowIndices& indices, std::int64_t i) {
  return indices.wide ? static_cast<const std::int64_t*>(indices.data)[i]
                      : static_cast<const std::int32_t*>(indices.data)[i];
}

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
    const std::int64_t page = read_index(p.page_table, batch * p.page_cols + column);
    if (page >= 0 && page < p.places) {
      place = {page, position - column * p.place_rows};
    }
  }
  return place;
}

/// Eight angles from a table; consecutive where the pairs are apart.
__device__ void load_angles(const float* table, int first, bool in_vectors, float (&x)[kRowWidth]) {
  if (in_vectors) {
    const auto* const from = reinterpret_cast<const float4*>(table + first);
    const float4 low = __ldg(from), high = __ldg(from + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < kRowWidth; ++i) {
    x[i] = __ldg(table + first + i);
  }
}

/// x turned; y are the partners of its elements. Products and sums are rounded one by one, as on
/// the CPU.
__device__ float turned(float x, float y, float cos, float sin, bool second) {
  const float along = __fmul_rn(x, cos), across = __fmul_rn(y, sin);
  return second ? __fadd_rn(along, across) : __fsub_rn(along, across);
}

/// The lane's elements [first, first + count) of a row that begins at `at`, turned.
__device__ void turn(const AppendParams& p, const Rows& from, std::int64_t at, int first, int count,
                     std::int64_t position, float (&x)[kRowWidth]) {
  const int half = p.rotary_dim / 2;
  if (first >= p.rotary_dim || count == 0) {
    return;
  }
  const float* const cos = p.cos + position * half;
  const float* const sin = p.sin + position * half;
  if (!p.interleaved && half % kRowWidth == 0) {  // partners and angles lie in a row as well
    const bool second = first >= half;
    const int partner = second ? first - half : first + half;
    const int angle = second ? partner : first;
    float y[kRowWidth], c[kRowWidth], s[kRowWidth];
    load_eight(from, at + partner, kRowWidth, y);
    load_angles(cos, angle, p.tables_in_vectors, c);
    load_angles(sin, angle, p.tables_in_vectors, s);
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      x[i] = turned(x[i], y[i], c[i], s[i], second);
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
    if (d < p.rotary_dim) {
      const tiles::RopePair pair = tiles::rope_pair(d, p.rotary_dim, p.interleaved);
      const float y = p.interleaved ? before[i ^ 1] : element(from, at + pair.partner);
      x[i] = turned(before[i], y, __ldg(cos + pair.angle), __ldg(sin + pair.angle), pair.second);
    }
  }
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

__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendParams p) {
  const int lane = static_cast<int>(threadIdx.x) & ((1 << p.lane_bits) - 1);
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const auto item = static_cast<unsigned>(thread >> p.lane_bits);
  bool active = item < p.items;
  const unsigned heads = 2 * p.k.heads + p.q.heads;
  const unsigned token = item / heads;
  const auto of_token = static_cast<int>(item - token * heads);
  const unsigned batch = token / p.seqlen;
  const auto i = static_cast<int>(token - batch * p.seqlen);
  const int kind = of_token < p.k.heads ? 0 : of_token < 2 * p.k.heads ? 1 : 2;
  const AppendRows& rows = kind == 0 ? p.k : kind == 1 ? p.v : p.q;
  const int head = of_token - kind * p.k.heads;
  const int first = lane * kRowWidth;
  const int count = active ? lane_elements(first, rows.head_dim) : 0;

  // Independent of where the row goes: on its way first.
  float x[kRowWidth] = {};
  const std::int64_t at = active ? rows.from.at(batch, i, head) : 0;
  if (count > 0) {
    load_eight(rows.from, at + first, count, x);
  }
  Place place;
  if (active) {
    const std::int64_t fresh =
        p.seqused_new.data == nullptr ? p.seqlen : read_index(p.seqused_new, batch);
    const std::int64_t position = read_index(p.seqused_kv, batch) + i;
    active = i < fresh;
    if (active) {
      place = place_of(p, batch, position);
      if (of_token == 0 && lane == 0 && place.batch < 0 && p.dropped != nullptr) {
        atomicAdd(p.dropped + batch, 1);
      }
      if (kind == 2) {
        place = has_angles(p, position) ? Place{batch, i} : Place{};
      }
      active = place.batch >= 0;
      if (active && kind != 1) {
        turn(p, rows.from, at, first, count, position, x);
      }
    }
  }
  __syncwarp();  // q in place: partners have been read

  float inverse =
      rows.given == nullptr ? 1.0f : __frcp_rn(__ldg(rows.given + head * rows.given_stride));
  if (p.k.computed.data != nullptr || p.v.computed.data != nullptr) {  // of the whole grid
    const float largest = largest_of(x, 1 << p.lane_bits);
    if (rows.computed.data != nullptr) {
      const tiles::RowFactor factor = tiles::row_factor(
          largest, rows.to.dtype == DType::int8 ? tiles::kInt8Limit : tiles::kE4m3Limit);
      inverse = factor.inverse;
      if (active && lane == 0) {
        static_cast<float*>(rows.computed.data)[rows.computed.at(place.batch, place.row, head)] =
            factor.scale;
      }
    }
  }
  if (!active || count == 0) {
    return;
  }
  if (rows.to.dtype == DType::int8 || rows.to.dtype == DType::e4m3) {
#pragma unroll
    for (float& value : x) {
      value = __fmul_rn(value, inverse);
    }
  }
  store_eight(rows.to, rows.to.at(place.batch, place.row, head) + first, count, x);
}

}  // namespace

Status launch_append(const AppendParams& params, void* stream) {
  const std::int64_t rows_per_block = kThreads >> params.lane_bits;
  void* arguments[] = {const_cast<AppendParams*>(&params)};
  return launch(
      reinterpret_cast<const void*>(&append_kernel),
      {.blocks = static_cast<unsigned>((params.items + rows_per_block - 1) / rows_per_block),
       .threads = kThreads,
       .stream = stream},
      arguments);
}

}  // namespace rafter::cuda
