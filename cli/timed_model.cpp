#include "cli/timed_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <thread>

#include "cli/args.h"
#include "rafter/attention.h"

namespace rafter::cli {
namespace {

bool is_path(const std::string& name) {
  return name.find('/') != std::string::npos || name.ends_with(".json");
}

std::vector<std::int32_t> some_tokens(std::int64_t count, std::int64_t vocab, std::int64_t seed) {
  std::vector<std::int32_t> tokens;
  std::uint64_t state = static_cast<std::uint64_t>(seed);
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX generator
    tokens.push_back(static_cast<std::int32_t>((state >> 33) % static_cast<std::uint64_t>(vocab)));
  }
  return tokens;
}

TimedWork on_this_clock(const Work& work) {
  return [work](std::int64_t calls) -> Result<double> {
    const auto start = std::chrono::steady_clock::now();
    for (std::int64_t i = 0; i < calls; ++i) {
      if (Status s = work(); !s) {
        return s;
      }
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
}

}  // namespace

bool has_weights(const std::string& name) { return is_path(name) && !name.ends_with(".json"); }

TransformerConfig transformer_config(const std::string& name) {
  Result<TransformerConfig> config =
      is_path(name) ? load_transformer(name) : find_transformer(name);
  if (!config) {
    fail_about("--model", name, is_path(name), config.status());
  }
  return *std::move(config);
}

Transformer transformer_of(const std::string& given, std::uint64_t seed, const Device& device,
                           DType dtype, const WeightFormat& weights) {
  const std::string name = !given.empty()                      ? given
                           : device.kind == Device::Kind::cuda ? "reference-7b"
                                                               : "reference-60m";
  return value_or_fail(has_weights(name) ? Transformer::load(name, device, dtype, weights)
                                         : Transformer::random(transformer_config(name), seed,
                                                               device, dtype, weights));
}

Result<TransformerSession> session_at(const Transformer& model, const ModelPoint& point,
                                      std::int64_t spare) {
  Result<TransformerSession> session =
      TransformerSession::make(model, {.max_batch = point.batch,
                                       .max_seqlen = point.seqlen + spare,
                                       .page_size = point.page_size,
                                       .prefill = point.pipeline,
                                       .fuse = point.fuse,
                                       .kv_dtype = point.kv_dtype});
  if (!session) {
    return session.status();
  }
  if (point.phase == Phase::decode) {
    const Status assumed = session->assume_context(point.batch, point.seqlen);
    return assumed ? std::move(session) : Result<TransformerSession>(assumed);
  }
  std::vector<std::vector<std::int32_t>> prompts;
  for (std::int64_t b = 0; b < point.batch; ++b) {
    prompts.push_back(some_tokens(point.seqlen, model.config().model.vocab_size, point.seed + b));
  }
  const Status prepared = session->prepare_prefill(prompts);
  return prepared ? std::move(session) : Result<TransformerSession>(prepared);
}

DeviceSpec at_sustained_rates(DeviceSpec spec) {
  for (const char* const dtype : {"f32", "bf16", "f16"}) {
    for (const char* const burst : {"peak_", "attention_"}) {
      const char* const kind = std::string_view(burst) == "peak_" ? "" : burst;
      const Figure* const held = spec.find(fmt::format("sustained_{}{}_flop_per_s", kind, dtype));
      if (held != nullptr) {
        spec.figures[fmt::format("{}{}_flop_per_s", burst, dtype)] = *held;
      }
    }
  }
  return spec;
}

Convention launches_in(const DeviceSpec& spec, bool graph) {
  Convention convention;
  const Figure* const in_graph = spec.find("graph_launch_s");
  if (graph && in_graph != nullptr) {
    convention.launch_s = in_graph->value;
  }
  return convention;
}

bool is_chained(const std::vector<StepOperation>& operations) {
  return std::ranges::any_of(
      operations, [](const StepOperation& operation) { return operation.name == "chain"; });
}

void add_cost(const Cost& from, Cost& to) {
  to.matmul_flops += from.matmul_flops;
  to.softmax_flops += from.softmax_flops;
  to.flops += from.flops;
  to.bytes += from.bytes;
  to.launches += from.launches;
  to.kv_bytes += from.kv_bytes;
  to.exponentials += from.exponentials;
  to.unfused_bytes += from.unfused_bytes;
  to.untiled_bytes += from.untiled_bytes;
  for (const KernelCost& kernel : from.kernels) {
    const auto same = std::ranges::find(to.kernels, kernel.name, &KernelCost::name);
    KernelCost& sum = same == to.kernels.end() ? to.kernels.emplace_back() : *same;
    sum.name = kernel.name;
    sum.matmul_flops += kernel.matmul_flops;
    sum.softmax_flops += kernel.softmax_flops;
    sum.bytes += kernel.bytes;
    sum.elements += kernel.elements;
  }
  to.dtype = from.dtype;
}

Status OperationGroup::queue(Stream stream) const {
  for (const StepOperation& operation : operations) {
    if (Status s = operation.queue(stream); !s) {
      return s;
    }
  }
  return Status::ok();
}

std::vector<OperationGroup> groups_of(const std::vector<StepOperation>& operations) {
  std::vector<OperationGroup> groups;
  std::map<std::string, std::size_t> at;
  for (const StepOperation& operation : operations) {
    const auto [found, fresh] = at.emplace(operation.name, groups.size());
    if (fresh) {
      groups.push_back({operation.name, operation.kernel, {}, {}, 0});
    }
    OperationGroup& group = groups[found->second];
    add_cost(operation.cost, group.cost);
    group.operations.push_back(operation);
    ++group.count;
  }
  return groups;
}

StepClock::StepClock(const Device& device, const StopRule& rule, const TransformerSession& session)
    : session_(session), rule_(rule) {
  rule_.min_sample_s = 0;  // one step a sample: a decode step lengthens its sequences
  if (device.kind == Device::Kind::cuda) {
    clock_ = value_or_fail(DeviceClock::make(device));
  }
}

TimedWork StepClock::timed(const Work& work, Queueing queueing) const {
  return clock_ ? clock_->timed(work, queueing) : on_this_clock(work);
}

TimedWork StepClock::rewound(TimedWork work) const {
  return [this, inner = std::move(work)](std::int64_t calls) -> Result<double> {
    const Status back = session_.rewind();
    return back ? inner(calls) : Result<double>(back);
  };
}

Timing StepClock::time(const TimedWork& inner) const {
  const TimedWork candidates[] = {rewound(inner)};
  return value_or_fail(time_alternating(std::span<const TimedWork>(candidates), rule_))[0];
}

Result<double> StepClock::count_bytes(const Work& work) const {
  if (Status back = session_.rewind(); !back) {
    return back;
  }
  const Result<CountedBytes> counted = clock_->count(work);
  return counted ? Result<double>(counted->read + counted->written) : counted.status();
}

namespace {

/// An operation of a companion: what it costs and how long it takes.
struct Sample {
  std::string kernel;
  Cost cost;
  Statistics seconds;
};
using Samples = std::map<std::string, Sample>;

/// Every operation of a point by itself. Empty where the session cannot be made.
Samples time_operations(const ModelPoint& point, const Transformer& model, const StopRule& rule,
                        Queueing queueing) {
  const Result<TransformerSession> session = session_at(model, point);
  if (!session) {
    return {};
  }
  const StepClock clock(model.device(), rule, *session);
  Samples samples;
  for (OperationGroup& group : groups_of(session->operations(point.phase))) {
    const Timing timing = clock.time([&] { return group.queue(clock.stream()); }, queueing);
    samples[group.name] = {group.kernel, group.cost, timing.seconds};
  }
  return samples;
}

/// Layers enough that their weights are cold, few enough that companions are small.
constexpr std::int64_t kFewLayers = 2;
/// What counts as twice the work, in FLOPs and in bytes.
constexpr double kLeastTwice = 1.6, kMostTwice = 2.3;
/// Factors of FLOPs and bytes that are far enough apart to tell them (log2).
constexpr double kApart = 0.4;

double ratio(double a, double b) { return a > 0 && b > 0 ? a / b : 0; }

/// Takes a companion's sample as twice the work, or as the run that tells FLOPs from bytes, where
/// it serves better than what is there.
void take(const Sample& base, const Sample& other, WallEvidence& evidence) {
  const double flops = ratio(other.cost.flops, base.cost.flops);
  const double bytes = ratio(other.cost.bytes, base.cost.bytes);
  if (other.kernel != base.kernel || bytes == 0) {
    return;  // another kernel says nothing of this one
  }
  // Work without arithmetic is its bytes.
  const double least = flops > 0 ? std::min(flops, bytes) : bytes;
  const double most = std::max(flops, bytes);
  const bool fresh = evidence.seconds_double.n == 0;
  if (least >= kLeastTwice && most <= kMostTwice && (fresh || least > evidence.double_ratio)) {
    evidence.seconds_double = other.seconds;
    evidence.double_ratio = least;
  }
  const double apart = flops > 0 ? std::abs(std::log2(flops / bytes)) : 0;
  const double before =
      evidence.seconds_added_flops.n > 0
          ? std::abs(std::log2(evidence.added_flops_ratio / evidence.added_bytes_ratio))
          : kApart;
  if (apart >= before) {
    evidence.seconds_added_flops = other.seconds;
    evidence.added_flops_ratio = flops;
    evidence.added_bytes_ratio = bytes;
  }
}

}  // namespace

std::map<std::string, WallEvidence> operation_evidence(const ModelPoint& point,
                                                       const Transformer& model,
                                                       const StopRule& rule) {
  TransformerConfig few = model.config();
  few.model.num_layers = std::min(few.model.num_layers, kFewLayers);
  TransformerConfig wide = few, grouped = few;
  wide.model.heads_q *= 2;
  wide.model.heads_kv *= 2;
  wide.model.intermediate_size *= 2;
  wide.model.vocab_size *= 2;
  grouped.model.heads_q *= 2;
  const auto seed = static_cast<std::uint64_t>(point.seed);
  const auto made = [&](const TransformerConfig& config) {
    return Transformer::random(config, seed, model.device(), model.dtype(), model.weight_format());
  };
  const bool cuda = model.device().kind == Device::Kind::cuda;
  const Queueing queueing = cuda ? Queueing::graph : Queueing::stream;
  std::map<std::string, WallEvidence> evidence;
  const Result<Transformer> base_model = made(few);
  if (!base_model) {
    return evidence;
  }
  const Samples base = time_operations(point, *base_model, rule, queueing);
  for (const auto& [name, sample] : base) {
    evidence[name].seconds = sample.seconds;
  }
  const auto compare = [&](const ModelPoint& at, const Transformer& with) {
    for (const auto& [name, sample] : time_operations(at, with, rule, queueing)) {
      if (const auto found = base.find(name); found != base.end()) {
        take(found->second, sample, evidence[name]);
      }
    }
  };
  if (cuda) {
    for (const auto& [name, sample] : time_operations(point, *base_model, rule, Queueing::stream)) {
      evidence[name].seconds_stream = sample.seconds;
      evidence[name].seconds_graph = evidence[name].seconds;
    }
  }
  ModelPoint twice = point, shorter = point;
  twice.batch *= 2;
  shorter.seqlen = std::max<std::int64_t>(1, point.seqlen / 4);
  compare(twice, *base_model);
  if (point.phase == Phase::prefill) {
    compare(shorter, *base_model);
  }
  for (const TransformerConfig& config : {wide, grouped}) {
    if (const Result<Transformer> changed = made(config)) {
      compare(point, *changed);
    }
  }
  return evidence;
}

namespace {

/// Blocks of rows that the unfused pipeline takes whole on the model's prompts, as its plan has
/// them; visible scores alone where no kernel runs it.
std::optional<double> unfused_score_block_rows(const Transformer& model, const ModelPoint& point) {
  if (point.phase == Phase::decode) {
    return std::nullopt;  // no scores land
  }
  const ModelConfig& m = model.config().model;
  AttentionProblem prompts{.batch = point.batch,
                           .heads_q = m.heads_q,
                           .heads_kv = m.heads_kv,
                           .seqlen_q = point.seqlen,
                           .seqlen_kv = point.seqlen,
                           .head_dim = m.head_dim,
                           .dtype = model.dtype(),
                           .mask = Mask::causal()};
  if (point.batch > 1) {
    prompts.layout = Layout::packed;
    prompts.total_q = prompts.total_kv = point.batch * point.seqlen;
  }
  const Result<Plan> unfused = plan(prompts, model.device(), {.pipeline = Pipeline::unfused});
  return unfused ? unfused->convention().score_block_rows : 0;
}

}  // namespace

StepResult time_step(const ModelPoint& point, const Transformer& model, const DeviceSpec& spec,
                     const StepTiming& how) {
  const bool cuda = model.device().kind == Device::Kind::cuda;
  StepResult result;
  result.point = point;
  {
    const TransformerSession session = value_or_fail(session_at(model, point));
    const std::vector<StepOperation> operations = session.operations(point.phase);
    std::vector<OperationGroup> groups = groups_of(operations);
    const std::int64_t inner = std::min<std::int64_t>(1, model.config().model.num_layers - 1);
    for (const StepOperation& operation : operations) {
      if (operation.layer == inner) {
        result.layer.push_back(operation.name);
      }
    }
    for (const OperationGroup& group : groups) {
      add_cost(group.cost, result.cost);
    }
    result.chained = is_chained(operations);
    result.convention = session.convention(point.phase);
    result.unfused_score_block_rows = unfused_score_block_rows(model, point);
    if (cuda) {
      result.launches_counted = value_or_fail(session.count_launches(point.phase));
    }
    const StepClock clock(model.device(), how.rule, session);
    const Work step = [&] { return session.queue(point.phase, clock.stream()); };
    result.stream = clock.time(step, Queueing::stream);
    const bool graph = cuda && result.stream->seconds.median < kLongStep_s;
    if (graph) {
      result.graph = clock.time(step, Queueing::graph);
    }
    for (OperationGroup& group : how.operations ? groups : std::vector<OperationGroup>{}) {
      how.progress(fmt::format("{} {}: {}", to_string(point.phase), point.seqlen, group.name));
      OperationResult one;
      one.timing = clock.time([&] { return group.queue(clock.stream()); },
                              graph ? Queueing::graph : Queueing::stream);
      one.predicted = value_or_fail(predict(group.cost, spec, launches_in(spec, cuda)));
      one.predicted.time_s = std::max(one.predicted.time_s, one.predicted.time_fused_s);
      one.group = std::move(group);
      one.group.operations.clear();  // the session that they queue in ends here
      one.measured.reason = "only one size of work was timed";
      result.operations.push_back(std::move(one));
    }
  }
  if (how.operations && how.evidence) {
    how.progress(fmt::format("{} {}: walls", to_string(point.phase), point.seqlen));
    StopRule brief = how.rule;
    brief.min_time_s = how.rule.min_time_s / 8;
    brief.max_time_s = how.rule.max_time_s / 8;
    std::map<std::string, WallEvidence> evidence = operation_evidence(point, model, brief);
    for (OperationResult& one : result.operations) {
      WallEvidence& e = evidence[one.group.name];
      const double median_s = one.timing.seconds.median;
      e.share_of_bandwidth = one.group.cost.bytes / median_s / one.predicted.bandwidth_bytes_per_s;
      e.share_of_peak = one.group.cost.flops / median_s / one.predicted.peak_flop_per_s;
      one.measured = judge_wall(e);
    }
  }
  return result;
}

namespace {

/// Keeps calling until told to stop; the seconds of each call that ended before that.
class Background {
 public:
  explicit Background(TimedWork work)
      : thread_([this, work = std::move(work)] {
          while (!stop_) {
            const Result<double> seconds = work(1);
            if (!seconds) {
              status_ = seconds.status();
              return;
            }
            if (!stop_) {
              samples_.push_back(*seconds);
            }
          }
        }) {}
  ~Background() {
    stop_ = true;
    if (thread_.joinable()) {
      thread_.join();
    }
  }
  Result<Statistics> finish() {
    stop_ = true;
    thread_.join();
    return status_ ? statistics(samples_) : Result<Statistics>(status_);
  }

 private:
  std::atomic<bool> stop_ = false;
  Status status_;
  std::vector<double> samples_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace

Result<Interference> time_interference(const ModelPoint& decode, std::int64_t prefill_seqlen,
                                       const Transformer& model, const StopRule& rule) {
  ModelPoint prompt = decode;
  prompt.phase = Phase::prefill;
  prompt.batch = 1;
  prompt.seqlen = prefill_seqlen;
  const Result<TransformerSession> decoding = session_at(model, decode);
  const Result<TransformerSession> prefilling = session_at(model, prompt);
  if (!decoding || !prefilling) {
    return decoding ? prefilling.status() : decoding.status();
  }
  const StepClock clock(model.device(), rule, *decoding);
  const StepClock other(model.device(), rule, *prefilling);
  const Work step = [&] { return decoding->queue(Phase::decode, clock.stream()); };
  const Work prefill = [&] { return prefilling->queue(Phase::prefill, other.stream()); };
  Interference result;
  result.decode_alone = clock.time(step, Queueing::graph);
  result.prefill_alone = other.time(prefill, Queueing::stream);
  // Captured before the other thread runs: a capture forbids what that may do.
  const TimedWork captured = clock.timed(step, Queueing::graph);
  if (const Result<double> first = captured(1); !first) {
    return first.status();
  }
  Background background(other.timed(prefill, Queueing::stream));
  result.decode_beside = clock.time(captured);
  Result<Statistics> beside = background.finish();
  if (!beside) {
    return beside.status();
  }
  result.prefill_beside = *beside;
  return result;
}

namespace {

/// Quantised weights take what they do with their scales, lm_head in the model's dtype.
void count_packed(const Transformer& model, const DeviceSpec& spec, ModelStep& step) {
  const std::optional<DType> packed = model.weight_format().dtype;
  if (!packed) {
    return;
  }
  const ModelConfig& m = step.model;
  const double rows = static_cast<double>(m.vocab_size) * static_cast<double>(m.hidden_size);
  const double embedding = m.tie_word_embeddings ? 0 : rows * bytes_of(m.dtype);
  const double plain = value_or_fail(count_parameters(m)).total * bytes_of(m.dtype) - embedding;
  const double plain_s = value_or_fail(model_budget(step, spec)).weights_time_s;
  step.weight_dtype = step.memory_floor_dtype = *packed;
  step.memory_floor_s = plain_s * (model.weight_bytes() - embedding) / plain;
}

}  // namespace

ModelStep budget_step(const StepResult& result, const Transformer& model, const DeviceSpec& spec,
                      bool graph) {
  const ModelPoint& point = result.point;
  const bool decode = point.phase == Phase::decode;
  ModelStep step{.model = model.config().model,
                 .phase = point.phase,
                 .seqlen = decode ? point.seqlen + 1 : point.seqlen,
                 .batch = point.batch,
                 .pipeline = decode ? Pipeline::split_kv : point.pipeline,
                 .kv_dtype = point.kv_dtype,
                 .fuse = point.fuse,
                 .chain = result.chained,
                 .unfused_score_block_rows = result.unfused_score_block_rows};
  step.model.dtype = model.dtype();
  step.graph = graph;
  count_packed(model, spec, step);
  return step;
}

ModelBudget budget_of(const StepResult& result, const Transformer& model, const DeviceSpec& spec,
                      bool graph) {
  ModelStep step = budget_step(result, model, spec, graph);
  step.launches = result.launches_counted ? static_cast<double>(*result.launches_counted)
                                          : result.cost.launches;
  return value_or_fail(model_budget(step, spec, result.convention));
}

double predicted_launches(const StepResult& result, const Transformer& model,
                          const DeviceSpec& spec) {
  const ModelStep step = budget_step(result, model, spec, false);
  return value_or_fail(model_budget(step, spec, result.convention)).launches;
}

std::string what_moves(const OperationResult& operation) {
  const Wall model = operation.predicted.wall;
  MeasuredWall wall = operation.measured.wall;
  const bool unnamed = wall == MeasuredWall::ambiguous || wall == MeasuredWall::mixed;
  if (unnamed) {
    wall = model == Wall::compute     ? MeasuredWall::compute
           : model == Wall::bandwidth ? MeasuredWall::bandwidth
                                      : MeasuredWall::dispatch;
  }
  constexpr double kNear = 0.85;
  const Cost& cost = operation.group.cost;
  const bool near = operation.bound_s() >= kNear * operation.timing.seconds.median;
  const bool product = cost.matmul_flops > 0 && cost.exponentials == 0;
  const bool attention = cost.matmul_flops > 0 && cost.exponentials > 0;
  if (wall == MeasuredWall::dispatch) {
    return "fewer launches, or more work in each";
  }
  if (!near) {
    return wall == MeasuredWall::compute ? "a kernel nearer the peak"
                                         : "a kernel nearer the memory's bandwidth";
  }
  if (wall == MeasuredWall::compute) {
    return "only a higher peak: a narrower dtype or a wider machine";
  }
  return product     ? "narrower weights, or more tokens a step"
         : attention ? "a narrower cache, fewer KV heads or shorter contexts"
                     : "fewer bytes: fused into a product's end, or a narrower dtype";
}

}  // namespace rafter::cli
