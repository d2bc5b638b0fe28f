// One attention problem with its data, planned and ready to run; and how such cases are timed, each
// beside its prediction. Shared by bench and report.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/array.h"
#include "cli/bench_data.h"
#include "cli/qkv.h"
#include "cli/resident.h"
#include "rafter/attention.h"
#include "rafter/measure.h"

namespace rafter::cli {

class PreparedAttention {
 public:
  /// Runs the pass of the options; for the backward, o and lse are made by a forward run. Without
  /// data, random values made on the CUDA device. Errors: those of plan(), and memory that this
  /// machine does not have. o has the dtype `o_dtype`, by default the problem's. `lengths` are the
  /// keys in use of each sequence, of problems with seqused_kv.
  static Result<PreparedAttention> make(const AttentionProblem& problem, const PlanOptions& options,
                                        const std::optional<Qkv>& data, const Device& device,
                                        std::optional<DType> o_dtype = {},
                                        std::span<const std::int64_t> lengths = {});

  /// CUDA: queues on the stream.
  Status run(Stream stream = {}) const;
  const Plan& plan() const { return *plan_; }
  /// o of the last run, widened to f32.
  Result<Array> output() const;
  /// Bytes of q, k, v, o, lse, for the backward of gradients too, and of the workspace: what a run
  /// touches.
  double working_set_bytes() const;

 private:
  PreparedAttention() = default;
  Status prepare_cache(const std::optional<Qkv>& data, const Device& device,
                       std::span<const std::int64_t> lengths);
  Status prepare_backward(const PlanOptions& options, const Device& device);
  LseView lse() const;
  std::optional<Plan> plan_;
  Resident q_, k_, v_, o_, lse_, workspace_;
  std::optional<Resident> k_scale_, v_scale_, page_table_, lengths_;
  std::optional<Resident> d_o_, dq_, dk_, dv_;  // backward
};

/// What to time: one problem on one set of data by one pipeline. Without data: random, made on the
/// CUDA device.
struct TimedCase {
  AttentionProblem problem;
  PlanOptions options;
  std::optional<Qkv> data;
  std::vector<std::int64_t> lengths = {};  // keys in use of each sequence; none: all of them
};

/// Where a working set lives, by the plateaus of the probe. On a GPU always memory: what is timed
/// begins with an L2 that holds none of it.
struct Level {
  std::string name;  // "memory", "l3", "l2"
  double bandwidth_bytes_per_s = 0;
};
Level level_of(const DeviceSpec& spec, double working_set_bytes);
/// The cost on a device whose memory had another bandwidth, that of a level.
Result<Prediction> predict_at(const Cost& cost, DeviceSpec spec, double bandwidth);
/// What is read before a cold call on a GPU: twice its L2.
double flush_bytes(const DeviceSpec& spec);

struct CaseResult {
  std::string refusal;  // not empty: why no kernel took it; nothing else is set then
  std::string kernel;
  Pipeline pipeline = Pipeline::fused;
  int threads = 1;
  Cost cost;
  Level level;
  bool cache_resident = false;
  double working_set_bytes = 0;
  double workspace_bytes = 0;
  double declared_bytes = 0;  // of inputs and outputs, once each
  Prediction predicted;       // with the bandwidth of main memory
  Prediction at_level;        // with the bandwidth of the level that holds the working set
  Timing timing;
  WallEvidence evidence;
  WallVerdict measured;
  std::optional<CountedBytes> counted;  // of one run, by the device's counters
  std::string counted_reason;           // why there are none

  double median_s() const { return timing.seconds.median; }
  double flop_per_s() const { return cost.flops / median_s(); }
  /// Least time that the ceilings allow, over the time measured. Above 1 is a diagnosis (cached
  /// data, a clock above the probe's, a wrong count), so it is not clamped.
  double share_of_bound() const { return at_level.time_s / median_s(); }
};

struct TimingOptions {
  StopRule rule;
  /// Also time twice the work, and more FLOPs at constant bytes; on CUDA the work on a stream and
  /// in a graph as well.
  bool evidence = true;
  Device device = {};
  bool counters = true;  // also count the bytes of one run, where the machine allows it
};

/// The problem with more FLOPs at nearly constant modelled bytes that tells the walls of this
/// pipeline apart; nothing when no change of shape gives 1.5 times the FLOPs within 1.25 times the
/// bytes.
struct AddedFlops {
  AttentionProblem problem;
  double flops_ratio = 0, bytes_ratio = 0;
};
std::optional<AddedFlops> added_flops(const AttentionProblem& problem, Pipeline pipeline,
                                      Pass pass = Pass::forward);

/// Times the cases by turns and predicts each on `spec`. Errors: what a run reports.
Result<std::vector<CaseResult>> time_cases(std::span<const TimedCase> cases, const DeviceSpec& spec,
                                           const TimingOptions& options);

}  // namespace rafter::cli
