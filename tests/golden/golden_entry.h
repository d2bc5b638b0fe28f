// One entry of golden.json as the API sees it: its inputs become problems, conventions, devices and
// model steps. Nothing here knows an entry's answer.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "rafter/attention.h"
#include "rafter/model.h"
#include "rafter/roofline.h"

namespace rafter::golden {

class Entry {
 public:
  explicit Entry(nlohmann::json entry) : entry_(std::move(entry)) {}

  std::string id() const { return entry_.at("id").get<std::string>(); }
  const nlohmann::json& field(const char* name) const { return entry_.at(name); }
  bool has(const char* input) const { return entry_.at("inputs").contains(input); }
  const nlohmann::json& input(const char* name) const { return entry_.at("inputs").at(name); }
  double number(const char* name) const { return input(name).get<double>(); }
  double number_or(const char* name, double fallback) const {
    return has(name) ? number(name) : fallback;
  }
  std::int64_t whole_or(const char* name, std::int64_t fallback) const {
    return has(name) ? input(name).get<std::int64_t>() : fallback;
  }
  std::vector<double> values() const { return input("values").get<std::vector<double>>(); }
  std::vector<std::vector<double>> blocks(const char* name) const {
    return input(name).get<std::vector<std::vector<double>>>();
  }

  /// bytes_per_element as a dtype of that size.
  DType dtype() const;
  static DType dtype_of_bytes(double bytes);
  Pipeline pipeline() const;
  /// The source's profile with every parameter that the entry states.
  Convention convention() const;
  /// The device named, or one of the entry's own figures.
  DeviceSpec device() const;
  AttentionProblem problem() const;
  AttentionProblem problem(std::int64_t seqlen) const;
  DecodeProblem decode() const;
  ModelConfig model() const;
  ModelStep step(Phase phase) const;
  MemoryProblem memory(Pipeline pipeline) const;

 private:
  nlohmann::json entry_;
};

/// How a failing test names the entry.
inline void PrintTo(const Entry& entry, std::ostream* out) { *out << entry.id(); }

/// All entries of tests/golden/golden.json.
std::vector<Entry> load_entries();

}  // namespace rafter::golden
