#include "model/model_shape.h"

#include <algorithm>
#include <cmath>

#include "model/check.h"

namespace rafter::model {

Status check_model_attention(const ModelConfig& m) {
  return first_error(check_range("num_hidden_layers", m.num_layers, 1, kMaxLayers),
                     check_heads(m.heads_q, m.heads_kv),
                     check_range("head_dim", m.head_dim, 1, kMaxHeadDim),
                     check_range("sliding_window", m.sliding_window, 0, kMaxLength),
                     check_element("dtype", m.dtype));
}

Status check_model(const ModelConfig& m) {
  return first_error(check_model_attention(m),
                     check_range("hidden_size", m.hidden_size, 1, kMaxLength),
                     check_range("intermediate_size", m.intermediate_size, 1, kMaxLength),
                     check_range("vocab_size", m.vocab_size, 1, kMaxLength),
                     check_range("num_experts", m.num_experts, 0, kMaxExperts),
                     check_range("experts_per_token", m.experts_per_token, m.has_experts() ? 1 : 0,
                                 m.num_experts));
}

AttentionShape attention_shape(const ModelConfig& m, DType kv_dtype, std::int64_t splits) {
  AttentionShape shape;
  shape.heads_q = static_cast<double>(m.heads_q);
  shape.heads_kv = static_cast<double>(m.heads_kv);
  shape.head_dim = shape.head_dim_v = static_cast<double>(m.head_dim);
  shape.dtype = m.dtype;
  shape.kv_dtype = kv_dtype;
  shape.scale_bytes_per_key =
      2 * scale_bytes_per_row(shape.head_dim, kv_dtype, kDefaultScaleBlock, kDefaultScaleBytes);
  shape.splits = static_cast<double>(splits);
  return shape;
}

double kv_bytes_per_token(const ModelConfig& m, DType kv_dtype) {
  const AttentionShape shape = attention_shape(m, kv_dtype, 1);
  return static_cast<double>(m.num_layers) * shape.heads_kv *
         ((shape.head_dim + shape.head_dim_v) * bytes_of(kv_dtype) + shape.scale_bytes_per_key);
}

double keys_kept(const ModelConfig& m, double seqlen) {
  return m.sliding_window > 0 ? std::min(seqlen, static_cast<double>(m.sliding_window)) : seqlen;
}

double rows_held(const ModelConfig& m, double seqlen, std::int64_t page_size) {
  const auto page = static_cast<double>(page_size);
  return page_size > 0 ? std::ceil(seqlen / page) * page : keys_kept(m, seqlen);
}

Result<double> capacity_of(const DeviceSpec& device, const Convention& convention) {
  return device.value(convention.capacity == Capacity::usable ? "usable_bytes" : "capacity_bytes");
}

}  // namespace rafter::model
