#include "dispatch/predict.h"

#include <algorithm>
#include <limits>

namespace rafter::dispatch {

Predictor::Predictor(const KernelProblem& problem, const DeviceSpec& spec, Pass pass)
    : problem_(problem), spec_(spec), pass_(pass) {
  const auto figure = [&](const char* key) {
    const Figure* found = spec.find(key);
    return found == nullptr ? 0 : found->value;
  };
  const Result<double> peak = spec.peak(problem.attention.dtype);
  peak_ = peak ? *peak : 0;
  bandwidth_ = figure("bandwidth_bytes_per_s");
  launch_seconds_ = figure("launch_s");
  work_.reserve(4);
}

const Predictor::Work& Predictor::work_of(const KernelEntry& entry) {
  const std::int64_t splits = entry.splits == nullptr ? 1 : entry.splits(problem_);
  Convention convention;
  if (entry.score_block_rows != nullptr) {
    convention.score_block_rows = static_cast<double>(entry.score_block_rows(problem_));
  }
  const double block_rows = convention.score_block_rows;
  for (const Work& known : work_) {
    if (known.pipeline == entry.pipeline && known.splits == splits &&
        known.score_block_rows == block_rows) {
      return known;
    }
  }
  Work work = {entry.pipeline, splits, block_rows, std::numeric_limits<double>::infinity(), 0, 0};
  const Result<Cost> cost =
      attention_cost(problem_.attention, entry.pipeline, pass_, convention, splits);
  if (cost) {
    work.flops = cost->flops;
    work.bytes = cost->bytes;
    work.dispatch_seconds = cost->launches * launch_seconds_;
  }
  return work_.emplace_back(work);
}

double Predictor::seconds(const KernelEntry& entry) {
  if (!(peak_ > 0 && bandwidth_ > 0)) {
    return std::numeric_limits<double>::infinity();
  }
  const Work& work = work_of(entry);
  const Reach reach = entry.reach(problem_, spec_);
  const double compute = work.flops / (peak_ * reach.compute);
  const double traffic = work.bytes / (bandwidth_ * reach.bandwidth);
  // A GPU's launches are in what its kernel was measured to take whatever the size: counted again,
  // they would hide the work of all that is short, and a merge that is no launch would have one.
  const bool measured = spec_.kind == Device::Kind::cuda && reach.fixed_seconds > 0;
  const double dispatch = measured ? 0 : work.dispatch_seconds;
  return std::max({compute, traffic, dispatch}) + reach.fixed_seconds;
}

}  // namespace rafter::dispatch
