// What a command prints: built once, printed as a table for people, one JSON document, or CSV.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"

namespace rafter::cli {

using Json = nlohmann::ordered_json;  // keeps the order of insertion

/// A number for JSON: whole numbers up to 2^53 print without a fraction; NaN and infinities, which
/// JSON lacks, are null.
Json number(double value);

/// The content of one answer. Keys carry their SI base unit (time_s, bytes, flops,
/// intensity_flop_per_byte, attainable_flop_per_s, …); the table reads the unit off the key.
class Document {
 public:
  Document& set(std::string_view key, Json value);
  Document& set(std::string_view key, double value) { return set(key, number(value)); }
  Document& set(std::string_view key, const char* value) { return set(key, Json(value)); }
  /// A missing value: null, and KEY_reason says why.
  Document& missing(std::string_view key, std::string reason);

  /// Table only: what the key is called (default: the key with its unit taken off).
  Document& label(std::string key, std::string words);
  /// Table only: a plain sentence before or after the figures.
  Document& headline(std::string sentence);
  Document& remark(std::string sentence);
  /// Table only: a key that only programs need.
  Document& hide(std::string key);
  /// The array of objects that is the table of this document: CSV prints one line for each of its
  /// elements, with the document's scalars repeated in front.
  Document& rows(std::string key);

  const Json& json() const { return json_; }
  std::string text(Format format) const;
  /// To stdout in the format asked for.
  void print(const Context& context) const;

 private:
  std::string table() const;
  std::string csv() const;
  bool is_hidden(const std::string& key) const;
  std::string label_of(const std::string& key) const;
  std::size_t label_width() const;  // of the widest label, so that values stand in one column
  void append_value(std::string& out, const std::string& key, const Json& value) const;
  std::string aligned(const Json& rows) const;

  Json json_ = Json::object();
  std::map<std::string, std::string> labels_;
  std::vector<std::string> headlines_, remarks_, hidden_;
  std::string rows_key_;
};

/// Writes all of it to stdout. A reader that has gone away ends the tool quietly; any other failure
/// is an error.
void write_stdout(std::string_view text);

/// 3.35e12, "B/s" → "3.35 TB/s"; four significant digits, decimal prefixes.
std::string with_si_prefix(double value, std::string_view unit);
/// Four significant digits, no prefix; whole numbers in full.
std::string plain_number(double value);
/// The value as a table shows it, by the unit that the key ends in: rates, times and sizes with SI
/// prefixes, ratios and counts without.
std::string table_number(std::string_view key, double value);
/// "" when the key names no unit.
std::string_view unit_of(std::string_view key);

/// One RFC 4180 field: quoted when it holds a comma, a quote or a line break.
std::string csv_field(std::string_view text);

}  // namespace rafter::cli
