// rafter bench: kernels over a grid of shapes, predicted and measured side by side.
#include <memory>

#include "cli/bench_common.h"
#include "cli/bench_shapes.h"
#include "cli/command.h"

namespace rafter::cli {
namespace {

struct AttentionAxes : ShapeAxes {
  std::vector<Pipeline> pipelines = {Pipeline::unfused, Pipeline::half_fused, Pipeline::fused};
  std::string kernel;
  bool evidence = true;
  Pass pass = Pass::forward;

  const char* verb() const { return pass == Pass::forward ? "attention" : "backward"; }
};

/// Every sequence has all of its keys.
std::vector<std::int64_t> lengths_of(const AttentionAxes&, const AttentionProblem&) { return {}; }

struct GemmAxes {
  std::vector<std::int64_t> m = {512, 1024}, n = {}, k = {};
};

BenchRow row_of(const AttentionProblem& p, const CaseResult& result, const AttentionAxes& axes) {
  BenchRow row = measured_row(axes.verb(), result);
  row.shape = shape_of(p, result.threads);
  if (axes.pass == Pass::backward) {
    // The field's count, by which the rates of both passes compare.
    const double flops =
        2.5 * value_or_fail(attention_cost(p, Pipeline::fused, Pass::forward)).flops;
    row.more["forward_flops_x2.5"] = number(flops);
    row.more["forward_flops_x2.5_per_s"] = number(flops / result.median_s());
  }
  return row;
}

std::vector<GemmProblem> grid_of(const GemmAxes& axes, const std::vector<DType>& dtypes) {
  std::vector<GemmProblem> grid;
  for (DType dtype : dtypes) {
    for (std::int64_t m : axes.m) {
      for (std::int64_t n : axes.n.empty() ? std::vector{m} : axes.n) {
        for (std::int64_t k : axes.k.empty() ? std::vector{m} : axes.k) {
          grid.push_back({.m = m, .n = n, .k = k, .batch = 1, .dtype = dtype, .weight_dtype = {}});
        }
      }
    }
  }
  return grid;
}

void bench_gemm(const GemmAxes& axes, const Common& common, Context& context) {
  const auto run_point = [&common](const GemmProblem& problem, const ThisMachine& machine,
                                   BenchResults& results) {
    if (machine.device.kind != Device::Kind::cpu) {
      fail_flag("--device", common.device, "cpu (rafter probe --device cuda times the GPU's GEMM)");
    }
    const Result<Timing> timing = time_gemm(problem.m, problem.n, problem.k, problem.dtype,
                                            static_cast<int>(common.threads), rule_of(common));
    if (!timing && timing.status().code() == StatusCode::kUnsupported) {
      results.refused.push_back(Json{{"pipeline", nullptr}, {"reason", timing.status().message()}});
      return;
    }
    BenchRow row;
    row.kind = "gemm";
    row.timing = value_or_fail(timing);
    row.shape = Json{{"m", problem.m},
                     {"n", problem.n},
                     {"k", problem.k},
                     {"dtype", to_string(problem.dtype)},
                     {"threads", common.threads}};
    row.kernel = "onednn";
    row.cost = value_or_fail(gemm_cost(problem));
    predict_row(row, machine.spec);
    results.rows.push_back(std::move(row));
  };
  bench_points("gemm", axes, common, run_point, context);
}

void add_bench_attention(CLI::App& bench, Pass pass, Context& context) {
  auto axes = std::make_shared<AttentionAxes>();
  auto common = std::make_shared<Common>();
  axes->pass = pass;
  CLI::App* command = nullptr;
  if (pass == Pass::forward) {
    command = bench.add_subcommand("attention", "forward attention, every pipeline");
    command->footer(examples(
        {{"rafter bench attention --seqlen 512,1k,2k --head-dim 64,128", "a grid, all pipelines"},
         {"rafter bench attention --causal 0,1 --dtype f32,bf16 --out r.jsonl", "keep records"},
         {"rafter bench attention --baseline r.jsonl", "exit 1 when a row became slower"},
         {"rafter bench attention --device cuda --heads-q 16 --head-dim 128 --seqlen 512,4k,32k",
          "on the GPU, in bf16, each call alone on a cold L2"}}));
  } else {
    axes->pipelines = {Pipeline::unfused, Pipeline::fused};
    command = bench.add_subcommand("backward", "the gradients: scores recomputed and stored");
    command->footer(
        examples({{"rafter bench backward --seqlen 1k,2k,4k --head-dim 64,128",
                   "recomputed (fused) beside stored (unfused), with their workspaces"},
                  {"rafter bench backward --causal 1 --kernel backward_simd_avx2", "one kernel"}}));
  }
  add_shapes(*command, *axes);
  add_what_runs(*command, axes->pipelines, axes->kernel, axes->evidence);
  add_counters(*command, *common);
  add_common(*command, *common, context);
  command->callback([axes, common, &context] {
    bench_grid(
        axes->verb(), *axes, *common, {.pass = axes->pass},
        [&axes](const AttentionProblem& p, const CaseResult& r) { return row_of(p, r, *axes); },
        context);
  });
}

void add_bench_gemm(CLI::App& bench, Context& context) {
  auto axes = std::make_shared<GemmAxes>();
  auto common = std::make_shared<Common>();
  CLI::App* command = bench.add_subcommand("gemm", "the library's matrix product");
  command->footer(
      examples({{"rafter bench gemm --m 512,1k,2k", "square products"},
                {"rafter bench gemm --m 64 --n 4k --k 4k --dtype f32,int8", "any shape"}}));
  add_lengths(*command, "--m", axes->m, "rows of A and C", {1, 1 << 16});
  add_lengths(*command, "--n", axes->n, "columns of B and C (default: as --m)", {1, 1 << 16});
  add_lengths(*command, "--k", axes->k, "columns of A, rows of B (default: as --m)", {1, 1 << 16});
  add_common(*command, *common, context);
  command->callback([axes, common, &context] { bench_gemm(*axes, *common, context); });
}

}  // namespace

void add_bench(CLI::App& app, Context& context) {
  CLI::App* bench =
      app.add_subcommand("bench", "run kernels over a grid of shapes, predicted beside measured");
  bench->footer(examples({{"rafter bench attention", "a small grid"},
                          {"rafter bench recompute", "the backward: scores stored or recomputed"},
                          {"rafter bench decode", "one token against a cache"},
                          {"rafter bench append", "new rows into a cache"},
                          {"rafter bench gemm", "the library's matrix product"},
                          {"rafter bench model", "a whole model, operation by operation"}}));
  add_bench_attention(*bench, Pass::forward, context);
  add_bench_attention(*bench, Pass::backward, context);
  add_bench_recompute(*bench, context);
  add_bench_decode(*bench, context);
  add_bench_append(*bench, context);
  add_bench_gemm(*bench, context);
  add_bench_model(*bench, context);
}

}  // namespace rafter::cli
