#include <algorithm>

#include "rafter/attention.h"
#include "tiles/key_range.h"

namespace rafter {
namespace {

/// The mask of a sequence with windows cut to its size, so that no sum leaves 64 bits.
tiles::MaskWindow window_of(const Mask& mask, std::int64_t seqlen_q, std::int64_t seqlen_kv) {
  const std::int64_t widest = seqlen_q + seqlen_kv;
  return {std::min(mask.window_left, widest), std::min(mask.window_right, widest),
          mask.align == MaskAlign::bottom_right ? seqlen_kv - seqlen_q : 0, seqlen_kv};
}

}  // namespace

KeyRange visible_keys(const Mask& mask, std::int64_t row, std::int64_t seqlen_q,
                      std::int64_t seqlen_kv) {
  if (row < 0 || row >= seqlen_q || seqlen_kv <= 0) {
    return {};
  }
  const tiles::Range range = window_of(mask, seqlen_q, seqlen_kv).row(row);
  return {range.first, range.last};
}

std::int64_t empty_rows(const Mask& mask, std::int64_t seqlen_q, std::int64_t seqlen_kv) {
  if (seqlen_q <= 0) {
    return 0;
  }
  if (seqlen_kv <= 0) {
    return seqlen_q;
  }
  const tiles::MaskWindow window = window_of(mask, seqlen_q, seqlen_kv);
  // Rows whose window ends before key 0: i + offset + right < 0. Rows whose window starts past the
  // last key: i + offset − left ≥ seqlen_kv. A row cannot be both, as left, right ≥ 0 there.
  const std::int64_t before =
      window.right < 0 ? 0 : std::clamp<std::int64_t>(-window.offset - window.right, 0, seqlen_q);
  const std::int64_t past =
      window.left < 0 ? 0
                      : std::clamp<std::int64_t>(
                            seqlen_q - (seqlen_kv + window.left - window.offset), 0, seqlen_q);
  return before + past;
}

}  // namespace rafter
