// A Llama-like model token by token in float64, straight from its definition: no cache, no fused
// matrices, no views. What the transformer's steps are held against.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "rafter/transformer.h"

namespace rafter::testing {

class TransformerOracle {
 public:
  using Row = std::vector<double>;
  using Parameters = std::map<std::string, std::vector<float>>;  // by published name

  TransformerOracle(TransformerConfig config, Parameters parameters)
      : config_(std::move(config)), parameters_(std::move(parameters)) {}

  static TransformerOracle of(const Transformer& model) {
    Parameters parameters;
    for (const ParameterInfo& info : model.parameters()) {
      parameters[info.name] = model.parameter(info.name).value();
    }
    return {model.config(), std::move(parameters)};
  }

  /// Logits of every token of one sequence.
  std::vector<Row> logits(const std::vector<std::int32_t>& tokens) const {
    const ModelConfig& m = config_.model;
    std::vector<Row> x;
    for (const std::int32_t token : tokens) {
      const std::vector<float>& table = parameters_.at("model.embed_tokens.weight");
      const auto first = table.begin() + token * m.hidden_size;
      x.emplace_back(first, first + m.hidden_size);
    }
    for (std::int64_t layer = 0; layer < m.num_layers; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      attend(prefix, x);
      for (Row& row : x) {
        const Row normed = norm(row, prefix + "post_attention_layernorm.weight");
        Row gate = apply(prefix + "mlp.gate_proj", normed);
        const Row up = apply(prefix + "mlp.up_proj", normed);
        for (std::size_t i = 0; i < gate.size(); ++i) {
          gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
        }
        add(apply(prefix + "mlp.down_proj", gate), row);
      }
    }
    std::vector<Row> out;
    for (const Row& row : x) {
      const bool tied = m.tie_word_embeddings;
      out.push_back(apply(tied ? "model.embed_tokens" : "lm_head", norm(row, "model.norm.weight")));
    }
    return out;
  }

 private:
  static void add(const Row& other, Row& row) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      row[i] += other[i];
    }
  }

  Row norm(const Row& row, const std::string& name) const {
    const std::vector<float>& weight = parameters_.at(name);
    double squares = 0;
    for (const double value : row) {
      squares += value * value;
    }
    const double size = static_cast<double>(row.size());
    const double factor = 1 / std::sqrt(squares / size + config_.rms_norm_eps);
    Row out;
    for (std::size_t i = 0; i < row.size(); ++i) {
      out.push_back(row[i] * factor * weight[i]);
    }
    return out;
  }

  /// weight · row + bias, where there is one.
  Row apply(const std::string& name, const Row& row) const {
    const std::vector<float>& weight = parameters_.at(name + ".weight");
    const auto bias = parameters_.find(name + ".bias");
    Row out(weight.size() / row.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      double sum = bias == parameters_.end() ? 0.0 : bias->second[i];
      for (std::size_t j = 0; j < row.size(); ++j) {
        sum += static_cast<double>(weight[i * row.size() + j]) * row[j];
      }
      out[i] = sum;
    }
    return out;
  }

  /// One head of a projected row, normed where the model does that, turned by its position.
  Row head(const Row& row, std::int64_t index, const std::string& norm_name,
           std::int64_t position) const {
    const std::int64_t d = config_.model.head_dim, half = d / 2;
    Row part(row.begin() + index * d, row.begin() + (index + 1) * d);
    if (config_.model.qk_norm) {
      part = norm(part, norm_name);
    }
    Row turned(part.size());
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * rope_frequency(config_.rope, i, d);
      const double a = part[static_cast<std::size_t>(i)],
                   b = part[static_cast<std::size_t>(i + half)];
      turned[static_cast<std::size_t>(i)] = a * std::cos(angle) - b * std::sin(angle);
      turned[static_cast<std::size_t>(i + half)] = b * std::cos(angle) + a * std::sin(angle);
    }
    return turned;
  }

  /// x += attention of norm(x).
  void attend(const std::string& prefix, std::vector<Row>& x) const {
    const ModelConfig& m = config_.model;
    const std::string self = prefix + "self_attn.";
    std::vector<Row> q, k, v;
    for (const Row& row : x) {
      const Row normed = norm(row, prefix + "input_layernorm.weight");
      q.push_back(apply(self + "q_proj", normed));
      k.push_back(apply(self + "k_proj", normed));
      v.push_back(apply(self + "v_proj", normed));
    }
    const auto length = static_cast<std::int64_t>(x.size());
    std::vector<Row> out(x.size(), Row(static_cast<std::size_t>(m.heads_q * m.head_dim)));
    for (std::int64_t h = 0; h < m.heads_q; ++h) {
      const std::int64_t kv = h / (m.heads_q / m.heads_kv);
      std::vector<Row> keys;
      for (std::int64_t j = 0; j < length; ++j) {
        keys.push_back(head(k[static_cast<std::size_t>(j)], kv, self + "k_norm.weight", j));
      }
      for (std::int64_t i = 0; i < length; ++i) {
        const Row query = head(q[static_cast<std::size_t>(i)], h, self + "q_norm.weight", i);
        const std::int64_t first =
            m.sliding_window > 0 ? std::max<std::int64_t>(0, i + 1 - m.sliding_window) : 0;
        Row weights;
        double sum = 0;
        for (std::int64_t j = first; j <= i; ++j) {
          double score = 0;
          for (std::size_t d = 0; d < query.size(); ++d) {
            score += query[d] * keys[static_cast<std::size_t>(j)][d];
          }
          weights.push_back(std::exp(score / std::sqrt(static_cast<double>(m.head_dim))));
          sum += weights.back();
        }
        for (std::int64_t j = first; j <= i; ++j) {
          for (std::int64_t d = 0; d < m.head_dim; ++d) {
            out[static_cast<std::size_t>(i)][static_cast<std::size_t>(h * m.head_dim + d)] +=
                weights[static_cast<std::size_t>(j - first)] / sum *
                v[static_cast<std::size_t>(j)][static_cast<std::size_t>(kv * m.head_dim + d)];
          }
        }
      }
    }
    for (std::size_t i = 0; i < x.size(); ++i) {
      add(apply(self + "o_proj", out[i]), x[i]);
    }
  }

  TransformerConfig config_;
  Parameters parameters_;
};

/// ‖logits − oracle‖ / ‖oracle‖ over the last tokens of the sequences that a session has.
inline double logits_error(const TransformerSession& session, const TransformerOracle& oracle,
                           const std::vector<std::vector<std::int32_t>>& texts) {
  const std::vector<float> logits = session.logits().value();
  double errors = 0, squares = 0;
  std::size_t at = 0;
  for (const std::vector<std::int32_t>& text : texts) {
    const std::vector<std::vector<double>> of_text = oracle.logits(text);
    for (const double wanted : of_text.back()) {
      const double error = logits.at(at++) - wanted;
      errors += error * error;
      squares += wanted * wanted;
    }
  }
  return std::sqrt(errors / squares);
}

}  // namespace rafter::testing
