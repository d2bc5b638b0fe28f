#include "transformer/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/checked.h"

namespace rafter {

using detail::SessionState;
using transformer::IndexPlaces;
using transformer::Step;
using transformer::Storage;

namespace {

Status check_options(const SessionOptions& options, DType dtype) {
  constexpr std::int64_t kMost = std::int64_t{1} << 28;
  const std::pair<const char*, std::int64_t> counts[] = {{"max_batch", options.max_batch},
                                                         {"max_seqlen", options.max_seqlen},
                                                         {"page_size", options.page_size}};
  for (const auto& [name, value] : counts) {
    if (value < 1 || value > kMost) {
      return Status::invalid_argument(name, std::to_string(value), "1 to 2^28");
    }
  }
  if (options.kv_dtype && *options.kv_dtype != dtype && *options.kv_dtype != DType::int8 &&
      *options.kv_dtype != DType::e4m3) {
    return Status::invalid_argument("kv_dtype", to_string(*options.kv_dtype),
                                    fmt::format("{}, int8, e4m3", to_string(dtype)));
  }
  if (options.prefill == Pipeline::split_kv) {
    return Status::invalid_argument("prefill", to_string(options.prefill),
                                    "unfused, half-fused, fused");
  }
  return Status::ok();
}

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

/// Pages of each sequence's first `rows` tokens follow each other; pages for what comes later are
/// those left over.
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
      {&b.activated, n * m.intermediate_size * size},
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
  return Status::ok();
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

/// The indices of a step whose tokens are given; `before`: tokens that are in the cache.
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

Status check_tokens(const char* name, std::span<const std::int32_t> tokens, const ModelConfig& m) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= m.vocab_size) {
      return Status::invalid_argument(fmt::format("{}[{}]", name, i), std::to_string(tokens[i]),
                                      fmt::format("0 to {}", m.vocab_size - 1));
    }
  }
  return Status::ok();
}

/// A phase that is not set up: nothing of it is queued until it is set up again.
void forget(Step& step) {
  step.plan.reset();
  step.operations.clear();
}

/// Plan, buffers and operations of a step whose shapes are given: all of them, or none.
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

/// A decode step for as many sequences as there are. A buffer that had to grow, or another plan,
/// makes the graph one of yesterday's.
Status set_up_decode(SessionState& state) {
  const auto batch = static_cast<std::int64_t>(state.lengths.size());
  if (state.decode.sequences() == batch && state.decode.plan) {
    return Status::ok();
  }
  state.graph.reset();
  Step& step = state.decode;
  step.phase = Phase::decode;
  step.tokens = step.logit_rows = batch;
  step.lengths.assign(static_cast<std::size_t>(batch), 1);
  return set_up(state, step);
}

Status upload_decode(SessionState& state, const std::vector<std::int32_t>& tokens) {
  return upload_indices(state, state.decode, tokens, state.lengths);
}

/// No sequences, and no step that could be queued: later calls refuse.
void end_sequences(SessionState& state) {
  state.lengths.clear();
  state.graph.reset();
  forget(state.prefill);
  forget(state.decode);
}

/// The pages, buffers and indices of a prefill whose shapes are given. A decode step that was set
/// up stays so only if it is of as many sequences.
Status begin_sequences(SessionState& state, const std::vector<std::int32_t>& tokens) {
  Step& step = state.prefill;
  step.phase = Phase::prefill;
  if (state.decode.sequences() != step.sequences()) {
    state.graph.reset();
    forget(state.decode);
  }
  if (Status s = assign_pages(state, step.lengths, step.first_pages); !s) {
    return s;
  }
  if (Status s = set_up(state, step); !s) {
    return s;
  }
  const std::vector<std::int64_t> before(static_cast<std::size_t>(step.sequences()), 0);
  return upload_indices(state, step, tokens, before);
}

Status queue_step(const Step& step, Stream stream) {
  for (const StepOperation& operation : step.operations) {
    if (Status s = operation.queue(stream); !s) {
      return s;
    }
  }
  return Status::ok();
}

}  // namespace

Result<TransformerSession> TransformerSession::make(const Transformer& model,
                                                    const SessionOptions& options) {
  if (Status s = check_options(options, model.dtype()); !s) {
    return s;
  }
  auto state = std::make_shared<SessionState>(model);
  state->options = options;
  if (model.device().kind == Device::Kind::cuda) {
    Result<DeviceClock> clock = DeviceClock::make(model.device());
    if (!clock) {
      return clock.status();
    }
    state->clock = *std::move(clock);
  }
  for (const auto make : {make_cache, make_rope_tables}) {
    if (Status s = make(*state); !s) {
      return s;
    }
  }
  return TransformerSession(std::move(state));
}

Status TransformerSession::prepare_prefill(std::span<const std::vector<std::int32_t>> prompts) {
  SessionState& state = *state_;
  const SessionOptions& o = state.options;
  if (prompts.empty() || static_cast<std::int64_t>(prompts.size()) > o.max_batch) {
    return Status::invalid_argument("prompts", fmt::format("{} of them", prompts.size()),
                                    fmt::format("1 to max_batch = {}", o.max_batch));
  }
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> lengths;
  for (std::size_t b = 0; b < prompts.size(); ++b) {
    const std::string name = fmt::format("prompts[{}]", b);
    lengths.push_back(static_cast<std::int64_t>(prompts[b].size()));
    if (lengths[b] < 1 || lengths[b] > o.max_seqlen) {
      return Status::invalid_argument(name, fmt::format("{} tokens", lengths[b]),
                                      fmt::format("1 to max_seqlen = {}", o.max_seqlen));
    }
    if (Status s = check_tokens(name.c_str(), prompts[b], state.shape()); !s) {
      return s;
    }
    tokens.insert(tokens.end(), prompts[b].begin(), prompts[b].end());
  }
  if (Status s = state.wait(); !s) {  // what is under way reads the tables and buffers
    return s;
  }
  Step& step = state.prefill;
  step.tokens = static_cast<std::int64_t>(tokens.size());
  step.lengths = lengths;
  step.logit_rows = o.all_logits ? step.tokens : step.sequences();
  if (Status s = begin_sequences(state, tokens); !s) {
    end_sequences(state);
    return s;
  }
  state.lengths = std::move(lengths);
  state.last = Phase::prefill;
  return Status::ok();
}

Status TransformerSession::prefill(std::span<const std::vector<std::int32_t>> prompts) {
  Status ready = prepare_prefill(prompts);
  return ready ? queue_step(state_->prefill, state_->stream()) : ready;
}

Status TransformerSession::decode(std::span<const std::int32_t> tokens) {
  SessionState& state = *state_;
  if (state.lengths.empty() || tokens.size() != state.lengths.size()) {
    return Status::invalid_argument(
        "tokens", fmt::format("{} of them", tokens.size()),
        fmt::format("one of each of the {} sequences", state.lengths.size()));
  }
  if (Status s = check_tokens("tokens", tokens, state.shape()); !s) {
    return s;
  }
  for (std::size_t b = 0; b < state.lengths.size(); ++b) {
    if (state.lengths[b] >= state.options.max_seqlen) {
      return Status::invalid_argument(
          fmt::format("tokens[{}]", b), fmt::format("one more than {}", state.lengths[b]),
          fmt::format("up to max_seqlen = {}", state.options.max_seqlen));
    }
  }
  if (Status s = state.wait(); !s) {
    return s;
  }
  if (Status s = set_up_decode(state); !s) {
    return s;
  }
  if (Status s = upload_decode(state, {tokens.begin(), tokens.end()}); !s) {
    return s;
  }
  state.last = Phase::decode;
  if (!state.clock) {
    if (Status s = queue_step(state.decode, {}); !s) {
      return s;
    }
  } else if (!state.graph) {  // the first run makes what the library's products make once
    if (Status s = queue_step(state.decode, state.stream()); !s) {
      return s;
    }
    if (Status s = state.wait(); !s) {
      return s;
    }
    Result<DeviceGraph> graph = DeviceGraph::capture(state.model.device(), state.stream(), [this] {
      return queue_step(state_->decode, state_->stream());
    });
    if (!graph) {
      return graph.status();
    }
    state.graph = *std::move(graph);
  } else if (Status s = state.graph->launch(state.stream()); !s) {
    return s;
  }
  for (std::int64_t& length : state.lengths) {
    ++length;
  }
  return Status::ok();
}

Result<std::vector<float>> TransformerSession::logits() const {
  const Step& step = state_->step(state_->last);
  if (!step.plan) {
    return Status::invalid_argument("logits", "no step", "those of a step that ran are");
  }
  if (Status s = state_->wait(); !s) {
    return s;
  }
  std::vector<float> values(static_cast<std::size_t>(step.logit_rows * state_->shape().vocab_size));
  Status done = step.buffers.logits.download(
      values.data(), static_cast<std::int64_t>(values.size() * sizeof(float)));
  return done ? Result<std::vector<float>>(std::move(values)) : done;
}

std::int64_t TransformerSession::batch() const {
  return static_cast<std::int64_t>(state_->lengths.size());
}
const std::vector<std::int64_t>& TransformerSession::lengths() const { return state_->lengths; }

Status TransformerSession::assume_context(std::int64_t batch, std::int64_t length) {
  SessionState& state = *state_;
  if (batch < 1 || batch > state.options.max_batch) {
    return Status::invalid_argument("batch", std::to_string(batch),
                                    fmt::format("1 to max_batch = {}", state.options.max_batch));
  }
  if (length < 0 || length >= state.options.max_seqlen) {
    return Status::invalid_argument("length", std::to_string(length),
                                    fmt::format("0 to {}", state.options.max_seqlen - 1));
  }
  if (Status s = state.wait(); !s) {
    return s;
  }
  std::uint64_t seed = 0;
  for (const std::vector<Storage>* caches :
       {&state.k_cache, &state.v_cache, &state.k_scale, &state.v_scale}) {
    const bool scales = caches == &state.k_scale || caches == &state.v_scale;
    const DType dtype = scales ? DType::f32 : state.model.dtype();
    for (const Storage& cache : *caches) {
      const std::int64_t elements = cache.bytes() * 8 / bits_of(dtype);
      if (Status s = fill_uniform(matrix(cache.data(), dtype, 1, elements), ++seed, 1.0f,
                                  state.model.device(), state.stream());
          !s) {
        return s;
      }
    }
  }
  if (Status s = state.wait(); !s) {
    return s;
  }
  state.lengths.assign(static_cast<std::size_t>(batch), length);
  std::vector<std::int64_t> first_pages;
  Status ready = assign_pages(state, state.lengths, first_pages);
  if (ready) {
    ready = set_up_decode(state);
  }
  if (!ready) {
    end_sequences(state);
    return ready;
  }
  return rewind();
}

Status TransformerSession::rewind() const {
  if (!state_->decode.plan) {
    return Status::ok();
  }
  if (Status s = state_->wait(); !s) {
    return s;
  }
  return upload_decode(*state_, std::vector<std::int32_t>(state_->lengths.size(), 0));
}

std::vector<StepOperation> TransformerSession::operations(Phase phase) const {
  const Step& step = state_->step(phase);
  return step.plan ? transformer::operations_of(*state_, step) : std::vector<StepOperation>{};
}

Status TransformerSession::queue(Phase phase, Stream stream) const {
  const Step& step = state_->step(phase);
  if (!step.plan) {
    return Status::invalid_argument("phase", to_string(phase), "a phase that was set up");
  }
  return queue_step(step, stream);
}

Result<std::int64_t> TransformerSession::count_launches(Phase phase) const {
  if (!state_->clock) {
    return Status::device_error("launches", "a CPU has none to count");
  }
  for (Status s : {queue(phase, state_->stream()), state_->wait()}) {
    if (!s) {
      return s;
    }
  }
  const Result<DeviceGraph> graph = DeviceGraph::capture(
      state_->model.device(), state_->stream(), [&] { return queue(phase, state_->stream()); });
  if (!graph) {
    return graph.status();
  }
  Status done = phase == Phase::decode ? rewind() : Status::ok();
  return done ? Result<std::int64_t>(graph->kernels()) : done;
}

double TransformerSession::cache_bytes() const {
  double bytes = 0;
  for (const std::vector<Storage>* caches :
       {&state_->k_cache, &state_->v_cache, &state_->k_scale, &state_->v_scale}) {
    for (const Storage& cache : *caches) {
      bytes += static_cast<double>(cache.bytes());
    }
  }
  return bytes;
}

double TransformerSession::workspace_bytes() const {
  double bytes = 0;
  for (const Step* step : {&state_->prefill, &state_->decode}) {
    const transformer::StepBuffers& b = step->buffers;
    for (const Storage* storage :
         {&b.residual, &b.normed, &b.projected, &b.qkv, &b.attended, &b.gate_up, &b.activated,
          &b.last, &b.logits, &b.attention_workspace, &b.linear_workspace, &b.indices}) {
      bytes += static_cast<double>(storage->bytes());
    }
  }
  return bytes;
}

}  // namespace rafter
