// rafter bench: kernels over a grid of shapes, predicted and measured side by side.
#include <fmt/format.h>

#include <memory>
#include <optional>

#include "cli/args.h"
#include "cli/bench_rows.h"
#include "cli/command.h"
#include "cli/output.h"
#include "cli/probe_file.h"
#include "cli/progress.h"
#include "cli/timed_attention.h"
#include "rafter/measure.h"

namespace rafter::cli {
namespace {

/// What every kind of bench takes.
struct Common {
  std::string device;
  std::string out;
  std::string baseline;
  double threshold = 0.95;
  double time_s = 0.3;
  std::int64_t threads = 0;
  bool counters = true;
  std::vector<DType> dtypes = {};  // none given: f32 on a CPU, bf16 on a GPU
};

struct AttentionAxes {
  std::vector<std::int64_t> seqlens = {512, 1024, 2048};
  std::vector<std::int64_t> head_dims = {64};
  std::vector<std::int64_t> heads_q = {4};
  std::vector<std::int64_t> heads_kv = {0};
  std::vector<std::int64_t> batches = {1};
  std::vector<bool> causal = {false};
  std::vector<Pipeline> pipelines = {Pipeline::unfused, Pipeline::half_fused, Pipeline::fused};
  std::string kernel;
  bool evidence = true;
  Pass pass = Pass::forward;

  const char* verb() const { return pass == Pass::forward ? "attention" : "backward"; }
};

struct DecodeAxes {
  std::vector<std::int64_t> seqlens_kv = {8192};
  std::vector<std::int64_t> seqlens_q = {1};
  std::vector<std::int64_t> head_dims = {128};
  std::vector<std::int64_t> heads_q = {32};
  std::vector<std::int64_t> heads_kv = {8};
  std::vector<std::int64_t> batches = {1, 8};
  std::vector<std::int64_t> page_sizes = {0};
  std::vector<DType> kv_dtypes = {};  // default: as the dtype
  std::vector<Pipeline> pipelines = {Pipeline::split_kv};
  std::int64_t splits = 0;
  std::string kernel;
  bool evidence = false;
};

struct GemmAxes {
  std::vector<std::int64_t> m = {512, 1024}, n = {}, k = {};
};

std::vector<DType> dtypes_of(const Common& common, const Device& device) {
  return !common.dtypes.empty()              ? common.dtypes
         : device.kind == Device::Kind::cuda ? std::vector{DType::bf16}
                                             : std::vector{DType::f32};
}

StopRule rule_of(const Common& common) {
  StopRule rule;
  rule.min_time_s = common.time_s;
  rule.max_time_s = 10 * common.time_s;
  return rule;
}

void add_common(CLI::App& command, Common& common, Context& context) {
  add_dtypes(
      command, "--dtype", common.dtypes,
      common.dtypes.empty() ? "element types (default: f32, on a GPU bf16)" : "element types");
  add_length(command, "--threads", common.threads, "threads (0: all cores)", {0, 4096});
  add_real(command, "--time", common.time_s, "least seconds of samples per case", {0.001, 600});
  add_text(command, "--device", common.device,
           "cpu (the default) or cuda with its probe file, else a quick probe; or such a file",
           "cpu|cuda|FILE.json");
  add_switch(command, "--counters", common.counters,
             "also count the bytes at the memory of a GPU, where this machine allows it");
  add_text(command, "--out", common.out, "append one record a row to this file", "FILE.jsonl");
  add_text(command, "--baseline", common.baseline,
           "compare with the newest records of this file; exit 1 when a row is slower",
           "FILE.jsonl");
  add_real(command, "--threshold", common.threshold,
           "slower: baseline time over this time is below it, and the intervals are apart",
           {0.01, 1});
  add_format(command, context);
}

/// Read before anything is measured, so that a bad file is refused at once.
Baseline baseline_of(const Common& common) {
  return common.baseline.empty() ? Baseline{} : value_or_fail(read_baseline(common.baseline));
}

Json compare_row(const BenchRow& row, const Baseline& baseline, double threshold, bool& slower) {
  const auto found = baseline.find(row.name());
  if (found == baseline.end()) {
    return "new";
  }
  const Statistics& s = row.timing.seconds;
  const Comparison comparison =
      compare(found->second, {s.median, s.median_low, s.median_high}, threshold);
  slower = slower || comparison == Comparison::slower;
  return to_string(comparison);
}

Json table_row(const BenchRow& row) {
  Json json = Json::object();
  for (const auto& [key, value] : row.shape.items()) {
    json[key] = value;
  }
  if (!row.pipeline.empty()) {
    json["pipeline"] = row.pipeline;
  }
  const Statistics& s = row.timing.seconds;
  json["predicted_time_s"] = number(row.predicted.time_s);
  json["time_s"] = number(s.median);
  json["flop_per_s"] = number(row.cost.flops / s.median);
  json["of bound"] = fmt::format("{:.0f}%", 100 * row.bound_s / s.median);
  json["wall"] = row.predicted.ambiguous ? "ambiguous" : to_string(row.predicted.wall);
  json["measured"] = row.wall_measured;
  json["from"] = row.level;
  json["bytes"] = number(row.cost.bytes);
  if (row.more.contains("counted_bytes") && !row.more["counted_bytes"].is_null()) {
    json["counted_bytes"] = row.more["counted_bytes"];
  }
  json["kernel"] = row.kernel;
  if (row.more.contains("tokens_per_s")) {
    json["tokens_per_s"] = row.more["tokens_per_s"];
  }
  return json;
}

// CSV has no nesting: the case's keys become columns of their own.
Json flat_row(const Json& benchmark) {
  Json flat = Json::object();
  for (const auto& [key, value] : benchmark.items()) {
    if (key == "case") {
      for (const auto& [name, axis] : value.items()) {
        flat[name] = axis;
      }
    } else {
      flat[key] = value;
    }
  }
  return flat;
}

/// Counters that were wanted and not had, and counts that the model did not foresee.
void remark_on_counters(const std::vector<BenchRow>& rows, Document& document) {
  constexpr double kApart = 0.1;
  std::int64_t counted = 0, apart = 0;
  std::string reason;
  for (const BenchRow& row : rows) {
    if (!row.more.contains("counted_bytes") || row.kind == "gemm") {
      continue;
    }
    if (row.more["counted_bytes"].is_null()) {
      reason = row.more["counted_bytes_reason"].get<std::string>();
      continue;
    }
    ++counted;
    const double ratio = row.more["counted_bytes"].get<double>() / row.cost.bytes;
    apart += ratio < 1 - kApart || ratio > 1 + kApart ? 1 : 0;
  }
  if (!reason.empty()) {
    document.remark("No counted bytes: " + reason);
  }
  if (apart > 0) {
    document.remark(fmt::format(
        "Counted bytes are more than {:.0f}% from the modelled ones in {} of {} rows: scores that "
        "stay in the L2, results that are still in it, tiles read more than once.",
        100 * kApart, apart, counted));
  }
}

void finish(const std::vector<BenchRow>& rows, const Json& refused, const ThisMachine& machine,
            const Common& common, const Baseline& baseline, Context& context) {
  bool slower = false;
  Json benchmarks = Json::array();
  std::vector<Json> records;
  for (const BenchRow& row : rows) {
    Json json = context.format == Format::table ? table_row(row) : benchmark_json(row);
    if (!common.baseline.empty()) {
      json["against_baseline"] = compare_row(row, baseline, common.threshold, slower);
    }
    benchmarks.push_back(context.format == Format::csv ? flat_row(json) : std::move(json));
    records.push_back(record_json(row, machine.spec));
  }
  if (!common.out.empty()) {
    check(append_records(common.out, records));
  }
  Document document;
  if (context.format == Format::json) {
    document.set("context", benchmark_context(machine.spec));
  }
  document.headline(
      fmt::format("{}; ceilings from {}", machine.spec.title, one_line(machine.source)));
  document.set("benchmarks", std::move(benchmarks)).rows("benchmarks").label("benchmarks", "Rows");
  if (context.format == Format::json) {
    document.set("refused", refused);
  }
  for (const Json& refusal : refused) {
    document.remark(fmt::format("Not run: {}", refusal.at("reason").get<std::string>()));
  }
  if (!machine.noisy.empty()) {
    document.remark(fmt::format("Noisy ceilings: {}", fmt::join(machine.noisy, ", ")));
  }
  remark_on_counters(rows, document);
  document.remark(
      "Bytes are modelled. A row that is not from memory is cache-resident: its bound takes the "
      "bandwidth of the level named.");
  document.print(context);
  if (slower) {
    context.exit = Exit::check_failed;
  }
}

/// What every row of an attention kernel has, the shape left to the caller.
BenchRow measured_row(const char* kind, const CaseResult& result) {
  BenchRow row;
  row.kind = kind;
  row.pipeline = to_string(result.pipeline);
  row.kernel = result.kernel;
  row.cost = result.cost;
  row.predicted = result.at_level;
  row.bound_s = result.at_level.time_s;
  row.level = result.level.name;
  row.timing = result.timing;
  row.wall_measured = to_string(result.measured.wall);
  row.wall_reason = result.measured.reason;
  const WallVerdict& m = result.measured;
  row.more["declared_bytes"] = number(result.declared_bytes);
  row.more["workspace_bytes"] = number(result.workspace_bytes);
  row.more["working_set_bytes"] = number(result.working_set_bytes);
  row.more["predicted_from_memory_s"] = number(result.predicted.time_s);
  row.more["elasticity"] = m.has_elasticity ? number(m.elasticity) : Json();
  row.more["flop_exponent"] = m.has_flop_exponent ? number(m.flop_exponent) : Json();
  const auto seconds = [](const Statistics& s) { return s.n > 0 ? number(s.median) : Json(); };
  row.more["time_stream_s"] = seconds(result.evidence.seconds_stream);
  row.more["time_graph_s"] = seconds(result.evidence.seconds_graph);
  row.more["launch_share"] = m.has_launch_share ? number(m.launch_share) : Json();
  set_counted(result, row.more);
  return row;
}

BenchRow row_of(const AttentionProblem& p, const CaseResult& result, const AttentionAxes& axes) {
  BenchRow row = measured_row(axes.verb(), result);
  row.shape = Json{{"seqlen", p.seqlen_q},
                   {"head_dim", p.head_dim},
                   {"heads_q", p.heads_q},
                   {"heads_kv", p.heads_kv == 0 ? p.heads_q : p.heads_kv},
                   {"batch", p.batch},
                   {"causal", !p.mask.is_none()},
                   {"dtype", to_string(p.dtype)},
                   {"threads", result.threads}};
  if (axes.pass == Pass::backward) {
    // The field's count, by which the rates of both passes compare.
    const double flops =
        2.5 * value_or_fail(attention_cost(p, Pipeline::fused, Pass::forward)).flops;
    row.more["forward_flops_x2.5"] = number(flops);
    row.more["forward_flops_x2.5_per_s"] = number(flops / result.median_s());
  }
  return row;
}

BenchRow decode_row(const AttentionProblem& p, const CaseResult& result) {
  BenchRow row = measured_row("decode", result);
  row.shape =
      Json{{"seqlen_kv", p.seqlen_kv},    {"seqlen_q", p.seqlen_q},
           {"head_dim", p.head_dim},      {"heads_q", p.heads_q},
           {"heads_kv", p.heads_kv},      {"batch", p.batch},
           {"dtype", to_string(p.dtype)}, {"kv_dtype", to_string(p.kv_dtype.value_or(p.dtype))},
           {"page_size", p.page_size},    {"threads", result.threads}};
  const double median_s = result.median_s();
  row.more["kv_bytes"] = number(result.cost.kv_bytes);
  row.more["kv_bytes_per_s"] = number(result.cost.kv_bytes / median_s);
  row.more["tokens_per_s"] = number(static_cast<double>(p.batch * p.seqlen_q) / median_s);
  return row;
}

void check_dtypes(const std::vector<DType>& dtypes) {
  for (DType dtype : dtypes) {
    if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16) {
      fail_flag("--dtype", to_string(dtype), "f32, bf16, f16");
    }
  }
}

/// All points of the grid but for the pipelines, which are timed together.
std::vector<AttentionProblem> grid_of(const AttentionAxes& axes, const std::vector<DType>& dtypes) {
  check_dtypes(dtypes);
  std::vector<AttentionProblem> grid;
  for (DType dtype : dtypes) {
    for (std::int64_t batch : axes.batches) {
      for (std::int64_t heads_q : axes.heads_q) {
        for (std::int64_t heads_kv : axes.heads_kv) {
          for (std::int64_t head_dim : axes.head_dims) {
            for (bool causal : axes.causal) {
              for (std::int64_t seqlen : axes.seqlens) {
                AttentionProblem p;
                p.batch = batch;
                p.heads_q = heads_q;
                p.heads_kv = heads_kv;
                p.seqlen_q = p.seqlen_kv = seqlen;
                p.head_dim = head_dim;
                p.dtype = dtype;
                p.mask = causal ? Mask::causal() : Mask::none();
                grid.push_back(p);
              }
            }
          }
        }
      }
    }
  }
  return grid;
}

std::vector<AttentionProblem> grid_of(const DecodeAxes& axes, const std::vector<DType>& dtypes) {
  check_dtypes(dtypes);
  for (DType kv : axes.kv_dtypes) {
    if (kv != DType::f32 && kv != DType::bf16 && kv != DType::f16 && kv != DType::int8) {
      fail_flag("--kv-dtype", to_string(kv), "f32, bf16, f16, int8");
    }
  }
  std::vector<AttentionProblem> grid;
  const auto add = [&](DType dtype, DType kv, std::int64_t batch, std::int64_t page_size,
                       AttentionProblem p) {
    p.dtype = dtype;
    p.kv_dtype = kv;
    p.batch = batch;
    if (page_size > 0) {
      p.layout = Layout::paged;
      p.page_size = page_size;
      p.num_pages = batch * ((p.seqlen_kv + page_size - 1) / page_size);
    }
    grid.push_back(p);
  };
  for (DType dtype : dtypes) {
    for (DType kv : axes.kv_dtypes.empty() ? std::vector{dtype} : axes.kv_dtypes) {
      for (std::int64_t batch : axes.batches) {
        for (std::int64_t heads_q : axes.heads_q) {
          for (std::int64_t heads_kv : axes.heads_kv) {
            for (std::int64_t head_dim : axes.head_dims) {
              for (std::int64_t page_size : axes.page_sizes) {
                for (std::int64_t seqlen_q : axes.seqlens_q) {
                  for (std::int64_t seqlen_kv : axes.seqlens_kv) {
                    AttentionProblem p{.heads_q = heads_q,
                                       .heads_kv = heads_kv == 0 ? heads_q : heads_kv,
                                       .seqlen_q = seqlen_q,
                                       .seqlen_kv = seqlen_kv,
                                       .head_dim = head_dim};
                    p.mask = seqlen_q > 1 ? Mask::causal() : Mask::none();
                    add(dtype, kv, batch, page_size, p);
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  return grid;
}

/// Times every point of a grid by each of the pipelines, or by one kernel.
template <typename Axes, typename Row>
void bench_grid(const char* verb, const Axes& axes, const Common& common, PlanOptions options,
                const Row& row_of_result, Context& context) {
  const Baseline baseline = baseline_of(common);
  const ThisMachine machine =
      this_machine(common.device, static_cast<int>(common.threads), false, "bench");
  std::vector<BenchRow> rows;
  Json refused = Json::array();
  Progress progress("bench");
  const std::vector<AttentionProblem> grid = grid_of(axes, dtypes_of(common, machine.device));
  for (std::size_t i = 0; i < grid.size(); ++i) {
    const AttentionProblem& problem = grid[i];
    progress.step(fmt::format("point {} of {}", i + 1, grid.size()));
    options.threads = static_cast<int>(common.threads);
    options.device_spec = &machine.spec;
    options.kernel = axes.kernel;
    options.pipeline = {};
    // A shape that no kernel could take is the user's mistake: the plan says which.
    value_or_fail(attention_cost(problem, Pipeline::fused));
    std::optional<Qkv> data;  // on a GPU it is made there
    if (machine.device.kind == Device::Kind::cpu) {
      data = value_or_fail(random_data(problem));
    }
    std::vector<TimedCase> cases;
    if (!axes.kernel.empty()) {
      cases.push_back({problem, options, data});
    } else {
      for (Pipeline pipeline : axes.pipelines) {
        options.pipeline = pipeline;
        cases.push_back({problem, options, data});
      }
    }
    const std::vector<CaseResult> results = value_or_fail(time_cases(
        cases, machine.spec, {rule_of(common), axes.evidence, machine.device, common.counters}));
    for (const CaseResult& result : results) {
      if (result.refusal.empty()) {
        rows.push_back(row_of_result(problem, result));
      } else {
        refused.push_back(
            Json{{"pipeline", to_string(result.pipeline)}, {"reason", result.refusal}});
      }
    }
  }
  if (rows.empty()) {
    fail(Exit::bad_input, std::string("bench ") + verb,
         refused.front().at("reason").get<std::string>());
  }
  finish(rows, refused, machine, common, baseline, context);
}

void bench_gemm(const GemmAxes& axes, const Common& common, Context& context) {
  const Baseline baseline = baseline_of(common);
  const ThisMachine machine =
      this_machine(common.device, static_cast<int>(common.threads), false, "bench");
  if (machine.device.kind != Device::Kind::cpu) {
    fail_flag("--device", common.device, "cpu (rafter probe --device cuda times the GPU's GEMM)");
  }
  std::vector<BenchRow> rows;
  Json refused = Json::array();
  Progress progress("bench");
  for (DType dtype : dtypes_of(common, machine.device)) {
    for (std::int64_t m : axes.m) {
      for (std::int64_t n : axes.n.empty() ? std::vector{m} : axes.n) {
        for (std::int64_t k : axes.k.empty() ? std::vector{m} : axes.k) {
          progress.step(fmt::format("{} x {} x {}", m, n, k));
          GemmProblem problem{
              .m = m, .n = n, .k = k, .batch = 1, .dtype = dtype, .weight_dtype = {}};
          const int threads = static_cast<int>(common.threads);
          const Result<Timing> timing = time_gemm(m, n, k, dtype, threads, rule_of(common));
          if (!timing && timing.status().code() == StatusCode::kUnsupported) {
            refused.push_back(Json{{"pipeline", nullptr}, {"reason", timing.status().message()}});
            continue;
          }
          BenchRow row;
          row.kind = "gemm";
          row.timing = value_or_fail(timing);
          row.shape = Json{{"m", m},
                           {"n", n},
                           {"k", k},
                           {"dtype", to_string(dtype)},
                           {"threads", common.threads}};
          row.kernel = "onednn";
          row.cost = value_or_fail(gemm_cost(problem));
          const Level level = level_of(machine.spec, row.cost.bytes);
          DeviceSpec spec = machine.spec;
          spec.figures["bandwidth_bytes_per_s"].value = level.bandwidth_bytes_per_s;
          row.predicted = value_or_fail(predict(row.cost, spec));
          row.bound_s = row.predicted.time_s;
          row.level = level.name;
          row.wall_measured = to_string(MeasuredWall::ambiguous);
          row.wall_reason = "only one size of work was timed";
          rows.push_back(std::move(row));
        }
      }
    }
  }
  if (rows.empty()) {
    fail(Exit::bad_input, "bench gemm", refused.front().at("reason").get<std::string>());
  }
  finish(rows, refused, machine, common, baseline, context);
}

void add_bench_attention(CLI::App& bench, Pass pass, Context& context) {
  auto axes = std::make_shared<AttentionAxes>();
  auto common = std::make_shared<Common>();
  axes->pass = pass;
  CLI::App* command = nullptr;
  if (pass == Pass::forward) {
    command = bench.add_subcommand("attention", "forward attention, every pipeline");
    command->footer(examples(
        {{"rafter bench attention --seqlen 512,1k,2k --head-dim 64,128", "a grid, all pipelines"},
         {"rafter bench attention --causal 0,1 --dtype f32,bf16 --out r.jsonl", "keep records"},
         {"rafter bench attention --baseline r.jsonl", "exit 1 when a row became slower"},
         {"rafter bench attention --device cuda --heads-q 16 --head-dim 128 --seqlen 512,4k,32k",
          "on the GPU, in bf16, each call alone on a cold L2"}}));
  } else {
    axes->pipelines = {Pipeline::unfused, Pipeline::fused};
    command = bench.add_subcommand("backward", "the gradients: scores recomputed and stored");
    command->footer(
        examples({{"rafter bench backward --seqlen 1k,2k,4k --head-dim 64,128",
                   "recomputed (fused) beside stored (unfused), with their workspaces"},
                  {"rafter bench backward --causal 1 --kernel backward_simd_avx2", "one kernel"}}));
  }
  add_lengths(*command, "--seqlen", axes->seqlens, "tokens of queries and keys", {1, 1 << 20});
  add_lengths(*command, "--head-dim", axes->head_dims, "head_dim", {1, 256});
  add_lengths(*command, "--heads-q", axes->heads_q, "query heads", {1, 4096});
  add_lengths(*command, "--heads-kv", axes->heads_kv, "key and value heads (0: as --heads-q)",
              {0, 4096});
  add_lengths(*command, "--batch", axes->batches, "sequences", {1, 65536});
  add_switches(*command, "--causal", axes->causal, "mask what comes later");
  add_pipelines(*command, axes->pipelines, "which pipelines");
  CLI::Option* kernel =
      add_text(*command, "--kernel", axes->kernel, "this kernel alone (rafter kernels)", "NAME");
  kernel->excludes(command->get_option("--pipeline"));
  add_switch(*command, "--evidence", axes->evidence,
             "also time twice the work and added FLOPs, to name the wall");
  add_common(*command, *common, context);
  command->callback([axes, common, &context] {
    bench_grid(
        axes->verb(), *axes, *common, {.pass = axes->pass},
        [&axes](const AttentionProblem& p, const CaseResult& r) { return row_of(p, r, *axes); },
        context);
  });
}

void add_bench_decode(CLI::App& bench, Context& context) {
  auto axes = std::make_shared<DecodeAxes>();
  auto common = std::make_shared<Common>();
  common->dtypes = {DType::bf16};
  CLI::App* command = bench.add_subcommand("decode", "few new tokens against a cache");
  command->footer(examples(
      {{"rafter bench decode", "32 query heads on 8 KV heads, 8k keys, one sequence and eight"},
       {"rafter bench decode --kv-dtype bf16,int8 --batch 1 --page-size 0,16", "caches compared"},
       {"rafter bench decode --pipeline split-kv,fused,unfused", "against the other pipelines"},
       {"rafter bench decode --baseline r.jsonl", "exit 1 when a row became slower"}}));
  add_lengths(*command, "--seqlen-kv", axes->seqlens_kv, "keys in the cache", {1, 1 << 22});
  add_lengths(*command, "--seqlen-q", axes->seqlens_q,
              "new tokens of each sequence; causal among themselves", {1, 4096});
  add_lengths(*command, "--head-dim", axes->head_dims, "head_dim", {1, 256});
  add_lengths(*command, "--heads-q", axes->heads_q, "query heads", {1, 4096});
  add_lengths(*command, "--heads-kv", axes->heads_kv, "key and value heads (0: as --heads-q)",
              {0, 4096});
  add_lengths(*command, "--batch", axes->batches, "sequences", {1, 65536});
  add_dtypes(*command, "--kv-dtype", axes->kv_dtypes, "of the cache (default: as --dtype)");
  add_lengths(*command, "--page-size", axes->page_sizes, "keys per page; 0: not paged",
              {0, 1 << 22});
  add_length(*command, "--splits", axes->splits, "parts of the keys (0: the kernel's own)",
             {0, 1 << 20});
  add_pipelines(*command, axes->pipelines, "which pipelines");
  CLI::Option* kernel =
      add_text(*command, "--kernel", axes->kernel, "this kernel alone (rafter kernels)", "NAME");
  kernel->excludes(command->get_option("--pipeline"));
  add_switch(*command, "--evidence", axes->evidence,
             "also time twice the work and added FLOPs, to name the wall");
  add_common(*command, *common, context);
  command->callback([axes, common, &context] {
    bench_grid("decode", *axes, *common, {.splits = axes->splits}, decode_row, context);
  });
}

void add_bench_gemm(CLI::App& bench, Context& context) {
  auto axes = std::make_shared<GemmAxes>();
  auto common = std::make_shared<Common>();
  CLI::App* command = bench.add_subcommand("gemm", "the library's matrix product");
  command->footer(
      examples({{"rafter bench gemm --m 512,1k,2k", "square products"},
                {"rafter bench gemm --m 64 --n 4k --k 4k --dtype f32,int8", "any shape"}}));
  add_lengths(*command, "--m", axes->m, "rows of A and C", {1, 1 << 16});
  add_lengths(*command, "--n", axes->n, "columns of B and C (default: as --m)", {1, 1 << 16});
  add_lengths(*command, "--k", axes->k, "columns of A, rows of B (default: as --m)", {1, 1 << 16});
  add_common(*command, *common, context);
  command->callback([axes, common, &context] { bench_gemm(*axes, *common, context); });
}

}  // namespace

void add_bench(CLI::App& app, Context& context) {
  CLI::App* bench =
      app.add_subcommand("bench", "run kernels over a grid of shapes, predicted beside measured");
  bench->footer(examples({{"rafter bench attention", "a small grid"},
                          {"rafter bench decode", "one token against a cache"},
                          {"rafter bench gemm", "the library's matrix product"}}));
  add_bench_attention(*bench, Pass::forward, context);
  add_bench_attention(*bench, Pass::backward, context);
  add_bench_decode(*bench, context);
  add_bench_gemm(*bench, context);
  for (const char* verb : {"model"}) {
    CLI::App* command = bench->add_subcommand(verb, "not in this build yet");
    command->group("");  // refused by name, not offered by --help
    command->allow_extras();
    command->callback([verb] {
      fail(Exit::bad_input, fmt::format("bench {}", verb),
           "not in this build yet; attention, backward, decode, gemm allowed");
    });
  }
}

}  // namespace rafter::cli
