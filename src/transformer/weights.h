// A model's weights as the steps want them: q, k, v in one matrix, gate and up in another.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rafter/layers.h"
#include "rafter/transformer.h"
#include "transformer/storage.h"

namespace rafter::transformer {

/// Matrices [rows, cols] and vectors [1, cols] of a layer.
enum class Slot : std::uint8_t {
  input_norm,
  qkv,
  qkv_bias,
  q_norm,
  k_norm,
  o,
  o_bias,
  mlp_norm,
  gate_up,
  gate_up_bias,
  down,
  down_bias,
};
inline constexpr std::size_t kSlots = 12;

struct Matrix {
  Storage storage;
  std::int64_t rows = 0, cols = 0;
  std::optional<DType> packed = {};  // int8, e4m3, int4; unset: plain, in the model's dtype
  std::int64_t group_size = 0;       // of int4
};

struct Weights {
  Matrix embedding, norm, head;  // head: none where it is the embedding
  std::vector<std::array<Matrix, kSlots>> layers;

  const Matrix& at(std::int64_t layer, Slot slot) const {
    return layers[static_cast<std::size_t>(layer)][static_cast<std::size_t>(slot)];
  }
  const Matrix& head_matrix() const { return head.storage ? head : embedding; }
};

/// Where a published parameter lies: elements [first, first + rows · cols) of a matrix.
struct Place {
  ParameterInfo info;
  bool is_vector = false;
  std::int64_t layer = -1;           // −1: embedding, norm, head
  Slot slot = Slot::input_norm;      // of a layer
  Matrix Weights::*outer = nullptr;  // of the others
  std::int64_t first = 0;
};

/// Every parameter of the model, those of one matrix together.
std::vector<Place> places_of(const ModelConfig& model);
Matrix& matrix_of(Weights& weights, const Place& place);
const Matrix& matrix_of(const Weights& weights, const Place& place);

/// As a kernel takes it: plain or packed, the other is null.
inline TensorView view_of(const Matrix& m, DType dtype) {
  return m.storage && !m.packed ? matrix(m.storage.data(), dtype, m.rows, m.cols) : TensorView{};
}
inline PackedWeight packed_of(const Matrix& m) {
  return m.packed ? PackedWeight{m.storage.data(), *m.packed, m.rows, m.cols, m.group_size}
                  : PackedWeight{};
}

}  // namespace rafter::transformer

namespace rafter::detail {

struct ModelState {
  TransformerConfig config;
  Device device;
  DType dtype = DType::f32;
  WeightFormat format;
  transformer::Weights weights;
  std::vector<transformer::Place> places;
  std::vector<ParameterInfo> parameters;

  /// With memory for its weights, not yet filled.
  static Result<std::shared_ptr<ModelState>> make(const TransformerConfig& config,
                                                  const Device& device, DType dtype,
                                                  const WeightFormat& format);
};

}  // namespace rafter::detail
