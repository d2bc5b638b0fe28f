// Arrays of results that go to .npy files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/array.h"
#include "cli/files.h"

namespace rafter::cli {

/// An array of float32 and the file it goes to; without a path none.
struct Output {
  Array array;
  std::optional<OutputFile> file;
  std::string label;  // flag and path, for what may fail
};

/// The temporary file is made before the work, so that a folder that cannot be written is refused
/// at once.
Output make_output(std::vector<std::int64_t> shape, const std::string& path,
                   const std::string& flag);
/// Writes the array behind its header; the file appears under its name in commit_output() only.
void write_output(Output& output);
void commit_output(Output& output);

/// The same path, or another way to the same file; false of no path.
bool same_file(const std::string& a, const std::string& b);

}  // namespace rafter::cli
