// From the structs of the C ABI to the library's own types. Every function writes its result and
// says what is impossible in what was given.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "rafter/attention.h"
#include "rafter/cache.h"
#include "rafter/rafter.h"

namespace rafter::c_abi {

/// Reads a struct that grows: `size` bytes of it are the caller's, the rest is zero. `least` is the
/// size that its first version had.
template <typename T>
Status read_sized(const T* given, const char* name, std::size_t least, T& out) {
  if (given == nullptr) {
    return Status::invalid_argument(name, "null", "a struct");
  }
  const std::size_t size = given->size;
  if (size < least) {
    return Status::invalid_argument(std::string(name) + ".size", std::to_string(size),
                                    "sizeof of the struct, " + std::to_string(least) + " or more");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      return Status::invalid_argument(
          std::string(name) + ".size", std::to_string(size) + ", with a field that is not zero",
          "fields within the " + std::to_string(sizeof(T)) + " bytes that this library knows");
    }
  }
  out = T{};
  std::memcpy(&out, given, std::min(size, sizeof(T)));
  return Status::ok();
}

/// The size of a struct up to and with its last field of the first version.
#define RAFTER_SIZE_UP_TO(type, field) (offsetof(type, field) + sizeof(type::field))
inline constexpr std::size_t kProblemSize = RAFTER_SIZE_UP_TO(rafter_problem, num_pages);
inline constexpr std::size_t kOptionsSize = RAFTER_SIZE_UP_TO(rafter_plan_options, device_spec);
inline constexpr std::size_t kForwardSize = RAFTER_SIZE_UP_TO(rafter_forward_args, stream);
inline constexpr std::size_t kBackwardSize = RAFTER_SIZE_UP_TO(rafter_backward_args, stream);
inline constexpr std::size_t kAppendSize = RAFTER_SIZE_UP_TO(rafter_append_args, dropped);
inline constexpr std::size_t kCostSize = RAFTER_SIZE_UP_TO(rafter_cost, near_ridge);
#undef RAFTER_SIZE_UP_TO

Status to_problem(const rafter_problem& given, AttentionProblem& out);
Status to_device(rafter_device given, std::int32_t index, Device& out);
Status to_rope_pairs(rafter_rope_pairs given, Rope::Pairs& out);
/// `reserved` of a struct must be 0.
Status reserved(const char* name, std::int32_t value);
CountView to_counts(const rafter_counts& given);
/// Takes RAFTER_PIPELINE_ANY to mean none.
Status to_pipeline(rafter_pipeline given, std::optional<Pipeline>& out);
/// `device_spec` is left to the caller.
Status to_options(const rafter_plan_options& given, Device& device, PlanOptions& out);
Status to_tensor(const char* name, const rafter_tensor& given, TensorView& out);
/// A row of indices; with `table`, a page table.
Status to_indices(const char* name, const rafter_indices& given, bool table, IndexView& out);
LseView to_lse(const rafter_lse& given);
/// A device of the database, or of a file when the text has a '/'.
Result<DeviceSpec> to_device_spec(const char* name_or_path);
rafter_cost to_cost(const Cost& cost, const Prediction& prediction);

}  // namespace rafter::c_abi
