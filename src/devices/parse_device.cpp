// Reads a device document. Input is not trusted: size and depth are bounded, doubled and unknown
// keys are refused, and nothing thrown by the JSON library gets out.
#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "devices/names.h"
#include "rafter/device.h"

namespace rafter {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxBytes = std::size_t{1} << 20;
constexpr int kMaxDepth = 8;  // a document needs 3: itself, figures, one figure
constexpr std::size_t kMaxText = 2000;

Status wrong(std::string key, std::string given, std::string allowed) {
  return Status::invalid_argument(std::move(key), std::move(given), std::move(allowed));
}

/// A key as it may be shown: short, printable.
std::string shown(std::string_view text) {
  std::string out;
  for (const char ch : text.substr(0, 60)) {
    out += ch >= ' ' && ch != 0x7f ? ch : '?';
  }
  return text.size() > 60 ? out + "..." : out;
}

std::string shown_value(const json& value) {
  if (value.is_structured()) {
    return value.is_array() ? "an array" : "an object";
  }
  return shown(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

/// Watches the parser for what the finished tree no longer shows: doubled keys, too deep nesting.
class Watcher {
 public:
  bool operator()(int depth, json::parse_event_t event, json& value) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        if (depth >= kMaxDepth) {
          fail(wrong("device document", fmt::format("nesting deeper than {}", kMaxDepth),
                     "name, title, kind, figures, notes"));
          return false;
        }
        keys_.emplace_back();
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end:
        if (!keys_.empty()) {
          keys_.pop_back();
        }
        break;
      case json::parse_event_t::key:
        if (!keys_.empty() && value.is_string() &&
            !keys_.back().insert(value.get<std::string>()).second) {
          fail(wrong(shown(value.get<std::string>()), "the key twice", "once"));
        }
        break;
      case json::parse_event_t::value:
        break;
    }
    return true;
  }
  const Status& status() const { return status_; }

 private:
  void fail(Status status) {
    if (status_) {
      status_ = std::move(status);
    }
  }
  std::vector<std::set<std::string>> keys_;
  Status status_;
};

/// Fills `out` with the text at a key. Errors: missing, not text, empty, too long, unprintable.
Status read_text(const json& object, const char* key, const std::string& path, std::string& out) {
  const auto found = object.find(key);
  if (found == object.end()) {
    return wrong(path, "nothing", "text");
  }
  if (!found->is_string()) {
    return wrong(path, shown_value(*found), "text");
  }
  out = found->get<std::string>();
  bool printable = !out.empty() && out.size() <= kMaxText;
  for (const char ch : out) {
    printable = printable && (static_cast<unsigned char>(ch) >= ' ') && ch != 0x7f;
  }
  return printable ? Status::ok()
                   : wrong(path, shown(out), fmt::format("1 to {} printable characters", kMaxText));
}

/// Fills `out` with the positive number at a key; leaves it when the key is not required and
/// absent.
Status read_number(const json& object, const char* key, const std::string& path, bool required,
                   double& out) {
  const auto found = object.find(key);
  if (found == object.end()) {
    return required ? wrong(path, "nothing", "a finite number above 0") : Status::ok();
  }
  if (!found->is_number()) {
    return wrong(path, shown_value(*found), "a finite number above 0");
  }
  out = found->get<double>();
  return std::isfinite(out) && out > 0
             ? Status::ok()
             : wrong(path, shown_value(*found), "a finite number above 0");
}

Status only_keys(const json& object, std::initializer_list<const char*> known,
                 const std::string& where) {
  for (const auto& item : object.items()) {
    bool ok = false;
    std::string list;
    for (const char* key : known) {
      ok = ok || item.key() == key;
      list += (list.empty() ? "" : ", ") + std::string(key);
    }
    if (!ok) {
      return wrong(where, fmt::format("unknown key {}", shown(item.key())), list);
    }
  }
  return Status::ok();
}

Status read_figure(const std::string& key, const json& entry, Figure& figure) {
  const FigureKey* known = nullptr;
  for (const FigureKey& each : figure_keys()) {
    known = each.key == key ? &each : known;
  }
  if (known == nullptr) {
    return wrong("figures", fmt::format("unknown key {}", shown(key)),
                 "the keys of figure_keys(), such as bandwidth_bytes_per_s");
  }
  if (!entry.is_object()) {
    return wrong(key, shown_value(entry), "an object with value, unit, kind, source");
  }
  std::string kind;
  const auto at = [&](const char* field) { return fmt::format("{}.{}", key, field); };
  double samples = 0;
  const Status fields[] = {
      only_keys(entry, {"value", "unit", "kind", "source", "low", "high", "samples"}, key),
      read_number(entry, "value", at("value"), true, figure.value),
      read_text(entry, "unit", at("unit"), figure.unit),
      read_text(entry, "kind", at("kind"), kind),
      read_text(entry, "source", at("source"), figure.source),
      read_number(entry, "low", at("low"), false, figure.low),
      read_number(entry, "high", at("high"), false, figure.high),
      read_number(entry, "samples", at("samples"), false, samples),
  };
  for (const Status& status : fields) {
    if (!status) {
      return status;
    }
  }
  if (figure.unit != known->unit) {
    return wrong(at("unit"), shown(figure.unit), known->unit);
  }
  bool has_kind = false;
  for (const auto& [value, name] : devices::kFigureKinds) {
    if (kind == name) {
      figure.kind = value;
      has_kind = true;
    }
  }
  if (!has_kind) {
    return wrong(at("kind"), shown(kind), "spec, measured, derived, assumed");
  }
  if ((figure.low > 0) != (figure.high > 0) || figure.low > figure.value ||
      (figure.high > 0 && figure.high < figure.value)) {
    return wrong(at("low, high"), fmt::format("{}, {}", figure.low, figure.high),
                 fmt::format("both or neither, around the value {}", figure.value));
  }
  if (samples != std::floor(samples) || samples > 1e15) {
    return wrong(at("samples"), fmt::format("{}", samples), "a whole number");
  }
  figure.samples = static_cast<std::int64_t>(samples);
  return Status::ok();
}

Status read_document(const json& document, DeviceSpec& spec) {
  if (!document.is_object()) {
    return wrong("device document", shown_value(document), "an object");
  }
  std::string kind;
  const Status fields[] = {
      only_keys(document, {"name", "title", "kind", "figures", "notes"}, "device document"),
      read_text(document, "name", "name", spec.name),
      read_text(document, "title", "title", spec.title),
      read_text(document, "kind", "kind", kind),
  };
  for (const Status& status : fields) {
    if (!status) {
      return status;
    }
  }
  if (kind != "cpu" && kind != "cuda" && kind != "other") {
    return wrong("kind", shown(kind), "cpu, cuda, other");
  }
  if (kind != "other") {
    spec.kind = kind == "cpu" ? Device::Kind::cpu : Device::Kind::cuda;
  }
  const auto figures = document.find("figures");
  if (figures == document.end() || !figures->is_object()) {
    return wrong("figures", figures == document.end() ? "nothing" : shown_value(*figures),
                 "an object");
  }
  for (const auto& item : figures->items()) {
    if (Status s = read_figure(item.key(), item.value(), spec.figures[item.key()]); !s) {
      return s;
    }
  }
  const auto notes = document.find("notes");
  if (notes == document.end()) {
    return Status::ok();
  }
  if (!notes->is_object()) {
    return wrong("notes", shown_value(*notes), "an object of texts");
  }
  for (const auto& item : notes->items()) {
    const std::string path = fmt::format("notes.{}", shown(item.key()));
    if (Status s = read_text(*notes, item.key().c_str(), path, spec.notes[item.key()]); !s) {
      return s;
    }
  }
  return Status::ok();
}

}  // namespace

Result<DeviceSpec> parse_device(std::string_view text) {
  if (text.size() > kMaxBytes) {
    return Status::io_error("device document", fmt::format("{} bytes", text.size()),
                            fmt::format("at most {} bytes", kMaxBytes));
  }
  try {  // allow_exceptions is off, but allocation may still fail
    Watcher watcher;
    const json document = json::parse(
        text,
        [&watcher](int depth, json::parse_event_t event, json& value) {
          return watcher(depth, event, value);
        },
        false);
    if (!watcher.status()) {
      return watcher.status();
    }
    if (document.is_discarded()) {
      return Status::io_error("device document", "text that is not JSON", "a JSON object");
    }
    DeviceSpec spec;
    if (Status s = read_document(document, spec); !s) {
      return s;
    }
    return spec;
  } catch (const std::exception& error) {
    return Status::io_error("device document", error.what(), "a JSON object");
  }
}

Result<DeviceSpec> load_device(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return Status::io_error(path, "a file that cannot be opened", "a readable device file");
  }
  std::string text(kMaxBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) {
    return Status::io_error(path, "a file that cannot be read", "a readable device file");
  }
  text.resize(static_cast<std::size_t>(file.gcount()));
  return parse_device(text);
}

}  // namespace rafter
