#include "cli/bench_shapes.h"

#include "cli/bench_common.h"

namespace rafter::cli {

void add_shapes(CLI::App& command, ShapeAxes& axes) {
  add_lengths(command, "--seqlen", axes.seqlens, "tokens of queries and keys", {1, 1 << 20});
  add_lengths(command, "--head-dim", axes.head_dims, "head_dim", {1, 256});
  add_lengths(command, "--heads-q", axes.heads_q, "query heads", {1, 4096});
  add_lengths(command, "--heads-kv", axes.heads_kv, "key and value heads (0: as --heads-q)",
              {0, 4096});
  add_lengths(command, "--batch", axes.batches, "sequences", {1, 65536});
  add_switches(command, "--causal", axes.causal, "mask what comes later");
}

std::vector<AttentionProblem> grid_of(const ShapeAxes& axes, const std::vector<DType>& dtypes) {
  check_dtypes(dtypes);
  std::vector<AttentionProblem> grid;
  for (DType dtype : dtypes) {
    for (std::int64_t batch : axes.batches) {
      for (std::int64_t heads_q : axes.heads_q) {
        for (std::int64_t heads_kv : axes.heads_kv) {
          for (std::int64_t head_dim : axes.head_dims) {
            for (bool causal : axes.causal) {
              for (std::int64_t seqlen : axes.seqlens) {
                AttentionProblem p;
                p.batch = batch;
                p.heads_q = heads_q;
                p.heads_kv = heads_kv;
                p.seqlen_q = p.seqlen_kv = seqlen;
                p.head_dim = head_dim;
                p.dtype = dtype;
                p.mask = causal ? Mask::causal() : Mask::none();
                grid.push_back(p);
              }
            }
          }
        }
      }
    }
  }
  return grid;
}

Json shape_of(const AttentionProblem& problem, int threads) {
  return Json{{"seqlen", problem.seqlen_q},
              {"head_dim", problem.head_dim},
              {"heads_q", problem.heads_q},
              {"heads_kv", problem.heads_kv == 0 ? problem.heads_q : problem.heads_kv},
              {"batch", problem.batch},
              {"causal", !problem.mask.is_none()},
              {"dtype", to_string(problem.dtype)},
              {"threads", threads}};
}

}  // namespace rafter::cli
