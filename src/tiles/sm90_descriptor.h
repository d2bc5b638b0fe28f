// Shared-memory matrix descriptors of wgmma and the 128-byte swizzle, in integers.
// Checked on an H200 against a float64 matrix product (tests/kernels/cuda/wgmma_test.cpp).
#pragma once

#include <cstdint>

namespace rafter::tiles {

/// A 16-bit tile lies in shared memory as boxes of 64 columns: `rows` rows of 128 bytes each, the
/// eight 16-byte chunks of row r permuted by r mod 8 (TMA does it on load, wgmma undoes it).
inline constexpr int kBoxColumns = 64;
inline constexpr int kBoxRowBytes = 128;
inline constexpr int kSwizzleGroupBytes = 8 * kBoxRowBytes;  // pattern repeats; tiles align to it

constexpr int boxes(int columns) { return (columns + kBoxColumns - 1) / kBoxColumns; }
constexpr int box_bytes(int rows) { return rows * kBoxRowBytes; }
constexpr int tile_bytes(int rows, int columns) { return boxes(columns) * box_bytes(rows); }

/// The descriptor without its address: byte offsets in units of 16, and the swizzle mode.
/// PTX ISA, "Matrix descriptor": bits 0-13 address, 16-29 leading offset, 32-45 stride offset,
/// 62-63 swizzle (1: 128 bytes).
constexpr std::uint64_t descriptor(int leading_bytes, int stride_bytes) {
  return (static_cast<std::uint64_t>(leading_bytes / 16) << 16) |
         (static_cast<std::uint64_t>(stride_bytes / 16) << 32) | (std::uint64_t{1} << 62);
}

/// K-major operand (k runs along the 128-byte row): 8-row groups follow each other; the leading
/// offset is not used inside one box.
constexpr std::uint64_t k_major_descriptor() { return descriptor(0, kSwizzleGroupBytes); }
/// Bytes from the start of a K-major tile of `rows` rows to its k16 step `step`.
constexpr int k_major_step_bytes(int rows, int step) {
  return step / 4 * box_bytes(rows) + step % 4 * 32;
}

/// MN-major operand (k runs over rows, n along the 128-byte row): the leading offset leads to the
/// next 64 columns, the stride offset to the next 8 rows.
constexpr std::uint64_t mn_major_descriptor(int rows) {
  return descriptor(box_bytes(rows), kSwizzleGroupBytes);
}
/// Bytes from the start of an MN-major tile to its k16 step (16 rows each).
constexpr int mn_major_step_bytes(int step) { return step * 16 * kBoxRowBytes; }

/// Bytes from the start of a tile of `rows` rows to 16-byte chunk `chunk` (8 columns) of row `row`,
/// as the swizzle permutes them.
constexpr int swizzled_chunk_bytes(int rows, int row, int chunk) {
  return chunk / 8 * box_bytes(rows) + row * kBoxRowBytes + (chunk % 8 ^ row % 8) * 16;
}

}  // namespace rafter::tiles
