// Tile shapes of the half-fused output kernel for sm_90a: data, with proof that each fits an SM.
#pragma once

#include "tiles/sm90_descriptor.h"

namespace rafter::tiles {

/// One instantiation: a producer warpgroup and two consumer warpgroups of 64 query rows each.
struct Sm90HalfFusedRow {
  int head_dim_v = 0;  // what its tiles hold; smaller ones run on it, zero-filled
  int tile_kv = 0;     // keys: boxes of 64 scores
  int stages = 0;      // of scores and V together

  static constexpr int kWarpgroups = 2;
  static constexpr int tile_q() { return 64 * kWarpgroups; }
  static constexpr int threads() { return 128 * (kWarpgroups + 1); }
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  constexpr int score_boxes() const { return tile_kv / kBoxColumns; }
  constexpr int score_bytes() const { return score_boxes() * box_bytes(64); }  // of one warpgroup
  constexpr int v_bytes() const { return tile_bytes(tile_kv, head_dim_v); }
  constexpr int stage_bytes() const { return kWarpgroups * score_bytes() + v_bytes(); }
  static constexpr int kControlBytes = 256;  // barriers
  constexpr int shared_bytes() const {
    return stages * stage_bytes() + kControlBytes + kSwizzleGroupBytes;
  }
  /// Scores, probabilities and outputs of a consumer thread.
  constexpr int fragment_registers() const { return tile_kv / 2 + tile_kv / 4 + head_dim_v / 2; }

  constexpr bool fits() const {
    constexpr int kSharedBytesPerBlock = 227 * 1024;  // CUDA C++ guide, compute capability 9.0
    constexpr int kRegistersPerSm = 65536;
    return shared_bytes() <= kSharedBytesPerBlock &&
           128 * (kProducerRegisters + kWarpgroups * kConsumerRegisters) <= kRegistersPerSm &&
           fragment_registers() + 24 <= kConsumerRegisters && 16 * stages <= kControlBytes;
  }
};

inline constexpr Sm90HalfFusedRow kSm90HalfFusedRows[] = {
    {.head_dim_v = 64, .tile_kv = 128, .stages = 4},
    {.head_dim_v = 128, .tile_kv = 128, .stages = 3},
    {.head_dim_v = 256, .tile_kv = 64, .stages = 4},
};
static_assert(kSm90HalfFusedRows[0].fits() && kSm90HalfFusedRows[1].fits() &&
              kSm90HalfFusedRows[2].fits());

/// The first row that holds the head dimension, or −1.
constexpr int sm90_half_fused_row_for(long long head_dim_v) {
  for (int i = 0; i < 3; ++i) {
    if (head_dim_v <= kSm90HalfFusedRows[i].head_dim_v) {
      return i;
    }
  }
  return -1;
}

}  // namespace rafter::tiles
