#include "cli/bench_common.h"

namespace rafter::cli {

std::vector<DType> dtypes_of(const Common& common, const Device& device) {
  return !common.dtypes.empty()              ? common.dtypes
         : device.kind == Device::Kind::cuda ? std::vector{DType::bf16}
                                             : std::vector{DType::f32};
}

StopRule rule_of(const Common& common) {
  StopRule rule;
  rule.min_time_s = common.time_s;
  rule.max_time_s = 10 * common.time_s;
  return rule;
}

void add_common(CLI::App& command, Common& common, Context& context) {
  add_dtypes(
      command, "--dtype", common.dtypes,
      common.dtypes.empty() ? "element types (default: f32, on a GPU bf16)" : "element types");
  add_length(command, "--threads", common.threads, "threads (0: all cores)", {0, 4096});
  add_real(command, "--time", common.time_s, "least seconds of samples per case", {0.001, 600});
  add_text(command, "--device", common.device,
           "cpu (the default) or cuda with its probe file, else a quick probe; or such a file",
           "cpu|cuda|FILE.json");
  add_text(command, "--out", common.out, "append one record a row to this file", "FILE.jsonl");
  add_text(command, "--baseline", common.baseline,
           "compare with the newest records of this file; exit 1 when a row is slower",
           "FILE.jsonl");
  add_real(command, "--threshold", common.threshold,
           "slower: baseline time over this time is below it, and the intervals are apart",
           {0.01, 1});
  add_format(command, context);
}

void add_counters(CLI::App& command, Common& common) {
  add_switch(command, "--counters", common.counters,
             "also count the bytes at the memory of a GPU, where this machine allows it");
}

void add_what_runs(CLI::App& command, std::vector<Pipeline>& pipelines, std::string& kernel,
                   bool& evidence) {
  add_pipelines(command, pipelines, "which pipelines");
  add_text(command, "--kernel", kernel, "this kernel alone (rafter kernels)", "NAME")
      ->excludes(command.get_option("--pipeline"));
  add_switch(command, "--evidence", evidence,
             "also time twice the work and added FLOPs, to name the wall");
}

Baseline baseline_of(const Common& common) {
  return common.baseline.empty() ? Baseline{} : value_or_fail(read_baseline(common.baseline));
}

namespace {

Json compare_row(const BenchRow& row, const Baseline& baseline, double threshold, bool& slower) {
  const auto found = baseline.find(row.name());
  if (row.kind == "fusing") {
    return "not compared";
  }
  if (found == baseline.end()) {
    return "new";
  }
  const Statistics& s = row.timing.seconds;
  const Comparison comparison =
      compare(found->second, {s.median, s.median_low, s.median_high}, threshold);
  slower = slower || comparison == Comparison::slower;
  return to_string(comparison);
}

Json table_row(const BenchRow& row) {
  Json json = Json::object();
  for (const auto& [key, value] : row.shape.items()) {
    json[key] = value;
  }
  if (!row.columns.empty()) {
    json.update(row.columns);
    return json;
  }
  if (!row.pipeline.empty()) {
    json["pipeline"] = row.pipeline;
  }
  const Statistics& s = row.timing.seconds;
  json["predicted_time_s"] = number(row.predicted.time_s);
  json["time_s"] = number(s.median);
  json["flop_per_s"] = number(row.cost.flops / s.median);
  json["of bound"] = fmt::format("{:.0f}%", 100 * row.bound_s / s.median);
  json["wall"] = row.predicted.ambiguous ? "ambiguous" : to_string(row.predicted.wall);
  json["measured"] = row.wall_measured;
  json["from"] = row.level;
  json["bytes"] = number(row.cost.bytes);
  if (row.more.contains("counted_bytes") && !row.more["counted_bytes"].is_null()) {
    json["counted_bytes"] = row.more["counted_bytes"];
  }
  json["kernel"] = row.kernel;
  if (row.more.contains("tokens_per_s")) {
    json["tokens_per_s"] = row.more["tokens_per_s"];
  }
  return json;
}

// CSV has no nesting: the case's keys become columns of their own.
Json flat_row(const Json& benchmark) {
  Json flat = Json::object();
  for (const auto& [key, value] : benchmark.items()) {
    if (key == "case") {
      for (const auto& [name, axis] : value.items()) {
        flat[name] = axis;
      }
    } else {
      flat[key] = value;
    }
  }
  return flat;
}

/// Counters that were wanted and not had, and counts that the model did not foresee.
void remark_on_counters(const std::vector<BenchRow>& rows, Document& document) {
  constexpr double kApart = 0.1;
  std::int64_t counted = 0, apart = 0;
  std::string reason;
  for (const BenchRow& row : rows) {
    if (!row.more.contains("counted_bytes")) {
      continue;
    }
    if (row.more["counted_bytes"].is_null()) {
      reason = row.more["counted_bytes_reason"].get<std::string>();
      continue;
    }
    ++counted;
    const double ratio = row.more["counted_bytes"].get<double>() / row.cost.bytes;
    apart += ratio < 1 - kApart || ratio > 1 + kApart ? 1 : 0;
  }
  if (!reason.empty()) {
    document.remark("No counted bytes: " + reason);
  }
  if (apart > 0) {
    document.remark(fmt::format(
        "Counted bytes are more than {:.0f}% from the modelled ones in {} of {} rows: scores that "
        "stay in the L2, results that are still in it, tiles read more than once.",
        100 * kApart, apart, counted));
  }
}

}  // namespace

void finish(const std::vector<BenchRow>& rows, const Json& refused, const ThisMachine& machine,
            const Common& common, const Baseline& baseline, Context& context) {
  bool slower = false;
  Json benchmarks = Json::array();
  std::vector<Json> records;
  for (const BenchRow& row : rows) {
    Json json = context.format == Format::table ? table_row(row) : benchmark_json(row);
    if (!common.baseline.empty()) {
      json["against_baseline"] = compare_row(row, baseline, common.threshold, slower);
    }
    benchmarks.push_back(context.format == Format::csv ? flat_row(json) : std::move(json));
    records.push_back(record_json(row, machine.spec));
  }
  if (!common.out.empty()) {
    check(append_records(common.out, records));
  }
  Document document;
  if (context.format == Format::json) {
    document.set("context", benchmark_context(machine.spec));
  }
  document.headline(
      fmt::format("{}; ceilings from {}", machine.spec.title, one_line(machine.source)));
  document.set("benchmarks", std::move(benchmarks)).rows("benchmarks").label("benchmarks", "Rows");
  if (context.format == Format::json) {
    document.set("refused", refused);
  }
  for (const Json& refusal : refused) {
    document.remark(fmt::format("Not run: {}", refusal.at("reason").get<std::string>()));
  }
  if (!machine.noisy.empty()) {
    document.remark(fmt::format("Noisy ceilings: {}", fmt::join(machine.noisy, ", ")));
  }
  remark_on_counters(rows, document);
  document.remark(
      "Bytes are modelled. A row that is not from memory is cache-resident: its bound takes the "
      "bandwidth of the level named.");
  document.print(context);
  if (slower) {
    context.exit = Exit::check_failed;
  }
}

BenchRow measured_row(const char* kind, const CaseResult& result) {
  BenchRow row;
  row.kind = kind;
  row.pipeline = to_string(result.pipeline);
  row.kernel = result.kernel;
  row.cost = result.cost;
  row.predicted = result.at_level;
  row.bound_s = result.at_level.time_s;
  row.level = result.level.name;
  row.timing = result.timing;
  row.wall_measured = to_string(result.measured.wall);
  row.wall_reason = result.measured.reason;
  const WallVerdict& m = result.measured;
  row.more["declared_bytes"] = number(result.declared_bytes);
  row.more["workspace_bytes"] = number(result.workspace_bytes);
  row.more["working_set_bytes"] = number(result.working_set_bytes);
  row.more["predicted_from_memory_s"] = number(result.predicted.time_s);
  row.more["elasticity"] = m.has_elasticity ? number(m.elasticity) : Json();
  row.more["flop_exponent"] = m.has_flop_exponent ? number(m.flop_exponent) : Json();
  const auto seconds = [](const Statistics& s) { return s.n > 0 ? number(s.median) : Json(); };
  row.more["time_stream_s"] = seconds(result.evidence.seconds_stream);
  row.more["time_graph_s"] = seconds(result.evidence.seconds_graph);
  row.more["launch_share"] = m.has_launch_share ? number(m.launch_share) : Json();
  set_counted(result, row.more);
  return row;
}

void predict_row(BenchRow& row, const DeviceSpec& spec) {
  const Level level = level_of(spec, row.cost.bytes);
  row.predicted = value_or_fail(predict_at(row.cost, spec, level.bandwidth_bytes_per_s));
  row.bound_s = row.predicted.time_s;
  row.level = level.name;
  set_one_size(row);
}

void set_one_size(BenchRow& row) {
  row.wall_measured = to_string(MeasuredWall::ambiguous);
  row.wall_reason = "only one size of work was timed";
}

void check_dtypes(const std::vector<DType>& dtypes) {
  for (DType dtype : dtypes) {
    if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16) {
      fail_flag("--dtype", to_string(dtype), "f32, bf16, f16");
    }
  }
}

}  // namespace rafter::cli
