// What a session holds: the cache, the lengths, and for each phase its buffers and its plan.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "rafter/attention.h"
#include "rafter/cache.h"
#include "rafter/layers.h"
#include "rafter/transformer.h"
#include "transformer/storage.h"
#include "transformer/weights.h"

namespace rafter::transformer {

/// Activations and indices of one phase. Shapes: n tokens, h hidden_size, f intermediate_size.
struct StepBuffers {
  Storage residual, normed, projected;  // [n, h]
  Storage qkv;                          // [n, (heads_q + 2 heads_kv) · head_dim]
  Storage attended;                     // [n, heads_q · head_dim]
  Storage gate_up;                      // [n, 2 f]
  Storage activated;                    // [n, f]; unfused twice, the second SiLU's
  Storage last;                         // [sequences, h]
  Storage logits;                       // [rows, vocab_size] f32
  Storage attention_workspace, linear_workspace;
  Storage chain_workspace;  // of linear_chain()
  Storage indices;          // i32, cut up by IndexPlaces
};

/// Where each list lies among the indices of a phase, in elements; lengths before and after the
/// step are side by side, so that one launch advances both.
struct IndexPlaces {
  std::int64_t tokens = 0, positions = 0;  // [n]
  std::int64_t before = 0, after = 0;      // [sequences]
  std::int64_t last_rows = 0;              // [sequences]
  std::int64_t cu_q = 0, cu_kv = 0;        // [sequences + 1]
  std::int64_t size = 0;
};

/// One phase as it is set up.
struct Step {
  Phase phase = Phase::prefill;
  std::int64_t tokens = 0;                // n
  std::vector<std::int64_t> lengths;      // new tokens of each sequence
  std::vector<std::int64_t> first_pages;  // prefill: pages of a sequence's prompt follow each other
  std::int64_t logit_rows = 0;
  StepBuffers buffers;
  IndexPlaces places;
  std::optional<Plan> plan;
  std::vector<SequenceLength> attended;   // what the plan's cost is counted from
  std::vector<StepOperation> operations;  // of the buffers and the plan as they are

  std::int64_t sequences() const { return static_cast<std::int64_t>(lengths.size()); }
};

}  // namespace rafter::transformer

namespace rafter::detail {

struct SessionState {
  explicit SessionState(Transformer of) : model(std::move(of)) {}

  Transformer model;
  SessionOptions options;
  transformer::Storage cos, sin;                       // [max_seqlen, head_dim / 2]
  std::vector<transformer::Storage> k_cache, v_cache;  // [pages, page_size, heads_kv, head_dim]
  /// Factors of rows in int8 or e4m3: [pages, page_size, heads_kv, 1] f32. Else none.
  std::vector<transformer::Storage> k_scale, v_scale;
  std::int64_t page_columns = 0;    // pages of a sequence of max_seqlen
  transformer::Storage page_table;  // [max_batch, page_columns] i32
  transformer::Step prefill, decode;
  std::vector<std::int64_t> lengths;  // tokens in the cache
  Phase last = Phase::prefill;        // whose logits are asked for
  std::optional<DeviceClock> clock;   // CUDA: its stream
  std::optional<DeviceGraph> graph;   // of the decode step as it is set up

  const ModelConfig& shape() const { return model.config().model; }
  const transformer::Weights& weights() const { return model.state().weights; }
  DType kv_dtype() const { return options.kv_dtype.value_or(model.dtype()); }
  bool quantised() const { return kv_dtype() != model.dtype(); }
  std::int64_t pages() const { return options.max_batch * page_columns; }
  Stream stream() const { return clock ? clock->stream() : Stream{}; }
  Status wait() const { return clock ? clock->synchronize() : Status::ok(); }
  const transformer::Step& step(Phase phase) const {
    return phase == Phase::prefill ? prefill : decode;
  }
  Rope rope() const {
    return {.cos = static_cast<const float*>(cos.data()),
            .sin = static_cast<const float*>(sin.data()),
            .max_position = options.max_seqlen,
            .rotary_dim = shape().head_dim};
  }
};

}  // namespace rafter::detail

namespace rafter::transformer {

/// The operations of a step as it is set up; they are of use while the session lives.
std::vector<StepOperation> operations_of(const detail::SessionState& state, const Step& step);
/// What the step's chains of products want; 0 where it has none.
std::int64_t chain_workspace_bytes(const detail::SessionState& state, const Step& step);

/// cos and sin of every position; the cache and its page table.
Status make_rope_tables(detail::SessionState& state);
Status make_cache(detail::SessionState& state);
/// Pages of each sequence's first `rows` tokens follow each other; pages for what comes later are
/// those left over.
Status assign_pages(detail::SessionState& state, const std::vector<std::int64_t>& rows,
                    std::vector<std::int64_t>& first_pages);
/// The indices of a step whose tokens are given; `before`: tokens that are in the cache.
Status upload_indices(const detail::SessionState& state, Step& step,
                      const std::vector<std::int32_t>& tokens,
                      const std::vector<std::int64_t>& before);
/// A phase that is not set up: nothing of it is queued until it is set up again.
void forget(Step& step);
/// Plan, buffers and operations of a step whose shapes are given: all of them, or none.
Status set_up(const detail::SessionState& state, Step& step);

}  // namespace rafter::transformer
