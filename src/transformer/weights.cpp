#include "transformer/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/element.h"
#include "tiles/uniform.h"
#include "transformer/checkpoint.h"

namespace rafter {
namespace transformer {

std::vector<Place> places_of(const ModelConfig& m) {
  const std::int64_t h = m.hidden_size, f = m.intermediate_size, d = m.head_dim;
  const std::int64_t q = m.heads_q * d, kv = m.heads_kv * d;
  std::vector<Place> places;
  const auto outer = [&](const char* name, Matrix Weights::*which, std::int64_t rows,
                         bool is_vector) {
    places.push_back({.info = {name, rows, h}, .is_vector = is_vector, .outer = which});
  };
  outer("model.embed_tokens.weight", &Weights::embedding, m.vocab_size, false);
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer) {
    std::int64_t first = 0;
    // `again`: behind the one before, in the same matrix.
    const auto add = [&](const char* name, Slot slot, std::int64_t rows, std::int64_t cols,
                         bool again, bool there = true) {
      const std::int64_t elements = (rows == 0 ? 1 : rows) * cols;
      if (!there) {
        return;
      }
      first = again ? first : 0;
      places.push_back({.info = {fmt::format("model.layers.{}.{}", layer, name),
                                 std::max<std::int64_t>(1, rows), cols},
                        .is_vector = rows == 0,
                        .layer = layer,
                        .slot = slot,
                        .first = first});
      first += elements;
    };
    const bool qkv_bias = m.attention_bias || m.qkv_bias;
    add("input_layernorm.weight", Slot::input_norm, 0, h, false);
    add("self_attn.q_proj.weight", Slot::qkv, q, h, false);
    add("self_attn.k_proj.weight", Slot::qkv, kv, h, true);
    add("self_attn.v_proj.weight", Slot::qkv, kv, h, true);
    add("self_attn.q_proj.bias", Slot::qkv_bias, 0, q, false, qkv_bias);
    add("self_attn.k_proj.bias", Slot::qkv_bias, 0, kv, true, qkv_bias);
    add("self_attn.v_proj.bias", Slot::qkv_bias, 0, kv, true, qkv_bias);
    add("self_attn.q_norm.weight", Slot::q_norm, 0, d, false, m.qk_norm);
    add("self_attn.k_norm.weight", Slot::k_norm, 0, d, false, m.qk_norm);
    add("self_attn.o_proj.weight", Slot::o, h, q, false);
    add("self_attn.o_proj.bias", Slot::o_bias, 0, h, false, m.attention_bias);
    add("post_attention_layernorm.weight", Slot::mlp_norm, 0, h, false);
    add("mlp.gate_proj.weight", Slot::gate_up, f, h, false);
    add("mlp.up_proj.weight", Slot::gate_up, f, h, true);
    add("mlp.gate_proj.bias", Slot::gate_up_bias, 0, f, false, m.mlp_bias);
    add("mlp.up_proj.bias", Slot::gate_up_bias, 0, f, true, m.mlp_bias);
    add("mlp.down_proj.weight", Slot::down, h, f, false);
    add("mlp.down_proj.bias", Slot::down_bias, 0, h, false, m.mlp_bias);
  }
  outer("model.norm.weight", &Weights::norm, 1, true);
  if (!m.tie_word_embeddings) {
    outer("lm_head.weight", &Weights::head, m.vocab_size, false);
  }
  return places;
}

const Matrix& matrix_of(const Weights& weights, const Place& place) {
  return place.layer < 0 ? weights.*place.outer : weights.at(place.layer, place.slot);
}
Matrix& matrix_of(Weights& weights, const Place& place) {
  return const_cast<Matrix&>(matrix_of(std::as_const(weights), place));
}

namespace {

/// Matrices of the layers that products read.
bool is_packable(const Place& place) {
  return place.layer >= 0 && (place.slot == Slot::qkv || place.slot == Slot::o ||
                              place.slot == Slot::gate_up || place.slot == Slot::down);
}

/// The matrix in the format asked for, whose sizes are known.
Status set_format(const Place& place, const WeightFormat& format, Matrix& m) {
  if (!format.dtype || !is_packable(place)) {
    return Status::ok();
  }
  m.packed = format.dtype;
  m.group_size = *format.dtype == DType::int4 ? format.group_size : 0;
  const Result<std::int64_t> bytes = packed_bytes(packed_of(m));
  if (bytes) {
    return Status::ok();
  }
  const Status& why = bytes.status();
  if (why.parameter() == "shape.dtype" || why.parameter() == "shape.group_size") {
    return Status::invalid_argument(why.parameter() == "shape.dtype" ? "weights" : "group_size",
                                    why.given(), why.allowed());
  }
  return Status::invalid_argument(
      "weights",
      fmt::format("{} of {}, a matrix [{}, {}]", to_string(*m.packed), place.info.name, m.rows,
                  m.cols),
      fmt::format("matrices whose {} are {}", why.parameter() == "shape.n" ? "rows" : "columns",
                  why.allowed()));
}

/// Memory of every matrix, as large as what lies in it.
Status allocate(const std::vector<Place>& places, const Device& device, DType dtype,
                const WeightFormat& format, const ModelConfig& model, Weights& weights) {
  weights.layers.resize(static_cast<std::size_t>(model.num_layers));
  for (const Place& place : places) {
    Matrix& m = matrix_of(weights, place);
    m.cols = place.is_vector ? m.cols + place.info.cols : place.info.cols;
    m.rows = place.is_vector ? 1 : m.rows + place.info.rows;
  }
  for (const Place& place : places) {
    Matrix& m = matrix_of(weights, place);
    if (!m.storage) {
      if (Status s = set_format(place, format, m); !s) {
        return s;
      }
      Result<Storage> made = Storage::allocate(
          device, m.packed ? *packed_bytes(packed_of(m)) : m.rows * m.cols * bits_of(dtype) / 8);
      if (!made) {
        return made.status();
      }
      m.storage = *std::move(made);
    }
  }
  return Status::ok();
}

/// Tensors of one matrix follow each other: whether the i-th place is the last of its matrix.
bool ends_matrix(const std::vector<Place>& places, std::size_t i) {
  return i + 1 == places.size() || places[i + 1].first == 0;
}

/// Room for the largest matrix that is to be quantised, in the model's dtype; none without one.
Result<Storage> make_staging(const detail::ModelState& state) {
  std::int64_t most = 0;
  for (const Place& place : state.places) {
    const Matrix& m = matrix_of(state.weights, place);
    most = std::max(most, m.packed ? m.rows * m.cols * bits_of(state.dtype) / 8 : 0);
  }
  return most == 0 ? Result<Storage>(Storage{}) : Storage::allocate(state.device, most);
}

/// Quantises what lies in `staging`, and waits: it is written again.
Status quantize_staged(const detail::ModelState& state, const Storage& staging, const Matrix& m) {
  Status done =
      quantize(matrix(staging.data(), state.dtype, m.rows, m.cols), packed_of(m), state.device);
  return done && state.device.kind == Device::Kind::cuda ? synchronize(state.device, {}) : done;
}

/// Elements of a stored tensor rounded to dtype; a copy where they are of it.
void round_to(const StoredTensor& from, DType dtype, std::int64_t count, std::byte* to) {
  const std::int64_t size = bits_of(dtype) / 8, stored = bits_of(from.dtype) / 8;
  if (from.dtype == dtype) {
    std::memcpy(to, from.data, static_cast<std::size_t>(count * size));
    return;
  }
#pragma omp parallel for schedule(static) if (count > (1 << 16))
  for (std::int64_t i = 0; i < count; ++i) {
    alignas(4) std::byte element[4];  // the file's are not aligned
    std::memcpy(element, from.data + i * stored, static_cast<std::size_t>(stored));
    const TensorView one{.data = element, .dtype = from.dtype}, rounded{.data = to, .dtype = dtype};
    base::store_element(rounded, i, base::load_element(one, 0));
  }
}

bool fits(const StoredTensor& tensor, const Place& place) {
  const std::vector<std::int64_t> wanted = place.is_vector
                                               ? std::vector{place.info.cols}
                                               : std::vector{place.info.rows, place.info.cols};
  return tensor.shape == wanted;
}

/// No tensor is left over: it would be part of a model that this is not.
Status check_names(const Checkpoint& checkpoint, const std::vector<Place>& places,
                   const ModelConfig& model) {
  for (const std::string& name : checkpoint.names()) {
    const bool known = std::any_of(places.begin(), places.end(),
                                   [&](const Place& p) { return p.info.name == name; });
    const bool follows = name.ends_with("rotary_emb.inv_freq") ||  // from rope_theta
                         (model.tie_word_embeddings && name == "lm_head.weight");
    if (!known && !follows) {
      return Status::io_error(checkpoint.source(), "has tensor " + name,
                              "the model of config.json has none of that name");
    }
  }
  return Status::ok();
}

/// Every matrix is put together on the host, then copied, then quantised where it is to be.
Status fill(const Checkpoint& checkpoint, detail::ModelState& state) {
  const std::vector<Place>& places = state.places;
  const DType dtype = state.dtype;
  const std::int64_t size = bits_of(dtype) / 8;
  const Result<Storage> staging = make_staging(state);
  if (!staging) {
    return staging.status();
  }
  std::vector<std::byte> whole;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const Place& place = places[i];
    const StoredTensor* const tensor = checkpoint.find(place.info.name);
    if (tensor == nullptr) {
      return Status::io_error(checkpoint.source(), "has no tensor " + place.info.name,
                              "the model of config.json needs it");
    }
    if (!fits(*tensor, place)) {
      return Status::io_error(
          tensor->file,
          fmt::format("has {} of shape [{}]", place.info.name, fmt::join(tensor->shape, ", ")),
          place.is_vector
              ? fmt::format("[{}] by config.json", place.info.cols)
              : fmt::format("[{}, {}] by config.json", place.info.rows, place.info.cols));
    }
    const Matrix& m = matrix_of(state.weights, place);
    const std::int64_t bytes = m.rows * m.cols * size;
    whole.resize(static_cast<std::size_t>(bytes));
    round_to(*tensor, dtype, place.info.rows * place.info.cols, whole.data() + place.first * size);
    if (!ends_matrix(places, i)) {
      continue;
    }
    if (Status s = (m.packed ? *staging : m.storage).upload(whole.data(), bytes); !s) {
      return s;
    }
    if (Status s = m.packed ? quantize_staged(state, *staging, m) : Status::ok(); !s) {
      return s;
    }
  }
  return Status::ok();
}

}  // namespace
}  // namespace transformer

Result<std::shared_ptr<detail::ModelState>> detail::ModelState::make(
    const TransformerConfig& config, const Device& device, DType dtype,
    const WeightFormat& format) {
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16) {
    return Status::invalid_argument("dtype", to_string(dtype), "f32, bf16, f16");
  }
  if (const Result<ParameterCount> counted = count_parameters(config.model); !counted) {
    return counted.status();  // dimensions that mean nothing
  }
  if (config.model.has_experts()) {
    return Status::unsupported("num_experts", fmt::format("{}", config.model.num_experts),
                               "models with experts are planned, not run");
  }
  if (std::string why = why_no_linear(dtype, device); !why.empty()) {
    return Status::unsupported("dtype", to_string(dtype), std::move(why));
  }
  auto state = std::make_shared<ModelState>();
  state->config = config;
  state->device = device;
  state->dtype = dtype;
  state->format = format;
  state->places = transformer::places_of(config.model);
  for (const transformer::Place& place : state->places) {
    state->parameters.push_back(place.info);
  }
  Status done =
      transformer::allocate(state->places, device, dtype, format, config.model, state->weights);
  return done ? Result<std::shared_ptr<ModelState>>(std::move(state)) : done;
}

Result<Transformer> Transformer::random(const TransformerConfig& config, std::uint64_t seed,
                                        const Device& device, std::optional<DType> dtype,
                                        const WeightFormat& weights) {
  const Result<std::shared_ptr<detail::ModelState>> state =
      detail::ModelState::make(config, device, dtype.value_or(config.model.dtype), weights);
  if (!state) {
    return state.status();
  }
  const Result<transformer::Storage> staging = transformer::make_staging(**state);
  if (!staging) {
    return staging.status();
  }
  const DType type = (*state)->dtype;
  for (std::size_t i = 0; i < (*state)->places.size(); ++i) {
    const transformer::Place& place = (*state)->places[i];
    const transformer::Matrix& m = transformer::matrix_of((*state)->weights, place);
    TensorView view =
        matrix((m.packed ? *staging : m.storage).data(), type, place.info.rows, place.info.cols);
    view.data = static_cast<std::byte*>(view.data) + place.first * bits_of(type) / 8;
    const bool embedding = place.outer == &transformer::Weights::embedding;
    const double variance =
        place.is_vector || embedding ? 1 / 3.0 : 1 / static_cast<double>(place.info.cols);
    if (Status s = fill_uniform(view, tiles::hash_of(seed, i),
                                static_cast<float>(std::sqrt(3 * variance)), device);
        !s) {
      return s;
    }
    const bool whole = m.packed && transformer::ends_matrix((*state)->places, i);
    if (Status s = whole ? transformer::quantize_staged(**state, *staging, m) : Status::ok(); !s) {
      return s;
    }
  }
  if (device.kind == Device::Kind::cuda) {
    if (Status s = synchronize(device, {}); !s) {
      return s;
    }
  }
  return Transformer(*state);
}

Result<Transformer> Transformer::load(const std::string& folder, const Device& device,
                                      std::optional<DType> dtype, const WeightFormat& weights) {
  const Result<TransformerConfig> config = load_transformer(folder);
  if (!config) {
    return config.status();
  }
  const Result<transformer::Checkpoint> checkpoint = transformer::Checkpoint::open(folder);
  if (!checkpoint) {
    return checkpoint.status();
  }
  const std::vector<transformer::Place> places = transformer::places_of(config->model);
  if (Status s = transformer::check_names(*checkpoint, places, config->model); !s) {
    return s;
  }
  const Result<std::shared_ptr<detail::ModelState>> state =
      detail::ModelState::make(*config, device, dtype.value_or(config->model.dtype), weights);
  if (!state) {
    return state.status();
  }
  Status filled = transformer::fill(*checkpoint, **state);
  return filled ? Result<Transformer>(Transformer(*state)) : filled;
}

const TransformerConfig& Transformer::config() const { return state_->config; }
const Device& Transformer::device() const { return state_->device; }
DType Transformer::dtype() const { return state_->dtype; }
const WeightFormat& Transformer::weight_format() const { return state_->format; }
const std::vector<ParameterInfo>& Transformer::parameters() const { return state_->parameters; }

Result<std::vector<float>> Transformer::parameter(std::string_view name) const {
  for (const transformer::Place& place : state_->places) {
    if (place.info.name != name) {
      continue;
    }
    const transformer::Matrix& m = transformer::matrix_of(state_->weights, place);
    std::vector<std::byte> whole(static_cast<std::size_t>(m.storage.bytes()));
    if (Status s = m.storage.download(whole.data(), m.storage.bytes()); !s) {
      return s;
    }
    TensorView view{.data = whole.data(), .dtype = state_->dtype};
    std::vector<float> widened;
    if (m.packed) {
      PackedWeight packed = transformer::packed_of(m);
      packed.data = whole.data();
      widened.resize(static_cast<std::size_t>(m.rows * m.cols));
      view = matrix(widened.data(), DType::f32, m.rows, m.cols);
      if (Status s = dequantize(packed, view, Device::cpu()); !s) {
        return s;
      }
    }
    std::vector<float> values(static_cast<std::size_t>(place.info.rows * place.info.cols));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] =
          static_cast<float>(base::load_element(view, place.first + static_cast<std::int64_t>(i)));
    }
    return values;
  }
  return Status::invalid_argument("name", std::string(name), "a name of parameters() is");
}

double Transformer::weight_bytes() const {
  double bytes = 0;
  for (std::size_t i = 0; i < state_->places.size(); ++i) {
    const transformer::Matrix& m = transformer::matrix_of(state_->weights, state_->places[i]);
    bytes +=
        transformer::ends_matrix(state_->places, i) ? static_cast<double>(m.storage.bytes()) : 0.0;
  }
  return bytes;
}

}  // namespace rafter
