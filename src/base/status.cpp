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
  if (!given_.empty()) {
    text += text.empty() ? given_ : ": " + given_ + " given";
  }
  if (!allowed_.empty()) {
    text += "; " + allowed_ + " allowed";
  }
  return text;
}

}  // namespace rafter
