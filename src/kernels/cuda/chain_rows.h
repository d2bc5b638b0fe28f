// A decode step's operations between two attentions as one launch: what the host gives the kernel.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "rafter/layers.h"
#include "rafter/status.h"

namespace rafter::cuda {

inline constexpr int kMostPhases = 4, kMostChainRows = 2;
inline constexpr std::int64_t kMostChainNorm = 8192;  // elements of a row that is normalised

/// One product, of all rows with a weight [n, k]; addresses are aligned to 16 bytes.
struct ChainPhase {
  const void* x = nullptr;       // rows x_stride elements apart
  const void* norm = nullptr;    // RMSNorm's weight; null: x as it is
  const void* weight = nullptr;  // plain, or as base/packed_weight.h has it
  const void* bias = nullptr;    // null: none
  void* y = nullptr;             // rows y_stride elements apart
  std::int64_t x_stride = 0, y_stride = 0;
  std::optional<DType> packed = {};  // int8, e4m3 or int4; unset: plain
  int group_size = 0;                // of int4
  std::int64_t n = 0;
  int k = 0;
  LinkEnd end = LinkEnd::store;
  // launch_chain_rows() says:
  int first = 0, tickets = 0;  // what a CTA takes: a stripe, of swiglu one of each half
  int stages = 0;              // of the ring, of a stripe
  // What CTAs tell each other, [m, columns / 2]: what this phase writes, of which x consists (null:
  // it lies in memory), and of which y does before it is added to.
  unsigned long long *letters = nullptr, *letters_of_x = nullptr, *before = nullptr;
  std::int64_t letter_cols = 0;
  bool stores = true;  // y: no later phase does
};

/// Zero before the first launch; of one launch at a time. Behind it lie the letters.
struct ChainWords {
  struct alignas(128) Word {
    unsigned value;
  };
  Word ticket, begun, dealing, closed, left;  // zero again after each launch
  Word launches;
};
/// Of a chain whose links write so many elements, but for the last.
constexpr std::int64_t chain_bytes(std::int64_t elements) {
  return static_cast<std::int64_t>(sizeof(ChainWords)) + elements / 2 * 8;
}

struct ChainParams {
  ChainPhase phases[kMostPhases];
  int count = 0;              // of phases
  int m = 1;                  // rows
  DType dtype = DType::bf16;  // of all but weights in int4: bf16 or f16
  float eps = 0;
  ChainWords* words = nullptr;
  int blocks = 0;                            // 0: one an SM. Any number does all of the work
  int stages = 0, tickets = 0, x_bytes = 0;  // launch_chain_rows() says
};
/// "", or what of its sizes the kernel does not take.
std::string why_no_chain(const ChainParams& params);
Status launch_chain_rows(const ChainParams& params, void* stream);

}  // namespace rafter::cuda
