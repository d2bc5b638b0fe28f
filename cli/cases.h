// The table of attention cases: what `rafter check` runs, and what benches and tests may draw on.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "rafter/attention.h"

namespace rafter::cli {

/// How q, k, v and o lie in memory; the values are the same.
enum class Strides : std::uint8_t {
  contiguous,   // [batch, seqlen, heads, head_dim]
  heads_first,  // [batch, heads, seqlen, head_dim]
  padded,       // gaps behind every row, head and sequence
};

/// What the values are.
enum class Fill : std::uint8_t {
  normal,         // normal deviates
  peaked,         // the same, queries × 8: a few keys have all the weight
  very_negative,  // every score near −120: exp(score) is below the smallest f32
  late_maximum,   // one large score in the last key
  nan_row,        // one NaN in one query row
};

struct AttentionCase {
  std::string name;
  AttentionProblem problem;  // without dtype; lengths, totals and pages follow from the lengths
  std::vector<std::int64_t> lengths_q, lengths_kv;  // of each sequence
  Strides strides = Strides::contiguous;
  Fill fill = Fill::normal;
  std::int64_t splits = 0;  // parts of the keys; 0: the kernel's own
};

/// Rows of packed tensors that belong to no sequence: behind the last one, and behind the keys in
/// use of each one where the case has seqused_kv.
inline constexpr std::int64_t kSpareRows = 3;

/// Every case, in the order in which `rafter check` runs them; names are unique.
std::span<const AttentionCase> attention_cases();

/// The case's problem in a dtype, with batch, seqlens, totals and pages set from the lengths.
AttentionProblem sized_problem(const AttentionCase& c, DType dtype);

}  // namespace rafter::cli
