// What appending a row to a cache computes, whoever does it: which token goes where, and the
// factors of quantised rows.
#pragma once

#include <cstdint>

namespace rafter::tiles {

/// Largest magnitude of a quantised element.
inline constexpr float kInt8Limit = 127.0f;
inline constexpr float kE4m3Limit = 448.0f;

/// The factor of a row whose largest magnitude is `largest`, and what its elements are multiplied
/// by. An infinity or a NaN in the row makes the factor one, so that all of the row reads as NaN.
struct RowFactor {
  float scale = 1, inverse = 1;
};
constexpr RowFactor row_factor(float largest, float limit) {
  constexpr float kMost = 3.4028234663852886e38f;
  const float inverse = largest > 0 ? limit / largest : 0.0f;
  return {largest / limit, inverse < kMost ? inverse : kMost};
}

/// The larger magnitude; a NaN stays.
constexpr float larger_magnitude(float largest, float x) {
  const float magnitude = x < 0 ? -x : x;
  return magnitude > largest || magnitude != magnitude ? magnitude : largest;
}

/// Which element a row's element `d` turns with, and how: x' = x · cos[angle] + sign · y ·
/// sin[angle], where y is the element `partner`.
struct RopePair {
  int partner = 0, angle = 0;
  bool second = false;  // of its pair: the sign is + there, − on the first
};
constexpr RopePair rope_pair(int d, int rotary_dim, bool interleaved) {
  if (interleaved) {
    return {d ^ 1, d / 2, d % 2 == 1};
  }
  const int half = rotary_dim / 2;
  return d < half ? RopePair{d + half, d, false} : RopePair{d - half, d - half, true};
}

}  // namespace rafter::tiles
