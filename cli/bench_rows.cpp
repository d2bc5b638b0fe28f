#include "cli/bench_rows.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>

#include "cli/files.h"

namespace rafter::cli {
namespace {

constexpr std::size_t kMostRecordBytes = std::size_t{256} << 20;

std::string note_of(const DeviceSpec& spec, std::string_view key) {
  const auto note = spec.notes.find(key);
  return note == spec.notes.end() ? std::string() : note->second;
}

std::string now_of(std::string_view wanted) {
  for (const auto& [key, value] : describe_this_machine()) {
    if (key == wanted) {
      return value;
    }
  }
  return {};
}

}  // namespace

std::string BenchRow::name() const {
  std::string name = kind;
  for (const auto& [key, value] : shape.items()) {
    name += fmt::format("/{}:{}", key, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return pipeline.empty() ? name : fmt::format("{}/{}", name, pipeline);
}

void set_counted(const CaseResult& result, Json& json) {
  if (!result.counted) {
    json["counted_bytes"] = nullptr;
    json["counted_bytes_reason"] = result.counted_reason;
    return;
  }
  json["counted_bytes"] = number(result.counted->read + result.counted->written);
  json["counted_bytes_read"] = number(result.counted->read);
  json["counted_bytes_written"] = number(result.counted->written);
}

Json benchmark_json(const BenchRow& row) {
  const Statistics& s = row.timing.seconds;
  Json json = Json::object();
  json["name"] = row.name();
  json["run_name"] = row.name();
  json["run_type"] = "iteration";
  json["repetitions"] = s.n;
  json["iterations"] = s.n * row.timing.calls_per_sample;
  json["real_time"] = number(s.median * 1e9);
  json["time_unit"] = "ns";
  json["case"] = row.shape;
  json["pipeline"] = row.pipeline.empty() ? Json() : Json(row.pipeline);
  json["kernel"] = row.kernel;
  json["predicted_time_s"] = number(row.predicted.time_s);
  json["time_s"] = number(s.median);
  json["time_p10_s"] = number(s.p10);
  json["time_p90_s"] = number(s.p90);
  json["time_median_low_s"] = number(s.median_low);
  json["time_median_high_s"] = number(s.median_high);
  json["relative_deviation"] = number(s.relative_deviation);
  json["stopped"] = to_string(row.timing.stop);
  json["flops"] = number(row.cost.flops);
  json["flop_per_s"] = number(row.cost.flops / s.median);
  json["bound_s"] = number(row.bound_s);
  json["share_of_bound"] = number(row.bound_s / s.median);
  json["wall_predicted"] = to_string(row.predicted.wall);
  json["near_ridge"] = row.predicted.near_ridge;
  json["ambiguous"] = row.predicted.ambiguous;
  json["wall_measured"] = row.wall_measured;
  json["wall_reason"] = row.wall_reason;
  json["bytes"] = number(row.cost.bytes);
  json["bytes_source"] = "modelled";
  json["bytes_per_s"] = number(row.cost.bytes / s.median);
  json["intensity_flop_per_byte"] = number(row.cost.intensity());
  json["level"] = row.level;
  json["cache_resident"] = row.level != "memory";
  for (const Json* of_kind : {&row.more, &row.kept}) {
    for (const auto& [key, value] : of_kind->items()) {
      json[key] = value;
    }
  }
  return json;
}

Json benchmark_context(const DeviceSpec& spec) {
  Json context = Json::object();
  std::map<std::string, std::string> now;
  for (auto& [key, value] : describe_this_machine()) {
    now[key] = value;
  }
  context["date"] = now["date"];
  context["executable"] = "rafter";
  context["num_cpus"] = std::stoi(now["cores"]);
  const Figure* clock = spec.find("clock_hz");
  context["mhz_per_cpu"] = clock == nullptr ? Json() : Json(std::lround(clock->value / 1e6));
  context["cpu_scaling_enabled"] = nullptr;
  context["cpu_scaling_enabled_reason"] = "not looked at: the clock is measured by the probe";
  context["library_build_type"] = "release";
  for (const char* key : {"commit", "compiler", "cpu", "isa", "kernel", "driver"}) {
    context[key] = now[key];
  }
  context["device"] = spec.name;
  return context;
}

Json record_json(const BenchRow& row, const DeviceSpec& spec) {
  const Statistics& s = row.timing.seconds;
  Json json = Json::object();
  for (const char* key : {"date", "commit", "compiler"}) {
    json[key] = now_of(key);
  }
  json["device"] = spec.name;
  json["cpu"] = note_of(spec, "cpu").empty() ? now_of("cpu") : note_of(spec, "cpu");
  json["driver"] = note_of(spec, "driver").empty() ? now_of("driver") : note_of(spec, "driver");
  const Figure* clock = spec.find("clock_hz");
  json["clock_hz"] = clock == nullptr ? Json() : number(clock->value);
  json["name"] = row.name();
  json["kind"] = row.kind;
  json["kernel"] = row.kernel;
  json["pipeline"] = row.pipeline.empty() ? Json() : Json(row.pipeline);
  json["case"] = row.shape;
  json["repeats"] = s.n;
  json["median_s"] = number(s.median);
  json["p10_s"] = number(s.p10);
  json["p90_s"] = number(s.p90);
  json["median_low_s"] = number(s.median_low);
  json["median_high_s"] = number(s.median_high);
  json["flop_per_s"] = number(row.cost.flops / s.median);
  json["wall"] = row.wall_measured;
  json["wall_predicted"] = to_string(row.predicted.wall);
  json["predicted_s"] = number(row.predicted.time_s);
  json["bound_s"] = number(row.bound_s);
  json["share_of_bound"] = number(row.bound_s / s.median);
  json["level"] = row.level;
  json["bytes"] = number(row.cost.bytes);
  json["bytes_per_s"] = number(row.cost.bytes / s.median);
  for (const char* key : {"counted_bytes", "counted_bytes_read", "counted_bytes_written"}) {
    if (row.more.contains(key)) {
      json[key] = row.more.at(key);
    }
  }
  for (const auto& [key, value] : row.kept.items()) {
    json[key] = value;
  }
  if (const std::string gpu = note_of(spec, "gpu"); !gpu.empty()) {
    json["gpu"] = gpu;
  }
  return json;
}

Result<Baseline> read_baseline(const std::string& path) {
  Result<std::string> text = read_file(path, kMostRecordBytes);
  if (!text) {
    return text.status();
  }
  Baseline baseline;
  std::size_t line_number = 0;
  for (std::size_t begin = 0; begin < text->size();) {
    const std::size_t end = std::min(text->find('\n', begin), text->size());
    const std::string_view line = std::string_view(*text).substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) {
      continue;
    }
    const Json record = Json::parse(line, nullptr, false);
    if (record.is_object() && record.value("kind", Json()) == "fusing") {
      continue;  // a difference, which may be negative
    }
    const auto positive = [&record](const char* key) {
      return record.contains(key) && record[key].is_number() && record[key].get<double>() > 0;
    };
    if (!record.is_object() || !record.contains("name") || !record["name"].is_string() ||
        !positive("median_s") || !positive("median_low_s") || !positive("median_high_s")) {
      return Status::io_error(fmt::format("{}:{}", path, line_number), one_line(line),
                              "a record with name, median_s, median_low_s, median_high_s");
    }
    baseline[record["name"].get<std::string>()] = {record["median_s"].get<double>(),
                                                   record["median_low_s"].get<double>(),
                                                   record["median_high_s"].get<double>()};
  }
  return baseline;
}

Status append_records(const std::string& path, const std::vector<Json>& records) {
  std::string text;
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) {
    Result<std::string> before = read_file(path, kMostRecordBytes);
    if (!before) {
      return before.status();
    }
    text = std::move(before).value();
    if (!text.empty() && text.back() != '\n') {
      text += '\n';
    }
  }
  for (const Json& record : records) {
    text += record.dump() + "\n";
  }
  return write_file(path, text);
}

}  // namespace rafter::cli
