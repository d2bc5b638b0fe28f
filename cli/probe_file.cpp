#include "cli/probe_file.h"

#include <fmt/format.h>

#include <filesystem>

#include "cli/files.h"

namespace rafter::cli {

double figure_spread(const Figure& figure) {
  return figure.high > 0 ? (figure.high - figure.low) / figure.high : 0;
}

void write_probe(const DeviceSpec& spec, const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) {
      fail(Status::io_error(folder.string(), error.message()));
    }
  }
  check(write_file(path, to_json(spec)));
}

Json figure_rows(const DeviceSpec& spec, Format format) {
  Json rows = Json::array();
  for (const auto& [key, figure] : spec.figures) {
    Json row = Json::object();
    row["figure"] = key;
    const bool measured = figure.samples > 0;
    if (format == Format::table) {
      row["value"] = figure.unit == "1" ? plain_number(figure.value)
                                        : with_si_prefix(figure.value, figure.unit);
      row["spread"] = measured ? fmt::format("{:.0f}%", 100 * figure_spread(figure)) : "";
      row["samples"] = measured ? fmt::format("{}", figure.samples) : "";
    } else {
      row["value"] = number(figure.value);
      row["unit"] = figure.unit;
      row["low"] = measured ? number(figure.low) : Json();
      row["high"] = measured ? number(figure.high) : Json();
      row["samples"] = figure.samples;
      row["noisy"] = measured && figure_spread(figure) > kNoisySpread;
    }
    row["kind"] = to_string(figure.kind);
    row["source"] = figure.source;
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace rafter::cli
