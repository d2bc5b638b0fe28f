// Measuring: timing with a stop rule, statistics of samples, the ceilings of this machine, and
// which wall a timed kernel stands against. docs/measuring.md states every rule used here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "rafter/attention.h"
#include "rafter/device.h"
#include "rafter/roofline.h"
#include "rafter/status.h"

namespace rafter {

// ---- statistics

/// Order statistics of samples. Quantiles interpolate linearly between order statistics.
struct Statistics {
  std::int64_t n = 0;
  double median = 0, p10 = 0, p90 = 0, q1 = 0, q3 = 0, min = 0, max = 0;
  double median_low = 0, median_high = 0;  // 95% interval of the median, distribution-free
  /// Interquartile range over 1.349 and the median: the standard deviation of a normal sample,
  /// blind to the few samples an operating system disturbs.
  double relative_deviation = 0;

  /// (p90 − p10) / median.
  double spread() const { return median > 0 ? (p90 - p10) / median : 0; }
};

/// Statistics of samples. Errors: device_error on an empty list or on the first sample that is
/// negative or not finite.
Result<Statistics> statistics(std::span<const double> samples);
/// Statistics of from[i] − less[i], of which any may be negative: samples taken in pairs, so that
/// what disturbs both of a pair is not in the difference. Errors: as statistics(), and device_error
/// on lists of different lengths.
Result<Statistics> paired_differences(std::span<const double> from, std::span<const double> less);
/// The quantile of *sorted* samples, 0 ≤ at ≤ 1; 0 when there are none.
double quantile(std::span<const double> sorted, double at);

// ---- timing

/// When to stop sampling: enough samples, enough time and little deviation; or the deviation itself
/// has settled; or time is up.
struct StopRule {
  std::int64_t min_samples = 10;
  double min_time_s = 0.5;
  double relative_deviation = 0.005;
  double max_time_s = 15;
  double min_sample_s =
      100e-6;  // shorter calls are repeated within one sample until it lasts so long
  /// 0: steady, calls back to back. Otherwise cold: before each sample, so many bytes are read to
  /// evict the caches, and each sample is one call.
  double flush_bytes = 0;
};

/// Why sampling stopped.
enum class Stop : std::uint8_t { precise, settled, time_up };
const char* to_string(Stop stop);  // "precise", "settled", "time up"

struct Timing {
  Statistics seconds;  // of one call
  std::int64_t calls_per_sample = 1;
  Stop stop = Stop::time_up;
};

using Work = std::function<Status()>;

/// Times one piece of work on the steady clock. Errors: what the work returns, or as statistics().
Result<Timing> time_calls(const Work& work, const StopRule& rule = {});
/// Times several candidates by turns (one sample of each, over and over), so that a disturbance
/// meets all of them alike. A candidate that has stopped by the rule is still sampled until all
/// have, or until it has used up max_time_s. Errors: those of the first candidate that fails.
Result<std::vector<Timing>> time_alternating(std::span<const Work> candidates,
                                             const StopRule& rule = {});

/// A piece of work that times itself: does it so many times, back to back, and returns the seconds
/// of all of them together.
using TimedWork = std::function<Result<double>(std::int64_t calls)>;
/// time_alternating() on clocks of the work's own.
Result<std::vector<Timing>> time_alternating(std::span<const TimedWork> candidates,
                                             const StopRule& rule = {});

// ---- CUDA devices

/// "" when this machine has the device; else why not: "this build has no CUDA", "no CUDA device
/// (…)".
std::string why_no_cuda(int index = 0);
/// What tells the device from every other, as its probe notes it ("gpu_uuid"); "" without one.
std::string cuda_uuid(int index = 0);

/// Waits until what is queued on a stream of a CUDA device is done.
Status synchronize(const Device& device, Stream stream);
/// Whether what is queued on a stream of a CUDA device goes into a graph that is being captured;
/// true also where CUDA does not say.
bool is_capturing(Stream stream);

/// Memory of a device, freed with the object. Errors: device_error, also where there is no device.
class DeviceMemory {
 public:
  static Result<DeviceMemory> allocate(const Device& device, std::int64_t bytes);
  void* data() const { return memory_.get(); }
  std::int64_t bytes() const { return bytes_; }
  /// Each waits until it is done; `bytes` from the start, at most all.
  Status upload(const void* from, std::int64_t bytes) const;
  Status download(void* to, std::int64_t bytes) const;
  Status fill(unsigned char byte) const;
  /// Elements of dtype (f32, bf16, f16), bell-shaped around 0, the same for the same seed.
  Status fill_random(DType dtype, std::uint32_t seed) const;

 private:
  Device device_;
  std::shared_ptr<void> memory_;
  std::int64_t bytes_ = 0;
};

/// How work that is queued on a device is timed.
enum class Queueing : std::uint8_t {
  stream,  // call after call on the stream: launches are in the time where they are its limit
  graph,   // the calls captured in one graph, replayed
};

/// Bytes that crossed the boundary of a device's memory, by its own counters.
struct CountedBytes {
  double read = 0, written = 0;
};

/// A stream of a device with its clock: a pair of events around what is queued.
class DeviceClock {
 public:
  static Result<DeviceClock> make(const Device& device);
  Stream stream() const;
  Status synchronize() const;
  /// `queue` queues one call on stream(). Steady: calls are back to back. Where the rule that it is
  /// timed by has flush_bytes, each call is alone: before it so many bytes are read (clean lines),
  /// then the stream is held while start event, call and stop event are queued: launch latency is
  /// not in the time. The object must outlive the result.
  TimedWork timed(Work queue, Queueing queueing, double flush_bytes = 0) const;
  /// What one call moves, flush_bytes read before it. Lines that are dirty in the L2 at its end are
  /// not yet written, nor counted. Nothing else may run on the device. Errors: those of the call;
  /// device_error where the machine does not allow it (no CUPTI, no permission, another profiler).
  Result<CountedBytes> count(const Work& queue, double flush_bytes = 0) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Work captured once and replayed.
class DeviceGraph {
 public:
  /// Captures what `queue` queues on `stream`, which is not the default stream. What a first call
  /// makes for itself must have been made. Errors: device_error; those of the work.
  static Result<DeviceGraph> capture(const Device& device, Stream stream, const Work& queue);
  Status launch(Stream stream) const;
  /// Kernels in it, as the driver has them.
  std::int64_t kernels() const { return kernels_; }

 private:
  Device device_;
  std::shared_ptr<void> graph_;
  std::int64_t kernels_ = 0;
};

// ---- ceilings of this machine

/// Bandwidth at one working set; a sweep of them shows the levels of the memory hierarchy.
struct SweepPoint {
  double bytes_per_thread = 0;     // working set of each thread
  Statistics read, write, copy;    // B/s of all threads together; copy counts read + write
  std::vector<double> samples[3];  // the B/s samples behind them, in that order
};

/// A run of working sets over which a rate stays level.
struct Plateau {
  std::size_t first = 0, last = 0;  // indices into the sweep, inclusive
  double rate = 0;                  // median over the run
};

/// The plateau rule: a plateau is a run of at least `min_points` consecutive sizes whose rates all
/// lie within `tolerance` of the run's median; a plateau less than `step` below the one before it
/// belongs to that one. At the largest sizes two are enough. Returned from the smallest sizes up.
struct PlateauRule {
  double tolerance = 0.15;
  std::size_t min_points = 3;
  double step = 0.2;
};
std::vector<Plateau> find_plateaus(std::span<const double> rates, const PlateauRule& rule = {});

struct ProbeOptions {
  bool quick = false;  // shorter samples, fewer sizes: 5 s on a CPU in place of 40
  int threads = 0;     // 0: the OpenMP default
  std::function<void(std::string_view step)> progress = {};
};

/// A figure that was looked for and is not in the spec.
struct MissingFigure {
  std::string key, reason;
};

struct Probe {
  DeviceSpec spec;  // as `rafter devices` has it; ceilings are 90th percentiles of their samples
  std::vector<SweepPoint> sweep;
  std::vector<MissingFigure> missing;
  /// Measured figures whose spread, (high − low) / high, is above kNoisySpread.
  std::vector<std::string> noisy;
  /// Empty, or why the probe cannot be trusted: a ceiling the roofline rests on (main-memory
  /// bandwidth, f32 matmul) spread over more than kDistrustSpread.
  std::string distrust;
};
inline constexpr double kNoisySpread = 0.15;
inline constexpr double kDistrustSpread = 0.5;

/// Measures the ceilings of this machine's CPU. Errors: device_error when a measurement fails
/// outright; invalid_argument for a number of threads below 0.
Result<Probe> probe_cpu(const ProbeOptions& options = {});
/// Measures a CUDA device: bandwidth of its memory and L2, products of cuBLASLt per dtype (burst
/// and sustained), exponentials, launches by stream, by graph node and by graph. `threads` plays no
/// part. Errors: device_error, also where there is no such device.
Result<Probe> probe_cuda(const Device& device, const ProbeOptions& options = {});
/// Noisy figures and distrust of a spec, by the rule that the probes apply.
std::vector<std::string> noisy_figures(const DeviceSpec& spec);
std::string distrust_of(const DeviceSpec& spec);

/// Times a matrix product of the library GEMM (oneDNN) on random data: C[m, n] = A[m, k] B[k, n].
/// Errors: unsupported when the library has no kernel of its own for this dtype on this machine;
/// invalid_argument for a size below 1.
Result<Timing> time_gemm(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, int threads,
                         const StopRule& rule = {});

/// What a record says about where it was made: "date" (UTC), "commit" and "compiler" of the build,
/// "cpu", "cores", "isa", "kernel" (operating system), "driver".
std::vector<std::pair<std::string, std::string>> describe_this_machine();

// ---- which wall

/// Evidence about one timed problem. A ratio of 0 means that it was not measured.
struct WallEvidence {
  Statistics seconds;         // t(W)
  Statistics seconds_double;  // t(2W): twice the independent work; n = 0 when not measured
  /// The same with more arithmetic at (nearly) constant bytes, or with FLOPs and bytes that change
  /// by factors far apart; n = 0 when not measured.
  Statistics seconds_added_flops;
  double added_flops_ratio = 0;  // modelled FLOPs of that over those of W
  double added_bytes_ratio = 0;  // modelled bytes likewise
  /// CUDA: W call after call on a stream, and in a graph; n = 0 when not measured.
  Statistics seconds_stream = {}, seconds_graph = {};
  /// Modelled work of seconds_double over that of seconds, the lesser of FLOPs and bytes.
  double double_ratio = 2;
  /// Measured rates over the device's: bytes over bandwidth, FLOPs over peak; 0: not known.
  double share_of_bandwidth = 0, share_of_peak = 0;
};

enum class MeasuredWall : std::uint8_t { compute, bandwidth, dispatch, mixed, ambiguous };
const char* to_string(MeasuredWall wall);

/// What the evidence says. Elasticity is log2(t(2W) / t(W)): below 0.3 dispatch, above 0.9
/// throughput, between them mixed. Throughput is compute when time follows the FLOPs of the other
/// run (exponent above 0.7, 0 being time that follows the bytes alone), bandwidth when it does not
/// (below 0.3). Without such a run, throughput at three quarters of one roof and less than half of
/// the other stands at that roof. An interval that reaches across a limit, or a missing
/// measurement, makes it ambiguous; `reason` says which. Where W was
/// timed on a stream and in a graph, the launches' share of the stream's time is said as well.
struct WallVerdict {
  MeasuredWall wall = MeasuredWall::ambiguous;
  double elasticity = 0, elasticity_low = 0, elasticity_high = 0;
  double flop_exponent = 0, flop_exponent_low = 0, flop_exponent_high = 0;
  double launch_share = 0;  // (stream − graph) / stream; below 0 where the graph was slower
  bool has_elasticity = false, has_flop_exponent = false, has_launch_share = false;
  std::string reason;  // one sentence
};
WallVerdict judge_wall(const WallEvidence& evidence);

/// How a measured time compares with a baseline's.
enum class Comparison : std::uint8_t { same, faster, slower, ambiguous };
const char* to_string(Comparison comparison);
/// slower: baseline median / median < threshold and the intervals of the two medians do not touch;
/// faster: the same the other way round; ambiguous: the ratio is past the threshold but the
/// intervals touch; else same.
struct MedianInterval {
  double median = 0, low = 0, high = 0;
};
Comparison compare(const MedianInterval& baseline, const MedianInterval& now, double threshold);

}  // namespace rafter
