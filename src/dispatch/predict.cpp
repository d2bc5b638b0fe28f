// What a kernel would take: its pipeline's exact cost under the roofline, at the shares of the
// ceilings that it was measured to reach.
#include <algorithm>
#include <limits>

#include "dispatch/kernel_entry.h"

namespace rafter {

double predicted_seconds(const KernelProblem& problem, Pipeline pipeline, const DeviceSpec& spec,
                         const Reach& reach, Pass pass) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const Result<Cost> cost = attention_cost(problem.attention, pipeline, pass, Convention{},
                                           std::max<std::int64_t>(problem.splits, 1));
  const Result<double> peak = spec.peak(problem.attention.dtype);
  const Figure* bandwidth = spec.find("bandwidth_bytes_per_s");
  if (!cost || !peak || bandwidth == nullptr) {
    return kNever;
  }
  double cores_used = 1;
  const Figure* cores = spec.find("sm_count");
  if (spec.kind == Device::Kind::cpu && cores != nullptr && cores->value > 0) {
    cores_used = std::min(1.0, problem.threads / cores->value);
  }
  const Figure* launch = spec.find("launch_s");
  const double dispatch = launch == nullptr ? 0 : cost->launches * launch->value;
  const double compute = cost->flops / (*peak * reach.compute * cores_used);
  const double traffic = cost->bytes / (bandwidth->value * reach.bandwidth);
  return std::max({compute, traffic, dispatch}) + reach.fixed_seconds;
}

}  // namespace rafter
