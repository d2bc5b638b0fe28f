// Names the wall from timings alone: how time answers to more work, and to more arithmetic at the
// same traffic.
#include <cmath>
#include <utility>

#include "rafter/measure.h"

namespace rafter {
namespace {

constexpr double kDispatchBelow = 0.3;    // elasticity
constexpr double kThroughputAbove = 0.9;  // elasticity
constexpr double kBandwidthBelow = 0.3;   // exponent of FLOPs
constexpr double kComputeAbove = 0.7;     // exponent of FLOPs
// The other run tells FLOPs from bytes when its bytes stay within this factor, or when both change
// by factors that are so far apart (log2).
constexpr double kConstantBytes = 1.25;
constexpr double kFarApart = 0.4;
// At a roof: so much of it, and at most so much of the other.
constexpr double kAtRoof = 0.75;
constexpr double kOffRoof = 0.5;

struct Interval {
  double at = 0, low = 0, high = 0;
};

// log(b / a) / scale, with the ends that the two medians' 95% intervals allow.
Interval log_ratio(const Statistics& b, const Statistics& a, double scale) {
  return {std::log2(b.median / a.median) / scale, std::log2(b.median_low / a.median_high) / scale,
          std::log2(b.median_high / a.median_low) / scale};
}

/// Where time went between the growth of the bytes (0) and that of the FLOPs (1).
Interval flop_exponent(const WallEvidence& e) {
  const double bytes = std::log2(e.added_bytes_ratio),
               apart = std::log2(e.added_flops_ratio) - bytes;
  const Interval grew = log_ratio(e.seconds_added_flops, e.seconds, 1);
  Interval x{(grew.at - bytes) / apart, (grew.low - bytes) / apart, (grew.high - bytes) / apart};
  if (apart < 0) {
    std::swap(x.low, x.high);
  }
  return x;
}

bool tells_flops_from_bytes(const WallEvidence& e) {
  const bool constant =
      e.added_bytes_ratio <= kConstantBytes && e.added_bytes_ratio >= 1 / kConstantBytes;
  return constant || std::abs(std::log2(e.added_flops_ratio / e.added_bytes_ratio)) >= kFarApart;
}

/// Throughput of which no run changed FLOPs and bytes by different factors: near one roof and far
/// from the other it can be at that one alone.
void judge_by_roofs(const WallEvidence& e, WallVerdict& verdict) {
  const double bandwidth = e.share_of_bandwidth, peak = e.share_of_peak;
  if (bandwidth >= kAtRoof && peak < kOffRoof) {
    verdict.wall = MeasuredWall::bandwidth;
    verdict.reason = "time follows the work, at the memory's bandwidth and far from the peak";
  } else if (peak >= kAtRoof && bandwidth < kOffRoof) {
    verdict.wall = MeasuredWall::compute;
    verdict.reason = "time follows the work, at the peak and far from the memory's bandwidth";
  } else if (bandwidth > 0 || peak > 0) {
    verdict.reason = "throughput below both roofs: the kernel's own instructions or latency";
  } else {
    verdict.reason = "throughput, but no run with more FLOPs at constant bytes was measured";
  }
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
    const Interval e =
        log_ratio(evidence.seconds_double, evidence.seconds, std::log2(evidence.double_ratio));
    verdict.has_elasticity = true;
    verdict.elasticity = e.at;
    verdict.elasticity_low = e.low;
    verdict.elasticity_high = e.high;
  }
  if (evidence.seconds.n > 0 && evidence.seconds_added_flops.n > 0 &&
      evidence.added_flops_ratio > 0 && evidence.added_bytes_ratio > 0 &&
      evidence.added_flops_ratio != evidence.added_bytes_ratio) {
    const Interval x = flop_exponent(evidence);
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
    judge_by_roofs(evidence, verdict);
    return verdict;
  }
  const Interval x{verdict.flop_exponent, verdict.flop_exponent_low, verdict.flop_exponent_high};
  if (!tells_flops_from_bytes(evidence)) {
    verdict.reason = "throughput, but the run with more FLOPs also moves more bytes";
  } else if (crosses(x, kBandwidthBelow) || crosses(x, kComputeAbove)) {
    verdict.reason = "throughput, but the interval of the FLOP exponent reaches across a limit";
  } else if (x.at > kComputeAbove) {
    verdict.wall = MeasuredWall::compute;
    verdict.reason = "time follows the work, and the FLOPs where bytes change by another factor";
  } else if (x.at < kBandwidthBelow) {
    verdict.wall = MeasuredWall::bandwidth;
    verdict.reason = "time follows the work, and the bytes where FLOPs change by another factor";
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
