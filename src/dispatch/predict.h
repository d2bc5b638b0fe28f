// What kernels would take: their pipelines' exact cost under the roofline, at the shares of the
// ceilings that each was measured to reach.
#pragma once

#include <vector>

#include "dispatch/kernel_entry.h"

namespace rafter::dispatch {

/// Predicts every kernel of a pass on one problem; works out a pipeline's cost once.
class Predictor {
 public:
  /// Both outlive it.
  Predictor(const KernelProblem& problem, const DeviceSpec& spec, Pass pass);

  /// Infinite where the device lacks a figure: plan() then says which.
  double seconds(const KernelEntry& entry);

 private:
  struct Work {
    Pipeline pipeline;
    std::int64_t splits;
    double score_block_rows;
    double flops, bytes, dispatch_seconds;  // infinite flops: the cost is not defined
  };
  const Work& work_of(const KernelEntry& entry);

  const KernelProblem& problem_;
  const DeviceSpec& spec_;
  Pass pass_;
  double peak_ = 0, bandwidth_ = 0, launch_seconds_ = 0;  // 0 peak or bandwidth: unknown
  std::vector<Work> work_;
};

}  // namespace rafter::dispatch
