// .safetensors files: a JSON header of names, dtypes, shapes and offsets, then the elements.
// Source of the format: README of the safetensors project, "Format".
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/array.h"
#include "rafter/status.h"

namespace rafter::cli {

/// A file whose header has been read and checked; tensors are read one by one on demand.
class Safetensors {
 public:
  /// Checks the header's length against the file before reading it, and then every claim: JSON of
  /// the format's shape and nothing else, no name twice, sizes that match shape and dtype, and
  /// offsets that cover the rest of the file with neither overlap nor hole.
  static Result<Safetensors> open(std::shared_ptr<const ByteSource> source);
  static Result<Safetensors> open(const std::string& path, const std::string& flag = {});

  /// Reads the tensor of that name: F32, F16, BF16 or I32, I64 as `expect` says. Its bytes may lie
  /// at any offset, aligned or not. Errors: no such tensor (lists some that are there), another
  /// dtype.
  Result<Array> read(std::string_view name, Expect expect) const;

  bool has(std::string_view name) const { return entries_.find(name) != entries_.end(); }
  std::vector<std::string> names() const;  // sorted
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }

  struct Entry {
    std::string dtype;  // as the file says it: "BF16"
    std::vector<std::int64_t> shape;
    std::int64_t begin = 0, end = 0;  // bytes behind the header
  };

 private:
  Safetensors() = default;
  Status check_entries(std::int64_t data_bytes) const;

  std::shared_ptr<const ByteSource> source_;
  std::int64_t data_offset_ = 0;
  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

}  // namespace rafter::cli
