// Files of the tool: read whole with a limit, written to a temporary file beside the target and
// renamed, so that a failure or an interrupt leaves nothing half-written behind.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "rafter/status.h"

namespace rafter::cli {

/// The whole file. Errors (io_error, the path as parameter): cannot be opened, is a directory, is
/// larger than most_bytes.
Result<std::string> read_file(const std::string& path, std::size_t most_bytes);

/// One file being written. Nothing is seen under its name before commit(); without a commit the
/// destructor, or an interrupt (SIGINT, SIGTERM, SIGHUP), removes what was written.
class OutputFile {
 public:
  /// Errors: io_error with the path as parameter, when its folder cannot be written or it is one.
  static Result<OutputFile> create(const std::string& path);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&& other) noexcept;
  ~OutputFile();

  Status write(const void* data, std::size_t bytes);
  Status commit();

 private:
  OutputFile() = default;
  void discard() noexcept;

  std::string path_, target_, temporary_;  // temporary_ is empty for devices such as /dev/stdout
  int descriptor_ = -1;
  int slot_ = -1;  // in the list that the signal handler removes
};

/// create, write, commit.
Status write_file(const std::string& path, std::string_view contents);

}  // namespace rafter::cli
