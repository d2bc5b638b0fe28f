#include "cli/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/problem_json.h"

namespace rafter::cli {
namespace {

std::string dashed(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

void add_parameter(CLI::App& command, ExplainFlags& flags, const ConventionParameter& parameter) {
  std::string name = "--" + dashed(parameter.name);
  if (parameter.name == "softmax_flops_per_element") {
    name += ",--softmax-flops";
  } else if (parameter.name == "launch_s") {
    name += ",--launch-cost-s";
  }
  const bool boolean = parameter.allowed.starts_with("true, false");
  CLI::Option* option = add_parsed(
      command, name, parameter.what + " (" + parameter.allowed + ")", "VALUE",
      [&flags, name = parameter.name, boolean](const std::string& text) -> Status {
        const std::string value = text.empty() && boolean ? "true" : text;  // --count-lse alone
        Convention scratch;
        const Status status =
            scratch.set(name, value.starts_with('-') ? std::string_view("?") : value);
        if (!status.is_ok()) {
          return Status(status.code(), status.parameter(), one_line(value), status.allowed());
        }
        flags.parameters.emplace_back(name, value);
        return Status::ok();
      });
  option->group("Counting (rafter explain conventions lists the values)");
  if (boolean) {
    option->expected(0, 1);
  }
}

void set_figure(DeviceSpec& device, const std::string& key, const std::optional<double>& value,
                const char* unit) {
  if (value) {
    Figure figure;
    figure.value = *value;
    figure.unit = unit;
    figure.kind = FigureKind::assumed;
    figure.source = "given on the command line";
    device.figures.insert_or_assign(key, figure);
  }
}

/// The share of a time that the table prints: "36%".
std::string percent(double share) {
  return share < 0.095 ? fmt::format("{:.2g}%", 100 * share) : fmt::format("{:.0f}%", 100 * share);
}

std::string wall_sentence(const std::string& subject, const Prediction& p) {
  const std::string opening = fmt::format("{} on {} is {}.", subject, p.device, p.verdict());
  const std::string intensity = plain_number(p.intensity_flop_per_byte);
  const std::string ridge = fmt::format("{} FLOP/B", plain_number(p.ridge_flop_per_byte));
  switch (p.wall) {
    case Wall::compute:
      return fmt::format(
          "{} It does {} FLOP of arithmetic for each byte it moves; the ridge is {}, so the "
          "arithmetic "
          "units are the wall and memory keeps up.",
          opening, intensity, ridge);
    case Wall::bandwidth:
      return fmt::format(
          "{} It does only {} FLOP of arithmetic for each byte it moves; the ridge is {}, so "
          "memory is "
          "the wall: at most {} of the peak can be reached.",
          opening, intensity, ridge, percent(p.peak_fraction));
    case Wall::dispatch:
      return fmt::format(
          "{} Starting its kernels takes {}, longer than running them: the launches are the wall.",
          opening, with_si_prefix(p.time_dispatch_s, "s"));
  }
  return opening;
}

}  // namespace

void add_explain_flags(CLI::App& command, ExplainFlags& flags, Context& context,
                       const std::vector<std::string>& own) {
  add_format(command, context);
  add_device(command, flags.device);
  add_choice(command, "--convention", flags.convention, {"exact", "lecture", "solution"},
             "how to count: every term, or as one of the two published derivations");
  const char* instead = "in place of the device's";
  const RealRange positive = {1e-300, 1e300};
  add_real(command, "--peak-flops-per-s,--peak-flop-per-s", flags.peak_flop_per_s,
           std::string("matmul peak of every dtype, FLOP/s, ") + instead, positive);
  add_real(command, "--bandwidth-bytes-per-s", flags.bandwidth_bytes_per_s,
           std::string("memory bandwidth, B/s, ") + instead, positive);
  add_real(command, "--capacity-bytes,--usable-bytes,--hbm-bytes", flags.capacity_bytes,
           std::string("memory that may be filled, B, ") + instead, positive);
  add_real(command, "--fast-memory-bytes,--smem-bytes", flags.fast_memory_bytes,
           std::string("fast memory of one SM or core, B, ") + instead, positive);
  add_real(command, "--sm-count", flags.sm_count, std::string("SMs or cores, ") + instead,
           positive);
  for (const ConventionParameter& parameter : convention_parameters()) {
    const bool taken = std::find(own.begin(), own.end(), parameter.name) != own.end() ||
                       parameter.name == "fast_memory_bytes";
    if (!taken) {
      add_parameter(command, flags, parameter);
    }
  }
}

DeviceSpec device_of(const ExplainFlags& flags) {
  DeviceSpec device = device_of(flags.device);
  if (flags.peak_flop_per_s) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3, DType::e5m2,
                              DType::int8, DType::int4}) {
      set_figure(device, fmt::format("peak_{}_flop_per_s", to_string(dtype)), flags.peak_flop_per_s,
                 "FLOP/s");
    }
  }
  set_figure(device, "bandwidth_bytes_per_s", flags.bandwidth_bytes_per_s, "B/s");
  set_figure(device, "capacity_bytes", flags.capacity_bytes, "B");
  set_figure(device, "usable_bytes", flags.capacity_bytes, "B");
  set_figure(device, "fast_memory_bytes", flags.fast_memory_bytes, "B");
  set_figure(device, "sm_count", flags.sm_count, "1");
  return device;
}

Convention convention_of(const ExplainFlags& flags, const DeviceSpec& device) {
  Convention convention = value_or_fail(find_convention(flags.convention));
  for (const auto& [name, value] : flags.parameters) {
    check(convention.set(name, value));
  }
  if (convention.traffic_model == TrafficModel::tiled && convention.fast_memory_bytes == 0) {
    convention.fast_memory_bytes = value_or_fail(device.value("fast_memory_bytes"));
  }
  check(convention.validate());
  return convention;
}

void add_attention_flags(CLI::App& command, AttentionFlags& flags, Lengths lengths) {
  if (lengths == Lengths::given) {
    add_length(command, "--seqlen,--seq-len", flags.seqlen,
               "queries and keys of each sequence (default 4096)");
    add_length(command, "--seqlen-q", flags.seqlen_q, "queries of each sequence");
    add_length(command, "--seqlen-kv", flags.seqlen_kv, "keys of each sequence");
  }
  add_length(command, "--batch", flags.batch, "sequences");
  add_length(command, "--heads-q,--heads", flags.heads_q, "query heads (default 1)");
  add_length(command, "--heads-kv,--kv-heads", flags.heads_kv,
             "key and value heads (default: as many as query heads)");
  add_length(command, "--group", flags.group, "query heads per key head");
  add_length(command, "--head-dim", flags.head_dim, "elements of one head's query or key");
  add_length(command, "--head-dim-v", flags.head_dim_v,
             "elements of one head's value (default: as --head-dim)");
  add_dtype(command, "--dtype", flags.dtype, "of q, k, v, o: f32 f16 bf16 e4m3 e5m2 int8 int4");
  add_mask(command, flags.mask);
  add_pipeline(command, flags.pipeline,
               "unfused: three kernels; half-fused: softmax with PV; fused: one; split-kv");
  add_choice(command, "--pass", flags.pass, {"forward", "backward"}, "which pass");
  add_length(command, "--splits", flags.splits, "parts of the keys (split-kv)");
}

std::pair<std::int64_t, std::int64_t> heads_of(std::optional<std::int64_t> heads_q,
                                               std::optional<std::int64_t> heads_kv,
                                               std::optional<std::int64_t> group) {
  if (!group) {
    return {heads_q.value_or(heads_kv.value_or(1)), heads_kv.value_or(heads_q.value_or(1))};
  }
  if (heads_q && !heads_kv) {
    heads_kv = std::max<std::int64_t>(1, *heads_q / *group);
  }
  const std::int64_t kv = heads_kv.value_or(1);
  if (heads_q && *heads_q != kv * *group) {
    fail_flag("--group",
              fmt::format("{} with --heads-q {} and --heads-kv {}", *group, *heads_q, kv),
              "--heads-q / --heads-kv");
  }
  return {kv * *group, kv};
}

AttentionProblem problem_of(const AttentionFlags& flags) {
  if (flags.seqlen && (flags.seqlen_q || flags.seqlen_kv)) {
    fail_flag("--seqlen", flags.seqlen_q ? "together with --seqlen-q" : "together with --seqlen-kv",
              "--seqlen alone, or --seqlen-q and --seqlen-kv,");
  }
  if (flags.seqlen_q.has_value() != flags.seqlen_kv.has_value()) {
    fail_flag(flags.seqlen_q ? "--seqlen-q" : "--seqlen-kv", "alone",
              "--seqlen-q and --seqlen-kv together, or --seqlen,");
  }
  if (flags.splits > 1 && flags.pipeline != Pipeline::split_kv) {
    fail_flag("--splits", std::to_string(flags.splits), "1, or --pipeline split-kv,");
  }
  const auto [heads_q, heads_kv] = heads_of(flags.heads_q, flags.heads_kv, flags.group);
  const std::int64_t both = flags.seqlen.value_or(4096);
  AttentionProblem problem;
  problem.batch = flags.batch;
  problem.heads_q = heads_q;
  problem.heads_kv = heads_kv;
  problem.seqlen_q = flags.seqlen_q.value_or(both);
  problem.seqlen_kv = flags.seqlen_kv.value_or(both);
  problem.head_dim = flags.head_dim;
  problem.head_dim_v = flags.head_dim_v.value_or(flags.head_dim);
  problem.dtype = flags.dtype;
  problem.mask = mask_of(flags.mask);
  return problem;
}

Pass pass_of(const AttentionFlags& flags) {
  return flags.pass == "backward" ? Pass::backward : Pass::forward;
}

Json optional_number(const std::optional<double>& value) {
  return value ? number(*value) : Json(nullptr);
}

Json to_json(const AttentionProblem& problem, Pipeline pipeline) {
  Json json = sizes_json(problem);
  json["causal"] = problem.mask.window_left < 0 && problem.mask.window_right == 0;
  json["window"] = {problem.mask.window_left, problem.mask.window_right};
  json["causal_align"] =
      problem.mask.align == MaskAlign::bottom_right ? "bottom-right" : "top-left";
  json["pipeline"] = to_string(pipeline);
  return json;
}

Json ceilings_json(const std::vector<Ceiling>& ceilings) {
  Json rows = Json::array();
  for (const Ceiling& ceiling : ceilings) {
    rows.push_back(Json{{"name", ceiling.name},
                        {"flop_per_s", number(ceiling.flop_per_s)},
                        {"advice", ceiling.advice}});
  }
  return rows;
}

Document explain_document(const DeviceSpec& device, const std::string& convention, Json problem) {
  Document document;
  document.set("device", device.name);
  document.set("convention", convention);
  document.set("problem", std::move(problem)).label("problem", "Problem");
  document.label("flops", "arithmetic").label("matmul_flops", "  in matrix products");
  document.label("softmax_flops", "  outside of them");
  document.label("bytes", "memory traffic").label("launches", "kernels launched");
  document.label("intensity_flop_per_byte", "intensity");
  document.label("ridge_flop_per_byte", "ridge of the device");
  document.label("ridge_multiple", "intensity over ridge");
  document.label("attainable_flop_per_s", "roof at this intensity");
  document.label("peak_fraction", "roof over peak");
  document.label("time_s", "time at best").label("time_compute_s", "  arithmetic alone");
  document.label("time_bandwidth_s", "  memory traffic alone");
  document.label("time_dispatch_s", "  launches alone");
  document.label("time_sum_s", "time if nothing overlaps");
  document.label("near_ridge", "near the ridge").label("ambiguous", "ridge in the error bar");
  document.label("footprint_bytes", "memory held").label("score_matrix_bytes", "a score matrix");
  document.label("bytes_by_term", "Memory traffic by tensor").label("kernels", "Kernels");
  document.label("ceilings", "What would move it: ceilings, lowest first");
  document.label("flop_per_s", "rate").label("advice", "what lifts it");
  for (const char* key : {"pairs", "exponentials", "largest_term", "ridge_rounded_flop_per_byte",
                          "bandwidth_roof_flop_per_s", "time_low_s", "time_high_s", "verdict",
                          "ridge_low_flop_per_byte", "ridge_high_flop_per_byte"}) {
    document.hide(key);
  }
  return document;
}

void append_cost(Document& document, const Cost& cost) {
  document.set("flops", cost.flops);
  document.set("matmul_flops", cost.matmul_flops);
  document.set("softmax_flops", cost.softmax_flops);
  document.set("bytes", cost.bytes);
  Json terms = Json::object();
  for (const ByteTerm& term : cost.bytes_by_term) {
    terms[term.name] = number(term.bytes);
  }
  document.set("bytes_by_term", std::move(terms));
  document.set("launches", cost.launches);
  document.set("footprint_bytes", cost.footprint_bytes);
  document.set("score_matrix_bytes", cost.score_matrix_bytes);
  document.set("pairs", cost.pairs);
  document.set("exponentials", cost.exponentials);
  Json kernels = Json::array();
  for (const KernelCost& kernel : cost.kernels) {
    Json row = Json::object();
    row["name"] = kernel.name;
    row["matmul_flops"] = number(kernel.matmul_flops);
    row["softmax_flops"] = number(kernel.softmax_flops);
    row["bytes"] = number(kernel.bytes);
    row["elements"] = number(kernel.elements);
    kernels.push_back(std::move(row));
  }
  document.set("kernels", std::move(kernels));
}

void append_prediction(Document& document, const Prediction& p) {
  document.set("wall", to_string(p.wall));
  document.set("verdict", p.verdict());
  document.set("near_ridge", Json(p.near_ridge));
  document.set("ambiguous", Json(p.ambiguous));
  document.set("intensity_flop_per_byte", p.intensity_flop_per_byte);
  document.set("ridge_flop_per_byte", p.ridge_flop_per_byte);
  document.set("ridge_rounded_flop_per_byte", p.ridge_rounded_flop_per_byte);
  document.set("ridge_low_flop_per_byte", p.ridge_low_flop_per_byte);
  document.set("ridge_high_flop_per_byte", p.ridge_high_flop_per_byte);
  document.set("ridge_multiple", p.ridge_multiple);
  document.set("peak_flop_per_s", p.peak_flop_per_s);
  document.set("bandwidth_bytes_per_s", p.bandwidth_bytes_per_s);
  document.set("attainable_flop_per_s", p.attainable_flop_per_s);
  document.set("bandwidth_roof_flop_per_s", p.bandwidth_roof_flop_per_s);
  document.set("peak_fraction", p.peak_fraction);
  document.set("achieved_flop_per_s", p.achieved_flop_per_s);
  document.set("time_s", p.time_s);
  document.set("time_compute_s", p.time_compute_s);
  document.set("time_bandwidth_s", p.time_bandwidth_s);
  if (std::isfinite(p.time_dispatch_s)) {
    document.set("time_dispatch_s", p.time_dispatch_s);
  } else {
    document.missing("time_dispatch_s", p.dispatch_reason).hide("time_dispatch_s_reason");
  }
  document.set("time_sum_s", p.time_sum_s);
  document.set("time_low_s", p.time_low_s);
  document.set("time_high_s", p.time_high_s);
  document.set("largest_term", to_string(p.largest_term));
  document.set("ceilings", ceilings_json(p.ceilings));
}

void append_roofline(Document& document, const std::string& subject, const Cost& cost,
                     const Prediction& prediction) {
  document.headline(wall_sentence(subject, prediction));
  append_prediction(document, prediction);
  append_cost(document, cost);
}

}  // namespace rafter::cli
