#include "cli/timed_attention.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace rafter::cli {

Result<PreparedAttention> PreparedAttention::make(
    const AttentionProblem& problem, const PlanOptions& options, const std::optional<Qkv>& data,
    const Device& device, std::optional<DType> o_dtype, std::span<const std::int64_t> lengths) {
  Result<Plan> planned = rafter::plan(problem, device, options);
  if (!planned) {
    return planned.status();
  }
  PreparedAttention made;
  made.plan_.emplace(*planned);
  const AttentionProblem& p = made.plan_->problem();
  const auto input = [&device](const Array* given, DType dtype, std::vector<std::int64_t> shape,
                               std::uint32_t seed) {
    return given != nullptr ? Resident::copy_of(device, *given)
                            : Resident::random(device, dtype, std::move(shape), seed);
  };
  const bool paged = p.layout == Layout::paged;
  const std::int64_t batch_kv = paged ? p.num_pages : p.batch;
  const std::int64_t rows_kv = paged ? p.page_size : p.seqlen_kv;
  Result<Resident> parts[] = {
      input(data ? &data->q : nullptr, p.dtype, {p.batch, p.seqlen_q, p.heads_q, p.head_dim}, 1),
      input(data ? &data->k : nullptr, *p.kv_dtype, {batch_kv, rows_kv, p.heads_kv, p.head_dim}, 2),
      input(data ? &data->v : nullptr, *p.kv_dtype, {batch_kv, rows_kv, p.heads_kv, p.head_dim_v},
            3),
      Resident::empty(device, o_dtype.value_or(p.dtype),
                      {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v}, "o"),
      Resident::empty(device, DType::f32, {p.batch, p.heads_q, p.seqlen_q}, "lse"),
      Resident::empty(device, DType::int8, {made.plan_->workspace_bytes()}, "workspace")};
  Resident* const places[] = {&made.q_, &made.k_, &made.v_, &made.o_, &made.lse_, &made.workspace_};
  for (std::size_t i = 0; i < std::size(parts); ++i) {
    if (!parts[i]) {
      return parts[i].status();
    }
    *places[i] = *std::move(parts[i]);
  }
  if (Status prepared = made.prepare_cache(data, device, lengths); !prepared) {
    return prepared;
  }
  if (made.plan_->pass() == Pass::backward) {
    if (Status prepared = made.prepare_backward(options, device); !prepared) {
      return prepared;
    }
  }
  return made;
}

/// Factors, page table and lengths.
Status PreparedAttention::prepare_cache(const std::optional<Qkv>& data, const Device& device,
                                        std::span<const std::int64_t> lengths) {
  const AttentionProblem& p = plan_->problem();
  Qkv more = data.value_or(Qkv{});
  if (!data && *p.kv_dtype == DType::int8) {
    Result<Array> factors = allocate_array(
        DType::f32, {k_.view().batch, k_.view().seqlen, p.heads_kv, 1}, "factors of int8");
    if (!factors) {
      return factors.status();
    }
    constexpr float kFactor = 0.015625f;  // what normal deviates have, about
    std::fill_n(reinterpret_cast<float*>(factors->data.get()), factors->elements(), kFactor);
    more.k_scale = more.v_scale = *std::move(factors);
  }
  if (!data && p.layout == Layout::paged) {
    Result<Array> table = shuffled_pages(p, lengths);
    if (!table) {
      return table.status();
    }
    more.page_table = *std::move(table);
  }
  Array used;
  if (p.seqused_kv) {
    Result<Array> array = allocate_array(DType::i64, {p.batch}, "lengths");
    if (!array) {
      return array.status();
    }
    std::copy(lengths.begin(), lengths.end(), reinterpret_cast<std::int64_t*>(array->data.get()));
    used = *std::move(array);
  }
  const std::pair<const Array*, std::optional<Resident>*> places[] = {
      {&more.k_scale, &k_scale_},
      {&more.v_scale, &v_scale_},
      {&more.page_table, &page_table_},
      {&used, &lengths_}};
  for (const auto& [array, place] : places) {
    if (array->data == nullptr) {
      continue;
    }
    Result<Resident> copy = Resident::copy_of(device, *array);
    if (!copy) {
      return copy.status();
    }
    *place = *std::move(copy);
  }
  return Status::ok();
}

LseView PreparedAttention::lse() const {
  const AttentionProblem& p = plan_->problem();
  return LseView::contiguous(static_cast<float*>(lse_.data()), p.batch, p.heads_q, p.seqlen_q);
}

Status PreparedAttention::prepare_backward(const PlanOptions& options, const Device& device) {
  const AttentionProblem& p = plan_->problem();
  const Result<Array> random =
      random_array(p.dtype, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v}, 4);
  if (!random) {
    return random.status();
  }
  const Result<Plan> forward = rafter::plan(p, device, {.threads = options.threads});
  if (!forward) {
    return forward.status();
  }
  const auto like = [&device, &p](std::int64_t seqlen, std::int64_t heads, std::int64_t dim,
                                  const char* label) {
    return Resident::empty(device, p.dtype, {p.batch, seqlen, heads, dim}, label);
  };
  Result<Resident> parts[] = {
      Resident::copy_of(device, *random), like(p.seqlen_q, p.heads_q, p.head_dim, "dq"),
      like(p.seqlen_kv, p.heads_kv, p.head_dim, "dk"),
      like(p.seqlen_kv, p.heads_kv, p.head_dim_v, "dv"),
      Resident::empty(device, DType::int8, {forward->workspace_bytes()}, "workspace")};
  for (const Result<Resident>& part : parts) {
    if (!part) {
      return part.status();
    }
  }
  d_o_ = *parts[0];
  dq_ = *parts[1];
  dk_ = *parts[2];
  dv_ = *parts[3];
  return forward->forward({q_.view(), k_.view(), v_.view()}, {o_.view(), lse()},
                          {parts[4]->data(), parts[4]->bytes()});
}

Status PreparedAttention::run(Stream stream) const {
  const Workspace lent{workspace_.data(), workspace_.bytes()};
  if (plan_->pass() == Pass::forward) {
    ForwardInputs in{q_.view(), k_.view(), v_.view()};
    if (k_scale_ && v_scale_) {
      in.k_scale = k_scale_->view();
      in.v_scale = v_scale_->view();
    }
    if (page_table_) {
      in.page_table = page_table_->indices();
    }
    if (lengths_) {
      in.seqused_kv = lengths_->indices();
    }
    return plan_->forward(in, {o_.view(), lse()}, lent, stream);
  }
  return plan_->backward({.q = q_.view(),
                          .k = k_.view(),
                          .v = v_.view(),
                          .o = o_.view(),
                          .lse = lse(),
                          .d_o = d_o_->view()},
                         {dq_->view(), dk_->view(), dv_->view()}, lent, stream);
}

Result<Array> PreparedAttention::output() const {
  const Result<Array> o = o_.fetch();
  return o ? convert(*o, DType::f32, "o") : o;
}

double PreparedAttention::working_set_bytes() const {
  std::int64_t bytes = 0;
  for (const Resident* array : {&q_, &k_, &v_, &o_, &lse_, &workspace_}) {
    bytes += array->bytes();
  }
  for (const std::optional<Resident>* array :
       {&k_scale_, &v_scale_, &page_table_, &lengths_, &d_o_, &dq_, &dk_, &dv_}) {
    bytes += *array ? (*array)->bytes() : 0;
  }
  return static_cast<double>(bytes);
}

double flush_bytes(const DeviceSpec& spec) {
  const Figure* l2 = spec.find("l2_bytes");
  constexpr double kUnknownL2 = 128e6;
  return 2 * (l2 != nullptr ? l2->value : kUnknownL2);
}

Level level_of(const DeviceSpec& spec, double working_set_bytes) {
  // Sizes are those of one core, rates those of all.
  const Figure* cores = spec.find("sm_count");
  for (const char* name : {"l2", "l3"}) {
    if (spec.kind == Device::Kind::cuda) {
      break;
    }
    const Figure* size = spec.find(std::string(name) + "_bytes");
    const Figure* rate = spec.find("bandwidth_" + std::string(name) + "_bytes_per_s");
    if (size != nullptr && rate != nullptr && cores != nullptr &&
        working_set_bytes <= size->value * cores->value) {
      return {name, rate->value};
    }
  }
  const Figure* memory = spec.find("bandwidth_bytes_per_s");
  return {"memory", memory != nullptr ? memory->value : 0};
}

std::optional<AddedFlops> added_flops(const AttentionProblem& problem, Pipeline pipeline,
                                      Pass pass) {
  const Result<Cost> base = attention_cost(problem, pipeline, pass);
  if (!base || base->bytes <= 0 || base->flops <= 0) {
    return std::nullopt;
  }
  const std::int64_t head_dim_v = problem.head_dim_v == 0 ? problem.head_dim : problem.head_dim_v;
  // Twice the head_dim adds FLOPs where the scores are most of the bytes; twice the length at half
  // the head_dim where q, k, v and o are.
  AttentionProblem wider = problem, longer = problem;
  wider.head_dim = 2 * problem.head_dim;
  wider.head_dim_v = 2 * head_dim_v;
  longer.seqlen_q = 2 * problem.seqlen_q;
  longer.seqlen_kv = 2 * problem.seqlen_kv;
  longer.head_dim = problem.head_dim / 2;
  longer.head_dim_v = head_dim_v / 2;
  constexpr double kLeastFlops = 1.5, kMostBytes = 1.25;
  constexpr std::int64_t kLeastHeadDim = 8;
  std::optional<AddedFlops> best;
  for (const AttentionProblem& changed : {wider, longer}) {
    if (changed.head_dim < kLeastHeadDim || changed.head_dim_v < kLeastHeadDim) {
      continue;
    }
    const Result<Cost> cost = attention_cost(changed, pipeline, pass);
    if (!cost) {
      continue;
    }
    const AddedFlops added{changed, cost->flops / base->flops, cost->bytes / base->bytes};
    if (added.flops_ratio >= kLeastFlops && added.bytes_ratio <= kMostBytes &&
        (!best || added.bytes_ratio < best->bytes_ratio)) {
      best = added;
    }
  }
  return best;
}

Result<Prediction> predict_at(const Cost& cost, DeviceSpec spec, double bandwidth) {
  const auto figure = spec.figures.find("bandwidth_bytes_per_s");
  if (figure != spec.figures.end() && bandwidth != figure->second.value) {
    figure->second.value = figure->second.low = figure->second.high = bandwidth;
  }
  return predict(cost, spec);
}

namespace {

// A case with its companions for the evidence, and where their samples stand in the timings.
struct Prepared {
  std::size_t result = 0;
  std::optional<std::size_t> once, twice, more;
};

// The backward also reads o and d_o, and writes a gradient for each of q, k and v.
double declared_bytes(const AttentionProblem& p, Pass pass, std::span<const std::int64_t> lengths) {
  const double rows = static_cast<double>(p.batch * p.seqlen_q * p.heads_q);
  const std::int64_t tokens =
      lengths.empty() ? p.batch * p.seqlen_kv
                      : std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const double keys = static_cast<double>(tokens * p.heads_kv);
  const double dims = static_cast<double>(p.head_dim + p.head_dim_v);
  const DType kv = p.kv_dtype.value_or(p.dtype);
  const double scales = kv == DType::int8 ? 2.0 * 4 : 0;
  const double more =
      pass == Pass::backward
          ? ((rows + keys) * dims + rows * static_cast<double>(p.head_dim_v)) * bytes_of(p.dtype)
          : 0;
  return rows * (dims * bytes_of(p.dtype) + 4) + keys * (dims * bytes_of(kv) + scales) + more;
}

/// What the plan says of its capacities; of the lengths themselves where they are known.
Result<Cost> cost_of(const Plan& plan, std::span<const std::int64_t> lengths) {
  if (lengths.empty()) {
    return plan.cost();
  }
  std::vector<SequenceLength> sequences;
  for (const std::int64_t length : lengths) {
    sequences.push_back({plan.problem().seqlen_q, length});
  }
  return attention_cost(plan.problem(), sequences, plan.pipeline(), plan.pass(), plan.convention());
}

Result<CaseResult> describe(const PreparedAttention& made, const DeviceSpec& spec,
                            std::span<const std::int64_t> lengths) {
  const Plan& plan = made.plan();
  CaseResult result;
  result.kernel = plan.kernel();
  result.pipeline = plan.pipeline();
  result.threads = plan.threads();
  Result<Cost> cost = cost_of(plan, lengths);
  if (!cost) {
    return cost.status();
  }
  result.cost = *std::move(cost);
  result.working_set_bytes = made.working_set_bytes();
  result.workspace_bytes = static_cast<double>(plan.workspace_bytes());
  result.declared_bytes = declared_bytes(plan.problem(), plan.pass(), lengths);
  result.level = level_of(spec, result.working_set_bytes);
  result.cache_resident = result.level.name != "memory";
  Result<Prediction> predicted = predict(result.cost, spec);
  Result<Prediction> at_level = predict_at(result.cost, spec, result.level.bandwidth_bytes_per_s);
  if (!predicted || !at_level) {
    return predicted ? at_level.status() : predicted.status();
  }
  result.predicted = *predicted;
  result.at_level = *at_level;
  return result;
}

// Adds a case to those to be timed; nothing when no kernel takes it or memory does not hold it.
std::optional<std::size_t> add_case(std::vector<PreparedAttention>& cases,
                                    const AttentionProblem& problem, const PlanOptions& options,
                                    const Result<std::optional<Qkv>>& data, const Device& device) {
  if (!data) {
    return std::nullopt;
  }
  Result<PreparedAttention> made = PreparedAttention::make(problem, options, *data, device);
  if (!made) {
    return std::nullopt;
  }
  cases.push_back(std::move(made).value());
  return cases.size() - 1;
}

Result<std::optional<Qkv>> maybe(Result<Qkv> data) {
  return data ? Result<std::optional<Qkv>>(std::optional(*std::move(data))) : data.status();
}

void add_evidence(std::vector<PreparedAttention>& cases, const TimedCase& timed,
                  const Device& device, Prepared& prepared, CaseResult& result) {
  PlanOptions same = timed.options;
  same.kernel = result.kernel;  // the same code, whatever the chooser would take for that shape
  const AttentionProblem& p = timed.problem;
  AttentionProblem twice = p;
  twice.batch *= 2;
  twice.num_pages *= 2;
  const bool plain = p.layout == Layout::dense && p.kv_dtype.value_or(p.dtype) == p.dtype;
  const auto data_of = [&timed](const AttentionProblem& problem) {
    return timed.data ? maybe(random_data(problem)) : std::optional<Qkv>();
  };
  prepared.twice = add_case(cases, twice, same,
                            timed.data && plain
                                ? maybe(excerpt(*timed.data, p.seqlen_q, p.seqlen_kv, 2, p.dtype))
                                : data_of(twice),
                            device);
  if (const std::optional<AddedFlops> added = added_flops(p, result.pipeline, timed.options.pass)) {
    prepared.more = add_case(cases, added->problem, same, data_of(added->problem), device);
    result.evidence.added_flops_ratio = added->flops_ratio;
    result.evidence.added_bytes_ratio = added->bytes_ratio;
  }
}

/// Cold: each call alone, after a flush of the L2.
Result<std::vector<Timing>> time_on_device(const std::vector<PreparedAttention>& cases,
                                           const DeviceClock& clock, const DeviceSpec& spec,
                                           const StopRule& rule) {
  StopRule cold = rule;
  cold.flush_bytes = flush_bytes(spec);
  std::vector<TimedWork> work;
  for (const PreparedAttention& one : cases) {
    work.push_back(clock.timed([&one, &clock] { return one.run(clock.stream()); }, Queueing::stream,
                               cold.flush_bytes));
  }
  return time_alternating(std::span<const TimedWork>(work), cold);
}

/// The same calls on a stream and in a graph, back to back: what launches cost.
Status compare_queueing(const PreparedAttention& one, const DeviceClock& clock,
                        const StopRule& rule, WallEvidence& evidence) {
  const Work queue = [&one, &clock] { return one.run(clock.stream()); };
  const TimedWork work[] = {clock.timed(queue, Queueing::stream),
                            clock.timed(queue, Queueing::graph)};
  StopRule brief = rule;
  brief.min_time_s = rule.min_time_s / 4;
  brief.max_time_s = rule.max_time_s / 4;
  const Result<std::vector<Timing>> timings =
      time_alternating(std::span<const TimedWork>(work), brief);
  if (!timings) {
    return timings.status();
  }
  evidence.seconds_stream = (*timings)[0].seconds;
  evidence.seconds_graph = (*timings)[1].seconds;
  return Status::ok();
}

/// From a flushed L2, as the times.
void count_bytes(const PreparedAttention& one, const DeviceClock& clock, const DeviceSpec& spec,
                 CaseResult& result) {
  const Result<CountedBytes> counted =
      clock.count([&one, &clock] { return one.run(clock.stream()); }, flush_bytes(spec));
  if (counted) {
    result.counted = *counted;
  } else {
    result.counted_reason = counted.status().message();
  }
}

}  // namespace

Result<std::vector<CaseResult>> time_cases(std::span<const TimedCase> timed, const DeviceSpec& spec,
                                           const TimingOptions& options) {
  std::vector<CaseResult> results(timed.size());
  std::vector<Prepared> prepared;
  std::vector<PreparedAttention> cases;
  for (std::size_t i = 0; i < timed.size(); ++i) {
    Result<PreparedAttention> made = PreparedAttention::make(
        timed[i].problem, timed[i].options, timed[i].data, options.device, {}, timed[i].lengths);
    if (!made) {
      if (made.status().code() != StatusCode::kUnsupported) {
        return made.status();
      }
      results[i].refusal = made.status().message();
      results[i].pipeline = timed[i].options.pipeline.value_or(Pipeline::fused);
      continue;
    }
    Result<CaseResult> described = describe(*made, spec, timed[i].lengths);
    if (!described) {
      return described.status();
    }
    results[i] = std::move(described).value();
    cases.push_back(std::move(made).value());
    Prepared entry{.result = i, .once = cases.size() - 1, .twice = {}, .more = {}};
    if (options.evidence && timed[i].lengths.empty()) {
      add_evidence(cases, timed[i], options.device, entry, results[i]);
    }
    prepared.push_back(entry);
  }
  std::optional<DeviceClock> clock;
  if (options.device.kind == Device::Kind::cuda) {
    Result<DeviceClock> made = DeviceClock::make(options.device);
    if (!made) {
      return made.status();
    }
    clock = *made;
  }
  std::vector<Work> work;
  for (const PreparedAttention& one : cases) {
    work.emplace_back([&one] { return one.run(); });
  }
  const Result<std::vector<Timing>> timings =
      clock ? time_on_device(cases, *clock, spec, options.rule)
            : time_alternating(std::span<const Work>(work), options.rule);
  if (!timings) {
    return timings.status();
  }
  for (const Prepared& entry : prepared) {
    CaseResult& result = results[entry.result];
    result.timing = (*timings)[*entry.once];
    result.evidence.seconds = result.timing.seconds;
    if (entry.twice) {
      result.evidence.seconds_double = (*timings)[*entry.twice].seconds;
    }
    if (entry.more) {
      result.evidence.seconds_added_flops = (*timings)[*entry.more].seconds;
    }
    if (clock && options.evidence) {
      if (Status status =
              compare_queueing(cases[*entry.once], *clock, options.rule, result.evidence);
          !status) {
        return status;
      }
    }
    if (clock && options.counters) {
      count_bytes(cases[*entry.once], *clock, spec, result);
    } else {
      result.counted_reason = clock ? "not asked for" : "no memory counters are read on a CPU";
    }
    result.measured = judge_wall(result.evidence);
  }
  return results;
}

}  // namespace rafter::cli
