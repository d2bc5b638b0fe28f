// What running a Llama-like model takes from its config.json beside the shapes that the cost model
// reads, which refuses keys that nobody understands: constants of the norms and of RoPE.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numbers>
#include <sstream>

#include "rafter/transformer.h"

namespace rafter {
namespace {

using nlohmann::json;

template <std::size_t kSize>
bool among(const std::array<std::string_view, kSize>& keys, std::string_view key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

/// Numbers of an object; the first failure stays.
class Reader {
 public:
  Reader(const json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  /// A number in (0, most]; the fallback where there is none, or a failure without one.
  double positive(const char* key, std::optional<double> fallback, double most) {
    const json* const value = find(key);
    const std::string allowed = fmt::format("a number above 0, up to {}", most);
    if (value == nullptr) {
      if (!fallback) {
        fail(Status::invalid_argument(prefix_ + key, "nothing", allowed));
      }
      return fallback.value_or(1);
    }
    const double number = value->is_number() ? value->get<double>() : -1;
    if (!(number > 0) || number > most) {
      fail(Status::invalid_argument(prefix_ + key, shown(*value), allowed));
      return fallback.value_or(1);
    }
    return number;
  }
  void fail(Status status) {
    if (status_) {
      status_ = std::move(status);
    }
  }
  const std::string& prefix() const { return prefix_; }
  const Status& status() const { return status_; }

 private:
  const json& object_;
  std::string prefix_;
  Status status_;
};

/// rope_scaling as published until transformers 4, rope_parameters since 5: a type and its numbers.
Status read_scaling(const json& object, const std::string& name, RopeConfig& rope) {
  if (!object.is_object()) {
    return Status::invalid_argument(name, shown(object), "an object");
  }
  Reader read(object, name + ".");
  std::string type = "default";
  for (const char* key : {"type", "rope_type"}) {
    if (const json* given = read.find(key); given != nullptr) {
      type = given->is_string() ? given->get<std::string>() : shown(*given);
    }
  }
  if (read.find("type") != nullptr && read.find("rope_type") != nullptr &&
      *read.find("type") != *read.find("rope_type")) {
    return Status::invalid_argument(name + ".type", shown(*read.find("type")),
                                    fmt::format("the rope_type beside it, {},", type));
  }
  const std::array<std::string_view, 4> common = {"type", "rope_type", "rope_theta",
                                                  "partial_rotary_factor"};
  const std::array<std::string_view, 4> of_llama3 = {
      "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"};
  const bool linear = type == "linear", llama3 = type == "llama3";
  if (!linear && !llama3 && type != "default") {
    return Status::unsupported(name, type, "default, linear and llama3 are built");
  }
  for (const auto& [key, value] : object.items()) {
    const bool known = among(common, key) || (linear && key == "factor") ||
                       (llama3 && among(of_llama3, key)) || value.is_null();
    if (!known) {
      return Status::unsupported(name + "." + key, shown(value),
                                 fmt::format("it is no parameter of rope_type {}", type));
    }
  }
  if (linear || llama3) {
    rope.scaling = linear ? RopeConfig::Scaling::linear : RopeConfig::Scaling::llama3;
    rope.factor = read.positive("factor", {}, 1e6);
  }
  if (llama3) {
    rope.low_freq_factor = read.positive("low_freq_factor", {}, 1e6);
    rope.high_freq_factor = read.positive("high_freq_factor", {}, 1e6);
    rope.original_max_position_embeddings =
        read.positive("original_max_position_embeddings", {}, 1e9);
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      read.fail(Status::invalid_argument(name + ".high_freq_factor",
                                         fmt::format("{}", rope.high_freq_factor),
                                         "more than low_freq_factor"));
    }
  }
  return read.status();
}

Status read_rope(const json& document, Reader& read, RopeConfig& rope) {
  rope.theta = read.positive("rope_theta", 10000.0, 1e12);
  const bool top = read.find("rope_theta") != nullptr;
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    const json* const object = read.find(name);
    if (object == nullptr) {
      continue;
    }
    if (Status s = read_scaling(*object, name, rope); !s) {
      return s;
    }
    if (object->contains("rope_theta")) {
      Reader inner(*object, std::string(name) + ".");
      const double theta = inner.positive("rope_theta", {}, 1e12);
      if (top && theta != rope.theta) {
        inner.fail(Status::invalid_argument(std::string(name) + ".rope_theta",
                                            fmt::format("{}", theta),
                                            fmt::format("the other rope_theta, {},", rope.theta)));
      }
      if (!inner.status()) {
        return inner.status();
      }
      rope.theta = theta;
    }
  }
  if (document.contains("rope_scaling") && !document["rope_scaling"].is_null() &&
      document.contains("rope_parameters") && !document["rope_parameters"].is_null() &&
      document["rope_scaling"] != document["rope_parameters"]) {
    return Status::invalid_argument("rope_scaling", "beside rope_parameters", "one of the two");
  }
  return read.status();
}

}  // namespace

double rope_frequency(const RopeConfig& rope, std::int64_t pair, std::int64_t head_dim) {
  const double frequency =
      std::pow(rope.theta, -2.0 * static_cast<double>(pair) / static_cast<double>(head_dim));
  if (rope.scaling == RopeConfig::Scaling::none) {
    return frequency;
  }
  if (rope.scaling == RopeConfig::Scaling::linear) {
    return frequency / rope.factor;
  }
  // Turns of the pair within the original length: many stay, few are stretched.
  const double turns = rope.original_max_position_embeddings * frequency / (2 * std::numbers::pi);
  const double kept = std::clamp(
      (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0);
  return kept * frequency + (1 - kept) * frequency / rope.factor;
}

Result<TransformerConfig> find_transformer(std::string_view name) {
  Result<ModelConfig> model = find_model(name);
  if (!model) {
    return model.status();
  }
  return TransformerConfig{.model = *std::move(model), .rms_norm_eps = 1e-5, .rope = {}};
}

Result<TransformerConfig> parse_transformer(std::string_view text, std::string_view name) {
  Result<ModelConfig> model = parse_model(text, name);  // that it is JSON, and the shapes
  if (!model) {
    return model.status();
  }
  if (model->has_experts()) {
    return Status::unsupported("model_type", fmt::format("{} experts", model->num_experts),
                               "models with experts are planned (explain model), not run");
  }
  TransformerConfig config;
  config.model = *std::move(model);
  const json document = json::parse(text, nullptr, false);
  Reader read(document, "");
  config.rms_norm_eps = read.positive("rms_norm_eps", 1e-6, 1);
  if (Status s = read_rope(document, read, config.rope); !s) {
    return s;
  }
  if (config.model.head_dim % 2 != 0 || config.model.head_dim > 256) {
    return Status::unsupported("head_dim", fmt::format("{}", config.model.head_dim),
                               "even numbers up to 256 turn and attend");
  }
  return config;
}

Result<TransformerConfig> load_transformer(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::path given(path);
  const std::string file =
      std::filesystem::is_directory(given, ignored) ? (given / "config.json").string() : path;
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  if (!stream || !(text << stream.rdbuf())) {
    return Status::io_error(file, "a file that cannot be read", "a readable config.json");
  }
  return parse_transformer(text.str(), file);
}

}  // namespace rafter
