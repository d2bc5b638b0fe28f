// explain model prefill|decode, and explain memory.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "cli/explain.h"
#include "cli/timed_model.h"

namespace rafter::cli {
namespace {

struct ModelFlags {
  std::string model = "reference-7b";
  // in place of the model's own
  std::optional<std::int64_t> num_layers, heads_q, heads_kv, head_dim, hidden_size,
      intermediate_size, vocab_size;
  std::optional<DType> weight_dtype, kv_dtype;
  Pipeline pipeline = Pipeline::fused;
  std::int64_t page_size = 0;  // 0: the cache is of rows
};

void add_model_flags(CLI::App& command, ModelFlags& flags) {
  add_text(command, "--model", flags.model,
           "a built-in model, or the config.json of a Llama-like one", "NAME|FILE");
  for (const auto& [name, target, what] :
       {std::tuple{"--num-layers,--layers", &flags.num_layers, "layers"},
        std::tuple{"--heads-q,--heads", &flags.heads_q, "query heads"},
        std::tuple{"--heads-kv,--kv-heads", &flags.heads_kv, "key and value heads"},
        std::tuple{"--head-dim", &flags.head_dim, "elements of a head"},
        std::tuple{"--hidden-size,--d-model", &flags.hidden_size, "elements of a token"},
        std::tuple{"--intermediate-size,--d-ff", &flags.intermediate_size, "width of the MLP"},
        std::tuple{"--vocab-size", &flags.vocab_size, "rows of the embedding table"}}) {
    add_length(command, name, *target, std::string(what) + ", in place of the model's");
  }
  add_dtype(command, "--weight-dtype", flags.weight_dtype, "of the weights (default: the model's)");
  add_dtype(command, "--kv-dtype", flags.kv_dtype, "of the KV cache (default: the model's)");
  add_pipeline(command, flags.pipeline, "of the attention: unfused half-fused fused split-kv");
}

void add_page_size(CLI::App& command, ModelFlags& flags) {
  add_length(
      command, "--page-size", flags.page_size,
      "what fits is counted in whole pages of so many tokens, as a session's cache has them; "
      "0: in tokens",
      {0, std::int64_t{1} << 28});
}

ModelConfig model_of(const ModelFlags& flags) {
  const bool is_file = flags.model.find('/') != std::string::npos || flags.model.ends_with(".json");
  const Result<ModelConfig> found = is_file ? load_model(flags.model) : find_model(flags.model);
  if (!found.is_ok()) {
    fail_about("--model", flags.model, is_file, found.status());
  }
  ModelConfig model = *found;
  // A model of other heads has as many KV heads as query heads, unless told.
  const std::int64_t heads_kv = flags.heads_q ? *flags.heads_q : model.heads_kv;
  model.num_layers = flags.num_layers.value_or(model.num_layers);
  model.heads_q = flags.heads_q.value_or(model.heads_q);
  model.heads_kv = flags.heads_kv.value_or(heads_kv);
  model.head_dim = flags.head_dim.value_or(model.head_dim);
  model.hidden_size = flags.hidden_size.value_or(model.hidden_size);
  model.intermediate_size = flags.intermediate_size.value_or(model.intermediate_size);
  model.vocab_size = flags.vocab_size.value_or(model.vocab_size);
  if (model.heads_q % model.heads_kv != 0) {
    fail_flag("--heads-kv", std::to_string(model.heads_kv),
              fmt::format("a divisor of the model's {} query heads", model.heads_q));
  }
  return model;
}

Json model_json(const ModelConfig& model) {
  Json json = Json::object();
  json["model"] = model.name;
  json["num_layers"] = model.num_layers;
  json["hidden_size"] = model.hidden_size;
  json["intermediate_size"] = model.intermediate_size;
  json["vocab_size"] = model.vocab_size;
  json["heads_q"] = model.heads_q;
  json["heads_kv"] = model.heads_kv;
  json["head_dim"] = model.head_dim;
  if (model.has_experts()) {
    json["num_experts"] = model.num_experts;
    json["experts_per_token"] = model.experts_per_token;
  }
  return json;
}

struct ModelOptions {
  ExplainFlags explain;
  ModelFlags model;
  Phase phase = Phase::prefill;
  std::int64_t seqlen = 4096, splits = 1;
  std::string batch = "1";
  std::optional<bool> causal, fuse;
  std::optional<double> launches, memory_floor_s, gain;
  DType memory_floor_dtype = DType::bf16;
  bool graph = false, all_logits = false, sustained = false, chain = false;
};

std::int64_t batch_of(const ModelOptions& options) {
  if (options.batch == "max") {
    return 0;  // as many as the memory holds
  }
  const Result<std::int64_t> batch = parse_length(options.batch, 1);
  if (!batch.is_ok()) {
    fail_flag("--batch", options.batch, batch.status().allowed() + " or max (decode)");
  }
  return *batch;
}

ModelStep step_of(const ModelOptions& options) {
  ModelStep step;
  step.model = model_of(options.model);
  step.phase = options.phase;
  step.seqlen = options.seqlen;
  step.batch = batch_of(options);
  step.pipeline = options.model.pipeline;
  step.causal = options.causal;
  step.weight_dtype = options.model.weight_dtype;
  step.kv_dtype = options.model.kv_dtype;
  step.all_logits = options.all_logits;
  step.splits = options.splits;
  step.launches = options.launches;
  step.graph = options.graph;
  step.memory_floor_s = options.memory_floor_s;
  step.memory_floor_dtype = options.memory_floor_dtype;
  step.capacity_bytes = options.explain.capacity_bytes;
  step.page_size = options.model.page_size;
  step.fuse = options.fuse;
  step.chain = options.chain;
  return step;
}

/// A figure that is NaN when it has no value.
void set_or_missing(Document& document, const std::string& key, double value,
                    const std::string& reason) {
  if (std::isfinite(value)) {
    document.set(key, value);
  } else {
    document.missing(key, reason).hide(key + "_reason");
  }
}

void append_budget(Document& document, const ModelBudget& b) {
  document.set("wall", to_string(b.wall)).set("verdict", b.verdict());
  document.set("near_ridge", Json(b.near_ridge));
  document.set("n_params", b.n_params).set("batch", b.batch).set("tokens", b.tokens);
  document.set("flops", b.flops).set("gemm_flops", b.gemm_flops);
  document.set("attention_flops", b.attention_flops);
  document.set("elementwise_flops", b.elementwise_flops);
  document.set("attention_share", b.attention_share);
  document.set("bytes", b.bytes).set("weight_bytes", b.weight_bytes);
  document.set("weight_resident_bytes", b.weight_resident_bytes);
  if (b.experts_read > 0) {
    document.set("experts_read", b.experts_read);
  }
  document.set("kv_bytes", b.kv_bytes).set("attention_bytes", b.attention_bytes);
  document.set("elementwise_bytes", b.elementwise_bytes);
  document.set("activation_bytes", b.activation_bytes);
  document.set("kv_bytes_per_token", b.kv_bytes_per_token);
  document.set("intensity_flop_per_byte", b.intensity_flop_per_byte);
  document.set("gemm_intensity_flop_per_byte", b.gemm_intensity_flop_per_byte);
  document.set("ridge_flop_per_byte", b.ridge_flop_per_byte);
  set_or_missing(document, "time_s", b.time_s, b.dispatch_reason);
  document.set("gemm_time_s", b.gemm_time_s).set("attention_time_s", b.attention_time_s);
  document.set("elementwise_time_s", b.elementwise_time_s);
  document.set("device_time_s", b.device_time_s).set("weights_time_s", b.weights_time_s);
  document.set("launches", b.launches).set("launches_per_layer", b.launches_per_layer);
  set_or_missing(document, "dispatch_time_s", b.dispatch_time_s, b.dispatch_reason);
  set_or_missing(document, "dispatch_fraction", b.dispatch_fraction, b.dispatch_reason);
  document.set("attention_time_share", b.attention_time_share);
  document.set("unfused_time_s", b.unfused_time_s);
  document.set("gain_over_unfused", b.gain_over_unfused);
  Json amdahl = Json::object();
  amdahl["share"] = number(b.amdahl.share);
  amdahl["speedup"] = number(b.amdahl.speedup);
  amdahl["gain"] = number(b.amdahl.gain);
  amdahl["bound"] = number(b.amdahl.bound);
  document.set("amdahl", std::move(amdahl));
  Json fusing = Json::object();
  fusing["bytes"] = number(b.fusing.bytes);
  fusing["bytes_time_s"] = number(b.fusing.bytes_time_s);
  fusing["launches"] = number(b.fusing.launches);
  fusing["launches_time_s"] = number(b.fusing.launches_time_s);
  if (!b.fusing.launches_reason.empty()) {
    fusing["launches_time_s_reason"] = b.fusing.launches_reason;
  }
  document.set("fusing", std::move(fusing));
  document.set("tokens_per_s", b.tokens_per_s);
  if (b.max_batch) {
    document.set("max_batch", *b.max_batch);
  } else {
    document.missing("max_batch", "needs a length above 0 and a device whose capacity is known");
    document.hide("max_batch_reason");
  }
  document.set("ceilings", ceilings_json(b.ceilings));
}

void label_budget(Document& document) {
  document.label("n_params", "parameters").label("attention_share", "attention's share of it");
  document.label("gemm_flops", "  in weight products").label("attention_flops", "  in attention");
  document.label("elementwise_flops", "  elementwise").label("weight_bytes", "  weights");
  document.label("kv_bytes", "  KV cache").label("attention_bytes", "  attention");
  document.label("elementwise_bytes", "  elementwise").label("activation_bytes", "  activations");
  document.label("kv_bytes_per_token", "KV cache of one token");
  document.label("gemm_intensity_flop_per_byte", "  of the weight products");
  document.label("time_s", "time of the step").label("gemm_time_s", "  weight products");
  document.label("attention_time_s", "  attention").label("elementwise_time_s", "  elementwise");
  document.label("device_time_s", "  kernels in all").label("weights_time_s", "  reading weights");
  document.label("dispatch_time_s", "  launching").label("launches_per_layer", "  per layer");
  document.label("dispatch_fraction", "launching, of a step that waits");
  document.label("attention_time_share", "attention's share of the kernels' time");
  document.label("unfused_time_s", "the step with unfused attention");
  document.label("gain_over_unfused", "times faster than that");
  document.label("amdahl", "Why not more (Amdahl)").label("share", "attention's share, unfused");
  document.label("speedup", "times faster attention became").label("gain", "times faster in all");
  document.label("bound", "at most, with free attention");
  document.label("fusing", "What fusing elementwise functions saves");
  document.label("bytes_time_s", "  moved in").label("launches_time_s", "  launched in");
  document.label("weight_resident_bytes", "  weights held in memory");
  document.label("experts_read", "  experts of a layer that are met");
  document.label("ceilings", "While an idea is not applied: ceilings, lowest first");
  document.label("flop_per_s", "rate").label("advice", "what lifts it");
  document.label("max_batch", "sequences that fit").label("tokens_per_s", "tokens each second");
}

/// The smallest batch at which a decode step's intensity, or that of its products alone, reaches
/// the ridge: both grow with the batch, the step's only up to that of its cache.
void set_ridge_batches(Document& document, ModelStep step, const DeviceSpec& device,
                       const Convention& convention) {
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  const auto smallest = [&](double ModelBudget::*intensity) -> std::optional<std::int64_t> {
    const auto reaches = [&](std::int64_t batch) {
      step.batch = batch;
      const ModelBudget b = value_or_fail(model_budget(step, device, convention));
      return b.*intensity >= b.ridge_flop_per_byte;
    };
    std::int64_t low = 0, high = kMost;
    if (!reaches(high)) {
      return std::nullopt;
    }
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (reaches(middle) ? high : low) = middle;
    }
    return high;
  };
  for (const auto& [key, intensity, label] :
       {std::tuple{"gemm_ridge_batch", &ModelBudget::gemm_intensity_flop_per_byte,
                   "batch whose products reach the ridge"},
        std::tuple{"ridge_batch", &ModelBudget::intensity_flop_per_byte,
                   "batch whose step reaches the ridge"}}) {
    if (const std::optional<std::int64_t> batch = smallest(intensity)) {
      document.set(key, Json(*batch));
    } else {
      document.missing(key, "no batch up to 2^20 does: each sequence brings its own cache");
    }
    document.label(key, label);
  }
}

void explain_model(const ModelOptions& options, const Context& context) {
  DeviceSpec device = device_of(options.explain);
  if (options.sustained) {
    device = at_sustained_rates(std::move(device));
  }
  const Convention convention = convention_of(options.explain, device);
  ModelStep step = step_of(options);
  const ModelBudget budget = value_or_fail(model_budget(step, device, convention));
  Json echo = model_json(step.model);
  echo["phase"] = to_string(step.phase);
  echo["seqlen"] = step.seqlen;
  echo["batch"] = number(budget.batch);
  echo["pipeline"] = to_string(step.pipeline);
  echo["weight_dtype"] = to_string(step.weight_dtype.value_or(step.model.dtype));
  echo["kv_dtype"] = to_string(step.kv_dtype.value_or(step.model.dtype));
  echo["graph"] = step.graph;
  if (options.model.page_size > 0) {
    echo["page_size"] = options.model.page_size;
  }
  Document document = explain_document(device, budget.convention, std::move(echo));
  label_budget(document);
  document.headline(fmt::format(
      "{} of {} on {}: {} in {}. Attention is {} of the arithmetic; launching is {} of the step.",
      step.phase == Phase::prefill ? "A prefill" : "A decode step", step.model.name, device.name,
      budget.verdict(), with_si_prefix(budget.time_s, "s"),
      fmt::format("{:.1f}%", 100 * budget.attention_share),
      std::isfinite(budget.dispatch_fraction)
          ? fmt::format("{:.1f}%", 100 * budget.dispatch_fraction)
          : "an unknown part"));
  append_budget(document, budget);
  if (step.phase == Phase::decode) {
    set_ridge_batches(document, step, device, convention);
  }
  const ModelLengths lengths = value_or_fail(model_lengths(step.model, convention));
  constexpr const char* kNever = "attention grows no faster than the products";
  set_or_missing(document, "attention_equals_gemm_seqlen", lengths.attention_equals_gemm_seqlen,
                 kNever);
  set_or_missing(document, "attention_equals_layer_gemm_seqlen",
                 lengths.attention_equals_layer_gemm_seqlen, kNever);
  document.label("attention_equals_gemm_seqlen", "attention equals the products at");
  document.label("attention_equals_layer_gemm_seqlen", "  those of a layer at");
  if (options.gain) {
    const std::optional<double> seqlen =
        value_or_fail(seqlen_for_gain(step, *options.gain, device, convention));
    if (seqlen) {
      document.set("gain_seqlen", *seqlen);
    } else {
      document.missing("gain_seqlen", "no length up to 2^40 gains that much");
    }
    document.label("gain_seqlen", "length that gains that much");
  }
  document.print(context);
}

void add_phase(CLI::App& parent, Context& context, Phase phase) {
  auto options = std::make_shared<ModelOptions>();
  options->phase = phase;
  const bool prefill = phase == Phase::prefill;
  CLI::App* command = parent.add_subcommand(
      prefill ? "prefill" : "decode",
      prefill ? "one forward pass over a prompt" : "one token for each sequence of a batch");
  command->footer(
      prefill
          ? examples({{"rafter explain model prefill --seqlen 4096 --convention lecture",
                       "129 ms, and what fusing attention gained"},
                      {"rafter explain model prefill --model config.json --seqlen 32k",
                       "any Llama-like model"}})
          : examples({{"rafter explain model decode --seqlen 4096 --convention lecture --launches "
                       "490 --launch-cost-s 5e-6",
                       "dispatch against reading the weights"},
                      {"rafter explain model decode --seqlen 4096 --batch max --weight-dtype int4",
                       "as many sequences as fit, 4-bit weights"}}));
  add_model_flags(*command, options->model);
  add_length(*command, "--seqlen,--seq-len", options->seqlen,
             prefill ? "tokens of each prompt" : "tokens in each cache; 0: the weights alone",
             {prefill ? 1 : 0, std::int64_t{1} << 40});
  add_text(*command, "--batch", options->batch,
           prefill ? "sequences" : "sequences, or max: as many as the memory holds", "N|max");
  add_real(*command, "--launches", options->launches,
           "kernels launched (default: counted from the model)");
  add_switch(*command, "--fuse", options->fuse,
             "elementwise functions as bench model runs them, fused or each by itself (default: "
             "SwiGLU alone in one kernel, and every product by itself)");
  add_switch(*command, "--graph", options->graph, "captured: one submission, not many launches");
  add_switch(*command, "--sustained", options->sustained,
             "products at the rate that the probe saw held, not in its burst of 0.1 s");
  if (prefill) {
    add_switch(*command, "--causal", options->causal,
               "causal attention (default: as the convention)");
    add_switch(*command, "--all-logits", options->all_logits,
               "logits of every position, not the last alone");
    add_real(*command, "--gain", options->gain,
             "also solve for the length that gains this over unfused", {1, 1e6});
  } else {
    add_page_size(*command, options->model);
    add_switch(*command, "--chain", options->chain,
               "with --fuse 1: all from o to the next layer's q, k and v in one launch, as bench "
               "model decodes one or two sequences with int8, e4m3 or int4 weights");
    add_length(*command, "--splits", options->splits, "parts of the keys");
    add_real(*command, "--memory-floor-s,--memory-floor-seconds", options->memory_floor_s,
             "time of reading the weights, in place of bytes over bandwidth", {1e-300, 1e300});
    add_dtype(*command, "--memory-floor-dtype", options->memory_floor_dtype,
              "weights that this time is for");
  }
  add_explain_flags(*command, options->explain, context, {"causal"});
  command->callback([options, &context] { explain_model(*options, context); });
}

// ---- memory ----

struct MemoryOptions {
  ExplainFlags explain;
  ModelFlags model;
  std::int64_t batch = 1;
  std::optional<std::int64_t> seqlen;
};

Json terms_of(const MemoryUse& use) {
  Json terms = Json::object();
  for (const ByteTerm& term : use.terms) {
    terms[term.name] = number(term.bytes);
  }
  return terms;
}

void explain_memory(const MemoryOptions& options, Context& context) {
  const DeviceSpec device = device_of(options.explain);
  const Convention convention = convention_of(options.explain, device);
  MemoryProblem problem;
  problem.model = model_of(options.model);
  problem.batch = options.batch;
  problem.pipeline = options.model.pipeline;
  problem.weight_dtype = options.model.weight_dtype;
  problem.kv_dtype = options.model.kv_dtype;
  problem.capacity_bytes = options.explain.capacity_bytes;
  problem.page_size = options.model.page_size;
  const MemoryPlan plan = value_or_fail(plan_memory(problem, &device, convention));
  Json echo = model_json(problem.model);
  echo["batch"] = problem.batch;
  echo["pipeline"] = to_string(problem.pipeline);
  echo["layers_live"] = convention.layers_live == 0 ? Json("all") : number(convention.layers_live);
  echo["weight_dtype"] = to_string(problem.weight_dtype.value_or(problem.model.dtype));
  echo["kv_dtype"] = to_string(problem.kv_dtype.value_or(problem.model.dtype));
  if (problem.page_size > 0) {
    echo["page_size"] = problem.page_size;
  }
  if (options.seqlen) {
    echo["seqlen"] = *options.seqlen;
  }
  Document document = explain_document(device, convention.name, std::move(echo));
  document.headline(
      fmt::format("{} with {} attention in {}: at most {} tokens for each of {} sequences.",
                  problem.model.name, to_string(problem.pipeline),
                  with_si_prefix(plan.at_max.capacity_bytes, "B"), plan.max_seqlen, problem.batch));
  if (!plan.at_max.fits) {
    document.headline(fmt::format("Without a token it takes {} already: it does not fit.",
                                  with_si_prefix(plan.at_max.footprint_bytes, "B")));
    context.exit = Exit::check_failed;
  }
  document.set("capacity_bytes", plan.at_max.capacity_bytes);
  document.set("max_seqlen", Json(plan.max_seqlen));
  document.set("bytes_at_max", plan.at_max.footprint_bytes);
  document.label("max_seqlen", "longest that fits (tokens)");
  document.label("bytes_at_max", "memory held at that length").label("share", "of the memory");
  MemoryUse use = plan.at_max;
  if (options.seqlen) {
    use = value_or_fail(memory_use(problem, *options.seqlen, &device, convention));
    document.headline(fmt::format("{} tokens take {}: {}.", *options.seqlen,
                                  with_si_prefix(use.footprint_bytes, "B"),
                                  use.fits ? "they fit" : "they do not fit"));
    document.set("fits", Json(use.fits)).set("footprint_bytes", use.footprint_bytes);
    document.set("share", use.share);
    context.exit = use.fits ? Exit::done : Exit::check_failed;
  }
  document.set("terms", terms_of(use));
  document.label("terms", options.seqlen ? "Memory at that length" : "Memory at the longest");
  document.print(context);
}

}  // namespace

void add_explain_model(CLI::App& explain, Context& context) {
  CLI::App* model =
      explain.add_subcommand("model", "one pass of a Llama-like model: prefill or decode");
  model->footer(examples({{"rafter explain model prefill --seqlen 4096", "a prompt"},
                          {"rafter explain model decode --seqlen 4096 --batch 16", "a step"}}));
  add_phase(*model, context, Phase::prefill);
  add_phase(*model, context, Phase::decode);
}

void add_explain_memory(CLI::App& explain, Context& context) {
  auto options = std::make_shared<MemoryOptions>();
  CLI::App* command = explain.add_subcommand(
      "memory", "the longest context that a device's memory holds, and what takes the room");
  command->footer(
      examples({{"rafter explain memory --convention lecture --pipeline unfused",
                 "one layer's score matrices against what the weights leave of an H100"},
                {"rafter explain memory --seqlen 128k --batch 4 --device h200",
                 "whether it fits; exit code 1 when it does not"}}));
  add_model_flags(*command, options->model);
  add_page_size(*command, options->model);
  add_length(*command, "--batch", options->batch, "sequences");
  add_length(*command, "--seqlen,--seq-len", options->seqlen, "also say whether this length fits",
             {0, std::int64_t{1} << 40});
  add_explain_flags(*command, options->explain, context, {"causal"});
  command->callback([options, &context] { explain_memory(*options, context); });
}

}  // namespace rafter::cli
