#include <omp.h>

#include <algorithm>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "api/checks.h"
#include "api/plan_state.h"
#include "base/forked.h"
#include "dispatch/choose.h"

namespace rafter {
namespace {

/// The ceilings a prediction uses when the caller gives none.
Result<const DeviceSpec*> default_spec(Device::Kind kind) {
  if (kind == Device::Kind::cpu) {
    static const DeviceSpec kThisCpu = estimate_this_cpu();
    return &kThisCpu;
  }
  static const Result<DeviceSpec> kGpu = find_device("h100-sxm");
  if (!kGpu) {
    return kGpu.status();
  }
  return &*kGpu;
}

Result<const DeviceSpec*> spec_for(const PlanOptions& options, Device::Kind kind) {
  if (options.device_spec == nullptr) {
    return default_spec(kind);
  }
  if (options.device_spec->kind != kind) {
    return Status::invalid_argument(
        "device_spec",
        options.device_spec->name + ", of kind " + to_string(options.device_spec->kind),
        std::string("a device of kind ") + to_string(kind));
  }
  return options.device_spec;
}

/// Runs a kernel; one of the CPU in a child of fork() on a thread of its own, whose OpenMP pool is
/// alive.
template <typename Call>
Status run_kernel(const detail::PlanState& state, Status (*kernel)(const Call&), const Call& call) {
  if (state.device.kind != Device::Kind::cpu || !base::is_forked_child()) {
    return kernel(call);
  }
  Status status;
  try {
    std::thread([&] { status = kernel(call); }).join();
  } catch (const std::system_error& error) {
    return Status::device_error("thread", error.what());
  }
  return status;
}

}  // namespace

Result<Plan> plan(const AttentionProblem& problem, const Device& device,
                  const PlanOptions& options) {
  if (device.index < 0 || (device.kind == Device::Kind::cpu && device.index != 0)) {
    return Status::invalid_argument("device.index", std::to_string(device.index),
                                    device.kind == Device::Kind::cpu ? "0" : "0 or more");
  }
  if (Status status = api::check_options(options); !status) {
    return status;
  }
  Result<AttentionProblem> completed = api::complete_problem(problem);
  if (!completed) {
    return completed.status();
  }
  const Result<const DeviceSpec*> spec = spec_for(options, device.kind);
  if (!spec) {
    return spec.status();
  }
  if (Status status = api::check_pass(*completed, options.pass); !status) {
    return status;
  }
  auto state = std::make_shared<detail::PlanState>();
  state->device = device;
  state->problem.attention = *std::move(completed);
  state->problem.threads = options.threads > 0 ? options.threads : omp_get_max_threads();
  state->problem.splits = options.splits;
  state->problem.device_index = device.index;
  Result<dispatch::Choice> choice = dispatch::choose(state->problem, device.kind, options, **spec);
  if (!choice) {
    return choice.status();
  }
  state->entry = choice->entry;
  state->kernel = std::string(choice->entry->name);
  state->forced = choice->forced;
  state->candidates = std::move(choice->candidates);
  state->workspace_bytes = state->entry->workspace(state->problem);

  if (state->entry->score_block_rows != nullptr) {
    const std::int64_t rows = state->entry->score_block_rows(state->problem);
    if (Status set = state->convention.set("score_block_rows", std::to_string(rows)); !set) {
      return set;
    }
  }
  Result<Cost> cost = attention_cost(
      state->problem.attention, state->entry->pipeline, options.pass, state->convention,
      state->entry->splits != nullptr ? state->entry->splits(state->problem) : 1);
  if (!cost) {
    return cost.status();
  }
  if (state->entry->pipeline == Pipeline::split_kv) {
    cost->launches = 1;  // no kernel here leaves the merge of its parts to a second one
  }
  Result<Prediction> prediction = predict(*cost, **spec);
  if (!prediction) {
    return prediction.status();
  }
  state->cost = *std::move(cost);
  state->prediction = *std::move(prediction);
  return Plan(std::move(state));
}

namespace {

/// What a run demands of its plan, whatever the tensors.
Status check_run(const detail::PlanState& state, Pass pass, Stream stream) {
  if (state.entry->pass() != pass) {
    return Status::invalid_argument(
        "plan", std::string("a plan of the ") + to_string(state.entry->pass()) + " pass",
        std::string("one made with PlanOptions::pass = ") + to_string(pass));
  }
  if (state.device.kind == Device::Kind::cpu && stream.handle != nullptr) {
    return Status::invalid_argument("stream", "a stream", "none (a CPU plan runs at once)");
  }
  return Status::ok();
}

api::RunDemands demands_of(const detail::PlanState& state) {
  return {.workspace_bytes = state.workspace_bytes,
          .any_head_dim_stride = state.entry->any_head_dim_stride,
          .host_indices = state.device.kind == Device::Kind::cpu};
}

}  // namespace

Status Plan::forward(const ForwardInputs& in, const ForwardOutputs& out, Workspace workspace,
                     Stream stream) const {
  const detail::PlanState& state = *state_;
  const AttentionProblem& p = state.problem.attention;
  if (Status status = check_run(state, Pass::forward, stream); !status) {
    return status;
  }
  if (Status status = api::check_forward(p, in, out, workspace, demands_of(state)); !status) {
    return status;
  }
  if (out.bad_pages.data != nullptr && state.device.kind == Device::Kind::cpu) {
    std::fill_n(out.bad_pages.data, out.bad_pages.size, 0);  // a bad one is an error above
  }
  if (p.batch == 0 || out.o.elements() == 0) {
    return Status::ok();
  }
  return run_kernel(state, state.entry->forward,
                    ForwardCall{state.problem, in, out, workspace, stream});
}

Status Plan::backward(const BackwardInputs& in, const BackwardOutputs& out, Workspace workspace,
                      Stream stream) const {
  const detail::PlanState& state = *state_;
  if (Status status = check_run(state, Pass::backward, stream); !status) {
    return status;
  }
  if (Status status =
          api::check_backward(state.problem.attention, in, out, workspace, demands_of(state));
      !status) {
    return status;
  }
  if (out.dq.elements() == 0 && out.dk.elements() == 0) {
    return Status::ok();
  }
  return run_kernel(state, state.entry->backward,
                    BackwardCall{state.problem, in, out, workspace, stream});
}

Pass Plan::pass() const { return state_->entry->pass(); }
const AttentionProblem& Plan::problem() const { return state_->problem.attention; }
const std::string& Plan::kernel() const { return state_->kernel; }
Pipeline Plan::pipeline() const { return state_->entry->pipeline; }
int Plan::threads() const { return state_->problem.threads; }
std::int64_t Plan::workspace_bytes() const { return state_->workspace_bytes; }
const Cost& Plan::cost() const { return state_->cost; }
const Convention& Plan::convention() const { return state_->convention; }
const Prediction& Plan::prediction() const { return state_->prediction; }
const std::vector<Candidate>& Plan::candidates() const { return state_->candidates; }

}  // namespace rafter
