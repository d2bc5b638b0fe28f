// Append on the CPU: rows of new tokens into a dense or paged cache, turned by RoPE and quantised
// as asked, a row at a time in f32.
// K, V [batch, seqlen, heads_kv, head_dim(_v)] → caches [batch, capacity, …] or [pages, page_size,
// …]
#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/element.h"
#include "dispatch/operation_entry.h"
#include "tiles/append_rows.h"

namespace rafter {
namespace {

constexpr std::int64_t kMaxHeadDim = 256;

std::int64_t offset_of(const TensorView& t, std::int64_t batch, std::int64_t row,
                       std::int64_t head) {
  return batch * t.stride_batch + row * t.stride_seqlen + head * t.stride_heads;
}

/// Where token `i` of sequence `b` goes; batch < 0: nowhere.
struct Place {
  std::int64_t position = 0;
  std::int64_t batch = -1, row = 0;
};

bool has_angles(const Rope& rope, std::int64_t position) {
  return rope.rotary_dim == 0 || position < rope.max_position;
}

Place place_of(const AppendCall& call, std::int64_t b, std::int64_t i) {
  const AppendInputs& in = call.in;
  const TensorView& cache = call.out.k_cache;
  Place place{.position = in.seqused_kv[b] + i};
  if (!has_angles(in.rope, place.position)) {
    return place;
  }
  if (in.page_table.empty()) {
    if (place.position < cache.seqlen) {
      place.batch = b;
      place.row = place.position;
    }
    return place;
  }
  const std::int64_t column = place.position / cache.seqlen;
  const std::int64_t page =
      column < in.page_table.cols ? in.page_table[b * in.page_table.cols + column] : -1;
  if (page >= 0 && page < cache.batch) {
    place.batch = page;
    place.row = place.position % cache.seqlen;
  }
  return place;
}

using Row = std::array<float, kMaxHeadDim>;

void load_row(const TensorView& t, std::int64_t offset, Row& row) {
  for (std::int64_t d = 0; d < t.head_dim; ++d) {
    row[static_cast<std::size_t>(d)] = static_cast<float>(base::load_element(t, offset + d));
  }
}

void turn(const Rope& rope, std::int64_t position, Row& row) {
  const std::int64_t half = rope.rotary_dim / 2;
  const Row before = row;
  const float* const cos = rope.cos + position * half;
  const float* const sin = rope.sin + position * half;
  for (int d = 0; d < static_cast<int>(rope.rotary_dim); ++d) {
    const tiles::RopePair pair = tiles::rope_pair(d, static_cast<int>(rope.rotary_dim),
                                                  rope.pairs == Rope::Pairs::interleaved);
    const float along = before[static_cast<std::size_t>(d)] * cos[pair.angle];
    const float across = before[static_cast<std::size_t>(pair.partner)] * sin[pair.angle];
    row[static_cast<std::size_t>(d)] = pair.second ? along + across : along - across;
  }
}

void store_quantised(const TensorView& cache, std::int64_t offset, std::int64_t d, float value) {
  if (cache.dtype == DType::e4m3) {
    static_cast<std::uint8_t*>(cache.data)[offset + d] = f32_to_e4m3(value);
    return;
  }
  const float whole = std::clamp(std::nearbyint(std::isnan(value) ? 0.0f : value),
                                 -tiles::kInt8Limit, tiles::kInt8Limit);
  static_cast<std::int8_t*>(cache.data)[offset + d] = static_cast<std::int8_t>(whole);
}

/// One row of k or v at its place. `given` and `computed` are the factors of a quantised cache.
void store_row(const TensorView& cache, const TensorView& given, const TensorView& computed,
               const Place& place, std::int64_t head, const Row& row) {
  const std::int64_t offset = offset_of(cache, place.batch, place.row, head);
  const auto dim = static_cast<std::size_t>(cache.head_dim);
  if (cache.dtype != DType::int8 && cache.dtype != DType::e4m3) {
    for (std::size_t d = 0; d < dim; ++d) {
      base::store_element(cache, offset + static_cast<std::int64_t>(d), row[d]);
    }
    return;
  }
  float inverse = 1;
  if (computed.data != nullptr) {
    float largest = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      largest = tiles::larger_magnitude(largest, row[d]);
    }
    const tiles::RowFactor factor = tiles::row_factor(
        largest, cache.dtype == DType::int8 ? tiles::kInt8Limit : tiles::kE4m3Limit);
    inverse = factor.inverse;
    static_cast<float*>(computed.data)[offset_of(computed, place.batch, place.row, head)] =
        factor.scale;
  } else if (given.data != nullptr) {
    inverse = 1 / static_cast<const float*>(given.data)[head * given.stride_heads];
  }
  for (std::size_t d = 0; d < dim; ++d) {
    store_quantised(cache, offset, static_cast<std::int64_t>(d), row[d] * inverse);
  }
}

void append_token(const AppendCall& call, std::int64_t b, std::int64_t i, const Place& place) {
  const AppendInputs& in = call.in;
  const AppendOutputs& out = call.out;
  Row row;
  for (std::int64_t h = 0; place.batch >= 0 && h < in.k.heads; ++h) {
    load_row(in.k, offset_of(in.k, b, i, h), row);
    turn(in.rope, place.position, row);
    store_row(out.k_cache, in.k_scale, out.k_scale, place, h, row);
    load_row(in.v, offset_of(in.v, b, i, h), row);
    store_row(out.v_cache, in.v_scale, out.v_scale, place, h, row);
  }
  if (in.q.data == nullptr || !has_angles(in.rope, place.position)) {
    return;
  }
  for (std::int64_t h = 0; h < in.q.heads; ++h) {
    load_row(in.q, offset_of(in.q, b, i, h), row);
    turn(in.rope, place.position, row);
    const std::int64_t offset = offset_of(out.q, b, i, h);
    for (std::int64_t d = 0; d < out.q.head_dim; ++d) {
      base::store_element(out.q, offset + d, row[static_cast<std::size_t>(d)]);
    }
  }
}

Status append(const AppendCall& call) {
  const AppendInputs& in = call.in;
  constexpr std::int64_t kSmall = 1 << 15;  // elements that are not worth waking threads for
  const std::int64_t elements = in.k.elements() + in.v.elements() + in.q.elements();
  for (std::int64_t b = 0; b < in.k.batch; ++b) {
    const std::int64_t rows = in.seqused_new.empty() ? in.k.seqlen : in.seqused_new[b];
    std::int64_t dropped = 0;
#pragma omp parallel for schedule(static) reduction(+ : dropped) if (elements > kSmall)
    for (std::int64_t i = 0; i < rows; ++i) {
      const Place place = place_of(call, b, i);
      append_token(call, b, i, place);
      dropped += place.batch < 0 ? 1 : 0;
    }
    if (call.out.dropped.data != nullptr) {
      call.out.dropped.data[b] = static_cast<std::int32_t>(dropped);
    }
  }
  return Status::ok();
}

}  // namespace

std::span<const OperationEntry> operations_append_cpu() {
  static const std::array<OperationEntry, 1> kEntries = {OperationEntry{
      .device = Device::Kind::cpu, .why_not = [](int) { return std::string(); }, .append = append}};
  return kEntries;
}

}  // namespace rafter
