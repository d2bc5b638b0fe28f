// The one place where attention is counted: FLOPs and bytes from aggregated totals. Every total is
// linear in what attention does, so sequences add up, and lengths may be real (crossovers).
#pragma once

#include "rafter/attention.h"
#include "rafter/roofline.h"

namespace rafter::model {

/// Shape shared by all sequences.
struct AttentionShape {
  double heads_q = 1, heads_kv = 1;
  double head_dim = 128, head_dim_v = 128;
  DType dtype = DType::bf16;
  DType kv_dtype = DType::bf16;
  double scale_bytes_per_key = 0;  // quantised KV: scales of one K row and one V row together
  double splits = 1;

  double group() const { return heads_q / heads_kv; }
};

/// Sums over sequences, each for one head.
struct AttentionTotals {
  double rows = 0;          // query rows
  double keys = 0;          // keys held
  double key_reads = 0;     // key rows read per KV head: those seen, times the passes of the model
  double pairs = 0;         // visible scores
  double landed_pairs = 0;  // scores that products write where they land, and
  double landed_key_reads = 0;  // key rows that those read per KV head: by score_block_rows
  double begun_pairs = 0;  // of as many keys as rows for every block of rows: by score_block_rows
  double all_pairs = 0;    // rows · keys
  double index_bytes = 0, page_table_bytes = 0;

  void add(const AttentionTotals& other, double times);
};

/// Which tensors enter bytes and footprint.
struct Counted {
  bool qo = true, kv = true;
};
Counted counted_of(const Convention& convention, Pipeline pipeline);
/// Passes of the scores through memory, forward.
double score_passes_of(const Convention& convention, Pipeline pipeline);

/// Totals of one sequence (real lengths) under a mask.
AttentionTotals totals_of(const AttentionShape& shape, double rows, double keys, const Mask& mask,
                          const Convention& convention);

Cost forward_terms(const AttentionShape& shape, const AttentionTotals& totals, Pipeline pipeline,
                   Counted counted, const Convention& convention);
Cost backward_terms(const AttentionShape& shape, const AttentionTotals& totals, Pipeline pipeline,
                    Counted counted, const Convention& convention);
/// A decode step: K and V always count, q and o as count_qo says, and the convention's
/// score_elements_per_key stands for the passes of the score vector.
Cost decode_terms(const AttentionShape& shape, const AttentionTotals& totals, Pipeline pipeline,
                  const Convention& convention);

/// invalid_argument unless causal_pairs = half can be applied to the mask.
Status check_mask(const Mask& mask, const Convention& convention);
/// The shape of a problem with defaults filled in, all dimensions checked.
Result<AttentionShape> shape_of(const AttentionProblem& problem, std::int64_t splits);

inline constexpr std::int64_t kDefaultScaleBlock = -1;
inline constexpr double kDefaultScaleBytes = -1;
/// Scales of one row of `dim` elements. −1 chooses: int8 has one f32 for the row (what the kernels
/// read), int4 an f16 for each 32 elements, other dtypes none.
double scale_bytes_per_row(double dim, DType dtype, std::int64_t scale_block, double scale_bytes);

}  // namespace rafter::model
