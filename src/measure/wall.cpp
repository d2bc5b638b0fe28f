// Names the wall from timings alone: how time answers to more work, and to more arithmetic at the
// same traffic.
#include <cmath>

#include "rafter/measure.h"

namespace rafter {
namespace {

constexpr double kDispatchBelow = 0.3;    // elasticity
constexpr double kThroughputAbove = 0.9;  // elasticity
constexpr double kBandwidthBelow = 0.3;   // exponent of FLOPs
constexpr double kComputeAbove = 0.7;     // exponent of FLOPs
// Bytes may grow by so much before "constant bytes" is no longer true of the added-FLOPs run.
constexpr double kConstantBytes = 1.25;

struct Interval {
  double at = 0, low = 0, high = 0;
};

// log(b / a) / scale, with the ends that the two medians' 95% intervals allow.
Interval log_ratio(const Statistics& b, const Statistics& a, double scale) {
  return {std::log2(b.median / a.median) / scale, std::log2(b.median_low / a.median_high) / scale,
          std::log2(b.median_high / a.median_low) / scale};
}

bool crosses(const Interval& interval, double limit) {
  return interval.low < limit && interval.high > limit;
}

/// Below this share of the stream's time, launches explain nothing.
constexpr double kLaunchesBelow = 0.1;

}  // namespace

const char* to_string(MeasuredWall wall) {
  switch (wall) {
    case MeasuredWall::compute:
      return "compute";
    case MeasuredWall::bandwidth:
      return "bandwidth";
    case MeasuredWall::dispatch:
      return "dispatch";
    case MeasuredWall::mixed:
      return "mixed";
    case MeasuredWall::ambiguous:
      return "ambiguous";
  }
  return "unknown";
}

WallVerdict judge_wall(const WallEvidence& evidence) {
  WallVerdict verdict;
  if (evidence.seconds.n > 0 && evidence.seconds_double.n > 0) {
    const Interval e = log_ratio(evidence.seconds_double, evidence.seconds, 1);
    verdict.has_elasticity = true;
    verdict.elasticity = e.at;
    verdict.elasticity_low = e.low;
    verdict.elasticity_high = e.high;
  }
  if (evidence.seconds.n > 0 && evidence.seconds_added_flops.n > 0 &&
      evidence.added_flops_ratio > 1) {
    const Interval x = log_ratio(evidence.seconds_added_flops, evidence.seconds,
                                 std::log2(evidence.added_flops_ratio));
    verdict.has_flop_exponent = true;
    verdict.flop_exponent = x.at;
    verdict.flop_exponent_low = x.low;
    verdict.flop_exponent_high = x.high;
  }
  if (evidence.seconds_stream.n > 0 && evidence.seconds_graph.n > 0 &&
      evidence.seconds_stream.median > 0) {
    verdict.has_launch_share = true;
    verdict.launch_share = 1 - evidence.seconds_graph.median / evidence.seconds_stream.median;
  }
  if (!verdict.has_elasticity) {
    verdict.reason = "twice the work was not measured";
    return verdict;
  }
  const Interval e{verdict.elasticity, verdict.elasticity_low, verdict.elasticity_high};
  if (crosses(e, kDispatchBelow) || (crosses(e, kThroughputAbove) && e.at < kThroughputAbove)) {
    verdict.reason = "the interval of the elasticity reaches across a limit";
    return verdict;
  }
  if (e.at < kDispatchBelow) {
    verdict.wall = MeasuredWall::dispatch;
    verdict.reason = "twice the work takes hardly more time";
    if (verdict.has_launch_share && verdict.launch_share < kLaunchesBelow) {
      verdict.reason += ", and a graph saves little: it is latency inside the kernel, not launches";
    }
    return verdict;
  }
  if (e.at < kThroughputAbove) {
    verdict.wall = MeasuredWall::mixed;
    verdict.reason = "twice the work takes less than twice the time: part of it is a fixed cost";
    return verdict;
  }
  if (!verdict.has_flop_exponent) {
    verdict.reason = "throughput, but no run with more FLOPs at constant bytes was measured";
    return verdict;
  }
  const Interval x{verdict.flop_exponent, verdict.flop_exponent_low, verdict.flop_exponent_high};
  if (evidence.added_bytes_ratio > kConstantBytes) {
    verdict.reason = "throughput, but the run with more FLOPs also moves more bytes";
  } else if (crosses(x, kBandwidthBelow) || crosses(x, kComputeAbove)) {
    verdict.reason = "throughput, but the interval of the FLOP exponent reaches across a limit";
  } else if (x.at > kComputeAbove) {
    verdict.wall = MeasuredWall::compute;
    verdict.reason = "time follows the work, and FLOPs added at constant bytes add time";
  } else if (x.at < kBandwidthBelow) {
    verdict.wall = MeasuredWall::bandwidth;
    verdict.reason = "time follows the work, and FLOPs added at constant bytes add none";
  } else {
    verdict.wall = MeasuredWall::mixed;
    verdict.reason = "time follows both the FLOPs and the bytes";
  }
  return verdict;
}

const char* to_string(Comparison comparison) {
  switch (comparison) {
    case Comparison::same:
      return "same";
    case Comparison::faster:
      return "faster";
    case Comparison::slower:
      return "slower";
    case Comparison::ambiguous:
      return "ambiguous";
  }
  return "unknown";
}

Comparison compare(const MedianInterval& baseline, const MedianInterval& now, double threshold) {
  const double speed = baseline.median / now.median;
  if (speed < threshold) {
    return now.low > baseline.high ? Comparison::slower : Comparison::ambiguous;
  }
  if (speed > 1 / threshold) {
    return now.high < baseline.low ? Comparison::faster : Comparison::ambiguous;
  }
  return Comparison::same;
}

}  // namespace rafter
