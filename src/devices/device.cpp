// The device database: figures by key, the built-in devices, and the document form.
#include "rafter/device.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "devices/names.h"

namespace rafter {
namespace devices {
std::span<const std::pair<std::string_view, std::string_view>> embedded_device_files();
}

const char* to_string(Device::Kind kind) { return kind == Device::Kind::cpu ? "cpu" : "cuda"; }

const char* to_string(const std::optional<Device::Kind>& kind) {
  return kind ? to_string(*kind) : "other";
}

const char* to_string(FigureKind kind) {
  return devices::kFigureKinds[static_cast<std::size_t>(kind)].second;
}

const Figure* DeviceSpec::find(std::string_view key) const {
  const auto found = figures.find(key);
  return found == figures.end() ? nullptr : &found->second;
}

Result<double> DeviceSpec::value(std::string_view key) const {
  const Figure* figure = find(key);
  if (figure == nullptr) {
    return Status::invalid_argument("device", fmt::format("{}, which has no {}", name, key),
                                    "a device with that figure");
  }
  return figure->value;
}

Result<double> DeviceSpec::peak(DType dtype) const {
  static const auto kKeys = [] {  // by dtype: planning asks several times
    std::array<std::string, static_cast<std::size_t>(DType::i64) + 1> keys;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      keys[i] = fmt::format("peak_{}_flop_per_s", to_string(static_cast<DType>(i)));
    }
    return keys;
  }();
  return value(kKeys[static_cast<std::size_t>(dtype)]);
}

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const auto& [file, text] : devices::embedded_device_files()) {
    names.emplace_back(file.substr(0, file.size() - std::string_view(".json").size()));
  }
  std::ranges::sort(names);
  return names;
}

Result<DeviceSpec> find_device(std::string_view name) {
  for (const auto& [file, text] : devices::embedded_device_files()) {
    if (file.substr(0, file.size() - std::string_view(".json").size()) == name) {
      return parse_device(text);
    }
  }
  std::string known;
  for (const std::string& each : device_names()) {
    known += (known.empty() ? "" : ", ") + each;
  }
  return Status::invalid_argument("device", std::string(name), known);
}

std::string to_json(const DeviceSpec& spec) {
  using nlohmann::ordered_json;
  ordered_json figures = ordered_json::object();
  for (const auto& [key, f] : spec.figures) {
    ordered_json entry = {
        {"value", f.value}, {"unit", f.unit}, {"kind", to_string(f.kind)}, {"source", f.source}};
    if (f.low > 0 || f.high > 0) {
      entry["low"] = f.low;
      entry["high"] = f.high;
    }
    if (f.samples > 0) {
      entry["samples"] = f.samples;
    }
    figures[key] = std::move(entry);
  }
  ordered_json document = {{"name", spec.name},
                           {"title", spec.title},
                           {"kind", to_string(spec.kind)},
                           {"figures", std::move(figures)}};
  if (!spec.notes.empty()) {
    document["notes"] = spec.notes;
  }
  return document.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string probe_path(Device::Kind kind) {
  const std::string file = fmt::format("/{}.json", to_string(kind));
  const auto set = [](const char* variable) -> const char* {
    const char* value = std::getenv(variable);
    return value != nullptr && *value != '\0' ? value : nullptr;
  };
  if (const char* home = set("RAFTER_HOME")) {
    return home + file;
  }
  if (const char* cache = set("XDG_CACHE_HOME")) {
    return std::string(cache) + "/rafter" + file;
  }
  if (const char* home = set("HOME")) {
    return std::string(home) + "/.cache/rafter" + file;
  }
  return "/tmp/rafter" + file;
}

}  // namespace rafter
