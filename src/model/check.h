// Argument checks shared by the cost models: each gives the Status that names the argument.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter::model {

/// Longest sequence, widest matrix: products of four of them stay finite.
inline constexpr std::int64_t kMaxLength = std::int64_t{1} << 40;
inline constexpr std::int64_t kMaxHeads = std::int64_t{1} << 20;
inline constexpr std::int64_t kMaxExperts = std::int64_t{1} << 20;
inline constexpr std::int64_t kMaxHeadDim = 65536;

inline Status check_range(const char* parameter, std::int64_t value, std::int64_t low,
                          std::int64_t high) {
  if (value < low || value > high) {
    return Status::invalid_argument(parameter, std::to_string(value),
                                    fmt::format("{} to {}", low, high));
  }
  return Status::ok();
}

inline Status check_positive(const char* parameter, double value) {
  if (!(value > 0) || !std::isfinite(value)) {
    return Status::invalid_argument(parameter, fmt::format("{}", value), "a finite number above 0");
  }
  return Status::ok();
}

inline Status check_not_negative(const char* parameter, double value) {
  if (!(value >= 0) || !std::isfinite(value)) {
    return Status::invalid_argument(parameter, fmt::format("{}", value),
                                    "a finite number from 0 up");
  }
  return Status::ok();
}

inline Status check_element(const char* parameter, DType dtype) {
  if (dtype == DType::i32 || dtype == DType::i64) {
    return Status::invalid_argument(parameter, to_string(dtype),
                                    "f32, f16, bf16, e4m3, e5m2, int8, int4");
  }
  return Status::ok();
}

/// heads_kv with its default filled in; 0 stands for heads_q.
inline std::int64_t heads_kv_of(std::int64_t heads_q, std::int64_t heads_kv) {
  return heads_kv == 0 ? heads_q : heads_kv;
}

inline Status check_heads(std::int64_t heads_q, std::int64_t heads_kv) {
  if (Status s = check_range("heads_q", heads_q, 1, kMaxHeads); !s) {
    return s;
  }
  if (Status s = check_range("heads_kv", heads_kv, 1, kMaxHeads); !s) {
    return s;
  }
  if (heads_q % heads_kv != 0) {
    return Status::invalid_argument("heads_kv", std::to_string(heads_kv),
                                    fmt::format("divisors of heads_q = {}", heads_q));
  }
  return Status::ok();
}

/// The first of several checks that failed, or ok.
template <typename... Statuses>
Status first_error(Status first, Statuses... rest) {
  if constexpr (sizeof...(rest) == 0) {
    return first;
  } else {
    return first ? first_error(std::move(rest)...) : first;
  }
}

}  // namespace rafter::model
