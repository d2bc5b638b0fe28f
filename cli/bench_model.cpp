// rafter bench model: a whole model's prefill and decode, operation by operation, predicted beside
// measured.
#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <memory>

#include "cli/bench_common.h"
#include "cli/npy.h"
#include "cli/npy_output.h"
#include "rafter/transformer.h"

namespace rafter::cli {
namespace {

struct ModelAxes {
  std::string model;
  std::vector<std::string> phases = {"prefill", "decode"};
  std::vector<std::int64_t> seqlens = {512};
  std::vector<std::int64_t> batches = {1};
  std::vector<Pipeline> pipelines = {Pipeline::fused};
  std::vector<bool> fuse = {true};
  std::int64_t page_size = 64;
  std::optional<std::int64_t> seed;
  bool operations = true;
  std::vector<DType> weights;  // empty: the model's dtype
  std::int64_t group_size = 128;
  std::string tokens, logits;
  std::optional<std::int64_t> prompt;
};

/// Generated tokens behind the context that a sample may add before it is set back.
constexpr std::int64_t kSpare = 8;

/// One point: a phase of a session that is set up.
struct ModelPoint {
  Phase phase = Phase::prefill;
  std::int64_t seqlen = 0, batch = 1;
  Pipeline pipeline = Pipeline::fused;
  bool fuse = true;
};

bool is_path(const std::string& name) {
  return name.find('/') != std::string::npos || name.ends_with(".json");
}

TransformerConfig config_of(const std::string& name) {
  Result<TransformerConfig> config =
      is_path(name) ? load_transformer(name) : find_transformer(name);
  if (!config) {
    fail_about("--model", name, is_path(name), config.status());
  }
  return *std::move(config);
}

bool has_weights(const std::string& name) { return is_path(name) && !name.ends_with(".json"); }

/// The formats to bench; a dtype of 16 bits or more means plain weights and is the model's.
std::vector<WeightFormat> formats_of(const ModelAxes& axes, DType dtype) {
  std::vector<WeightFormat> formats;
  for (const DType weights : axes.weights) {
    const bool packed = bits_of(weights) <= 8;
    if (!packed && weights != dtype) {
      fail_flag("--weights", to_string(weights),
                fmt::format("{} (--dtype), int8, e4m3, int4", to_string(dtype)));
    }
    formats.push_back({packed ? std::optional(weights) : std::nullopt, axes.group_size});
  }
  return formats.empty() ? std::vector<WeightFormat>(1) : formats;
}

/// Those weights, or random ones of a built-in model or of a config.json.
Transformer model_of(const ModelAxes& axes, const Device& device, DType dtype,
                     const WeightFormat& weights) {
  const std::string name = !axes.model.empty()                 ? axes.model
                           : device.kind == Device::Kind::cuda ? "reference-7b"
                                                               : "reference-60m";
  return value_or_fail(has_weights(name)
                           ? Transformer::load(name, device, dtype, weights)
                           : Transformer::random(config_of(name),
                                                 static_cast<std::uint64_t>(axes.seed.value_or(1)),
                                                 device, dtype, weights));
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

TransformerSession session_of(const Transformer& model, const ModelAxes& axes,
                              const ModelPoint& point) {
  TransformerSession session =
      value_or_fail(TransformerSession::make(model, {.max_batch = point.batch,
                                                     .max_seqlen = point.seqlen + kSpare,
                                                     .page_size = axes.page_size,
                                                     .prefill = point.pipeline,
                                                     .fuse = point.fuse}));
  if (point.phase == Phase::decode) {
    check(session.assume_context(point.batch, point.seqlen));
    return session;
  }
  std::vector<std::vector<std::int32_t>> prompts;
  for (std::int64_t b = 0; b < point.batch; ++b) {
    prompts.push_back(
        some_tokens(point.seqlen, model.config().model.vocab_size, axes.seed.value_or(1) + b));
  }
  check(session.prepare_prefill(prompts));
  return session;
}

/// Times work on the device's own clock, or on this machine's; the session is set back before each
/// sample.
class Timer {
 public:
  Timer(const ThisMachine& machine, const Common& common, const TransformerSession& session)
      : session_(session), rule_(rule_of(common)) {
    rule_.min_sample_s = 0;  // one step a sample: a decode step lengthens its sequences
    if (machine.device.kind == Device::Kind::cuda) {
      clock_ = value_or_fail(DeviceClock::make(machine.device));
    }
  }
  Stream stream() const { return clock_ ? clock_->stream() : Stream{}; }

  Timing time(const Work& work, Queueing queueing) const {
    const TimedWork inner = clock_ ? clock_->timed(work, queueing) : on_this_clock(work);
    const TimedWork rewound[] = {[&](std::int64_t calls) -> Result<double> {
      const Status back = session_.rewind();
      return back ? inner(calls) : Result<double>(back);
    }};
    return value_or_fail(time_alternating(std::span<const TimedWork>(rewound), rule_))[0];
  }

 private:
  static TimedWork on_this_clock(const Work& work) {
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

  const TransformerSession& session_;
  StopRule rule_;
  std::optional<DeviceClock> clock_;
};

void add_cost(const Cost& from, Cost& to) {
  to.matmul_flops += from.matmul_flops;
  to.softmax_flops += from.softmax_flops;
  to.flops += from.flops;
  to.bytes += from.bytes;
  to.launches += from.launches;
  to.kv_bytes += from.kv_bytes;
  to.dtype = from.dtype;
}

/// The operations of one name: those of all layers.
struct OperationGroup {
  std::string name, kernel;
  Cost cost;
  std::vector<StepOperation> operations;
};
std::vector<OperationGroup> groups_of(const std::vector<StepOperation>& operations) {
  std::vector<OperationGroup> groups;
  std::map<std::string, std::size_t> at;
  for (const StepOperation& operation : operations) {
    const auto [found, fresh] = at.emplace(operation.name, groups.size());
    if (fresh) {
      groups.push_back({operation.name, operation.kernel, {}, {}});
    }
    OperationGroup& group = groups[found->second];
    add_cost(operation.cost, group.cost);
    group.operations.push_back(operation);
  }
  return groups;
}

Json shape_of(const ModelPoint& point, const Transformer& model, const ModelAxes& axes,
              const std::string& operation) {
  const WeightFormat& weights = model.weight_format();
  Json shape{{"model", model.config().model.name},
             {"phase", to_string(point.phase)},
             {"seqlen", point.seqlen},
             {"batch", point.batch},
             {"dtype", to_string(model.dtype())},
             {"weights", to_string(weights.dtype.value_or(model.dtype()))},
             {"page_size", axes.page_size},
             {"fuse", point.fuse},
             {"operation", operation}};
  if (weights.dtype == DType::int4) {
    shape["group_size"] = weights.group_size;
  }
  return shape;
}

/// What every row of a model has.
BenchRow model_row(const ModelPoint& point, const Transformer& model, const ModelAxes& axes,
                   const std::string& operation, const Cost& cost, const Timing& timing) {
  BenchRow row;
  row.kind = "model";
  row.shape = shape_of(point, model, axes, operation);
  row.pipeline = point.phase == Phase::prefill ? to_string(point.pipeline) : "split-kv";
  row.cost = cost;
  row.timing = timing;
  row.level = "memory";
  set_one_size(row);
  row.more["launches"] = number(cost.launches);
  return row;
}

/// Launches cost what they do in a graph where one is replayed.
Convention convention_of(const ThisMachine& machine, bool graph) {
  Convention convention;
  const Figure* const in_graph = machine.spec.find("graph_launch_s");
  if (graph && in_graph != nullptr) {
    convention.launch_s = in_graph->value;
  }
  return convention;
}

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

BenchRow step_row(const ModelPoint& point, const Transformer& model, const ModelAxes& axes,
                  const ThisMachine& machine, const Cost& cost, const Timing& timing, bool graph,
                  const std::optional<std::int64_t>& launches) {
  ModelStep step{.model = model.config().model,
                 .phase = point.phase,
                 .seqlen = point.phase == Phase::decode ? point.seqlen + 1 : point.seqlen,
                 .batch = point.batch,
                 .pipeline = point.phase == Phase::decode ? Pipeline::split_kv : point.pipeline};
  step.model.dtype = model.dtype();
  step.graph = graph;
  step.launches = launches ? static_cast<double>(*launches) : cost.launches;
  count_packed(model, machine.spec, step);
  const bool cuda = machine.device.kind == Device::Kind::cuda;
  const ModelBudget budget = value_or_fail(model_budget(step, machine.spec));
  BenchRow row = model_row(point, model, axes,
                           !cuda   ? "step"
                           : graph ? "step (graph)"
                                   : "step (stream)",
                           cost, timing);
  row.kernel = "all of them";
  row.predicted = value_or_fail(predict(cost, machine.spec, convention_of(machine, graph)));
  row.predicted.time_s = budget.time_s;
  row.predicted.wall = budget.wall;
  row.bound_s = budget.device_time_s;
  const double median_s = timing.seconds.median;
  row.more["launches_counted"] = launches ? Json(*launches) : Json();
  row.more["predicted_gemm_time_s"] = number(budget.gemm_time_s);
  row.more["predicted_attention_time_s"] = number(budget.attention_time_s);
  row.more["predicted_elementwise_time_s"] = number(budget.elementwise_time_s);
  row.more["predicted_dispatch_time_s"] = number(budget.dispatch_time_s);
  row.more["attention_share"] = number(budget.attention_share);
  row.more["weight_bytes"] = number(model.weight_bytes());
  row.more["weights_time_s"] = number(budget.weights_time_s);
  row.more["share_of_weights_floor"] = number(budget.weights_time_s / median_s);
  row.more["tokens_per_s"] =
      number(static_cast<double>(point.batch * (point.phase == Phase::prefill ? point.seqlen : 1)) /
             median_s);
  return row;
}

BenchRow operation_row(const ModelPoint& point, const Transformer& model, const ModelAxes& axes,
                       const ThisMachine& machine, const OperationGroup& group,
                       const Timing& timing, double step_s) {
  BenchRow row = model_row(point, model, axes, group.name, group.cost, timing);
  row.kernel = group.kernel;
  const bool graph = machine.device.kind == Device::Kind::cuda;
  row.predicted = value_or_fail(predict(group.cost, machine.spec, convention_of(machine, graph)));
  row.bound_s = std::max(row.predicted.time_compute_s, row.predicted.time_bandwidth_s);
  row.more["share_of_step"] = number(timing.seconds.median / step_s);
  return row;
}

/// The step as it is queued, and every operation of it by itself.
void bench_point(const ModelPoint& point, const Transformer& model, const ModelAxes& axes,
                 const Common& common, const ThisMachine& machine, Progress& progress,
                 std::vector<BenchRow>& rows) {
  const TransformerSession session = session_of(model, axes, point);
  const std::vector<OperationGroup> groups = groups_of(session.operations(point.phase));
  Cost all;
  for (const OperationGroup& group : groups) {
    add_cost(group.cost, all);
  }
  const bool cuda = machine.device.kind == Device::Kind::cuda;
  std::optional<std::int64_t> launches;
  if (cuda) {
    launches = value_or_fail(session.count_launches(point.phase));
  }
  const Timer timer(machine, common, session);
  const Work step = [&] { return session.queue(point.phase, timer.stream()); };
  double step_s = 0;
  for (const bool graph : cuda ? std::vector{false, true} : std::vector{false}) {
    const Timing timing = timer.time(step, graph ? Queueing::graph : Queueing::stream);
    step_s = timing.seconds.median;
    rows.push_back(step_row(point, model, axes, machine, all, timing, graph, launches));
  }
  for (const OperationGroup& group : axes.operations ? groups : std::vector<OperationGroup>{}) {
    progress.step(fmt::format("{} {}: {}", to_string(point.phase), point.seqlen, group.name));
    const Work work = [&] {
      for (const StepOperation& operation : group.operations) {
        if (Status s = operation.queue(timer.stream()); !s) {
          return s;
        }
      }
      return Status::ok();
    };
    const Timing timing = timer.time(work, cuda ? Queueing::graph : Queueing::stream);
    rows.push_back(operation_row(point, model, axes, machine, group, timing, step_s));
  }
}

std::vector<ModelPoint> grid_of(const ModelAxes& axes) {
  std::vector<ModelPoint> grid;
  for (const std::string& phase : axes.phases) {
    if (phase != "prefill" && phase != "decode") {
      fail_flag("--phase", one_line(phase), "prefill, decode");
    }
    const bool prefill = phase == "prefill";
    for (const std::int64_t batch : axes.batches) {
      for (const std::int64_t seqlen : axes.seqlens) {
        for (const bool fuse : axes.fuse) {
          // Decode has one pipeline.
          for (std::size_t i = 0; i < (prefill ? axes.pipelines.size() : 1); ++i) {
            grid.push_back(
                {prefill ? Phase::prefill : Phase::decode, seqlen, batch, axes.pipelines[i], fuse});
          }
        }
      }
    }
  }
  return grid;
}

/// The tokens of a file [batch, tokens], or [tokens], as prompts.
std::vector<std::vector<std::int32_t>> read_tokens(const std::string& path) {
  const Array array = value_or_fail(read_npy(path, Expect::indices, "--tokens"));
  const std::size_t rank = array.shape.size();
  if (rank != 1 && rank != 2) {
    fail_flag("--tokens", shape_text(array.shape), "[tokens] or [batch, tokens]");
  }
  const std::int64_t batch = rank == 2 ? array.shape[0] : 1, count = array.shape[rank - 1];
  const IndexView view{array.data.get(), array.dtype, array.elements()};
  std::vector<std::vector<std::int32_t>> prompts(static_cast<std::size_t>(batch));
  for (std::int64_t i = 0; i < batch * count; ++i) {
    const std::int64_t token = view[i];
    if (token < 0 || token > std::numeric_limits<std::int32_t>::max()) {
      fail_flag("--tokens", std::to_string(token), "numbers of tokens");
    }
    prompts[static_cast<std::size_t>(i / count)].push_back(static_cast<std::int32_t>(token));
  }
  return prompts;
}

/// Refusals of --tokens that need no file's contents.
void check_tokens_flags(const ModelAxes& axes, const Common& common) {
  for (const auto& [flag, count] :
       {std::pair{"--pipeline", axes.pipelines.size()}, std::pair{"--fuse", axes.fuse.size()},
        std::pair{"--dtype", common.dtypes.size()}, std::pair{"--weights", axes.weights.size()}}) {
    if (count > 1) {
      fail_flag(flag, fmt::format("{} values", count), "one with --tokens");
    }
  }
  if (!common.device.empty() && common.device != "cpu" && common.device != "cuda") {
    fail_flag("--device", one_line(common.device), "cpu or cuda with --tokens");
  }
  if (axes.seed && has_weights(axes.model)) {
    fail_flag("--seed", std::to_string(*axes.seed), "random weights with --tokens, or no seed,");
  }
  if (same_file(axes.logits, axes.tokens)) {
    fail_flag("--logits", one_line(axes.logits), "another file than that of --tokens");
  }
}

/// Runs the model on given tokens, the first --prompt of each by a prefill and the rest by decode
/// steps, and writes the logits of every token: [batch, tokens, vocab_size].
void write_logits(const ModelAxes& axes, const Common& common, Context& context) {
  check_tokens_flags(axes, common);
  const std::vector<std::vector<std::int32_t>> texts = read_tokens(axes.tokens);
  const auto batch = static_cast<std::int64_t>(texts.size()),
             count = batch > 0 ? static_cast<std::int64_t>(texts[0].size()) : 0;
  const std::int64_t prompt = axes.prompt.value_or(count);
  if (prompt > count) {
    fail_flag("--prompt", std::to_string(prompt), fmt::format("up to the {} of --tokens", count));
  }
  const Device device = required_device(common.device);
  const DType dtype = dtypes_of(common, device).front();
  const Transformer model = model_of(axes, device, dtype, formats_of(axes, dtype).front());
  TransformerSession session =
      value_or_fail(TransformerSession::make(model, {.max_batch = batch,
                                                     .max_seqlen = count,
                                                     .page_size = axes.page_size,
                                                     .prefill = axes.pipelines.front(),
                                                     .fuse = axes.fuse.front(),
                                                     .all_logits = true}));
  const std::int64_t vocab = model.config().model.vocab_size;
  Output all = make_output({batch, count, vocab}, axes.logits, "--logits");
  auto* const logits = reinterpret_cast<float*>(all.array.data.get());
  // Row t of each of so many sequences, as a step gives them.
  const auto keep = [&](const std::vector<float>& step, std::int64_t first, std::int64_t rows) {
    for (std::int64_t b = 0; b < batch; ++b) {
      std::copy_n(step.begin() + b * rows * vocab, rows * vocab,
                  logits + (b * count + first) * vocab);
    }
  };
  std::vector<std::vector<std::int32_t>> prompts;
  for (const std::vector<std::int32_t>& text : texts) {
    prompts.emplace_back(text.begin(), text.begin() + prompt);
  }
  check(session.prefill(prompts));
  keep(value_or_fail(session.logits()), 0, prompt);
  for (std::int64_t t = prompt; t < count; ++t) {
    std::vector<std::int32_t> next;
    for (const std::vector<std::int32_t>& text : texts) {
      next.push_back(text[static_cast<std::size_t>(t)]);
    }
    check(session.decode(next));
    keep(value_or_fail(session.logits()), t, 1);
  }
  write_output(all);
  commit_output(all);
  Document document;
  document.set("model", model.config().model.name).set("dtype", to_string(model.dtype()));
  document.set("batch", Json(batch)).set("tokens", Json(count)).set("prompt", Json(prompt));
  document.set("logits", axes.logits).print(context);
}

void bench_model(const ModelAxes& axes, const Common& common, Context& context) {
  if (common.threads != 0) {
    fail_flag("--threads", std::to_string(common.threads), "0 (a model takes all cores)");
  }
  check_dtypes(common.dtypes);
  if (!axes.model.empty()) {
    (void)config_of(axes.model);  // refused before anything is measured
  }
  if (!axes.tokens.empty()) {
    write_logits(axes, common, context);
    return;
  }
  const Baseline baseline = baseline_of(common);
  const std::vector<ModelPoint> grid = grid_of(axes);
  const ThisMachine machine = this_machine(common.device, 0, false, "bench");
  std::vector<BenchRow> rows;
  Progress progress("bench");
  for (const DType dtype : dtypes_of(common, machine.device)) {
    for (const WeightFormat& weights : formats_of(axes, dtype)) {
      progress.step("weights");
      const Transformer model = model_of(axes, machine.device, dtype, weights);
      for (std::size_t i = 0; i < grid.size(); ++i) {
        progress.step(fmt::format("point {} of {}", i + 1, grid.size()));
        bench_point(grid[i], model, axes, common, machine, progress, rows);
      }
    }
  }
  finish(rows, Json::array(), machine, common, baseline, context);
}

}  // namespace

void add_bench_model(CLI::App& bench, Context& context) {
  auto axes = std::make_shared<ModelAxes>();
  auto common = std::make_shared<Common>();
  CLI::App* command =
      bench.add_subcommand("model", "a whole model: prefill and decode, operation by operation");
  command->footer(examples(
      {{"rafter bench model", "a small model (56 M parameters) on this CPU"},
       {"rafter bench model --phase decode --seqlen 128,4k --fuse 0,1",
        "a decode step at two contexts, elementwise functions apart and fused"},
       {"rafter bench model --device cuda --seqlen 4k", "the 7B reference on the GPU, in bf16"},
       {"rafter bench model --device cuda --phase decode --weights bf16,int8,e4m3,int4",
        "a decode step by the bits of its weights"},
       {"rafter bench model --model FOLDER --tokens t.npy --logits l.npy",
        "no timing: the logits of these tokens, from a Hugging Face folder"}}));
  add_text(*command, "--model", axes->model,
           "reference-60m (the default on a CPU), reference-7b (on a GPU) or a config.json, with "
           "random weights; or a Hugging Face folder with its own",
           "NAME|FILE|FOLDER");
  add_parsed(*command, "--phase", "which steps (default: prefill,decode)", "LIST",
             [axes](const std::string& text) {
               Result<std::vector<std::string>> words = split_list(text);
               if (words) {
                 axes->phases = *std::move(words);
               }
               return words.status();
             });
  add_lengths(*command, "--seqlen", axes->seqlens,
              "tokens of each prompt; of decode, tokens that are in the cache", {1, 1 << 20});
  add_lengths(*command, "--batch", axes->batches, "sequences", {1, 65536});
  add_pipelines(*command, axes->pipelines, "of the prefill's attention");
  add_switches(*command, "--fuse", axes->fuse,
               "residual add with RMSNorm, SiLU with its product, RoPE with the append");
  add_length(*command, "--page-size", axes->page_size, "tokens of a page of the cache",
             {1, 1 << 20});
  add_length(*command, "--seed", axes->seed, "of random weights and prompts (default: 1)",
             {0, 1 << 30});
  add_dtypes(*command, "--weights", axes->weights,
             "how the layers' matrices are kept: the model's dtype (default), int8, e4m3, int4");
  add_length(*command, "--group-size", axes->group_size, "elements that share a scale, of int4",
             {32, 128});
  add_switch(*command, "--operations", axes->operations, "time each operation by itself too");
  CLI::Option* tokens = add_text(*command, "--tokens", axes->tokens,
                                 "no timing: run these, [batch, tokens]", "FILE.npy");
  CLI::Option* logits = add_text(*command, "--logits", axes->logits,
                                 "with --tokens: logits of every token, float32", "FILE.npy");
  add_length(*command, "--prompt", axes->prompt,
             "with --tokens: so many by prefill, the rest by decode steps "
             "(default: all)",
             {1, 1 << 20})
      ->needs(tokens);
  tokens->needs(logits);
  logits->needs(tokens);
  add_common(*command, *common, context);
  for (const char* const timing : {"--phase", "--seqlen", "--batch", "--operations", "--time",
                                   "--out", "--baseline", "--threshold"}) {
    tokens->excludes(command->get_option(timing));
  }
  command->callback([axes, common, command, &context] {
    if (command->count("--pipeline") > 0 && !std::ranges::count(axes->phases, "prefill")) {
      fail_flag("--pipeline", "without a prefill", "--phase prefill (decode has one pipeline)");
    }
    bench_model(*axes, *common, context);
  });
}

}  // namespace rafter::cli
