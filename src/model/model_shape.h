// What the model budget and the memory planner share about a Llama-like model.
#pragma once

#include "model/attention_terms.h"
#include "rafter/model.h"
#include "rafter/roofline.h"

namespace rafter::model {

inline constexpr std::int64_t kMaxLayers = 1 << 16;

/// invalid_argument for a dimension that means nothing.
Status check_model(const ModelConfig& m);
/// The same for what attention alone needs: layers, heads, head_dim, dtype.
Status check_model_attention(const ModelConfig& m);

/// One layer's attention over the model's heads.
AttentionShape attention_shape(const ModelConfig& m, DType kv_dtype, std::int64_t splits);

/// Bytes of one token's K and V in all layers, scales included.
double kv_bytes_per_token(const ModelConfig& m, DType kv_dtype);

/// Keys that are kept of a context: all, or those of the sliding window.
double keys_kept(const ModelConfig& m, double seqlen);
/// Rows of the cache that a context takes: the keys kept, or with pages all of them in whole pages.
double rows_held(const ModelConfig& m, double seqlen, std::int64_t page_size);

/// usable_bytes or capacity_bytes of a device, as the convention says.
Result<double> capacity_of(const DeviceSpec& device, const Convention& convention);

}  // namespace rafter::model
