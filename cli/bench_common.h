// What the kinds of bench share: their flags, and what becomes of their rows.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/args.h"
#include "cli/bench_rows.h"
#include "cli/output.h"
#include "cli/probe_file.h"
#include "cli/progress.h"
#include "cli/timed_attention.h"
#include "rafter/measure.h"

namespace rafter::cli {

/// What the kinds of bench take.
struct Common {
  std::string device;
  std::string out;
  std::string baseline;
  double threshold = 0.95;
  double time_s = 0.3;
  std::int64_t threads = 0;
  bool counters = true;
  std::vector<DType> dtypes = {};  // none given: f32 on a CPU, bf16 on a GPU
};

/// f32 on a CPU and bf16 on a GPU where none is given.
std::vector<DType> dtypes_of(const Common& common, const Device& device);
StopRule rule_of(const Common& common);
void add_common(CLI::App& command, Common& common, Context& context);
/// --counters of the kinds whose bytes are counted.
void add_counters(CLI::App& command, Common& common);
/// --pipeline, --kernel and --evidence of the kinds that run attention.
void add_what_runs(CLI::App& command, std::vector<Pipeline>& pipelines, std::string& kernel,
                   bool& evidence);
/// Ends the command where one is not among f32, bf16, f16.
void check_dtypes(const std::vector<DType>& dtypes);
/// Read before anything is measured, so that a bad file is refused at once.
Baseline baseline_of(const Common& common);
/// Prints, records and compares the rows.
void finish(const std::vector<BenchRow>& rows, const Json& refused, const ThisMachine& machine,
            const Common& common, const Baseline& baseline, Context& context);
/// What every row of an attention kernel has, the shape left to the caller.
BenchRow measured_row(const char* kind, const CaseResult& result);
/// Predicts a row of one size of work by its cost, at the level of memory that holds its bytes.
void predict_row(BenchRow& row, const DeviceSpec& spec);
/// No wall is told from one size of work.
void set_one_size(BenchRow& row);

/// The rows of a bench, and what could not be run.
struct BenchResults {
  std::vector<BenchRow> rows;
  Json refused = Json::array();

  void refuse(const CaseResult& result) {
    refused.push_back(Json{{"pipeline", to_string(result.pipeline)}, {"reason", result.refusal}});
  }
};

/// Runs `run_point(point, machine, results)` at every point of grid_of(axes, dtypes), then prints
/// the rows; ends the command where there is none.
template <typename Axes, typename RunPoint>
void bench_points(const char* verb, const Axes& axes, const Common& common,
                  const RunPoint& run_point, Context& context) {
  const Baseline baseline = baseline_of(common);
  const ThisMachine machine =
      this_machine(common.device, static_cast<int>(common.threads), false, "bench");
  BenchResults results;
  Progress progress("bench");
  const auto grid = grid_of(axes, dtypes_of(common, machine.device));
  for (std::size_t i = 0; i < grid.size(); ++i) {
    progress.step(fmt::format("point {} of {}", i + 1, grid.size()));
    run_point(grid[i], machine, results);
  }
  if (results.rows.empty()) {
    fail(Exit::bad_input, std::string("bench ") + verb,
         results.refused.front().at("reason").get<std::string>());
  }
  finish(results.rows, results.refused, machine, common, baseline, context);
}

/// Times every point of a grid by each of the pipelines, or by one kernel.
template <typename Axes, typename Row>
void bench_grid(const char* verb, const Axes& axes, const Common& common, PlanOptions options,
                const Row& row_of_result, Context& context) {
  const auto run_point = [&](const AttentionProblem& problem, const ThisMachine& machine,
                             BenchResults& results) {
    options.threads = static_cast<int>(common.threads);
    options.device_spec = &machine.spec;
    options.kernel = axes.kernel;
    options.pipeline = {};
    // A shape that no kernel could take is the user's mistake: the plan says which.
    value_or_fail(attention_cost(problem, Pipeline::fused));
    const std::vector<std::int64_t> lengths = lengths_of(axes, problem);
    std::optional<Qkv> data;  // on a GPU it is made there
    if (machine.device.kind == Device::Kind::cpu) {
      data = value_or_fail(random_data(problem, lengths));
    }
    std::vector<TimedCase> cases;
    if (!axes.kernel.empty()) {
      cases.push_back({problem, options, data, lengths});
    } else {
      for (Pipeline pipeline : axes.pipelines) {
        options.pipeline = pipeline;
        cases.push_back({problem, options, data, lengths});
      }
    }
    const std::vector<CaseResult> timed = value_or_fail(time_cases(
        cases, machine.spec, {rule_of(common), axes.evidence, machine.device, common.counters}));
    for (const CaseResult& result : timed) {
      if (result.refusal.empty()) {
        results.rows.push_back(row_of_result(problem, result));
      } else {
        results.refuse(result);
      }
    }
  };
  bench_points(verb, axes, common, run_point, context);
}

void add_bench_recompute(CLI::App& bench, Context& context);
void add_bench_decode(CLI::App& bench, Context& context);
void add_bench_append(CLI::App& bench, Context& context);
void add_bench_model(CLI::App& bench, Context& context);

}  // namespace rafter::cli
