#include "cli/npy_output.h"

#include <filesystem>
#include <span>
#include <utility>

#include "cli/failure.h"
#include "cli/npy.h"

namespace rafter::cli {
namespace {

void check_of(const Output& output, const Status& status) {
  if (!status) {
    fail(Status(status.code(), output.label, status.given(), status.allowed()));
  }
}

}  // namespace

Output make_output(std::vector<std::int64_t> shape, const std::string& path,
                   const std::string& flag) {
  Output output{value_or_fail(allocate_array(DType::f32, std::move(shape), flag)),
                {},
                flag + " " + one_line(path)};
  if (!path.empty()) {
    Result<OutputFile> file = OutputFile::create(path);
    check_of(output, file.status());
    output.file = std::move(file).value();
  }
  return output;
}

void write_output(Output& output) {
  if (!output.file) {
    return;
  }
  const std::string header = npy_header(output.array.shape);
  for (const std::span<const std::byte> bytes :
       {std::as_bytes(std::span(header)), std::span<const std::byte>(output.array.span())}) {
    check_of(output, output.file->write(bytes.data(), bytes.size()));
  }
}

void commit_output(Output& output) {
  if (output.file) {
    check_of(output, output.file->commit());
  }
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code none;
  return !a.empty() && (a == b || std::filesystem::equivalent(a, b, none));
}

}  // namespace rafter::cli
