// Tile shapes of the fused backward kernel for sm_90a: data, with proof that each fits an SM.
#pragma once

#include <cstdint>

#include "tiles/sm90_descriptor.h"

namespace rafter::tiles {

/// One instantiation. Both head dimensions are at most `head_dim`; smaller ones run on it,
/// zero-filled. A CTA has tile_kv keys of one KV head and walks query tiles.
struct Sm90BackwardRow {
  int head_dim = 0;
  int tile_q = 0;
  int tile_kv = 0;
  int q_stages = 0, d_o_stages = 0;
  int producer_registers = 0;
  int consumer_registers = 0;
  // A consumer warpgroup has half of the keys, all head_dim of their dK and dV, and P and dS in
  // registers; or all keys, half of the queries of S, half of the head_dim of dK and dV, and P and
  // dS in shared memory.
  bool splits_head_dim = false;
  int dq_buffers = 1;  // of a warpgroup, a part each; as many warps add them

  static constexpr int kWarpgroups = 2;  // consumers
  static constexpr int threads() { return 128 * (kWarpgroups + 1); }
  constexpr int kv_bytes() const { return tile_bytes(tile_kv, head_dim); }  // of K, of V
  constexpr int q_bytes() const { return tile_bytes(tile_q, head_dim); }    // of Q, of dO
  constexpr int row_bytes() const { return tile_q * 4; }                    // of lse, of delta
  constexpr int score_bytes() const { return tile_bytes(tile_kv, tile_q); }
  constexpr int score_buffers() const { return splits_head_dim ? 4 : 2; }  // dS, and P, twice

  // dQ of a tile leaves in parts of 64 × 64 f32, as the accumulators of a warpgroup lie: chunk i
  // (columns 8i … 8i + 7), thread, four floats.
  static constexpr int kPart = 64;
  static constexpr int kPartFloats = kPart * kPart;
  static constexpr int kPartBytes = kPartFloats * 4;
  constexpr int parts() const { return tile_q / kPart * (head_dim / kPart); }
  constexpr int parts_of_warpgroup() const { return parts() / kWarpgroups; }
  constexpr int part_row(int part) const { return part / (head_dim / kPart) * kPart; }
  constexpr int part_column(int part) const { return part % (head_dim / kPart) * kPart; }

  static constexpr int kControlBytes = 512;
  constexpr int shared_bytes() const {
    return 2 * kv_bytes() + (q_stages + d_o_stages) * (q_bytes() + row_bytes()) +
           score_buffers() * score_bytes() + kWarpgroups * dq_buffers * kPartBytes + kControlBytes;
  }
  /// dK and dV of a consumer thread, and what of S, P, dP, dS and dQ lives with them.
  constexpr int fragment_registers() const {
    if (splits_head_dim) {
      return head_dim / 2 + parts_of_warpgroup() * 32;
    }
    const int scores = tile_q / 2;
    const int gradients = scores + scores / 2 + scores / 2;  // dP, packed P, packed dS
    const int products = 32 + scores;                        // dQ, the next S
    return head_dim + (gradients > products ? gradients : products);
  }

  constexpr bool fits() const {
    constexpr int kSharedBytesPerBlock = 227 * 1024;  // CUDA C++ guide, compute capability 9.0
    constexpr int kRegistersPerSm = 65536;
    const int held = kRegistersPerSm / threads() / 8 * 8 * threads();
    return shared_bytes() <= kSharedBytesPerBlock &&
           128 * (producer_registers + kWarpgroups * consumer_registers) <= held &&
           fragment_registers() + 8 <= consumer_registers && consumer_registers % 8 == 0 &&
           producer_registers % 8 == 0 && tile_kv == (splits_head_dim ? 64 : 128) &&
           tile_q % 64 == 0 && parts() % kWarpgroups == 0 &&
           (tile_q == 64 || head_dim == kPart);  // a warpgroup's parts are rows or columns
  }
};

inline constexpr Sm90BackwardRow kSm90BackwardRows[] = {
    {.head_dim = 64,
     .tile_q = 128,
     .tile_kv = 128,
     .q_stages = 2,
     .d_o_stages = 2,
     .producer_registers = 40,
     .consumer_registers = 232,
     .dq_buffers = 2},
    {.head_dim = 128,
     .tile_q = 64,
     .tile_kv = 128,
     .q_stages = 2,
     .d_o_stages = 2,
     .producer_registers = 40,
     .consumer_registers = 232,
     .dq_buffers = 2},
    {.head_dim = 256,
     .tile_q = 64,
     .tile_kv = 64,
     .q_stages = 2,
     .d_o_stages = 1,
     .producer_registers = 40,
     .consumer_registers = 232,
     .splits_head_dim = true},
};
inline constexpr int kSm90BackwardRowCount =
    sizeof(kSm90BackwardRows) / sizeof(kSm90BackwardRows[0]);
static_assert(kSm90BackwardRows[0].fits());
static_assert(kSm90BackwardRows[1].fits());
static_assert(kSm90BackwardRows[2].fits());

/// The first row that holds both head dimensions, or −1.
constexpr int sm90_backward_row_for(long long head_dim, long long head_dim_v) {
  for (int i = 0; i < kSm90BackwardRowCount; ++i) {
    if (head_dim <= kSm90BackwardRows[i].head_dim && head_dim_v <= kSm90BackwardRows[i].head_dim) {
      return i;
    }
  }
  return -1;
}

/// Query tiles of all sequences have slots in the workspace: tile i of sequence b, whose rows begin
/// at `row`, is number first_slot() + i. Packed sequences may leave some unused.
constexpr std::int64_t first_slot(bool packed, std::int64_t b, std::int64_t row,
                                  std::int64_t seqlen_q, std::int64_t tile_q) {
  return packed ? row / tile_q + b : b * ((seqlen_q + tile_q - 1) / tile_q);
}
constexpr std::int64_t slot_count(bool packed, std::int64_t batch, std::int64_t rows,
                                  std::int64_t seqlen_q, std::int64_t tile_q) {
  return first_slot(packed, batch, rows, seqlen_q, tile_q);
}

}  // namespace rafter::tiles
