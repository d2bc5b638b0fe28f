// Operations on rows of scores for the kernels that materialise them: conversions to and from f32,
// softcap, exponentials. One table per instruction set.
#pragma once

#include <cstdint>
#include <string_view>

#include "rafter/tensor.h"

namespace rafter::cpu {

/// What a row's scores are once loaded.
struct ScoreStatistics {
  float maximum = 0;    // −inf for no element; NaN when any element is NaN
  bool usable = false;  // the maximum is finite: exponentials are meaningful
};

struct RowOps {
  /// count elements of dtype (f32, bf16, f16, int8) to f32. True when all are finite.
  bool (*load)(const void* source, DType dtype, std::int64_t count, float* target);
  /// The same with a stride between elements.
  bool (*load_strided)(const void* source, DType dtype, std::int64_t stride, std::int64_t count,
                       float* target);
  /// count f32 times factor, rounded to dtype.
  void (*store)(const float* source, float factor, DType dtype, std::int64_t count, void* target);
  /// Scores to f32 with softcap (0: off), and their maximum.
  ScoreStatistics (*load_scores)(const void* source, DType dtype, float softcap, std::int64_t count,
                                 float* target);
  /// row = exp(row − maximum); returns the sum.
  double (*exponentials)(float* row, float maximum, std::int64_t count);
  /// row += other.
  void (*add)(float* row, const float* other, std::int64_t count);
  /// row *= factor.
  void (*scale)(float* row, float factor, std::int64_t count);
};

/// The table for "portable", "avx2", or the AVX-512 family (any other name).
const RowOps& row_ops(std::string_view instruction_set);

}  // namespace rafter::cpu
