// rafter check: every kernel of this machine against float64, on the table of cases.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "cli/args.h"
#include "cli/case_backward.h"
#include "cli/case_run.h"
#include "cli/cases.h"
#include "cli/kernel_flag.h"
#include "cli/output.h"
#include "cli/resident.h"
#include "rafter/kernels.h"

namespace rafter::cli {
namespace {

struct CheckFlags {
  std::string kernel, only;
  std::string device;  // "": every device that is here
};

struct Tally {
  std::int64_t passed = 0, failed = 0, refused = 0;
};

/// One case of one kernel that did not pass, with the reason.
struct Note {
  std::string kernel, name, dtype, reason;
};

struct Outcome {
  std::map<std::string, Tally> by_kernel;
  std::vector<Note> failures, refusals;
};

/// Why a run did not pass. The strides that a GPU kernel cannot read are only known when it runs.
bool is_refusal(const Status& status, const Device& device) {
  return status.code() == StatusCode::kUnsupported ||
         (device.kind == Device::Kind::cuda && status.code() == StatusCode::kInvalidArgument);
}

/// What a kernel gives must be near what is expected, and the same bits again with one thread and
/// other garbage around the data. `run` runs it, of either pass.
template <typename Expected, typename Run>
std::string check_one(const AttentionCase& c, const Expected& expected, const KernelInfo& kernel,
                      bool& refused, Run run) {
  const Device device{kernel.device, 0};
  const auto output = run(CaseRun{.kernel = kernel.name, .device = device});
  if (!output) {
    refused = is_refusal(output.status(), device);
    return output.status().message();
  }
  if (std::string worst = difference(c, *output, expected); !worst.empty()) {
    return worst;
  }
  const auto again =
      run(CaseRun{.kernel = kernel.name, .threads = 1, .poison = 0, .device = device});
  if (!again) {
    return again.status().message();
  }
  const std::string bits = bit_difference(c, *output, *again);
  return bits.empty() ? bits
                      : "one thread, and zeros for NaN around the data, change the bits: " + bits;
}

/// Every kernel of a pass on a case.
template <typename Expected, typename Run>
void check_kernels(const AttentionCase& c, DType dtype, Pass pass, const Expected& expected,
                   const std::vector<KernelInfo>& kernels, Outcome& outcome, Run run) {
  for (const KernelInfo& kernel : kernels) {
    if (kernel.pass != pass) {
      continue;
    }
    bool refused = false;
    const std::string problem = check_one(c, expected, kernel, refused, run);
    Tally& tally = outcome.by_kernel[kernel.name];
    if (problem.empty()) {
      ++tally.passed;
      continue;
    }
    ++(refused ? tally.refused : tally.failed);
    (refused ? outcome.refusals : outcome.failures)
        .push_back({kernel.name, c.name, to_string(dtype), problem});
  }
}

bool any_of(const std::vector<KernelInfo>& kernels, Pass pass) {
  return std::any_of(kernels.begin(), kernels.end(),
                     [pass](const KernelInfo& kernel) { return kernel.pass == pass; });
}

void check_case(const AttentionCase& c, DType dtype, const std::vector<KernelInfo>& kernels,
                Outcome& outcome) {
  if (any_of(kernels, Pass::forward)) {
    const CaseValues values = make_values(c, dtype);
    const Expectation expected = value_or_fail(expectation_of(c, dtype, values));
    check_kernels(c, dtype, Pass::forward, expected, kernels, outcome,
                  [&](const CaseRun& run) { return run_case(c, dtype, values, run); });
  }
  if (any_of(kernels, Pass::backward) && runs_backward(c)) {
    const BackwardValues values = value_or_fail(make_backward_values(c, dtype));
    const GradientExpectation expected = value_or_fail(expectation_of(c, dtype, values));
    check_kernels(c, dtype, Pass::backward, expected, kernels, outcome,
                  [&](const CaseRun& run) { return run_backward(c, dtype, values, run); });
  }
}

Json notes_json(const std::vector<Note>& notes) {
  Json rows = Json::array();
  for (const Note& note : notes) {
    rows.push_back({{"kernel", note.kernel},
                    {"case", note.name},
                    {"dtype", note.dtype},
                    {"reason", note.reason}});
  }
  return rows;
}

void print(const std::vector<KernelInfo>& kernels, const std::vector<std::string>& absent,
           const Outcome& outcome, Context& context) {
  Tally sum;
  Json rows = Json::array();
  for (const KernelInfo& kernel : kernels) {
    const Tally& tally = outcome.by_kernel.at(kernel.name);
    sum.passed += tally.passed;
    sum.failed += tally.failed;
    sum.refused += tally.refused;
    rows.push_back({{"kernel", kernel.name},
                    {"pass", to_string(kernel.pass)},
                    {"pipeline", to_string(kernel.pipeline)},
                    {"instruction_set", kernel.instruction_set},
                    {"passed", tally.passed},
                    {"failed", tally.failed},
                    {"refused", tally.refused}});
  }
  Document document;
  document.set("kernels", std::move(rows)).rows("kernels").label("kernels", "Kernels");
  document.set("passed", Json(sum.passed)).set("failed", Json(sum.failed));
  document.set("refused", Json(sum.refused));
  document.set("failures", notes_json(outcome.failures));
  document.set("refusals", notes_json(outcome.refusals));
  document.hide("failures").hide("refusals");  // the table says the former in sentences
  for (const Note& note : outcome.failures) {
    document.remark(
        fmt::format("FAILED {} {} {}: {}", note.kernel, note.name, note.dtype, note.reason));
  }
  for (const std::string& line : absent) {
    document.remark(line);
  }
  document.remark(fmt::format("{} passed, {} failed", sum.passed, sum.failed));
  document.print(context);
  context.exit = sum.failed == 0 ? Exit::done : Exit::check_failed;
}

std::vector<AttentionCase> chosen_cases(const std::string& only) {
  std::vector<AttentionCase> cases;
  for (const AttentionCase& c : attention_cases()) {
    if (only.empty() || c.name == only) {
      cases.push_back(c);
    }
  }
  if (cases.empty()) {
    std::vector<std::string> names;
    for (const AttentionCase& c : attention_cases()) {
      names.push_back(c.name);
    }
    fail_flag("--case", only, fmt::format("{}", fmt::join(names, ", ")));
  }
  return cases;
}

/// A contradiction is one on every machine, whatever it lacks.
void require_kernel_of_device(const CheckFlags& flags) {
  for (const KernelInfo& kernel : list_kernels()) {
    if (kernel.name == flags.kernel && !flags.device.empty() &&
        flags.device != to_string(kernel.device)) {
      fail_flag("--kernel", flags.kernel, "a kernel of --device " + flags.device);
    }
  }
}

void check_all(const CheckFlags& flags, Context& context) {
  require_kernel_of_device(flags);
  if (flags.device == "cuda") {
    require_cuda();
  }
  require_kernel(flags.kernel);
  const std::vector<AttentionCase> cases = chosen_cases(flags.only);
  std::vector<KernelInfo> kernels;
  std::vector<std::string> absent;
  for (KernelInfo& kernel : list_kernels()) {
    if (!flags.kernel.empty() && kernel.name != flags.kernel) {
      continue;
    }
    if (!flags.device.empty() && flags.device != to_string(kernel.device)) {
      continue;
    }
    if (kernel.machine_has) {
      kernels.push_back(std::move(kernel));
    } else {
      absent.push_back(fmt::format("not run: {}: {}", kernel.name, kernel.machine_reason));
    }
  }
  if (!any_of(kernels, Pass::forward) && std::none_of(cases.begin(), cases.end(), runs_backward)) {
    fail_flag("--case", flags.only, "a case that is run backward: small, not paged, without int8");
  }
  Outcome outcome;
  for (const KernelInfo& kernel : kernels) {
    outcome.by_kernel[kernel.name] = {};
  }
  const bool progress = isatty(STDERR_FILENO) == 1;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (progress) {
      fmt::print(stderr, "\r\x1b[Kcheck {}/{} {}", i + 1, cases.size(), cases[i].name);
      std::fflush(stderr);
    }
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      check_case(cases[i], dtype, kernels, outcome);
    }
  }
  if (progress) {
    fmt::print(stderr, "\r\x1b[K");
  }
  print(kernels, absent, outcome, context);
}

}  // namespace

void add_check(CLI::App& app, Context& context) {
  auto flags = std::make_shared<CheckFlags>();
  CLI::App* command =
      app.add_subcommand("check", "self-test of this build on this machine against float64");
  command->footer(examples({
      {"rafter check", "every kernel of this machine on every case; exit 1 when one fails"},
      {"rafter check --device cuda", "those of the GPU; exit 77 where there is none"},
      {"rafter check --kernel forward_simd_avx2 --format json", "one kernel, for a program"},
      {"rafter check --kernel backward_sm90 --device cuda", "the gradients, on a GPU"},
  }));
  add_kernel(*command, flags->kernel, "only this kernel (rafter kernels lists them)");
  add_choice(*command, "--device", flags->device, {"cpu", "cuda"},
             "only the kernels of this device (default: of every device that is here)");
  add_text(*command, "--case", flags->only, "only this case", "NAME");
  add_format(*command, context);
  command->callback([flags, &context] { check_all(*flags, context); });
}

}  // namespace rafter::cli
