#include "transformer/session.h"

#include <fmt/format.h>

namespace rafter {

using detail::SessionState;
using transformer::assign_pages;
using transformer::forget;
using transformer::make_cache;
using transformer::make_rope_tables;
using transformer::set_up;
using transformer::Step;
using transformer::Storage;
using transformer::upload_indices;

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

Status check_tokens(const char* name, std::span<const std::int32_t> tokens, const ModelConfig& m) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= m.vocab_size) {
      return Status::invalid_argument(fmt::format("{}[{}]", name, i), std::to_string(tokens[i]),
                                      fmt::format("0 to {}", m.vocab_size - 1));
    }
  }
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

Convention TransformerSession::convention(Phase phase) const {
  const std::optional<Plan>& plan = state_->step(phase).plan;
  return plan ? plan->convention() : Convention{};
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
          &b.last, &b.logits, &b.attention_workspace, &b.linear_workspace, &b.chain_workspace,
          &b.indices}) {
      bytes += static_cast<double>(storage->bytes());
    }
  }
  return bytes;
}

}  // namespace rafter
