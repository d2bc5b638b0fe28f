// Tile shapes of the fused forward kernel for sm_90a: data, with proof that each fits an SM.
#pragma once

#include "tiles/sm90_descriptor.h"

namespace rafter::tiles {

/// One instantiation. `head_dim` and `head_dim_v` are what its tiles hold; smaller ones run on it,
/// zero-filled.
struct Sm90ForwardRow {
  int head_dim = 0;
  int head_dim_v = 0;
  int warpgroups = 0;  // consumers, 64 queries each
  int tile_kv = 0;
  int stages = 0;  // of K and of V
  int producer_registers = 0;
  int consumer_registers = 0;
  bool queries_in_registers = false;  // Q is read from shared memory once, not once per key tile
  bool store_by_copy = false;         // O leaves through shared memory and the copy engine
  int q_slots = 1;                    // query tiles of a warpgroup in shared memory
  // The first product of a query tile sets O in place of being added to zeros, and a step into the
  // next query tile does not wait anew for keys and values that were seen.
  bool sets_outputs = false;
  bool runs_on = false;     // the next query tile begins under the last products of this one
  bool ordered = true;      // warpgroups take turns at issuing matmuls; which pays was measured
  bool idles = false;       // a warpgroup without queries in a tile computes nothing
  bool own_ranges = false;  // each warpgroup walks the keys that its own queries see: for masks
  // One loop for edges and interior, and the next query tile begins across key tiles of others too:
  // less code and fewer beginnings, for sequences of few key tiles.
  bool is_short = false;

  constexpr int tile_q() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int q_bytes() const { return tile_bytes(64, head_dim); }  // of one warpgroup
  constexpr int k_bytes() const { return tile_bytes(tile_kv, head_dim); }
  constexpr int v_bytes() const { return tile_bytes(tile_kv, head_dim_v); }
  constexpr int o_bytes() const { return store_by_copy ? tile_bytes(64, head_dim_v) : 0; }
  static constexpr int kControlBytes = 1024;  // barriers and tile descriptions
  constexpr int shared_bytes() const {
    return warpgroups * (q_slots * q_bytes() + o_bytes()) + stages * (k_bytes() + v_bytes()) +
           kControlBytes +
           kSwizzleGroupBytes;  // slack: dynamic shared memory is aligned to 16 bytes only
  }
  /// Registers of one consumer thread that hold S, P, O and, where it is so, Q.
  constexpr int fragment_registers() const {
    return tile_kv / 2 + tile_kv / 4 + head_dim_v / 2 + (queries_in_registers ? head_dim / 4 : 0);
  }

  constexpr bool fits() const {
    constexpr int kSharedBytesPerBlock = 227 * 1024;  // CUDA C++ guide, compute capability 9.0
    constexpr int kRegistersPerSm = 65536;
    // What a CTA holds from its launch is what its warpgroups may share out: asking for more waits
    // for ever.
    const int held = kRegistersPerSm / threads() / 8 * 8 * threads();
    return shared_bytes() <= kSharedBytesPerBlock &&
           128 * (producer_registers + warpgroups * consumer_registers) <= held &&
           fragment_registers() + 24 <= consumer_registers && consumer_registers % 8 == 0 &&
           producer_registers % 8 == 0 && (!runs_on || queries_in_registers || q_slots > 1) &&
           !(own_ranges && ordered) && (!is_short || (own_ranges && runs_on)) &&
           tile_kv % 16 == 0 && tile_kv <= 256 && head_dim % 64 == 0;
  }
};

inline constexpr Sm90ForwardRow kSm90ForwardRow64 = {.head_dim = 64,
                                                     .head_dim_v = 64,
                                                     .warpgroups = 3,
                                                     .tile_kv = 128,
                                                     .stages = 4,
                                                     .producer_registers = 32,
                                                     .consumer_registers = 160,
                                                     .store_by_copy = true,
                                                     .q_slots = 2,
                                                     .runs_on = true,
                                                     .idles = true};
/// The row for masked problems: warpgroups that walk other keys take no turns.
constexpr Sm90ForwardRow with_own_ranges(Sm90ForwardRow row) {
  row.ordered = false;
  row.idles = false;
  row.own_ranges = true;
  return row;
}
/// A sequence is short, and under a mask has a row of its own, by its lengths alone: then it is so
/// in every layout and whatever its neighbours. Up to the queries of one tile of the other row,
/// that one is faster.
inline constexpr int kSm90ForwardShortKeys = 1024;
inline constexpr int kSm90ForwardShortQueries = kSm90ForwardRow64.tile_q() + 1;
constexpr bool is_sm90_forward_short(long long seqlen_q, long long seqlen_kv) {
  return seqlen_q >= kSm90ForwardShortQueries && seqlen_kv <= kSm90ForwardShortKeys;
}
inline constexpr Sm90ForwardRow kSm90ForwardRow64Short = {.head_dim = 64,
                                                          .head_dim_v = 64,
                                                          .warpgroups = 4,
                                                          .tile_kv = 64,
                                                          .stages = 8,
                                                          .producer_registers = 32,
                                                          .consumer_registers = 112,
                                                          .store_by_copy = true,
                                                          .q_slots = 2,
                                                          .runs_on = true,
                                                          .ordered = false,
                                                          .own_ranges = true,
                                                          .is_short = true};
inline constexpr Sm90ForwardRow kSm90ForwardRows[] = {
    kSm90ForwardRow64,
    {.head_dim = 128,
     .head_dim_v = 128,
     .warpgroups = 2,
     .tile_kv = 128,
     .stages = 2,
     .producer_registers = 40,
     .consumer_registers = 232,
     .queries_in_registers = true,
     .store_by_copy = true,
     .sets_outputs = true,
     .runs_on = true,
     .ordered = false},
    {.head_dim = 192,
     .head_dim_v = 128,
     .warpgroups = 2,
     .tile_kv = 128,
     .stages = 2,
     .producer_registers = 40,
     .consumer_registers = 232},
    {.head_dim = 256,
     .head_dim_v = 256,
     .warpgroups = 2,
     .tile_kv = 80,
     .stages = 2,
     .producer_registers = 40,
     .consumer_registers = 232},
    with_own_ranges(kSm90ForwardRow64),
    kSm90ForwardRow64Short,
};
inline constexpr int kSm90ForwardRowCount = sizeof(kSm90ForwardRows) / sizeof(kSm90ForwardRows[0]);

constexpr bool every_sm90_forward_row_fits() {
  for (const Sm90ForwardRow& row : kSm90ForwardRows) {
    if (!row.fits()) {
      return false;
    }
  }
  return true;
}
static_assert(every_sm90_forward_row_fits());

/// The row for both head dimensions, or −1: the first that holds them; masked: one of the same
/// head dimensions with ranges of their own, where there is one.
constexpr int sm90_forward_row_for(long long head_dim, long long head_dim_v, bool masked) {
  int found = -1;
  for (int i = 0; i < kSm90ForwardRowCount; ++i) {
    const Sm90ForwardRow& row = kSm90ForwardRows[i];
    if (found < 0) {
      if (head_dim <= row.head_dim && head_dim_v <= row.head_dim_v) {
        found = i;
      }
    } else if (masked && row.own_ranges && !row.is_short &&
               row.head_dim == kSm90ForwardRows[found].head_dim &&
               row.head_dim_v == kSm90ForwardRows[found].head_dim_v) {
      found = i;
    }
  }
  return found;
}
/// The row for short sequences under a mask that otherwise take row `other`, or −1.
constexpr int sm90_forward_short_row_for(int other) {
  for (int i = 0; i < kSm90ForwardRowCount; ++i) {
    const Sm90ForwardRow& row = kSm90ForwardRows[i];
    if (row.is_short && kSm90ForwardRows[other].own_ranges &&
        row.head_dim == kSm90ForwardRows[other].head_dim &&
        row.head_dim_v == kSm90ForwardRows[other].head_dim_v) {
      return i;
    }
  }
  return -1;
}
static_assert(sm90_forward_row_for(64, 64, false) == 0 && sm90_forward_row_for(64, 64, true) == 4 &&
              sm90_forward_row_for(72, 64, true) == 1 &&
              sm90_forward_row_for(192, 128, true) == 2 &&
              sm90_forward_row_for(192, 192, false) == 3 && sm90_forward_row_for(257, 1, true) < 0);
static_assert(sm90_forward_short_row_for(4) == 5 && sm90_forward_short_row_for(0) < 0 &&
              sm90_forward_short_row_for(1) < 0);

}  // namespace rafter::tiles
