// One entry of golden.json as the API sees it: its inputs become problems, conventions, devices and
// model steps.
#pragma once

#include <stdexcept>
#include <utility>
#include <vector>

#include "rafter/attention.h"
#include "rafter/model.h"
#include "rafter/roofline.h"
#include "support/golden.h"

namespace rafter::golden {

class Entry : public EntryFields {
 public:
  using EntryFields::EntryFields;

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
};

/// The value of a Result; a failed one ends the test with its message.
template <typename T>
T must(Result<T> result) {
  if (!result) {
    throw std::runtime_error(result.status().message());
  }
  return std::move(result).value();
}

}  // namespace rafter::golden
