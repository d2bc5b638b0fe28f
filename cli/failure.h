// How a command gives up: one line on stderr and an exit code. Thrown by the helpers here, caught
// once, in run_tool (cli/app.cpp).
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "rafter/status.h"

namespace rafter::cli {

/// Exit codes of the tool; CLI.md fixes them.
enum class Exit : int {
  done = 0,
  check_failed = 1,  // a check failed, or it does not fit
  bad_input = 2,     // a flag, a file or a shape; the line on stderr names it and what is allowed
  untrusted = 3,     // a measurement that cannot be trusted
  no_hardware = 77,  // the hardware asked for is not here, or failed
};

/// Carries the Status until run_tool knows which flag its parameter belongs to.
class Failure : public std::exception {
 public:
  Failure(Exit exit, Status status)
      : exit_(exit), status_(std::move(status)), text_(status_.message()) {}
  Exit exit() const { return exit_; }
  const Status& status() const { return status_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  Exit exit_;
  Status status_;
  std::string text_;
};

/// invalid_argument, unsupported, io_error: bad_input; device_error: no_hardware.
Exit exit_of(const Status& status);

/// Ends the command with the exit code of that status. A parameter head_dim that the command has a
/// flag --head-dim for is printed as the flag.
[[noreturn]] void fail(const Status& status);
/// Ends the command with that exit code and "subject: what is wrong".
[[noreturn]] void fail(Exit exit, std::string subject, std::string problem);
/// Ends the command with bad_input and "--flag: GIVEN given; ALLOWED allowed".
[[noreturn]] void fail_flag(std::string flag, std::string given, std::string allowed);

inline void check(const Status& status) {
  if (!status.is_ok()) {
    fail(status);
  }
}
/// The value, or the end of the command.
template <typename T>
T value_or_fail(Result<T> result) {
  if (!result.is_ok()) {
    fail(result.status());
  }
  return std::move(result).value();
}

/// Text from outside made safe for one line: control characters and what is not UTF-8 escaped, cut
/// after 120 bytes (never inside a character), '' when empty.
std::string one_line(std::string_view text);

}  // namespace rafter::cli
