#include "dispatch/choose.h"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "dispatch/isa_limit.h"
#include "dispatch/predict.h"
#include "dispatch/registry.h"

namespace rafter::dispatch {
namespace {

bool takes_part(const KernelEntry& entry, Device::Kind device, Pass pass) {
  return entry.device == device && entry.pass() == pass;
}

std::string names_of(Device::Kind device, Pass pass) {
  std::string names;
  for (const Registered& kernel : kernels()) {
    if (takes_part(*kernel.entry, device, pass)) {
      names += names.empty() ? "" : ", ";
      names += kernel.entry->name;
    }
  }
  return names.empty() ? "none: this build has no kernel of this pass for this device" : names;
}

/// Why the options or the machine rule a kernel out; the kernel itself is asked last.
Acceptance acceptance_of(const Registered& kernel, const KernelProblem& problem,
                         const PlanOptions& options, std::string_view isa_limit) {
  const KernelEntry& entry = *kernel.entry;
  if (!kernel.machine.yes) {
    return kernel.machine;
  }
  if (!isa_limit.empty() && entry.device == Device::Kind::cpu) {
    if (isa_rank(entry.instruction_set) > isa_rank(isa_limit)) {
      return Acceptance::refuse("needs " + std::string(entry.instruction_set) +
                                ", and RAFTER_CPU_ISA is " + std::string(isa_limit));
    }
  }
  if (options.pipeline && *options.pipeline != entry.pipeline) {
    return Acceptance::refuse(std::string("is of the pipeline ") + to_string(entry.pipeline));
  }
  if (options.splits > 0 && entry.pipeline != Pipeline::split_kv) {
    return Acceptance::refuse("does not split the keys, and splits is " +
                              std::to_string(options.splits));
  }
  if (problem.attention.tree_mask && !entry.tree_mask) {
    return Acceptance::refuse("takes no tree_mask");
  }
  const DType kv_dtype = problem.attention.kv_dtype.value_or(problem.attention.dtype);
  if (kv_dtype != problem.attention.dtype && std::ranges::count(entry.kv_dtypes, kv_dtype) == 0) {
    std::string takes = to_string(problem.attention.dtype);
    for (const DType other : entry.kv_dtypes) {
      takes += std::string(", ") + to_string(other);
    }
    return Acceptance::refuse(std::string("kv_dtype ") + to_string(kv_dtype) + " is not among " +
                              takes);
  }
  return entry.accepts(problem);
}

Status check_forced(const PlanOptions& options, Device::Kind device) {
  if (options.kernel.empty()) {
    return Status::ok();
  }
  const Registered* forced = find_kernel(options.kernel);
  if (forced == nullptr || !takes_part(*forced->entry, device, options.pass)) {
    return Status::invalid_argument("kernel", options.kernel, names_of(device, options.pass));
  }
  if (options.pipeline && *options.pipeline != forced->entry->pipeline) {
    return Status::invalid_argument(
        "pipeline", to_string(*options.pipeline),
        std::string(to_string(forced->entry->pipeline)) + " (which " + options.kernel + " is)");
  }
  return Status::ok();
}

Status no_kernel(const std::vector<Candidate>& candidates, const PlanOptions& options,
                 Device::Kind device) {
  std::string what = "this problem";
  std::string parameter = "problem";
  if (!options.kernel.empty()) {
    parameter = "kernel";
    what = options.kernel;
  } else if (options.pipeline) {
    parameter = "pipeline";
    what = std::string(to_string(*options.pipeline)) + " for this problem";
  }
  std::string reasons;
  for (const Candidate& candidate : candidates) {
    if (!options.kernel.empty() && candidate.kernel != options.kernel) {
      continue;
    }
    reasons += reasons.empty() ? "" : "; ";
    reasons += candidate.kernel + " " +
               (candidate.refusal.empty() ? "runs only when forced" : candidate.refusal);
  }
  if (reasons.empty()) {
    reasons = std::string("this build has no kernel of the ") + to_string(options.pass) +
              " pass for " + to_string(device);
  }
  return Status::unsupported(parameter, what, reasons);
}

/// What the choice is made by: one sequence of the problem's capacities on every core. Kernels
/// differ in bits, so neither batch nor layout nor threads may decide which of them runs.
KernelProblem one_sequence(const KernelProblem& problem) {
  KernelProblem one = problem;
  AttentionProblem& p = one.attention;
  p.batch = 1;
  p.layout = Layout::dense;
  p.total_q = p.total_kv = p.page_size = p.num_pages = 0;
  p.seqused_kv = false;
  one.threads = 1;  // nothing that decides depends on them
  return one;
}

}  // namespace

Result<Choice> choose(const KernelProblem& problem, Device::Kind device, const PlanOptions& options,
                      const DeviceSpec& spec) {
  if (Status status = check_forced(options, device); !status) {
    return status;
  }
  const Result<std::string_view> limit = isa_limit();
  if (!limit) {
    return limit.status();
  }
  Choice choice;
  choice.forced = !options.kernel.empty();
  choice.candidates.reserve(kernels().size());
  const KernelProblem deciding = one_sequence(problem);
  Predictor predictor(deciding, spec, options.pass);
  double least = 0;
  for (const Registered& kernel : kernels()) {
    const KernelEntry& entry = *kernel.entry;
    if (!takes_part(entry, device, options.pass)) {
      continue;
    }
    const Acceptance acceptance = acceptance_of(kernel, problem, options, *limit);
    Candidate candidate{.kernel = std::string(entry.name),
                        .pipeline = entry.pipeline,
                        .accepted = acceptance.yes,
                        .seconds = 0,
                        .refusal = acceptance.reason,
                        .only_when_forced = entry.only_when_forced};
    if (acceptance.yes) {
      candidate.seconds = predictor.seconds(entry);
      const bool eligible = choice.forced ? entry.name == options.kernel : !entry.only_when_forced;
      if (eligible && (choice.entry == nullptr || candidate.seconds < least)) {
        choice.entry = &entry;
        least = candidate.seconds;
      }
    }
    choice.candidates.push_back(std::move(candidate));
  }
  if (choice.entry == nullptr) {
    return no_kernel(choice.candidates, options, device);
  }
  return choice;
}

}  // namespace rafter::dispatch
