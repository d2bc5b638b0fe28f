#include "cli/timed_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "cli/quantise.h"

namespace rafter::cli {
namespace {

Result<Array> random_array(DType dtype, std::vector<std::int64_t> shape, unsigned seed) {
  Result<Array> array = allocate_array(DType::f32, std::move(shape), "random data");
  if (!array) {
    return array;
  }
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  auto* values = reinterpret_cast<float*>(array->data.get());
  // A cache of many gigabytes repeats itself: deviates are slow, and time does not see it.
  constexpr std::int64_t kPeriod = (std::int64_t{1} << 22) + 17;
  const std::int64_t count = array->elements();
  const std::int64_t drawn = std::min(count, kPeriod);
  std::generate(values, values + drawn, [&] { return normal(generator); });
  for (std::int64_t i = drawn; i < count; ++i) {
    values[i] = values[i - kPeriod];
  }
  return dtype == DType::int8 ? array : convert(*array, dtype, "random data");
}

// f32 [batch, seqlen, heads, head_dim] as int8 with a scale for each row.
Status quantise(Array& values, Array& scales) {
  std::vector<std::int64_t> shape = values.shape;
  const std::int64_t dim = std::exchange(shape.back(), 1);
  Result<Array> rows = allocate_array(DType::int8, values.shape, "random data");
  Result<Array> factors = allocate_array(DType::f32, shape, "random data");
  for (const Result<Array>* array : {&rows, &factors}) {
    if (!*array) {
      return array->status();
    }
  }
  const auto* const from = reinterpret_cast<const float*>(values.data.get());
  auto* const to = reinterpret_cast<std::int8_t*>(rows->data.get());
  auto* const factor = reinterpret_cast<float*>(factors->data.get());
  for (std::int64_t row = 0; row < factors->elements(); ++row) {
    factor[row] = int8_scale({from + row * dim, static_cast<std::size_t>(dim)});
    for (std::int64_t d = 0; d < dim; ++d) {
      to[row * dim + d] = to_int8(from[row * dim + d], factor[row]);
    }
  }
  values = *rows;
  scales = *factors;
  return Status::ok();
}

// Pages of the batch in an order that no walk through memory follows.
Result<Array> shuffled_pages(const AttentionProblem& p) {
  const std::int64_t columns = (p.seqlen_kv + p.page_size - 1) / p.page_size;
  Result<Array> table = allocate_array(DType::i32, {p.batch, columns}, "page table");
  if (!table) {
    return table;
  }
  auto* const pages = reinterpret_cast<std::int32_t*>(table->data.get());
  std::iota(pages, pages + table->elements(), 0);
  std::shuffle(pages, pages + table->elements(), std::mt19937(4));
  return table;
}

LseView lse_view(const Array& lse, const AttentionProblem& p) {
  return LseView::contiguous(reinterpret_cast<float*>(lse.data.get()), p.batch, p.heads_q,
                             p.seqlen_q);
}

// The first rows of every sequence of [batch, seqlen, heads, head_dim], the batch `copies` times.
Result<Array> first_rows(const Array& from, std::int64_t rows, std::int64_t copies, DType dtype) {
  const std::int64_t batch = from.shape[0], row = from.shape[2] * from.shape[3];
  Result<Array> part =
      allocate_array(from.dtype, {batch * copies, rows, from.shape[2], from.shape[3]}, "excerpt");
  if (!part) {
    return part;
  }
  const auto row_bytes = static_cast<std::size_t>(row * bits_of(from.dtype) / 8);
  for (std::int64_t b = 0; b < batch * copies; ++b) {
    std::memcpy(part->data.get() + static_cast<std::size_t>(b * rows) * row_bytes,
                from.data.get() + static_cast<std::size_t>(b % batch * from.shape[1]) * row_bytes,
                static_cast<std::size_t>(rows) * row_bytes);
  }
  return convert(*part, dtype, "excerpt");
}

}  // namespace

Result<Qkv> random_data(const AttentionProblem& p) {
  const std::int64_t heads_kv = p.heads_kv == 0 ? p.heads_q : p.heads_kv;
  const std::int64_t head_dim_v = p.head_dim_v == 0 ? p.head_dim : p.head_dim_v;
  Result<Array> q = random_array(p.dtype, {p.batch, p.seqlen_q, p.heads_q, p.head_dim}, 1);
  const bool paged = p.layout == Layout::paged;
  const std::int64_t batch_kv = paged ? p.num_pages : p.batch;
  const std::int64_t rows_kv = paged ? p.page_size : p.seqlen_kv;
  const DType kv = p.kv_dtype.value_or(p.dtype);
  Result<Array> k = random_array(kv, {batch_kv, rows_kv, heads_kv, p.head_dim}, 2);
  Result<Array> v = random_array(kv, {batch_kv, rows_kv, heads_kv, head_dim_v}, 3);
  for (const Result<Array>* array : {&q, &k, &v}) {
    if (!*array) {
      return array->status();
    }
  }
  Qkv data{*q, *k, *v};
  if (kv == DType::int8) {
    for (const Status& status : {quantise(data.k, data.k_scale), quantise(data.v, data.v_scale)}) {
      if (!status) {
        return status;
      }
    }
  }
  if (paged) {
    Result<Array> table = shuffled_pages(p);
    if (!table) {
      return table.status();
    }
    data.page_table = *table;
  }
  return data;
}

Result<Qkv> excerpt(const Qkv& from, std::int64_t seqlen_q, std::int64_t seqlen_kv,
                    std::int64_t copies, DType dtype) {
  Result<Array> q = first_rows(from.q, seqlen_q, copies, dtype);
  Result<Array> k = first_rows(from.k, seqlen_kv, copies, dtype);
  Result<Array> v = first_rows(from.v, seqlen_kv, copies, dtype);
  for (const Result<Array>* array : {&q, &k, &v}) {
    if (!*array) {
      return array->status();
    }
  }
  return Qkv{*q, *k, *v};
}

Result<PreparedAttention> PreparedAttention::make(const AttentionProblem& problem,
                                                  const PlanOptions& options, Qkv data,
                                                  std::optional<DType> o_dtype) {
  Result<Plan> planned = rafter::plan(problem, Device::cpu(), options);
  if (!planned) {
    return planned.status();
  }
  PreparedAttention made;
  made.plan_.emplace(*planned);
  made.data_ = std::move(data);
  const AttentionProblem& p = made.plan_->problem();
  Result<Array> o = allocate_array(o_dtype.value_or(p.dtype),
                                   {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v}, "o");
  Result<Array> lse = allocate_array(DType::f32, {p.batch, p.heads_q, p.seqlen_q}, "lse");
  Result<Array> workspace =
      allocate_array(DType::int8, {made.plan_->workspace_bytes()}, "workspace");
  for (const Result<Array>* array : {&o, &lse, &workspace}) {
    if (!*array) {
      return array->status();
    }
  }
  made.o_ = *o;
  made.lse_ = *lse;
  made.workspace_ = *workspace;
  if (made.plan_->pass() == Pass::backward) {
    if (Status prepared = made.prepare_backward(options); !prepared) {
      return prepared;
    }
  }
  return made;
}

Status PreparedAttention::prepare_backward(const PlanOptions& options) {
  const AttentionProblem& p = plan_->problem();
  Result<Array> d_o = random_array(p.dtype, o_.shape, 4);
  Result<Array> dq = allocate_array(p.dtype, data_.q.shape, "dq");
  Result<Array> dk = allocate_array(p.dtype, data_.k.shape, "dk");
  Result<Array> dv = allocate_array(p.dtype, data_.v.shape, "dv");
  for (const Result<Array>* array : {&d_o, &dq, &dk, &dv}) {
    if (!*array) {
      return array->status();
    }
  }
  d_o_ = *d_o;
  dq_ = *dq;
  dk_ = *dk;
  dv_ = *dv;
  const Result<Plan> forward = rafter::plan(p, Device::cpu(), {.threads = options.threads});
  if (!forward) {
    return forward.status();
  }
  const Result<Array> workspace =
      allocate_array(DType::int8, {forward->workspace_bytes()}, "workspace");
  if (!workspace) {
    return workspace.status();
  }
  return forward->forward({view_of(data_.q), view_of(data_.k), view_of(data_.v)},
                          {view_of(o_), lse_view(lse_, p)},
                          {workspace->data.get(), workspace->bytes()});
}

Status PreparedAttention::run() const {
  const LseView lse = lse_view(lse_, plan_->problem());
  const Workspace lent{workspace_.data.get(), workspace_.bytes()};
  if (plan_->pass() == Pass::forward) {
    ForwardInputs in{view_of(data_.q), view_of(data_.k), view_of(data_.v)};
    if (data_.k_scale.data != nullptr) {
      in.k_scale = view_of(data_.k_scale);
      in.v_scale = view_of(data_.v_scale);
    }
    if (const Array& table = data_.page_table; table.data != nullptr) {
      in.page_table = {table.data.get(), table.dtype, table.elements(), table.shape[1]};
    }
    return plan_->forward(in, {view_of(o_), lse}, lent);
  }
  return plan_->backward({.q = view_of(data_.q),
                          .k = view_of(data_.k),
                          .v = view_of(data_.v),
                          .o = view_of(o_),
                          .lse = lse,
                          .d_o = view_of(d_o_)},
                         {view_of(dq_), view_of(dk_), view_of(dv_)}, lent);
}

Result<Array> PreparedAttention::output() const { return convert(o_, DType::f32, "o"); }

double PreparedAttention::working_set_bytes() const {
  std::int64_t bytes = 0;
  for (const Array* array : {&data_.q, &data_.k, &data_.v, &data_.k_scale, &data_.v_scale,
                             &data_.page_table, &o_, &lse_, &workspace_, &d_o_, &dq_, &dk_, &dv_}) {
    bytes += array->data != nullptr ? array->bytes() : 0;
  }
  return static_cast<double>(bytes);
}

Level level_of(const DeviceSpec& spec, double working_set_bytes) {
  // Sizes are those of one core, rates those of all.
  const Figure* cores = spec.find("sm_count");
  for (const char* name : {"l2", "l3"}) {
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

namespace {

// A case with its companions for the evidence, and where their samples stand in the timings.
struct Prepared {
  std::size_t result = 0;
  std::optional<std::size_t> once, twice, more;
};

Result<Prediction> predict_at(const Cost& cost, DeviceSpec spec, double bandwidth) {
  const auto figure = spec.figures.find("bandwidth_bytes_per_s");
  if (figure != spec.figures.end() && bandwidth != figure->second.value) {
    figure->second.value = figure->second.low = figure->second.high = bandwidth;
  }
  return predict(cost, spec);
}

// The backward also reads o and d_o, and writes a gradient for each of q, k and v.
double declared_bytes(const AttentionProblem& p, Pass pass) {
  const double rows = static_cast<double>(p.batch * p.seqlen_q * p.heads_q);
  const double keys = static_cast<double>(p.batch * p.seqlen_kv * p.heads_kv);
  const double dims = static_cast<double>(p.head_dim + p.head_dim_v);
  const DType kv = p.kv_dtype.value_or(p.dtype);
  const double scales = kv == DType::int8 ? 2.0 * 4 : 0;
  const double more =
      pass == Pass::backward
          ? ((rows + keys) * dims + rows * static_cast<double>(p.head_dim_v)) * bytes_of(p.dtype)
          : 0;
  return rows * (dims * bytes_of(p.dtype) + 4) + keys * (dims * bytes_of(kv) + scales) + more;
}

Result<CaseResult> describe(const PreparedAttention& made, const DeviceSpec& spec) {
  const Plan& plan = made.plan();
  CaseResult result;
  result.kernel = plan.kernel();
  result.pipeline = plan.pipeline();
  result.threads = plan.threads();
  result.cost = plan.cost();
  result.working_set_bytes = made.working_set_bytes();
  result.workspace_bytes = static_cast<double>(plan.workspace_bytes());
  result.declared_bytes = declared_bytes(plan.problem(), plan.pass());
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
                                    Result<Qkv> data) {
  if (!data) {
    return std::nullopt;
  }
  Result<PreparedAttention> made =
      PreparedAttention::make(problem, options, std::move(data).value());
  if (!made) {
    return std::nullopt;
  }
  cases.push_back(std::move(made).value());
  return cases.size() - 1;
}

void add_evidence(std::vector<PreparedAttention>& cases, const TimedCase& timed, Prepared& prepared,
                  CaseResult& result) {
  PlanOptions same = timed.options;
  same.kernel = result.kernel;  // the same code, whatever the chooser would take for that shape
  AttentionProblem twice = timed.problem;
  twice.batch *= 2;
  twice.num_pages *= 2;
  const bool plain = timed.problem.layout == Layout::dense &&
                     timed.problem.kv_dtype.value_or(timed.problem.dtype) == timed.problem.dtype;
  prepared.twice = add_case(cases, twice, same,
                            plain ? excerpt(timed.data, timed.problem.seqlen_q,
                                            timed.problem.seqlen_kv, 2, timed.problem.dtype)
                                  : random_data(twice));
  if (const std::optional<AddedFlops> added =
          added_flops(timed.problem, result.pipeline, timed.options.pass)) {
    prepared.more = add_case(cases, added->problem, same, random_data(added->problem));
    result.evidence.added_flops_ratio = added->flops_ratio;
    result.evidence.added_bytes_ratio = added->bytes_ratio;
  }
}

}  // namespace

Result<std::vector<CaseResult>> time_cases(std::span<const TimedCase> timed, const DeviceSpec& spec,
                                           const TimingOptions& options) {
  std::vector<CaseResult> results(timed.size());
  std::vector<Prepared> prepared;
  std::vector<PreparedAttention> cases;
  for (std::size_t i = 0; i < timed.size(); ++i) {
    Result<PreparedAttention> made =
        PreparedAttention::make(timed[i].problem, timed[i].options, timed[i].data);
    if (!made) {
      if (made.status().code() != StatusCode::kUnsupported) {
        return made.status();
      }
      results[i].refusal = made.status().message();
      results[i].pipeline = timed[i].options.pipeline.value_or(Pipeline::fused);
      continue;
    }
    Result<CaseResult> described = describe(*made, spec);
    if (!described) {
      return described.status();
    }
    results[i] = std::move(described).value();
    cases.push_back(std::move(made).value());
    Prepared entry{.result = i, .once = cases.size() - 1, .twice = {}, .more = {}};
    if (options.evidence) {
      add_evidence(cases, timed[i], entry, results[i]);
    }
    prepared.push_back(entry);
  }
  std::vector<Work> work;
  for (const PreparedAttention& one : cases) {
    work.emplace_back([&one] { return one.run(); });
  }
  const Result<std::vector<Timing>> timings = time_alternating(work, options.rule);
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
    result.measured = judge_wall(result.evidence);
  }
  return results;
}

}  // namespace rafter::cli
