// Errors are values: Status says what failed, Result<T> is a value or a Status. Nothing here
// throws, prints or exits.
#pragma once

#include <cassert>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace rafter {

enum class StatusCode : std::uint8_t {
  kOk = 0,
  kInvalidArgument,  // the caller gave something impossible; `parameter` names it
  kUnsupported,      // possible, but no kernel of this build or machine does it; says which and why
  kDeviceError,      // the device or the operating system failed
  kIoError,          // a file could not be read or written, or its contents are malformed
};

/// Name of a code in words: "ok", "invalid argument", "unsupported", "device error", "i/o error".
const char* to_string(StatusCode code);

/// Outcome of an operation: a code, the parameter concerned, what was given and what is allowed.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string parameter, std::string given, std::string allowed)
      : code_(code),
        parameter_(std::move(parameter)),
        given_(std::move(given)),
        allowed_(std::move(allowed)) {}

  static Status ok() { return {}; }
  static Status invalid_argument(std::string parameter, std::string given, std::string allowed) {
    return {StatusCode::kInvalidArgument, std::move(parameter), std::move(given),
            std::move(allowed)};
  }
  static Status unsupported(std::string parameter, std::string given, std::string allowed) {
    return {StatusCode::kUnsupported, std::move(parameter), std::move(given), std::move(allowed)};
  }
  static Status device_error(std::string parameter, std::string given, std::string allowed = {}) {
    return {StatusCode::kDeviceError, std::move(parameter), std::move(given), std::move(allowed)};
  }
  static Status io_error(std::string parameter, std::string given, std::string allowed = {}) {
    return {StatusCode::kIoError, std::move(parameter), std::move(given), std::move(allowed)};
  }

  bool is_ok() const { return code_ == StatusCode::kOk; }
  explicit operator bool() const { return is_ok(); }
  StatusCode code() const { return code_; }
  const std::string& parameter() const { return parameter_; }
  const std::string& given() const { return given_; }
  const std::string& allowed() const { return allowed_; }

  /// One line: "head_dim: 300 given; 1 to 256 allowed" (invalid argument),
  /// "pipeline: split-kv is not supported: why" (unsupported), "q.npy: header is truncated; …"
  /// (device and i/o errors: parameter, given, allowed as they are). "ok" when there is no error.
  std::string message() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string parameter_;
  std::string given_;
  std::string allowed_;
};

/// A value or the Status that says why there is none. Using the value of a failed Result is a
/// programming error.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}  // NOLINT: implicit by design
  Result(Status status) : state_(std::move(status)) {
    assert(!std::get<Status>(state_).is_ok());
  }  // NOLINT

  bool is_ok() const { return std::holds_alternative<T>(state_); }
  explicit operator bool() const { return is_ok(); }
  Status status() const { return is_ok() ? Status::ok() : std::get<Status>(state_); }
  T& value() & { return std::get<T>(state_); }
  const T& value() const& { return std::get<T>(state_); }
  T&& value() && { return std::get<T>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace rafter
