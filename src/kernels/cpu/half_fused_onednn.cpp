// Forward attention as two kernels: S = softmax_scale · QKᵀ in memory, then softmax fused into PV:
// the scores of the whole problem land once and are read once, the probabilities never land.
// Shapes, dtypes, packing and the products are those of unfused_onednn.
//   scores  as there, row blocks of 128
//   output  a row block walks its keys 512 at a time: chunk of S in, running maximum and sum, the
//           output rescaled when the maximum moved, P V added by oneDNN from a chunk that stays in
//           the L2 (128 × 512 f32 = 256 KiB)
// Source of the running maximum: Milakov & Gimelshein 2018, arXiv 1805.02867.
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

constexpr std::int64_t kRowBlock = 128;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// Probabilities of row r of the block over a chunk of keys, against the running maximum; the
/// output so far is rescaled when that moves. A NaN maximum marks a row that met NaN or +infinity.
void advance_row(const MaterialisedCall& call, const RowBlock& block, std::int64_t r,
                 tiles::Range keys, ThreadScratch& scratch) {
  float* const p = scratch.chunk + r * cpu::kKeyChunk;
  std::fill_n(p, keys.size(), 0.0f);
  const std::int64_t row = block.first + r;
  const tiles::Range seen = cpu::intersect(keys, block.window.row(row));
  float& maximum = scratch.maximum[r];
  if (seen.size() == 0 || std::isnan(maximum)) {
    return;
  }
  float* const values = p + (seen.first - keys.first);
  const cpu::ScoreStatistics statistics =
      call.ops().load_scores(call.scores(block, row, seen.first), call.dtype(),
                             call.problem().softcap, seen.size(), values);
  if (!statistics.usable) {
    std::fill_n(values, seen.size(), 0.0f);  // scores of −infinity weigh nothing
    maximum = statistics.maximum == -kInfinity ? maximum : kNaN;
    return;
  }
  if (statistics.maximum > maximum) {
    const float factor = std::exp(maximum - statistics.maximum);
    call.ops().scale(scratch.o + r * call.problem().head_dim_v, factor, call.problem().head_dim_v);
    scratch.sum[r] *= static_cast<double>(factor);
    maximum = statistics.maximum;
  }
  scratch.sum[r] += call.ops().exponentials(values, maximum, seen.size());
}

void finish_row(const MaterialisedCall& call, const RowBlock& block, std::int64_t r,
                ThreadScratch& scratch) {
  const std::int64_t dim = call.problem().head_dim_v;
  const std::int64_t row = block.first + r;
  const bool empty = block.window.row(row).size() == 0;
  const double sum = scratch.sum[r];
  float* const o = scratch.o + r * dim;
  double lse = static_cast<double>(scratch.maximum[r]) + std::log(sum);
  float factor = static_cast<float>(1.0 / sum);
  if (empty) {
    std::fill_n(o, dim, 0.0f);
    lse = -std::numeric_limits<double>::infinity();
    factor = 1;
  } else if (std::isnan(scratch.maximum[r]) || sum == 0) {  // NaN, or all scores −infinity
    lse = std::numeric_limits<double>::quiet_NaN();
    factor = kNaN;
  }
  call.store_output(block, row, o, factor);
  call.store_lse(block, row, lse);
}

Status output_block(const MaterialisedCall& call, const RowBlock& block, ThreadScratch& scratch,
                    cpu::BlockProducts& products) {
  std::fill_n(scratch.o, block.rows * call.problem().head_dim_v, 0.0f);
  std::fill_n(scratch.sum, block.rows, 0.0);
  std::fill_n(scratch.maximum, block.rows, -kInfinity);
  const bool in_f32 = call.operand() == DType::f32;
  const std::int64_t element = bits_of(call.operand()) / 8;
  for (std::int64_t key = block.hull.first; key < block.hull.last;) {
    const std::int64_t end = std::min(block.hull.last, (key / cpu::kKeyChunk + 1) * cpu::kKeyChunk);
    for (std::int64_t r = 0; r < block.rows; ++r) {
      advance_row(call, block, r, {key, end}, scratch);
      if (!in_f32) {
        call.ops().store(scratch.chunk + r * cpu::kKeyChunk, 1.0f, call.operand(), end - key,
                         static_cast<std::byte*>(scratch.operand) + r * cpu::kKeyChunk * element);
      }
    }
    const void* const p = in_f32 ? scratch.chunk : scratch.operand;
    if (Status status = call.add_values(block, {key, end}, p, cpu::kKeyChunk, scratch, products);
        !status) {
      return status;
    }
    key = end;
  }
  for (std::int64_t r = 0; r < block.rows; ++r) {
    finish_row(call, block, r, scratch);
  }
  return Status::ok();
}

Status forward(const ForwardCall& forward_call) {
  MaterialisedCall call(forward_call, kRowBlock);
  if (Status status = call.compute_scores(); !status) {
    return status;
  }
  return call.for_each_block(
      [&call](const RowBlock& block, ThreadScratch& scratch, cpu::BlockProducts& products) {
        return output_block(call, block, scratch, products);
      });
}

}  // namespace

std::span<const KernelEntry> entries_half_fused_onednn() {
  static const std::array<KernelEntry, 1> kEntries = {
      cpu::materialised_entry<Pipeline::half_fused, kRowBlock>("half_fused_onednn", forward)};
  return kEntries;
}

}  // namespace rafter
