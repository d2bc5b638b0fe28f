// Where the rows of each sequence of a batch lie, whatever the layout. One place that reads
// cu_seqlens, seqused and page tables for all CPU kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "rafter/attention.h"
#include "tiles/key_range.h"

namespace rafter::cpu {

/// One sequence: its actual lengths, and where its rows start in q, o, lse and in k, v.
struct Sequence {
  std::int64_t seqlen_q = 0, seqlen_kv = 0;
  std::int64_t q_batch = 0, q_row = 0;    // of q, o and lse
  std::int64_t kv_batch = 0, kv_row = 0;  // of k, v; paged: kv_batch is the row of the page table
};

/// Sequence `b` of a checked call; Inputs are ForwardInputs or BackwardInputs.
template <typename Inputs>
Sequence sequence_of(const AttentionProblem& problem, const Inputs& in, std::int64_t b) {
  Sequence s;
  if (problem.layout == Layout::packed) {
    s.q_row = in.cu_seqlens_q[b];
    s.seqlen_q = in.cu_seqlens_q[b + 1] - s.q_row;
    s.kv_row = in.cu_seqlens_kv[b];
    s.seqlen_kv = in.cu_seqlens_kv[b + 1] - s.kv_row;
  } else {
    s.q_batch = s.kv_batch = b;
    s.seqlen_q = problem.seqlen_q;
    s.seqlen_kv = problem.seqlen_kv;
  }
  if (problem.seqused_kv) {
    s.seqlen_kv = in.seqused_kv[b];
  }
  return s;
}

inline tiles::MaskWindow mask_window(const Mask& mask, const Sequence& s) {
  return {mask.window_left, mask.window_right,
          mask.align == MaskAlign::bottom_right ? s.seqlen_kv - s.seqlen_q : 0, s.seqlen_kv};
}

/// Elements from a view's data to the first of a row.
inline std::int64_t offset_of(const TensorView& view, std::int64_t batch, std::int64_t row,
                              std::int64_t head) {
  return batch * view.stride_batch + row * view.stride_seqlen + head * view.stride_heads;
}

/// The same for key `j` of a sequence in k or v, in every layout.
inline std::int64_t key_offset(const AttentionProblem& problem, const ForwardInputs& in,
                               const TensorView& view, const Sequence& s, std::int64_t j,
                               std::int64_t head_kv) {
  if (problem.layout != Layout::paged) {
    return offset_of(view, s.kv_batch, s.kv_row + j, head_kv);
  }
  const std::int64_t page = in.page_table[s.kv_batch * in.page_table.cols + j / problem.page_size];
  return offset_of(view, page, j % problem.page_size, head_kv);
}

/// The factor of row `j` of k or v; 1 where there are no scales.
inline float key_scale(const AttentionProblem& problem, const ForwardInputs& in,
                       const TensorView& scale, const Sequence& s, std::int64_t j,
                       std::int64_t head_kv) {
  return scale.data == nullptr
             ? 1.0f
             : static_cast<const float*>(scale.data)[key_offset(problem, in, scale, s, j, head_kv)];
}

/// Whether row `row` sees key `j` of its window: only a tree mask has holes.
inline bool tree_sees(const AttentionProblem& problem, const BitsView& bits, const Sequence& s,
                      std::int64_t row, std::int64_t j) {
  const std::int64_t token = j - (s.seqlen_kv - s.seqlen_q);
  if (!problem.tree_mask || token < 0) {
    return true;
  }
  const std::uint64_t word = bits.data[s.q_batch * bits.stride_batch + row];
  return (word >> token & 1) != 0;
}

template <typename T>
T* row_of(const TensorView& view, std::int64_t batch, std::int64_t row, std::int64_t head) {
  return static_cast<T*>(view.data) + offset_of(view, batch, row, head);
}

template <typename T>
const T* key_row(const AttentionProblem& problem, const ForwardInputs& in, const TensorView& view,
                 const Sequence& s, std::int64_t j, std::int64_t head_kv) {
  return static_cast<const T*>(view.data) + key_offset(problem, in, view, s, j, head_kv);
}

inline float* lse_of(const LseView& view, std::int64_t batch, std::int64_t head, std::int64_t row) {
  return view.data +
         (batch * view.stride_batch + head * view.stride_heads + row * view.stride_seqlen);
}

}  // namespace rafter::cpu
