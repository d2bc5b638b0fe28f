// Forward attention as three kernels: S = softmax_scale · QKᵀ, P = softmax(S) in place, O = PV.
// The honest baseline: oneDNN products, S and P of the whole problem in memory in its dtype.
// Q, O [batch, seqlen_q, heads_q, head_dim]   K, V [batch, seqlen_kv, heads_kv, head_dim], packed
// or paged, any strides; f32, bf16 or f16 in, that or f32 out; softmax and sums in f32.
//   pack     K, V of each KV head to contiguous rows (where oneDNN lacks the dtype: to f32)
//   scores   [row block, head_dim] × [head_dim, 512 keys] over the hull of what the block sees
//   softmax  a row at a time: softcap, maximum, exp, sum; zeros where the row does not see a key
//   output   [row block, 512 keys] × [512 keys, head_dim_v], accumulated in f32
// Every phase is a parallel loop of its own over (sequence, head, row block of 256). Limits: the
// workspace holds the scores; oneDNN allocates for itself.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/cpu/onednn_common.h"

namespace rafter {
namespace {

using cpu::MaterialisedCall;
using cpu::RowBlock;
using cpu::ThreadScratch;

constexpr std::int64_t kRowBlock = 256;

/// Softmax of one row, in place; zeros over the rest of the block's hull.
void softmax_row(const MaterialisedCall& call, const RowBlock& block, std::int64_t row,
                 float* values) {
  const tiles::Range keys = block.window.row(row);
  const tiles::Range hull = block.hull;
  std::fill_n(values, hull.size(), 0.0f);
  double lse = -std::numeric_limits<double>::infinity();
  float factor = 1;
  if (keys.size() > 0) {
    float* const seen = values + (keys.first - hull.first);
    const cpu::ScoreStatistics statistics =
        call.ops().load_scores(call.scores(block, row, keys.first), call.dtype(),
                               call.problem().softcap, keys.size(), seen);
    if (statistics.usable) {
      const double sum = call.ops().exponentials(seen, statistics.maximum, keys.size());
      factor = static_cast<float>(1.0 / sum);
      lse = static_cast<double>(statistics.maximum) + std::log(sum);
    } else {  // a NaN or an infinity among the scores
      std::fill_n(seen, keys.size(), std::numeric_limits<float>::quiet_NaN());
      lse = std::numeric_limits<double>::quiet_NaN();
    }
  }
  call.ops().store(values, factor, call.dtype(), hull.size(), call.scores(block, row, hull.first));
  call.store_lse(block, row, lse);
}

Status softmax_block(const MaterialisedCall& call, const RowBlock& block, ThreadScratch& scratch) {
  for (std::int64_t r = 0; r < block.rows; ++r) {
    softmax_row(call, block, block.first + r, scratch.row);
  }
  return Status::ok();
}

Status output_block(const MaterialisedCall& call, const RowBlock& block, ThreadScratch& scratch,
                    cpu::BlockProducts& products) {
  const std::int64_t dim = call.problem().head_dim_v;
  std::fill_n(scratch.o, block.rows * dim, 0.0f);
  const bool in_place = call.operand() == call.dtype();
  const std::int64_t stride = in_place ? call.score_stride(block.sequence) : cpu::kKeyChunk;
  for (std::int64_t key = block.hull.first; key < block.hull.last;) {
    const std::int64_t end = std::min(block.hull.last, (key / cpu::kKeyChunk + 1) * cpu::kKeyChunk);
    for (std::int64_t r = 0; !in_place && r < block.rows; ++r) {
      call.ops().load(call.scores(block, block.first + r, key), call.dtype(), end - key,
                      scratch.chunk + r * stride);
    }
    const void* const p =
        in_place ? static_cast<const void*>(call.scores(block, block.first, key)) : scratch.chunk;
    if (Status status = call.add_values(block, {key, end}, p, stride, scratch, products); !status) {
      return status;
    }
    key = end;
  }
  for (std::int64_t r = 0; r < block.rows; ++r) {
    call.store_output(block, block.first + r, scratch.o + r * dim, 1.0f);
  }
  return Status::ok();
}

Status forward(const ForwardCall& forward_call) {
  MaterialisedCall call(forward_call, kRowBlock);
  if (Status status = call.compute_scores(); !status) {
    return status;
  }
  if (Status status = call.for_each_block(
          [&call](const RowBlock& block, ThreadScratch& scratch, cpu::BlockProducts&) {
            return softmax_block(call, block, scratch);
          });
      !status) {
    return status;
  }
  return call.for_each_block(
      [&call](const RowBlock& block, ThreadScratch& scratch, cpu::BlockProducts& products) {
        return output_block(call, block, scratch, products);
      });
}

}  // namespace

std::span<const KernelEntry> entries_unfused_onednn() {
  static const std::array<KernelEntry, 1> kEntries = {
      cpu::materialised_entry<Pipeline::unfused, kRowBlock>("unfused_onednn", forward)};
  return kEntries;
}

}  // namespace rafter
