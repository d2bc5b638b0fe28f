// Llama-like models: a Hugging Face config.json to shapes, and shapes to an exact parameter count.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "model/check.h"
#include "model/model_shape.h"
#include "rafter/model.h"
#include "rafter/roofline.h"

namespace rafter {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxConfigBytes = std::size_t{1} << 20;

/// model_type values whose decoder is RMSNorm, attention with RoPE and GQA, SwiGLU. An empty one is
/// taken at its word.
constexpr std::array kLlamaLike = {"llama",   "mistral",   "qwen2", "qwen3",
                                   "mixtral", "qwen3_moe", ""};

/// The models that are known by name; 60m is what a CPU runs in milliseconds.
std::array<ModelConfig, 2> built_in_models() {
  return {ModelConfig{.name = "reference-60m",
                      .hidden_size = 512,
                      .intermediate_size = 1408,
                      .num_layers = 8,
                      .heads_q = 8,
                      .heads_kv = 4,
                      .head_dim = 64,
                      .vocab_size = 32000,
                      .dtype = DType::f32},
          ModelConfig{.name = "reference-7b",
                      .hidden_size = 4096,
                      .intermediate_size = 11008,
                      .num_layers = 32,
                      .heads_q = 32,
                      .heads_kv = 32,
                      .head_dim = 128,
                      .vocab_size = 32000,
                      .dtype = DType::bf16}};
}

/// Reads keys of one object; the first failure stays in `status`.
class Reader {
 public:
  explicit Reader(const json& object) : object_(object) {}

  std::int64_t count(const char* key, std::optional<std::int64_t> fallback, std::int64_t low,
                     std::int64_t high) {
    const auto found = object_.find(key);
    if (found == object_.end() || found->is_null()) {
      if (!fallback) {
        fail(Status::invalid_argument(key, "nothing", fmt::format("{} to {}", low, high)));
      }
      return fallback.value_or(low);
    }
    if (!found->is_number_integer() ||
        (found->is_number_unsigned() && found->get<std::uint64_t>() > (std::uint64_t{1} << 62))) {
      fail(Status::invalid_argument(key, shown(*found), "a whole number"));
      return low;
    }
    const auto value = found->get<std::int64_t>();
    if (Status s = model::check_range(key, value, low, high); !s) {
      fail(std::move(s));
      return low;
    }
    return value;
  }
  bool flag(const char* key, bool fallback) {
    const auto found = object_.find(key);
    if (found == object_.end() || found->is_null()) {
      return fallback;
    }
    if (!found->is_boolean()) {
      fail(Status::invalid_argument(key, shown(*found), "true, false"));
      return fallback;
    }
    return found->get<bool>();
  }
  std::string text(const char* key) {
    const auto found = object_.find(key);
    if (found == object_.end() || found->is_null()) {
      return {};
    }
    if (!found->is_string()) {
      fail(Status::invalid_argument(key, shown(*found), "text"));
      return {};
    }
    return found->get<std::string>();
  }
  void fail(Status status) {
    if (status_) {
      status_ = std::move(status);
    }
  }
  const Status& status() const { return status_; }
  static std::string shown(const json& value) {
    std::string text = value.is_structured()
                           ? value.type_name()
                           : value.dump(-1, ' ', false, json::error_handler_t::replace);
    return text.size() > 40 ? text.substr(0, 37) + "..." : text;
  }

 private:
  const json& object_;
  Status status_;
};

/// Read here or, of what runs, by parse_transformer().
constexpr std::string_view kUnderstoodKeys[] = {"model_type",
                                                "hidden_size",
                                                "intermediate_size",
                                                "num_hidden_layers",
                                                "head_dim",
                                                "num_attention_heads",
                                                "num_key_value_heads",
                                                "vocab_size",
                                                "attention_bias",
                                                "tie_word_embeddings",
                                                "mlp_bias",
                                                "torch_dtype",
                                                "dtype",
                                                "use_sliding_window",
                                                "sliding_window",
                                                "max_window_layers",
                                                "layer_types",
                                                "rms_norm_eps",
                                                "rope_theta",
                                                "rope_scaling",
                                                "rope_parameters",
                                                "partial_rotary_factor",
                                                "qkv_bias",
                                                "hidden_act"};
constexpr const char* kFalseKeys[] = {"use_mrope", "rope_interleaved", "add_cross_attention",
                                      "tie_encoder_decoder"};
constexpr std::string_view kExpertKeys[] = {
    "num_experts",         "num_local_experts",   "num_experts_per_tok", "moe_intermediate_size",
    "decoder_sparse_step", "mlp_only_layers",     "norm_topk_prob",      "router_aux_loss_coef",
    "router_jitter_noise", "output_router_logits"};
/// Of training, tokens, files, limits and sampling: a forward pass is the same with any value.
constexpr std::string_view kHarmlessKeys[] = {"architectures",
                                              "attention_dropout",
                                              "auto_map",
                                              "bos_token_id",
                                              "eos_token_id",
                                              "pad_token_id",
                                              "decoder_start_token_id",
                                              "initializer_range",
                                              "max_position_embeddings",
                                              "max_length",
                                              "min_length",
                                              "name_or_path",
                                              "pretraining_tp",
                                              "transformers_version",
                                              "use_cache",
                                              "output_attentions",
                                              "output_hidden_states",
                                              "return_dict",
                                              "temperature",
                                              "top_p",
                                              "top_k",
                                              "do_sample",
                                              "repetition_penalty",
                                              "id2label",
                                              "label2id",
                                              "problem_type",
                                              "chunk_size_feed_forward",
                                              "is_encoder_decoder",
                                              "hidden_dropout",
                                              "task_specific_params",
                                              "tokenizer_class",
                                              "is_llama_config",
                                              "transformers.js_config",
                                              "unsloth_fixed",
                                              "unsloth_version",
                                              "torchscript",
                                              "num_beams",
                                              "length_penalty",
                                              "typical_p"};

/// Every key is one that is understood or known to be harmless: a model that is counted as another
/// would be counted wrong.
void check_keys(const json& document, bool has_experts, Reader& read) {
  const auto among = [](const auto& keys, const std::string& key) {
    return std::ranges::find(keys, key) != std::ranges::end(keys);
  };
  for (const auto& [key, value] : document.items()) {
    if (!among(kUnderstoodKeys, key) && !among(kFalseKeys, key) && !among(kHarmlessKeys, key) &&
        !(has_experts && among(kExpertKeys, key)) && !key.starts_with('_') && !value.is_null()) {
      read.fail(Status::unsupported(key, Reader::shown(value),
                                    "it is not known whether it changes what the model computes"));
    }
  }
}

/// Experts in place of the MLP of every layer: Mixtral's keys or Qwen's.
void read_experts(const json& document, const std::string& type, Reader& read, ModelConfig& m) {
  const bool qwen = type == "qwen3_moe";
  if (!qwen && type != "mixtral") {
    return;
  }
  m.num_experts = read.count(qwen ? "num_experts" : "num_local_experts", {}, 1, model::kMaxExperts);
  m.experts_per_token = read.count("num_experts_per_tok", {}, 1, m.num_experts);
  if (!qwen) {
    return;
  }
  m.intermediate_size = read.count("moe_intermediate_size", {}, 1, model::kMaxLength);
  const std::int64_t step = read.count("decoder_sparse_step", 1, 1, model::kMaxLength);
  const auto dense = document.find("mlp_only_layers");
  const bool some_dense = dense != document.end() && !dense->is_null() && !dense->empty();
  if (step != 1 || some_dense) {
    read.fail(Status::unsupported(step != 1 ? "decoder_sparse_step" : "mlp_only_layers",
                                  step != 1 ? std::to_string(step) : "some layers",
                                  "experts in every layer are counted"));
  }
}

/// One window for all layers, or none. Qwen publishes a window and turns it on by a flag, from a
/// layer on, or layer by layer in layer_types; others mean it when it is there.
void read_windows(const json& document, const std::string& type, Reader& read, ModelConfig& m) {
  const bool qwen = type.starts_with("qwen");
  if (!qwen || read.flag("use_sliding_window", false)) {
    m.sliding_window = read.count("sliding_window", 0, 1, model::kMaxLength);
  }
  const auto given = [&](const char* key) {
    const auto found = document.find(key);
    return found == document.end() || found->is_null() ? nullptr : &*found;
  };
  const json* const types = given("layer_types");
  if (types == nullptr) {
    // Without a number transformers takes one of its own: it is asked for.
    const bool counted = m.sliding_window > 0 && (type == "qwen2" || type == "qwen3");
    if (counted || (m.sliding_window > 0 && given("max_window_layers") != nullptr)) {
      const std::int64_t full = read.count("max_window_layers", {}, 0, model::kMaxLayers);
      if (full >= m.num_layers) {  // the first so many layers see all
        m.sliding_window = 0;
      } else if (full > 0) {
        read.fail(Status::unsupported("max_window_layers", std::to_string(full),
                                      "a window in some layers and not in others is not built"));
      }
    }
    return;
  }
  if (!types->is_array() || static_cast<std::int64_t>(types->size()) != m.num_layers) {
    read.fail(Status::invalid_argument("layer_types", Reader::shown(*types),
                                       fmt::format("a list of {}", m.num_layers)));
    return;
  }
  const json& first = (*types)[0];
  for (const json& each : *types) {
    if (each != first) {
      read.fail(Status::unsupported(
          "layer_types", fmt::format("{} beside {}", Reader::shown(first), Reader::shown(each)),
          "all layers are of one type"));
      return;
    }
  }
  if (first == "full_attention") {
    m.sliding_window = 0;
  } else if (first != "sliding_attention" || m.sliding_window == 0) {
    read.fail(Status::unsupported("layer_types", Reader::shown(first),
                                  "full_attention, and sliding_attention with a sliding_window"));
  }
}

/// A flag of biases where models of the type have none of the kind, so that it would be a guess
/// whether it means anything; and qkv_bias, which some write for what the type says already.
void check_biases(const std::string& type, Reader& read, const ModelConfig& m) {
  const auto refuse = [&](const char* key, bool known) {
    if (!known && read.flag(key, false)) {
      read.fail(Status::unsupported(key, "true", fmt::format("{} has no such biases", type)));
    }
  };
  refuse("attention_bias", type.empty() || type == "llama" || type.starts_with("qwen3"));
  refuse("mlp_bias", type.empty() || type == "llama");
  const bool has = m.qkv_bias || m.attention_bias;
  if (read.flag("qkv_bias", has) != has) {
    read.fail(Status::unsupported("qkv_bias", has ? "false" : "true",
                                  fmt::format("{} is what the model_type has", has)));
  }
}

/// Keys that some publish with the value that every model here has; any other is refused.
void check_settled(const json& document, Reader& read) {
  for (const char* const key : kFalseKeys) {
    if (read.flag(key, false)) {
      read.fail(Status::unsupported(key, "true", "false"));
    }
  }
  const auto whole = [&](const json& object, const std::string& prefix) {
    const auto found = object.find("partial_rotary_factor");
    if (found == object.end() || found->is_null()) {
      return;
    }
    if (!found->is_number() || found->get<double>() != 1) {
      read.fail(Status::unsupported(prefix + "partial_rotary_factor", Reader::shown(*found),
                                    "1: heads turn as a whole"));
    }
  };
  whole(document, "");
  for (const char* const key : {"rope_scaling", "rope_parameters"}) {
    if (const auto found = document.find(key); found != document.end() && found->is_object()) {
      whole(*found, std::string(key) + ".");
    }
  }
}

DType published_dtype(Reader& read) {
  std::string text = read.text("torch_dtype");
  if (text.empty()) {
    text = read.text("dtype");
  }
  if (text.empty() || text == "bfloat16") {
    return DType::bf16;
  }
  if (text == "float16") {
    return DType::f16;
  }
  if (text == "float32") {
    return DType::f32;
  }
  read.fail(Status::invalid_argument("torch_dtype", text, "bfloat16, float16, float32"));
  return DType::bf16;
}

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (ModelConfig& model : built_in_models()) {
    names.push_back(std::move(model.name));
  }
  return names;
}

Result<ModelConfig> find_model(std::string_view name) {
  for (ModelConfig& model : built_in_models()) {
    if (name == model.name) {
      return std::move(model);
    }
  }
  return Status::invalid_argument(
      "model", std::string(name),
      fmt::format("{} or the path of a config.json", fmt::join(model_names(), ", ")));
}

Result<ModelConfig> parse_model(std::string_view text, std::string_view name) {
  if (text.size() > kMaxConfigBytes) {
    return Status::io_error(std::string(name), fmt::format("{} bytes", text.size()),
                            fmt::format("a config.json of at most {} bytes", kMaxConfigBytes));
  }
  const json document = json::parse(text, nullptr, false);
  if (document.is_discarded() || !document.is_object()) {
    return Status::io_error(std::string(name), "text that is not a JSON object",
                            "a Hugging Face config.json");
  }
  Reader read(document);
  const std::string type = read.text("model_type");
  bool known = false;
  for (const char* each : kLlamaLike) {
    known = known || type == each;
  }
  if (!known) {
    return Status::unsupported("model_type", type,
                               "llama, mistral, qwen2, qwen3, mixtral, qwen3_moe");
  }
  ModelConfig m;
  m.name = std::string(name);
  m.hidden_size = read.count("hidden_size", {}, 1, model::kMaxLength);
  m.intermediate_size = read.count("intermediate_size", {}, 1, model::kMaxLength);
  m.num_layers = read.count("num_hidden_layers", {}, 1, model::kMaxLayers);
  m.heads_q = read.count("num_attention_heads", {}, 1, model::kMaxHeads);
  m.heads_kv = read.count("num_key_value_heads", m.heads_q, 1, model::kMaxHeads);
  if (!document.contains("head_dim") && m.hidden_size % m.heads_q != 0) {
    read.fail(Status::invalid_argument(
        "head_dim",
        fmt::format("nothing, with hidden_size {} and {} heads", m.hidden_size, m.heads_q),
        "a hidden_size that the heads divide, or head_dim"));
  }
  m.head_dim = read.count("head_dim", m.hidden_size / m.heads_q, 1, model::kMaxHeadDim);
  m.vocab_size = read.count("vocab_size", {}, 1, model::kMaxLength);
  m.tie_word_embeddings = read.flag("tie_word_embeddings", false);
  m.attention_bias = read.flag("attention_bias", false);
  m.qkv_bias = type == "qwen2";  // q, k, v carry a bias there, o does not
  m.qk_norm = type == "qwen3" || type == "qwen3_moe";
  m.mlp_bias = read.flag("mlp_bias", false);
  m.dtype = published_dtype(read);
  read_experts(document, type, read, m);
  read_windows(document, type, read, m);
  check_biases(type, read, m);
  check_settled(document, read);
  const std::string activation = read.text("hidden_act");
  if (!activation.empty() && activation != "silu" && activation != "swish") {
    read.fail(Status::unsupported("hidden_act", activation, "silu"));
  }
  check_keys(document, m.has_experts(), read);
  if (!read.status()) {
    return read.status();
  }
  if (Status s = model::check_model(m); !s) {
    return s;
  }
  return m;
}

Result<ModelConfig> load_model(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return Status::io_error(path, "a file that cannot be opened", "a readable config.json");
  }
  std::string text(kMaxConfigBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) {
    return Status::io_error(path, "a file that cannot be read", "a readable config.json");
  }
  text.resize(static_cast<std::size_t>(file.gcount()));
  return parse_model(text, path);
}

/// Per layer: q, k, v, o projections, gate, up, down, two norms; beside them the embedding table,
/// the last norm and, unless tied, the head.
Result<ParameterCount> count_parameters(const ModelConfig& m, const Convention& convention) {
  if (Status s = model::first_error(model::check_model(m), convention.validate()); !s) {
    return s;
  }
  const auto h = static_cast<double>(m.hidden_size), f = static_cast<double>(m.intermediate_size);
  const auto q = static_cast<double>(m.heads_q) * static_cast<double>(m.head_dim);
  const auto kv = static_cast<double>(m.heads_kv) * static_cast<double>(m.head_dim);
  const auto vocab = static_cast<double>(m.vocab_size), layers = static_cast<double>(m.num_layers);
  ParameterCount c;
  const auto add = [&](const char* name, double count, double elements, bool matmul) {
    if (elements > 0) {
      c.tensors.push_back({name, count, elements, matmul});
    }
  };
  const bool qkv_bias = m.attention_bias || m.qkv_bias;
  add("embed_tokens.weight", 1, vocab * h, false);
  add("layers.*.input_layernorm.weight", layers, h, false);
  add("layers.*.self_attn.q_proj.weight", layers, h * q, true);
  add("layers.*.self_attn.k_proj.weight", layers, h * kv, true);
  add("layers.*.self_attn.v_proj.weight", layers, h * kv, true);
  add("layers.*.self_attn.o_proj.weight", layers, q * h, true);
  add("layers.*.self_attn.q_proj.bias", layers, qkv_bias ? q : 0, false);
  add("layers.*.self_attn.k_proj.bias", layers, qkv_bias ? kv : 0, false);
  add("layers.*.self_attn.v_proj.bias", layers, qkv_bias ? kv : 0, false);
  add("layers.*.self_attn.o_proj.bias", layers, m.attention_bias ? h : 0, false);
  const auto d = static_cast<double>(m.head_dim);
  add("layers.*.self_attn.q_norm.weight", layers, m.qk_norm ? d : 0, false);
  add("layers.*.self_attn.k_norm.weight", layers, m.qk_norm ? d : 0, false);
  add("layers.*.post_attention_layernorm.weight", layers, h, false);
  const auto experts = static_cast<double>(m.num_experts);
  if (m.has_experts()) {
    add("layers.*.mlp.gate.weight", layers, h * experts, true);
    for (const char* name :
         {"layers.*.mlp.experts.*.gate_proj.weight", "layers.*.mlp.experts.*.up_proj.weight",
          "layers.*.mlp.experts.*.down_proj.weight"}) {
      add(name, layers * experts, h * f, true);
    }
  } else {
    add("layers.*.mlp.gate_proj.weight", layers, h * f, true);
    add("layers.*.mlp.up_proj.weight", layers, h * f, true);
    add("layers.*.mlp.down_proj.weight", layers, f * h, true);
  }
  add("layers.*.mlp.gate_proj.bias", layers, m.mlp_bias ? f : 0, false);
  add("layers.*.mlp.up_proj.bias", layers, m.mlp_bias ? f : 0, false);
  add("layers.*.mlp.down_proj.bias", layers, m.mlp_bias ? h : 0, false);
  add("norm.weight", 1, h, false);
  add("lm_head.weight", 1, m.tie_word_embeddings ? 0 : vocab * h, true);

  for (const ParameterTensor& t : c.tensors) {
    c.total += t.count * t.elements;
    if (t.name.starts_with("layers.")) {
      const double of_layer = t.count / layers * t.elements;
      c.layer += of_layer;
      c.layer_matmul += t.matmul ? of_layer : 0;
    }
  }
  c.embedding = vocab * h;
  c.head = m.tie_word_embeddings ? 0 : vocab * h;
  c.matmul = layers * c.layer_matmul + vocab * h;
  const double idle = m.has_experts()
                          ? 3 * h * f * static_cast<double>(m.num_experts - m.experts_per_token)
                          : 0;  // of a layer, to one token
  c.active = c.total - layers * idle;
  c.active_layer_matmul = c.layer_matmul - idle;
  c.active_matmul = c.matmul - layers * idle;
  if (convention.n_params && m.has_experts()) {
    return Status::invalid_argument("n_params", fmt::format("{}", *convention.n_params),
                                    "none with experts: a token meets some of them");
  }
  if (convention.n_params) {
    c.active = *convention.n_params;
    c.total = *convention.n_params;
  }
  return c;
}

}  // namespace rafter
