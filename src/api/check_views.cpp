#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <vector>

#include "api/checks.h"
#include "base/checked.h"

namespace rafter::api {
namespace {

/// Addresses of a view's elements relative to its data pointer, in elements: [first, last].
struct Extent {
  std::int64_t first = 0, last = 0;
};

std::optional<Extent> extent_of(const View& view) {
  Extent extent;
  for (int d = 0; d < view.rank; ++d) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(view.size[d] - 1, view.stride[d], &reach)) {
      return std::nullopt;
    }
    std::int64_t& end = reach < 0 ? extent.first : extent.last;
    if (__builtin_add_overflow(end, reach, &end)) {
      return std::nullopt;
    }
  }
  return extent;
}

bool has_elements(const View& view) {
  return std::all_of(view.size, view.size + view.rank, [](std::int64_t n) { return n > 0; });
}

std::int64_t bytes_of_element(const View& view) { return bits_of(view.dtype) / 8; }

/// Byte addresses [first, last) that a view touches.
struct Bytes {
  std::uintptr_t first = 0, last = 0;
};
Bytes bytes_of_view(const View& view) {
  const Extent extent = *extent_of(view);
  const auto base = reinterpret_cast<std::uintptr_t>(view.data);
  const std::int64_t element = bytes_of_element(view);
  return {base + static_cast<std::uintptr_t>(extent.first * element),
          base + static_cast<std::uintptr_t>((extent.last + 1) * element)};
}

/// Bytes that a view touches within one period of `period` bytes, when all its strides are either
/// multiples of the period or stay inside it: [first, last) relative to the data pointer.
struct Lane {
  std::int64_t first = 0, last = 0;
};
std::optional<Lane> lane_of(const View& view, std::int64_t period) {
  const std::int64_t element = bytes_of_element(view);
  Lane lane{0, element};
  for (int d = 0; d < view.rank; ++d) {
    const std::int64_t step = view.stride[d] * element;
    if (view.size[d] == 1 || step % period == 0) {
      continue;
    }
    const std::int64_t reach = (view.size[d] - 1) * step;
    (reach < 0 ? lane.first : lane.last) += reach;
  }
  if (lane.last - lane.first > period) {
    return std::nullopt;
  }
  return lane;
}

/// Two views whose bytes interleave with a common period, in lanes that do not meet.
bool in_separate_lanes(const View& a, const View& b, std::int64_t period) {
  const std::optional<Lane> lane_a = lane_of(a, period);
  const std::optional<Lane> lane_b = lane_of(b, period);
  if (!lane_a || !lane_b) {
    return false;
  }
  const auto distance = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(b.data) -
                                                  reinterpret_cast<std::uintptr_t>(a.data));
  // Start of b's lane after the start of a's, in [0, period).
  const std::int64_t gap =
      (((distance + lane_b->first - lane_a->first) % period) + period) % period;
  const std::int64_t length_a = lane_a->last - lane_a->first;
  const std::int64_t length_b = lane_b->last - lane_b->first;
  return gap >= length_a && gap + length_b <= period;
}

}  // namespace

View view_of(std::string_view name, const TensorView& t) {
  return {.name = name,
          .data = t.data,
          .dtype = t.dtype,
          .rank = 4,
          .size = {t.batch, t.seqlen, t.heads, t.head_dim},
          .stride = {t.stride_batch, t.stride_seqlen, t.stride_heads, t.stride_head_dim},
          .dim_name = {"batch", "seqlen", "heads", "head_dim"}};
}

View view_of(std::string_view name, const LseView& lse) {
  return {.name = name,
          .data = lse.data,
          .dtype = DType::f32,
          .rank = 3,
          .size = {lse.batch, lse.heads, lse.seqlen, 1},
          .stride = {lse.stride_batch, lse.stride_heads, lse.stride_seqlen, 0},
          .dim_name = {"batch", "heads", "seqlen", ""}};
}

Status check_memory(const View& view) {
  if (!has_elements(view)) {
    return Status::ok();
  }
  const std::string name(view.name);
  if (view.data == nullptr) {
    return Status::invalid_argument(name, "null", "a pointer to its elements");
  }
  const std::int64_t element = bytes_of_element(view);
  if (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(element) != 0) {
    return Status::invalid_argument(
        name + ".data", "an address that is not a multiple of " + std::to_string(element),
        "addresses aligned to the element");
  }
  const std::optional<Extent> extent = extent_of(view);
  constexpr std::int64_t kLimit = std::int64_t{1} << 59;  // ×8 bytes stays within 63 bits
  if (!extent || extent->last > kLimit || extent->first < -kLimit) {
    return Status::invalid_argument(name + " strides", "an extent beyond 2^59 elements",
                                    "extents below 2^59 elements");
  }
  return Status::ok();
}

Status check_no_self_overlap(const View& view) {
  if (!has_elements(view)) {
    return Status::ok();
  }
  // Dims by ascending |stride|: an insertion sort of at most four.
  std::array<int, 4> order = {0, 1, 2, 3};
  for (std::size_t i = 1; i < order.size(); ++i) {
    for (std::size_t j = i;
         j > 0 && std::abs(view.stride[order[j]]) < std::abs(view.stride[order[j - 1]]); --j) {
      std::swap(order[j], order[j - 1]);
    }
  }
  std::int64_t inner = 0;  // reach of the dims with smaller strides
  for (const int d : order) {
    if (view.size[d] == 1) {  // also the dims beyond the rank
      continue;
    }
    const std::int64_t stride = std::abs(view.stride[d]);
    if (stride <= inner) {
      return Status::invalid_argument(
          std::string(view.name) + ".stride_" + view.dim_name[d], std::to_string(view.stride[d]),
          "strides of an output that keep its elements apart: here more than " +
              std::to_string(inner));
    }
    inner += (view.size[d] - 1) * stride;
  }
  return Status::ok();
}

Status check_disjoint(const View& output, const View& other) {
  if (!has_elements(output) || !has_elements(other) || output.data == nullptr ||
      other.data == nullptr) {
    return Status::ok();
  }
  const Bytes a = bytes_of_view(output);
  const Bytes b = bytes_of_view(other);
  if (a.last <= b.first || b.last <= a.first) {
    return Status::ok();
  }
  for (int d = 0; d < output.rank; ++d) {
    const std::int64_t period = std::abs(output.stride[d]) * bytes_of_element(output);
    if (output.size[d] > 1 && period > 0 && in_separate_lanes(output, other, period)) {
      return Status::ok();
    }
  }
  return Status::invalid_argument(std::string(output.name),
                                  "memory that overlaps " + std::string(other.name),
                                  "an output apart from all other tensors");
}

bool same_place(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.stride_batch == b.stride_batch &&
         a.stride_seqlen == b.stride_seqlen && a.stride_heads == b.stride_heads &&
         a.stride_head_dim == b.stride_head_dim;
}
bool same_place(const LseView& a, const LseView& b) {
  return a.data == b.data && a.stride_batch == b.stride_batch && a.stride_heads == b.stride_heads &&
         a.stride_seqlen == b.stride_seqlen;
}

}  // namespace rafter::api
