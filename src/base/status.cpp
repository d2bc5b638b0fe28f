#include "rafter/status.h"

namespace rafter {

const char* to_string(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kDeviceError:
      return "device error";
    case StatusCode::kIoError:
      return "i/o error";
  }
  return "unknown";
}

std::string Status::message() const {
  if (is_ok()) {
    return "ok";
  }
  std::string text = parameter_;
  const std::string separator = text.empty() ? "" : ": ";
  switch (code_) {
    case StatusCode::kUnsupported:  // "pipeline: split-kv is not supported: kernel, why; …"
      text += separator + given_ + " is not supported";
      return allowed_.empty() ? text : text + ": " + allowed_;
    case StatusCode::kDeviceError:
    case StatusCode::kIoError:  // "q.npy: header is truncated; …"
      if (!given_.empty()) {
        text += separator + given_;
      }
      return allowed_.empty() ? text : text + "; " + allowed_;
    default:  // "head_dim: 300 given; 1 to 256 allowed"
      if (!given_.empty()) {
        text += separator + given_ + " given";
      }
      return allowed_.empty() ? text : text + "; " + allowed_ + " allowed";
  }
}

}  // namespace rafter
