// Whole models on paper: their parameters, what a prefill or a decode step costs and which wall it
// meets, and what fits a memory. No hardware needed; quantities, units and errors are roofline.h's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "rafter/device.h"
#include "rafter/roofline.h"
#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter {

/// A Llama-like decoder: RMSNorm, attention with RoPE and GQA, SwiGLU MLP or experts of such.
struct ModelConfig {
  std::string name;
  std::int64_t hidden_size = 0, intermediate_size = 0, num_layers = 0;
  std::int64_t heads_q = 0, heads_kv = 0, head_dim = 0;
  std::int64_t vocab_size = 0;
  bool tie_word_embeddings = false;
  bool attention_bias = false;  // on q, k, v and o
  bool qkv_bias = false;        // on q, k, v only (Qwen2)
  bool mlp_bias = false;
  bool qk_norm = false;             // RMSNorm over head_dim of q and of k (Qwen3)
  std::int64_t sliding_window = 0;  // keys that a token sees, itself among them; 0: all before it
  DType dtype = DType::bf16;        // of weights and activations as published
  /// Mixture of experts: so many MLPs of intermediate_size a layer, of which a router gives each
  /// token experts_per_token; 0: one MLP.
  std::int64_t num_experts = 0, experts_per_token = 0;

  bool has_experts() const { return num_experts > 0; }
  std::int64_t group() const { return heads_kv > 0 ? heads_q / heads_kv : 0; }
};
/// Names of the built-in models.
std::vector<std::string> model_names();
Result<ModelConfig> find_model(std::string_view name);  // invalid_argument lists the names
/// A Hugging Face config.json of a Llama-like model. num_key_value_heads defaults to
/// num_attention_heads, head_dim to hidden_size / num_attention_heads. Also of mixtral and
/// qwen3_moe, whose layers all have experts. Errors: io_error (not JSON), invalid_argument (missing
/// or impossible key), unsupported (a model_type not like Llama, a key of unknown effect).
Result<ModelConfig> parse_model(std::string_view json, std::string_view name = "config.json");
Result<ModelConfig> load_model(const std::string& path);

struct ParameterTensor {
  std::string name;     // "layers.*.self_attn.q_proj.weight"
  double count = 1;     // of such tensors
  double elements = 0;  // of one
  bool matmul = false;  // a token is multiplied with it
};
struct ParameterCount {
  double total = 0;                    // what n_params is, or the convention's override
  double embedding = 0, head = 0;      // head 0 when tied
  double layer = 0, layer_matmul = 0;  // of one layer
  double matmul = 0;                   // all layers' products and the head (also when tied)
  /// What one token meets: as total, layer_matmul and matmul, of the experts only its own.
  double active = 0, active_layer_matmul = 0, active_matmul = 0;
  std::vector<ParameterTensor> tensors;
};
Result<ParameterCount> count_parameters(const ModelConfig& model,
                                        const Convention& convention = {});

enum class Phase : std::uint8_t { prefill, decode };
const char* to_string(Phase phase);  // "prefill", "decode"

/// One forward pass of a model.
struct ModelStep {
  ModelConfig model;
  Phase phase = Phase::prefill;
  std::int64_t seqlen = 0;  // prefill: tokens of each sequence; decode: context (0: weights only)
  std::int64_t batch = 1;   // 0: as many sequences as the memory holds (decode)
  Pipeline pipeline = Pipeline::fused;
  std::optional<bool> causal = {};         // prefill; unset: the convention's
  std::optional<DType> weight_dtype = {};  // unset: the model's
  std::optional<DType> kv_dtype = {};      // unset: the model's
  bool all_logits = false;                 // prefill: logits of every position, not the last only
  std::int64_t splits = 1;                 // decode attention
  std::optional<double> launches = {};     // unset: counted from the structure
  bool graph = false;                      // captured: one submission in place of the launches
  /// The time of reading the weights, in place of bytes over bandwidth; stated for weights of
  /// memory_floor_dtype and scaled to weight_dtype.
  std::optional<double> memory_floor_s = {};
  DType memory_floor_dtype = DType::bf16;
  std::optional<double> capacity_bytes = {};  // for max_batch; unset: the device's
  std::int64_t page_size = 0;                 // for max_batch: as MemoryProblem's
  /// Elementwise functions as TransformerSession queues them: true, a residual add with the norm
  /// behind it, RoPE with the append, SiLU with its product; false, each by itself. Unset, as
  /// textbooks count: SwiGLU in one kernel, the others and all products by themselves.
  std::optional<bool> fuse = {};
  /// Decode with fuse = true and no experts: all from o to the next layer's q, k and v in one
  /// launch, norms and SwiGLU among it, as TransformerSession queues one or two sequences with
  /// packed weights.
  bool chain = false;
  /// Convention::score_block_rows of the unfused attention that the step is compared with; unset:
  /// the convention's.
  std::optional<double> unfused_score_block_rows = {};
};
/// What fusing the elementwise functions saves of a step, ModelStep::fuse true (and chain, where
/// the step has it) over false: bytes and launches, and the time of each by itself, as if nothing
/// else hid it.
struct FuseSaving {
  double bytes = 0, launches = 0;
  double bytes_time_s = 0;     // at the bandwidth
  double launches_time_s = 0;  // of a graph's nodes, or launch by launch; NaN where the device has
                               // no such figure and none was given: launches_reason says so
  std::string launches_reason;
};
/// share of the step's unfused time that attention takes, how much faster it becomes, and what the
/// whole gains: 1 / (1 − share + share / speedup), at most 1 / (1 − share).
struct Amdahl {
  double share = 0, speedup = 0, gain = 0, bound = 0;
};
struct ModelBudget {
  double n_params = 0;
  double batch = 0, tokens = 0;
  double flops = 0, gemm_flops = 0, attention_flops = 0, elementwise_flops = 0;
  double bytes = 0, weight_bytes = 0, kv_bytes = 0;  // kv_bytes: read (decode), written (prefill)
  double weight_resident_bytes = 0;  // of all parameters; weight_bytes are those that a step reads
  /// Distinct experts of a layer that the step's tokens are expected to meet, routed evenly and
  /// independently: E (1 − (1 − k/E)^tokens); 0 without experts.
  double experts_read = 0;
  double attention_bytes = 0, elementwise_bytes = 0, activation_bytes = 0;
  double kv_bytes_per_token = 0;  // one token, all layers
  double time_s = 0, gemm_time_s = 0, attention_time_s = 0, elementwise_time_s = 0;
  double device_time_s = 0;   // the kernels' sum
  double weights_time_s = 0;  // reading the weights: the floor of a decode step
  double launches = 0, launches_per_layer = 0;
  double dispatch_time_s = 0;    // NaN when the device has no launch cost and none was given
  double dispatch_fraction = 0;  // of the step without overlap: dispatch / (dispatch + device); NaN
                                 // as dispatch_time_s
  std::string dispatch_reason;
  double attention_share = 0;       // of the FLOPs
  double attention_time_share = 0;  // of the kernels' time
  double gain_over_unfused = 1;     // this step with the unfused pipeline over this one
  double unfused_time_s = 0;
  Amdahl amdahl;
  FuseSaving fusing;
  double intensity_flop_per_byte = 0, ridge_flop_per_byte = 0;
  double gemm_intensity_flop_per_byte = 0;
  std::optional<double> max_batch;  // sequences of seqlen whose KV cache fits; unset: seqlen is 0
                                    // or the device has no capacity
  double tokens_per_s = 0;
  Wall wall = Wall::compute;  // the largest of compute, bandwidth and dispatch, at the roofs
  bool near_ridge = false;
  /// Rates that the step cannot pass while its kernels lack an idea, ascending: "no tensor cores",
  /// "no fusion" (scores that land), "no tiling" (operands fetched for each multiply-add),
  /// "launch"; and "kernels at their roofs", "bandwidth roof", "compute peak" with all of them.
  std::vector<Ceiling> ceilings;
  std::string device, convention;
  VerdictWords words = VerdictWords::exact;
  std::string verdict() const;
};
Result<ModelBudget> model_budget(const ModelStep& step, const DeviceSpec& device,
                                 const Convention& convention = {});

/// Lengths (real) at which attention takes over, the head counted at every position; +∞ when a
/// sliding window keeps it from ever doing so.
struct ModelLengths {
  double attention_equals_gemm_seqlen = 0;        // attention FLOPs = all GEMM FLOPs
  double attention_equals_layer_gemm_seqlen = 0;  // = a layer's GEMM FLOPs (no embedding, no head)
};
Result<ModelLengths> model_lengths(const ModelConfig& model, const Convention& convention = {});
/// Prefill length (real) at which step.pipeline gains `gain` over unfused, by bisection; unset when
/// no length up to 2^40 does.
Result<std::optional<double>> seqlen_for_gain(const ModelStep& step, double gain,
                                              const DeviceSpec& device,
                                              const Convention& convention = {});

// ---------------------------------------------------------------------------------- memory planner

struct MemoryProblem {
  ModelConfig model;
  std::int64_t batch = 1;
  Pipeline pipeline = Pipeline::fused;
  std::optional<DType> weight_dtype = {};
  std::optional<DType> kv_dtype = {};
  std::optional<double> capacity_bytes = {};  // unset: the device's, as the convention says
  /// Tokens of a page of the KV cache. A sequence then holds whole pages, and those of rows that a
  /// sliding window has left behind too, as a TransformerSession's cache does. 0: rows alone.
  std::int64_t page_size = 0;
};
struct MemoryUse {
  double footprint_bytes = 0;
  std::vector<ByteTerm> terms;  // "weights", "kv_cache", "scores", "qkvo", "lse", "activations"
  double capacity_bytes = 0;
  bool fits = false;
  double share = 0;  // footprint / capacity
};
struct MemoryPlan {
  std::int64_t max_seqlen = 0;  // 0: not even one token fits
  MemoryUse at_max;
};
/// Memory at a length. device may be null when capacity_bytes is given.
Result<MemoryUse> memory_use(const MemoryProblem& problem, std::int64_t seqlen,
                             const DeviceSpec* device, const Convention& convention = {});
/// The largest length that fits (by bisection over the monotone footprint, up to 2^40).
Result<MemoryPlan> plan_memory(const MemoryProblem& problem, const DeviceSpec* device,
                               const Convention& convention = {});

}  // namespace rafter
