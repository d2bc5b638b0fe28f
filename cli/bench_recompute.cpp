// rafter bench recompute: what `explain recompute` predicts, beside the backward pass measured both
// ways: scores stored (unfused) and recomputed (fused).
#include <memory>
#include <optional>

#include "cli/bench_common.h"
#include "cli/bench_shapes.h"

namespace rafter::cli {
namespace {

/// One point: the two backward passes, and the forward pass that bounds what making P takes.
struct Measured {
  CaseResult stored, recomputed, probabilities;
};

/// The unfused forward pass with the fewest columns of V that every kernel takes: S and P, each
/// written and read, and little else. The stored backward makes its P by one pass less.
AttentionProblem probabilities_of(AttentionProblem problem) {
  problem.head_dim_v = 8;
  return problem;
}

Measured measure(const AttentionProblem& problem, const ThisMachine& machine,
                 const Common& common) {
  const auto timed = [&](const AttentionProblem& p, Pass pass, Pipeline pipeline) {
    PlanOptions options;
    options.pass = pass;
    options.pipeline = pipeline;
    options.threads = static_cast<int>(common.threads);
    options.device_spec = &machine.spec;
    std::optional<Qkv> data;  // on a GPU it is made there
    if (machine.device.kind == Device::Kind::cpu) {
      data = value_or_fail(random_data(p));
    }
    return TimedCase{p, options, data};
  };
  const std::vector<TimedCase> cases = {
      timed(problem, Pass::backward, Pipeline::unfused),
      timed(problem, Pass::backward, Pipeline::fused),
      timed(probabilities_of(problem), Pass::forward, Pipeline::unfused)};
  std::vector<CaseResult> results = value_or_fail(
      time_cases(cases, machine.spec, {rule_of(common), false, machine.device, common.counters}));
  return {std::move(results[0]), std::move(results[1]), std::move(results[2])};
}

/// What storing takes; null with the reason where no kernel stores the scores of this problem.
void set_stored(const Measured& m, Json& kept) {
  const CaseResult& stored = m.stored;
  kept["stored_s"] = nullptr;
  if (!stored.refusal.empty()) {
    kept["stored_reason"] = stored.refusal;
    return;
  }
  const double recomputed_s = m.recomputed.median_s();
  kept["stored_kernel"] = stored.kernel;
  kept["stored_s"] = number(stored.median_s());
  kept["stored_p10_s"] = number(stored.timing.seconds.p10);
  kept["stored_p90_s"] = number(stored.timing.seconds.p90);
  kept["stored_bound_s"] = number(stored.at_level.time_s);
  kept["stored_workspace_bytes"] = number(stored.workspace_bytes);
  kept["stored_bytes"] = number(stored.cost.bytes);
  kept["stored_counted_bytes"] =
      stored.counted ? number(stored.counted->read + stored.counted->written) : Json();
  kept["stored_over_recomputed"] = number(stored.median_s() / recomputed_s);
  if (m.probabilities.refusal.empty()) {
    const double most = m.probabilities.median_s();
    kept["probabilities_at_most_s"] = number(most);
    kept["stored_over_recomputed_at_least"] = number((stored.median_s() - most) / recomputed_s);
  }
}

BenchRow row_of(const AttentionProblem& problem, const Measured& m, const RecomputeChoice& choice) {
  BenchRow row = measured_row("recompute", m.recomputed);
  row.shape = shape_of(problem, m.recomputed.threads);
  set_one_size(row);
  row.kept["store_predicted_s"] = number(choice.store_time_s);
  row.kept["recompute_predicted_s"] = number(choice.recompute_time_s);
  row.kept["store_over_recompute_predicted"] = number(choice.store_over_recompute);
  row.kept["workspace_bytes"] = number(m.recomputed.workspace_bytes);
  set_stored(m, row.kept);
  row.columns["time_s"] = number(m.recomputed.median_s());
  for (const char* key :
       {"stored_s", "stored_over_recomputed", "stored_over_recomputed_at_least",
        "store_over_recompute_predicted", "workspace_bytes", "stored_workspace_bytes"}) {
    row.columns[key] = row.kept.contains(key) ? row.kept[key] : Json();
  }
  return row;
}

void bench_recompute(const ShapeAxes& axes, const Common& common, Context& context) {
  const auto run_point = [&common](const AttentionProblem& problem, const ThisMachine& machine,
                                   BenchResults& results) {
    const RecomputeChoice choice = value_or_fail(recompute_choice(problem, machine.spec));
    const Measured measured = measure(problem, machine, common);
    if (measured.recomputed.refusal.empty()) {
      results.rows.push_back(row_of(problem, measured, choice));
    }
    for (const CaseResult* one : {&measured.stored, &measured.recomputed}) {
      if (!one->refusal.empty()) {
        results.refuse(*one);
      }
    }
  };
  bench_points("recompute", axes, common, run_point, context);
}

}  // namespace

void add_bench_recompute(CLI::App& bench, Context& context) {
  auto axes = std::make_shared<ShapeAxes>();
  auto common = std::make_shared<Common>();
  axes->seqlens = {1024, 2048};
  CLI::App* command = bench.add_subcommand(
      "recompute", "explain recompute beside the backward, scores stored and recomputed");
  command->footer(
      examples({{"rafter bench recompute --seqlen 1k,2k,4k --heads-q 1", "predicted and measured"},
                {"rafter bench recompute --device cuda --heads-q 16 --head-dim 128 "
                 "--seqlen 1k,4k,16k --out r.jsonl",
                 "on the GPU; one record a point has both"}}));
  add_shapes(*command, *axes);
  add_counters(*command, *common);
  add_common(*command, *common, context);
  command->callback([axes, common, &context] { bench_recompute(*axes, *common, context); });
}

}  // namespace rafter::cli
