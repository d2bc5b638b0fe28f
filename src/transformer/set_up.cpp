// What a session has in memory before a step of it runs: tables, cache, pages, and a step's plan,
// buffers and indices.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "transformer/session.h"

namespace rafter::transformer {

using detail::SessionState;

namespace {

/// At least so many bytes; what was there may be gone.
Status reserve(Storage& storage, const Device& device, std::int64_t bytes) {
  if (storage && storage.bytes() >= bytes) {
    return Status::ok();
  }
  storage = {};
  Result<Storage> made = Storage::allocate(device, bytes);
  if (!made) {
    return made.status();
  }
  storage = *std::move(made);
  return Status::ok();
}

Mask mask_of(const ModelConfig& m) {
  return m.sliding_window > 0 ? Mask::window(m.sliding_window - 1, 0) : Mask::causal();
}

/// What attention sees of a step.
AttentionProblem problem_of(const SessionState& state, const Step& step) {
  const ModelConfig& m = state.shape();
  AttentionProblem p{.batch = step.sequences(),
                     .heads_q = m.heads_q,
                     .heads_kv = m.heads_kv,
                     .seqlen_q = 1,
                     .head_dim = m.head_dim,
                     .dtype = state.model.dtype(),
                     .mask = mask_of(m)};
  if (step.phase == Phase::decode) {
    p.layout = Layout::paged;
    p.seqlen_kv = state.page_columns * state.options.page_size;
    p.page_size = state.options.page_size;
    p.num_pages = state.pages();
    p.seqused_kv = true;
    p.kv_dtype = state.options.kv_dtype;
    return p;
  }
  p.seqlen_q = *std::max_element(step.lengths.begin(), step.lengths.end());
  p.seqlen_kv = p.seqlen_q;
  if (step.sequences() > 1) {
    const std::int64_t page = state.options.page_size;
    p.layout = Layout::packed;
    p.total_q = p.total_kv = step.tokens;
    if (state.quantised()) {  // keys are read as they were before rounding, where the queries are
      return p;
    }
    p.seqlen_kv = base::round_up(p.seqlen_q, page);
    p.total_kv = step.first_pages.back() * page + base::round_up(step.lengths.back(), page);
    p.seqused_kv = true;
  }
  return p;
}

Status make_plan(const SessionState& state, Step& step) {
  PlanOptions options;
  options.pipeline = step.phase == Phase::decode ? Pipeline::split_kv : state.options.prefill;
  Result<Plan> made = plan(problem_of(state, step), state.model.device(), options);
  if (!made) {
    return made.status();
  }
  step.plan = *std::move(made);
  return Status::ok();
}

/// What the step's products want, at most.
std::int64_t products_workspace(const SessionState& state, const Step& step) {
  std::int64_t most = linear_workspace_bytes(state.model.device());
  for (const transformer::Matrix& weight : state.weights().layers.front()) {
    most = std::max(most,
                    linear_workspace_bytes(step.tokens, state.model.dtype(), state.model.device(),
                                           transformer::packed_of(weight)));
  }
  return most;
}

Status make_buffers(const SessionState& state, Step& step) {
  const ModelConfig& m = state.shape();
  const std::int64_t n = step.tokens, q = m.heads_q * m.head_dim, kv = m.heads_kv * m.head_dim;
  const std::int64_t size = bits_of(state.model.dtype()) / 8;
  transformer::StepBuffers& b = step.buffers;
  const std::pair<Storage*, std::int64_t> wanted[] = {
      {&b.residual, n * m.hidden_size * size},
      {&b.normed, n * m.hidden_size * size},
      {&b.projected, n * m.hidden_size * size},
      {&b.qkv, n * (q + 2 * kv) * size},
      {&b.attended, n * q * size},
      {&b.gate_up, n * 2 * m.intermediate_size * size},
      {&b.activated, (state.options.fuse ? 1 : 2) * n * m.intermediate_size * size},
      {&b.last, step.sequences() * m.hidden_size * size},
      {&b.logits, step.logit_rows * m.vocab_size * 4},
      {&b.attention_workspace, step.plan->workspace_bytes()},
      {&b.linear_workspace, products_workspace(state, step)},
      {&b.indices, step.places.size * 4}};
  for (const auto& [storage, bytes] : wanted) {
    if (Status s = reserve(*storage, state.model.device(), bytes); !s) {
      return s;
    }
  }
  const std::int64_t wanted_by_chain = chain_workspace_bytes(state, step);
  if (wanted_by_chain == 0) {
    return Status::ok();
  }
  if (Status s = reserve(b.chain_workspace, state.model.device(), wanted_by_chain); !s) {
    return s;
  }
  const std::vector<std::byte> zeros(static_cast<std::size_t>(b.chain_workspace.bytes()));
  return b.chain_workspace.upload(zeros.data(), b.chain_workspace.bytes());
}

IndexPlaces places_of(const Step& step) {
  IndexPlaces p;
  const std::int64_t n = step.tokens, sequences = step.sequences();
  const auto take = [&p](std::int64_t count) {
    const std::int64_t first = p.size;
    p.size += count;
    return first;
  };
  p.tokens = take(n);
  p.positions = take(n);
  p.before = take(sequences);
  p.after = take(sequences);
  p.last_rows = take(sequences);
  p.cu_q = take(sequences + 1);
  p.cu_kv = take(sequences + 1);
  return p;
}

}  // namespace

Status make_rope_tables(SessionState& state) {
  const std::int64_t head_dim = state.shape().head_dim, half = head_dim / 2;
  std::vector<float> cos(static_cast<std::size_t>(state.options.max_seqlen * half)),
      sin(cos.size());
  for (std::int64_t pair = 0; pair < half; ++pair) {
    const double frequency = rope_frequency(state.model.config().rope, pair, head_dim);
    for (std::int64_t position = 0; position < state.options.max_seqlen; ++position) {
      const auto at = static_cast<std::size_t>(position * half + pair);
      cos[at] = static_cast<float>(std::cos(static_cast<double>(position) * frequency));
      sin[at] = static_cast<float>(std::sin(static_cast<double>(position) * frequency));
    }
  }
  const auto bytes = static_cast<std::int64_t>(cos.size() * sizeof(float));
  for (const auto& [storage, table] : {std::pair{&state.cos, &cos}, std::pair{&state.sin, &sin}}) {
    if (Status s = reserve(*storage, state.model.device(), bytes); !s) {
      return s;
    }
    if (Status s = storage->upload(table->data(), bytes); !s) {
      return s;
    }
  }
  return Status::ok();
}

Status make_cache(SessionState& state) {
  const SessionOptions& o = state.options;
  const ModelConfig& m = state.shape();
  const Device& device = state.model.device();
  state.page_columns = base::div_up(o.max_seqlen, o.page_size);
  const auto elements =
      base::checked_product({o.max_batch, state.page_columns, o.page_size, m.heads_kv, m.head_dim});
  if (!elements || *elements > (std::int64_t{1} << 50)) {
    return Status::invalid_argument("max_seqlen", std::to_string(o.max_seqlen),
                                    "a cache of fewer than 2^50 elements");
  }
  constexpr std::int64_t kMostTokens = (std::int64_t{1} << 31) - 1;
  if (const std::int64_t tokens = state.pages() * o.page_size; tokens > kMostTokens) {
    return Status::invalid_argument("max_seqlen", std::to_string(o.max_seqlen),
                                    "a cache of fewer than 2^31 tokens: their indices are i32");
  }
  const std::int64_t cache_bytes = *elements * bits_of(state.kv_dtype()) / 8;
  const std::int64_t scale_bytes = state.quantised() ? *elements / m.head_dim * 4 : 0;
  for (const auto& [caches, bytes] :
       {std::pair{&state.k_cache, cache_bytes}, std::pair{&state.v_cache, cache_bytes},
        std::pair{&state.k_scale, scale_bytes}, std::pair{&state.v_scale, scale_bytes}}) {
    caches->resize(bytes > 0 ? static_cast<std::size_t>(m.num_layers) : 0);
    for (Storage& cache : *caches) {
      if (Status s = reserve(cache, device, bytes); !s) {
        return s;
      }
    }
  }
  return reserve(state.page_table, device, state.pages() * 4);
}

Status assign_pages(SessionState& state, const std::vector<std::int64_t>& rows,
                    std::vector<std::int64_t>& first_pages) {
  const std::int64_t cols = state.page_columns;
  std::vector<std::int32_t> table(static_cast<std::size_t>(state.pages()), -1);
  std::vector<std::int64_t> counts;
  std::int64_t next = 0;
  first_pages.clear();
  for (std::size_t b = 0; b < rows.size(); ++b) {
    first_pages.push_back(next);
    counts.push_back(base::div_up(rows[b], state.options.page_size));
    for (std::int64_t i = 0; i < counts[b]; ++i) {
      table[b * static_cast<std::size_t>(cols) + static_cast<std::size_t>(i)] =
          static_cast<std::int32_t>(next++);
    }
  }
  for (std::size_t b = 0; b < rows.size(); ++b) {
    for (std::int64_t i = counts[b]; i < cols; ++i) {
      table[b * static_cast<std::size_t>(cols) + static_cast<std::size_t>(i)] =
          static_cast<std::int32_t>(next++);
    }
  }
  return state.page_table.upload(table.data(), state.pages() * 4);
}

Status upload_indices(const SessionState& state, Step& step,
                      const std::vector<std::int32_t>& tokens,
                      const std::vector<std::int64_t>& before) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(step.places.size));
  const auto set = [&all](std::int64_t at, std::int64_t value) {
    all[static_cast<std::size_t>(at)] = static_cast<std::int32_t>(value);
  };
  std::copy(tokens.begin(), tokens.end(), all.begin() + step.places.tokens);
  step.attended.clear();
  std::int64_t row = 0;
  for (std::int64_t b = 0; b < step.sequences(); ++b) {
    const auto i = static_cast<std::size_t>(b);
    const std::int64_t length = step.lengths[i];
    set(step.places.before + b, before[i]);
    set(step.places.after + b, before[i] + length);
    set(step.places.cu_q + b, row);
    if (step.phase == Phase::prefill && state.quantised()) {
      set(step.places.cu_kv + b, row);
    } else if (step.phase == Phase::prefill) {
      set(step.places.cu_kv + b, step.first_pages[i] * state.options.page_size);
    }
    for (std::int64_t t = 0; t < length; ++t) {
      set(step.places.positions + row + t, before[i] + t);
    }
    row += length;
    set(step.places.last_rows + b, row - 1);
    step.attended.push_back({length, before[i] + length});
  }
  set(step.places.cu_q + step.sequences(), row);
  if (step.phase == Phase::prefill && step.plan->problem().layout == Layout::packed) {
    set(step.places.cu_kv + step.sequences(), step.plan->problem().total_kv);
  }
  return step.buffers.indices.upload(all.data(), step.places.size * 4);
}

void forget(Step& step) {
  step.plan.reset();
  step.operations.clear();
}

Status set_up(const SessionState& state, Step& step) {
  forget(step);
  step.places = places_of(step);
  if (Status s = make_plan(state, step); !s) {
    return s;
  }
  if (Status s = make_buffers(state, step); !s) {
    forget(step);
    return s;
  }
  step.operations = transformer::operations_of(state, step);
  return Status::ok();
}

}  // namespace rafter::transformer
