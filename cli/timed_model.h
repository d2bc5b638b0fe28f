// A phase of a whole model, set up and timed: the step, its operations by name, and what tells the
// wall of each. Shared by bench and report.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/probe_file.h"
#include "rafter/transformer.h"

namespace rafter::cli {

/// One point: a phase of a session that is set up.
struct ModelPoint {
  Phase phase = Phase::prefill;
  std::int64_t seqlen = 0, batch = 1;
  Pipeline pipeline = Pipeline::fused;
  bool fuse = true;
  std::int64_t page_size = 64, seed = 1;
  std::optional<DType> kv_dtype = {};  // none: the model's
};

/// A model by name, config.json or folder; without a name reference-7b on a GPU, else
/// reference-60m. Ends the command where there is no such model.
TransformerConfig transformer_config(const std::string& name);
/// Whether the name is of a folder, which has its own weights.
bool has_weights(const std::string& name);
/// Weights of a folder, or random ones of a built-in model or of a config.json.
Transformer transformer_of(const std::string& name, std::uint64_t seed, const Device& device,
                           DType dtype, const WeightFormat& weights = {});

/// Generated tokens behind the context that a sample may add before it is set back.
inline constexpr std::int64_t kSpareTokens = 8;
/// A session in which the point's phase can be queued.
Result<TransformerSession> session_at(const Transformer& model, const ModelPoint& point,
                                      std::int64_t spare = kSpareTokens);

/// The device with its products at the rate that they hold: what is timed here runs back to back
/// for longer than the 0.1 s that a probe's burst lasts.
DeviceSpec at_sustained_rates(DeviceSpec spec);
/// Launches cost what they do in a graph where one is replayed.
Convention launches_in(const DeviceSpec& spec, bool graph);

/// The operations of one name: those of all layers.
struct OperationGroup {
  std::string name, kernel;
  Cost cost;
  std::vector<StepOperation> operations;
  std::int64_t count = 0;  // of them

  Status queue(Stream stream) const;
};
std::vector<OperationGroup> groups_of(const std::vector<StepOperation>& operations);
/// Whether the step has chains of products.
bool is_chained(const std::vector<StepOperation>& operations);
/// Adds up what an operation costs.
void add_cost(const Cost& from, Cost& to);

/// Times work of a session on the device's own clock, or on this machine's; the session is set back
/// before each sample.
class StepClock {
 public:
  StepClock(const Device& device, const StopRule& rule, const TransformerSession& session);
  Stream stream() const { return clock_ ? clock_->stream() : Stream{}; }
  TimedWork timed(const Work& work, Queueing queueing) const;
  /// The same with the session set back before each run; the clock must outlive it.
  TimedWork rewound(TimedWork work) const;
  Timing time(const TimedWork& work) const;
  Timing time(const Work& work, Queueing queueing) const { return time(timed(work, queueing)); }
  /// Bytes that one run moves across the boundary of a GPU's memory. Errors: as
  /// DeviceClock::count().
  Result<double> count_bytes(const Work& work) const;

 private:
  TransformerSession session_;
  StopRule rule_;
  std::optional<DeviceClock> clock_;
};

/// What tells the wall of each operation by name, timed on models of the same layers, but few of
/// them: on twice the sequences, on a quarter of the prompt, on layers of twice the width, on twice
/// the query heads. Empty where those models cannot be made.
std::map<std::string, WallEvidence> operation_evidence(const ModelPoint& point,
                                                       const Transformer& model,
                                                       const StopRule& rule);

/// One operation of a step beside what was predicted.
struct OperationResult {
  OperationGroup group;
  Prediction predicted;
  Timing timing;
  WallVerdict measured;
  double bound_s() const { return std::max(predicted.time_compute_s, predicted.time_bandwidth_s); }
};
/// A step and its operations.
struct StepResult {
  ModelPoint point;
  Cost cost;
  bool chained = false;   // products between two attentions in one launch
  Convention convention;  // of its attention
  /// Rows whose scores land together where the pipeline is the unfused one; unset: none here.
  std::optional<double> unfused_score_block_rows;
  std::vector<OperationResult> operations;
  std::vector<std::string> layer;  // names of a layer's operations in the order they run
  std::optional<std::int64_t> launches_counted;
  /// On a CPU the first alone, and on a GPU where a step is so long that launches are nothing in
  /// it.
  std::optional<Timing> stream, graph;
  const Timing& best() const { return graph ? *graph : *stream; }
};
/// Steps as long as this are a thousand launches and more: they are queued as they run.
inline constexpr double kLongStep_s = 0.25;
struct StepTiming {
  StopRule rule;
  bool operations = true;  // each by itself too
  bool evidence = true;    // and what tells its wall
  std::function<void(const std::string&)> progress = [](const std::string&) {};
};
StepResult time_step(const ModelPoint& point, const Transformer& model, const DeviceSpec& spec,
                     const StepTiming& how);

/// A decode step while prefills run on another stream, and they while decode steps run: CUDA alone.
struct Interference {
  Timing decode_alone, decode_beside, prefill_alone;
  Statistics prefill_beside;
};
Result<Interference> time_interference(const ModelPoint& decode, std::int64_t prefill_seqlen,
                                       const Transformer& model, const StopRule& rule);

/// The step of a budget, its launches left to be counted from the structure.
ModelStep budget_step(const StepResult& result, const Transformer& model, const DeviceSpec& spec,
                      bool graph);
/// The budget of the step that was timed, on that device, with the launches that it has.
ModelBudget budget_of(const StepResult& result, const Transformer& model, const DeviceSpec& spec,
                      bool graph);
/// Launches of the step by the model's structure alone.
double predicted_launches(const StepResult& result, const Transformer& model,
                          const DeviceSpec& spec);

/// What would move an operation, in a phrase: by the wall measured, or the model's where the
/// measurement names none.
std::string what_moves(const OperationResult& operation);

}  // namespace rafter::cli
