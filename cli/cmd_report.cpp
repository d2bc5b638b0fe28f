// rafter report: the main job. Ceilings of this machine, the three pipelines over a range of
// lengths or on the user's tensors, predicted beside measured, on one page.
#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>

#include "cli/args.h"
#include "cli/command.h"
#include "cli/files.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/qkv.h"
#include "cli/report_data.h"
#include "cli/report_model.h"

namespace rafter::cli {
namespace {

constexpr Pipeline kPipelines[] = {Pipeline::unfused, Pipeline::half_fused, Pipeline::fused};
/// What is run: on a GPU the dtypes of its matrix units that kernels take.
std::array<DType, 2> dtypes_of(const Device& device) {
  return {device.kind == Device::Kind::cuda ? DType::f16 : DType::f32, DType::bf16};
}

struct Options {
  std::string out = "report.html";
  std::string model;
  std::optional<std::int64_t> seqlen;
  std::int64_t batch = 1;
  QkvFlags qkv;
  std::string device;
  bool quick = false;
  bool probe = false;
  std::int64_t threads = 0;
};

/// The user's tensors and what they are called.
struct UserData {
  Qkv data;
  std::string name;
};

std::optional<UserData> read_user_data(const QkvFlags& flags) {
  if (flags.q.empty() && flags.k.empty() && flags.v.empty() && flags.qkv.empty() &&
      flags.prefix.empty()) {
    return std::nullopt;
  }
  // In f32, which holds every value of the others; rounded to each dtype that is run.
  UserData user{read_qkv(flags, DType::f32, QkvShape::dense), {}};
  const std::string& path = flags.qkv.empty() ? flags.q : flags.qkv;
  user.name = one_line(std::filesystem::path(path).filename().string());
  for (const Array* array : {&user.data.q, &user.data.k}) {
    if (array->shape[0] < 1 || array->shape[1] < 1) {
      fail_flag(flags.qkv.empty() ? "--q, --k, --v" : "--qkv", shape_text(array->shape),
                "a batch and a seqlen of 1 or more");
    }
  }
  return user;
}

/// One length to run, and whether the user's tensors reach that far.
struct Length {
  std::int64_t q = 0, kv = 0;
  bool of_user = false;
};

std::vector<Length> lengths_of(const AttentionProblem& shape, bool has_user, bool quick,
                               const Device& device) {
  std::vector<Length> lengths;
  const bool gpu = device.kind == Device::Kind::cuda;
  const std::int64_t longest = (quick ? 1024 : 4096) * (gpu ? 8 : 1);
  if (!has_user) {
    for (std::int64_t s = gpu ? 512 : 256; s <= longest; s *= 2) {
      lengths.push_back({s, s, false});
    }
    return lengths;
  }
  for (std::int64_t part : {4, 2, 1}) {
    if (part == 1 || shape.seqlen_q / part >= 16) {
      lengths.push_back(
          {shape.seqlen_q / part, std::max<std::int64_t>(1, shape.seqlen_kv / part), true});
    }
  }
  // Beyond the file, random data of the same shape, while a run stays under a second or so.
  const double most_flops = gpu ? 40e12 : 40e9;
  if (shape.seqlen_q == shape.seqlen_kv) {
    for (std::int64_t s = 2 * shape.seqlen_q; s <= longest; s *= 2) {
      AttentionProblem p = shape;
      p.seqlen_q = p.seqlen_kv = s;
      const Result<Cost> cost = attention_cost(p, Pipeline::fused);
      if (cost && cost->flops <= most_flops) {
        lengths.push_back({s, s, false});
      }
    }
  }
  return lengths;
}

/// On a GPU a call is 20 µs to 100 ms, and each sample waits for a flush of the L2: 0.02 s of calls
/// are a thousand samples of the shortest, and the longest are repeated a few times.
StopRule rule_of(bool quick, const Device& device) {
  StopRule rule;
  const bool gpu = device.kind == Device::Kind::cuda;
  rule.min_time_s = gpu ? (quick ? 0.01 : 0.02) : (quick ? 0.03 : 0.12);
  rule.max_time_s = gpu ? (quick ? 0.05 : 0.15) : (quick ? 0.12 : 0.45);
  return rule;
}

void time_points(const Options& options, const UserData* user, ReportContent& content,
                 Progress& progress) {
  const Device& device = content.machine.device;
  const std::vector<Length> lengths =
      lengths_of(content.shape, user != nullptr, options.quick, device);
  PlanOptions how;
  how.threads = static_cast<int>(options.threads);
  how.device_spec = &content.machine.spec;
  for (DType dtype : dtypes_of(device)) {
    for (const Length& length : lengths) {
      progress.step(fmt::format("{}, length {}", to_string(dtype), length.q));
      AttentionProblem problem = content.shape;
      problem.dtype = dtype;
      problem.seqlen_q = length.q;
      problem.seqlen_kv = length.kv;
      std::optional<Qkv> data;  // on a GPU random data are made there
      if (length.of_user) {
        data = value_or_fail(excerpt(user->data, length.q, length.kv, 1, dtype));
      } else if (device.kind == Device::Kind::cpu) {
        data = value_or_fail(random_data(problem));
      }
      std::vector<TimedCase> cases;
      for (Pipeline pipeline : kPipelines) {
        how.pipeline = pipeline;
        cases.push_back({problem, how, data});
      }
      const std::vector<CaseResult> results = value_or_fail(
          time_cases(cases, content.machine.spec, {rule_of(options.quick, device), true, device}));
      for (const CaseResult& result : results) {
        content.points.push_back({problem, length.of_user ? user->name : "random", result});
      }
    }
  }
}

/// Errors of o against the reference's, and the coordinate of the largest.
void compare_outputs(const Array& o, const Array& reference, ReportAccuracy& row) {
  const auto* ours = reinterpret_cast<const float*>(o.data.get());
  const auto* theirs = reinterpret_cast<const float*>(reference.data.get());
  double squares = 0, errors = 0;
  std::int64_t worst = 0;
  for (std::int64_t i = 0; i < reference.elements(); ++i) {
    const double error = std::abs(static_cast<double>(ours[i]) - static_cast<double>(theirs[i]));
    // A NaN on one side only is an error without bound; on both it agrees.
    const double counted = std::isnan(ours[i]) != std::isnan(theirs[i]) ? HUGE_VAL
                           : std::isnan(error)                          ? 0
                                                                        : error;
    if (counted > row.max_abs_error) {
      row.max_abs_error = counted;
      worst = i;
    }
    errors += counted * counted;
    squares += std::isfinite(theirs[i]) ? static_cast<double>(theirs[i]) * theirs[i] : 0;
  }
  row.relative_rms_error = squares > 0 ? std::sqrt(errors / squares) : 0;
  const auto& shape = reference.shape;
  row.at = {worst / (shape[1] * shape[2] * shape[3]), worst / (shape[2] * shape[3]) % shape[1],
            worst / shape[3] % shape[2], worst % shape[3]};
}

struct Norms {
  double largest = 0;      // of the values
  double largest_row = 0;  // Euclidean norm of a row of head_dim
};
Norms norms_of(const Array& values) {
  const auto* at = reinterpret_cast<const float*>(values.data.get());
  const std::int64_t dim = values.shape[3];
  Norms norms;
  for (std::int64_t row = 0; row < values.elements() / dim; ++row) {
    double squares = 0;
    for (std::int64_t c = 0; c < dim; ++c) {
      const double value = at[row * dim + c];
      norms.largest = std::max(norms.largest, std::abs(value));
      squares += value * value;
    }
    norms.largest_row = std::max(norms.largest_row, std::sqrt(squares));
  }
  return norms;
}

/// How far the unfused pipeline may be from exact arithmetic by rounding alone. Its scores land in
/// the dtype (unit roundoff u) after a product of head_dim terms in f32 (ε = 2⁻²⁴), so a score is
/// off by at most (u + head_dim·ε)·|s|, with |s| ≤ softmax_scale·max‖q‖·max‖k‖ (Cauchy-Schwarz);
/// that shifts numerator and denominator of the softmax. Its probabilities land in the dtype, and a
/// sum of seqlen_kv terms in f32 follows. To first order, times the largest |v|.
double rounding_bound(const Qkv& data, DType dtype) {
  const Norms q = norms_of(value_or_fail(convert(data.q, DType::f32, "q")));
  const Norms k = norms_of(value_or_fail(convert(data.k, DType::f32, "k")));
  const Norms v = norms_of(value_or_fail(convert(data.v, DType::f32, "v")));
  const auto head_dim = static_cast<double>(data.q.shape[3]);
  const auto keys = static_cast<double>(data.k.shape[1]);
  const double epsilon = unit_roundoff(DType::f32), u = unit_roundoff(dtype);
  const double score = q.largest_row * k.largest_row / std::sqrt(head_dim);
  const double shift = std::expm1(2 * (u + head_dim * epsilon) * score);
  return v.largest * (shift + 2 * u + keys * epsilon);
}

Result<Array> output_of(const AttentionProblem& problem, const PlanOptions& options,
                        const Qkv& data, const Device& device, std::string* kernel) {
  Result<PreparedAttention> one =
      PreparedAttention::make(problem, options, data, device, DType::f32);
  if (!one) {
    return one.status();
  }
  if (Status status = one->run(); !status) {  // fetching waits for the default stream
    return status;
  }
  *kernel = one->plan().kernel();
  return one->output();
}

void check_accuracy(const Options& options, const UserData* user, ReportContent& content,
                    Progress& progress) {
  AttentionProblem problem = content.shape;
  if (user == nullptr) {
    problem.seqlen_q = problem.seqlen_kv = options.quick ? 256 : 512;
  }
  // The reference is plain loops in float64: keep it near a second.
  while (2.0 * static_cast<double>(problem.batch * problem.heads_q * problem.seqlen_q) *
                 static_cast<double>(problem.seqlen_kv * problem.head_dim) >
             2e9 &&
         problem.seqlen_q > 16) {
    problem.seqlen_q /= 2;
  }
  content.accuracy_note = fmt::format(
      "On {}: {} queries, {} keys, batch {}, {} heads, head_dim {}; inputs rounded to the dtype "
      "for "
      "all alike, o written in f32. Limit of the unfused pipeline: what rounding its scores, "
      "probabilities and sums may do to these inputs; of the others: 1.5 times the unfused "
      "pipeline's own error, and 2 ulp of f32.",
      user != nullptr ? user->name : "random data", problem.seqlen_q, problem.seqlen_kv,
      problem.batch, problem.heads_q, problem.head_dim);
  const Device& device = content.machine.device;
  for (DType dtype : dtypes_of(device)) {
    progress.step(fmt::format("{} against float64", to_string(dtype)));
    problem.dtype = dtype;
    const Qkv data = value_or_fail(
        user != nullptr ? excerpt(user->data, problem.seqlen_q, problem.seqlen_kv, 1, dtype)
                        : random_data(problem));
    PlanOptions how;
    how.threads = static_cast<int>(options.threads);
    how.kernel = "forward_reference";
    std::string kernel;
    const Array reference = value_or_fail(output_of(problem, how, data, Device::cpu(), &kernel));
    const double bound = rounding_bound(data, dtype);
    const double ulps =
        2 * std::exp2(-23) * norms_of(value_or_fail(convert(data.v, DType::f32, "v"))).largest;
    how.kernel.clear();
    double unfused_error = 0;
    for (Pipeline pipeline : kPipelines) {
      how.pipeline = pipeline;
      ReportAccuracy row;
      row.pipeline = pipeline;
      row.dtype = dtype;
      Result<Array> o = output_of(problem, how, data, device, &row.kernel);
      if (!o && o.status().code() == StatusCode::kUnsupported) {
        continue;
      }
      compare_outputs(value_or_fail(std::move(o)), reference, row);
      row.limit = pipeline == Pipeline::unfused ? bound : 1.5 * unfused_error + ulps;
      unfused_error = pipeline == Pipeline::unfused ? row.max_abs_error : unfused_error;
      content.accuracy.push_back(std::move(row));
    }
  }
}

Json table_rows(const ReportContent& content) {
  Json rows = Json::array();
  for (const ReportPoint& point : content.points) {
    const CaseResult& r = point.result;
    if (!r.refusal.empty()) {
      continue;
    }
    rows.push_back(Json{{"dtype", to_string(point.problem.dtype)},
                        {"seqlen", point.problem.seqlen_q},
                        {"pipeline", to_string(r.pipeline)},
                        {"predicted_time_s", number(r.at_level.time_s)},
                        {"time_s", number(r.median_s())},
                        {"flop_per_s", number(r.flop_per_s())},
                        {"of bound", fmt::format("{:.0f}%", 100 * r.share_of_bound())},
                        {"wall", r.at_level.ambiguous ? "ambiguous" : to_string(r.at_level.wall)},
                        {"measured", to_string(r.measured.wall)},
                        {"from", r.level.name},
                        {"data", point.data}});
  }
  return rows;
}

void print(const ReportContent& content, const Json& report, const std::string& path,
           const Context& context) {
  if (context.format == Format::json) {
    print_json(report, path, context);
    return;
  }
  Document document;
  document.headline(fmt::format("{}; ceilings from {}", content.machine.spec.title,
                                one_line(content.machine.source)));
  if (context.format == Format::table) {
    for (const auto& row : report.at("ceilings")) {
      const std::string unit = row.at("unit").get<std::string>();
      if (row.at("samples").get<std::int64_t>() > 0) {
        document.headline(fmt::format(
            "  {:<28} {:>14}{}", row.at("label").get<std::string>(),
            with_si_prefix(row.at("value").get<double>(), unit),
            row.at("noisy").get<bool>()
                ? fmt::format("  (noisy: spread {:.0f}%)", 100 * row.at("spread").get<double>())
                : ""));
      }
    }
  }
  document.set("points", table_rows(content)).rows("points");
  document.label("points", "Predicted beside measured");
  for (const auto& verdict : report.at("verdicts")) {
    document.remark(fmt::format("{}: {}", verdict.at("pipeline").get<std::string>(),
                                verdict.at("sentence").get<std::string>()));
  }
  for (const ReportAccuracy& row : content.accuracy) {
    document.remark(fmt::format("{} in {} is within {:.1e} of float64 (limit {:.1e}{})",
                                to_string(row.pipeline), to_string(row.dtype), row.max_abs_error,
                                row.limit, row.ok() ? "" : ": OVER IT"));
  }
  for (const auto& alert : report.at("alerts")) {
    document.remark(fmt::format("Note: {}", alert.get<std::string>()));
  }
  document.remark(fmt::format("The page: {}", one_line(path)));
  document.print(context);
}

void report(const Options& options, Context& context) {
  if (!options.model.empty()) {
    report_model({.model = options.model,
                  .seqlen = options.seqlen,
                  .batch = options.batch,
                  .out = options.out,
                  .device = options.device,
                  .quick = options.quick,
                  .probe = options.probe},
                 context);
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  // Everything that can be refused is refused before the long work.
  const std::optional<UserData> user = read_user_data(options.qkv);
  Result<OutputFile> file = OutputFile::create(options.out);
  check_page(options.out, file.status());
  ReportContent content;
  content.data_source = "random q, k, v";
  if (user) {
    content.shape = dense_problem(user->data);
    content.data_source =
        fmt::format("q, k, v of {} {}", user->name, shape_text(user->data.q.shape));
    // What the kernels cannot take is refused here, by the plan's own words.
    value_or_fail(plan(content.shape, Device::cpu(), {}));
  }
  content.machine =
      this_machine(options.device, static_cast<int>(options.threads), options.probe, "report");
  if (!user) {
    const bool gpu = content.machine.device.kind == Device::Kind::cuda;
    content.shape.heads_q = content.shape.heads_kv = gpu ? 16 : 4;
    content.shape.head_dim = content.shape.head_dim_v = gpu ? 128 : 64;
  }
  {
    Progress progress("report");
    check_accuracy(options, user ? &*user : nullptr, content, progress);
    time_points(options, user ? &*user : nullptr, content, progress);
  }
  content.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const Json json = report_json(content);
  const std::string page = report_html(json);
  check_page(options.out, file->write(page.data(), page.size()));
  check_page(options.out, file->commit());
  print(content, json, options.out, context);
  for (const ReportAccuracy& row : content.accuracy) {
    if (!row.ok()) {
      context.exit = Exit::check_failed;
    }
  }
}

}  // namespace

void add_report(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "report", "probe this machine, run the three pipelines, write one page with rooflines");
  command->footer(examples(
      {{"rafter report", "report.html, on random data, in under two minutes"},
       {"rafter report --qkv qkv.safetensors", "on your own q, k, v"},
       {"rafter report --device cuda", "the same of the GPU"},
       {"rafter report --model reference-60m", "a small model on this CPU, operation by operation"},
       {"rafter report --model reference-7b --device cuda", "the 7B reference on the GPU"},
       {"rafter report --quick --out /tmp/r.html", "fewer lengths, shorter samples"}}));
  add_text(*command, "--out", options->out, "where the page goes", "FILE.html");
  CLI::Option* model =
      add_text(*command, "--model", options->model,
               "a page about a whole model instead: a built-in one or a config.json, with random "
               "weights, or a Hugging Face folder",
               "NAME|FILE|FOLDER");
  add_length(*command, "--seqlen", options->seqlen,
             "with --model: tokens of the prompt and of the context (default: 4096 on a GPU, 512)",
             {1, 1 << 20})
      ->needs(model);
  add_length(*command, "--batch", options->batch, "with --model: sequences", {1, 65536})
      ->needs(model);
  add_qkv(*command, options->qkv);
  add_switch(*command, "--quick", options->quick, "lengths up to 1024, shorter samples");
  add_switch(*command, "--probe", options->probe,
             "probe anew, even when this machine's probe file is a day old or less");
  add_text(*command, "--device", options->device,
           "cpu (the default) or cuda with its probe file, else a quick probe; or such a file",
           "cpu|cuda|FILE.json");
  model->excludes(
      add_length(*command, "--threads", options->threads, "threads (0: all cores)", {0, 4096}));
  for (const char* const tensors : {"--q", "--k", "--v", "--qkv"}) {
    model->excludes(command->get_option(tensors));
  }
  add_format(*command, context);
  command->callback([options, &context] { report(*options, context); });
}

}  // namespace rafter::cli
