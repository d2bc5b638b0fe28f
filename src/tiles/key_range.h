// Which keys a query row sees, in integers. Shared by kernels, cost models and the public
// visible_keys().
#pragma once

#include <algorithm>
#include <cstdint>

namespace rafter::tiles {

template <typename Int>
struct BasicRange {
  Int first = 0, last = 0;  // half-open; empty when first >= last
  constexpr Int size() const { return last > first ? last - first : 0; }
};
using Range = BasicRange<std::int64_t>;

/// The mask of one sequence: row i sees [i + offset − left, i + offset + right] ∩ [0, seqlen_kv),
/// −1 unbounded. Int holds every sum of a row, a length and a window.
template <typename Int>
struct BasicMaskWindow {
  using Range = BasicRange<Int>;

  Int left = -1, right = -1;
  Int offset = 0;  // seqlen_kv − seqlen_q for bottom-right, 0 for top-left
  Int seqlen_kv = 0;

  constexpr Range row(Int i) const {
    const Int diagonal = i + offset;
    const Int first = left < 0 ? 0 : std::max<Int>(0, diagonal - left);
    const Int last = right < 0 ? seqlen_kv : std::min<Int>(seqlen_kv, diagonal + right + 1);
    return first < last ? Range{first, last} : Range{0, 0};
  }
  /// Smallest range that covers every key any of the rows [begin, end) sees.
  constexpr Range hull(Int begin, Int end) const {
    if (begin >= end) {
      return {};
    }
    const Int first = left < 0 ? 0 : std::max<Int>(0, begin + offset - left);
    const Int last = right < 0 ? seqlen_kv : std::min<Int>(seqlen_kv, end - 1 + offset + right + 1);
    return first < last ? Range{first, last} : Range{0, 0};
  }
  /// The same mask from the keys' side: its row(j) are the query rows, of `rows`, that see key j.
  constexpr BasicMaskWindow transposed(Int rows) const { return {right, left, -offset, rows}; }
};
using MaskWindow = BasicMaskWindow<std::int64_t>;

}  // namespace rafter::tiles
