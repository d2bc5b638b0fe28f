// DLPack's exchange interface for C (DLPack 1.3): a library whose array type has it gives memory,
// sizes and its current stream, and allocates, without a call of Python.
// The layout is that of dlpack.h, https://github.com/dmlc/dlpack.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>

namespace rafter::python {

namespace nb = nanobind;

struct DlpackVersion {
  std::uint32_t major, minor;
};

struct ManagedTensor {
  DlpackVersion version;
  void* context;
  void (*deleter)(ManagedTensor* self);
  std::uint64_t flags;  // bit 0: read-only
  nb::dlpack::dltensor tensor;
};
constexpr std::uint64_t kDlpackReadOnly = 1;

/// Functions return 0 when done, else -1 with a Python error set (allocate: `set_error` called).
struct ExchangeApi {
  DlpackVersion version;
  ExchangeApi* previous;  // of a library that also has an older major version
  int (*allocate)(nb::dlpack::dltensor* prototype, ManagedTensor** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*managed_of)(void* object, ManagedTensor** out);
  int (*object_of)(ManagedTensor* tensor, void** out_object);
  /// Borrows: valid while the object lives. May be null.
  int (*borrowed_of)(void* object, nb::dlpack::dltensor* out);
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out_stream);
};

/// That of a type of arrays; null where it has none of major version 1.
inline const ExchangeApi* exchange_api_of(nb::handle type) {
  static const nb::handle kName = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  const nb::object capsule = nb::getattr(type, kName, nb::handle());
  if (!capsule.is_valid() || !PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    return nullptr;
  }
  const auto* api =
      static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api != nullptr && api->version.major > 1) {
    api = api->previous;
  }
  return api != nullptr && api->version.major == 1 ? api : nullptr;
}

}  // namespace rafter::python
