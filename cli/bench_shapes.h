// The grid of shapes that the kinds of bench over attention share, and how a row names its shape.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/args.h"
#include "cli/output.h"
#include "rafter/attention.h"

namespace rafter::cli {

struct ShapeAxes {
  std::vector<std::int64_t> seqlens = {512, 1024, 2048};
  std::vector<std::int64_t> head_dims = {64};
  std::vector<std::int64_t> heads_q = {4};
  std::vector<std::int64_t> heads_kv = {0};
  std::vector<std::int64_t> batches = {1};
  std::vector<bool> causal = {false};
};

void add_shapes(CLI::App& command, ShapeAxes& axes);
/// All points of the grid.
std::vector<AttentionProblem> grid_of(const ShapeAxes& axes, const std::vector<DType>& dtypes);
/// "case" of a row.
Json shape_of(const AttentionProblem& problem, int threads);

}  // namespace rafter::cli
