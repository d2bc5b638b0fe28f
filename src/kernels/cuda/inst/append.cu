// Rows of new tokens into a dense or paged cache, turned by RoPE and quantised as asked.
//   k, v, q [batch, seqlen, heads, head_dim] → caches [batch or pages, rows, heads_kv, head_dim]; q
// Where the halves of whole rows pair and nothing is quantised, a CTA belongs to one token: each
// thread takes eight elements of both halves of two heads of k, v or q, which turn by the same
// angles. Otherwise four rows of a token belong to some lanes of a warp, eight elements of
// each row a lane: 16 bytes of a 16-bit dtype. All rows are on their way before the token's place
// is looked up. A row's elements are all loaded before any is stored: q may be turned in place.
#include <cuda_runtime_api.h>

#include "hw/cuda/early.cuh"
#include "hw/cuda/early.h"
#include "kernels/cuda/append.h"
#include "kernels/cuda/rope.cuh"
#include "kernels/cuda/rows.cuh"
#include "tiles/append_rows.h"

namespace rafter::cuda {
namespace {

constexpr int kAppendThreads = 128;
constexpr int kRowsTogether = 4;  // of one token: in flight at once

/// Where a token goes; batch < 0: nowhere.
struct Place {
  std::int64_t batch = -1, row = 0;
};

__device__ bool has_angles(const AppendParams& p, std::int64_t position) {
  return position >= 0 && (p.rope.rotary_dim == 0 || position < p.rope.max_position);
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
  const std::int64_t column = quotient(position, p.place_rows);
  if (column < p.page_cols) {
    const std::int64_t page = index_at(p.page_table, batch * p.page_cols + column);
    if (page >= 0 && page < p.places) {
      place = {page, position - column * p.place_rows};
    }
  }
  return place;
}

/// Where row i of a sequence goes, if it is one of its new ones.
struct Landing {
  bool is_new = false;
  std::int64_t position = -1;
  Place place;

  __device__ bool is_dropped() const { return is_new && place.batch < 0; }
};
__device__ Landing landing_of(const AppendParams& p, unsigned batch, int i) {
  const std::int64_t fresh =
      p.seqused_new.data == nullptr ? p.seqlen : index_at(p.seqused_new, batch);
  if (i >= fresh) {
    return {};
  }
  const std::int64_t position = index_at(p.seqused_kv, batch) + i;
  return {true, position, place_of(p, batch, position)};
}

/// Some heads of one token of k, of v or of q.
struct Group {
  int kind = 0, first_head = 0;  // 0: k, 1: v, 2: q
};
template <int kHeads>
__device__ Group group_of(const AppendParams& p, int index) {
  const int of_k = (p.k.heads + kHeads - 1) / kHeads;
  const int kind = index < of_k ? 0 : index < 2 * of_k ? 1 : 2;
  return {kind, (index - kind * of_k) * kHeads};
}

/// Both halves of rows at once: `columns` threads share two heads, `blocks` CTAs a token.
template <DType kDType>
__global__ void __launch_bounds__(kTokenThreads)
    append_token(const __grid_constant__ AppendParams p, unsigned columns, unsigned blocks) {
  let_next_grid_begin();
  wait_for_earlier_grids();
  const unsigned token = blockIdx.x / blocks, batch = token / p.seqlen;
  const unsigned thread = (blockIdx.x - token * blocks) * blockDim.x + threadIdx.x;
  const unsigned index = thread / columns;
  if (index >= p.groups) {
    return;
  }
  const Group group = group_of<kTokenHeads>(p, static_cast<int>(index));
  const AppendRows& rows = group.kind == 0 ? p.k : group.kind == 1 ? p.v : p.q;
  const auto i = static_cast<int>(token - batch * p.seqlen);
  const int heads = min(kTokenHeads, rows.heads - group.first_head), half = rows.head_dim / 2;
  const int first = static_cast<int>(thread - index * columns) * kRowWidth;

  HalfRows<kDType, kTokenHeads> halves;
  halves.load(rows.from, rows.from.at(batch, i, group.first_head) + first, half, heads);
  const Landing landing = landing_of(p, batch, i);
  Place place = landing.place;
  if (thread == 0 && p.dropped != nullptr && landing.is_dropped()) {
    atomicAdd(p.dropped + batch, 1);
  }
  if (group.kind != 1 && has_angles(p, landing.position)) {
    Angles angles;
    load_angles(p.rope, landing.position, first, angles);
    halves.turn(angles);
    if (group.kind == 2) {
      place = {batch, i};
    }
  } else if (group.kind == 2) {
    return;
  }
  if (place.batch >= 0) {
    halves.store(rows.to, rows.to.at(place.batch, place.row, group.first_head) + first, half,
                 heads);
  }
}

/// Partners lie in a row as the elements do: eight of a lane are all of one half.
__device__ bool apart(const AppendParams& p) {
  return !p.rope.interleaved && p.rope.rotary_dim / 2 % kRowWidth == 0;
}

/// Those of the elements from `first` on, the same for every head of a token. Where pairs are
/// apart but not in whole lanes, turn() reads each by itself.
__device__ void load_lane_angles(const AppendParams& p, std::int64_t position, int first,
                                 Angles& angles) {
  const int half = p.rope.rotary_dim / 2;
  if (apart(p)) {
    load_angles(p.rope, position, first >= half ? first - half : first, angles);
  } else if (p.rope.interleaved) {
#pragma unroll
    for (int i = 0; i < kRowWidth; ++i) {
      const int angle = (first + i) / 2;
      angles.cos[i] = angle < half ? __ldg(p.rope.cos + position * half + angle) : 1.0f;
      angles.sin[i] = angle < half ? __ldg(p.rope.sin + position * half + angle) : 0.0f;
    }
  }
}

/// The lane's elements [first, first + 8) of a row that begins at `at`, turned. `partners` are
/// those that lie in another lane, where pairs are apart in whole lanes.
template <bool kWide>
__device__ void turn(const AppendParams& p, const Rows& from, std::int64_t at, int first,
                     std::int64_t position, const Angles& angles, const Raw<kWide>& partners,
                     float (&x)[kRowWidth]) {
  if (first >= p.rope.rotary_dim) {
    return;
  }
  const int half = p.rope.rotary_dim / 2;
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
    if (d < p.rope.rotary_dim && p.rope.interleaved) {
      x[i] = turned(before[i], before[i ^ 1], angles.cos[i], angles.sin[i], i % 2 == 1);
    } else if (d < p.rope.rotary_dim) {
      const tiles::RopePair pair = tiles::rope_pair(d, p.rope.rotary_dim, false);
      x[i] = turned(before[i], element(from, at + pair.partner),
                    __ldg(p.rope.cos + position * half + pair.angle),
                    __ldg(p.rope.sin + position * half + pair.angle), pair.second);
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

/// kPlain: nothing turns and nothing is quantised, a copy.
template <bool kWide, bool kPlain>
__global__ void __launch_bounds__(kAppendThreads, kPlain  ? 8
                                                  : kWide ? 3
                                                          : 5)
    append_kernel(const __grid_constant__ AppendParams p) {
  let_next_grid_begin();
  wait_for_earlier_grids();
  const int lanes = 1 << p.lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int first = lane * kRowWidth;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kAppendThreads + threadIdx.x;
  const auto item = static_cast<unsigned>(thread >> p.lane_bits);
  const unsigned token = item / p.groups;
  const Group group = group_of<kRowsTogether>(p, static_cast<int>(item - token * p.groups));
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
  const Landing landing = exists ? landing_of(p, batch, i) : Landing{};
  const std::int64_t position = landing.position;
  Place place = landing.place;
  if (group.kind == 0 && group.first_head == 0 && lane == 0 && p.dropped != nullptr &&
      landing.is_dropped()) {
    atomicAdd(p.dropped + batch, 1);
  }
  const bool turns = group.kind != 1 && p.rope.rotary_dim > 0 && has_angles(p, position);
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
  if (turns && first < p.rope.rotary_dim) {
    load_lane_angles(p, position, first, angles);
  }
  const bool quantised = to.dtype == DType::int8 || to.dtype == DType::e4m3;
  const bool exchanges = p.rope.rotary_dim > 0 && apart(p);  // of the whole grid
  const int to_partner = p.rope.rotary_dim / 2 / kRowWidth;
  const int partner = static_cast<int>(threadIdx.x % 32) +
                      (first >= p.rope.rotary_dim / 2 ? -to_partner : to_partner);
#pragma unroll
  for (int r = 0; r < kRowsTogether; ++r) {
    const int head = group.first_head + r;
    float x[kRowWidth];
    unpack(from.dtype, raw[r], x);
    const Raw<kWide> partners = exchanges ? of_lane(raw[r], partner) : Raw<kWide>{};
    if (active && turns && r < heads) {
      turn(p, from, at + r * from.stride_heads - first, first, position, angles, partners, x);
    }
    if (p.rope.rotary_dim > 0 && !apart(p)) {
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
  const std::int64_t items_per_block = kAppendThreads >> params.lane_bits;
  void* arguments[] = {&params};
  return launch_early(
      reinterpret_cast<const void*>(&append_kernel<kWide, kPlain>),
      {.blocks = static_cast<unsigned>((params.items + items_per_block - 1) / items_per_block),
       .threads = kAppendThreads,
       .stream = stream},
      arguments);
}

/// Whole rows turn, halves with halves, and none changes its dtype.
bool takes_halves(const AppendParams& p) {
  return p.rope.rotary_dim > 0 && halves_pair(p.rope, p.k.head_dim) &&
         p.v.head_dim == p.k.head_dim && p.k.to.dtype == p.k.from.dtype;
}

int groups_of(const AppendParams& p, int heads) {
  const auto of = [heads](int all) { return (all + heads - 1) / heads; };
  return 2 * of(p.k.heads) + of(p.q.heads);
}

template <DType kDType>
Status launch_token(AppendParams params, void* stream) {
  auto columns = static_cast<unsigned>(params.k.head_dim / 2 / kRowWidth);
  params.groups = static_cast<unsigned>(groups_of(params, kTokenHeads));
  TokenShape shape = token_shape(params.groups * columns);
  void* arguments[] = {&params, &columns, &shape.blocks};
  return launch_early(reinterpret_cast<const void*>(&append_token<kDType>),
                      {.blocks = static_cast<unsigned>(params.tokens) * shape.blocks,
                       .threads = shape.threads,
                       .stream = stream},
                      arguments);
}

Status launch_tokens(const AppendParams& params, void* stream) {
  switch (params.k.from.dtype) {
    case DType::bf16:
      return launch_token<DType::bf16>(params, stream);
    case DType::f16:
      return launch_token<DType::f16>(params, stream);
    default:
      return launch_token<DType::f32>(params, stream);
  }
}

}  // namespace

Status launch_append(const AppendParams& params, void* stream) {
  if (takes_halves(params)) {
    return launch_tokens(params, stream);
  }
  AppendParams grouped = params;
  grouped.groups = static_cast<unsigned>(groups_of(params, kRowsTogether));
  grouped.items = params.tokens * grouped.groups;
  const bool plain = params.rope.rotary_dim == 0 && params.k.to.dtype == params.k.from.dtype;
  if (params.k.from.dtype == DType::f32) {
    return plain ? launch_rows<true, true>(grouped, stream)
                 : launch_rows<true, false>(grouped, stream);
  }
  return plain ? launch_rows<false, true>(grouped, stream)
               : launch_rows<false, false>(grouped, stream);
}

}  // namespace rafter::cuda
