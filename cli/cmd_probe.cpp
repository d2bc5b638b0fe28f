// rafter probe: measures this machine's ceilings and keeps them as a device file.
#include <fmt/format.h>

#include <memory>

#include "cli/args.h"
#include "cli/command.h"
#include "cli/output.h"
#include "cli/probe_file.h"
#include "cli/progress.h"
#include "rafter/measure.h"

namespace rafter::cli {
namespace {

struct Options {
  std::string device = "cpu";
  std::string out;
  bool quick = false;
  bool force = false;
  std::int64_t threads = 0;
};

Json sweep_rows(const std::vector<SweepPoint>& sweep) {
  Json rows = Json::array();
  for (const SweepPoint& point : sweep) {
    Json row = Json::object();
    row["working_set_per_thread_bytes"] = number(point.bytes_per_thread);
    const std::pair<const char*, const Statistics*> kinds[] = {
        {"read", &point.read}, {"write", &point.write}, {"copy", &point.copy}};
    for (const auto& [kind, stats] : kinds) {
      row[fmt::format("{}_bytes_per_s", kind)] = number(stats->p90);
      row[fmt::format("{}_low_bytes_per_s", kind)] = number(stats->p10);
      row[fmt::format("{}_samples", kind)] = stats->n;
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

void probe(const Options& options, Context& context) {
  const bool cuda = options.device == "cuda";
  if (const std::string reason = cuda ? why_no_cuda(0) : ""; !reason.empty()) {
    fail(Exit::no_hardware, "--device cuda", reason);
  }
  if (cuda && options.threads > 0) {
    fail_flag("--threads", std::to_string(options.threads), "0 with --device cuda");
  }
  const Device device = cuda ? Device::cuda(0) : Device::cpu();
  const std::string path = options.out.empty() ? probe_path(device.kind) : options.out;
  OutputFile file = open_probe_file(path);
  ProbeOptions how;
  how.quick = options.quick;
  how.threads = static_cast<int>(options.threads);
  Result<Probe> measured = [&] {
    Progress progress("probe");
    how.progress = [&progress](std::string_view step) { progress.step(step); };
    return cuda ? probe_cuda(device, how) : probe_cpu(how);
  }();
  const Probe result = value_or_fail(std::move(measured));
  const bool trusted = result.distrust.empty();
  const bool keep = trusted || options.force;
  if (keep) {
    const std::string json = to_json(result.spec);
    check(file.write(json.data(), json.size()));
    check(file.commit());
  }

  Document document;
  document.headline(result.spec.title);
  document.set("device", result.spec.name).set("title", result.spec.title).hide("title");
  document.hide("device").set("trusted", trusted).hide("trusted");
  if (!trusted) {
    document.set("trusted_reason", result.distrust).hide("trusted_reason");
  }
  document.set("figures", figure_rows(result.spec, context.format)).rows("figures");
  document.label("figures", "Ceilings");
  Json missing = Json::array();
  for (const MissingFigure& figure : result.missing) {
    missing.push_back(Json{{"figure", figure.key}, {"reason", figure.reason}});
    document.remark(fmt::format("Missing: {} ({})", figure.key, figure.reason));
  }
  document.set("missing", std::move(missing)).hide("missing");
  document.set("noisy", Json(result.noisy)).hide("noisy");
  if (!result.noisy.empty()) {
    document.remark(fmt::format("Noisy ({:.0f}% and more between the 10th and 90th percentile): {}",
                                100 * kNoisySpread, fmt::join(result.noisy, ", ")));
  }
  Json notes = Json::object();
  for (const auto& [key, text] : result.spec.notes) {
    notes[key] = text;
  }
  document.set("notes", std::move(notes)).hide("notes");
  if (context.format == Format::json) {
    document.set("sweep", sweep_rows(result.sweep));
  }
  document.set("file", keep ? Json(path) : Json(nullptr)).hide("file");
  if (keep) {
    document.remark(fmt::format("Written to {}", one_line(path)));
  } else {
    document.set("file_reason", "not written: the measurement cannot be trusted")
        .hide("file_reason");
  }
  document.print(context);
  if (!keep) {
    fail(Exit::untrusted, "probe",
         fmt::format("not written: {}; repeat on a quieter machine, or --force to keep it",
                     result.distrust));
  }
}

}  // namespace

void add_probe(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "probe", "measure this machine's ceilings: bandwidth per level, matmul per dtype, launch");
  command->footer(examples(
      {{"rafter probe", "measure (about 40 s), print, and keep for explain, bench and report"},
       {"rafter probe --quick --out cpu.json", "about 8 s, to a file of your own"},
       {"rafter probe --device cuda", "the GPU: bandwidth, products per dtype, launches"},
       {"rafter explain attention --seqlen 4k --device cpu.json", "use such a file"}}));
  add_choice(*command, "--device", options->device, {"cpu", "cuda"}, "what to measure");
  add_text(*command, "--out", options->out,
           "where the device file goes (default: this machine's own, which other commands find)",
           "FILE");
  add_switch(*command, "--quick", options->quick, "shorter samples and fewer sizes");
  add_length(*command, "--threads", options->threads, "threads (0: all cores)", {0, 4096});
  add_switch(*command, "--force", options->force,
             "keep the file even when the measurement cannot be trusted (else exit 3)");
  add_format(*command, context);
  command->callback([options, &context] { probe(*options, context); });
}

}  // namespace rafter::cli
