// explain attention, decode, crossover, recompute, tiling.
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "cli/explain.h"
#include "cli/problem_json.h"

namespace rafter::cli {
namespace {

struct AttentionOptions {
  ExplainFlags explain;
  AttentionFlags attention;
};

std::string lengths_text(const AttentionProblem& problem) {
  return problem.seqlen_q == problem.seqlen_kv
             ? fmt::format("{} tokens", problem.seqlen_q)
             : fmt::format("{} queries by {} keys", problem.seqlen_q, problem.seqlen_kv);
}

void append_gain(Document& document, const AttentionProblem& problem, Pipeline pipeline,
                 const DeviceSpec& device, const Convention& convention) {
  const FusionGain gain = value_or_fail(fusion_gain(problem, pipeline, device, convention));
  document.set("gain_over_unfused", gain.by_times);
  document.set("kernel_gain", gain.gain);
  document.set("kernel_gain_ceiling", gain.ceiling);
  document.set("kernel_gain_achieved", gain.achieved);
  document.set("bytes_unfused_over_this", gain.bytes_ratio);
  document.label("gain_over_unfused", "times faster than unfused");
  document.label("kernel_gain", "fusing is worth at most");
  document.label("bytes_unfused_over_this", "times fewer bytes than unfused");
  document.hide("kernel_gain_ceiling").hide("kernel_gain_achieved");
}

void explain_attention(const AttentionOptions& options, const Context& context) {
  const DeviceSpec device = device_of(options.explain);
  const Convention convention = convention_of(options.explain, device);
  const AttentionProblem problem = problem_of(options.attention);
  const Pipeline pipeline = options.attention.pipeline;
  const Pass pass = pass_of(options.attention);
  const Cost cost =
      value_or_fail(attention_cost(problem, pipeline, pass, convention, options.attention.splits));
  const Prediction prediction = value_or_fail(predict(cost, device, convention));
  Json echo = to_json(problem, pipeline);
  echo["pass"] = to_string(pass);
  echo["splits"] = options.attention.splits;
  Document document = explain_document(device, cost.convention, std::move(echo));
  append_roofline(document,
                  fmt::format("Attention ({}, {} pass) over {} in {}", to_string(pipeline),
                              to_string(pass), lengths_text(problem), to_string(problem.dtype)),
                  cost, prediction);
  if (pass == Pass::forward) {
    append_gain(document, problem, pipeline, device, convention);
  }
  document.print(context);
}

struct DecodeOptions {
  ExplainFlags explain;
  DecodeProblem problem;
  std::optional<std::int64_t> heads_q, heads_kv, group, head_dim_v;
  std::optional<Pipeline> pipeline;
};

Json decode_json(const DecodeProblem& problem, Pipeline pipeline) {
  Json json = sizes_json(problem);
  json["kv_dtype"] = to_string(problem.kv_dtype.value_or(problem.dtype));
  json["page_size"] = problem.page_size;
  json["splits"] = problem.splits;
  json["pipeline"] = to_string(pipeline);
  return json;
}

void explain_decode(const DecodeOptions& options, const Context& context) {
  const DeviceSpec device = device_of(options.explain);
  const Convention convention = convention_of(options.explain, device);
  DecodeProblem problem = options.problem;
  std::tie(problem.heads_q, problem.heads_kv) =
      heads_of(options.heads_q, options.heads_kv, options.group);
  problem.head_dim_v = options.head_dim_v.value_or(problem.head_dim);
  const Pipeline pipeline = options.pipeline.value_or(Pipeline::split_kv);
  if (problem.splits > 1 && pipeline != Pipeline::split_kv) {
    fail_flag("--splits", std::to_string(problem.splits), "1, or --pipeline split-kv,");
  }
  const Cost cost = value_or_fail(decode_cost(problem, pipeline, convention));
  const Prediction prediction = value_or_fail(predict(cost, device, convention));
  Document document = explain_document(device, cost.convention, decode_json(problem, pipeline));
  append_roofline(document,
                  fmt::format("A decode step of attention over {} keys in {}", problem.seqlen_kv,
                              to_string(problem.kv_dtype.value_or(problem.dtype))),
                  cost, prediction);
  document.set("kv_bytes", cost.kv_bytes).label("kv_bytes", "K and V read");
  const Result<double> fill = sm_fill(problem, device);
  if (fill.is_ok()) {
    document.set("sm_fill", *fill);
  } else {
    document.missing("sm_fill", fill.status().message()).hide("sm_fill_reason");
  }
  document.label("sm_fill", "blocks per SM or core");
  document.print(context);
}

void explain_crossover(const AttentionOptions& options, const Context& context) {
  const DeviceSpec device = device_of(options.explain);
  const Convention convention = convention_of(options.explain, device);
  AttentionProblem problem = problem_of(options.attention);
  problem.seqlen_q = problem.seqlen_kv = 1;  // solved for
  const Pipeline pipeline = options.attention.pipeline;
  const Crossover found =
      value_or_fail(crossover(problem, pipeline, device, convention, pass_of(options.attention)));
  Json echo = to_json(problem, pipeline);
  echo.erase("seqlen_q");
  echo.erase("seqlen_kv");
  echo["pass"] = options.attention.pass;
  Document document = explain_document(device, found.convention, std::move(echo));
  const std::string limit = found.intensity_limit_flop_per_byte
                                ? plain_number(*found.intensity_limit_flop_per_byte) + " FLOP/B"
                                : "without bound";
  const std::string never =
      fmt::format("its intensity grows to {}, and never reaches the ridge of {} FLOP/B", limit,
                  plain_number(found.ridge_flop_per_byte));
  document.headline(
      found.reachable
          ? fmt::format("Attention ({}) on {} is compute-bound from {} tokens on: there its "
                        "intensity passes the ridge of {} FLOP/B.",
                        to_string(pipeline), device.name,
                        found.seqlen_ceil ? std::to_string(*found.seqlen_ceil) : "?",
                        plain_number(found.ridge_flop_per_byte))
          : fmt::format("Attention ({}) on {} is never compute-bound: {}.", to_string(pipeline),
                        device.name, never));
  document.set("reachable", Json(found.reachable));
  if (found.seqlen) {
    document.set("crossover_seqlen", *found.seqlen);
  } else {
    document.missing("crossover_seqlen", never).hide("crossover_seqlen_reason");
  }
  document.set("crossover_seqlen_ceil",
               found.seqlen_ceil ? Json(*found.seqlen_ceil) : Json(nullptr));
  document.set("crossover_seqlen_rounded", optional_number(found.seqlen_rounded));
  if (found.intensity_limit_flop_per_byte) {
    document.set("intensity_limit_flop_per_byte", *found.intensity_limit_flop_per_byte);
  } else {
    document.missing("intensity_limit_flop_per_byte", "unbounded: it grows with the length");
    document.hide("intensity_limit_flop_per_byte_reason");
  }
  document.set("ridge_flop_per_byte", found.ridge_flop_per_byte);
  const Ridge at = value_or_fail(ridge(device, problem.dtype, convention));
  document.set("peak_flop_per_s", at.peak_flop_per_s);
  document.set("bandwidth_bytes_per_s", at.bandwidth_bytes_per_s);
  document.set("attainable_limit_flop_per_s",
               found.intensity_limit_flop_per_byte
                   ? number(std::min(at.peak_flop_per_s, *found.intensity_limit_flop_per_byte *
                                                             at.bandwidth_bytes_per_s))
                   : number(at.peak_flop_per_s));
  if (found.shortfall) {
    document.set("shortfall", number(*found.shortfall));
  } else {
    document.missing("shortfall", "the ridge is reached");
  }
  document.set("root", optional_number(found.root));
  document.set("numerator", found.numerator).set("coefficient", found.coefficient);
  document.set("closed_form", Json(found.closed_form));
  document.label("crossover_seqlen", "crosses the ridge at (tokens)");
  document.label("crossover_seqlen_ceil", "first whole length");
  document.label("crossover_seqlen_rounded", "as the convention rounds");
  document.label("intensity_limit_flop_per_byte", "intensity without end");
  document.label("attainable_limit_flop_per_s", "roof without end");
  document.label("shortfall", "ridge over that intensity");
  for (const char* key : {"root", "numerator", "coefficient", "closed_form"}) {
    document.hide(key);
  }
  document.print(context);
}

void explain_recompute(const AttentionOptions& options, const Context& context) {
  const DeviceSpec device = device_of(options.explain);
  const Convention convention = convention_of(options.explain, device);
  const AttentionProblem problem = problem_of(options.attention);
  const RecomputeChoice choice = value_or_fail(recompute_choice(problem, device, convention));
  Document document =
      explain_document(device, convention.name, to_json(problem, options.attention.pipeline));
  document.headline(fmt::format(
      "For the backward pass, {} the scores is cheaper: storing them takes {} of traffic, "
      "recomputing them {} of arithmetic, {} times less.",
      choice.recompute_is_cheaper ? "recomputing" : "storing",
      with_si_prefix(choice.store_time_s, "s"), with_si_prefix(choice.recompute_time_s, "s"),
      plain_number(choice.recompute_is_cheaper ? choice.store_over_recompute
                                               : 1 / choice.store_over_recompute)));
  document.set("cheaper", choice.cheaper());
  document.set("score_bytes", choice.score_bytes);
  document.set("store_bytes", choice.store_bytes);
  document.set("store_time_s", choice.store_time_s);
  document.set("recompute_flops", choice.recompute_flops);
  document.set("recompute_time_s", choice.recompute_time_s);
  document.set("store_over_recompute", choice.store_over_recompute);
  document.set("break_even_ridge_flop_per_byte", choice.break_even_ridge_flop_per_byte);
  document.set("achieved_ridge_flop_per_byte", choice.achieved_ridge_flop_per_byte);
  document.set("extra_flops_fraction", choice.extra_flops_fraction);
  document.set("statistics_bytes", choice.statistics_bytes);
  document.label("score_bytes", "scores, one way").label("store_bytes", "written and read back");
  document.label("store_time_s", "time of storing");
  document.label("recompute_flops", "arithmetic of recomputing");
  document.label("recompute_time_s", "time of recomputing");
  document.label("store_over_recompute", "storing over recomputing");
  document.label("break_even_ridge_flop_per_byte", "recomputing wins above");
  document.label("achieved_ridge_flop_per_byte", "this device achieves");
  document.label("extra_flops_fraction", "added to the backward products");
  document.label("statistics_bytes", "kept instead: m and l");
  document.print(context);
}

struct TilingOptions {
  ExplainFlags explain;
  std::int64_t seqlen = 4096, head_dim = 128;
  DType dtype = DType::bf16;
};

void explain_tiling(const TilingOptions& options, const Context& context) {
  const DeviceSpec device = device_of(options.explain);
  const Convention convention = convention_of(options.explain, device);
  const double memory = value_or_fail(device.value("fast_memory_bytes"));
  const Tiling t =
      value_or_fail(tiling(options.seqlen, options.head_dim, options.dtype, memory, convention));
  Json echo = Json::object();
  echo["seqlen"] = options.seqlen;
  echo["head_dim"] = options.head_dim;
  echo["dtype"] = to_string(options.dtype);
  echo["fast_memory_bytes"] = number(memory);
  Document document = explain_document(device, convention.name, std::move(echo));
  document.headline(fmt::format(
      "With {} of fast memory, {} rows of queries stay on chip: K and V stream past {} times, and "
      "memory is touched {} times less than with the score matrix written out.",
      with_si_prefix(memory, "B"), plain_number(t.tile_rows), plain_number(t.kv_passes),
      plain_number(t.reduction_vs_unfused)));
  document.set("fast_memory_elements", t.fast_memory_elements);
  document.set("tile_rows", t.tile_rows).set("kv_passes", t.kv_passes);
  document.set("io_elements", t.io_elements).set("io_bytes", t.io_bytes);
  document.set("unfused_elements", t.unfused_elements);
  document.set("reduction_vs_unfused", t.reduction_vs_unfused);
  document.set("score_matrix_bytes", t.score_matrix_bytes);
  document.set("score_matrix_fits", Json(t.score_matrix_fits));
  document.label("tile_rows", "rows held at once").label("kv_passes", "passes over K and V");
  document.label("io_elements", "elements through memory").label("io_bytes", "  in bytes");
  document.label("unfused_elements", "elements of the score matrix");
  document.label("reduction_vs_unfused", "times fewer");
  document.label("score_matrix_fits", "it fits the fast memory");
  document.print(context);
}

}  // namespace

void add_explain_attention(CLI::App& explain, Context& context) {
  auto options = std::make_shared<AttentionOptions>();
  CLI::App* command = explain.add_subcommand(
      "attention", "one attention: arithmetic, traffic, wall, and what would move it");
  command->footer(
      examples({{"rafter explain attention --seqlen 4096 --pipeline unfused",
                 "three kernels, one head: bandwidth-bound at 62 FLOP/B"},
                {"rafter explain attention --seqlen 4k --heads-q 32 --heads-kv 8 --causal --device "
                 "a100-80gb-sxm",
                 "a causal layer with grouped heads on another device"},
                {"rafter explain attention --seqlen 4096 --pipeline unfused --convention lecture",
                 "as the lecture counts: 64 FLOP/B"}}));
  add_attention_flags(*command, options->attention, Lengths::given);
  add_explain_flags(*command, options->explain, context, {"causal"});
  command->callback([options, &context] { explain_attention(*options, context); });
}

void add_explain_decode(CLI::App& explain, Context& context) {
  auto options = std::make_shared<DecodeOptions>();
  options->problem.seqlen_kv = 4096;
  CLI::App* command = explain.add_subcommand(
      "decode", "one decode step of attention: a new token against its cache");
  command->footer(
      examples({{"rafter explain decode --seqlen-kv 8k", "about 1 FLOP/B whatever the length"},
                {"rafter explain decode --seqlen-kv 8k --heads-q 32 --heads-kv 8 --kv-dtype e4m3 "
                 "--batch 16",
                 "grouped heads and an 8-bit cache: more arithmetic for each byte"},
                {"rafter explain decode --seqlen-kv 32k --heads-q 32 --splits 8 --page-size 64",
                 "keys split over SMs, a paged cache"}}));
  DecodeProblem& problem = options->problem;
  const LengthRange from_zero = {0, std::int64_t{1} << 40};
  add_length(*command, "--seqlen-kv,--seqlen,--seq-len", problem.seqlen_kv, "keys in the cache");
  add_length(*command, "--seqlen-q", problem.seqlen_q, "new tokens of each sequence");
  add_length(*command, "--batch", problem.batch, "sequences");
  add_length(*command, "--heads-q,--heads", options->heads_q, "query heads (default 1)");
  add_length(*command, "--heads-kv,--kv-heads", options->heads_kv,
             "key and value heads (default: as many as query heads)");
  add_length(*command, "--group", options->group, "query heads per key head");
  add_length(*command, "--head-dim", problem.head_dim, "elements of one head's query or key");
  add_length(*command, "--head-dim-v", options->head_dim_v,
             "elements of one head's value (default: as --head-dim)");
  add_dtype(*command, "--dtype", problem.dtype, "of q, o and the arithmetic");
  add_dtype(*command, "--kv-dtype", problem.kv_dtype, "of the cache (default: as --dtype)");
  add_length(*command, "--kv-scale-block", problem.kv_scale_block,
             "elements that share a scale of a quantised cache; 0: none (default: the row for "
             "int8, 32 for "
             "int4)",
             from_zero)
      ->default_str("");
  add_real(*command, "--kv-scale-bytes", problem.kv_scale_bytes,
           "bytes of one such scale (default 4 for int8, 2 for int4)")
      ->default_str("");
  add_length(*command, "--page-size", problem.page_size, "keys per page; 0: not paged", from_zero);
  add_length(*command, "--splits", problem.splits, "parts of the keys, worked on at once");
  add_pipeline(*command, options->pipeline, "pipeline (default split-kv)");
  add_explain_flags(*command, options->explain, context, {"causal"});
  command->callback([options, &context] { explain_decode(*options, context); });
}

void add_explain_crossover(CLI::App& explain, Context& context) {
  auto options = std::make_shared<AttentionOptions>();
  CLI::App* command = explain.add_subcommand(
      "crossover", "the length from which attention is compute-bound, if there is one");
  command->footer(examples(
      {{"rafter explain crossover --convention lecture", "fused attention on an H100: 590 tokens"},
       {"rafter explain crossover --pipeline unfused", "never, and why"}}));
  add_attention_flags(*command, options->attention, Lengths::solved_for);
  add_explain_flags(*command, options->explain, context, {"causal"});
  command->callback([options, &context] { explain_crossover(*options, context); });
}

void add_explain_recompute(CLI::App& explain, Context& context) {
  auto options = std::make_shared<AttentionOptions>();
  CLI::App* command =
      explain.add_subcommand("recompute", "backward: keep the score matrix or compute it again");
  command->footer(examples({{"rafter explain recompute --convention lecture --seqlen 4096",
                             "recomputing is 2.3 times cheaper on an H100"}}));
  add_attention_flags(*command, options->attention, Lengths::given);
  add_explain_flags(*command, options->explain, context, {"causal"});
  command->callback([options, &context] { explain_recompute(*options, context); });
}

void add_explain_tiling(CLI::App& explain, Context& context) {
  auto options = std::make_shared<TilingOptions>();
  CLI::App* command = explain.add_subcommand(
      "tiling", "traffic of attention in tiles that fit fast memory: S²·head_dim²/M");
  command->footer(examples({{"rafter explain tiling --seqlen 4096 --fast-memory-bytes 233472",
                             "912 rows of a Hopper SM's shared memory"}}));
  add_length(*command, "--seqlen,--seq-len", options->seqlen, "queries and keys");
  add_length(*command, "--head-dim", options->head_dim, "elements of one head's row");
  add_dtype(*command, "--dtype", options->dtype, "of the tiles");
  add_explain_flags(*command, options->explain, context, {"causal"});
  command->callback([options, &context] { explain_tiling(*options, context); });
}

}  // namespace rafter::cli
