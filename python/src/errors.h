// The library's statuses as Python's exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "rafter/status.h"

namespace rafter::python {

namespace nb = nanobind;

/// Raises the exception that a failed Status stands for: ValueError, NotImplementedError or
/// RuntimeError. Does nothing with one that is ok.
void raise(const Status& status);
template <typename T>
T value_or_raise(Result<T> result) {
  raise(result.status());
  return std::move(result).value();
}
/// The same Status, its parameter by the caller's name: of pairs (the library's name, the
/// caller's), the first that is the parameter or what it is a part of.
Status with_names(const Status& status,
                  std::initializer_list<std::pair<const char*, const char*>> names);
[[noreturn]] void raise_invalid(std::string parameter, std::string given, std::string allowed);
/// As raise_invalid, with the object's repr as what was given.
[[noreturn]] void raise_invalid_value(std::string parameter, nb::handle given, std::string allowed);

/// An argument of a type, or a ValueError that names it.
template <typename T>
T argument(const char* name, nb::handle value, const char* allowed) {
  T out{};
  if (!nb::try_cast(value, out)) {
    raise_invalid_value(name, value, allowed);
  }
  return out;
}

}  // namespace rafter::python
