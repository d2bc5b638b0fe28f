#include "errors.h"

#include <nanobind/stl/string.h>

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
