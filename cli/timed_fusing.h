// What fusing the elementwise functions saves of a step: the step with them fused and with each by
// itself, by turns in one process, and the bytes and launches of both.
#pragma once

#include <optional>
#include <string>

#include "cli/timed_model.h"

namespace rafter::cli {

/// Pairs of steps, one of each kind; `saved` is of the differences, apart minus fused.
struct FusingTimes {
  Statistics fused, apart, saved;
  Stop stop = Stop::time_up;
};

struct FusingResult {
  ModelPoint point;                            // fuse is true
  Cost fused, apart;                           // of the whole steps
  bool chained = false;                        // of the fused one: StepResult's
  Convention convention;                       // of their attention
  FusingTimes stream;                          // launch by launch
  std::optional<FusingTimes> graph;            // CUDA, steps that are not long
  std::optional<std::int64_t> launches_saved;  // CUDA: by the driver's count
  std::optional<double> bytes_saved;           // CUDA: by the memory's counters, of one step each
  std::string bytes_reason;                    // why not
};

/// Turns until the interval of the median difference is within a tenth of it, or for sixty times
/// the rule's least time.
FusingResult time_fusing(ModelPoint point, const Transformer& model, const StopRule& rule,
                         bool counters);

/// What the budget says that fusing saves, in the way the step is queued: launches cost what a
/// graph's nodes do, save where a stream launches more slowly than the device runs.
struct FusingPrediction {
  FuseSaving saving;
  double time_s() const { return saving.bytes_time_s + saving.launches_time_s; }
};
FusingPrediction predict_fusing(const FusingResult& result, const Transformer& model,
                                const DeviceSpec& spec, bool graph);

}  // namespace rafter::cli
