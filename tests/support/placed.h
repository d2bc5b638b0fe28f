// Tensors and index arrays in memory of their own, in any of the styles of a Case, with everything
// around their elements poisoned.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "rafter/attention.h"
#include "support/attention_case.h"
#include "support/guarded_buffer.h"

namespace rafter::testing {

inline std::int64_t sum_of(const std::vector<std::int64_t>& v) {
  return std::accumulate(v.begin(), v.end(), std::int64_t{0});
}
inline std::int64_t max_of(const std::vector<std::int64_t>& v) {
  return v.empty() ? 0 : *std::max_element(v.begin(), v.end());
}
inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

/// A view with memory of its own, everything poisoned until rows are written.
struct Placed {
  GuardedBuffer buffer;
  TensorView view;
};

inline Placed place(Style style, DType dtype, std::int64_t batch, std::int64_t seqlen,
                    std::int64_t heads, std::int64_t head_dim, Fill fill) {
  Placed placed;
  TensorView& t = placed.view;
  t.dtype = dtype;
  t.batch = batch;
  t.seqlen = seqlen;
  t.heads = heads;
  t.head_dim = head_dim;
  std::int64_t first = 0;  // element of [0, 0, 0, 0]
  switch (style) {
    case Style::heads_first:
      t.stride_seqlen = head_dim;
      t.stride_heads = seqlen * head_dim;
      t.stride_batch = heads * seqlen * head_dim;
      break;
    case Style::gaps:
      t.stride_heads = head_dim + 3;
      t.stride_seqlen = heads * t.stride_heads + 5;
      t.stride_batch = seqlen * t.stride_seqlen + 7;
      break;
    case Style::every_other:
      t.stride_heads = head_dim;
      t.stride_seqlen = 2 * heads * head_dim;
      t.stride_batch = seqlen * t.stride_seqlen;
      break;
    case Style::backwards:
      t.stride_heads = head_dim;
      t.stride_seqlen = -heads * head_dim;
      t.stride_batch = seqlen * heads * head_dim;
      first = std::max<std::int64_t>(0, seqlen - 1) * heads * head_dim;
      break;
    case Style::strided_head_dim:
      t.stride_head_dim = 2;
      t.stride_heads = 2 * head_dim + 1;
      t.stride_seqlen = heads * t.stride_heads;
      t.stride_batch = seqlen * t.stride_seqlen;
      break;
    default:
      t.stride_heads = head_dim;
      t.stride_seqlen = heads * head_dim;
      t.stride_batch = seqlen * heads * head_dim;
  }
  const std::int64_t element = bits_of(dtype) / 8;
  std::int64_t elements = 1 + first;
  elements += std::max<std::int64_t>(0, batch - 1) * t.stride_batch;
  elements += std::max<std::int64_t>(0, seqlen - 1) * std::max<std::int64_t>(0, t.stride_seqlen);
  elements += std::max<std::int64_t>(0, heads - 1) * t.stride_heads;
  elements += std::max<std::int64_t>(0, head_dim - 1) * t.stride_head_dim;
  const std::size_t skew = style == Style::gaps ? static_cast<std::size_t>(element) : 0;
  placed.buffer = GuardedBuffer(static_cast<std::size_t>(elements * element), fill, skew);
  t.data = static_cast<std::byte*>(placed.buffer.data()) + first * element;
  return placed;
}

inline Style nth_style(Style style, int n) {
  if (style != Style::mixed) {
    return style;
  }
  constexpr Style kStyles[] = {Style::gaps, Style::heads_first, Style::every_other,
                               Style::backwards, Style::contiguous};
  return kStyles[n % 5];
}

inline std::byte* element_at(const TensorView& t, std::int64_t batch, std::int64_t row,
                             std::int64_t head, std::int64_t dim) {
  const std::int64_t offset = batch * t.stride_batch + row * t.stride_seqlen +
                              head * t.stride_heads + dim * t.stride_head_dim;
  return static_cast<std::byte*>(t.data) + offset * (bits_of(t.dtype) / 8);
}

inline void write(const TensorView& t, std::int64_t batch, std::int64_t row, std::int64_t head,
                  std::int64_t dim, float value) {
  std::byte* const to = element_at(t, batch, row, head, dim);
  if (t.dtype == DType::f32) {
    std::memcpy(to, &value, sizeof(value));
    return;
  }
  const std::uint16_t bits = t.dtype == DType::f16 ? f32_to_f16(value) : f32_to_bf16(value);
  std::memcpy(to, &bits, sizeof(bits));
}

inline float read(const TensorView& t, std::int64_t batch, std::int64_t row, std::int64_t head,
                  std::int64_t dim) {
  const std::byte* const from = element_at(t, batch, row, head, dim);
  if (t.dtype == DType::f32) {
    float value = 0;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, from, sizeof(bits));
  return t.dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

/// Index arrays in either dtype, guarded.
struct Indices {
  GuardedBuffer buffer;
  IndexView view;
};
inline Indices make_indices(const std::vector<std::int64_t>& values, DType dtype,
                            std::int64_t cols = 0) {
  Indices indices;
  const std::size_t element = dtype == DType::i64 ? 8 : 4;
  indices.buffer = GuardedBuffer(std::max<std::size_t>(1, values.size()) * element, Fill::nan);
  for (std::size_t i = 0; i < values.size(); ++i) {
    auto* const to = static_cast<std::byte*>(indices.buffer.data()) + i * element;
    if (dtype == DType::i64) {
      std::memcpy(to, &values[i], 8);
    } else {
      const auto narrow = static_cast<std::int32_t>(values[i]);
      std::memcpy(to, &narrow, 4);
    }
  }
  indices.view = {indices.buffer.data(), dtype, static_cast<std::int64_t>(values.size()), cols};
  return indices;
}

}  // namespace rafter::testing
