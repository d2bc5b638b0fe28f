// Append of new tokens to a cache: what the host gives the kernel.
#pragma once

#include "kernels/cuda/device_indices.h"
#include "kernels/cuda/rope.h"
#include "kernels/cuda/rows.h"
#include "rafter/status.h"

namespace rafter::cuda {

/// One of k, v, q: rows in, rows out, and the factors of a quantised cache.
struct AppendRows {
  Rows from, to;
  Rows computed;                 // data null: not asked for
  const float* given = nullptr;  // factors of the heads
  std::int64_t given_stride = 0;
  int heads = 0, head_dim = 0;
};

struct AppendParams {
  AppendRows k, v, q;  // q.heads is 0 where there is none
  DeviceIndices seqused_kv, seqused_new, page_table;
  std::int64_t page_cols = 0;   // paged: of the table
  std::int64_t places = 0;      // paged: pages; else unused
  std::int64_t place_rows = 0;  // of a page, or the capacity of a dense cache
  RopeTables rope;
  int seqlen = 0;
  int lane_bits = 0;        // 2^lane_bits lanes a row
  std::int64_t tokens = 0;  // batch · seqlen
  // Set by the launch: rows are taken in groups.
  unsigned groups = 1;              // of a token
  std::int64_t items = 0;           // of all tokens
  std::int32_t* dropped = nullptr;  // zeroed
};

Status launch_append(const AppendParams& params, void* stream);

}  // namespace rafter::cuda
