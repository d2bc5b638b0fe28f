// Tensors as the kernels over rows (append, merge) take them.
#pragma once

#include <cstdint>

#include "rafter/tensor.h"

namespace rafter::cuda {

/// A tensor [batch, seqlen, heads, head_dim], head_dim contiguous.
struct Rows {
  void* data = nullptr;
  std::int64_t stride_batch = 0, stride_seqlen = 0, stride_heads = 0;
  DType dtype = DType::f32;
  bool in_vectors = false;  // eight elements from a multiple of eight on are aligned together

  constexpr std::int64_t at(std::int64_t batch, std::int64_t row, std::int64_t head) const {
    return batch * stride_batch + row * stride_seqlen + head * stride_heads;
  }
};

inline Rows rows_of(const TensorView& t) {
  const std::int64_t bytes = bits_of(t.dtype);           // of eight elements
  const std::int64_t aligned = bytes < 16 ? bytes : 16;  // they are loaded and stored together
  const auto fits = [&](std::int64_t size, std::int64_t stride) {
    return size <= 1 || stride * bytes / 8 % aligned == 0;
  };
  return {t.data,
          t.stride_batch,
          t.stride_seqlen,
          t.stride_heads,
          t.dtype,
          reinterpret_cast<std::uintptr_t>(t.data) % static_cast<std::uintptr_t>(aligned) == 0 &&
              fits(t.batch, t.stride_batch) && fits(t.seqlen, t.stride_seqlen) &&
              fits(t.heads, t.stride_heads)};
}

/// Lanes of a row of so many elements, eight each, as a power of two: up to a warp.
inline int lane_bits_of(std::int64_t head_dim) {
  int bits = 0;
  while (bits < 5 && (std::int64_t{8} << bits) < head_dim) {
    ++bits;
  }
  return bits;
}

}  // namespace rafter::cuda
