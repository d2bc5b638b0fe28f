// config.json and .safetensors of a Hugging Face folder: what is read, and what is refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <numbers>

#include "rafter/transformer.h"
#include "support/must.h"

namespace rafter {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::must;

// As published with Llama-3.1-8B, the keys that generation reads left in.
const char* const kLlama31 = R"({"architectures": ["LlamaForCausalLM"], "attention_bias": false,
  "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008],
  "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 128256})";

TransformerConfig with(const char* key, const json& value) {
  json document = json::parse(kLlama31);
  document[key] = value;
  return must(parse_transformer(document.dump()));
}
std::string refusal(const char* key, const json& value) {
  json document = json::parse(kLlama31);
  document[key] = value;
  const Result<TransformerConfig> config = parse_transformer(document.dump());
  return config ? "accepted" : config.status().parameter();
}

TEST(TransformerConfig, ReadsThePublishedOnes) {
  const TransformerConfig llama = must(parse_transformer(kLlama31));
  EXPECT_EQ(llama.model.head_dim, 128);
  EXPECT_EQ(llama.rms_norm_eps, 1e-5);
  EXPECT_EQ(llama.rope.theta, 500000);
  EXPECT_EQ(llama.rope.scaling, RopeConfig::Scaling::llama3);
  const TransformerConfig mistral = must(parse_transformer(
      R"({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
          "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
          "vocab_size": 32000, "hidden_act": "silu", "tie_word_embeddings": false})"));
  EXPECT_EQ(mistral.model.sliding_window, 4096);
  const TransformerConfig qwen3 = must(parse_transformer(
      R"({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
          "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
          "max_window_layers": 28, "use_sliding_window": false, "sliding_window": null,
          "rms_norm_eps": 1e-06, "rope_theta": 1000000, "tie_word_embeddings": true,
          "rope_scaling": null, "attention_bias": false, "vocab_size": 151936,
          "layer_types": null})"));
  EXPECT_TRUE(qwen3.model.qk_norm);
  EXPECT_EQ(qwen3.model.head_dim, 128);
  // Qwen3-0.6B as published: 596,049,920 parameters.
  EXPECT_EQ(must(count_parameters(qwen3.model)).total, 596049920.0);
  for (const std::string& name : model_names()) {
    EXPECT_EQ(must(find_transformer(name)).model.name, name);
  }
}

TEST(TransformerConfig, TakesRopeWhereverItIsSaid) {
  json document = json::parse(kLlama31);
  document.erase("rope_scaling");
  document.erase("rope_theta");
  EXPECT_EQ(must(parse_transformer(document.dump())).rope.theta, 10000);
  document["rope_parameters"] = {{"rope_theta", 5e5}, {"rope_type", "default"}};
  EXPECT_EQ(must(parse_transformer(document.dump())).rope.theta, 5e5);
  document["rope_parameters"] = {{"rope_theta", 5e5}, {"rope_type", "linear"}, {"factor", 4.0}};
  EXPECT_EQ(must(parse_transformer(document.dump())).rope.factor, 4);
  document["rope_theta"] = 1e4;
  EXPECT_EQ(parse_transformer(document.dump()).status().parameter(), "rope_parameters.rope_theta");
}

TEST(TransformerConfig, WindowsOfAllLayersOrOfNone) {
  json document = json::parse(kLlama31);
  document["model_type"] = "qwen2";
  document["sliding_window"] = 4096;
  const auto window = [&document] {
    const Result<TransformerConfig> config = parse_transformer(document.dump());
    return config ? std::to_string(config->model.sliding_window) : config.status().parameter();
  };
  EXPECT_EQ(window(), "0");  // turned off by default
  document["use_sliding_window"] = true;
  EXPECT_EQ(window(), "max_window_layers");  // transformers would take 28
  document["max_window_layers"] = 0;
  EXPECT_EQ(window(), "4096");
  document["max_window_layers"] = 32;
  EXPECT_EQ(window(), "0");
  document["max_window_layers"] = 16;
  EXPECT_EQ(window(), "max_window_layers");
  document.erase("max_window_layers");
  document["layer_types"] = std::vector<std::string>(32, "full_attention");
  EXPECT_EQ(window(), "0");
  document["layer_types"][3] = "sliding_attention";
  EXPECT_EQ(window(), "layer_types");
  document["layer_types"] = {"full_attention"};
  EXPECT_EQ(window(), "layer_types");
  document["layer_types"] = std::vector<std::string>(32, "sliding_attention");
  document["max_window_layers"] = 28;  // of use where layers have no types
  EXPECT_EQ(window(), "4096");
  document["use_sliding_window"] = false;
  EXPECT_EQ(window(), "layer_types");
}

/// What is refused to be run must not be counted as something else.
TEST(TransformerConfig, ThePlannerRefusesTheSameWindowsAndBiases) {
  const auto planned = [](const char* type, const json& changes) {
    json document = json::parse(kLlama31);
    document["model_type"] = type;
    document.update(changes);
    const Result<ModelConfig> model = parse_model(document.dump());
    return model ? std::string("accepted") : model.status().parameter();
  };
  const json window = {{"sliding_window", 1024}, {"use_sliding_window", true}};
  json some = window, types = window;
  some["max_window_layers"] = 16;
  types["layer_types"] = std::vector<std::string>(32, "full_attention");
  types["layer_types"][3] = "sliding_attention";
  EXPECT_EQ(planned("qwen2", some), "max_window_layers");
  EXPECT_EQ(planned("qwen3", types), "layer_types");
  EXPECT_EQ(planned("qwen3", {{"attention_bias", true}}), "accepted");
  EXPECT_EQ(planned("mistral", {{"attention_bias", true}}), "attention_bias");
  EXPECT_EQ(planned("qwen2", {{"attention_bias", true}}), "attention_bias");
  EXPECT_EQ(planned("qwen2", {{"mlp_bias", true}}), "mlp_bias");
  EXPECT_EQ(planned("llama", {{"qkv_bias", true}}), "qkv_bias");
  EXPECT_EQ(planned("llama", {{"rope_parameters", {{"partial_rotary_factor", 0.5}}}}),
            "rope_parameters.partial_rotary_factor");
  for (const char* const key : {"use_mrope", "rope_interleaved"}) {
    EXPECT_EQ(planned("qwen2", {{key, true}}), key);
    EXPECT_EQ(planned("qwen2", {{key, false}}), "accepted");
  }
}

TEST(TransformerConfig, RefusesByNameWhatItDoesNotUnderstand) {
  EXPECT_EQ(refusal("num_local_experts", 8), "num_local_experts");
  EXPECT_EQ(refusal("quantization_config", {{"bits", 4}}), "quantization_config");
  EXPECT_EQ(refusal("logits_scaling", 8.0), "logits_scaling");
  EXPECT_EQ(refusal("some_new_key", "x"), "some_new_key");
  EXPECT_EQ(refusal("some_new_key", nullptr), "accepted");
  EXPECT_EQ(refusal("_name_or_path", "x"), "accepted");
  EXPECT_EQ(refusal("model_type", "gpt2"), "model_type");
  EXPECT_EQ(refusal("rope_scaling", {{"type", "yarn"}, {"factor", 2.0}}), "rope_scaling");
  EXPECT_EQ(refusal("rope_scaling", {{"type", "linear"}}), "rope_scaling.factor");
  EXPECT_EQ(refusal("rope_scaling", {{"type", "linear"}, {"factor", 2.0}, {"beta", 1}}),
            "rope_scaling.beta");
  EXPECT_EQ(
      refusal("rope_scaling", {{"type", "default"}, {"rope_type", "linear"}, {"factor", 2.0}}),
      "rope_scaling.type");
  EXPECT_EQ(refusal("rope_scaling", "linear"), "rope_scaling");
  EXPECT_EQ(refusal("rope_theta", 0), "rope_theta");
  EXPECT_EQ(refusal("rms_norm_eps", "small"), "rms_norm_eps");
  EXPECT_EQ(refusal("partial_rotary_factor", 0.5), "partial_rotary_factor");
  EXPECT_EQ(refusal("qkv_bias", true), "qkv_bias");
  EXPECT_EQ(refusal("head_dim", 127), "head_dim");
  EXPECT_EQ(with("qkv_bias", false).model.qkv_bias, false);
  EXPECT_EQ(parse_transformer("[]").status().code(), StatusCode::kIoError);
  EXPECT_EQ(load_transformer("/nowhere").status().code(), StatusCode::kIoError);
  EXPECT_EQ(find_transformer("gpt-5").status().parameter(), "model");
}

TEST(TransformerConfig, ExpertsAreCountedButNotRun) {
  json document = json::parse(kLlama31);
  document["model_type"] = "mixtral";
  const auto refused = [&document] {
    const Result<TransformerConfig> config = parse_transformer(document.dump());
    return config ? "accepted" : config.status().parameter();
  };
  EXPECT_EQ(refused(), "num_local_experts");
  document["num_local_experts"] = 8;
  EXPECT_EQ(refused(), "num_experts_per_tok");
  document["num_experts_per_tok"] = 2;
  EXPECT_EQ(refused(), "model_type");
}

TEST(RopeFrequency, OfLlama3KeepsShortWavelengthsAndStretchesLongOnes) {
  const RopeConfig rope = must(parse_transformer(kLlama31)).rope;
  RopeConfig plain = rope;
  plain.scaling = RopeConfig::Scaling::none;
  for (std::int64_t i = 0; i < 64; ++i) {
    const double frequency = rope_frequency(plain, i, 128), scaled = rope_frequency(rope, i, 128);
    EXPECT_DOUBLE_EQ(frequency, std::pow(500000.0, -static_cast<double>(i) / 64));
    const double wavelength = 2 * std::numbers::pi / frequency;
    if (wavelength < 8192 / 4.0) {
      EXPECT_DOUBLE_EQ(scaled, frequency) << i;
    } else if (wavelength > 8192) {
      EXPECT_DOUBLE_EQ(scaled, frequency / 8) << i;
    } else {
      const double smooth = (8192 / wavelength - 1) / (4 - 1);
      EXPECT_NEAR(scaled, (1 - smooth) * frequency / 8 + smooth * frequency, 1e-15) << i;
    }
  }
}

// ---- weights from files

/// A folder of its own, gone with the object.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "rafter_model_XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  std::string path() const { return path_.string(); }
  void write(const std::string& name, const std::string& contents) const {
    std::ofstream(path_ / name, std::ios::binary) << contents;
  }

 private:
  fs::path path_;
};

const char* const kTiny = R"({"model_type": "qwen2", "hidden_size": 8, "intermediate_size": 16,
  "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 5,
  "tie_word_embeddings": true, "torch_dtype": "float32"})";

/// A file with these tensors, element i of tensor t being t + i / 64; bf16 and f16 hold it exactly.
std::string file_of(const std::vector<std::pair<ParameterInfo, int>>& tensors, DType dtype,
                    const std::function<void(json&)>& spoil = {}) {
  json header = json::object();
  header["__metadata__"] = {{"format", "pt"}};
  std::string data;
  for (const auto& [info, number] : tensors) {
    const std::size_t first = data.size();
    for (std::int64_t i = 0; i < info.rows * info.cols; ++i) {
      const float value = static_cast<float>(number % 4) + static_cast<float>(i % 32) / 32;
      const std::uint16_t half = dtype == DType::bf16 ? f32_to_bf16(value) : f32_to_f16(value);
      const void* const bytes = dtype == DType::f32 ? static_cast<const void*>(&value) : &half;
      data.append(static_cast<const char*>(bytes), static_cast<std::size_t>(bits_of(dtype) / 8));
    }
    const bool vector = info.name.ends_with("norm.weight") || info.name.ends_with("bias");
    header[info.name] = {
        {"dtype", dtype == DType::f32    ? "F32"
                  : dtype == DType::bf16 ? "BF16"
                                         : "F16"},
        {"shape", vector ? json::array({info.cols}) : json::array({info.rows, info.cols})},
        {"data_offsets", {first, data.size()}}};
  }
  if (spoil) {
    spoil(header);
  }
  const std::string text = header.dump();
  const std::uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + text + data;
}

std::vector<std::pair<ParameterInfo, int>> tiny_tensors() {
  const Transformer model =
      must(Transformer::random(must(parse_transformer(kTiny)), 1, Device::cpu()));
  std::vector<std::pair<ParameterInfo, int>> tensors;
  for (const ParameterInfo& info : model.parameters()) {
    tensors.emplace_back(info, static_cast<int>(tensors.size()));
  }
  return tensors;
}

void expect_loaded(const std::string& folder) {
  const Transformer model = must(Transformer::load(folder, Device::cpu()));
  for (const auto& [info, number] : tiny_tensors()) {
    const std::vector<float> values = must(model.parameter(info.name));
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(values[i], static_cast<float>(number % 4) + static_cast<float>(i % 32) / 32)
          << info.name << " " << i;
    }
  }
}

TEST(Checkpoint, OneFileOfEveryDtypeAndShardsAreReadToTheBit) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Folder folder;
    folder.write("config.json", kTiny);
    folder.write("model.safetensors", file_of(tiny_tensors(), dtype));
    expect_loaded(folder.path());
  }
  const Folder folder;
  const auto all = tiny_tensors();
  const auto middle = all.begin() + 4;  // between q and k: one matrix from two shards
  folder.write("config.json", kTiny);
  folder.write("a.safetensors", file_of({all.begin(), middle}, DType::f32));
  folder.write("b.safetensors", file_of({middle, all.end()}, DType::bf16));
  json map;
  for (const auto& [info, number] : all) {
    map[info.name] = number < 4 ? "a.safetensors" : "b.safetensors";
  }
  folder.write("model.safetensors.index.json", json{{"weight_map", map}}.dump());
  expect_loaded(folder.path());
  map[all[0].first.name] = "b.safetensors";
  folder.write("model.safetensors.index.json", json{{"weight_map", map}}.dump());
  EXPECT_THAT(Transformer::load(folder.path(), Device::cpu()).status().message(),
              ::testing::HasSubstr("it is not there"));
  map[all[0].first.name] = "../a.safetensors";
  folder.write("model.safetensors.index.json", json{{"weight_map", map}}.dump());
  EXPECT_THAT(Transformer::load(folder.path(), Device::cpu()).status().message(),
              ::testing::HasSubstr("elsewhere"));
}

/// Token 4 is NaN, and with it its keys and values: the whole cache is once full of them.
TEST(Checkpoint, WhatEarlierPromptsLeftInTheCacheTakesNoPart) {
  std::string file = file_of(tiny_tensors(), DType::f32);
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  constexpr std::size_t kRow = 8 * sizeof(float);  // the embedding [5, 8] is the first tensor
  file.replace(8 + length + 4 * kRow, kRow, kRow, '\xff');
  const Folder folder;
  folder.write("config.json", kTiny);
  folder.write("model.safetensors", file);
  const Transformer model = must(Transformer::load(folder.path(), Device::cpu()));
  const SessionOptions options{.max_batch = 2, .max_seqlen = 12, .page_size = 4};
  using Prompts = std::vector<std::vector<std::int32_t>>;
  for (const Prompts& prompts : {Prompts{{1, 2, 3, 0, 1}}, Prompts{{1, 2}, {3, 0, 1, 2, 3}}}) {
    const auto logits_of = [&prompts](TransformerSession session) {
      EXPECT_TRUE(session.prefill(prompts));
      std::vector<float> logits = must(session.logits());
      EXPECT_TRUE(session.decode(std::vector<std::int32_t>(prompts.size(), 2)));
      const std::vector<float> decoded = must(session.logits());
      logits.insert(logits.end(), decoded.begin(), decoded.end());
      return logits;
    };
    TransformerSession used = must(TransformerSession::make(model, options));
    ASSERT_TRUE(used.prefill(Prompts(2, std::vector<std::int32_t>(12, 4))));
    ASSERT_TRUE(std::isnan(must(used.logits())[0]));
    const std::vector<float> wanted = logits_of(must(TransformerSession::make(model, options)));
    const std::vector<float> got = logits_of(used);
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) {  // the head is the embedding: column 4 is NaN
      ASSERT_TRUE(i % 5 == 4 ? std::isnan(got[i]) : got[i] == wanted[i]) << i << " " << got[i];
    }
  }
}

TEST(Checkpoint, ADamagedFileIsRefusedWithWhatIsWrong) {
  const auto message = [](const std::string& file) {
    const Folder folder;
    folder.write("config.json", kTiny);
    folder.write("model.safetensors", file);
    const Result<Transformer> model = Transformer::load(folder.path(), Device::cpu());
    return model ? std::string("accepted") : model.status().message();
  };
  const auto all = tiny_tensors();
  const std::string q = "model.layers.0.self_attn.q_proj.weight";
  const auto spoiled = [&](const std::function<void(json&)>& spoil) {
    return message(file_of(all, DType::f32, spoil));
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(message(file_of(all, DType::f32)), "accepted");
  EXPECT_THAT(message(""), HasSubstr("is empty"));
  EXPECT_THAT(message("short"), HasSubstr("truncated"));
  EXPECT_THAT(message(std::string(64, '\xff')), HasSubstr("truncated"));
  EXPECT_THAT(message(std::string("\2\0\0\0\0\0\0\0[]", 10)), HasSubstr("no JSON object"));
  EXPECT_THAT(spoiled([&](json& h) { h.erase(q); }), HasSubstr("has no tensor " + q));
  EXPECT_THAT(spoiled([&](json& h) { h["extra"] = h[q]; }), HasSubstr("has tensor extra"));
  EXPECT_THAT(spoiled([&](json& h) { h[q]["dtype"] = "I8"; }), HasSubstr("dtype I8"));
  EXPECT_THAT(spoiled([&](json& h) { h[q]["shape"] = {4, 16}; }), HasSubstr("[4, 16]"));
  EXPECT_THAT(spoiled([&](json& h) {
                h[q]["shape"] = {1 << 30, 1 << 30, 1 << 30};
              }),
              HasSubstr("more elements"));
  EXPECT_THAT(spoiled([&](json& h) { h[q]["shape"] = {-8, 8}; }), HasSubstr("described otherwise"));
  EXPECT_THAT(spoiled([&](json& h) {
                h[q]["data_offsets"] = {0, 1 << 30};
              }),
              HasSubstr("offsets 0 to 1073741824"));
  EXPECT_THAT(spoiled([&](json& h) {
                h[q]["data_offsets"] = {8, 0};
              }),
              HasSubstr("offsets 8 to 0"));
  std::string cut = file_of(all, DType::f32);
  cut.resize(cut.size() - 1);
  EXPECT_THAT(message(cut), HasSubstr("offsets"));
}

}  // namespace
}  // namespace rafter
