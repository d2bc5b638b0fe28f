#include "cli/output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>

namespace rafter::cli {
namespace {

struct UnitRow {
  std::string_view suffix, unit;
};
// Longest first: "_flop_per_s" before "_per_s" before "_s".
constexpr std::array kUnits = {
    UnitRow{"flop_per_byte", "FLOP/B"},
    UnitRow{"flops_per_s", "FLOP/s"},
    UnitRow{"flop_per_s", "FLOP/s"},
    UnitRow{"bytes_per_s", "B/s"},
    UnitRow{"tokens_per_s", "tokens/s"},
    UnitRow{"exp_per_s", "exp/s"},
    UnitRow{"_per_s", "1/s"},
    UnitRow{"_hz", "Hz"},
    UnitRow{"flops", "FLOP"},
    UnitRow{"bytes", "B"},
    UnitRow{"bytes_at_max", "B"},
    UnitRow{"bytes_per_token", "B"},
    UnitRow{"_s", "s"},
};

/// Columns a terminal gives to UTF-8 text: one per code point, which is right for what we print.
std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
  }));
}

std::string padded(std::string text, std::size_t width, bool right) {
  const std::size_t have = width_of(text);
  if (have >= width) {
    return text;
  }
  const std::string blanks(width - have, ' ');
  return right ? blanks + text : text + blanks;
}

std::string exact(const Json& value) {
  if (value.is_string()) {
    return value.get<std::string>();
  }
  return value.is_null() ? "" : value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string table_text(const std::string& key, const Json& value) {
  if (value.is_null()) {
    return "-";
  }
  if (value.is_boolean()) {
    return value.get<bool>() ? "yes" : "no";
  }
  if (value.is_number()) {
    return table_number(key, value.get<double>());
  }
  if (value.is_array()) {
    const bool nested = !value.empty() && value.front().is_array();
    std::string text;
    for (const Json& element : value) {
      text += (text.empty() ? "" : nested ? " / " : ", ") + table_text(key, element);
    }
    return text;
  }
  return exact(value);
}

bool is_row_array(const Json& value) {
  return value.is_array() && !value.empty() && value.front().is_object();
}

/// Scalars of a tree by their dotted path; arrays of scalars joined by spaces, arrays of objects
/// left out.
void flatten(const std::string& path, const Json& value,
             std::vector<std::pair<std::string, std::string>>& out) {
  if (value.is_object()) {
    for (const auto& [key, child] : value.items()) {
      flatten(path.empty() ? key : path + "." + key, child, out);
    }
  } else if (is_row_array(value)) {
    for (std::size_t i = 0; i < value.size(); ++i) {
      flatten(fmt::format("{}.{}", path, i), value[i], out);
    }
  } else if (value.is_array()) {
    std::string text;
    for (const Json& element : value) {
      text += (text.empty() ? "" : " ") + exact(element);
    }
    out.emplace_back(path, text);
  } else {
    out.emplace_back(path, exact(value));
  }
}

}  // namespace

Json number(double value) {
  if (!std::isfinite(value)) {
    return nullptr;
  }
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (value == std::trunc(value) && std::abs(value) <= kExact) {
    return static_cast<std::int64_t>(value);
  }
  return value;
}

std::string_view unit_of(std::string_view key) {
  for (const UnitRow& row : kUnits) {
    if (key.ends_with(row.suffix)) {
      return row.unit;
    }
  }
  return "";
}

std::string plain_number(double value) {
  if (value == std::trunc(value) && std::abs(value) < 1e15) {
    return fmt::format("{:.0f}", value);
  }
  const double magnitude = std::abs(value);
  if (magnitude >= 1e3 && magnitude < 1e15) {
    return fmt::format("{:.1f}", value);
  }
  return fmt::format("{:.4g}", value);
}

std::string with_si_prefix(double value, std::string_view unit) {
  constexpr std::array<std::string_view, 11> kPrefixes = {"p", "n", "µ", "m", "", "k",
                                                          "M", "G", "T", "P", "E"};
  constexpr int kNone = 4;
  if (value == 0 || !std::isfinite(value)) {
    return fmt::format("{:.4g} {}", value, unit);
  }
  int step = static_cast<int>(std::floor(std::log10(std::abs(value)) / 3 + 1e-12));
  double mantissa = value / std::pow(1000.0, step);
  if (std::abs(mantissa) >= 999.95) {  // would round to 1000
    mantissa /= 1000;
    ++step;
  }
  const bool counted = unit == "B" || unit == "FLOP";  // no milli-bytes
  if (step + kNone < 0 || step + kNone >= static_cast<int>(kPrefixes.size()) ||
      (counted && step < 0)) {
    return fmt::format("{:.4g} {}", value, unit);
  }
  return fmt::format("{:.4g} {}{}", mantissa, kPrefixes[static_cast<std::size_t>(step + kNone)],
                     unit);
}

std::string table_number(std::string_view key, double value) {
  const std::string_view unit = unit_of(key);
  if (unit.empty()) {
    return plain_number(value);
  }
  if (unit == "FLOP/B") {
    return fmt::format("{} {}", plain_number(value), unit);
  }
  return with_si_prefix(value, unit);
}

std::string csv_field(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) {
    return std::string(text);
  }
  std::string quoted = "\"";
  for (const char c : text) {
    quoted += c;
    if (c == '"') {
      quoted += '"';
    }
  }
  return quoted + "\"";
}

Document& Document::set(std::string_view key, Json value) {
  json_[std::string(key)] = std::move(value);
  return *this;
}
Document& Document::missing(std::string_view key, std::string reason) {
  set(key, Json(nullptr));
  return set(std::string(key) + "_reason", Json(std::move(reason)));
}
Document& Document::label(std::string key, std::string words) {
  labels_[std::move(key)] = std::move(words);
  return *this;
}
Document& Document::headline(std::string sentence) {
  headlines_.push_back(std::move(sentence));
  return *this;
}
Document& Document::remark(std::string sentence) {
  remarks_.push_back(std::move(sentence));
  return *this;
}
Document& Document::hide(std::string key) {
  hidden_.push_back(std::move(key));
  return *this;
}
Document& Document::rows(std::string key) {
  rows_key_ = std::move(key);
  return *this;
}

bool Document::is_hidden(const std::string& key) const {
  return std::find(hidden_.begin(), hidden_.end(), key) != hidden_.end();
}

std::string Document::label_of(const std::string& key) const {
  if (const auto found = labels_.find(key); found != labels_.end()) {
    return found->second;
  }
  std::string words = key;
  for (const std::string_view unit :
       {"_flop_per_byte", "_flops_per_s", "_flop_per_s", "_bytes_per_s", "_s", "_bytes"}) {
    if (words.size() > unit.size() && words.ends_with(unit)) {
      words.resize(words.size() - unit.size());
      break;
    }
  }
  std::replace(words.begin(), words.end(), '_', ' ');
  return words;
}

/// An array of objects with aligned columns: numbers to the right, words to the left.
std::string Document::aligned(const Json& rows) const {
  std::vector<std::string> keys;
  for (const Json& row : rows) {
    for (const auto& [key, value] : row.items()) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end() && !is_hidden(key)) {
        keys.push_back(key);
      }
    }
  }
  std::string out;
  std::vector<std::vector<std::string>> columns;
  std::vector<bool> right;
  for (const std::string& key : keys) {
    std::vector<std::string> column = {label_of(key)};
    bool numeric = true;
    for (const Json& row : rows) {
      const Json value = row.contains(key) ? row[key] : Json();
      numeric = numeric && (value.is_number() || value.is_null());
      column.push_back(table_text(key, value));
    }
    columns.push_back(std::move(column));
    right.push_back(numeric);
  }
  for (std::size_t line = 0; line <= rows.size(); ++line) {
    std::string text;
    for (std::size_t c = 0; c < columns.size(); ++c) {
      std::size_t width = 0;
      for (const std::string& cell : columns[c]) {
        width = std::max(width, width_of(cell));
      }
      const bool last = c + 1 == columns.size();
      text += "  " + padded(columns[c][line], last && !right[c] ? 0 : width, right[c]);
    }
    out += text + "\n";
  }
  return out;
}

std::size_t Document::label_width() const {
  std::size_t width = 24;
  for (const auto& [key, value] : json_.items()) {
    if (is_hidden(key) || is_row_array(value)) {
      continue;
    }
    if (!value.is_object()) {
      width = std::max(width, width_of(label_of(key)));
      continue;
    }
    for (const auto& [name, child] : value.items()) {
      width = std::max(width, width_of(label_of(name)));
    }
  }
  return width;
}

void Document::append_value(std::string& out, const std::string& key, const Json& value) const {
  if (is_row_array(value)) {
    out += fmt::format("\n{}\n{}", label_of(key), aligned(value));
  } else if (value.is_object()) {
    out += fmt::format("\n{}\n", label_of(key));
    for (const auto& [name, child] : value.items()) {
      // A term of a sum has the unit of the sum: bytes_by_term.q is bytes.
      const std::string unit_key = !unit_of(name).empty()                     ? name
                                   : key == "bytes_by_term" || key == "terms" ? name + "_bytes"
                                                                              : name;
      out += fmt::format("  {}  {}\n", padded(label_of(name), label_width(), false),
                         table_text(unit_key, child));
    }
  } else {
    out += fmt::format("  {}  {}\n", padded(label_of(key), label_width(), false),
                       table_text(key, value));
  }
}

std::string Document::table() const {
  std::string out;
  for (const std::string& sentence : headlines_) {
    out += sentence + "\n";
  }
  bool has_scalars = false;
  for (const auto& [key, value] : json_.items()) {
    has_scalars = has_scalars || (!is_hidden(key) && !value.is_object() && !is_row_array(value));
  }
  if (!headlines_.empty() && has_scalars) {
    out += "\n";
  }
  // Scalars first, then the nested parts.
  for (const bool nested : {false, true}) {
    for (const auto& [key, value] : json_.items()) {
      if (!is_hidden(key) && nested == (value.is_object() || is_row_array(value))) {
        append_value(out, key, value);
      }
    }
  }
  for (std::size_t i = 0; i < remarks_.size(); ++i) {
    out += (i == 0 && !out.empty() ? "\n" : "") + remarks_[i] + "\n";
  }
  if (out.starts_with("\n")) {
    out.erase(0, 1);
  }
  return out;
}

std::string Document::csv() const {
  using Flat = std::vector<std::pair<std::string, std::string>>;
  Flat shared;
  for (const auto& [key, value] : json_.items()) {
    if (key != rows_key_ && !(is_row_array(value) && !rows_key_.empty())) {
      flatten(key, value, shared);
    }
  }
  std::vector<Flat> lines;
  if (rows_key_.empty()) {
    lines.emplace_back();
  } else if (json_.contains(rows_key_)) {
    for (const Json& row : json_[rows_key_]) {
      lines.emplace_back();
      flatten("", row, lines.back());
    }
  }
  std::vector<std::string> header;
  for (const auto& [key, value] : shared) {
    header.push_back(key);
  }
  for (const Flat& line : lines) {
    for (const auto& [key, value] : line) {
      if (std::find(header.begin() + static_cast<std::ptrdiff_t>(shared.size()), header.end(),
                    key) == header.end()) {
        header.push_back(key);
      }
    }
  }
  std::string out;
  for (const std::string& key : header) {
    out += (out.empty() ? "" : ",") + csv_field(key);
  }
  out += "\r\n";
  for (const Flat& line : lines) {
    std::string text;
    for (std::size_t c = 0; c < header.size(); ++c) {
      text += c == 0 ? "" : ",";
      const Flat& source = c < shared.size() ? shared : line;
      const auto cell = std::find_if(source.begin(), source.end(),
                                     [&](const auto& entry) { return entry.first == header[c]; });
      text += cell == source.end() ? "" : csv_field(cell->second);
    }
    out += text + "\r\n";
  }
  return out;
}

std::string Document::text(Format format) const {
  switch (format) {
    case Format::json:
      return json_.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
    case Format::csv:
      return csv();
    case Format::table:
      return table();
  }
  return "";
}

void Document::print(const Context& context) const { write_stdout(text(context.format)); }

void write_stdout(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(STDOUT_FILENO, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EPIPE) {
      return;  // the reader has what it wanted
    } else if (errno != EINTR) {
      fail(Status::io_error("stdout", std::strerror(errno)));
    }
  }
}

}  // namespace rafter::cli
