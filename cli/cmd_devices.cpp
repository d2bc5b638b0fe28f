// rafter devices [NAME]: the device database; of one device, every figure with its source.
#include <fmt/format.h>
#include <unistd.h>

#include <memory>

#include "cli/args.h"
#include "cli/command.h"
#include "cli/output.h"

namespace rafter::cli {
namespace {

Json figure_or_null(const DeviceSpec& device, std::string_view key) {
  const Figure* figure = device.find(key);
  return figure == nullptr ? Json(nullptr) : number(figure->value);
}

void list_devices(const Context& context) {
  Json rows = Json::array();
  for (const std::string& name : device_names()) {
    const DeviceSpec device = value_or_fail(find_device(name));
    Json row = Json::object();
    row["device"] = device.name;
    row["peak_bf16_flop_per_s"] = figure_or_null(device, "peak_bf16_flop_per_s");
    row["bandwidth_bytes_per_s"] = figure_or_null(device, "bandwidth_bytes_per_s");
    row["capacity_bytes"] = figure_or_null(device, "capacity_bytes");
    row["title"] = device.title;
    rows.push_back(std::move(row));
  }
  Document document;
  document.headline(
      "Devices that cost models know; `rafter devices NAME` prints every figure and "
      "its source.");
  document.set("devices", std::move(rows)).rows("devices").label("devices", "Devices");
  const std::string probe = probe_path(Device::Kind::cpu);
  const bool probed = access(probe.c_str(), R_OK) == 0;
  document.set("probe_file", probed ? Json(probe) : Json(nullptr));
  if (!probed) {
    document.set("probe_file_reason", "not made yet; `rafter probe` measures this machine");
  }
  document.hide("probe_file").hide("probe_file_reason");
  document.remark(probed ? "This machine, measured: " + probe
                         : "This machine has not been measured yet: `rafter probe` does.");
  document.print(context);
}

/// A figure as the table shows it: in its unit, with an SI prefix where it is a rate or a size.
std::string figure_text(const Figure& figure) {
  return figure.unit == "1" ? plain_number(figure.value)
                            : with_si_prefix(figure.value, figure.unit);
}

void print_device(const std::string& name, const Context& context) {
  const DeviceSpec device = device_of(name, "NAME");
  Document document;
  document.headline(device.title.empty() ? device.name : device.title);
  document.set("device", device.name).set("title", device.title).hide("title");
  document.set("device_kind", to_string(device.kind));
  Json figures = Json::array();
  for (const auto& [key, figure] : device.figures) {
    Json row = Json::object();
    row["figure"] = key;
    // A table rounds and takes prefixes; programs get the SI value with its unit beside it.
    if (context.format == Format::table) {
      row["value"] = figure_text(figure);
    } else {
      row["value"] = number(figure.value);
      row["unit"] = figure.unit;
    }
    row["kind"] = to_string(figure.kind);
    if (figure.samples > 0 && context.format != Format::table) {
      row["low"] = number(figure.low);
      row["high"] = number(figure.high);
      row["samples"] = figure.samples;
    }
    row["source"] = figure.source;
    figures.push_back(std::move(row));
  }
  document.set("figures", std::move(figures)).rows("figures").label("figures", "Figures");
  if (!device.notes.empty()) {
    Json notes = Json::object();
    for (const auto& [key, text] : device.notes) {
      notes[key] = text;
    }
    document.set("notes", std::move(notes)).label("notes", "Notes");
  }
  document.print(context);
}

}  // namespace

void add_devices(CLI::App& app, Context& context) {
  auto name = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "devices", "list the devices that cost models know, or print one with its sources");
  command->footer(examples({{"rafter devices", "the list"},
                            {"rafter devices h100-sxm", "every figure: unit, kind, source"},
                            {"rafter devices ./cpu.json", "a file that `rafter probe` wrote"}}));
  add_text(*command, "NAME", *name, "a device of the list, or a device file", "NAME|FILE.json");
  add_format(*command, context);
  command->callback(
      [name, &context] { name->empty() ? list_devices(context) : print_device(*name, context); });
}

}  // namespace rafter::cli
