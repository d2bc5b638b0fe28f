// A Llama-like transformer on rafter's attention: tokens in, logits out. Weights are random by seed
// or come from a Hugging Face folder; prefill takes several prompts at once, decode works on a
// paged cache. Every step is a list of named operations with their costs, so that what runs can be
// put beside what was predicted.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "rafter/device.h"
#include "rafter/measure.h"
#include "rafter/model.h"
#include "rafter/roofline.h"
#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter {

/// Angles of RoPE: pair i of a head turns by position · frequency(i).
struct RopeConfig {
  enum class Scaling : std::uint8_t {
    none,
    linear,  // frequencies divided by factor
    llama3,  // those of long wavelengths divided by factor, with a blend between
  };
  double theta = 10000;
  Scaling scaling = Scaling::none;
  double factor = 1;
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double original_max_position_embeddings = 8192;    // llama3
};
/// Radians a token, of pair i of head_dim / 2: theta^(−2i / head_dim), scaled. Source of llama3:
/// "The Llama 3 Herd of Models", Meta 2024, and the model's published code.
double rope_frequency(const RopeConfig& rope, std::int64_t pair, std::int64_t head_dim);

/// What must be known of a model to run it: its shapes and the constants of its mathematics.
struct TransformerConfig {
  ModelConfig model;
  double rms_norm_eps = 1e-6;
  RopeConfig rope = {};
};
/// A built-in model (model_names()); invalid_argument lists the names.
Result<TransformerConfig> find_transformer(std::string_view name);
/// A config.json of model_type llama, mistral, qwen2 or qwen3. Every key is either understood, or
/// known not to change what a forward pass computes; any other is refused by name. Errors:
/// io_error (not JSON), invalid_argument (an impossible value), unsupported (a key or value whose
/// mathematics is not built, with the key as parameter).
Result<TransformerConfig> parse_transformer(std::string_view json,
                                            std::string_view name = "config.json");
/// config.json of a folder, or such a file.
Result<TransformerConfig> load_transformer(const std::string& path);

/// A parameter by its Hugging Face name.
struct ParameterInfo {
  std::string name;                 // "model.layers.0.self_attn.q_proj.weight"
  std::int64_t rows = 1, cols = 0;  // a vector is one row
};

namespace detail {
struct ModelState;
struct SessionState;
}  // namespace detail

/// How the matrices of a model's layers are kept. The embedding, lm_head, norms and biases stay in
/// the model's dtype: a step reads one row of the first, errors of the second are errors of logits,
/// and the others are small.
struct WeightFormat {
  std::optional<DType> dtype =
      {};                         // int8, e4m3, int4: by quantize() (layers.h); unset: the model's
  std::int64_t group_size = 128;  // elements that share a scale, of int4
};

/// A model's weights on a device. Copies share them.
class Transformer {
 public:
  /// Matrices uniform with a variance of 1 / cols; norms, biases and the embedding uniform in
  /// (−1, 1). Each is a hash of the seed, the parameter and the place: the same bits on every
  /// device. Errors: unsupported (a dtype that the device has no product in), invalid_argument
  /// (weights or group_size, where a matrix has no such form), device_error (memory).
  static Result<Transformer> random(const TransformerConfig& config, std::uint64_t seed,
                                    const Device& device, std::optional<DType> dtype = {},
                                    const WeightFormat& weights = {});
  /// config.json with model.safetensors, or its shards with model.safetensors.index.json. dtype:
  /// f32, bf16 or f16 (default: the published one); weights in another are rounded to it. Errors:
  /// as load_transformer() and random(); io_error names the file and the tensor that is missing,
  /// unknown or of another shape.
  static Result<Transformer> load(const std::string& folder, const Device& device,
                                  std::optional<DType> dtype = {},
                                  const WeightFormat& weights = {});

  const TransformerConfig& config() const;
  const Device& device() const;
  DType dtype() const;
  const WeightFormat& weight_format() const;
  const std::vector<ParameterInfo>& parameters() const;
  /// A parameter widened to f32, [rows, cols], on the host; of a quantised one value · scale.
  Result<std::vector<float>> parameter(std::string_view name) const;
  double weight_bytes() const;  // scales too

  explicit Transformer(std::shared_ptr<const detail::ModelState> state)
      : state_(std::move(state)) {}
  const detail::ModelState& state() const { return *state_; }  // the library's own

 private:
  std::shared_ptr<const detail::ModelState> state_;
};

struct SessionOptions {
  std::int64_t max_batch = 1;      // sequences at once
  std::int64_t max_seqlen = 4096;  // tokens of one, prompt and generated
  std::int64_t page_size = 64;     // tokens of a page of the cache
  Pipeline prefill = Pipeline::fused;
  /// Residual add with RMSNorm, SiLU with its product, RoPE with the append: one launch each, or
  /// each function by itself.
  bool fuse = true;
  bool all_logits = false;  // prefill: logits of every token, not of each sequence's last
  /// Of the cache: the model's dtype (the default), or int8 or e4m3 with an f32 factor for each
  /// token and KV head. A prefill then attends to keys and values as they were before rounding.
  std::optional<DType> kv_dtype = {};
};

/// One operation of a step, queued on its own.
struct StepOperation {
  std::string name;         // "qkv", "attention", "add_rmsnorm", … the same in every layer
  std::int64_t layer = -1;  // −1: outside the layers
  std::string kernel;  // what runs it: "forward_sm90", "cublaslt", "vector_rows", "append", …
  Cost cost;           // exact convention
  std::function<Status(Stream)> queue;
};

/// Sequences in flight of a model: their cache, their lengths, and the steps that extend them. Not
/// for use by several threads at once. Copies share all of it.
class TransformerSession {
 public:
  /// Allocates the cache; a step's buffers come with the first step of its phase, which is what
  /// says when no kernel has the model's attention. Errors: invalid_argument names the option;
  /// device_error (memory).
  static Result<TransformerSession> make(const Transformer& model, const SessionOptions& options);

  /// Begins as many sequences as there are prompts, in place of those before, and computes logits.
  /// Errors: invalid_argument names the prompt that is empty or too long, or the token that the
  /// vocabulary does not have. After unsupported or device_error there are no sequences.
  Status prefill(std::span<const std::vector<std::int32_t>> prompts);
  /// One more token of each sequence. On CUDA the step is captured in a graph at its first use and
  /// replayed. Errors: as prefill(); a sequence that is full.
  Status decode(std::span<const std::int32_t> tokens);
  /// Logits of the last step in f32: [sequences, vocab_size], or after a prefill with all_logits
  /// [tokens, vocab_size]. Waits for the step.
  Result<std::vector<float>> logits() const;
  std::int64_t batch() const;
  /// Tokens in the cache of each sequence.
  const std::vector<std::int64_t>& lengths() const;

  // ---- for measuring

  /// Sets up a prefill as prefill() does, without running it: queue it with queue().
  Status prepare_prefill(std::span<const std::vector<std::int32_t>> prompts);
  /// As if `batch` sequences of `length` tokens had been decoded: random keys and values (of a
  /// cache in int8 or e4m3 random bits), no prefill. The next step is a decode.
  Status assume_context(std::int64_t batch, std::int64_t length);
  /// The operations of the step that is set up, in order: of the last prefill prepared, or of a
  /// decode step. Costs are of the lengths at the time of the call; what they queue is of use until
  /// the next step is set up.
  std::vector<StepOperation> operations(Phase phase) const;
  /// How operations() counts the attention of a phase that is set up (Plan::convention()); else
  /// exact.
  Convention convention(Phase phase) const;
  /// Queues all of them. A decode step lengthens its sequences on the device with every run, up to
  /// max_seqlen, behind which nothing is written; rewind() sets them back.
  Status queue(Phase phase, Stream stream = {}) const;
  /// Lengths on the device as lengths() has them.
  Status rewind() const;
  /// Kernels of the step's graph, counted by the driver. Errors: no CUDA device.
  Result<std::int64_t> count_launches(Phase phase) const;
  double cache_bytes() const;      // with the factors of its rows
  double workspace_bytes() const;  // of activations and attention, of both phases

  explicit TransformerSession(std::shared_ptr<detail::SessionState> state)
      : state_(std::move(state)) {}

 private:
  std::shared_ptr<detail::SessionState> state_;
};

}  // namespace rafter
