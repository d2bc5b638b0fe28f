// What work costs (FLOPs, bytes, launches, footprint) and which wall it meets on a device. No
// hardware needed. All quantities are doubles in SI base units, the unit in the name; counts are
// exact up to 2^53. Every function validates its arguments: an impossible one gives
// invalid_argument that names it, what was given and what is allowed.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rafter/device.h"
#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter {

struct AttentionProblem;  // attention.h

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
const char* to_string(Pass pass);  // "forward", "backward"
Result<Pass> parse_pass(std::string_view name);

enum class Wall : std::uint8_t { compute, bandwidth, dispatch };
const char* to_string(Wall wall);

// ---------------------------------------------------------------------------------- conventions

/// Which of the tensors Q, K, V, O enter the bytes (and the footprint).
enum class CountQkvo : std::uint8_t {
  always,
  never,
  fused_only,  // only where no score matrix lands (the lecture: beside S² they are dropped)
};
enum class TrafficModel : std::uint8_t {
  compulsory,  // K, V are read once per KV head
  tiled,       // K, V are read rows · head_dim / M times, M = fast_memory_bytes in elements
};
enum class CausalPairs : std::uint8_t {
  exact,  // Σ over rows of the keys that each sees: S(S + 1)/2 for a square causal mask
  half,   // seqlen_q · seqlen_kv / 2; only for a causal mask without a window
};
enum class KernelGain : std::uint8_t { ceiling, achieved };  // at the roofs, or with efficiencies
enum class RidgeRounding : std::uint8_t { none, nearest };
enum class CrossoverRounding : std::uint8_t { real, ceil, rounded_ridge };  // b · round(ridge)
enum class VerdictWords : std::uint8_t {
  exact,     // compute-bound, bandwidth-bound, dispatch-bound, near-ridge, ambiguous
  lecture,   // compute-bound, bandwidth-bound, overhead-bound, near-ridge, ambiguous
  solution,  // compute-bound, memory-bound, overhead-bound, near-ridge, ambiguous
};
enum class TimeModel : std::uint8_t {
  max,  // dispatch overlaps the device: the larger of the two
  sum,  // dispatch and device take turns
};
enum class GemmFlops : std::uint8_t {
  all_params,     // 2 N per token: embedding table, norms and head included
  matmul_params,  // 2 per parameter that a token is multiplied with: no embedding table, no norms;
                  // the head for those positions whose logits are wanted
};
enum class Capacity : std::uint8_t {
  usable,  // usable_bytes of the device: what is left after the weights
  total,   // capacity_bytes of the device
};
enum class MemoryUnit : std::uint8_t { elements, bytes };  // what M of the tiled model counts

/// How to count. Parameters have the names of golden/conventions.md; `exact` counts every term,
/// `lecture` and `solution` reproduce two published derivations.
struct Convention {
  std::string name = "exact";  // with ", parameter=value" appended for every parameter set

  // Attention: FLOPs.
  double softmax_flops_per_element = 5;         // scale, max, subtract, exp, sum per visible score
  double recompute_flops_per_element = 3;       // backward: scale, subtract lse, exp
  double score_gradient_flops_per_element = 3;  // backward: dP − D, times P, times softmax_scale
  CausalPairs causal_pairs = CausalPairs::exact;
  bool causal = true;  // a model's prefill, where the step does not say

  // Attention: bytes.
  std::optional<double> score_passes = {};  // of the scores through memory; unset: by pipeline,
                                            // 4 unfused, 2 half-fused, 0 fused and split-kv
  std::optional<double> backward_score_passes = {};  // unset: 7 unfused, 5 half-fused, 0 fused
  std::optional<DType> score_dtype = {};             // of scores that land; unset: the problem's
  double score_block_rows = 0;  // query rows that are multiplied together, over the keys that some
                                // of them sees under a mask, and whose scores then land, where any
                                // do; 0: visible scores alone (forward)
  CountQkvo count_qkvo = CountQkvo::always;
  bool count_lse = true;
  bool count_indices = true;   // page tables, lengths
  bool count_partials = true;  // split-kv: partial o and lse written and read
  TrafficModel traffic_model = TrafficModel::compulsory;
  double fast_memory_bytes = 0;  // M of the tiled model, in bytes; needed when tiled
  MemoryUnit fast_memory_unit = MemoryUnit::elements;  // M counts elements of the dtype, or bytes

  // Decode.
  std::optional<double> score_elements_per_key = {};  // per query head; unset: the pipeline's
                                                      // score passes
  bool count_qo = true;                               // q and o of the decode step

  // GEMM and model.
  bool count_gemm_activations = true;   // A and C of a GEMM, not the weights alone
  bool count_elementwise = true;        // norms, RoPE, SwiGLU, residual adds of a model
  std::optional<double> n_params = {};  // parameters of a model; unset: counted from its config
  GemmFlops gemm_flops = GemmFlops::matmul_params;

  // Device.
  double compute_efficiency = 1;    // of peak, for times only: never for ceilings or walls
  double bandwidth_efficiency = 1;  // of bandwidth, for times only
  std::optional<double> attention_compute_efficiency = {};  // of a model's attention; unset: as
                                                            // compute_efficiency
  bool peak_per_precision = true;                           // false: the bf16 peak for every dtype
  bool count_dispatch = true;           // launch cost as a third wall (a model's explicit launches
                                        // always count)
  std::optional<double> launch_s = {};  // unset: the device's launch_s
  std::optional<double> graph_submit_s = {};  // unset: the device's graph_submit_s
  std::optional<double> graph_launch_s = {};  // unset: the device's graph_launch_s
  TimeModel time_model = TimeModel::max;
  double dead_band = 1;  // ≥ 1: near the ridge when ridge / dead_band ≤ intensity ≤ ridge ·
                         // dead_band; 1: strict
  KernelGain kernel_gain = KernelGain::achieved;
  RidgeRounding ridge_rounding = RidgeRounding::none;              // of ridge_rounded only
  CrossoverRounding crossover_rounding = CrossoverRounding::real;  // of seqlen_rounded only
  VerdictWords verdict_words = VerdictWords::exact;

  // Memory planner.
  double layers_live = 1;  // layers whose activations and scores are held at once; 0: all
  Capacity capacity = Capacity::total;
  bool count_weights = true;      // in the plan
  bool count_kv_cache = true;     // in the plan
  bool count_activations = true;  // in the plan: residual stream and MLP

  static Convention exact();
  static Convention lecture();
  static Convention solution();

  /// Sets the parameter of that name from text ("softmax_flops_per_element", "5"); hyphens and
  /// underscores are the same; "auto" unsets an optional one. Appends to `name`.
  /// Errors: invalid_argument (unknown parameter with the list; value with what is allowed).
  Status set(std::string_view parameter, std::string_view value);
  /// invalid_argument for a value that means nothing (negative passes, efficiency not in (0, 1],
  /// …).
  Status validate() const;
  /// The value of each parameter as text, in the order of convention_parameters().
  std::vector<std::string> values() const;
};
/// "exact", "lecture" or "solution"; invalid_argument lists them.
Result<Convention> find_convention(std::string_view name);
/// One parameter of a Convention, for help texts and flags.
struct ConventionParameter {
  std::string name;     // "softmax_flops_per_element"
  std::string allowed;  // "a number ≥ 0", "compulsory, tiled"
  std::string what;     // one clause
};
const std::vector<ConventionParameter>& convention_parameters();

// ----------------------------------------------------------------------------------------- costs

/// Bytes of one stream of a kernel's traffic.
struct ByteTerm {
  std::string name;  // "q", "k", "v", "o", "lse", "scores", "page_table", "lengths", "partials",
                     // "kv_scales", "do", "delta", "dq", "dk", "dv", "a", "b", "c", …
  double bytes = 0;
};

/// One kernel of a pipeline: "qk", "softmax", "pv"; "qk", "softmax_pv"; "attention"; "merge"; …
struct KernelCost {
  std::string name;
  double matmul_flops = 0, softmax_flops = 0;
  double bytes = 0;
  double elements = 0;  // of bytes, those of tensors and scores, counted in elements
};

/// What a piece of work costs under a named convention. Counts are exact as doubles up to 2^53.
struct Cost {
  double matmul_flops = 0;
  double softmax_flops = 0;  // all arithmetic outside matrix products
  double flops = 0;          // their sum
  double bytes = 0;          // main-memory traffic: the sum of bytes_by_term
  std::vector<ByteTerm> bytes_by_term;
  double launches = 0;
  double footprint_bytes = 0;     // live at once: the tensors counted, and what the pipeline
                                  // materialises (one score matrix: softmax works in place)
  double score_matrix_bytes = 0;  // of the full score matrix in this dtype, whether or not it lands
  DType dtype = DType::bf16;      // whose matmul peak applies
  std::string convention = "exact";

  double pairs = 0;         // visible (query, key) pairs over batch and query heads
  double exponentials = 0;  // of those flops
  /// Of a fused forward pass: blocks of score_block_rows whole, and for each the time of as many
  /// keys more, since nothing runs under its first softmax; else flops.
  double tile_flops = 0;
  double kv_bytes = 0;  // K and V (with scales) read; decode
  std::vector<KernelCost> kernels;
  // For the ceilings below the roof; 0 where the notion does not apply.
  double unfused_bytes = 0;  // the same attention by the unfused pipeline
  double untiled_bytes = 0;  // every operand of every multiply-add fetched from memory

  /// FLOP/B: +∞ for work without bytes, 0 without work.
  double intensity() const { return flops > 0 ? flops / bytes : 0; }
};

/// Attention (attention.h's problem), per pipeline and pass.
///   forward   FLOPs 2·pairs·(head_dim + head_dim_v) + softmax · pairs, pairs counted exactly per
///             row; K, V only for keys that some row sees, once per KV head; scores pass through
///             memory score_passes times (visible ones; with score_block_rows, blocks)
///   backward  fused: 5 products (QKᵀ again, dP, dV, dK, dQ); unfused and half-fused: 4, and the
///             stored P or S read back; D = rowsum(dO ∘ O) by a kernel of its own
/// Packed problems cost as many full-length sequences as total_q and total_kv hold, and the rest;
/// `splits` is for split_kv: partials are written and read when it is above 1.
/// Lengths of 0 cost nothing. Errors: invalid_argument (shape, dtype, convention parameter).
Result<Cost> attention_cost(const AttentionProblem& problem, Pipeline pipeline,
                            Pass pass = Pass::forward, const Convention& convention = {},
                            std::int64_t splits = 1);
/// The same where the length of each sequence is known (packed, paged, seqused_kv): problem.batch
/// and seqlens are ignored.
struct SequenceLength {
  std::int64_t seqlen_q = 0, seqlen_kv = 0;
};
Result<Cost> attention_cost(const AttentionProblem& problem,
                            std::span<const SequenceLength> sequences, Pipeline pipeline,
                            Pass pass = Pass::forward, const Convention& convention = {},
                            std::int64_t splits = 1);

/// Visible (query, key) pairs of one head of one sequence, in closed form.
Result<double> visible_pairs(const AttentionProblem& problem, const Convention& convention = {});

/// One decode step of attention: seqlen_q new tokens of each sequence against its cache.
struct DecodeProblem {
  std::int64_t batch = 1;
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 0;  // 0: heads_q
  std::int64_t seqlen_q = 1;  // new tokens (all keys are seen by all)
  std::int64_t seqlen_kv = 0;
  std::int64_t head_dim = 128;
  std::int64_t head_dim_v = 0;         // 0: head_dim
  DType dtype = DType::bf16;           // of q, o and the arithmetic
  std::optional<DType> kv_dtype = {};  // unset: dtype
  std::int64_t kv_scale_block = -1;  // elements of a row that share a scale; −1: the row for int8
                                     // (what the kernels read), 32 for int4, none else; 0: none
  double kv_scale_bytes = -1;        // of one scale; −1: 4 for int8 (f32), else 2 (f16)
  std::int64_t page_size = 0;        // 0: not paged; else keys per page, table entries are i32
  std::int64_t splits = 1;
};
/// Per KV head: FLOPs group · seqlen_q · (2·S·(head_dim + head_dim_v) + softmax · S); bytes: K and
/// V once, scales, score_elements_per_key · S per query row, q, o, lse, page table, partials.
Result<Cost> decode_cost(const DecodeProblem& problem, Pipeline pipeline = Pipeline::split_kv,
                         const Convention& convention = {});
/// Blocks of a decode step (batch · heads_kv · splits) over the device's SMs: below 1, some idle.
/// Errors: missing sm_count.
Result<double> sm_fill(const DecodeProblem& problem, const DeviceSpec& device);

/// C [m, n] = A [m, k] · B [k, n], batch of them: 2·m·n·k FLOPs; A, B, C once each (under
/// count_gemm_activations = false the weights B alone).
struct GemmProblem {
  std::int64_t m = 1, n = 1, k = 1;
  std::int64_t batch = 1;
  DType dtype = DType::bf16;               // of A, C and the arithmetic
  std::optional<DType> weight_dtype = {};  // of B; unset: dtype
};
Result<Cost> gemm_cost(const GemmProblem& problem, const Convention& convention = {});

/// A kernel that touches each of `elements` a fixed number of times.
struct ElementwiseProblem {
  double elements = 0;
  double reads = 1, writes = 1;  // elements read and written per element
  double flops_per_element = 1;
  DType dtype = DType::bf16;

  static ElementwiseProblem rmsnorm(double elements, DType dtype);       // 4 FLOP, 1 read, 1 write
  static ElementwiseProblem residual_add(double elements, DType dtype);  // 1 FLOP, 2 reads, 1 write
  static ElementwiseProblem swiglu(double elements, DType dtype);        // 5 FLOP, 2 reads, 1 write
  static ElementwiseProblem rope(double elements, DType dtype);          // 3 FLOP, 1 read, 1 write
};
Result<Cost> elementwise_cost(const ElementwiseProblem& problem, const Convention& convention = {});

// ------------------------------------------------------------------------------------ predictions

/// A rate that a kernel cannot pass while it lacks something, and what to do about it.
struct Ceiling {
  std::string name;  // "compute peak", "bandwidth roof", "exp unit", "no tensor cores",
                     // "no fusion", "no tiling", "launch"
  double flop_per_s = 0;
  std::string advice;  // what lifts it
};

/// A Cost on a device: the time of each wall and the largest.
struct Prediction {
  double time_s = 0;                                // max (roofline) or sum, as the convention says
  double time_compute_s = 0, time_bandwidth_s = 0;  // with the convention's efficiencies
  double time_dispatch_s = 0;  // NaN when the device has no launch_s (dispatch_reason says so)
  double time_sum_s = 0;       // the pessimistic end: nothing overlaps
  /// Fused attention at the rate that the device was measured to do its two products and the
  /// softmax between them (attention_<dtype>_flop_per_s), products' own at most: beyond the roofs,
  /// so not in the times above. 0: unknown, or no such kernel.
  double time_fused_s = 0;
  double time_low_s = 0, time_high_s = 0;  // by the measured spread of the device's figures; else
                                           // time_s
  Wall wall = Wall::compute;  // the largest term at the roofs (efficiencies do not move a wall);
                              // compute when intensity equals the ridge
  Wall largest_term = Wall::compute;  // of the times above
  bool near_ridge = false;            // intensity within a factor dead_band of the ridge
  bool ambiguous = false;  // the ridge lies within the measured error bar around the intensity
  double intensity_flop_per_byte = 0, ridge_flop_per_byte = 0;
  double ridge_low_flop_per_byte = 0, ridge_high_flop_per_byte = 0;  // the measured spread
  double ridge_rounded_flop_per_byte = 0;                            // as ridge_rounding says
  double ridge_multiple = 0;                                         // intensity / ridge
  double peak_flop_per_s = 0, bandwidth_bytes_per_s = 0;             // the figures used
  double attainable_flop_per_s = 0;      // min(peak, intensity · bandwidth): the roof
  double bandwidth_roof_flop_per_s = 0;  // intensity · bandwidth
  double peak_fraction = 0;              // attainable / peak
  double achieved_flop_per_s = 0;        // flops / time_s
  std::vector<Ceiling> ceilings;         // ascending: the first is what binds an untuned kernel
  std::string dispatch_reason;
  std::string device;
  std::string convention;
  VerdictWords words = VerdictWords::exact;

  /// "compute-bound", "bandwidth-bound" (or "memory-bound", as the convention's words),
  /// "near-ridge" inside the dead band, "ambiguous" inside the error bar, "dispatch-bound".
  std::string verdict() const;
};
/// Errors: invalid_argument that names the missing figure (peak_<dtype>_flop_per_s,
/// bandwidth_bytes_per_s) and the device; a convention parameter.
Result<Prediction> predict(const Cost& cost, const DeviceSpec& device,
                           const Convention& convention = {});

/// peak / bandwidth for a dtype, at the roofs. Errors: missing figures.
struct Ridge {
  double flop_per_byte = 0, rounded_flop_per_byte = 0;
  double low_flop_per_byte = 0, high_flop_per_byte = 0;  // measured spread; equal when not measured
  double peak_flop_per_s = 0, bandwidth_bytes_per_s = 0;
  double achieved_flop_per_s = 0;  // compute_efficiency · peak
};
Result<Ridge> ridge(const DeviceSpec& device, DType dtype, const Convention& convention = {});

/// What fusing is worth for one attention: this problem unfused against `pipeline`. An override of
/// score_passes is the unfused side's.
struct FusionGain {
  double ceiling = 0;  // peak / (intensity_unfused · bandwidth), 1 when unfused is compute-bound
  double achieved =
      0;            // efficiency · peak / (bandwidth_efficiency · intensity_unfused · bandwidth)
  double gain = 0;  // either, as the convention's kernel_gain says
  double by_times = 0;     // time unfused / time of the pipeline
  double bytes_ratio = 0;  // bytes unfused / bytes of the pipeline
  Prediction unfused, pipeline;
};
Result<FusionGain> fusion_gain(const AttentionProblem& problem, Pipeline pipeline,
                               const DeviceSpec& device, const Convention& convention = {});

/// The length seqlen_q = seqlen_kv at which attention crosses the ridge. With FLOPs f2·S² + f1·S
/// and bytes b2·S² + b1·S the root is (ridge·b1 − f1) / (f2 − ridge·b2), closed form; masks with a
/// window, blocks of scores and tiled traffic are solved by bisection of the intensity.
struct Crossover {
  bool reachable = false;
  std::optional<double> seqlen;             // real; unset when never
  std::optional<std::int64_t> seqlen_ceil;  // smallest whole length at or above the ridge
  std::optional<double> seqlen_rounded;     // as crossover_rounding says
  std::optional<double> intensity_limit_flop_per_byte;  // S → ∞; unset when unbounded
  std::optional<double> shortfall;                      // ridge / intensity limit
  std::optional<double> root;  // the algebraic root, also when negative; unset without one
  double numerator = 0;        // ridge·b1 − f1, per query head
  double coefficient = 0;      // f2 − ridge·b2, per query head
  double ridge_flop_per_byte = 0;
  bool closed_form = true;
  std::string device, convention;
};
/// seqlen_q and seqlen_kv of the problem are ignored. Errors: a layout other than dense; a missing
/// figure of the device.
Result<Crossover> crossover(const AttentionProblem& problem, Pipeline pipeline,
                            const DeviceSpec& device, const Convention& convention = {},
                            Pass pass = Pass::forward);

/// The tiled traffic model of the I/O bound: with M of fast memory, M / head_dim rows of queries
/// stay on chip, so K and V pass S·head_dim/M times: S²·head_dim²/M elements (constant 1).
struct Tiling {
  double fast_memory_elements = 0;  // M (bytes when the convention's fast_memory_unit says so)
  double tile_rows = 0;             // M / head_dim
  double kv_passes = 0;             // S · head_dim / M
  double io_elements = 0;           // S² · head_dim² / M
  double io_bytes = 0;
  double unfused_elements = 0;      // S²
  double reduction_vs_unfused = 0;  // S² / io_elements = M / head_dim²
  double score_matrix_bytes = 0;    // S² · b, one head
  bool score_matrix_fits = false;   // in fast_memory_bytes
};
Result<Tiling> tiling(std::int64_t seqlen, std::int64_t head_dim, DType dtype,
                      double fast_memory_bytes, const Convention& convention = {});

/// Backward: keep the scores (written once, read once) or recompute them (2·pairs·head_dim FLOPs).
struct RecomputeChoice {
  double score_bytes = 0;   // one way
  double store_bytes = 0;   // written and read back
  double store_time_s = 0;  // at bandwidth_efficiency
  double recompute_flops = 0;
  double recompute_time_s = 0;                // at compute_efficiency
  double store_over_recompute = 0;            // of the times
  double break_even_ridge_flop_per_byte = 0;  // head_dim / b: recompute wins where achieved
                                              // FLOP/s over achieved B/s is above it
  double achieved_ridge_flop_per_byte = 0;
  double extra_flops_fraction = 0;  // of the four products that the backward needs anyway
  double statistics_bytes = 0;      // m and l in f32, kept instead
  bool recompute_is_cheaper = false;
  const char* cheaper() const { return recompute_is_cheaper ? "recompute" : "store"; }
};
Result<RecomputeChoice> recompute_choice(const AttentionProblem& problem, const DeviceSpec& device,
                                         const Convention& convention = {});

// --------------------------------------------------------------------------------- online softmax

/// Running maximum, running sum of exp(x − m), and Σ exp(x − m)·v / l when values are given. Empty:
/// m = −∞, l = 0, output 0.
struct SoftmaxState {
  double m = -HUGE_VAL;
  double l = 0;
  double output = 0;
  double lse() const { return l > 0 ? m + std::log(l) : -HUGE_VAL; }
};
/// The state of the union: exact algebra, an empty state changes no bit.
SoftmaxState merge_states(const SoftmaxState& a, const SoftmaxState& b);

struct SoftmaxStep {
  double m = 0, l = 0;
  double rescale = 0;  // exp(m before − m after): what was held is multiplied by it; 0 at first, 1
                       // where m stays
  double output = 0;  // normalised, over the keys so far
};
struct SoftmaxTrace {
  std::vector<SoftmaxStep> steps;  // one per block
  double sum_exp = 0;              // l · exp(m); +∞ where that overflows (lse does not)
  double lse = 0;
  std::optional<double> output;  // when values were given
};
/// Blocks in order, any sizes, also empty. Scores: finite or −∞. values: empty, or one per score in
/// the same blocks, finite.
Result<SoftmaxTrace> online_softmax(const std::vector<std::vector<double>>& scores,
                                    const std::vector<std::vector<double>>& values = {});
/// Cuts a row of scores into blocks of `block` (the last one shorter).
Result<std::vector<std::vector<double>>> split_blocks(std::span<const double> scores,
                                                      std::int64_t block);

}  // namespace rafter
