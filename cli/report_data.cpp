#include "cli/report_data.h"

#include <fmt/format.h>

#include <cmath>
#include <span>

#include "cli/bench_rows.h"

namespace rafter::cli {
namespace {

constexpr Pipeline kPipelines[] = {Pipeline::unfused, Pipeline::half_fused, Pipeline::fused};

std::string note_of(const DeviceSpec& spec, std::string_view key) {
  const auto note = spec.notes.find(key);
  return note == spec.notes.end() ? "unknown" : note->second;
}

struct CeilingRow {
  const char *key, *label;
};
constexpr CeilingRow kCeilings[] = {
    {"peak_f32_flop_per_s", "f32 products"},
    {"sustained_f32_flop_per_s", "f32 products, sustained"},
    {"peak_bf16_flop_per_s", "bf16 products"},
    {"peak_f16_flop_per_s", "f16 products"},
    {"peak_int8_flop_per_s", "int8 products"},
    {"peak_vector_f32_flop_per_s", "f32 multiply-add, registers"},
    {"exp_per_s", "exponentials"},
    {"bandwidth_bytes_per_s", "memory, read"},
    {"bandwidth_write_bytes_per_s", "memory, write"},
    {"bandwidth_copy_bytes_per_s", "memory, copy"},
    {"bandwidth_l3_bytes_per_s", "L3, read"},
    {"bandwidth_l2_bytes_per_s", "L2, read"},
    {"bandwidth_l1_bytes_per_s", "L1, read"},
    {"launch_s", "launch (fork and join)"},
    {"launch_cold_s", "launch, threads asleep"},
    {"clock_hz", "core clock"},
};
constexpr CeilingRow kGpuCeilings[] = {
    {"burst_bf16_flop_per_s", "bf16 products, burst"},
    {"sustained_bf16_flop_per_s", "bf16 products, sustained"},
    {"burst_f16_flop_per_s", "f16 products, burst"},
    {"sustained_f16_flop_per_s", "f16 products, sustained"},
    {"burst_e4m3_flop_per_s", "e4m3 products, burst"},
    {"burst_int8_flop_per_s", "int8 products, burst"},
    {"burst_tf32_flop_per_s", "tf32 products, burst"},
    {"burst_f32_flop_per_s", "f32 products, burst"},
    {"peak_vector_f32_flop_per_s", "f32 multiply-add, registers"},
    {"exp_per_s", "exponentials"},
    {"bandwidth_read_bytes_per_s", "memory, read"},
    {"bandwidth_write_bytes_per_s", "memory, write"},
    {"bandwidth_copy_bytes_per_s", "memory, copy"},
    {"bandwidth_l2_bytes_per_s", "L2, read"},
    {"launch_s", "launch on a stream"},
    {"launch_sync_s", "launch and wait"},
    {"graph_launch_s", "launch in a graph"},
    {"clock_hz", "highest SM clock"},
};

Json ceilings_json(const DeviceSpec& spec) {
  const std::span<const CeilingRow> ceilings =
      spec.kind == Device::Kind::cuda ? std::span<const CeilingRow>(kGpuCeilings) : kCeilings;
  Json rows = Json::array();
  for (const CeilingRow& row : ceilings) {
    const Figure* figure = spec.find(row.key);
    std::string label = row.label;
    if (figure == nullptr && std::string_view(row.key).starts_with("burst_")) {
      figure = spec.find("peak_" + std::string(row.key + 6));  // a data sheet's, of no duration
      label = label.substr(0, label.find(','));
    }
    if (figure == nullptr) {
      continue;
    }
    const bool measured = figure->kind == FigureKind::measured && figure->samples > 0;
    const double spread = measured ? figure_spread(*figure) : 0;
    rows.push_back(Json{
        {"key", row.key},
        {"label", figure->kind == FigureKind::derived ? fmt::format("{} (as f32)", label) : label},
        {"value", number(figure->value)},
        {"unit", figure->unit},
        {"low", number(figure->low)},
        {"high", number(figure->high)},
        {"samples", measured ? figure->samples : 0},
        {"spread", number(spread)},
        {"noisy", spread > kNoisySpread},
        {"kind", to_string(figure->kind)},
        {"source", figure->source}});
  }
  return rows;
}

// The figures that the page's cost model needs.
Json figures_json(const DeviceSpec& spec) {
  Json figures = Json::object();
  for (const auto& [key, figure] : spec.figures) {
    const bool of_use = key == "launch_s" || key == "bandwidth_bytes_per_s" ||
                        key == "bandwidth_l2_bytes_per_s" || key == "bandwidth_l3_bytes_per_s" ||
                        (key.starts_with("peak_") && key.ends_with("_flop_per_s"));
    if (of_use) {
      figures[key] = number(figure.value);
    }
  }
  return figures;
}

Json devices_json(const DeviceSpec& machine) {
  Json devices = Json::array();
  devices.push_back(
      Json{{"name", machine.name}, {"title", "this machine"}, {"figures", figures_json(machine)}});
  for (const std::string& name : device_names()) {
    const Result<DeviceSpec> device = find_device(name);
    if (device) {
      devices.push_back(Json{{"name", name},
                             {"title", device->title.empty() ? name : device->title},
                             {"figures", figures_json(*device)}});
    }
  }
  return devices;
}

Json point_json(const ReportPoint& point) {
  const CaseResult& r = point.result;
  Json json = Json{{"pipeline", to_string(r.pipeline)},
                   {"dtype", to_string(point.problem.dtype)},
                   {"seqlen", point.problem.seqlen_q},
                   {"seqlen_kv", point.problem.seqlen_kv},
                   {"data", point.data}};
  if (!r.refusal.empty()) {
    json["refusal"] = r.refusal;
    return json;
  }
  const Statistics& s = r.timing.seconds;
  json["kernel"] = r.kernel;
  json["predicted_s"] = number(r.at_level.time_s);
  json["predicted_from_memory_s"] = number(r.predicted.time_s);
  json["median_s"] = number(s.median);
  json["p10_s"] = number(s.p10);
  json["p90_s"] = number(s.p90);
  json["median_low_s"] = number(s.median_low);
  json["median_high_s"] = number(s.median_high);
  json["samples"] = s.n;
  json["stopped"] = to_string(r.timing.stop);
  json["flops"] = number(r.cost.flops);
  json["flop_per_s"] = number(r.flop_per_s());
  json["bytes"] = number(r.cost.bytes);
  json["bytes_source"] = "modelled";
  set_counted(r, json);
  json["declared_bytes"] = number(r.declared_bytes);
  json["workspace_bytes"] = number(r.workspace_bytes);
  json["intensity_flop_per_byte"] = number(r.cost.intensity());
  json["ridge_flop_per_byte"] = number(r.at_level.ridge_flop_per_byte);
  json["share_of_bound"] = number(r.share_of_bound());
  json["level"] = r.level.name;
  json["cache_resident"] = r.cache_resident;
  json["time_dispatch_s"] = number(r.at_level.time_dispatch_s);
  json["launches"] = number(r.cost.launches);
  json["wall_predicted"] = r.at_level.ambiguous ? "ambiguous" : to_string(r.at_level.wall);
  json["wall_measured"] = to_string(r.measured.wall);
  json["wall_reason"] = r.measured.reason;
  json["elasticity"] = r.measured.has_elasticity ? number(r.measured.elasticity) : Json();
  json["flop_exponent"] = r.measured.has_flop_exponent ? number(r.measured.flop_exponent) : Json();
  return json;
}

Json accuracy_json(const ReportAccuracy& a) {
  return Json{{"pipeline", to_string(a.pipeline)},
              {"dtype", to_string(a.dtype)},
              {"kernel", a.kernel},
              {"max_abs_error", number(a.max_abs_error)},
              {"relative_rms_error", number(a.relative_rms_error)},
              {"at", Json(a.at)},
              {"limit", number(a.limit)},
              {"ok", a.ok()}};
}

Json alerts_json(const ReportContent& content) {
  Json alerts = machine_alerts(content.machine);
  std::int64_t above = 0;
  for (const ReportPoint& point : content.points) {
    above += point.result.refusal.empty() && point.result.share_of_bound() > 1.02 ? 1 : 0;
  }
  if (above > 0) {
    alerts.push_back(fmt::format(
        "{} row{} quicker than {} bound. A bound is not clamped: the probe's ceiling was too low "
        "(noise, or a clock that has risen since), or the data sat in a nearer cache.",
        above, above == 1 ? " is" : "s are", above == 1 ? "its" : "their"));
  }
  for (const ReportAccuracy& accuracy : content.accuracy) {
    if (!accuracy.ok()) {
      alerts.push_back(fmt::format("{} in {} is further from float64 than the limit.",
                                   to_string(accuracy.pipeline), to_string(accuracy.dtype)));
    }
  }
  return alerts;
}

Json method_json(const ReportContent& content) {
  const DeviceSpec& spec = content.machine.spec;
  Json method = Json::array();
  const auto add = [&method](const char* term, std::string text) {
    method.push_back(Json::array({term, std::move(text)}));
  };
  add("Machine",
      fmt::format("{}; {}; {}", spec.title, note_of(spec, "isa"), note_of(spec, "kernel")));
  add("Ceilings", fmt::format("{}, {}", content.machine.source,
                              "rates are the 90th percentile of their samples, costs the median"));
  add("Data", content.data_source);
  const bool gpu = spec.kind == Device::Kind::cuda;
  add("Times",
      gpu ? "medians between events on the device, each call alone on an L2 that holds "
            "none of its data, pipelines sampled by turns, tensors and workspace allocated "
            "beforehand"
          : "medians on the steady clock, pipelines sampled by turns, tensors and "
            "workspace allocated beforehand, caches warm");
  add("Bound",
      "the larger of FLOPs over the products' peak, modelled bytes over the bandwidth of "
      "the level that holds the working set, and launches times their cost");
  add("Bytes", gpu ? "modelled; counted ones are those of one run at the boundary of the device's "
                     "memory, without what is still in the L2 at its end"
                   : "modelled: no memory counters are read on a CPU");
  add("Wall, measured",
      "twice the work (batch doubled) against once: below a 0.3 exponent dispatch, above 0.9 "
      "throughput; then more FLOPs at constant bytes: time that grows means compute, time that "
      "does "
      "not means bandwidth; an interval across a limit is ambiguous");
  std::string missing;
  for (const auto& [key, reason] : spec.notes) {
    if (key.starts_with("missing_")) {
      missing += fmt::format("{}{} ({})", missing.empty() ? "" : "; ", key.substr(8), reason);
    }
  }
  if (!missing.empty()) {
    add("Not measured", missing);
  }
  add("Took", fmt::format("{:.0f} s", content.seconds));
  return method;
}

}  // namespace

Json model_check_grid() {
  // A device of round figures with a launch cost, so that all three walls occur.
  DeviceSpec device;
  device.name = "check";
  for (const auto& [key, value, unit] :
       {std::tuple{"peak_f32_flop_per_s", 4e12, "FLOP/s"},
        std::tuple{"peak_bf16_flop_per_s", 64e12, "FLOP/s"},
        std::tuple{"bandwidth_bytes_per_s", 1e12, "B/s"}, std::tuple{"launch_s", 3e-6, "s"}}) {
    Figure figure;
    figure.value = value;
    figure.unit = unit;
    figure.kind = FigureKind::assumed;
    figure.source = "the check of the page's cost model";
    device.figures[key] = figure;
  }
  Json grid = Json::array();
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (Pipeline pipeline : kPipelines) {
      for (bool causal : {false, true}) {
        for (const auto& [seqlen_q, seqlen_kv] :
             {std::pair{1, 1}, std::pair{64, 64}, std::pair{100, 33}, std::pair{33, 100},
              std::pair{4096, 4096}, std::pair{1, 65536}}) {
          for (const auto& [batch, heads_q, heads_kv, head_dim] :
               {std::tuple{1, 1, 1, 64}, std::tuple{3, 8, 2, 128}}) {
            AttentionProblem p;
            p.batch = batch;
            p.heads_q = heads_q;
            p.heads_kv = heads_kv;
            p.seqlen_q = seqlen_q;
            p.seqlen_kv = seqlen_kv;
            p.head_dim = p.head_dim_v = head_dim;
            p.dtype = dtype;
            p.mask = causal ? Mask::causal() : Mask::none();
            const Cost cost = value_or_fail(attention_cost(p, pipeline));
            const Prediction prediction = value_or_fail(predict(cost, device));
            grid.push_back(Json{{"problem",
                                 {{"batch", batch},
                                  {"headsQ", heads_q},
                                  {"headsKv", heads_kv},
                                  {"seqlenQ", seqlen_q},
                                  {"seqlenKv", seqlen_kv},
                                  {"headDim", head_dim},
                                  {"headDimV", head_dim},
                                  {"dtype", to_string(dtype)},
                                  {"causal", causal},
                                  {"pipeline", to_string(pipeline)}}},
                                {"figures", figures_json(device)},
                                {"flops", number(cost.flops)},
                                {"bytes", number(cost.bytes)},
                                {"seconds", number(prediction.time_s)},
                                {"ridge", number(prediction.ridge_flop_per_byte)},
                                {"wall", to_string(prediction.wall)}});
          }
        }
      }
    }
  }
  return grid;
}

Json machine_alerts(const ThisMachine& machine) {
  Json alerts = Json::array();
  if (!machine.distrust.empty()) {
    alerts.push_back(fmt::format(
        "The ceilings cannot be trusted: {}. Predictions below inherit it.", machine.distrust));
  }
  if (!machine.noisy.empty()) {
    alerts.push_back(fmt::format(
        "A noisy machine: {} of its measured figures spread over more than {:.0f}% between their "
        "10th and 90th percentile (marked below).",
        machine.noisy.size(), 100 * kNoisySpread));
  }
  return alerts;
}

void set_machine(const ThisMachine& machine, const std::string& data_source, Json& report) {
  const DeviceSpec& spec = machine.spec;
  Json notes = Json::object();
  for (const auto& [key, text] : spec.notes) {
    notes[key] = text;
  }
  report["machine"] = Json{{"name", spec.name},
                           {"title", spec.title},
                           {"notes", notes},
                           {"noisy", Json(machine.noisy)},
                           {"trusted", machine.distrust.empty()}};
  std::map<std::string, std::string> now;
  for (auto& [key, value] : describe_this_machine()) {
    now[key] = value;
  }
  report["subtitle"] = fmt::format("{} · {} · commit {} · {}", now["date"].substr(0, 10),
                                   data_source, now["commit"], now["compiler"]);
  report["date"] = now["date"];
  report["commit"] = now["commit"];
  report["ceilings"] = ceilings_json(spec);
  report["ceilings_note"] = fmt::format(
      "{}. Spread: from the 10th to the 90th percentile, over the latter. “As f32”: the machine "
      "has "
      "no products of that dtype, so operands widen.",
      machine.fresh ? "Probed for this report" : fmt::format("From the {}", machine.source));
  report["figures"] = figures_json(spec);
}

Json report_json(const ReportContent& content) {
  const DeviceSpec& spec = content.machine.spec;
  Json report = Json::object();
  report["schema"] = "rafter-report-1";
  set_machine(content.machine, content.data_source, report);
  report["alerts"] = alerts_json(content);
  Json verdicts = Json::array();
  for (Pipeline pipeline : kPipelines) {
    const Sentence sentence = verdict_sentence(pipeline, content.points);
    verdicts.push_back(Json{{"pipeline", to_string(pipeline)},
                            {"headline", sentence.headline},
                            {"sentence", sentence.text}});
  }
  report["verdicts"] = std::move(verdicts);
  report["shape"] = Json{{"batch", content.shape.batch},
                         {"heads_q", content.shape.heads_q},
                         {"heads_kv", content.shape.heads_kv},
                         {"head_dim", content.shape.head_dim},
                         {"head_dim_v", content.shape.head_dim_v}};
  Json points = Json::array();
  for (const ReportPoint& point : content.points) {
    points.push_back(point_json(point));
  }
  report["points"] = std::move(points);
  report["points_note"] = fmt::format(
      "Batch {}, {} heads, {} KV heads, head_dim {}, no mask, forward. “From” is the level of "
      "memory "
      "that holds the working set; all but “memory” are cache-resident. “Of bound” is predicted "
      "over "
      "measured.",
      content.shape.batch, content.shape.heads_q, content.shape.heads_kv, content.shape.head_dim);
  Json accuracy = Json::array();
  for (const ReportAccuracy& row : content.accuracy) {
    accuracy.push_back(accuracy_json(row));
  }
  report["accuracy"] = std::move(accuracy);
  report["accuracy_note"] = content.accuracy_note;
  report["method"] = method_json(content);
  report["devices"] = devices_json(spec);
  report["model_check"] = model_check_grid();
  report["seconds"] = number(std::round(content.seconds * 10) / 10);
  return report;
}

void print_json(const Json& report, const std::string& path, const Context& context) {
  Document document;
  for (const auto& [key, value] : report.items()) {
    document.set(key, value);
  }
  document.set("file", path);
  document.print(context);
}

}  // namespace rafter::cli
