// What rafter run reads besides q, k and v, and the problem that all of it poses.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/array.h"
#include "cli/qkv.h"
#include "cli/run_flags.h"
#include "rafter/attention.h"

namespace rafter::cli {

/// Refusals that need no file's contents.
void check_flags(const RunFlags& flags);

/// Index files of the layout; those not given stay empty.
struct Indices {
  std::optional<Array> cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table;
  std::optional<Array> tree_mask;  // int64 words
};

Indices read_all_indices(const RunFlags& flags);

AttentionProblem problem_of(const RunFlags& flags, const Qkv& qkv, const Indices& indices);

/// A gradient of this shape, in this dtype.
Array read_gradient(const std::string& path, const char* flag, const RunFlags& flags,
                    const std::vector<std::int64_t>& shape, DType dtype);

}  // namespace rafter::cli
