#include "cli/report_model.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>

#include "cli/args.h"
#include "cli/explain.h"
#include "cli/files.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/report_data.h"

namespace rafter::cli {
namespace {

/// Which colour and mark an operation has on the page.
const char* class_of(const Cost& cost) {
  return cost.matmul_flops == 0 ? "elementwise" : cost.exponentials > 0 ? "attention" : "products";
}

Json operation_json(const StepResult& step, const OperationResult& operation) {
  const OperationGroup& g = operation.group;
  const Statistics& s = operation.timing.seconds;
  const WallVerdict& m = operation.measured;
  return Json{{"operation", g.name},
              {"class", class_of(g.cost)},
              {"kernel", g.kernel},
              {"count", g.count},
              {"flops", number(g.cost.flops)},
              {"bytes", number(g.cost.bytes)},
              {"launches", number(g.cost.launches)},
              {"intensity_flop_per_byte", number(g.cost.intensity())},
              {"predicted_time_s", number(operation.predicted.time_s)},
              {"time_s", number(s.median)},
              {"time_p10_s", number(s.p10)},
              {"time_p90_s", number(s.p90)},
              {"flop_per_s", number(g.cost.flops / s.median)},
              {"bytes_per_s", number(g.cost.bytes / s.median)},
              {"share_of_bound", number(operation.bound_s() / s.median)},
              {"share_of_step", number(s.median / step.best().seconds.median)},
              {"wall_predicted", to_string(operation.predicted.wall)},
              {"wall_measured", to_string(m.wall)},
              {"wall_reason", m.reason},
              {"elasticity", m.has_elasticity ? number(m.elasticity) : Json()},
              {"flop_exponent", m.has_flop_exponent ? number(m.flop_exponent) : Json()},
              {"launch_share", m.has_launch_share ? number(m.launch_share) : Json()},
              {"what_moves", what_moves(operation)},
              {"ceilings", ceilings_json(operation.predicted.ceilings)}};
}

/// A layer's operations in the order they run, each with its mean time, and the step around them.
Json timeline_json(const StepResult& step, const ModelBudget& budget) {
  Json layer = Json::array();
  double predicted = 0, measured = 0;
  for (const std::string& name : step.layer) {
    for (const OperationResult& operation : step.operations) {
      if (operation.group.name != name) {
        continue;
      }
      const auto count = static_cast<double>(operation.group.count);
      const double one_predicted = operation.predicted.time_s / count;
      const double one = operation.timing.seconds.median / count;
      layer.push_back(Json{{"operation", name},
                           {"class", class_of(operation.group.cost)},
                           {"predicted_start_s", number(predicted)},
                           {"predicted_s", number(one_predicted)},
                           {"start_s", number(measured)},
                           {"time_s", number(one)}});
      predicted += one_predicted;
      measured += one;
    }
  }
  double apart = 0;
  for (const OperationResult& operation : step.operations) {
    apart += operation.timing.seconds.median;
  }
  return Json{{"layer", std::move(layer)},
              {"operations_sum_s", number(apart)},
              {"step_s", number(step.best().seconds.median)},
              {"predicted_s", number(budget.time_s)}};
}

Json step_json(const StepResult& step, const Transformer& model, const DeviceSpec& spec) {
  const ModelBudget budget = budget_of(step, model, spec, step.graph.has_value());
  Json operations = Json::array();
  for (const OperationResult& operation : step.operations) {
    operations.push_back(operation_json(step, operation));
  }
  const double best_s = step.best().seconds.median;
  return Json{{"phase", to_string(step.point.phase)},
              {"seqlen", step.point.seqlen},
              {"batch", step.point.batch},
              {"dtype", to_string(model.dtype())},
              {"flops", number(step.cost.flops)},
              {"bytes", number(step.cost.bytes)},
              {"launches", number(step.cost.launches)},
              {"predicted_launches", number(predicted_launches(step, model, spec))},
              {"launches_counted", step.launches_counted ? Json(*step.launches_counted) : Json()},
              {"intensity_flop_per_byte", number(step.cost.intensity())},
              {"ridge_flop_per_byte", number(budget.ridge_flop_per_byte)},
              {"predicted_time_s", number(budget.time_s)},
              {"time_s", number(best_s)},
              {"time_stream_s", number(step.stream->seconds.median)},
              {"time_graph_s", step.graph ? number(step.graph->seconds.median) : Json()},
              {"weights_time_s", number(budget.weights_time_s)},
              {"share_of_bound", number(budget.device_time_s / best_s)},
              {"wall", to_string(budget.wall)},
              {"verdict", budget.verdict()},
              {"ceilings", ceilings_json(budget.ceilings)},
              {"operations", std::move(operations)},
              {"timeline", timeline_json(step, budget)}};
}

/// The roofs that a prefill meets while an idea is not applied, at lengths from 128 on.
Json prefill_ceilings(const Transformer& model, const DeviceSpec& spec, std::int64_t batch) {
  Json lengths = Json::array();
  for (std::int64_t seqlen = 128; seqlen <= (std::int64_t{1} << 17); seqlen *= 2) {
    ModelStep step{.model = model.config().model, .seqlen = seqlen, .batch = batch};
    step.model.dtype = model.dtype();
    const ModelBudget budget = value_or_fail(model_budget(step, spec));
    lengths.push_back(Json{{"seqlen", seqlen},
                           {"flops", number(budget.flops)},
                           {"bytes", number(budget.bytes)},
                           {"intensity_flop_per_byte", number(budget.intensity_flop_per_byte)},
                           {"predicted_time_s", number(budget.time_s)},
                           {"flop_per_s", number(budget.flops / budget.time_s)},
                           {"ceilings", ceilings_json(budget.ceilings)}});
  }
  return lengths;
}

Json method_json(const ThisMachine& machine, const ModelReportOptions& options, double seconds) {
  const bool gpu = machine.device.kind == Device::Kind::cuda;
  Json method = Json::array();
  const auto add = [&method](const char* term, std::string text) {
    method.push_back(Json::array({term, std::move(text)}));
  };
  add("Model",
      fmt::format("{}; {}", one_line(options.model), "random weights unless a folder was given"));
  add("Predicted",
      "the larger of FLOPs over the rate that products sustain and bytes over the bandwidth, and "
      "launches times their cost; of the step, its classes of kernels added up");
  add("Times", gpu ? "medians between events on the device; operations of one name in a graph of "
                     "their own, layer after layer, so that weights are as cold as in the step"
                   : "medians on the steady clock; operations of one name by themselves, layer "
                     "after layer");
  add("Wall, measured",
      "each operation again on two layers of the same model: with twice the sequences, a quarter "
      "of the prompt, twice the width, twice the query heads. Twice the work against once: below a "
      "0.3 exponent dispatch or latency, above 0.9 throughput; of throughput, whether time follows "
      "FLOPs or bytes where the two change by different factors; else the roof that it is near");
  add("Bytes", "modelled");
  add("Took", fmt::format("{:.0f} s", seconds));
  return method;
}

Json table_rows(const Json& report) {
  Json rows = Json::array();
  for (const Json& step : report.at("steps")) {
    const auto row = [&](const Json& from, const std::string& name, const Json& kernel) {
      const bool whole = name == "step";
      rows.push_back(
          Json{{"phase", step.at("phase")},
               {"operation", name},
               {"flops", from.at("flops")},
               {"bytes", from.at("bytes")},
               {"launches", from.at("launches")},
               {"predicted_time_s", from.at("predicted_time_s")},
               {"time_s", from.at("time_s")},
               {"of bound", fmt::format("{:.0f}%", 100 * from.at("share_of_bound").get<double>())},
               {"wall", from.at(whole ? "wall" : "wall_predicted")},
               {"measured", whole ? Json("–") : from.at("wall_measured")},
               {"kernel", kernel},
               {"what would move it", whole ? Json("–") : from.at("what_moves")}});
    };
    row(step, "step", "all of them");
    for (const Json& operation : step.at("operations")) {
      row(operation, operation.at("operation").get<std::string>(), operation.at("kernel"));
    }
  }
  return rows;
}

void print(const Json& report, const ThisMachine& machine, const std::string& path,
           const Context& context) {
  if (context.format == Format::json) {
    print_json(report, path, context);
    return;
  }
  Document document;
  document.headline(fmt::format("{} on {}; ceilings from {}",
                                report.at("model").at("name").get<std::string>(),
                                machine.spec.title, one_line(machine.source)));
  document.set("operations", table_rows(report)).rows("operations");
  document.label("operations", "Predicted beside measured");
  document.remark(fmt::format("The page: {}", one_line(path)));
  document.print(context);
}

}  // namespace

void report_model(const ModelReportOptions& options, Context& context) {
  const auto start = std::chrono::steady_clock::now();
  (void)transformer_config(options.model);  // refused before anything is measured
  Result<OutputFile> file = OutputFile::create(options.out);
  check_page(options.out, file.status());
  ThisMachine machine = this_machine(options.device, 0, options.probe, "report");
  machine.spec = at_sustained_rates(std::move(machine.spec));
  const bool gpu = machine.device.kind == Device::Kind::cuda;
  const std::int64_t seqlen = options.seqlen.value_or(gpu ? 4096 : options.quick ? 128 : 512);
  StepTiming how;
  how.rule.min_time_s = options.quick ? 0.005 : 0.3;
  how.rule.max_time_s = options.quick ? 0.03 : 3;
  Json steps = Json::array();
  Json ceilings;
  std::optional<TransformerConfig> config;
  {
    Progress progress("report");
    how.progress = [&](const std::string& what) { progress.step(what); };
    progress.step("weights");
    const Transformer model =
        transformer_of(options.model, 1, machine.device, gpu ? DType::bf16 : DType::f32);
    config = model.config();
    for (const Phase phase : {Phase::prefill, Phase::decode}) {
      const ModelPoint point{.phase = phase, .seqlen = seqlen, .batch = options.batch};
      steps.push_back(step_json(time_step(point, model, machine.spec, how), model, machine.spec));
    }
    ceilings = prefill_ceilings(model, machine.spec, options.batch);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  Json report = Json::object();
  report["schema"] = "rafter-model-report-1";
  set_machine(machine, fmt::format("{}, random tokens", one_line(config->model.name)), report);
  report["alerts"] = machine_alerts(machine);
  const ModelConfig& m = config->model;
  report["model"] = Json{{"name", m.name},
                         {"hidden_size", m.hidden_size},
                         {"num_hidden_layers", m.num_layers},
                         {"heads_q", m.heads_q},
                         {"heads_kv", m.heads_kv},
                         {"head_dim", m.head_dim},
                         {"intermediate_size", m.intermediate_size},
                         {"vocab_size", m.vocab_size}};
  report["dtype"] = steps[0].at("dtype");
  report["steps"] = std::move(steps);
  report["prefill_ceilings"] = std::move(ceilings);
  report["method"] = method_json(machine, options, seconds);
  report["seconds"] = number(std::round(seconds * 10) / 10);
  const std::string page = report_html(report);
  check_page(options.out, file->write(page.data(), page.size()));
  check_page(options.out, file->commit());
  print(report, machine, options.out, context);
}

}  // namespace rafter::cli
