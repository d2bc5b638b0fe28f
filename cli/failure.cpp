#include "cli/failure.h"

#include <fmt/format.h>

namespace rafter::cli {
namespace {

/// Bytes of the printable character that the text starts with; 0 for a control character and for
/// what is not UTF-8.
std::size_t utf8_length(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80U) {
    return first < 0x20U || first == 0x7FU ? 0 : 1;
  }
  const std::size_t length = first >= 0xC2U && first < 0xE0U   ? 2
                             : first >= 0xE0U && first < 0xF0U ? 3
                             : first >= 0xF0U && first < 0xF5U ? 4
                                                               : 0;
  if (length > text.size()) {
    return 0;
  }
  for (std::size_t i = 1; i < length; ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0U) != 0x80U) {
      return 0;
    }
  }
  return length;
}

}  // namespace

Exit exit_of(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return Exit::done;
    case StatusCode::kDeviceError:
      return Exit::no_hardware;
    case StatusCode::kInvalidArgument:
    case StatusCode::kUnsupported:
    case StatusCode::kIoError:
      return Exit::bad_input;
  }
  return Exit::bad_input;
}

void fail(const Status& status) { throw Failure(exit_of(status), status); }

void fail(Exit exit, std::string subject, std::string problem) {
  // The code that prints "subject: problem" as it stands.
  throw Failure(exit, Status::io_error(std::move(subject), std::move(problem)));
}

void fail_flag(std::string flag, std::string given, std::string allowed) {
  throw Failure(Exit::bad_input,
                Status::invalid_argument(std::move(flag), one_line(given), std::move(allowed)));
}

std::string one_line(std::string_view text) {
  constexpr std::size_t kLongest = 120;
  if (text.empty()) {
    return "''";
  }
  std::string line;
  for (std::size_t i = 0; i < text.size();) {
    if (line.size() >= kLongest) {
      return line + "…";
    }
    const std::size_t length = utf8_length(text.substr(i));
    if (length == 0) {
      line += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i]));
      ++i;
    } else {
      line += text.substr(i, length);
      i += length;
    }
  }
  return line;
}

}  // namespace rafter::cli
