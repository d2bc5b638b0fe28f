// One entry of golden.json as the command line sees it: its inputs become flags. Nothing here
// knows an entry's answer.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

namespace rafter::test {

using Json = nlohmann::ordered_json;

/// Flags by name; a flag without a value has "".
using Flags = std::map<std::string, std::string>;

/// The document of `rafter VERB... FLAGS --format json`. Ends the test (std::runtime_error) when
/// the tool does not answer with one; exit code 1 (it does not fit) still carries a document.
const Json& ask(const std::string& verb, const Flags& flags);

class Entry {
 public:
  explicit Entry(Json entry) : entry_(std::move(entry)) {}

  std::string id() const { return entry_.at("id").get<std::string>(); }
  const Json& field(const char* name) const { return entry_.at(name); }
  bool has(const char* input) const { return entry_.at("inputs").contains(input); }
  const Json& input(const char* name) const { return entry_.at("inputs").at(name); }
  double number(const char* name) const { return input(name).get<double>(); }
  std::int64_t whole(const char* name, std::int64_t fallback) const {
    return has(name) ? input(name).get<std::int64_t>() : fallback;
  }
  std::vector<double> values() const { return input("values").get<std::vector<double>>(); }
  /// An input of nested lists as the flag takes it: [[1, 2], [3, 5]] is "1,2/3,5".
  std::string blocks(const char* name) const;

  static std::string dtype_of_bytes(double bytes);

  /// --convention with each parameter that the entry states, and its device.
  Flags counting() const;
  Flags attention() const;
  Flags decode() const;
  Flags gemm() const;
  Flags model() const;
  Flags memory() const;
  Flags tiling() const;

 private:
  std::string dtype() const;
  void copy(Flags& flags, const char* flag, const char* input_name) const;

  Json entry_;
};

/// How a failing test names its entry.
inline void PrintTo(const Entry& entry, std::ostream* out) { *out << entry.id(); }

/// All entries of tests/golden/golden.json.
std::vector<Entry> load_entries();

}  // namespace rafter::test
