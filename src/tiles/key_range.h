// Which keys a query row sees, in integers. Shared by kernels, cost models and the public
// visible_keys().
#pragma once

#include <algorithm>
#include <cstdint>

namespace rafter::tiles {

struct Range {
  std::int64_t first = 0, last = 0;  // half-open; empty when first >= last
  constexpr std::int64_t size() const { return last > first ? last - first : 0; }
};

/// The mask of one sequence: row i sees [i + offset − left, i + offset + right] ∩ [0, seqlen_kv),
/// −1 unbounded.
struct MaskWindow {
  std::int64_t left = -1, right = -1;
  std::int64_t offset = 0;  // seqlen_kv − seqlen_q for bottom-right, 0 for top-left
  std::int64_t seqlen_kv = 0;

  constexpr Range row(std::int64_t i) const {
    const std::int64_t diagonal = i + offset;
    const std::int64_t first = left < 0 ? 0 : std::max<std::int64_t>(0, diagonal - left);
    const std::int64_t last =
        right < 0 ? seqlen_kv : std::min<std::int64_t>(seqlen_kv, diagonal + right + 1);
    return first < last ? Range{first, last} : Range{0, 0};
  }
  /// Smallest range that covers every key any of the rows [begin, end) sees.
  constexpr Range hull(std::int64_t begin, std::int64_t end) const {
    if (begin >= end) {
      return {};
    }
    const std::int64_t first = left < 0 ? 0 : std::max<std::int64_t>(0, begin + offset - left);
    const std::int64_t last =
        right < 0 ? seqlen_kv : std::min<std::int64_t>(seqlen_kv, end - 1 + offset + right + 1);
    return first < last ? Range{first, last} : Range{0, 0};
  }
};

}  // namespace rafter::tiles
