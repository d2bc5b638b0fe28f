// What work costs (FLOPs, bytes, launches, footprint) and which wall it meets on a device. No
// hardware needed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rafter/device.h"
#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter {

/// Ways of computing the same attention; the arithmetic is the same, the bytes are the choice.
enum class Pipeline : std::uint8_t {
  unfused,     // QKᵀ, softmax, PV as three kernels: the scores land twice and are read twice
  half_fused,  // softmax fused into PV: the scores land once, the probabilities never
  fused,       // the score matrix never lands
  split_kv,    // fused, keys split, partial results merged
};
const char* to_string(Pipeline pipeline);  // "unfused", "half-fused", "fused", "split-kv"
Result<Pipeline> parse_pipeline(std::string_view name);

enum class Pass : std::uint8_t { forward, backward };
enum class Wall : std::uint8_t { compute, bandwidth, dispatch };
const char* to_string(Wall wall);

/// Bytes of one stream of a kernel's traffic.
struct ByteTerm {
  std::string name;  // "q", "k", "v", "o", "lse", "scores_write", "page_table", "partials", …
  double bytes = 0;
};

/// What a piece of work costs under a named convention. Counts are exact as doubles up to 2^53.
struct Cost {
  double matmul_flops = 0;
  double softmax_flops = 0;  // all arithmetic outside matrix products
  double flops = 0;          // their sum
  double bytes = 0;          // main-memory traffic: the sum of bytes_by_term
  std::vector<ByteTerm> bytes_by_term;
  double launches = 0;
  double footprint_bytes = 0;  // live at once: inputs, outputs, and what the pipeline materialises
  double score_matrix_bytes = 0;  // of the full score matrix in this dtype, whether or not it lands
  DType dtype = DType::bf16;      // whose matmul peak applies
  std::string convention = "exact";

  double intensity() const { return flops / bytes; }  // FLOP/B
};

/// A Cost on a device: the time of each wall and the largest.
struct Prediction {
  double time_s = 0;  // max (roofline) or sum, as the convention says
  double time_compute_s = 0, time_bandwidth_s = 0, time_dispatch_s = 0;
  double time_sum_s = 0;  // the pessimistic end: nothing overlaps
  Wall wall = Wall::compute;
  bool near_ridge = false;  // intensity within a factor dead_band of the ridge
  double intensity_flop_per_byte = 0, ridge_flop_per_byte = 0;
  double attainable_flop_per_s = 0;
  std::string device;
  std::string convention;
};

}  // namespace rafter
