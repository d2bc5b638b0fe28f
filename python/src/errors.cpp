#include "errors.h"

#include <nanobind/stl/string.h>

#include <string_view>

namespace rafter::python {

void raise(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return;
    case StatusCode::kInvalidArgument:
      throw nb::value_error(status.message().c_str());
    case StatusCode::kUnsupported:
      PyErr_SetString(PyExc_NotImplementedError, status.message().c_str());
      throw nb::python_error();
    case StatusCode::kIoError:
      PyErr_SetString(PyExc_OSError, status.message().c_str());
      throw nb::python_error();
    case StatusCode::kDeviceError:
      break;
  }
  PyErr_SetString(PyExc_RuntimeError, status.message().c_str());
  throw nb::python_error();
}

Status with_names(const Status& status,
                  std::initializer_list<std::pair<const char*, const char*>> names) {
  const std::string_view parameter = status.parameter();
  for (const auto& [theirs, ours] : names) {
    const std::string_view name = theirs;
    const std::string_view rest = parameter.starts_with(name) ? parameter.substr(name.size()) : " ";
    if (rest.empty() || rest.front() == '.' || rest.front() == '[') {
      return {status.code(), ours + std::string(rest), status.given(), status.allowed()};
    }
  }
  return status;
}

void raise_invalid(std::string parameter, std::string given, std::string allowed) {
  throw nb::value_error(
      Status::invalid_argument(std::move(parameter), std::move(given), std::move(allowed))
          .message()
          .c_str());
}

void raise_invalid_value(std::string parameter, nb::handle given, std::string allowed) {
  raise_invalid(std::move(parameter), nb::cast<std::string>(nb::repr(given)), std::move(allowed));
}

}  // namespace rafter::python
