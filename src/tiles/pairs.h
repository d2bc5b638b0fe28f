// How many (query, key) pairs a mask lets through, in closed form: what the cost models count and
// the kernels do.
#pragma once

#include <algorithm>
#include <cmath>

#include "tiles/key_range.h"

namespace rafter::tiles {

/// Σ over t < x of clamp(t, 0, K), for whole x; its smooth extension for real x.
/// 0 up to x = 0; x (x − 1) / 2 while t stays below K; K for every t beyond.
constexpr double clamped_ramp_sum(double x, double keys) {
  if (x <= 0) {
    return 0;
  }
  if (x <= keys + 1) {
    return x < 1 ? 0 : x * (x - 1) / 2;
  }
  return keys * (keys + 1) / 2 + (x - 1 - keys) * keys;
}

/// Pairs of a sequence with `rows` queries and `keys` keys. Row i sees [i + offset − left, i +
/// offset + right] ∩ [0, keys); a negative side is unbounded. That intersection has
/// clamp(i + offset + right + 1, 0, keys) − clamp(i + offset − left, 0, keys) keys, and the sum
/// over rows of a clamped ramp has a closed form. Lengths may be real (crossovers).
constexpr double pairs(double rows, double keys, double left, double right, double offset) {
  const auto rows_sum = [&](double shift) {  // Σ over i in [0, rows) of clamp(i + shift, 0, keys)
    if (shift >= keys) {  // every row at the upper clamp, however wide the window
      return rows * keys;
    }
    return clamped_ramp_sum(shift + rows, keys) - clamped_ramp_sum(shift, keys);
  };
  const double up_to_last = right < 0 ? rows * keys : rows_sum(offset + right + 1);
  const double before_first = left < 0 ? 0 : rows_sum(offset - left);
  return std::max(0.0, up_to_last - before_first);
}

/// What lands where products take `block` rows at a time over the keys that some of them sees.
struct Landed {
  double pairs = 0;  // Σ over blocks of rows · hull
  double keys = 0;   // Σ over blocks of hull
};
/// `block` is a whole number above 0. The block that begins with row a has a hull of clamp(a +
/// offset + right + rows, 0, keys) − clamp(a + offset − left, 0, keys) keys; over whole blocks, a =
/// 0, block, 2 · block, …, each clamped term is an arithmetic series between the first block above
/// 0 and the first at `keys`. Lengths may be real.
inline Landed landed(double rows, double keys, double left, double right, double offset,
                     double block) {
  const double whole = std::floor(rows / block), rest = rows - whole * block;
  const auto series = [&](double shift) {  // Σ over i in [0, whole) of clamp(i · block + shift, …)
    const double first = std::clamp(std::ceil(-shift / block), 0.0, whole);
    const double full = std::clamp(std::ceil((keys - shift) / block), first, whole);
    return (full - first) * (shift + (first + full - 1) / 2 * block) + (whole - full) * keys;
  };
  const auto last_block = [&](double shift) {
    return rest > 0 ? std::clamp(whole * block + shift, 0.0, keys) : 0;
  };
  const double last = right < 0 ? whole * keys : series(offset + right + block);
  const double first = left < 0 ? 0 : series(offset - left);
  const double rest_last = right < 0 ? (rest > 0 ? keys : 0) : last_block(offset + right + rest);
  const double rest_first = left < 0 ? 0 : last_block(offset - left);
  const double hulls = std::max(0.0, last - first), hull = std::max(0.0, rest_last - rest_first);
  return {hulls * block + hull * rest, hulls + hull};
}

/// Keys that at least one of the rows sees: consecutive rows see windows shifted by one key, so the
/// union is the hull of the first and the last.
constexpr double seen_keys(double rows, double keys, double left, double right, double offset) {
  if (rows <= 0 || keys <= 0) {
    return 0;
  }
  const double first = left < 0 ? 0 : std::clamp(offset - left, 0.0, keys);
  const double last = right < 0 ? keys : std::clamp(rows - 1 + offset + right + 1, 0.0, keys);
  return std::max(0.0, last - first);
}

}  // namespace rafter::tiles
