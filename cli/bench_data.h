// Random tensors of a problem, and parts of given ones: what bench and report run on.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cli/qkv.h"
#include "rafter/attention.h"

namespace rafter::cli {

/// Normal deviates in f32, f16, bf16 or e4m3; for int8 in f32.
Result<Array> random_array(DType dtype, std::vector<std::int64_t> shape, unsigned seed);
/// Normal random values (zeros would run faster), the same for the same problem. `lengths` are of
/// the keys of each sequence; none: all have seqlen_kv.
Result<Qkv> random_data(const AttentionProblem& problem,
                        std::span<const std::int64_t> lengths = {});
/// The first rows of each sequence, `copies` times along the batch, in `dtype`.
Result<Qkv> excerpt(const Qkv& from, std::int64_t seqlen_q, std::int64_t seqlen_kv,
                    std::int64_t copies, DType dtype);
/// [batch, pages per sequence]: the pages of the lengths in an order that no walk through memory
/// follows; -1 behind them.
Result<Array> shuffled_pages(const AttentionProblem& problem,
                             std::span<const std::int64_t> lengths);

}  // namespace rafter::cli
