// Element types and non-owning views of tensors: a pointer, a dtype, and shape and strides by name.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "rafter/status.h"

namespace rafter {

enum class DType : std::uint8_t { f32, f16, bf16, e4m3, e5m2, int8, int4, i32, i64 };

/// Bits of one element: 32, 16, 16, 8, 8, 8, 4, 32, 64.
std::int64_t bits_of(DType dtype);
/// Bytes of one element as a real number (int4: 0.5).
inline double bytes_of(DType dtype) { return static_cast<double>(bits_of(dtype)) / 8.0; }
/// "f32", "f16", "bf16", "e4m3", "e5m2", "int8", "int4", "i32", "i64".
const char* to_string(DType dtype);
/// The dtype of that name; invalid_argument names the allowed ones otherwise.
Result<DType> parse_dtype(std::string_view name);

// Conversions of the 16-bit formats: round to nearest, ties to even; NaN stays NaN, infinities and
// signed zeros stay.
constexpr float bf16_to_f32(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}
constexpr std::uint16_t f32_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  // A NaN keeps its upper bits and gets a quiet bit, so that rounding cannot carry it to infinity.
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>((is_nan ? bits | 0x400000u : rounded) >> 16);
}
constexpr float f16_to_f32(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fffu) << 13;
  // Read as f32 the magnitude is 2^112 too small (the exponent bias differs by 112); the product
  // is exact, subnormals included. Infinities and NaN get the f32 exponent instead.
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const bool is_special = (bits & 0x7c00u) == 0x7c00u;
  const std::uint32_t result =
      is_special ? (magnitude | 0x7f800000u) : std::bit_cast<std::uint32_t>(scaled);
  return std::bit_cast<float>(sign | result);
}
constexpr std::uint16_t f32_to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result = 0;
  if (magnitude > 0x7f800000u) {  // NaN
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    result = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal: 2^-14 and above
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else {  // subnormal: adding 0.5 leaves the multiple of 2^-24, rounded, in the low bits
    result = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  }
  return static_cast<std::uint16_t>(sign | result);
}

// e4m3: 4 bits of exponent, 3 of mantissa; ±448 is the largest value, there is no infinity.
constexpr float e4m3_to_f32(std::uint8_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
  const std::uint32_t magnitude = bits & 0x7fu;
  // As for f16: read as f32 the magnitude is 2^120 too small.
  const float scaled = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  const std::uint32_t result =
      magnitude == 0x7fu ? 0x7fc00000u : std::bit_cast<std::uint32_t>(scaled);
  return std::bit_cast<float>(sign | result);
}
/// Nearest, ties to even; what is beyond 448, infinities included, becomes ±448.
constexpr std::uint8_t f32_to_e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result = 0;
  if (magnitude > 0x7f800000u) {  // NaN
    result = 0x7fu;
  } else if (magnitude >= 0x43e00000u) {  // 448 and above
    result = 0x7eu;
  } else if (magnitude >= 0x3c800000u) {  // normal: 2^-6 and above
    result = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  } else {  // subnormal: adding 2^14 leaves the multiple of 2^-9, rounded, in the low bits
    result = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000u;
  }
  return static_cast<std::uint8_t>(sign | result);
}

/// A view of a tensor [batch, seqlen, heads, head_dim]; strides count elements and may have any
/// order, except that head_dim must be contiguous where a kernel says so. A packed tensor [total,
/// heads, head_dim] is batch = 1 and seqlen = total. A paged cache [pages, page_size, heads_kv,
/// head_dim] is batch = pages, seqlen = page_size.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t batch = 0, seqlen = 0, heads = 0, head_dim = 0;
  std::int64_t stride_batch = 0, stride_seqlen = 0, stride_heads = 0, stride_head_dim = 1;

  std::int64_t elements() const { return batch * seqlen * heads * head_dim; }

  /// Contiguous [batch, seqlen, heads, head_dim].
  static TensorView contiguous(const void* data, DType dtype, std::int64_t batch,
                               std::int64_t seqlen, std::int64_t heads, std::int64_t head_dim) {
    return {const_cast<void*>(data),
            dtype,
            batch,
            seqlen,
            heads,
            head_dim,
            seqlen * heads * head_dim,
            heads * head_dim,
            head_dim,
            1};
  }
  /// Contiguous [batch, heads, seqlen, head_dim].
  static TensorView heads_first(const void* data, DType dtype, std::int64_t batch,
                                std::int64_t heads, std::int64_t seqlen, std::int64_t head_dim) {
    return {const_cast<void*>(data),
            dtype,
            batch,
            seqlen,
            heads,
            head_dim,
            heads * seqlen * head_dim,
            head_dim,
            seqlen * head_dim,
            1};
  }
};

/// lse [batch, heads_q, seqlen_q] (packed: [heads_q, total_q], batch = 1): f32, natural logarithm.
/// Strides in elements. data may be null: lse is then not written.
struct LseView {
  float* data = nullptr;
  std::int64_t batch = 0, heads = 0, seqlen = 0;
  std::int64_t stride_batch = 0, stride_heads = 0, stride_seqlen = 1;

  static LseView contiguous(float* data, std::int64_t batch, std::int64_t heads,
                            std::int64_t seqlen) {
    return {data, batch, heads, seqlen, heads * seqlen, seqlen, 1};
  }
};

/// A vector of indices (lengths, offsets, page numbers) of dtype i32 or i64, contiguous; rows ×
/// cols for a page table.
struct IndexView {
  const void* data = nullptr;
  DType dtype = DType::i32;
  std::int64_t size = 0;  // elements in all
  std::int64_t cols = 0;  // page table: pages per sequence; else 0

  bool empty() const { return data == nullptr; }
  std::int64_t operator[](std::int64_t i) const {
    return dtype == DType::i64 ? static_cast<const std::int64_t*>(data)[i]
                               : static_cast<const std::int32_t*>(data)[i];
  }
};

/// Words of 64 bits [batch, seqlen]; the words of a sequence are contiguous, stride_batch counts
/// words.
struct BitsView {
  const std::uint64_t* data = nullptr;
  std::int64_t batch = 0, seqlen = 0;
  std::int64_t stride_batch = 0;

  static BitsView contiguous(const std::uint64_t* data, std::int64_t batch, std::int64_t seqlen) {
    return {data, batch, seqlen, seqlen};
  }
};

/// A vector of counts that a run writes.
struct CountView {
  std::int32_t* data = nullptr;
  std::int64_t size = 0;
};

/// Memory that the caller lends to a run; contents before and after are meaningless.
struct Workspace {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

}  // namespace rafter
