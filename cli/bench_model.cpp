// rafter bench model: a whole model's prefill and decode, operation by operation, predicted beside
// measured.
#include <algorithm>
#include <limits>
#include <memory>

#include "cli/bench_common.h"
#include "cli/npy.h"
#include "cli/npy_output.h"
#include "cli/timed_fusing.h"
#include "cli/timed_model.h"
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
  bool operations = true, evidence = true;
  std::vector<DType> weights;  // empty: the model's dtype
  std::int64_t group_size = 128;
  std::string tokens, logits;
  std::optional<std::int64_t> prompt, beside_prefill;
  std::optional<DType> kv_dtype;
};

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

Transformer model_of(const ModelAxes& axes, const Device& device, DType dtype,
                     const WeightFormat& weights) {
  return transformer_of(axes.model, static_cast<std::uint64_t>(axes.seed.value_or(1)), device,
                        dtype, weights);
}

Json shape_of(const ModelPoint& point, const Transformer& model, const std::string& operation) {
  const WeightFormat& weights = model.weight_format();
  Json shape{{"model", model.config().model.name},
             {"phase", to_string(point.phase)},
             {"seqlen", point.seqlen},
             {"batch", point.batch},
             {"dtype", to_string(model.dtype())},
             {"weights", to_string(weights.dtype.value_or(model.dtype()))},
             {"page_size", point.page_size},
             {"kv_dtype", to_string(point.kv_dtype.value_or(model.dtype()))},
             {"fuse", point.fuse},
             {"operation", operation}};
  if (weights.dtype == DType::int4) {
    shape["group_size"] = weights.group_size;
  }
  return shape;
}

/// What every row of a model has.
BenchRow model_row(const ModelPoint& point, const Transformer& model, const std::string& operation,
                   const Cost& cost, const Timing& timing) {
  BenchRow row;
  row.kind = "model";
  row.shape = shape_of(point, model, operation);
  row.pipeline = point.phase == Phase::prefill ? to_string(point.pipeline) : "split-kv";
  row.cost = cost;
  row.timing = timing;
  row.level = "memory";
  row.wall_measured = to_string(MeasuredWall::ambiguous);
  row.wall_reason = "the operations have walls of their own";
  row.more["launches"] = number(cost.launches);
  return row;
}

BenchRow step_row(const StepResult& result, const Transformer& model, const ThisMachine& machine,
                  bool graph) {
  const ModelBudget budget = budget_of(result, model, machine.spec, graph);
  const Timing& timing = graph ? *result.graph : *result.stream;
  const ModelPoint& point = result.point;
  BenchRow row = model_row(point, model,
                           !result.launches_counted ? "step"
                           : graph                  ? "step (graph)"
                                                    : "step (stream)",
                           result.cost, timing);
  row.kernel = "all of them";
  row.predicted =
      value_or_fail(predict(result.cost, machine.spec, launches_in(machine.spec, graph)));
  row.predicted.time_s = budget.time_s;
  row.predicted.wall = budget.wall;
  row.bound_s = budget.device_time_s;
  const double median_s = timing.seconds.median;
  row.kept["launches_counted"] = result.launches_counted ? Json(*result.launches_counted) : Json();
  row.kept["predicted_launches"] = number(predicted_launches(result, model, machine.spec));
  row.more["predicted_gemm_time_s"] = number(budget.gemm_time_s);
  row.more["predicted_attention_time_s"] = number(budget.attention_time_s);
  row.more["predicted_elementwise_time_s"] = number(budget.elementwise_time_s);
  row.more["predicted_dispatch_time_s"] = number(budget.dispatch_time_s);
  row.kept["predicted_attention_time_share"] = number(budget.attention_time_share);
  row.kept["predicted_gain_over_unfused"] = number(budget.gain_over_unfused);
  row.kept["launches"] = number(result.cost.launches);
  for (const OperationResult& operation : result.operations) {
    if (operation.group.name == "attention") {
      row.kept["attention_time_share"] =
          number(operation.timing.seconds.median / timing.seconds.median);
    }
  }
  row.more["attention_share"] = number(budget.attention_share);
  row.more["weight_bytes"] = number(model.weight_bytes());
  row.more["weights_time_s"] = number(budget.weights_time_s);
  row.kept["share_of_weights_floor"] = number(budget.weights_time_s / median_s);
  row.more["tokens_per_s"] =
      number(static_cast<double>(point.batch * (point.phase == Phase::prefill ? point.seqlen : 1)) /
             median_s);
  return row;
}

BenchRow operation_row(const StepResult& result, const OperationResult& operation,
                       const Transformer& model) {
  BenchRow row =
      model_row(result.point, model, operation.group.name, operation.group.cost, operation.timing);
  row.kernel = operation.group.kernel;
  row.predicted = operation.predicted;
  row.bound_s = operation.bound_s();
  row.wall_measured = to_string(operation.measured.wall);
  row.wall_reason = operation.measured.reason;
  const WallVerdict& m = operation.measured;
  row.more["elasticity"] = m.has_elasticity ? number(m.elasticity) : Json();
  row.more["flop_exponent"] = m.has_flop_exponent ? number(m.flop_exponent) : Json();
  row.more["launch_share"] = m.has_launch_share ? number(m.launch_share) : Json();
  row.more["what_moves"] = what_moves(operation);
  const double share = operation.timing.seconds.median / result.best().seconds.median;
  row.more["share_of_step"] = number(share);
  row.kept["share_of_step"] = number(share);
  return row;
}

/// The step as it is queued, and every operation of it by itself.
void bench_point(const ModelPoint& point, const Transformer& model, const ModelAxes& axes,
                 const Common& common, const ThisMachine& machine, Progress& progress,
                 std::vector<BenchRow>& rows) {
  const StepResult result =
      time_step(point, model, machine.spec,
                {.rule = rule_of(common),
                 .operations = axes.operations,
                 .evidence = axes.evidence,
                 .progress = [&](const std::string& what) { progress.step(what); }});
  rows.push_back(step_row(result, model, machine, false));
  if (result.graph) {
    rows.push_back(step_row(result, model, machine, true));
  }
  for (const OperationResult& operation : result.operations) {
    rows.push_back(operation_row(result, operation, model));
  }
}

/// A decode step while prefills run on another stream, both timed alone and together.
void bench_interference(const ModelPoint& point, const Transformer& model, const ModelAxes& axes,
                        const Common& common, const ThisMachine& machine,
                        std::vector<BenchRow>& rows) {
  const Interference both =
      value_or_fail(time_interference(point, *axes.beside_prefill, model, rule_of(common)));
  StepResult result;
  result.point = point;
  const std::vector<StepOperation> operations =
      value_or_fail(session_at(model, point)).operations(Phase::decode);
  for (const StepOperation& operation : operations) {
    add_cost(operation.cost, result.cost);
  }
  result.chained = is_chained(operations);
  const ModelBudget budget = budget_of(result, model, machine.spec, true);
  BenchRow row =
      model_row(point, model, "step (graph) beside a prefill", result.cost, both.decode_beside);
  row.kernel = "all of them";
  row.predicted =
      value_or_fail(predict(result.cost, machine.spec, launches_in(machine.spec, true)));
  row.predicted.time_s = budget.time_s;  // alone: what is shared is not modelled
  row.bound_s = budget.device_time_s;
  row.wall_reason = "two streams share the device";
  row.kept["prefill_seqlen"] = *axes.beside_prefill;
  row.kept["alone_s"] = number(both.decode_alone.seconds.median);
  row.kept["slowdown"] =
      number(both.decode_beside.seconds.median / both.decode_alone.seconds.median);
  row.kept["prefill_alone_s"] = number(both.prefill_alone.seconds.median);
  row.kept["prefill_beside_s"] = number(both.prefill_beside.median);
  row.kept["prefill_slowdown"] =
      number(both.prefill_beside.median / both.prefill_alone.seconds.median);
  rows.push_back(std::move(row));
}

/// What fusing saves: the difference of two steps that ran by turns.
BenchRow fusing_row(const FusingResult& result, const Transformer& model,
                    const ThisMachine& machine, bool graph) {
  const FusingTimes& times = graph ? *result.graph : result.stream;
  const FusingPrediction predicted = predict_fusing(result, model, machine.spec, graph);
  Cost saved;
  saved.bytes = result.apart.bytes - result.fused.bytes;
  saved.launches = result.apart.launches - result.fused.launches;
  saved.dtype = model.dtype();
  const std::string name = !result.launches_saved ? "saved by fusing"
                           : graph                ? "saved by fusing (graph)"
                                                  : "saved by fusing (stream)";
  BenchRow row = model_row(result.point, model, name, saved, {times.saved, 1, times.stop});
  row.kind = "fusing";  // a difference: no baseline is held against it
  row.kernel = "elementwise";
  row.predicted.time_s = predicted.time_s();
  row.predicted.wall = predicted.saving.bytes_time_s > predicted.saving.launches_time_s
                           ? Wall::bandwidth
                           : Wall::dispatch;
  row.bound_s = row.predicted.time_s;
  row.wall_reason = "a difference of two steps";
  row.kept["fused_s"] = number(times.fused.median);
  row.kept["apart_s"] = number(times.apart.median);
  row.kept["predicted_bytes"] = number(predicted.saving.bytes);
  row.kept["predicted_bytes_time_s"] = number(predicted.saving.bytes_time_s);
  row.kept["predicted_launches"] = number(predicted.saving.launches);
  row.kept["predicted_launches_time_s"] = number(predicted.saving.launches_time_s);
  row.kept["launches"] = number(saved.launches);
  row.kept["launches_counted"] = result.launches_saved ? Json(*result.launches_saved) : Json();
  row.kept["counted_bytes"] = result.bytes_saved ? number(*result.bytes_saved) : Json();
  row.kept["counted_bytes_reason"] = result.bytes_reason;
  row.columns = Json{{"pipeline", row.pipeline},
                     {"predicted_time_s", row.predicted.time_s},
                     {"time_s", number(times.saved.median)},
                     {"wall", to_string(row.predicted.wall)},
                     {"bytes", number(saved.bytes)},
                     {"kernel", fmt::format("{} launches fewer", saved.launches)}};
  return row;
}

void bench_fusing(const ModelPoint& point, const Transformer& model, const Common& common,
                  const ThisMachine& machine, std::vector<BenchRow>& rows) {
  const FusingResult result = time_fusing(point, model, rule_of(common), common.counters);
  rows.push_back(fusing_row(result, model, machine, false));
  if (result.graph) {
    rows.push_back(fusing_row(result, model, machine, true));
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
            grid.push_back({prefill ? Phase::prefill : Phase::decode, seqlen, batch,
                            axes.pipelines[i], fuse, axes.page_size, axes.seed.value_or(1),
                            axes.kv_dtype});
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
                                                     .all_logits = true,
                                                     .kv_dtype = axes.kv_dtype}));
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
    (void)transformer_config(axes.model);  // refused before anything is measured
  }
  if (!axes.tokens.empty()) {
    write_logits(axes, common, context);
    return;
  }
  const Baseline baseline = baseline_of(common);
  const std::vector<ModelPoint> grid = grid_of(axes);
  ThisMachine machine = this_machine(common.device, 0, false, "bench");
  machine.spec = at_sustained_rates(std::move(machine.spec));
  if (axes.beside_prefill && machine.device.kind != Device::Kind::cuda) {
    fail_flag("--beside-prefill", "a CPU", "--device cuda: a CPU has no streams");
  }
  std::vector<BenchRow> rows;
  Progress progress("bench");
  for (const DType dtype : dtypes_of(common, machine.device)) {
    for (const WeightFormat& weights : formats_of(axes, dtype)) {
      progress.step("weights");
      const Transformer model = model_of(axes, machine.device, dtype, weights);
      for (std::size_t i = 0; i < grid.size(); ++i) {
        progress.step(fmt::format("point {} of {}", i + 1, grid.size()));
        bench_point(grid[i], model, axes, common, machine, progress, rows);
        if (grid[i].fuse && std::ranges::count(axes.fuse, false) > 0) {
          progress.step("what fusing saves");
          bench_fusing(grid[i], model, common, machine, rows);
        }
        if (axes.beside_prefill && grid[i].phase == Phase::decode) {
          progress.step("beside a prefill");
          bench_interference(grid[i], model, axes, common, machine, rows);
        }
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
               "residual add with RMSNorm, SiLU with its product, RoPE with the append; with both, "
               "also what that saves, the two steps timed by turns");
  add_dtype(*command, "--kv-dtype", axes->kv_dtype,
            "of the cache: int8 or e4m3, with a factor for each token and head (default: the "
            "model's)");
  add_length(*command, "--page-size", axes->page_size, "tokens of a page of the cache",
             {1, 1 << 20});
  add_length(*command, "--seed", axes->seed, "of random weights and prompts (default: 1)",
             {0, 1 << 30});
  add_dtypes(*command, "--weights", axes->weights,
             "how the layers' matrices are kept: the model's dtype (default), int8, e4m3, int4");
  add_length(*command, "--group-size", axes->group_size, "elements that share a scale, of int4",
             {32, 128});
  add_switch(*command, "--operations", axes->operations, "time each operation by itself too");
  add_switch(*command, "--evidence", axes->evidence,
             "and time it on other sizes, which name its wall");
  add_length(*command, "--beside-prefill", axes->beside_prefill,
             "decode on a GPU: also while prefills of so many tokens run on another stream",
             {1, 1 << 20});
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
  add_counters(*command, *common);
  add_common(*command, *common, context);
  for (const char* const timing :
       {"--phase", "--seqlen", "--batch", "--operations", "--evidence", "--beside-prefill",
        "--time", "--out", "--baseline", "--threshold"}) {
    tokens->excludes(command->get_option(timing));
  }
  command->callback([axes, common, command, &context] {
    if (command->count("--pipeline") > 0 && !std::ranges::count(axes->phases, "prefill")) {
      fail_flag("--pipeline", "without a prefill", "--phase prefill (decode has one pipeline)");
    }
    const bool both =
        std::ranges::count(axes->fuse, true) > 0 && std::ranges::count(axes->fuse, false) > 0;
    if (command->count("--counters") > 0 && !both) {
      fail_flag("--counters", "without what fusing saves", "--fuse 0,1, whose bytes are counted");
    }
    bench_model(*axes, *common, context);
  });
}

}  // namespace rafter::cli
