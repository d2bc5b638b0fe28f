#include "cli/timed_fusing.h"

#include <cmath>
#include <vector>

#include "cli/args.h"

namespace rafter::cli {
namespace {

constexpr std::size_t kFewestPairs = 20;
constexpr double kMostTimes = 60;  // the rule's least time

/// A step of a session of its own.
struct Side {
  Side(const Transformer& model, const ModelPoint& point, const StopRule& rule)
      : session(value_or_fail(session_at(model, point))),
        phase(point.phase),
        clock(model.device(), rule, session) {
    const std::vector<StepOperation> operations = session.operations(phase);
    for (const StepOperation& operation : operations) {
      add_cost(operation.cost, cost);
    }
    chained = is_chained(operations);
  }
  Work work() const {
    return [this] { return session.queue(phase, clock.stream()); };
  }
  TransformerSession session;
  Phase phase;
  StepClock clock;
  Cost cost;
  bool chained = false;
};

/// Pairs whose order turns from one to the next, so that a drift of the device's clock meets both.
FusingTimes time_pairs(const TimedWork& fused, const TimedWork& apart, const StopRule& rule) {
  std::vector<double> with, without;
  FusingTimes times;
  double spent = 0;
  value_or_fail(fused(1));  // a first run makes what later ones have
  value_or_fail(apart(1));
  for (;;) {
    const bool fused_first = with.size() % 2 == 0;
    const double first = value_or_fail(fused_first ? fused(1) : apart(1));
    const double second = value_or_fail(fused_first ? apart(1) : fused(1));
    with.push_back(fused_first ? first : second);
    without.push_back(fused_first ? second : first);
    spent += first + second;
    const bool time_up = spent >= kMostTimes * rule.min_time_s;
    if (with.size() < kFewestPairs && !time_up) {
      continue;
    }
    times.saved = value_or_fail(paired_differences(without, with));
    const double width = times.saved.median_high - times.saved.median_low;
    const bool settled = spent >= rule.min_time_s && width < 0.1 * std::abs(times.saved.median);
    if (settled || time_up) {
      times.stop = settled ? Stop::settled : Stop::time_up;
      break;
    }
  }
  times.fused = value_or_fail(statistics(with));
  times.apart = value_or_fail(statistics(without));
  return times;
}

}  // namespace

FusingResult time_fusing(ModelPoint point, const Transformer& model, const StopRule& rule,
                         bool counters) {
  point.fuse = true;
  ModelPoint other = point;
  other.fuse = false;
  const Side fused(model, point, rule), apart(model, other, rule);
  FusingResult result;
  result.point = point;
  result.fused = fused.cost;
  result.chained = fused.chained;
  result.apart = apart.cost;
  result.convention = fused.session.convention(point.phase);
  const auto pairs = [&](Queueing queueing) {
    return time_pairs(fused.clock.rewound(fused.clock.timed(fused.work(), queueing)),
                      apart.clock.rewound(apart.clock.timed(apart.work(), queueing)), rule);
  };
  result.stream = pairs(Queueing::stream);
  if (model.device().kind != Device::Kind::cuda) {
    result.bytes_reason = "no memory counters are read on a CPU";
    return result;
  }
  if (result.stream.apart.median < kLongStep_s) {
    result.graph = pairs(Queueing::graph);
  }
  result.launches_saved = value_or_fail(apart.session.count_launches(point.phase)) -
                          value_or_fail(fused.session.count_launches(point.phase));
  if (!counters) {
    result.bytes_reason = "not asked for";
    return result;
  }
  const Result<double> with = fused.clock.count_bytes(fused.work()),
                       without = apart.clock.count_bytes(apart.work());
  if (with && without) {
    result.bytes_saved = *without - *with;
  } else {
    result.bytes_reason = (with ? without : with).status().message();
  }
  return result;
}

FusingPrediction predict_fusing(const FusingResult& result, const Transformer& model,
                                const DeviceSpec& spec, bool graph) {
  StepResult step;
  step.point = result.point;
  step.point.fuse = false;
  step.cost = result.apart;
  step.convention = result.convention;
  const ModelBudget as_queued = budget_of(step, model, spec, graph);
  const bool launches_bind = as_queued.dispatch_time_s > as_queued.device_time_s;
  const bool has_graphs = spec.find("graph_launch_s") != nullptr;
  step.point.fuse = true;
  step.cost = result.fused;
  step.chained = result.chained;
  return {budget_of(step, model, spec, launches_bind || !has_graphs ? graph : true).fusing};
}

}  // namespace rafter::cli
